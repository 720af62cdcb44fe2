# SPDX-License-Identifier: Apache-2.0
"""From `StructuredOutputsParams` to a grammar as llguidance writes it, and checks before that."""

from __future__ import annotations

import decimal
import json
import re
from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from paceline.checks import shorten, wrong_value
from paceline.structured_outputs import StructuredOutputsParams

#: Levels of a JSON schema.
MAX_SCHEMA_DEPTH: Final = 64
#: Values of an `enum`.
MAX_ENUM: Final = 10_000
#: `multipleOf` without its decimal point and the zeros at its end. An automaton of remainders has
#: up to so many states.
MAX_MULTIPLE_OF: Final = 100_000
#: A number in `{m,n}` of a regular expression, and minItems and the like of a schema.
MAX_COUNT: Final = 2**31 - 1
#: The length of the shortest text that a regular expression matches.
MAX_SHORTEST: Final = 100_000

# What a schema counts, with "min" and "max" before it.
_COUNTED: Final = ("Length", "Items", "Properties", "Contains")
_COUNTS: Final = tuple(f"{bound}{what}" for what in _COUNTED for bound in ("min", "max"))
# Each pair of bounds: a lower one above the upper one leaves no value.
_RANGES: Final = (
    *((f"min{what}", f"max{what}") for what in _COUNTED if what != "Contains"),
    ("minimum", "maximum"),
)
# Values of these keys are data and no schemas.
_DATA: Final = ("const", "default", "enum", "example", "examples")
# Values of these keys have a schema for each name, and the names may be any text.
_NAMED: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# What has a meaning in regular expressions.
_SYNTAX: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
# The first rule of a grammar in Lark, with a mark.
_LARK_START: Final = re.compile(r"^[ \t]*[?!]{1,2}start[ \t]*:", re.MULTILINE)
# Strings, comments and regular expressions of Lark.
_LARK_TOKEN: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?!/)(?:\\.|[^/\\\n])+/', re.DOTALL
)
# JSON Schema and vLLM mean by \d, \w and \b what ECMA-262 means: only ASCII.
_ASCII: Final = "dw"


def check_params(params: StructuredOutputsParams) -> None:
    """Refuses numbers that no output needs and that would take long to compile.

    Raises:
        ValueError: Names the field, its value and what is allowed.
    """
    if params.json is not None:
        _check_schema(json.loads(params.json))
    for name in ("regex", "whitespace_pattern"):
        regex = getattr(params, name)
        if regex is not None:
            _check_regex(name, regex)


def grammar_text(params: StructuredOutputsParams) -> str:
    """Writes a grammar as llguidance reads it.

    Raises:
        ValueError: It cannot be converted.
        RecursionError: It is nested too deeply.
    """
    import llguidance

    matcher: Any = llguidance.LLMatcher
    if params.regex is not None:
        return str(matcher.grammar_from_regex(llguidance.regex_to_lark(params.regex, _ASCII)))
    if params.choice is not None:
        # Not llguidance's own grammar of choices, which has an item for each of them.
        choices = dict.fromkeys(_SYNTAX.sub(r"\\\g<0>", choice) for choice in params.choice)
        return str(matcher.grammar_from_regex("|".join(choices)))
    if params.grammar is not None:
        # llguidance takes a text for GBNF if its rule `start` has a mark of Lark's.
        is_lark = _LARK_START.search(params.grammar) is not None
        lark = str(llguidance.grammar_from("lark" if is_lark else "grammar", params.grammar))
        return _LARK_TOKEN.sub(_ascii_token, lark)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    schema = '{"type": "object"}' if params.json is None else params.json
    return str(matcher.grammar_from_json_schema(schema, overrides=options))


def _ascii_token(token: re.Match[str]) -> str:
    import llguidance

    text = token[0]
    if not text.startswith("/") or text.startswith("//"):
        return text
    return f"/{llguidance.regex_to_lark(text[1:-1], _ASCII)}/"


# ---- JSON schemas --------------------------------------------------------------------------------


def _check_schema(root: Any) -> None:
    level: list[tuple[str, Any]] = [("json", root)]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, schema in level:
            if isinstance(schema, dict):
                _check_keywords(path, schema)
            below += _parts(path, schema)
        if not below:
            return
        level = below
    raise ValueError(
        f"json is nested in more than {MAX_SCHEMA_DEPTH} levels of schemas; allowed: at most "
        f"{MAX_SCHEMA_DEPTH} levels. Name parts of it in $defs, and refer to them"
    )


def _parts(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, or in a list of schemas."""
    if isinstance(schema, list):
        for index, part in enumerate(schema):
            yield f"{path}[{index}]", part
    elif isinstance(schema, dict):
        for key, part in schema.items():
            if key in _NAMED and isinstance(part, dict):
                for name, named in part.items():
                    yield f"{path}.{key}.{name}", named
            elif key not in _DATA and isinstance(part, dict | list):
                yield f"{path}.{key}", part


def _check_keywords(path: str, schema: dict[str, Any]) -> None:
    multiple = schema.get("multipleOf")
    if _is_number(multiple):
        digits = decimal.Decimal(repr(multiple)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > MAX_MULTIPLE_OF:
            raise ValueError(
                f"{path}.multipleOf is {shorten(multiple)}; allowed: at most {MAX_MULTIPLE_OF}, "
                "not counting the decimal point and the zeros at the end. Use a rounder number, or "
                "leave it out and check the value of the output"
            )
    for key in _COUNTS:
        count = schema.get(key)
        if _is_number(count) and not 0 <= count <= MAX_COUNT:
            raise wrong_value(
                f"{path}.{key}", count, f"0 to {MAX_COUNT}; leave it out where there is no limit"
            )
    for low, high in _RANGES:
        least, most = schema.get(low), schema.get(high)
        if _is_number(least) and _is_number(most) and least > most:
            raise ValueError(
                f"{path}.{low} is {shorten(least)} and {path}.{high} is {shorten(most)}, so no "
                f"value is allowed; allowed: a {low} up to {high}"
            )
    values = schema.get("enum")
    if isinstance(values, list) and len(values) > MAX_ENUM:
        raise ValueError(
            f"{path}.enum has {len(values)} values; allowed: at most {MAX_ENUM}. Use a pattern, or "
            "structured_outputs with choice"
        )
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        _check_regex(f"{path}.pattern", pattern)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- regular expressions -------------------------------------------------------------------------

# An escape, a repetition, the beginning of a group, or one character. Each alternative reads a
# bounded text, or one that no later match reads again, so that the whole takes linear time.
_REGEX_TOKEN: Final = re.compile(
    r"\\[pPxuU]\{[^}]{0,64}\}|\\."
    r"|\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\}"
    r"|\((?:\?(?:[a-zA-Z-]*:|P?<\w+>))?"
    r"|.",
    re.DOTALL,
)


def _check_regex(name: str, regex: str) -> None:
    """Checks the numbers of a regular expression, and the length of its shortest text.

    That length is what nested repetitions multiply: all of it may be forced, character by
    character. Anchors count as characters.
    """
    # For each open group: the shortest of its alternatives before the open one, and the length of
    # that one. `last` is the length of the last part, which a repetition multiplies.
    groups: list[tuple[int | None, int]] = []
    best: int | None = None
    length = last = 0
    class_depth = 0
    was_repeated = False
    for token in _REGEX_TOKEN.finditer(regex):
        text = token[0]
        is_lazy, was_repeated = was_repeated, False
        if text == "[":
            class_depth += 1
            if class_depth == 1:
                length, last = length + last, 1
        elif class_depth:
            class_depth -= text == "]"
        elif token["least"] is not None:
            _check_repetition(name, token)
            last *= int(token["least"])
            was_repeated = True
        elif text == "?" and is_lazy:
            pass
        elif text in ("*", "?", "+"):
            last = last if text == "+" else 0
            was_repeated = True
        elif text[0] == "(":
            groups.append((best, length + last))
            best, length, last = None, 0, 0
        elif text == "|":
            best, length, last = _shorter(best, length + last), 0, 0
        elif text == ")" and groups:
            inner = _shorter(best, length + last)
            best, length = groups.pop()
            last = inner
        else:
            length, last = length + last, 1
    shortest = _shorter(best, length + last)
    if shortest > MAX_SHORTEST:
        raise ValueError(
            f"{name} matches only texts of at least {shortest} characters; allowed: at most "
            f"{MAX_SHORTEST}. Write smaller repetitions, such as {{1,100}} instead of {{100}}"
        )


def _check_repetition(name: str, token: re.Match[str]) -> None:
    for number in (token["least"], token["most"]):
        if number and (len(number) > 10 or int(number) > MAX_COUNT):
            raise ValueError(
                f"{name} has the repetition {shorten(token[0])}; allowed: numbers up to "
                f"{MAX_COUNT}. Write {{m,}} or * where there is no limit"
            )


def _shorter(best: int | None, length: int) -> int:
    return length if best is None else min(best, length)
