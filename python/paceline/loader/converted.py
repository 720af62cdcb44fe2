# SPDX-License-Identifier: Apache-2.0
"""`paceline.json`, the description of a folder that `paceline convert` wrote.

`docs/model-format.md` defines it. The C++ library reads such folders by itself; here they become
models of an `LLM`, with a tokenizer and settings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from paceline import _core
from paceline._core import ModelFileError
from paceline.limits import MAX_SPECULATIVE_TOKENS, MAX_STOP_TOKEN_IDS

from .messages import shorten, show
from .section import Section
from .weight_files import is_plain_name

FOLDER_NAME: Final = "paceline.json"
FOLDER_FORMAT: Final = "paceline-folder-1"

_KEYS: Final = (
    "format",
    "target",
    "draft",
    "num_speculative_tokens",
    "stop_token_ids",
    "bos_token_id",
)
_PART_KEYS: Final = ("weights", "dtype", "config", "architecture")
_DTYPES: Final = ("float32", "bfloat16")


@dataclass(frozen=True)
class ConvertedPart:
    """The target or the drafter of a folder.

    Attributes:
        role: "target" or "draft".
        weights: The plain name of its weight file.
        dtype: The dtype of matrices in memory.
        config: The canonical description, which the library has accepted.
        architecture: The class name in the `config.json` that it was converted from; the name of
            the description where the folder does not say.
    """

    role: str
    weights: str
    dtype: str
    config: dict[str, Any]
    architecture: str


@dataclass(frozen=True)
class ConvertedFolder:
    """The content of a `paceline.json`.

    Attributes:
        target: The target.
        draft: The drafter; None: there is none.
        num_speculative_tokens: The default k; None without a drafter.
        stop_token_ids: The target's end-of-sequence ids.
        bos_token_id: The token id that starts a prompt; None: the folder does not say.
    """

    target: ConvertedPart
    draft: ConvertedPart | None
    num_speculative_tokens: int | None
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def parts(self) -> Iterator[ConvertedPart]:
        """The target, and the drafter if there is one."""
        yield self.target
        if self.draft is not None:
            yield self.draft


def read_converted(top: Section) -> ConvertedFolder:
    """Checks a `paceline.json`, as strictly as the library does.

    Args:
        top: The whole file.

    Raises:
        ModelFileError: A key is unknown, missing or wrong.
        NotImplementedError: The target has more end-of-sequence ids than a request can stop at.
    """
    _check_keys(top, _KEYS)
    if top.text("format") != FOLDER_FORMAT:
        raise top.error("format", f'"{FOLDER_FORMAT}"')
    target = _read_part(top, "target")
    draft = _read_part(top, "draft") if "draft" in top.values else None
    k = None
    if draft is not None:
        k = top.integer("num_speculative_tokens", high=MAX_SPECULATIVE_TOKENS)
    elif "num_speculative_tokens" in top.values:
        raise top.error("num_speculative_tokens", "no such key without a draft")
    last_id = target.config["vocab_size"] - 1
    stops = top.values.get("stop_token_ids")
    expected = f"a list of ids from 0 to {last_id}"
    if not isinstance(stops, list):
        raise top.error("stop_token_ids", expected)
    for token in stops:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= last_id:
            raise top.error("stop_token_ids", expected)
    if len(stops) > MAX_STOP_TOKEN_IDS:
        raise top.refusal("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    bos = None
    if "bos_token_id" in top.values:
        bos = top.integer("bos_token_id", low=0, high=last_id)
    return ConvertedFolder(target, draft, k, tuple(stops), bos)


def _read_part(top: Section, role: str) -> ConvertedPart:
    section = top.section(role)
    if section is None:
        raise top.error(role, "an object with weights, dtype and config")
    _check_keys(section, _PART_KEYS)
    weights = section.text("weights")
    if not is_plain_name(weights):
        raise section.error(
            "weights", f"the plain name of a .safetensors file beside {FOLDER_NAME}"
        )
    if section.text("dtype") not in _DTYPES:
        raise section.error("dtype", " or ".join(f'"{dtype}"' for dtype in _DTYPES))
    config = section.section("config")
    if config is None:
        raise section.error("config", "a decoder description")
    values = dict(config.values)
    try:
        _core.check_decoder_config(json.dumps(values))
    except (TypeError, ValueError) as error:  # TypeError: a number that Python's do not hold
        raise ModelFileError(f'{top.source}: key "{config.path}": {error}') from None
    architecture = section.text("architecture", str(values["name"]))
    return ConvertedPart(role, weights, section.text("dtype"), values, architecture)


def _check_keys(section: Section, allowed: Collection[str]) -> None:
    for key in section.values:
        if key not in allowed:
            raise ModelFileError(
                f'{section.source}: unknown key "{shorten(section.name(key))}" '
                f"({show(section.values[key])}); allowed: {', '.join(allowed)}"
            )
