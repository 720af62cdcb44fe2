# SPDX-License-Identifier: Apache-2.0
"""The tensors of a decoder: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from typing import Final

from .decoder import Layer, PerLayerInputs, Sizes
from .family import TensorSpec

# Tensors of a layer: canonical name, name in the checkpoint.
LINEARS: Final = (
    ("attn.q", "self_attn.q_proj"),
    ("attn.k", "self_attn.k_proj"),
    ("attn.v", "self_attn.v_proj"),
    ("attn.o", "self_attn.o_proj"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
)
QK_NORMS: Final = (
    ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    ("attn.k_norm.weight", "self_attn.k_norm.weight"),
)
PRE_NORMS: Final = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
)
SANDWICH_NORMS: Final = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_post_norm.weight", "post_attention_layernorm.weight"),
    ("mlp_norm.weight", "pre_feedforward_layernorm.weight"),
    ("mlp_post_norm.weight", "post_feedforward_layernorm.weight"),
)


_PER_LAYER_GATE: Final = ("per_layer.gate.weight", "per_layer_input_gate.weight")
_PER_LAYER_PROJ: Final = ("per_layer.proj.weight", "per_layer_projection.weight")
_PER_LAYER_NORM: Final = ("per_layer.norm.weight", "post_per_layer_input_norm.weight")


def decoder_tensors(
    sizes: Sizes,
    layers: tuple[Layer, ...],
    *,
    ties_lm_head: bool,
    norms: tuple[tuple[str, str], ...] = PRE_NORMS,
    has_qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    has_layer_scale: bool = False,
    per_layer_inputs: PerLayerInputs | None = None,
) -> tuple[TensorSpec, ...]:
    """Lists every tensor, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")

    def spec(name: str, source: str, *dims: tuple[int, str]) -> TensorSpec:
        return TensorSpec(
            name, source, tuple(size for size, _ in dims), ", ".join(key for _, key in dims)
        )

    specs = [spec("embed.weight", "embed_tokens.weight", vocab, hidden)]
    size = width = (0, "")
    if per_layer_inputs is not None:
        size = (per_layer_inputs.size, "hidden_size_per_layer_input")
        width = (
            len(layers) * per_layer_inputs.size,
            "num_hidden_layers * hidden_size_per_layer_input",
        )
        rows = (per_layer_inputs.vocab, "vocab_size_per_layer_input")
        specs += [
            spec("per_layer.embed.weight", "embed_tokens_per_layer.weight", rows, width),
            spec("per_layer.proj.weight", "per_layer_model_projection.weight", width, hidden),
            spec("per_layer.norm.weight", "per_layer_projection_norm.weight", size),
        ]
    for i, layer in enumerate(layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        # Names of keys for messages; where layers differ, several keys apply.
        its = "" if layer.head_dim == sizes.head_dim else "the layer's "
        head_dim = (layer.head_dim, f"{its}head_dim")
        qo_rows = (sizes.qo_heads * layer.head_dim, f"num_attention_heads * {its}head_dim")
        kv_rows = (layer.kv_heads * layer.head_dim, f"{its}num_key_value_heads * {its}head_dim")
        wide = "" if layer.intermediate == sizes.intermediate else "2 * "
        intermediate = (layer.intermediate, f"{wide}intermediate_size")
        out_in = {
            "attn.q": (qo_rows, hidden),
            "attn.k": (kv_rows, hidden),
            "attn.v": (kv_rows, hidden),
            "attn.o": (hidden, qo_rows),
            "mlp.gate": (intermediate, hidden),
            "mlp.up": (intermediate, hidden),
            "mlp.down": (hidden, intermediate),
        }
        absent: set[str] = set()
        if layer.k_eq_v:
            absent = {"attn.v"}
        if not layer.owns_kv:
            absent = {"attn.k", "attn.v", "attn.k_norm.weight"}
        specs += [spec(ours + name, theirs + source, hidden) for name, source in norms]
        if has_qk_norm:
            specs += [
                spec(ours + name, theirs + source, head_dim)
                for name, source in QK_NORMS
                if name not in absent
            ]
        for name, source in LINEARS:
            if name in absent:
                continue
            rows, columns = out_in[name]
            specs.append(spec(f"{ours}{name}.weight", f"{theirs}{source}.weight", rows, columns))
            if mlp_bias if name.startswith("mlp.") else attention_bias:
                specs.append(spec(f"{ours}{name}.bias", f"{theirs}{source}.bias", rows))
        if per_layer_inputs is not None:
            for (name, source), dims in (
                (_PER_LAYER_GATE, (size, hidden)),
                (_PER_LAYER_PROJ, (hidden, size)),
                (_PER_LAYER_NORM, (hidden,)),
            ):
                specs.append(spec(ours + name, theirs + source, *dims))
        if has_layer_scale:
            specs.append(spec(f"{ours}scale", f"{theirs}layer_scalar", (1, "1")))
    specs.append(spec("final_norm.weight", "norm.weight", hidden))
    if not ties_lm_head:
        specs.append(spec("lm_head.weight", "lm_head.weight", vocab, hidden))
    return tuple(specs)
