# SPDX-License-Identifier: Apache-2.0
"""The layers of a block drafter: like those of Qwen3, or of the full layers of Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

from .block_facts import BlockFacts
from .block_kinds import (
    NESTED,
    SPECULATORS,
    find_key,
    has_gemma4_layers,
    is_assistant,
    is_named_dflash2,
    is_named_dspark,
    read_causality,
)
from .decoder import (
    Layer,
    Sizes,
    describe,
    read_activation,
    read_sizes,
    round_to_float32,
    same_layers,
)
from .drafters import Target
from .gemma4 import check_dense, describe_gemma4, read_gemma4_sizes, read_kv_shapes
from .layer_types import FULL, LAYER_TYPES, SLIDING, read_layer_types
from .rope import read_rope
from .section import DEFAULTS, Section

_SCALE_KEY: Final = "input_embedding_scale"
_CAP_KEY: Final = "final_logit_softcapping"
_FACTOR_KEY: Final = "output_multiplier"
_ASSISTANT_TYPE: Final = "muse_glimmer_assistant"


@dataclass(frozen=True)
class BlockLayers:
    """The layers, and the sizes that they share.

    Attributes:
        sizes: The sizes.
        layers: What may differ from layer to layer.
        window: Positions that a sliding layer sees, as the file counts them; 0: none slides.
        is_gemma4: They are like the full layers of Gemma 4, otherwise like those of Qwen3.
    """

    sizes: Sizes
    layers: tuple[Layer, ...]
    window: int
    is_gemma4: bool


def read_block_layers(top: Section, layer: Section, block: Section, target: Target) -> BlockLayers:
    """Reads the layers.

    Args:
        top: The drafter's configuration.
        layer: The part of it that describes layers.
        block: The part of it that describes the block.
        target: The target that it must fit.

    Raises:
        ModelFileError: A key has a wrong value.
        NotImplementedError: A value is not supported.
    """
    if has_gemma4_layers(top):
        return _read_gemma4(layer)
    expected = _ASSISTANT_TYPE if is_assistant(top) else "qwen3"
    if layer.text("model_type", expected) != expected:
        raise layer.refusal("model_type", expected)
    defaults = DEFAULTS["qwen3"] | {"vocab_size": target.vocab_size}
    if is_assistant(top):
        defaults["rms_norm_eps"] = 1e-5
    sizes = read_sizes(layer.with_defaults(defaults))
    layer_types = _layer_types(top, layer, block, sizes.layers)
    window = _read_window(top, layer, block) if SLIDING in layer_types else 0
    return BlockLayers(sizes, same_layers(sizes, layer_types), window, is_gemma4=False)


def _read_window(top: Section, layer: Section, block: Section) -> int:
    stated = find_key("swa_window_size", block, top)
    if stated is None:
        return layer.integer("sliding_window")
    window = stated.integer("swa_window_size")
    if layer.has("sliding_window") and layer.integer("sliding_window") != window:
        raise stated.error(
            "swa_window_size",
            f'{layer.integer("sliding_window")}, as "{layer.name("sliding_window")}" says, or one '
            "of the two keys",
        )
    return window


def _layer_types(top: Section, layer: Section, block: Section, num_layers: int) -> tuple[str, ...]:
    layer_types = ((SLIDING if is_assistant(top) else FULL),) * num_layers
    if layer.has("layer_types"):
        layer_types = read_layer_types(layer, num_layers, 1)
    switch = find_key("use_swa", block, top)
    if switch is None:
        return layer_types
    slides = switch.boolean("use_swa")
    if slides == (SLIDING in layer_types):
        return layer_types
    if not slides:
        raise switch.error("use_swa", f'true, as "{layer.name("layer_types")}" says, or no key')
    if read_causality(top, block) is None:
        raise switch.refusal(
            "use_swa", f'true only with "{block.name("causal")}", or with "layer_types" that slide'
        )
    return (SLIDING,) * num_layers


def _read_gemma4(layer: Section) -> BlockLayers:
    is_unified = layer.text("model_type", "gemma4_text") == "gemma4_unified_text"
    if not is_unified and layer.text("model_type", "gemma4_text") != "gemma4_text":
        raise layer.refusal("model_type", "gemma4_text, gemma4_unified_text")
    check_dense(layer)
    if layer.integer("hidden_size_per_layer_input", 0, low=0) != 0:
        raise layer.refusal("hidden_size_per_layer_input", "0")
    sizes = read_gemma4_sizes(layer, is_unified=is_unified)
    layer_types = (FULL,) * sizes.layers
    if layer.has("layer_types") and read_layer_types(layer, sizes.layers, 1) != layer_types:
        raise layer.refusal("layer_types", f"{FULL} for every layer")
    k_eq_v = layer.boolean("attention_k_eq_v", False)
    layers = tuple(
        Layer(FULL, kv_heads, head_dim, sizes.intermediate, k_eq_v=k_eq_v)
        for kv_heads, head_dim in read_kv_shapes(layer, sizes, layer_types)
    )
    return BlockLayers(sizes, layers, window=0, is_gemma4=True)


def describe_block(
    kind: str,
    top: Section,
    layer: Section,
    block: Section,
    stack: BlockLayers,
    facts: BlockFacts,
    target: Target,
    notes: list[str],
    *,
    is_anchored: bool,
) -> dict[str, Any]:
    """Writes the canonical description, without the key "drafter".

    Args:
        kind: One of `BLOCK_KINDS`.
        top: The drafter's configuration.
        layer: The part of it that describes layers.
        block: The part of it that describes the block.
        stack: The layers.
        facts: The parts that the drafter has.
        target: The target that it must fit.
        notes: Gets notes for the user.
        is_anchored: All rows of a block see the window of the first one.

    Raises:
        ModelFileError: A key has a wrong value.
        NotImplementedError: A value is not supported.
    """
    embed_scale = _embed_scale(top, block, stack, target, notes)
    if stack.is_gemma4:
        config = describe_gemma4(
            kind,
            layer,
            stack.sizes,
            stack.layers,
            is_unified=False,
            ties_lm_head=False,
            embed_scale=embed_scale,
        )
    else:
        factor, cap = _logit_keys(top, block, target)
        config = describe(
            kind,
            stack.sizes,
            stack.layers,
            window=_window(stack.window, is_one_more=is_anchored or is_assistant(top)),
            ropes=dict.fromkeys(
                LAYER_TYPES, read_rope(layer, 500_000.0 if is_assistant(top) else 10_000.0)
            ),
            attention_scale=stack.sizes.head_dim**-0.5,
            activation=read_activation(layer, ("hidden_act",), "silu"),
            ties_lm_head=False,
            has_qk_norm=True,
            embed_scale=embed_scale,
            logit_soft_cap=cap,
        )
        if factor != 1.0:
            config["logit_scale"] = factor
    for entry in config["layers"]:
        entry["attention"]["has_qkv_bias"] = facts.has_qkv_bias
        entry["attention"]["has_o_bias"] = facts.has_o_bias
    return config


def _window(stated: int, *, is_one_more: bool) -> int:
    """The positions that a sliding layer sees, its own among them.

    In the files of `speculators` all rows see the window before the first row of the block, and
    transformers shows an assistant's row the keys that are at most a window away.
    """
    return stated + 1 if stated and is_one_more else stated


def _logit_keys(top: Section, block: Section, target: Target) -> tuple[float, float]:
    """The factor and the cap of the logits; an assistant has its target's, as its lm_head."""
    if is_assistant(top):
        return float(target.config.get("logit_scale", 1.0)), target.config["logit_soft_cap"]
    factor, cap = find_key(_FACTOR_KEY, block, top), find_key(_CAP_KEY, block, top)
    return (
        1.0 if factor is None else factor.number(_FACTOR_KEY),
        0.0 if cap is None else cap.number(_CAP_KEY),
    )


def _embed_scale(
    top: Section, block: Section, stack: BlockLayers, target: Target, notes: list[str]
) -> float:
    """The factor on the embeddings of a block's rows, which depends on the layout.

    In the files of `speculators` and of deepseek-ai's class for Qwen3, drafters were trained on
    rows of the table as they are, and so were those of DFlash2 where the file says nothing.
    Gemma 4's own layers were trained with its factor, and z-lab's of DFlash with the embeddings of
    their target.
    """
    stated = find_key(_SCALE_KEY, block, top)
    if stack.is_gemma4 or top.has(SPECULATORS):
        if stated is not None:
            raise stated.refusal(_SCALE_KEY, "no such key in this layout")
        return round_to_float32(sqrt(stack.sizes.hidden)) if stack.is_gemma4 else 1.0
    if stated is not None:
        return stated.number(_SCALE_KEY)
    of_target = float(target.config["embed_scale"])
    if of_target == 1.0 or not top.has(NESTED) or is_named_dflash2(top):
        return 1.0
    if is_named_dspark(top):
        raise block.error(
            _SCALE_KEY,
            f"a number, since {target.path} multiplies its embeddings by {of_target:g} and this "
            "layout does not say whether the drafter was trained so",
        )
    notes.append(f"the drafter's embeddings are multiplied by {of_target:g}, as the target's are")
    return of_target
