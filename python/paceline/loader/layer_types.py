# SPDX-License-Identifier: Apache-2.0
"""The kinds of attention that layers of a checkpoint have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .messages import quote
from .section import Section

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LAYER_TYPES: Final = (FULL, SLIDING)


def check_full_layers(architecture: str, text: Section, num_layers: int) -> None:
    """Refuses layers of Qwen3's families that have a window.

    Raises:
        ModelFileError: "layer_types" has another length.
        NotImplementedError: A layer has a window.
    """
    if text.boolean("use_sliding_window", False):
        raise text.refusal("use_sliding_window", "false")
    if not text.has("layer_types"):
        return
    for i, layer_type in enumerate(read_layer_types(text, num_layers, 1)):
        if layer_type != FULL:
            raise NotImplementedError(
                f'{text.source}: key "{text.name("layer_types")}"[{i}] is {layer_type!r}, '
                f"which Paceline does not support for {architecture}; supported: {FULL}"
            )


def read_layer_types(text: Section, num_layers: int, default_pattern: int) -> tuple[str, ...]:
    """The kind of attention of each layer.

    Args:
        text: The decoder's part of the configuration.
        num_layers: How many layers there are.
        default_pattern: n where every n-th layer is a full layer, unless the file says otherwise
            with "layer_types" or "sliding_window_pattern".

    Returns:
        `num_layers` names of `LAYER_TYPES`.

    Raises:
        ModelFileError: The list has another length.
        NotImplementedError: It names another kind.
    """
    names = text.strings("layer_types")
    if names is None:
        # The older spelling, with an underscore in files of some versions.
        key = "sliding_window_pattern"
        if not text.has(key) and text.has("_sliding_window_pattern"):
            key = "_sliding_window_pattern"
        pattern = text.integer(key, default_pattern)
        return tuple(FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers))
    for i, name in enumerate(names):
        if name not in LAYER_TYPES:
            raise NotImplementedError(
                f'{text.source}: key "{text.name("layer_types")}"[{i}] is {quote(name)}, which '
                f"Paceline does not support; supported: {', '.join(LAYER_TYPES)}"
            )
    return _of_each_layer(text, "layer_types", names, num_layers)


def read_types(
    text: Section, key: str, allowed: Sequence[str], num_layers: int
) -> tuple[str, ...] | None:
    """A list with one of some names for each layer; None: the key is absent.

    Raises:
        ModelFileError: The list has another length.
        NotImplementedError: It has another name.
    """
    names = text.strings(key)
    if names is None:
        return None
    if any(name not in allowed for name in names):
        raise text.refusal(key, f"a list of {', '.join(allowed)}")
    return _of_each_layer(text, key, names, num_layers)


def _of_each_layer(
    text: Section, key: str, names: Sequence[str], num_layers: int
) -> tuple[str, ...]:
    if len(names) != num_layers:
        expected = f'{num_layers}, as "{text.name("num_hidden_layers")}" says'
        raise text.wrong(key, f"has {len(names)} entries; expected {expected}")
    return tuple(names)
