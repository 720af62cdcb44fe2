# SPDX-License-Identifier: Apache-2.0
"""Renders Jinja templates that are not trusted: in a sandbox, with bounded work and memory.

A chat template comes with a checkpoint and is a program. Jinja's immutable sandbox
keeps it away from Python's internals, and this file bounds what it does:

- Every block of a template pays for its nodes whenever it runs, as metered WebAssembly does.
- Every operation on data pays for the data that it reads and makes (`chat_costs`).
- Only methods, functions and filters whose cost is known may be called.

The settings and extensions are those of transformers, so that the strings are the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import Template, TemplateError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from paceline.chat_costs import (
    FILTERS,
    MAX_CHARS,
    METHODS,
    OMITTED_FILTERS,
    TESTS,
    LimitError,
    Meter,
    check_operands,
    check_strftime,
    iterate,
    listed,
    made,
    meter,
    read,
    read_arguments,
    read_field,
    read_haystack,
)

MAX_STEPS: Final = 10_000_000


def compile_template(text: str) -> Template:
    """Compiles a template.

    Raises:
        jinja2.TemplateSyntaxError: It is not valid.
        Exception: Anything else that a hostile template provokes.
    """
    return _environment().from_string(text)


def find_variables(text: str) -> set[str]:
    """Finds the names of the variables that a template reads; for errors see `compile_template`."""
    return meta.find_undeclared_variables(_environment().parse(text))


def render(template: Template, variables: Mapping[str, Any], max_steps: int = MAX_STEPS) -> str:
    """Renders a template. Several threads may render at once.

    Args:
        template: The result of `compile_template`.
        variables: What the template sees: plain data only.
        max_steps: Limit on the work.

    Returns:
        The text.

    Raises:
        LimitError: A limit is exceeded.
        Exception: Anything that the template provokes.
    """
    token = meter.set(Meter(max_steps))
    try:
        pieces: list[str] = []
        num_chars = 0
        for piece in template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise LimitError(f"its output has more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        meter.reset(token)


class RefusedMessages(TemplateError):
    """The template called `raise_exception`."""


# ---- what templates may call ---------------------------------------------------------------------


def _raise_exception(message: object) -> None:
    raise RefusedMessages(str(message))


def _strftime_now(format: str) -> str:
    check_strftime(format)
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, it does not escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is no parameter, so that a template may write namespace(self=...).
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have an attribute {name!r}: it begins with '_'")


class _Generation(Extension):
    """The tag `generation`, which marks what the model wrote; the text is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_contents")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


# ---- metering ------------------------------------------------------------------------------------

# Filters that the instrumentation inserts; a template cannot write these names. They get the
# context, which keeps Jinja from computing them when it compiles.


@pass_context
def _step(_: Context, cost: Any) -> bool:
    meter.get().charge(cost if isinstance(cost, int) and cost > 0 else 1)
    return True


@pass_context
def _read(_: Context, value: Any) -> Any:
    read(value)
    return value


@pass_context
def _made(_: Context, value: Any) -> Any:
    return made(value)


@pass_context
def _haystack(_: Context, value: Any) -> Any:
    return read_haystack(value)


@pass_context
def _finalize(_: Context, value: Any) -> Any:
    """Charges for a value that is about to be written."""
    num_chars = read(value)[1]
    if num_chars > MAX_CHARS:
        raise LimitError(f"its output has more than {MAX_CHARS} characters")
    meter.get().charge(num_chars >> 4)
    return value


class _Instrumenter(NodeTransformer):
    """Inserts the steps into a template."""

    def visit_Node(self, node: nodes.Node) -> nodes.Node:
        """Charges at the start of each list of statements for what follows in it."""
        self.generic_visit(node)
        for field in ("body", "else_"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and (statements or field == "body"):
                line = node.lineno
                step = _filter("step!", nodes.Const(_cost(statements), lineno=line), line)
                setattr(node, field, [nodes.ExprStmt(step, lineno=line), *statements])
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charges for each element that the condition sees."""
        if node.test is not None:
            step = _filter(
                "step!", nodes.Const(_cost([node.test]), lineno=node.lineno), node.lineno
            )
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return self.visit_Node(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Charges for what is compared."""
        self.generic_visit(node)
        node.expr = _filter("read!", node.expr, node.lineno)
        for operand in node.ops:
            name = "haystack!" if operand.op in ("in", "notin") else "read!"
            operand.expr = _filter(name, operand.expr, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Charges for the strings and for their concatenation."""
        self.generic_visit(node)
        node.nodes = [_filter("read!", part, node.lineno) for part in node.nodes]
        return _filter("made!", node, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charges for a slice, and for the hash of another key."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter("made!", node, node.lineno)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filter("read!", node.arg, node.lineno)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Charges for the hash of a key."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter("read!", node.key, node.lineno)
        return node


for _kind in (
    "Template",
    "If",
    "Macro",
    "CallBlock",
    "FilterBlock",
    "With",
    "Block",
    "AssignBlock",
):
    setattr(_Instrumenter, f"visit_{_kind}", _Instrumenter.visit_Node)
for _kind in ("Scope", "OverlayScope", "ScopedEvalContextModifier"):
    setattr(_Instrumenter, f"visit_{_kind}", _Instrumenter.visit_Node)


def _filter(name: str, value: nodes.Expr, line: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=line)


def _cost(statements: Iterable[nodes.Node]) -> int:
    """The nodes of statements, without those in the bodies of other statements."""
    cost = 1
    pending = list(statements)
    while pending:
        node = pending.pop()
        cost += 1
        if isinstance(node, nodes.TemplateData):
            cost += len(node.data) >> 4
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                pending.append(value)
            elif isinstance(value, list) and name not in ("body", "else_"):
                pending += [item for item in value if isinstance(item, nodes.Node)]
    return cost


def _metered(function: Callable[..., Any], guard: Callable[..., object]) -> Callable[..., Any]:
    """A filter or test that charges before it runs."""
    num_passed = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter.get().charge(1)
        args = args[:num_passed] + tuple(listed(value) for value in args[num_passed:])
        guard(*args[num_passed:], **kwargs)
        return made(function(*args, **kwargs))

    return metered


class _Formatter(SandboxedFormatter):
    """`str.format`."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        read_field(value, format_spec)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        read_field(value, "")
        return super().convert_field(value, conversion)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed when a template is compiled
            finalize=_finalize,
            extensions=[_Generation, loopcontrols],
        )
        for name in OMITTED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        tables: Any = ((self.filters, FILTERS), (self.tests, TESTS))
        for functions, guards in tables:
            for name, function in functions.items():
                functions[name] = _metered(function, guards.get(name, read_arguments))
        self.filters |= {"step!": _step, "read!": _read, "made!": _made, "haystack!": _haystack}
        self.globals = {
            "range": self.globals["range"],
            "dict": _Dict(),
            "cycler": Cycler,
            "joiner": Joiner,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = (*self.globals.values(),)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrumenter().visit(source), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return _BoundFormat(self, value.__self__, is_map=value.__name__ == "format_map")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter.get().charge(1 + len(args) + len(kwargs))
        args = tuple(listed(value) for value in args)
        __self._guard(__obj, args, kwargs)
        return made(super().call(__context, __obj, *args, **kwargs))

    def _guard(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Charges for a call, or refuses it."""
        owner = getattr(function, "__self__", None)
        if isinstance(function, Macro | BlockReference | LoopContext | Joiner | Undefined):
            return
        if any(function is allowed for allowed in self._functions):
            read_arguments(*args, **kwargs)
            return
        if isinstance(owner, _Dict):
            iterate(*args, **_named(kwargs))
            return
        if isinstance(function, _BoundFormat) or not callable(function):
            return
        if isinstance(owner, Cycler | LoopContext | _Generation):
            read_arguments(*args, **kwargs)
            return
        name = getattr(function, "__name__", type(function).__name__)
        for kind, guards in METHODS.items():
            if isinstance(owner, kind) and name in guards:
                guards[name](owner, *args, **_named(kwargs))
                return
        place = "" if owner is None else f"{type(owner).__name__}."
        raise SecurityError(f"a chat template may not call {place}{name}")


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without the compiler's own."""
    return {name: value for name, value in kwargs.items() if not name.startswith("_")}


class _BoundFormat:
    """The method `format` or `format_map` of a string."""

    def __init__(self, environment: _Environment, text: str, *, is_map: bool) -> None:
        self._formatter = _Formatter(environment)
        self._text = text
        self._is_map = is_map

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        iterate(self._text)
        if self._is_map:
            (kwargs,) = args
            args = ()
        return self._formatter.vformat(self._text, args, kwargs)


@functools.cache
def _environment() -> _Environment:
    return _Environment()
