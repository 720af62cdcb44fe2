# SPDX-License-Identifier: Apache-2.0
"""The tensors of an EAGLE draft head: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .decoder import Sizes
from .decoder_tensors import LINEARS, QK_NORMS
from .drafters import EAGLE3
from .eagle_facts import Facts
from .family import TensorSpec


def eagle_tensors(
    kind: str, sizes: Sizes, facts: Facts, drafter: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Lists every tensor but `d2t`, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    target_hidden = drafter["target_hidden_size"]
    qo_rows = (sizes.qo_heads * sizes.head_dim, "num_attention_heads * head_dim")
    kv_rows = (sizes.kv_heads * sizes.head_dim, "num_key_value_heads * head_dim")
    intermediate = (sizes.intermediate, "intermediate_size")
    specs: list[TensorSpec] = []

    def add(name: str, source: str, *dims: tuple[int, str]) -> None:
        shape = tuple(size for size, _ in dims)
        specs.append(TensorSpec(name, source, shape, ", ".join(key for _, key in dims)))

    if facts.has_embedding:
        add("embed.weight", "embed_tokens.weight", (sizes.vocab, "vocab_size"), hidden)
    if kind == EAGLE3:
        num_aux = len(drafter["aux_layers"])
        columns = (num_aux * target_hidden, f"{num_aux} * hidden size of the target")
        if facts.has_input_norm:
            add("fc_input_norm.weight", "input_norm.weight", columns)
        for i in range(facts.num_fc_norms):
            width = (target_hidden, "hidden size of the target")
            add(f"fc_norm.{i}.weight", f"fc_norm.{i}.weight", width)
    else:
        columns = (sizes.hidden + target_hidden, "2 * hidden_size")
    add("fc.weight", "fc.weight", hidden, columns)
    if facts.has_fc_bias:
        add("fc.bias", "fc.bias", hidden)
    for i in range(sizes.layers):
        theirs = facts.first_layer if i == 0 else f"layers.{i}."
        _add_layer(
            add,
            f"layers.{i}.",
            theirs,
            norms=_layer_norms(kind, i, facts),
            facts=facts,
            dims={
                "attn_in": (2 * sizes.hidden, "2 * hidden_size")
                if kind == EAGLE3 and i == 0
                else hidden,
                "hidden": hidden,
                "qo": qo_rows,
                "kv": kv_rows,
                "mlp": intermediate,
                "head": (sizes.head_dim, "head_dim"),
            },
        )
    if facts.has_final_norm or kind == EAGLE3:
        add("final_norm.weight", "norm.weight", hidden)
    if facts.draft_vocab_size is not None:
        add("lm_head.weight", "lm_head.weight", (facts.draft_vocab_size, "rows"), hidden)
    return tuple(specs)


def _layer_norms(kind: str, index: int, facts: Facts) -> list[tuple[str, str]]:
    norms = [("mlp_norm.weight", "post_attention_layernorm.weight")]
    if kind == EAGLE3 or index > 0 or facts.has_attn_norm:
        norms.insert(0, ("attn_norm.weight", "input_layernorm.weight"))
    if kind == EAGLE3 and index == 0:
        norms.insert(0, ("hidden_norm.weight", "hidden_norm.weight"))
    return norms


def _add_layer(
    add: Callable[..., None],
    ours: str,
    theirs: str,
    *,
    norms: list[tuple[str, str]],
    facts: Facts,
    dims: Mapping[str, tuple[int, str]],
) -> None:
    for name, source in norms:
        add(ours + name, theirs + source, dims["hidden"])
    if facts.has_qk_norm:
        for name, source in QK_NORMS:
            add(ours + name, theirs + source, dims["head"])
    out_in = {
        "attn.q": ("qo", "attn_in", facts.has_qkv_bias),
        "attn.k": ("kv", "attn_in", facts.has_qkv_bias),
        "attn.v": ("kv", "attn_in", facts.has_qkv_bias),
        "attn.o": ("hidden", "qo", facts.has_o_bias),
        "mlp.gate": ("mlp", "hidden", facts.has_mlp_bias),
        "mlp.up": ("mlp", "hidden", facts.has_mlp_bias),
        "mlp.down": ("hidden", "mlp", facts.has_mlp_bias),
    }
    for name, source in LINEARS:
        rows, columns, has_bias = out_in[name]
        add(f"{ours}{name}.weight", f"{theirs}{source}.weight", dims[rows], dims[columns])
        if has_bias:
            add(f"{ours}{name}.bias", f"{theirs}{source}.bias", dims[rows])
