# SPDX-License-Identifier: Apache-2.0
"""The checks that all arguments share: shortened values, strings, paths and JSON."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paceline import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.checks import check_int, check_path, check_text, parse_json, shorten
from paceline.prompts import list_prompts


class _Broken:
    def __repr__(self) -> str:
        raise RecursionError


class _Tall:
    def __repr__(self) -> str:
        return "one\n  two"


def nested(depth: int = 100_000) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("abc", "'abc'"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ([1, "a", (2,)], "[1, 'a', (2,)]"),
        ({"a": 1}, "{'a': 1}"),
        (b"ab", "b'ab'"),
        ("x" * 10_000_000, "'" + "x" * 59 + "..."),
        ("\ud800", "'\\ud800'"),
        (10**70, "1" + "0" * 59 + "..."),
        (10**5000, "an integer of about 5000 digits"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17..."),
        (nested(), "[[[[[...]]]]]"),
        (_Broken(), "<_Broken>"),
        (_Tall(), "one two"),
    ],
    ids=range(15),
)
def test_a_value_is_shortened(value: Any, shown: str) -> None:
    assert shorten(value)[:40] == shown[:40]
    assert len(shorten(value)) <= 63 and "\n" not in shorten(value)


def test_a_path_may_be_longer() -> None:
    assert shorten("/x" * 90, 200) == repr("/x" * 90)


def calls_with(value: Any) -> list[Callable[[], object]]:
    """Calls of everything that takes arguments, each with this value."""
    config = {"method": "draft_model", "model": "a", "num_speculative_tokens": 2}
    calls: list[Callable[[], object]] = [
        *(partial(EngineConfig, **{name: value}) for name in ("device", "dtype", "block_size")),
        *(
            partial(SamplingParams, **{name: value})
            for name in ("n", "temperature", "logit_bias", "stop_token_ids", "stop", "ignore_eos")
        ),
        *(
            partial(SpeculativeConfig.parse, config | {name: value})
            for name in ("num_speculative_tokens", "rejection_sample_method", "model", "x")
        ),
        partial(SpeculativeConfig.parse, value),
    ]
    if not hasattr(value, "__len__"):
        calls.append(partial(list_prompts, [[1], value]))
    return calls


def test_every_check_shortens() -> None:
    for value in (10**5000, "x" * 10**6, [1] * 10**6, nested(), _Broken()):
        for call in calls_with(value):
            with pytest.raises(ValueError) as refused:
                call()
            message = str(refused.value)
            assert "allowed: " in message or "not valid JSON" in message
            assert len(message) < 400 and "Exceeds the limit" not in message


def test_text() -> None:
    assert check_text("stop", "äöü €") == "äöü €"
    with pytest.raises(ValueError, match=r"stop has '\\udcff' at character 1, .*UTF-8"):
        check_text("stop", "a\udcff")
    with pytest.raises(ValueError, match=r"stop is b'a' \(bytes\); allowed: .*decode the bytes"):
        check_text("stop", b"a")
    with pytest.raises(ValueError, match=r"stop is 3 \(int\); allowed: a string$"):
        check_text("stop", 3)


def test_paths() -> None:
    assert check_path("model", "a/b") == "a/b"
    assert check_path("model", pathlib.Path("a") / "b") == "a/b"
    assert check_path("model", "ä" * 127) == "ä" * 127
    for path, part in (
        ("ä" * 128, "a path of 256 bytes with a name of 256; allowed: at most 4095 bytes, 255 a"),
        (pathlib.PurePath("x" * 256), "a path of 256 bytes"),
        ("a\0b", "null character"),
        ("", r"model is '' \(str\)"),
    ):
        with pytest.raises(ValueError, match=re.compile(part)):
            check_path("model", path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" + "9" * 5000 + "]", "thousands of digits"),
        ("", "Expecting value"),
    ],
    ids=["object", "list", "objects", "digits", "empty"],
)
def test_json(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"sampling is not valid JSON: .*{reason}") as refused:
        parse_json("sampling", text)
    assert len(str(refused.value)) < 200
    assert refused.value.__context__ is None


def test_integers() -> None:
    assert check_int("n", 3, 1, 4) == 3
    with pytest.raises(ValueError, match="n is an integer of about 5000 digits; allowed: an int"):
        check_int("n", 10**5000, 1, 4)
