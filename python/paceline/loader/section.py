# SPDX-License-Identifier: Apache-2.0
"""JSON objects of a checkpoint's configuration files, read key by key with checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from paceline._core import ModelFileError, ModelNotFoundError

# A JSON file of settings is small; anything above this is not one.
MAX_CONFIG_BYTES: Final = 64 << 20
MAX_INT: Final = 2**31 - 1

_Scalar = TypeVar("_Scalar", bool, int, float, str)


class _Required:
    """The type of `REQUIRED`: this key has no default."""


REQUIRED: Final = _Required()


def read_json_object(path: Path, what: str) -> dict[str, object]:
    """Reads one JSON object.

    Args:
        path: The file.
        what: What the file is for, as it reads in a message, e.g. "the model's configuration".

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFileError: It cannot be read, is larger than 64 MiB, is no JSON, or no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelFileError(
                f"{path}: {size} bytes; {what} may have at most {MAX_CONFIG_BYTES} bytes"
            )
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(
            f"{path}: no such file; expected {what} in the model's folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot read {what}: {error}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{path}: holds {_describe(value)}; expected a JSON object with {what}"
        )
    return value


class Section:
    """One JSON object of a configuration file, read key by key with checks.

    Every message names the file, the key (with its path in the file), the value seen and the values
    allowed.
    """

    def __init__(self, values: Mapping[str, object], source: str, path: str = "") -> None:
        """Wraps an object.

        Args:
            values: The object.
            source: The file it came from, for messages.
            path: Where in the file it stands, e.g. "text_config"; empty for the whole file.
        """
        self.values = values
        self.source = source
        self.path = path

    def name(self, key: str) -> str:
        """The key with its path in the file, e.g. "text_config.hidden_size"."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def error(self, key: str, expected: str) -> ModelFileError:
        """The error for a key with a wrong value, or without one."""
        if not self.has(key):
            seen = "null" if key in self.values else "missing"
        else:
            seen = _describe(self.values[key])
        return ModelFileError(
            f'{self.source}: key "{self.name(key)}" is {seen}; expected {expected}'
        )

    def refusal(self, key: str, supported: str) -> NotImplementedError:
        """The error for a valid value that Paceline does not do."""
        seen = _describe(self.values.get(key))
        return NotImplementedError(
            f'{self.source}: key "{self.name(key)}" is {seen}, which Paceline does not support; '
            f"supported: {supported}"
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
        """A finite number above 0 (or from 0)."""
        expected = "a finite number " + ("from 0" if allow_zero else "above 0")
        value = self._scalar(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, expected)
        try:
            result = float(value)
        except OverflowError:
            raise self.error(key, expected) from None
        if not math.isfinite(result) or result < 0 or (result == 0 and not allow_zero):
            raise self.error(key, expected)
        return result

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
        if isinstance(default, _Required):
            raise self.error(key, expected)
        return default


def _describe(value: object) -> str:
    """A JSON value as it reads in a message: short, and in JSON's own words."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
