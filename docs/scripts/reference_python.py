# SPDX-License-Identifier: Apache-2.0
"""Reads the reference of Python's names from the sources, and the engine's options from their
schema."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docstring_sections import parse_docstring, parse_items, sections_of
from paceline.option_schema import ARGUMENTS, KEYS, Option
from reference_markdown import Entry, Group, Item, Page, Section

PYTHON: Final = Path(__file__).resolve().parents[2] / "python"

_MAX_LINE: Final = 88

# What __all__ has, by what a reader does with it.
GROUPS: Final = {
    "Engines": ("LLM", "AsyncLLM", "RequestStream", "EngineConfig", "SpeculativeConfig"),
    "Requests": (
        "SamplingParams",
        "StructuredOutputsParams",
        "Prompt",
        "TextPrompt",
        "TokensPrompt",
        "Tokenizer",
    ),
    "Results": ("RequestOutput", "CompletionOutput", "StreamChunk", "Logprob", "RequestMetrics"),
    "Errors": (
        "RequestError",
        "BusyError",
        "ModelFileError",
        "ModelNotFoundError",
        "OutOfMemoryError",
        "DeviceError",
        "InternalError",
    ),
    "The package": ("__version__",),
}

# Classes whose fields options.toml describes.
_SCHEMAS: Final = {"EngineConfig": ARGUMENTS, "SpeculativeConfig": KEYS}

# Classes whose constructor is not for users.
_MADE_BY_LLM: Final = ("RequestStream", "Tokenizer")

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Module:
    """A source file of the package.

    Attributes:
        name: Its dotted name.
        lines: Its lines.
        nodes: What it declares, by name.
        imports: The module and the name there of what it imports from the package, by name.
    """

    name: str
    lines: list[str]
    nodes: dict[str, Node]
    imports: dict[str, tuple[str, str]]


@functools.cache
def read_module(name: str) -> Module:
    """Reads a module; a stub in place of a compiled one."""
    base = PYTHON / name.replace(".", "/")
    candidates = (base / "__init__.py", base.with_suffix(".py"), base.with_suffix(".pyi"))
    path = next(one for one in candidates if one.exists())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    text = path.read_text()
    nodes: dict[str, Node] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in _statements(ast.parse(text).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            nodes[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            nodes[node.target.id] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            nodes[node.targets[0].id] = node
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = package.split(".")
                module = ".".join([*parents[: len(parents) - node.level + 1], module]).rstrip(".")
            if module.split(".")[0] == "paceline":
                for alias in node.names:
                    imports[alias.asname or alias.name] = (module, alias.name)
    return Module(name, text.splitlines(), nodes, imports)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Lists statements, those under `if TYPE_CHECKING` too."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements(node.body)
        else:
            yield node


def public_names(module: str) -> list[str]:
    """Returns `__all__` of a module."""
    node = read_module(module).nodes["__all__"]
    assert node.value is not None
    return list(ast.literal_eval(node.value))


def find(module: str, name: str) -> tuple[Module, Node] | None:
    """Finds the declaration of a name, where a module may import it from another one."""
    try:
        read = read_module(module)
    except StopIteration:
        return None
    if name in read.nodes:
        return read, read.nodes[name]
    return find(*read.imports[name]) if name in read.imports else None


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str, str]]:
    """Lists the arguments with types and defaults; "/" and "*" stand for themselves."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if number > 0 or argument.arg not in ("self", "cls"):
            yield argument.arg, _source(argument.annotation), _source(default)
        if number + 1 == len(arguments.posonlyargs):
            yield "/", "", ""
    if arguments.vararg is not None:
        yield f"*{arguments.vararg.arg}", _source(arguments.vararg.annotation), ""
    elif arguments.kwonlyargs:
        yield "*", "", ""
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, _source(argument.annotation), _source(value)
    # `**unknown` is there for the message of a TypeError.
    if arguments.kwarg is not None and _source(arguments.kwarg.annotation) != "Never":
        yield f"**{arguments.kwarg.arg}", _source(arguments.kwarg.annotation), ""


def _source(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def signature(
    name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, *, has_types: bool
) -> str:
    """Writes the call of a function, an argument a line if it is long."""
    parts = []
    for argument, type_, default in _arguments(function):
        typed = f"{argument}: {type_}" if has_types and type_ else argument
        equals = " = " if has_types and type_ else "="
        parts.append(f"{typed}{equals}{default}" if default else typed)
    result = _source(function.returns)
    arrow = "" if result in ("", "None") or function.name == "__init__" else f" -> {result}"
    prefix = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{name}({', '.join(parts)}){arrow}"
    if len(line) <= _MAX_LINE:
        return line
    return f"{prefix}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {_source(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}


def _with_options(item: Item) -> list[Item]:
    """Puts the options of an engine in the place of the `**engine` that stands for them."""
    if item.names != ["**engine"] or not item.text.startswith("options.toml"):
        return [item]
    return _items(ARGUMENTS)


def _items(options: Mapping[str, Option]) -> list[Item]:
    return [
        Item([one.name], one.described, one.type or "", repr(one.default).replace("'", '"'))
        for one in options.values()
    ]


def function_entry(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Entry:
    """Makes the entry of a function or a method."""
    sections = sections_of(ast.get_docstring(function))
    arguments = {name.lstrip("*"): facts for name, *facts in _arguments(function)}
    has_arguments = False
    for section in sections:
        if section.title == "Arguments":
            has_arguments = True
            for item in section.items:
                type_, default = arguments.get(item.names[0].lstrip("*"), ("", ""))
                item.type, item.default = type_, default
            section.items = [one for item in section.items for one in _with_options(item)]
    shown = name.removesuffix(".__call__")
    code = signature(shown, function, has_types=not has_arguments)
    return Entry([name], code, "python", sections)


def _bases(module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Lists a class and its bases in the package, in the order in which names are looked up."""
    yield module, node
    for base in node.bases:
        name = _source(base).partition("[")[0]
        found = find(module.name, name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield from _bases(found[0], found[1])


def class_entry(name: str, module: Module, node: ast.ClassDef) -> Entry:
    """Makes the entry of a class, with the public members of its bases in the package."""
    fields: dict[str, tuple[str, str]] = {}
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    attributes: dict[str, Item] = {}
    for _, one in _bases(module, node):
        for member in _statements(one.body):
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                fields.setdefault(
                    member.target.id, (_source(member.annotation), _source(member.value))
                )
            elif isinstance(
                member, ast.FunctionDef | ast.AsyncFunctionDef
            ) and "overload" not in _decorators(member):
                functions.setdefault(member.name, member)
        text = parse_docstring(ast.get_docstring(one)).get("Attributes", "")
        for item in parse_items(text):
            attributes.setdefault(item.names[0], item)

    attributes |= {item.names[0]: item for item in _items(_SCHEMAS.get(name, {}))}
    init = functions.pop("__init__", None)
    if name in _MADE_BY_LLM:
        init = None
    defaults = {}
    if init is not None and "dataclass" in _decorators(node):
        defaults = {one: default for one, _, default in _arguments(init)}
    methods = []
    for member_name, function in functions.items():
        if "property" in _decorators(function):
            parts = parse_docstring(ast.get_docstring(function))
            if not member_name.startswith("_"):
                item = Item([member_name], parts[""], _source(function.returns))
                attributes.setdefault(member_name, item)
        elif ast.get_docstring(function) and _is_public(member_name):
            methods.append(function_entry(f"{name}.{member_name}", function))
    for item in attributes.values():
        type_, default = fields.get(item.names[0], ("", ""))
        type_ = re.sub(r"^Final\[(.*)\]$", r"\1", type_) or item.type
        default = defaults.get(item.names[0], default)
        item.type, item.has_anchor = type_, True
        item.default = re.sub(r".*default_factory=(\w+)\)", r"\1()", default)

    sections = [
        section
        for section in sections_of(ast.get_docstring(node))
        if section.title not in ("Attributes", "Raises")
    ]
    raised = [part for part in sections_of(ast.get_docstring(node)) if part.title == "Raises"]
    code = _class_code(name, node, fields, init)
    if init is not None:
        made = function_entry(name, init)
        code = made.code
        sections += [part for part in made.sections if "see the class" not in part.text]
    if attributes:
        sections.append(Section("Attributes", items=list(attributes.values())))
    return Entry([name], code, "python", sections + raised, methods)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__call__", "__next__")


def _class_code(
    name: str,
    node: ast.ClassDef,
    fields: dict[str, tuple[str, str]],
    init: ast.FunctionDef | ast.AsyncFunctionDef | None,
) -> str:
    """Writes the declaration of a class without a constructor of its own."""
    if init is not None:
        return ""
    bases = ", ".join(map(_source, node.bases))
    head = f"class {name}({bases})" if bases else f"class {name}"
    if "TypedDict" in bases or "Protocol" in bases:
        return f"{head}:\n" + "\n".join(f"    {one}: {type_}" for one, (type_, _) in fields.items())
    if "dataclass" in _decorators(node):
        shown = [f"{one}={value}" if value else one for one, (_, value) in fields.items()]
        shown = [re.sub(r"=.*default_factory=(\w+)\)", r"=\1()", one) for one in shown]
        star = "*, " if any("kw_only=True" in _source(one) for one in node.decorator_list) else ""
        line = f"{name}({star}{', '.join(shown)})"
        if len(line) <= _MAX_LINE:
            return line
        rows = "".join(f"    {one},\n" for one in ([star.rstrip(", ")] if star else []) + shown)
        return f"{name}(\n{rows})"
    return head


def value_entry(name: str, module: Module, node: ast.Assign | ast.AnnAssign) -> Entry:
    """Makes the entry of a constant or a type, which the comment before it describes."""
    text: list[str] = []
    number = node.lineno - 2
    while module.lines[number].strip().startswith("#"):
        text.insert(0, module.lines[number].strip().lstrip("#:").strip())
        number -= 1
    code = ast.unparse(node)
    if code.count("\n") or len(code) > _MAX_LINE or isinstance(node, ast.AnnAssign):
        kind = f": {_source(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
        code = f"{name}{kind}"
    return Entry([name], code, "python", [Section(text="\n".join(text))])


def entry(module: str, name: str, shown: str) -> Entry:
    """Makes the entry of a public name.

    Args:
        module: The module that exports it.
        name: Its name there.
        shown: How the page calls it.

    Raises:
        KeyError: There is no such name.
    """
    found = find(module, name)
    if found is None:
        raise KeyError(f"{module} has no {name}")
    where, node = found
    if isinstance(node, ast.ClassDef):
        return class_entry(shown, where, node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return function_entry(shown, node)
    return value_entry(shown, where, node)


def _group(title: str, module: str) -> Group:
    text = parse_docstring(ast.get_docstring(_tree(module)))[""]
    names = public_names(module)
    return Group(title, text, [entry(module, name, f"{module}.{name}") for name in names])


def _tree(module: str) -> ast.Module:
    return ast.parse("\n".join(read_module(module).lines))


def pages() -> list[Page]:
    """Makes the pages of Python's names.

    Raises:
        ValueError: A public name is in no group.
    """
    names = public_names("paceline")
    missing = set(names).symmetric_difference(name for group in GROUPS.values() for name in group)
    if missing:
        raise ValueError(f"GROUPS of reference_python.py and paceline.__all__ differ: {missing}")
    groups = [
        Group(title, "", [entry("paceline", name, name) for name in group])
        for title, group in GROUPS.items()
    ]
    main = Page(
        "reference-python.md",
        "python",
        "Python reference",
        "All names of the package `paceline`. [The Python API](python-api.md) introduces them with "
        "examples, and [other modules](reference-modules.md) have what few programs need. This "
        "page is made from the docstrings.",
        groups,
    )
    modules = Page(
        "reference-modules.md",
        "python",
        "Python reference: other modules",
        "`paceline.loader` reads checkpoints without starting an engine ([loading](loading.md)). "
        "`paceline.receipts` verifies receipts ([receipts](receipts.md)). `paceline.ray` is the "
        "Ray Serve application ([replicas](replicas.md#ray-serve)). This page is made from the "
        "docstrings.",
        [_group(name, name) for name in ("paceline.loader", "paceline.receipts", "paceline.ray")],
    )
    return [main, modules]
