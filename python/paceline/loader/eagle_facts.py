# SPDX-License-Identifier: Apache-2.0
"""The parts that an EAGLE draft head has, and which kind a checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from .decoder_tensors import QK_NORMS
from .drafters import EAGLE, EAGLE3, Target
from .section import Section

# EAGLE-3 reads three layers of the target by default: (2, L // 2, L - 3).
_NUM_DEFAULT_AUX: Final = 3
QK_NORM_SOURCES: Final = tuple(source for _, source in QK_NORMS)


@dataclass(frozen=True)
class Facts:
    """The parts that a draft head has: read from its tensors, or guessed from its configuration.

    Attributes:
        prefix: The prefix of every tensor but the lm_head.
        first_layer: The prefix of the tensors of layer 0: "midlayer." or "layers.0.".
        draft_vocab_size: Rows of its lm_head; None: it has none.
        fc_shape: The shape of `fc.weight`; None: unknown.
        has_embedding: It has an embedding table.
        has_map: It has `d2t`.
        has_fc_bias: It has `fc.bias`.
        has_input_norm: It has `input_norm.weight`: one norm over all auxiliary states before fc.
        num_fc_norms: The number of tensors `fc_norm.N.weight`: one norm for each auxiliary state.
        has_attn_norm: It has a norm before attention in layer 0.
        has_final_norm: It has `norm.weight`.
        has_qk_norm: It has norms on q and k.
        has_qkv_bias: It has biases on q, k and v.
        has_o_bias: It has a bias on o.
        has_mlp_bias: It has biases on gate, up and down.
    """

    prefix: str = ""
    first_layer: str = "layers.0."
    draft_vocab_size: int | None = None
    fc_shape: tuple[int, ...] | None = None
    has_embedding: bool = False
    has_map: bool = False
    has_fc_bias: bool = False
    has_input_norm: bool = False
    num_fc_norms: int = 0
    has_attn_norm: bool = True
    has_final_norm: bool = True
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False


def eagle_kind_of_config(top: Section) -> str | None:
    """The kind of EAGLE that a configuration names; None: none, so that the tensors decide.

    Published EAGLE-1 draft heads have the architecture `LlamaForCausalLM`.

    Raises:
        NotImplementedError: It is a drafter of the `speculators` package that is not supported.
    """
    if top.has("speculators_model_type"):
        if top.text("speculators_model_type") != "eagle3":
            raise top.refusal("speculators_model_type", "eagle3, dflash, dflash2, dspark")
        return EAGLE3
    for name in top.strings("architectures") or []:
        if re.search("eagle-?3", name, re.IGNORECASE):
            return EAGLE3
        if re.search("eagle", name, re.IGNORECASE):
            return EAGLE
    return None


def eagle_kind_of_tensors(names: Mapping[str, object]) -> tuple[str | None, str]:
    """The kind of EAGLE that the tensors show.

    Args:
        names: The tensors of a checkpoint by name.

    Returns:
        The kind, None without `fc.weight`; and the name of a tensor that shows it.
    """
    prefix = _find_prefix(names)
    if f"{prefix}fc.weight" not in names:
        return None, ""
    signs = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "midlayer.", "d2t")
    for sign in signs:
        for name in names:
            if name.startswith(prefix + sign):
                return EAGLE3, name
    return EAGLE, f"{prefix}fc.weight"


def _find_prefix(names: Mapping[str, object]) -> str:
    """The prefix of a draft head's tensors: "" or "model."."""
    return "model." if "model.fc.weight" in names and "fc.weight" not in names else ""


def read_facts(shapes: Mapping[str, tuple[int, ...]]) -> Facts:
    """Finds the parts of a draft head in its tensors.

    Args:
        shapes: The shape of every tensor by name.
    """
    prefix = _find_prefix(shapes)
    is_midlayer = any(name.startswith(f"{prefix}midlayer.") for name in shapes)
    layer = "midlayer." if is_midlayer else "layers.0."

    def has(name: str) -> bool:
        return prefix + name in shapes

    num_fc_norms = 0
    while has(f"fc_norm.{num_fc_norms}.weight"):
        num_fc_norms += 1
    lm_head = shapes.get("lm_head.weight")
    return Facts(
        prefix=prefix,
        first_layer=layer,
        draft_vocab_size=lm_head[0] if lm_head else None,
        fc_shape=shapes.get(f"{prefix}fc.weight"),
        has_embedding=has("embed_tokens.weight"),
        has_map=has("d2t") or "d2t" in shapes,
        has_fc_bias=has("fc.bias"),
        has_input_norm=has("input_norm.weight"),
        num_fc_norms=num_fc_norms,
        has_attn_norm=has(f"{layer}input_layernorm.weight"),
        has_final_norm=has("norm.weight"),
        has_qk_norm=any(has(layer + source) for source in QK_NORM_SOURCES),
        has_qkv_bias=has(f"{layer}self_attn.q_proj.bias"),
        has_o_bias=has(f"{layer}self_attn.o_proj.bias"),
        has_mlp_bias=has(f"{layer}mlp.gate_proj.bias"),
    )


def guess_facts(kind: str, top: Section, target: Target) -> Facts:
    """Guesses the parts of a draft head from its configuration, for dummy weights.

    It is assumed to use the target's embeddings and, for EAGLE-3, to own an lm_head.
    """
    layer = layer_section(top)
    bias = layer.boolean("attention_bias", False)
    facts = Facts(
        has_qk_norm=layer.text("model_type", "llama") == "qwen3",
        has_qkv_bias=bias or top.boolean("qkv_bias", False),
        has_o_bias=bias,
        has_mlp_bias=layer.boolean("mlp_bias", False),
    )
    if kind == EAGLE:
        has_fc_bias = top.boolean("bias", False)
        return replace(facts, has_attn_norm=False, has_final_norm=False, has_fc_bias=has_fc_bias)
    rows = top.integer("draft_vocab_size", target.vocab_size)
    num_aux = len(aux_layers(top) or range(_NUM_DEFAULT_AUX))
    return replace(
        facts,
        draft_vocab_size=rows,
        has_map=rows != target.vocab_size,
        has_input_norm=top.boolean("norm_before_fc", False),
        num_fc_norms=num_aux if top.boolean("fc_norm", False) else 0,
    )


def layer_section(top: Section) -> Section:
    """The part of the configuration that has the sizes of the layers."""
    return top.section("transformer_layer_config") or top


def aux_layers(top: Section) -> list[int] | None:
    """The layers of the target whose input the draft head reads; None: no key names them.

    The files of SpecForge and ModelOpt, which have the key under "eagle_config", name the layers
    whose output is read.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    for section, later in ((top, 0), (top.section("eagle_config"), 1)):
        if section is None or not section.has(key):
            continue
        value = section.values[key]
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise section.error(key, "a list of layers of the target")
        return [item + later for item in value]
    return None
