# SPDX-License-Identifier: Apache-2.0
"""The process that renders Jinja templates, which are not trusted.

A chat template comes with a checkpoint and is a program. Jinja's immutable sandbox keeps it away
from Python's internals, and the system ends the process when a rendering has used up its CPU time
or its memory. `chat_process` starts the process and sends it templates with their variables.

The settings and extensions are those of transformers, so that the strings are the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import resource
import signal
from collections.abc import Callable, Mapping
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from paceline.chat_messages import PartsAsText
from paceline.chat_process import FAILED, MAX_CHARS, PARTS, RENDERED, STARTED

_MAX_REASON_CHARS: Final = 500
# Filters that chat templates do not need.
_OMITTED_FILTERS: Final = (
    *("filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordcount"),
    *("wordwrap", "xmlattr"),
)
# The methods of data that chat templates may call.
_METHODS: Final = {
    str: "capitalize casefold center count endswith expandtabs find format format_map index "
    "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
    "istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind "
    "rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
    "zfill",
    dict: "copy get items keys values",
    list: "copy count index",
    tuple: "count index",
    int: "bit_length",
    float: "is_integer",
}


# ---- the process ---------------------------------------------------------------------------------


def main(descriptor: int) -> NoReturn:
    """Renders templates until the other end of a connection is closed.

    Args:
        descriptor: The file descriptor of the connection.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process ends with the one that started it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _environment()
    with contextlib.suppress(EOFError, OSError):
        connection = Connection(descriptor)
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(STARTED)
            connection.send_bytes(_answer(request))
    os._exit(0)


def _answer(request: bytes) -> bytes:
    try:
        text, variables, max_cpu_s, max_memory_bytes = pickle.loads(request)
        _limit_memory(max_memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # whose signal ends the process
        try:
            return RENDERED + _render(text, variables).encode(errors="surrogatepass")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except PartsAsText:
        return PARTS
    except MemoryError:
        reason = f"exceeds a limit: it takes more than {max_memory_bytes >> 20} MiB"
    except _Refusal as error:
        reason = str(error)
    except RefusedMessages as error:
        reason = f"refuses the messages: {_line(error)}"
    except RecursionError:
        reason = "exceeds a limit: it nests too deeply"
    except Exception as error:
        reason = f"fails{_place(error)}: {type(error).__name__}: {_line(error)}"
    return FAILED + reason.encode(errors="replace")


@functools.cache
def _limit_memory(num_bytes: int) -> None:
    """Limits the memory beyond that which the process has now."""
    with contextlib.suppress(OSError):  # without /proc
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Refusal(Exception):
    """A template is not valid, or exceeds a limit."""


def _render(text: str, variables: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in _compile(text).generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise _Refusal(f"exceeds a limit: its output has more than {MAX_CHARS} characters")
            pieces.append(piece)
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's own
            raise _Refusal("exceeds a limit: it writes an integer of thousands of digits") from None
        raise
    return "".join(pieces)


@functools.lru_cache(maxsize=32)
def _compile(text: str) -> Template:
    try:
        return _environment().from_string(text)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        raise _Refusal(
            f"is not a valid template: line {error.lineno}: {_line(error.message)}"
        ) from None
    except Exception as error:
        raise _Refusal(f"is not a valid template: {_line(error)}") from None


def _line(error: object) -> str:
    """A message in one line."""
    return " ".join(str(error).split())[:_MAX_REASON_CHARS]


def _place(error: BaseException) -> str:
    """The line of the template in which an error arose."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f" in line {line}"


# ---- the sandbox ---------------------------------------------------------------------------------


def find_variables(text: str) -> set[str]:
    """Finds the names of the variables that a template reads.

    Raises:
        Exception: The template is not valid.
    """
    return meta.find_undeclared_variables(_environment().parse(text))


class RefusedMessages(TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise RefusedMessages(str(message))


def _strftime_now(format: str) -> str:
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


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is no parameter, so that a template may write namespace(self=...).
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_attribute(name)

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


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed when a template is compiled
            extensions=[_Generation, loopcontrols],
        )
        for name in _OMITTED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "cycler": Cycler,
            "joiner": Joiner,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        for kind, names in _METHODS.items():
            if isinstance(owner, kind) and __obj.__name__ not in names.split():
                raise SecurityError(
                    f"a chat template may not call {kind.__name__}.{__obj.__name__}"
                )
        return super().call(__context, __obj, *args, **kwargs)


@functools.cache
def _environment() -> _Environment:
    return _Environment()
