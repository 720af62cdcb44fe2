# SPDX-License-Identifier: Apache-2.0
"""What the operations of a chat template cost, and which of them are refused before they run.

One step is about a node of the template, an element of a container, 64 characters read or 16 made.
A function here either charges for an operation or checks that its result is not too large.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from jinja2.utils import Namespace

# Characters of a string that a template makes, and elements of a list.
MAX_CHARS: Final = 8 << 20
# Bits of an integer.
MAX_BITS: Final = 4096
# Characters of a format string, and of a field in it.
_MAX_FORMAT_CHARS: Final = 16 << 10
_MAX_FIELD_WIDTH: Final = 10_000
_MAX_STRFTIME_CHARS: Final = 256
_MAX_JSON_INDENT: Final = 16
_MAX_PRECISION: Final = 100

_CONTAINERS: Final = (list, tuple, dict, set, frozenset, range, KeysView, ValuesView, ItemsView)
_SCALARS: Final = (bool, float, type(None))
_LAZY: Final[tuple[type, ...]] = (types.GeneratorType, reversed, type(reversed([])))


class LimitError(Exception):
    """A template exceeds a limit. Not a subclass of what Jinja's filters catch."""


class Meter:
    """The steps that are left of one rendering."""

    __slots__ = ("_left", "_max_steps")

    def __init__(self, max_steps: int) -> None:
        """Starts with all steps."""
        self._max_steps = max_steps
        self._left = max_steps

    def charge(self, num_steps: int) -> None:
        """Takes steps; LimitError if there are not enough."""
        self._left -= num_steps
        if self._left < 0:
            raise LimitError(f"it takes more than {self._max_steps} steps")


meter: Final[ContextVar[Meter]] = ContextVar("meter")


def _refuse(what: str) -> NoReturn:
    raise LimitError(what)


# ---- reading and making values -----------------------------------------------------------------


def _elements(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, ItemsView):
        return [part for pair in value for part in pair]
    if isinstance(value, set | frozenset | range | KeysView | ValuesView):
        return list(value)
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return []


def read(value: Any) -> tuple[int, int, int]:
    """Charges for reading a value as deep as it goes, before it is read.

    A small template can build a list that contains another one twice, which contains another one
    twice, and so on, so the elements are counted as often as they would be read.

    Returns:
        The number of values in it, of their characters, and of levels.
    """
    charge = meter.get().charge
    if isinstance(value, str):
        charge(len(value) >> 6)
        return 1, len(value), 1
    if isinstance(value, _SCALARS):
        return 1, 24, 1
    num_values = num_chars = num_levels = 0
    level = [value]
    while level:
        charge(len(level))
        num_values += len(level)
        num_levels += 1
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                num_chars += len(item)
                charge(len(item) >> 6)
            elif isinstance(item, int):
                num_chars += 8 + (item.bit_length() >> 1)
            elif isinstance(item, float):
                num_chars += 24
            else:
                num_chars += 8
                elements = _elements(item)
                charge(len(elements))
                below += elements
        level = below
    return num_values, num_chars, num_levels


def read_arguments(*args: Any, **kwargs: Any) -> None:
    """Charges for reading all arguments of a call."""
    for value in args:
        read(value)
    for key, value in kwargs.items():
        if not key.startswith("_"):  # the compiler's own
            read(value)


def read_shallow(*args: Any, **_: Any) -> None:
    """Charges for operations that look at the elements of their arguments but not deeper."""
    charge = meter.get().charge
    for value in args:
        if isinstance(value, str):
            charge(len(value) >> 6)
        elif isinstance(value, _CONTAINERS):
            charge(len(value))


def iterate(value: Any, *args: Any, **kwargs: Any) -> None:
    """Charges for a loop over the elements of a value, characters of a string included."""
    if isinstance(value, str):
        meter.get().charge(len(value))
    read_shallow(value)
    read_arguments(*args, **kwargs)


def read_haystack(value: Any) -> Any:
    """Charges for searching a value: the right side of `in`."""
    if isinstance(value, str):
        num_chars = len(value)
        # Short strings are searched by a method whose worst case is quadratic.
        meter.get().charge(num_chars >> 2 if num_chars < 30_000 else 7_500 + (num_chars >> 5))
    elif not isinstance(value, dict):
        read(value)
    return value


def made(value: Any) -> Any:
    """Charges for a value that an operation has made, and checks its size."""
    if isinstance(value, str):
        _check_size(len(value))
        meter.get().charge(len(value) >> 4)
    elif isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            _refuse(f"it computes an integer of more than {MAX_BITS} bits")
    elif isinstance(value, _CONTAINERS):
        _check_size(len(value))
        meter.get().charge(len(value))
    elif isinstance(value, types.GeneratorType):
        return _counted(value)
    return value


def _counted(values: Any) -> Any:
    for value in values:
        meter.get().charge(1)
        yield value


def listed(value: Any) -> Any:
    """Makes a list of what a lazy filter returns, so that its cost is known."""
    if isinstance(value, _LAZY):
        lazy: Any = value
        return made(list(lazy))
    return value


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        _refuse(f"it makes a string or list of more than {MAX_CHARS} characters or elements")


def _integer(value: Any) -> int:
    """A size that a template gives; what is not an integer fails later, or is small."""
    return value if isinstance(value, int) else 0


# ---- operators -----------------------------------------------------------------------------------


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuses an arithmetic operation whose result would be too large."""
    if operator == "*":
        _check_product(left, right)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            _check_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str):
        check_format(left, right)


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            _check_size(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS + 1:
        _refuse(f"it computes an integer of more than {MAX_BITS} bits")


_FIELD: Final = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


def check_format(text: Any, *args: Any, **kwargs: Any) -> None:
    """Checks the fields of `text % args`."""
    if not isinstance(text, str):
        return
    if len(text) > _MAX_FORMAT_CHARS:
        _refuse(f"it formats with a string of more than {_MAX_FORMAT_CHARS} characters")
    num_chars = sum(read(value)[1] for value in (*args, *kwargs.values()))
    num_fields = 0
    for field in _FIELD.finditer(text):
        num_fields += 1
        for width in field.groups():
            if width is not None and (width == "*" or int(width[:9]) > _MAX_FIELD_WIDTH):
                _refuse(f"it formats with a width that is not a number up to {_MAX_FIELD_WIDTH}")
            num_chars += _MAX_FIELD_WIDTH if width is not None else 0
    _check_size(num_fields * num_chars)


def read_field(value: Any, spec: str) -> None:
    """Checks a field of `str.format`."""
    for width in re.findall(r"\d+", spec[:_MAX_FORMAT_CHARS]):
        if int(width[:9]) > _MAX_FIELD_WIDTH:
            _refuse(f"it formats with a width of more than {_MAX_FIELD_WIDTH}")
    num_chars = read(value)[1]
    _check_size(num_chars)
    meter.get().charge(8 + (num_chars >> 4))


def check_strftime(text: Any) -> None:
    """Checks a format of `strftime_now`, whose result can be 256 times as long."""
    meter.get().charge(32)
    if isinstance(text, str) and len(text) > _MAX_STRFTIME_CHARS:
        _refuse(f"it calls strftime_now with more than {_MAX_STRFTIME_CHARS} characters")


# ---- functions, filters and methods --------------------------------------------------------------


def check_tojson(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    """Checks the size of JSON."""
    width = len(indent) if isinstance(indent, str) else _integer(indent)
    if width > _MAX_JSON_INDENT:
        _refuse(f"it calls tojson with an indent of more than {_MAX_JSON_INDENT}")
    read(separators)
    gap = sum(len(part) for part in separators or () if isinstance(part, str))
    num_values, num_chars, num_levels = read(value)
    # A level of brackets and the line of each value; escapes make one character up to six.
    _check_size((num_values * (2 + gap + width * num_levels) + num_chars) // 4)


def _join(value: Any, separator: Any = "", *args: Any, **kwargs: Any) -> None:
    num_values, num_chars, _levels = read(value)
    if isinstance(value, str):
        num_values = len(value)
    elif not isinstance(value, _CONTAINERS) and isinstance(value, Iterable):
        num_values = MAX_CHARS  # unknown
    gap = read(kwargs.get("d", separator))[1]
    _check_size(num_chars + num_values * gap)


def _replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    read_arguments(text, old, new)
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        read_haystack(text)
        _check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _pad(text: Any, width: Any = 80, *_: Any) -> None:
    read(text)
    _check_size(_integer(width))


def _indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    num_chars = read(text)[1]
    size = len(width) if isinstance(width, str) else _integer(width)
    num_lines = text.count("\n") + 1 if isinstance(text, str) else 1
    meter.get().charge(num_lines)
    _check_size(num_chars + (num_lines + 1) * max(size, 0))


def _batch(value: Any, size: Any, *_: Any, **__: Any) -> None:
    iterate(value)
    _check_size(_integer(size))
    meter.get().charge(max(_integer(size), 0))


def _sort(value: Any, *args: Any, **kwargs: Any) -> None:
    num_values, num_chars, _levels = read(value)
    iterate(value, *args, **kwargs)
    meter.get().charge((num_values + (num_chars >> 6)) * num_values.bit_length())


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    num_values = read(value)[0]
    iterate(value)
    # Lists are added one by one, and each sum is a new list.
    if not isinstance(start, int | float):
        meter.get().charge(num_values * num_values)


def _round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if abs(_integer(precision)) > _MAX_PRECISION:
        _refuse(f"it rounds to more than {_MAX_PRECISION} digits")


def _search(text: Any, *args: Any, **kwargs: Any) -> None:
    read_arguments(*args, **kwargs)
    read_haystack(text)


def _search_backwards(text: str, *args: Any, **kwargs: Any) -> None:
    """The worst case of a search from the end is the product of the lengths."""
    _search(text, *args, **kwargs)
    pattern = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), "")
    meter.get().charge(len(text) * len(pattern) >> 9)


_strip = _search_backwards  # each character is looked up among those to remove


def _join_method(separator: str, values: Any = ()) -> None:
    _join(values, separator)


def _replace_method(text: str, old: Any, new: Any, *_: Any) -> None:
    _replace(text, old, new)


def _expandtabs(text: str, tabsize: Any = 8) -> None:
    _check_size(len(text) + text.count("\t") * max(_integer(tabsize), 0))


Guard = Callable[..., object]


def _free(*_: Any, **__: Any) -> None:
    """Operations whose time does not depend on the size of their arguments."""


def _each(names: str, guard: Guard) -> dict[str, Guard]:
    return dict.fromkeys(names.split(), guard)


_PLAIN_METHODS: Final = (
    "capitalize casefold endswith isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper lower removeprefix removesuffix splitlines "
    "startswith swapcase title upper"
)

METHODS: Final[dict[type, dict[str, Guard]]] = {
    str: {
        **_each(_PLAIN_METHODS, read_arguments),
        **_each("count find index partition split", _search),
        **_each("rfind rindex rpartition rsplit", _search_backwards),
        **_each("strip lstrip rstrip", _strip),
        **_each("center ljust rjust zfill", _pad),
        "replace": _replace_method,
        "join": _join_method,
        "expandtabs": _expandtabs,
    },
    dict: _each("copy get items keys values", read_shallow),
    list: {"copy": read_shallow, "count": read_arguments, "index": read_arguments},
    tuple: {"count": read_arguments, "index": read_arguments},
    int: {"bit_length": read_arguments},
    float: {"is_integer": read_arguments},
}

# Filters that chat templates do not need: their cost is hard to bound, or their result is random.
OMITTED_FILTERS: Final = (
    "filesizeformat",
    "pprint",
    "random",
    "striptags",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
)

# Filters that read their arguments deeply cost `read_arguments`, unless they are here.
FILTERS: Final[dict[str, Guard]] = {
    **_each("abs attr count d default first last length", _free),
    **_each("float int items list reverse", read_shallow),
    **_each("map reject rejectattr select selectattr slice title", iterate),
    **_each("dictsort groupby max min sort unique", _sort),
    "batch": _batch,
    "center": _pad,
    "format": check_format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": check_tojson,
}

TESTS: Final[dict[str, Guard]] = {
    **_each(
        "boolean callable defined divisibleby even false filter float integer iterable mapping "
        "none number odd sameas sequence string test true undefined",
        _free,
    ),
    "in": lambda value, container: (read(value), read_haystack(container)),
}
