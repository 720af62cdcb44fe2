# SPDX-License-Identifier: Apache-2.0
"""The library's limits for a decoder, reported as errors of the file that the decoder came from."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline._core import ModelFileError

from .section import Section

# By entry of the description, the keys of configuration files that it is made of.
_KEYS: Final[dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")
)


def check_description(config: Mapping[str, Any], sections: Sequence[Section]) -> None:
    """Checks a description before anything large is read or written.

    Args:
        config: The canonical description.
        sections: The parts of the configuration that it was made of.

    Raises:
        ModelFileError: The library does not take it; names the file, the keys, the value and what
            is allowed.
    """
    for i, rope in enumerate(config["ropes"]):
        # Infinity is no JSON, so the library could not name its key.
        named = {f"inv_freq[{j}]": value for j, value in enumerate(rope["inv_freq"])}
        for key, value in (named | {"scale": rope["scale"]}).items():
            if not math.isfinite(value):
                name = f"ropes[{i}].{key}"
                raise _error(name, f"{name} is {value}; allowed: a finite number", sections)
    try:
        _core.check_decoder_config(json.dumps(config))
    except ValueError as error:
        message = str(error).removeprefix("decoder config: ")
        path = re.match(r"[\w.\[\]]+(?= is )", message)
        raise _error(path.group() if path else "", message, sections) from None


def _error(path: str, message: str, sections: Sequence[Section]) -> ModelFileError:
    parts = re.sub(r"\[\d+\]", "", path).split(".")
    keys = _KEYS.get(".".join(parts[-2:])) or _KEYS.get(parts[-1], [])
    named = dict.fromkeys(
        section.name(key) for key in keys for section in sections if section.has(key)
    )
    shown = ", ".join(f'"{key}"' for key in named or keys[:1])
    where = f"{'keys' if len(named) > 1 else 'key'} {shown}: " if shown else ""
    return ModelFileError(f"{sections[0].source}: {where}{message}")
