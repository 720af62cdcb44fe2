# SPDX-License-Identifier: Apache-2.0
"""The tensors of an EAGLE draft head: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder import Layer, Sizes
from .decoder_tensors import layer_tensors, tensor_spec
from .drafters import EAGLE3
from .eagle_facts import Facts
from .family import TensorSpec
from .layer_types import FULL


def eagle_tensors(
    kind: str, sizes: Sizes, facts: Facts, drafter: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Lists every tensor but `d2t`, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    target_hidden = drafter["target_hidden_size"]
    specs: list[TensorSpec] = []
    if facts.has_embedding:
        vocab = (sizes.vocab, "vocab_size")
        specs.append(tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden))
    if kind == EAGLE3:
        num_aux = len(drafter["aux_layers"])
        columns = (num_aux * target_hidden, f"{num_aux} * hidden size of the target")
        if facts.has_input_norm:
            specs.append(tensor_spec("fc_input_norm.weight", "input_norm.weight", columns))
        for i in range(facts.num_fc_norms):
            width = (target_hidden, "hidden size of the target")
            specs.append(tensor_spec(f"fc_norm.{i}.weight", f"fc_norm.{i}.weight", width))
    else:
        columns = (sizes.hidden + target_hidden, "2 * hidden_size")
    specs.append(tensor_spec("fc.weight", "fc.weight", hidden, columns))
    if facts.has_fc_bias:
        specs.append(tensor_spec("fc.bias", "fc.bias", hidden))
    for i in range(sizes.layers):
        reads_both = kind == EAGLE3 and i == 0
        specs += layer_tensors(
            f"layers.{i}.",
            facts.first_layer if i == 0 else f"layers.{i}.",
            sizes,
            Layer(FULL, sizes.kv_heads, sizes.head_dim, sizes.intermediate),
            norms=_layer_norms(kind, i, facts),
            has_qk_norm=facts.has_qk_norm,
            has_qkv_bias=facts.has_qkv_bias,
            has_o_bias=facts.has_o_bias,
            has_mlp_bias=facts.has_mlp_bias,
            attention_input=(2 * sizes.hidden, "2 * hidden_size") if reads_both else None,
        )
    if facts.has_final_norm or kind == EAGLE3:
        specs.append(tensor_spec("final_norm.weight", "norm.weight", hidden))
    if facts.draft_vocab_size is not None:
        rows = (facts.draft_vocab_size, "rows")
        specs.append(tensor_spec("lm_head.weight", "lm_head.weight", rows, hidden))
    return tuple(specs)


def _layer_norms(kind: str, index: int, facts: Facts) -> list[tuple[str, str]]:
    norms = [("mlp_norm.weight", "post_attention_layernorm.weight")]
    if kind == EAGLE3 or index > 0 or facts.has_attn_norm:
        norms.insert(0, ("attn_norm.weight", "input_layernorm.weight"))
    if kind == EAGLE3 and index == 0:
        norms.insert(0, ("hidden_norm.weight", "hidden_norm.weight"))
    return norms
