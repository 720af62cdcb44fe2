# SPDX-License-Identifier: Apache-2.0
"""The tensors of Qwen3.5 and Qwen3-Next: canonical names, names in checkpoints, shapes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .decoder import Sizes
from .decoder_tensors import PRE_NORMS, QK_NORMS, matrix_specs, tensor_spec
from .family import TensorSpec
from .formats import (
    FP8_BLOCK,
    FP8_DTYPE,
    PLAIN_DTYPES,
    SCALE_DTYPES,
    Dim,
    LayerFormats,
    MatrixFormat,
)
from .layer_types import FULL
from .qwen3_5_formats import Formats
from .row_part import RowPart


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net.

    Attributes:
        key_heads: The heads of q and k.
        value_heads: Those of v, a multiple of them: consecutive ones share a key head.
        key_dim: The elements of a head of q or k.
        value_dim: Those of v.
        taps: The inputs of the convolution, the row's own included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """The elements of all heads of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The elements of all heads of v."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """The mixture of a layer.

    Attributes:
        count: How many experts there are.
        top_k: How many of them a token uses.
        intermediate: The width of each of them.
        shared: The width of the shared expert.
    """

    count: int
    top_k: int
    intermediate: int
    shared: int


@dataclass(frozen=True)
class Shape:
    """What a configuration says about a target.

    Attributes:
        sizes: The sizes that all layers share; `intermediate` is 0 where every layer has experts.
        layer_types: The kind of attention of each layer.
        delta: The gated delta nets.
        rotated: The elements of a head that full attention rotates.
        experts: The mixtures; None: every MLP is dense.
        dense_layers: The layers whose MLP is dense.
        is_interleaved: The projections of a delta net are grouped by key head.
        ties_lm_head: The embeddings are the lm_head.
        formats: The formats of each layer's matrices.
    """

    sizes: Sizes
    layer_types: tuple[str, ...]
    delta: DeltaNet
    rotated: int
    experts: Experts | None
    dense_layers: frozenset[int]
    is_interleaved: bool
    ties_lm_head: bool
    formats: tuple[Formats, ...]

    @property
    def hidden(self) -> Dim:
        """The width of hidden states."""
        return self.sizes.hidden, "hidden_size"


def decoder_tensors(shape: Shape, *, is_per_expert: bool) -> Iterator[TensorSpec]:
    """Lists every tensor, in the order in which the model is filled."""
    hidden = shape.hidden
    vocab = (shape.sizes.vocab, "vocab_size")
    yield tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden)
    for i, (layer_type, formats) in enumerate(zip(shape.layer_types, shape.formats, strict=True)):
        layer, is_dense = f"layers.{i}.", i in shape.dense_layers
        if layer_type == FULL:
            yield from full_layer_tensors(
                shape, formats, layer, layer, is_dense=is_dense, is_per_expert=is_per_expert
            )
            continue
        yield from _norms(shape, layer, layer)
        yield from _delta_net(shape, formats, f"{layer}attn.", f"{layer}linear_attn.")
        yield from _mlp(
            shape, formats, layer, layer, is_dense=is_dense, is_per_expert=is_per_expert
        )
    yield tensor_spec("final_norm.weight", "norm.weight", hidden)
    if not shape.ties_lm_head:
        yield tensor_spec("lm_head.weight", "lm_head.weight", vocab, hidden)


def full_layer_tensors(
    shape: Shape,
    formats: Formats,
    ours: str,
    theirs: str,
    *,
    is_dense: bool,
    is_per_expert: bool,
) -> Iterator[TensorSpec]:
    """Lists the tensors of a layer with full attention.

    Args:
        shape: The target.
        formats: The layer's.
        ours: The beginning of canonical names.
        theirs: The beginning of names in the checkpoint.
        is_dense: Its MLP has no experts.
        is_per_expert: Each expert has tensors of its own.
    """
    yield from _norms(shape, ours, theirs)
    sizes, hidden = shape.sizes, shape.hidden
    dim = sizes.head_dim
    for name, source in QK_NORMS:
        yield tensor_spec(ours + name, theirs + source, (dim, "head_dim"))
    heads = (sizes.qo_heads * dim, "num_attention_heads * head_dim")
    kv = (sizes.kv_heads * dim, "num_key_value_heads * head_dim")
    # Head by head the rows of q, and then those of its gate.
    own = formats.own
    for i, name in enumerate(("q", "gate")):
        yield from _part(
            f"{ours}attn.{name}",
            f"{theirs}self_attn.q_proj",
            RowPart(sizes.qo_heads, 2 * dim, i * dim, dim),
            hidden,
            "2 * num_attention_heads * head_dim",
            own.qkv,
        )
    for name, rows, columns, format in (
        ("k", kv, hidden, own.qkv),
        ("v", kv, hidden, own.qkv),
        ("o", hidden, heads, own.o),
    ):
        source = f"{theirs}self_attn.{name}_proj"
        yield from matrix_specs(f"{ours}attn.{name}", source, rows, columns, format)
    yield from _mlp(shape, formats, ours, theirs, is_dense=is_dense, is_per_expert=is_per_expert)


def _norms(shape: Shape, ours: str, theirs: str) -> Iterator[TensorSpec]:
    for name, source in PRE_NORMS:
        yield tensor_spec(ours + name, theirs + source, shape.hidden)


def _part(
    name: str,
    source: str,
    part: RowPart,
    columns: Dim,
    rows_key: str,
    format: MatrixFormat | None = None,
) -> Iterator[TensorSpec]:
    """Some rows of a stored matrix, with their scales; the key is that of all of its rows."""
    size, key = columns
    yield TensorSpec(
        f"{name}.weight",
        f"{source}.weight",
        (part.rows, size),
        f"{rows_key}, {key}",
        PLAIN_DTYPES if format is None else (FP8_DTYPE,),
        part=part,
        stored_shapes=((part.stored_rows, size),),
    )
    if format is None:
        return
    stored = format.scale_dims((part.stored_rows, rows_key), columns)
    scales = format.scale_dims((part.rows, rows_key), columns)
    yield TensorSpec(
        f"{name}.scales",
        f"{source}.{format.suffix}",
        tuple(count for count, _ in scales),
        ", ".join(key for _, key in stored),
        SCALE_DTYPES,
        part={"tensor": None, "row": part}.get(format.scales, part.over(FP8_BLOCK)),
        stored_shapes=(tuple(count for count, _ in stored),),
    )


def _delta_net(shape: Shape, formats: Formats, ours: str, theirs: str) -> Iterator[TensorSpec]:
    delta, hidden = shape.delta, shape.hidden
    keys, values = delta.keys, delta.values
    channels = 2 * keys + values
    value_heads = (delta.value_heads, "linear_num_value_heads")
    key_rows = "linear_num_key_heads * linear_key_head_dim"
    value_rows = "linear_num_value_heads * linear_value_head_dim"
    channels_key = f"2 * {key_rows} + {value_rows}"

    def rows_of(
        source: str,
        each: tuple[tuple[str, int], ...],
        groups: int,
        rows_key: str,
        format: MatrixFormat | None = None,
    ) -> Iterator[TensorSpec]:
        """Consecutive rows of each group of a matrix."""
        stored = sum(count for _, count in each)
        first = 0
        for name, count in each:
            part = RowPart(groups, stored, first, count)
            yield from _part(f"{ours}{name}", f"{theirs}{source}", part, hidden, rows_key, format)
            first += count

    if shape.is_interleaved:
        ratio = delta.value_heads // delta.key_heads
        dim, wide = delta.key_dim, ratio * delta.value_dim
        parts = (("q", dim), ("k", dim), ("v", wide), ("z", wide))
        rows_key = f"2 * {key_rows} + 2 * {value_rows}"
        yield from rows_of("in_proj_qkvz", parts, delta.key_heads, rows_key, formats.own.qkv)
        yield from rows_of(
            "in_proj_ba",
            (("b", ratio), ("a", ratio)),
            delta.key_heads,
            "2 * linear_num_value_heads",
        )
    else:
        three = (("q", keys), ("k", keys), ("v", values))
        yield from rows_of("in_proj_qkv", three, 1, channels_key, formats.own.qkv)
        for name, rows, format in (
            ("z", (values, value_rows), formats.own.qkv),
            ("b", value_heads, None),
            ("a", value_heads, None),
        ):
            source = f"{theirs}in_proj_{name}"
            yield from matrix_specs(f"{ours}{name}", source, rows, hidden, format)
    yield TensorSpec(
        f"{ours}conv",
        f"{theirs}conv1d.weight",
        (channels, delta.taps),
        f"{channels_key}, 1, linear_conv_kernel_dim",
        part=RowPart(1, channels, 0, channels),
        stored_shapes=((channels, 1, delta.taps), (channels, delta.taps, 1)),
    )
    yield tensor_spec(f"{ours}a_log", f"{theirs}A_log", value_heads)
    yield tensor_spec(f"{ours}dt_bias", f"{theirs}dt_bias", value_heads)
    yield tensor_spec(
        f"{ours}norm", f"{theirs}norm.weight", (delta.value_dim, "linear_value_head_dim")
    )
    yield from matrix_specs(
        f"{ours}o", f"{theirs}out_proj", hidden, (values, value_rows), formats.own.o
    )


def _unit(
    formats: LayerFormats, ours: str, theirs: str, suffix: str, hidden: Dim, intermediate: Dim
) -> Iterator[TensorSpec]:
    """The matrices of a dense MLP or of an expert, whose number is the suffix of our names."""
    for name, rows, columns, format in (
        ("gate", intermediate, hidden, formats.gate_up),
        ("up", intermediate, hidden, formats.gate_up),
        ("down", hidden, intermediate, formats.down),
    ):
        yield from matrix_specs(
            f"{ours}{name}{suffix}", f"{theirs}{name}_proj", rows, columns, format
        )


def _mlp(
    shape: Shape,
    formats: Formats,
    ours: str,
    theirs: str,
    *,
    is_dense: bool,
    is_per_expert: bool,
) -> Iterator[TensorSpec]:
    hidden, experts = shape.hidden, shape.experts
    ours, theirs = f"{ours}mlp.", f"{theirs}mlp."
    if is_dense or experts is None:
        intermediate = (shape.sizes.intermediate, "intermediate_size")
        yield from _unit(formats.own, ours, theirs, "", hidden, intermediate)
        return
    count = (experts.count, "num_experts")
    intermediate = (experts.intermediate, "moe_intermediate_size")
    yield tensor_spec(f"{ours}router.weight", f"{theirs}gate.weight", count, hidden)
    if is_per_expert:
        for i in range(experts.count):
            source = f"{theirs}experts.{i}."
            yield from _unit(formats.own, f"{ours}experts.", source, f".{i}", hidden, intermediate)
    else:
        wide = (2 * experts.intermediate, "2 * moe_intermediate_size")
        for name, dims in (("gate_up", (wide, hidden)), ("down", (hidden, intermediate))):
            yield tensor_spec(
                f"{ours}experts.{name}.weight", f"{theirs}experts.{name}_proj", count, *dims
            )
    shared = (experts.shared, "shared_expert_intermediate_size")
    source = f"{theirs}shared_expert."
    yield from _unit(formats.shared, f"{ours}shared.", source, "", hidden, shared)
    yield tensor_spec(
        f"{ours}shared_gate.weight", f"{theirs}shared_expert_gate.weight", (1, "1"), hidden
    )
