# SPDX-License-Identifier: Apache-2.0
"""`StructuredOutputsParams`: what an output must look like. docs/structured-output.md has more."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Mapping, Sequence
from typing import Any, Final, Never

from paceline.checks import check_bool, check_text, check_unknown, parse_json, quoted, shorten

#: Largest number of characters of a schema, a regular expression, a grammar or all choices.
MAX_GRAMMAR_CHARS: Final = 64 << 10

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")


@dataclasses.dataclass(init=False, unsafe_hash=True)
class StructuredOutputsParams:
    """The form of an output, with vLLM's names and meanings. Exactly one kind is given.

    Attributes:
        json: A JSON schema, as a dict or as JSON text; stored as text. The output is a JSON value
            that the schema allows.
        regex: A regular expression in the syntax of Rust's `regex`, which the whole output matches.
        choice: Strings; the output is one of them.
        grammar: A grammar in the syntax of Lark, or in EBNF as llama.cpp writes it ("root ::=").
        json_object: True = the output is any JSON object.
        disable_any_whitespace: For JSON: no whitespace between tokens of the syntax.
        whitespace_pattern: For JSON: a regular expression for that whitespace. None = any.

    Raises:
        ValueError: A value is not allowed, or not exactly one kind is given.
        TypeError: A parameter does not exist.
    """

    json: Final[str | None]
    regex: Final[str | None]
    choice: Final[tuple[str, ...] | None]
    grammar: Final[str | None]
    json_object: Final[bool]
    disable_any_whitespace: Final[bool]
    whitespace_pattern: Final[str | None]

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_any_whitespace: bool = False,
        whitespace_pattern: str | None = None,
        **unknown: Never,
    ) -> None:
        """Checks and stores the parameters; see the class."""
        check_unknown("StructuredOutputsParams", StructuredOutputsParams.__init__, unknown)
        values: dict[str, Any] = {
            "json": None if json is None else _schema_text(json),
            "regex": None if regex is None else _text("regex", regex),
            "choice": None if choice is None else _choices(choice),
            "grammar": None if grammar is None else _text("grammar", grammar),
            "json_object": json_object is not None and check_bool("json_object", json_object),
        }
        given = [name for name in KINDS if values[name] is not None and values[name] is not False]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {quoted(given) if given else 'no kind'}; allowed: exactly "
                f"one of {quoted(KINDS)}"
            )
        values["disable_any_whitespace"] = check_bool(
            "disable_any_whitespace", disable_any_whitespace
        )
        values["whitespace_pattern"] = (
            None if whitespace_pattern is None else _text("whitespace_pattern", whitespace_pattern)
        )
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if values[name] and given[0] not in ("json", "json_object"):
                raise ValueError(
                    f"{name} is {shorten(values[name])}, but {given[0]} is given; allowed: only "
                    "with json or json_object"
                )
        if values["disable_any_whitespace"] and values["whitespace_pattern"] is not None:
            raise ValueError(
                f"whitespace_pattern is {shorten(whitespace_pattern)} and disable_any_whitespace "
                "is True; allowed: one of them"
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # Not dataclass(frozen=True), as for SamplingParams.
    def __setattr__(self, name: str, value: Never) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{name} cannot be set: StructuredOutputsParams do not change, because requests share "
            "them; make others"
        )

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """Returns `value` if it is one or None; makes one of a mapping.

        Raises:
            ValueError: It is something else, or not allowed.
        """
        if value is None or isinstance(value, StructuredOutputsParams):
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return cls(**value)
        raise ValueError(
            f"structured_outputs is {shorten(value)} ({type(value).__name__}); allowed: "
            f"StructuredOutputsParams, or a mapping with one of {quoted(KINDS)}"
        )


def _check_size(name: str, size: int) -> None:
    if size > MAX_GRAMMAR_CHARS:
        raise ValueError(f"{name} has {size} characters; allowed: at most {MAX_GRAMMAR_CHARS}")


def _text(name: str, value: Any) -> str:
    text = check_text(name, value)
    _check_size(name, len(text))
    if not text:
        raise ValueError(f"{name} is ''; allowed: a string that is not empty")
    return text


def _schema_text(schema: Any) -> str:
    """Returns a JSON schema as text."""
    if isinstance(schema, str):
        _check_size("json", len(schema))
        schema = parse_json("json", schema)
    if not isinstance(schema, Mapping | bool):
        raise ValueError(
            f"json is {shorten(schema)}; allowed: a JSON schema, which is an object, as a dict or "
            "as text"
        )
    try:
        text = json_module.dumps(
            dict(schema) if isinstance(schema, Mapping) else schema, allow_nan=False
        )
        text.encode()
    except RecursionError:
        reason = "it is nested too deeply"
    except (TypeError, ValueError) as error:
        reason = str(error)
    else:
        _check_size("json", len(text))
        return text
    raise ValueError(f"json is no JSON schema: {reason}: {shorten(schema)}")


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence) or not choices:
        raise ValueError(
            f"choice is {shorten(choices)}; allowed: a sequence of at least one string"
        )
    texts = tuple(_text(f"choice[{i}]", choice) for i, choice in enumerate(choices))
    _check_size("choice", sum(map(len, texts)))
    return texts
