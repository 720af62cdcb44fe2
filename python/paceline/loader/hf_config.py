# SPDX-License-Identifier: Apache-2.0
"""Reads the `config.json` and `generation_config.json` of a Hugging Face checkpoint.

Published checkpoints have two spellings of the same facts. Older files have `rope_theta`,
`rope_scaling`, `rope_local_base_freq` and `sliding_window_pattern`; newer files have
`rope_parameters` (perhaps one object per layer type) and `layer_types`. `rope.py` and
`layer_types.py` read both, so that the rest of the loader sees one. `torch_dtype` and `dtype` are
not read, because the tensors have their dtypes. A key whose value is `null` counts as absent, as in
transformers. A fact that a file states twice must be the same both times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .messages import name_some, quote
from .section import MAX_INT, Section


@dataclass(frozen=True)
class HfConfig:
    """The configuration of a checkpoint.

    Attributes:
        source: The file, for messages.
        architecture: The class name under "architectures", or the one that "model_type" implies.
        top: The whole file.
        text: The part that describes the decoder: "text_config" if there is one, else `top`.
        eos_token_ids: Ids that end a completion; those of generation_config.json win. May be empty.
        eos_section: The part of a file that names them; None: none does.
        bos_token_id: The id that starts a prompt, if a file names one.
        generation: The object in generation_config.json; None without one.
    """

    source: str
    architecture: str
    top: Section
    text: Section
    eos_token_ids: tuple[int, ...]
    eos_section: Section | None
    bos_token_id: int | None
    generation: Section | None


def parse_hf_config(
    values: Mapping[str, object],
    source: str,
    architectures: Mapping[str, str],
    generation: Section | None = None,
) -> HfConfig:
    """Finds the architecture and the part of a configuration that describes the decoder.

    Args:
        values: The object in `config.json`.
        source: The file's name, for messages.
        architectures: The "model_type" by supported architecture; a file without "architectures" is
            accepted by its "model_type".
        generation: The object in `generation_config.json`, if there is one.

    Raises:
        ModelFileError: A key has a wrong type.
        NotImplementedError: The architecture is not supported; the message lists those that are.
    """
    top = Section(values, source)
    architecture = _architecture(top, architectures)
    text = top.section("text_config") or top
    eos_section = next(
        (
            section
            for section in (generation, top, text)
            if section is not None and section.has("eos_token_id")
        ),
        None,
    )
    return HfConfig(
        source=source,
        architecture=architecture,
        top=top,
        text=text,
        eos_token_ids=() if eos_section is None else _token_ids(eos_section, "eos_token_id"),
        eos_section=eos_section,
        bos_token_id=_bos_token_id(top, text, generation),
        generation=generation,
    )


def _architecture(top: Section, architectures: Mapping[str, str]) -> str:
    supported = ", ".join(architectures)
    names = top.strings("architectures")
    if names:
        for name in names:
            if name in architectures:
                return name
        raise NotImplementedError(
            f'{top.source}: architecture {name_some(names)} (key "architectures") is '
            f"not supported; supported: {supported}"
        )
    if not top.has("model_type"):
        raise top.error("architectures", f"a list with one of {supported}")
    model_type = top.text("model_type")
    for name, known_type in architectures.items():
        if known_type == model_type:
            return name
    raise NotImplementedError(
        f'{top.source}: model type {quote(model_type)} (key "model_type") is not supported; '
        f"supported architectures: {supported}"
    )


def _token_ids(section: Section, key: str) -> tuple[int, ...]:
    value = section.values[key]
    items: Sequence[object] = value if isinstance(value, list) else [value]
    ids: dict[int, None] = {}
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INT:
            raise section.error(key, "a token id from 0, or a list of them")
        ids[item] = None
    return tuple(ids)


def _bos_token_id(top: Section, text: Section, generation: Section | None) -> int | None:
    for section in (generation, top, text):
        if section is not None and section.has("bos_token_id"):
            return section.integer("bos_token_id", low=0)
    return None
