# SPDX-License-Identifier: Apache-2.0
"""JSON objects of a checkpoint's configuration files, read key by key with checks."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline._core import ModelFileError

from .files import read_file
from .messages import UnreadableNumber, shorten, show

# JSON files of real checkpoints are far smaller; the largest is the index of many shards.
MAX_CONFIG_BYTES: Final = 64 << 20
MAX_INT: Final = 2**31 - 1

# Longer integers are beyond any limit here, and Python reads them in quadratic time.
_MAX_DIGITS: Final = 300
# Positive numbers up to the first round to 0 in float32, those from the second on to infinity.
_ZERO_FLOAT32: Final = 2.0**-150
_INFINITE_FLOAT32: Final = (2 - 2.0**-24) * 2.0**127

#: Values of keys that an object may leave out.
Defaults = Mapping[str, bool | int | float | str]
#: By family, those of transformers.
DEFAULTS: Final[dict[str, dict[str, bool | int | float | str]]] = tomllib.loads(
    Path(__file__).with_name("defaults.toml").read_text(encoding="utf-8")
)


class _Required:
    """The type of `REQUIRED`: this key has no default."""


REQUIRED: Final = _Required()


def read_json_object(
    path: Path, what: str, contents: bytes | None = None, *, has_unique_keys: bool = False
) -> dict[str, object]:
    """Reads one JSON object.

    Args:
        path: The file.
        what: What the file holds, as it reads in a message, e.g. "the model's configuration".
        contents: Its contents where they were read already.
        has_unique_keys: Refuse an object that has a key twice; otherwise the last one counts.

    Returns:
        The object. Numbers that Python's do not hold are `UnreadableNumber`, which no key accepts.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFileError: It is no regular file, cannot be read, is larger than 64 MiB, is no JSON, or
            no JSON object.
    """
    if contents is None:
        contents = read_file(path, what, max_bytes=MAX_CONFIG_BYTES)
    try:
        value = json.loads(
            contents.decode(),
            parse_int=_read_integer,
            parse_float=_read_float,
            object_pairs_hook=_unique_keys if has_unique_keys else None,
        )
    except UnicodeDecodeError as error:
        raise ModelFileError(
            f"{path}: cannot read {what}: byte {error.start} is not UTF-8 ({error.reason})"
        ) from None
    except ValueError as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise ModelFileError(
            f"{path}: lists or objects are nested too deeply for {what}; expected a few levels"
        ) from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds {show(value)}; expected a JSON object with {what}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shorten(twice)!r} occurs twice")
    return values


def _read_integer(text: str) -> int | UnreadableNumber:
    return int(text) if len(text) <= _MAX_DIGITS else UnreadableNumber(text)


def _read_float(text: str) -> float | UnreadableNumber:
    value = float(text)
    has_digits = any(digit in "123456789" for digit in text.lower().partition("e")[0])
    if math.isinf(value) or (value == 0.0 and has_digits):
        return UnreadableNumber(text)
    return value


class Section:
    """One JSON object of a configuration file, read key by key with checks.

    Every message names the file, the key (with its path in the file), the value seen and the values
    allowed.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        source: str,
        path: str = "",
        defaults: Defaults | None = None,
    ) -> None:
        """Wraps an object.

        Args:
            values: The object.
            source: The file, for messages.
            path: Its path in the file, e.g. "text_config"; empty for the whole file.
            defaults: The values of keys that the object may leave out, unless the reader of a key
                has a default of its own.
        """
        self.values = values
        self.source = source
        self.path = path
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Defaults) -> Section:
        """The same object with values for keys that it may leave out."""
        return Section(self.values, self.source, self.path, defaults)

    def name(self, key: str) -> str:
        """The key with its path in the file, e.g. "text_config.hidden_size"."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Returns whether the key is there and not null."""
        return self.values.get(key) is not None

    def has_value(self, key: str) -> bool:
        """Returns whether the key is there, or may be left out."""
        return self.has(key) or key in self._defaults

    def error(self, key: str, expected: str, note: str = "") -> ModelFileError:
        """The error for a key with a wrong value, or without one; a note follows the value."""
        if not self.has(key):
            seen = "null" if key in self.values else "missing"
        else:
            seen = show(self.values[key])
        return self.wrong(key, f"is {seen}{note}; expected {expected}")

    def wrong(self, key: str, what: str) -> ModelFileError:
        """The error about a key, of which the message says `what` is wrong."""
        return ModelFileError(f'{self.source}: key "{shorten(self.name(key))}" {what}')

    def refusal(self, key: str, supported: str) -> NotImplementedError:
        """The error for a valid value that Paceline does not support."""
        seen = show(self.values.get(key))
        return NotImplementedError(
            f'{self.source}: key "{shorten(self.name(key))}" is {seen}, which Paceline does not '
            f"support; supported: {supported}"
        )

    def integer(
        self,
        key: str,
        default: int | _Required = REQUIRED,
        *,
        low: int = 1,
        high: int = MAX_INT,
    ) -> int:
        """An integer from `low` to `high`."""
        expected = f"an integer from {low} to {high}"
        value = self._scalar(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, expected)
        return value

    def number(
        self,
        key: str,
        default: float | _Required = REQUIRED,
        *,
        allow_zero: bool = False,
    ) -> float:
        """A number above 0 (or from 0) that is finite and not rounded to 0 as a float32."""
        expected = "a finite number " + ("from 0" if allow_zero else "above 0")
        value = self._scalar(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, expected)
        if value >= _INFINITE_FLOAT32:
            raise self.error(key, expected, " (infinite as a float32)")
        if 0 < value <= _ZERO_FLOAT32:
            raise self.error(key, expected, " (0 as a float32)")
        if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
            raise self.error(key, expected)
        return float(value)

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        """true or false."""
        value = self._scalar(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        """A string."""
        value = self._scalar(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, or None when the key is absent."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return list(value)

    def section(self, key: str) -> Section | None:
        """A nested object, or None when the key is absent."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object")
        return Section(value, self.source, self.name(key))

    def _scalar(self, key: str, default: object, expected: str) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        default = self._defaults.get(key, default) if isinstance(default, _Required) else default
        if isinstance(default, _Required):
            raise self.error(key, expected)
        return default

    def only(self, key: str, supported: bool | int | str, shown: str | None = None) -> None:
        """Refuses a value of a key that is not the supported one, which is also its default.

        Args:
            key: The key; its value has the type of `supported`.
            supported: The value.
            shown: The same for the message; None: as in JSON, a string without quotes.
        """
        value: object
        if isinstance(supported, bool):
            value = self.boolean(key, supported)
        elif isinstance(supported, str):
            value = self.text(key, supported)
        else:
            value = self.integer(key, supported, low=min(supported, 1))
        if value != supported:
            plain = supported if isinstance(supported, str) else show(supported)
            raise self.refusal(key, shown or plain)
