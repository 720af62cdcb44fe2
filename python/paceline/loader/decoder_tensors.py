# SPDX-License-Identifier: Apache-2.0
"""The tensors of a decoder: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from .decoder import Layer, Sizes
from .family import TensorSpec
from .formats import (
    FP8_DTYPE,
    NO_FORMATS,
    PLAIN_DTYPES,
    SCALE_DTYPES,
    Dim,
    LayerFormats,
    MatrixFormat,
)
from .fp4 import fp4_specs
from .int4_tensors import int4_specs, order_specs

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
# Those that are one matrix in memory, by its canonical name.
_JOINED: Final = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.o": ("attn.o",),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.down": ("mlp.down",),
}
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
# The tensors of a layer that has an input of its own from the token.
_PER_LAYER: Final = (
    ("per_layer.gate.weight", "per_layer_input_gate.weight"),
    ("per_layer.proj.weight", "per_layer_projection.weight"),
    ("per_layer.norm.weight", "post_per_layer_input_norm.weight"),
)

#: Lists the tensors of a mixture of experts: the beginning of their names, which is the same in the
#: checkpoint, the MLP in the description, and the layer.
MixtureTensors = Callable[[str, Mapping[str, Any], Layer], Iterable[TensorSpec]]


def decoder_tensors(
    config: Mapping[str, Any],
    sizes: Sizes,
    layers: Sequence[Layer],
    mixture_tensors: MixtureTensors | None = None,
) -> tuple[TensorSpec, ...]:
    """Lists every tensor of a model that `describe` described, in the order in which it is filled.

    Args:
        config: The description.
        sizes: The sizes that it was made of.
        layers: The layers that it was made of.
        mixture_tensors: Lists the tensors of layers whose MLP is a mixture of experts.
    """
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")
    norms = SANDWICH_NORMS if config["has_post_norms"] else PRE_NORMS
    specs = [tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden)]
    inputs = config.get("per_layer_inputs")
    size = (0 if inputs is None else inputs["size"], "hidden_size_per_layer_input")
    if inputs is not None:
        width = (len(layers) * size[0], f"num_hidden_layers * {size[1]}")
        rows = (inputs["vocab_size"], "vocab_size_per_layer_input")
        specs += [
            tensor_spec("per_layer.embed.weight", "embed_tokens_per_layer.weight", rows, width),
            tensor_spec(
                "per_layer.proj.weight", "per_layer_model_projection.weight", width, hidden
            ),
            tensor_spec("per_layer.norm.weight", "per_layer_projection_norm.weight", size),
        ]
    for i, (layer, entry) in enumerate(zip(layers, config["layers"], strict=True)):
        name = f"layers.{i}."
        specs += layer_tensors(name, name, sizes, layer, entry, norms)
        if entry["attention"].get("has_sinks"):
            heads = (sizes.qo_heads, "num_attention_heads")
            specs.append(tensor_spec(f"{name}attn.sinks", f"{name}self_attn.sinks", heads))
        if mixture_tensors is not None and "num_experts" in entry["mlp"]:
            specs += mixture_tensors(f"{name}mlp.", entry["mlp"], layer)
        if inputs is not None:
            for (ours, source), dims in zip(
                _PER_LAYER, ((size, hidden), (hidden, size), (hidden,)), strict=True
            ):
                specs.append(tensor_spec(name + ours, name + source, *dims))
        if config.get("has_layer_scale"):
            specs.append(tensor_spec(f"{name}scale", f"{name}layer_scalar", (1, "1")))
    specs.append(tensor_spec("final_norm.weight", "norm.weight", hidden))
    if not config["ties_lm_head"]:
        specs.append(tensor_spec("lm_head.weight", "lm_head.weight", vocab, hidden))
    return tuple(specs)


def layer_tensors(
    ours: str,
    theirs: str,
    sizes: Sizes,
    layer: Layer,
    entry: Mapping[str, Any],
    norms: Sequence[tuple[str, str]],
    attention_input: Dim | None = None,
) -> list[TensorSpec]:
    """Lists the norms and the Linears of a layer, in the order in which the model is filled.

    Args:
        ours: The beginning of canonical names.
        theirs: The beginning of names in the checkpoint.
        sizes: The sizes that all layers share.
        layer: Its settings.
        entry: The layer in the description. Of a mixture of experts no tensor is listed.
        norms: Its norms besides those of heads: canonical name, name in the checkpoint.
        attention_input: The columns of q, k and v; None: the hidden size.
    """
    attention, has_mlp_bias = entry["attention"], entry["mlp"]["has_bias"]
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
        "attn.q": (qo, inputs, attention["has_qkv_bias"]),
        "attn.k": (kv, inputs, attention["has_qkv_bias"]),
        "attn.v": (kv, inputs, attention["has_qkv_bias"]),
        "attn.o": (hidden, qo, attention["has_o_bias"]),
        "mlp.gate": (mlp, hidden, has_mlp_bias),
        "mlp.up": (mlp, hidden, has_mlp_bias),
        "mlp.down": (hidden, mlp, has_mlp_bias),
    }
    is_mixture = "num_experts" in entry["mlp"]
    absent: set[str] = {"mlp.gate", "mlp.up", "mlp.down"} if is_mixture else set()
    if layer.k_eq_v:
        absent |= {"attn.v"}
    if not layer.owns_kv:
        absent |= {"attn.k", "attn.v", "attn.k_norm.weight"}
    specs = [tensor_spec(ours + name, theirs + source, hidden) for name, source in norms]
    if attention["has_qk_norm"]:
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
    sources = dict(LINEARS)
    for joined, names in _JOINED.items():
        present = [name for name in names if name not in absent]
        if present:
            modules = [f"{theirs}{sources[name]}" for name in present]
            format = layer.formats.of(present[0])
            specs += order_specs(f"{ours}{joined}", modules, linears[present[0]][1], format)
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
    if format.name == "int4":
        return int4_specs(name, source, rows, columns, format)
    if format.name in ("mxfp4", "nvfp4"):
        return fp4_specs(name, source, rows, columns, format)
    scales = format.scale_dims(rows, columns)
    return [
        tensor_spec(f"{name}.weight", f"{source}.weight", rows, columns, dtypes=(FP8_DTYPE,)),
        tensor_spec(f"{name}.scales", f"{source}.{format.suffix}", *scales, dtypes=SCALE_DTYPES),
    ]


def mlp_tensors(
    ours: str,
    theirs: str,
    hidden: Dim,
    width: Dim,
    suffix: str = "",
    formats: LayerFormats = NO_FORMATS,
) -> Iterator[TensorSpec]:
    """The matrices of a dense MLP or of an expert, whose number is the suffix of our names."""
    for name, rows, columns in (
        ("gate", width, hidden),
        ("up", width, hidden),
        ("down", hidden, width),
    ):
        format = formats.of(f"mlp.{name}")
        source = f"{theirs}{name}_proj"
        yield from matrix_specs(f"{ours}{name}{suffix}", source, rows, columns, format)
    for joined, names, columns in (("gate_up", ("gate", "up"), hidden), ("down", ("down",), width)):
        modules = [f"{theirs}{name}_proj" for name in names]
        format = formats.of(f"mlp.{names[0]}")
        yield from order_specs(f"{ours}{joined}{suffix}", modules, columns, format)


def expert_tensors(
    ours: str,
    theirs: str,
    count: Dim,
    hidden: Dim,
    width: Dim,
    *,
    is_joined: bool,
    formats: LayerFormats = NO_FORMATS,
) -> Iterator[TensorSpec]:
    """The matrices of experts: one tensor for all of them, or tensors of each of them.

    Args:
        ours: The beginning of canonical names.
        theirs: The beginning of names in the checkpoint.
        count: How many experts there are.
        hidden: The hidden size.
        width: The width of each of them.
        is_joined: One tensor has the matrices of all experts.
        formats: The formats of other tensors than those.
    """
    ours, theirs = f"{ours}experts.", f"{theirs}experts."
    if not is_joined:
        for i in range(count[0]):
            yield from mlp_tensors(ours, f"{theirs}{i}.", hidden, width, f".{i}", formats)
        return
    wide = (2 * width[0], f"2 * {width[1]}")
    for part, dims in (("gate_up", (wide, hidden)), ("down", (hidden, width))):
        yield tensor_spec(f"{ours}{part}.weight", f"{theirs}{part}_proj", count, *dims)
