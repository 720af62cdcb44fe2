# SPDX-License-Identifier: Apache-2.0
"""The tensors of a decoder: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .decoder import Layer, Mixture, PerLayerInputs, Sizes
from .family import TensorSpec
from .formats import (
    FP8_DTYPE,
    MXFP4_COLUMNS,
    MXFP4_DTYPE,
    PLAIN_DTYPES,
    SCALE_DTYPES,
    Dim,
    MatrixFormat,
)

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
    has_sinks: bool = False,
    mixture: Mixture | None = None,
    per_layer_inputs: PerLayerInputs | None = None,
) -> tuple[TensorSpec, ...]:
    """Lists every tensor, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")

    specs = [tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden)]
    size = width = (0, "")
    if per_layer_inputs is not None:
        size = (per_layer_inputs.size, "hidden_size_per_layer_input")
        width = (
            len(layers) * per_layer_inputs.size,
            "num_hidden_layers * hidden_size_per_layer_input",
        )
        rows = (per_layer_inputs.vocab, "vocab_size_per_layer_input")
        specs += [
            tensor_spec("per_layer.embed.weight", "embed_tokens_per_layer.weight", rows, width),
            tensor_spec(
                "per_layer.proj.weight", "per_layer_model_projection.weight", width, hidden
            ),
            tensor_spec("per_layer.norm.weight", "per_layer_projection_norm.weight", size),
        ]
    for i, layer in enumerate(layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        specs += layer_tensors(
            ours,
            theirs,
            sizes,
            layer,
            norms=norms,
            has_qk_norm=has_qk_norm,
            has_qkv_bias=attention_bias,
            has_o_bias=attention_bias,
            has_mlp_bias=mlp_bias,
            has_dense_mlp=mixture is None,
        )
        if has_sinks:
            heads = (sizes.qo_heads, "num_attention_heads")
            specs.append(tensor_spec(f"{ours}attn.sinks", f"{theirs}self_attn.sinks", heads))
        if mixture is not None:
            width_of_expert = (layer.intermediate, "intermediate_size")
            specs += _mixture(
                f"{ours}mlp.", f"{theirs}mlp.", mixture, layer, hidden, width_of_expert
            )
        if per_layer_inputs is not None:
            for (name, source), dims in (
                (_PER_LAYER_GATE, (size, hidden)),
                (_PER_LAYER_PROJ, (hidden, size)),
                (_PER_LAYER_NORM, (hidden,)),
            ):
                specs.append(tensor_spec(ours + name, theirs + source, *dims))
        if has_layer_scale:
            specs.append(tensor_spec(f"{ours}scale", f"{theirs}layer_scalar", (1, "1")))
    specs.append(tensor_spec("final_norm.weight", "norm.weight", hidden))
    if not ties_lm_head:
        specs.append(tensor_spec("lm_head.weight", "lm_head.weight", vocab, hidden))
    return tuple(specs)


def layer_tensors(
    ours: str,
    theirs: str,
    sizes: Sizes,
    layer: Layer,
    *,
    norms: Sequence[tuple[str, str]],
    has_qk_norm: bool = False,
    has_qkv_bias: bool = False,
    has_o_bias: bool = False,
    has_mlp_bias: bool = False,
    has_dense_mlp: bool = True,
    attention_input: Dim | None = None,
) -> list[TensorSpec]:
    """Lists the norms and the Linears of a layer, in the order in which the model is filled.

    Args:
        ours: The beginning of canonical names.
        theirs: The beginning of names in the checkpoint.
        sizes: The sizes that all layers share.
        layer: The layer's own.
        norms: Canonical name and name in the checkpoint of every norm as wide as the hidden size.
        has_qk_norm: It has norms on q and k.
        has_qkv_bias: It has biases on q, k and v.
        has_o_bias: It has a bias on o.
        has_mlp_bias: It has biases on gate, up and down.
        has_dense_mlp: It has gate, up and down.
        attention_input: Columns of q, k and v; None: the hidden size.
    """
    hidden = (sizes.hidden, "hidden_size")
    inputs = attention_input or hidden
    # Names of keys for messages; where layers differ, several keys apply.
    its = "" if layer.head_dim == sizes.head_dim else "the layer's "
    head_dim = (layer.head_dim, f"{its}head_dim")
    qo = (sizes.qo_heads * layer.head_dim, f"num_attention_heads * {its}head_dim")
    kv = (layer.kv_heads * layer.head_dim, f"{its}num_key_value_heads * {its}head_dim")
    wide = "" if layer.intermediate == sizes.intermediate else "2 * "
    mlp = (layer.intermediate, f"{wide}intermediate_size")
    linears = {
        "attn.q": (qo, inputs, has_qkv_bias),
        "attn.k": (kv, inputs, has_qkv_bias),
        "attn.v": (kv, inputs, has_qkv_bias),
        "attn.o": (hidden, qo, has_o_bias),
        "mlp.gate": (mlp, hidden, has_mlp_bias),
        "mlp.up": (mlp, hidden, has_mlp_bias),
        "mlp.down": (hidden, mlp, has_mlp_bias),
    }
    absent: set[str] = set() if has_dense_mlp else {"mlp.gate", "mlp.up", "mlp.down"}
    if layer.k_eq_v:
        absent |= {"attn.v"}
    if not layer.owns_kv:
        absent |= {"attn.k", "attn.v", "attn.k_norm.weight"}
    specs = [tensor_spec(ours + name, theirs + source, hidden) for name, source in norms]
    if has_qk_norm:
        specs += [
            tensor_spec(ours + name, theirs + source, head_dim)
            for name, source in QK_NORMS
            if name not in absent
        ]
    for name, source in LINEARS:
        if name in absent:
            continue
        rows, columns, has_bias = linears[name]
        specs += matrix_specs(
            f"{ours}{name}", f"{theirs}{source}", rows, columns, layer.formats.of(name)
        )
        if has_bias:
            specs.append(tensor_spec(f"{ours}{name}.bias", f"{theirs}{source}.bias", rows))
    return specs


def tensor_spec(
    name: str, source: str, *dims: Dim, dtypes: tuple[str, ...] = PLAIN_DTYPES
) -> TensorSpec:
    """A tensor, its shape given by sizes with the keys that they follow from."""
    return TensorSpec(
        name, source, tuple(size for size, _ in dims), ", ".join(key for _, key in dims), dtypes
    )


def matrix_specs(
    name: str, source: str, rows: Dim, columns: Dim, format: MatrixFormat | None
) -> list[TensorSpec]:
    """The matrix of a Linear, and its scales."""
    if format is None:
        return [tensor_spec(f"{name}.weight", f"{source}.weight", rows, columns)]
    scales = format.scale_dims(rows, columns)
    return [
        tensor_spec(f"{name}.weight", f"{source}.weight", rows, columns, dtypes=(FP8_DTYPE,)),
        tensor_spec(f"{name}.scales", f"{source}.{format.suffix}", *scales, dtypes=SCALE_DTYPES),
    ]


def _mixture(
    ours: str, theirs: str, mixture: Mixture, layer: Layer, hidden: Dim, intermediate: Dim
) -> list[TensorSpec]:
    """The router and the experts of a layer."""
    experts = (mixture.experts, "num_local_experts")
    wide = (2 * intermediate[0], f"2 * {intermediate[1]}")
    specs = [
        tensor_spec(f"{ours}router.weight", f"{theirs}router.weight", experts, hidden),
        tensor_spec(f"{ours}router.bias", f"{theirs}router.bias", experts),
    ]
    for name, rows, columns, format in (
        ("gate_up", wide, hidden, layer.formats.gate_up),
        ("down", hidden, intermediate, layer.formats.down),
    ):
        canonical, source = f"{ours}experts.{name}", f"{theirs}experts.{name}_proj"
        if format is None:
            # x @ W, not x @ W^T.
            specs.append(tensor_spec(f"{canonical}.weight", source, experts, columns, rows))
        else:
            size, keys = columns
            scales = (experts, rows, (size // MXFP4_COLUMNS, f"{keys} / {MXFP4_COLUMNS}"))
            block = (MXFP4_COLUMNS // 2, f"{MXFP4_COLUMNS // 2}")
            u8 = (MXFP4_DTYPE,)
            specs += [
                tensor_spec(f"{canonical}.weight", f"{source}_blocks", *scales, block, dtypes=u8),
                tensor_spec(f"{canonical}.scales", f"{source}_scales", *scales, dtypes=u8),
            ]
        specs.append(tensor_spec(f"{canonical}.bias", f"{source}_bias", experts, rows))
    return specs
