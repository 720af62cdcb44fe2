# SPDX-License-Identifier: Apache-2.0
"""The tensors of Qwen3.5 and Qwen3-Next: canonical names, names in checkpoints, shapes and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .decoder import Sizes
from .decoder_tensors import PRE_NORMS, QK_NORMS, tensor_spec
from .family import RowPart, TensorSpec
from .formats import Dim
from .layer_types import FULL


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
    """

    sizes: Sizes
    layer_types: tuple[str, ...]
    delta: DeltaNet
    rotated: int
    experts: Experts | None
    dense_layers: frozenset[int]
    is_interleaved: bool
    ties_lm_head: bool

    @property
    def hidden(self) -> Dim:
        """The width of hidden states."""
        return self.sizes.hidden, "hidden_size"


def decoder_tensors(shape: Shape, *, is_per_expert: bool) -> Iterator[TensorSpec]:
    """Lists every tensor, in the order in which the model is filled."""
    hidden = shape.hidden
    vocab = (shape.sizes.vocab, "vocab_size")
    yield tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden)
    for i, layer_type in enumerate(shape.layer_types):
        layer = f"layers.{i}."
        if layer_type == FULL:
            yield from full_layer_tensors(
                shape, layer, layer, is_dense=i in shape.dense_layers, is_per_expert=is_per_expert
            )
            continue
        yield from _norms(shape, layer, layer)
        yield from _delta_net(shape, f"{layer}attn.", f"{layer}linear_attn.")
        yield from _mlp(
            shape, layer, layer, is_dense=i in shape.dense_layers, is_per_expert=is_per_expert
        )
    yield tensor_spec("final_norm.weight", "norm.weight", hidden)
    if not shape.ties_lm_head:
        yield tensor_spec("lm_head.weight", "lm_head.weight", vocab, hidden)


def full_layer_tensors(
    shape: Shape, ours: str, theirs: str, *, is_dense: bool, is_per_expert: bool
) -> Iterator[TensorSpec]:
    """Lists the tensors of a layer with full attention.

    Args:
        shape: The target.
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
    for i, name in enumerate(("q", "gate")):
        yield _part(
            f"{ours}attn.{name}.weight",
            f"{theirs}self_attn.q_proj.weight",
            RowPart(sizes.qo_heads, 2 * dim, i * dim, dim),
            hidden,
            "2 * num_attention_heads * head_dim",
        )
    for name, rows, columns in (("k", kv, hidden), ("v", kv, hidden), ("o", hidden, heads)):
        source = f"{theirs}self_attn.{name}_proj.weight"
        yield tensor_spec(f"{ours}attn.{name}.weight", source, rows, columns)
    yield from _mlp(shape, ours, theirs, is_dense=is_dense, is_per_expert=is_per_expert)


def _norms(shape: Shape, ours: str, theirs: str) -> Iterator[TensorSpec]:
    for name, source in PRE_NORMS:
        yield tensor_spec(ours + name, theirs + source, shape.hidden)


def _part(name: str, source: str, part: RowPart, columns: Dim, rows_key: str) -> TensorSpec:
    """Some rows of a stored matrix; the key is that of all of its rows."""
    size, key = columns
    return TensorSpec(
        name,
        source,
        (part.rows, size),
        f"{rows_key}, {key}",
        part=part,
        stored_shapes=((part.stored_rows, size),),
    )


def _delta_net(shape: Shape, ours: str, theirs: str) -> Iterator[TensorSpec]:
    delta, hidden = shape.delta, shape.hidden
    keys, values = delta.keys, delta.values
    channels = 2 * keys + values
    value_heads = (delta.value_heads, "linear_num_value_heads")
    key_rows = "linear_num_key_heads * linear_key_head_dim"
    value_rows = "linear_num_value_heads * linear_value_head_dim"
    channels_key = f"2 * {key_rows} + {value_rows}"

    def rows_of(
        source: str, each: tuple[tuple[str, int], ...], groups: int, rows_key: str
    ) -> Iterator[TensorSpec]:
        """Consecutive rows of each group of a matrix."""
        stored = sum(count for _, count in each)
        first = 0
        for name, count in each:
            yield _part(
                f"{ours}{name}.weight",
                f"{theirs}{source}.weight",
                RowPart(groups, stored, first, count),
                hidden,
                rows_key,
            )
            first += count

    if shape.is_interleaved:
        ratio = delta.value_heads // delta.key_heads
        dim, wide = delta.key_dim, ratio * delta.value_dim
        parts = (("q", dim), ("k", dim), ("v", wide), ("z", wide))
        yield from rows_of(
            "in_proj_qkvz", parts, delta.key_heads, f"2 * {key_rows} + 2 * {value_rows}"
        )
        yield from rows_of(
            "in_proj_ba",
            (("b", ratio), ("a", ratio)),
            delta.key_heads,
            "2 * linear_num_value_heads",
        )
    else:
        yield from rows_of(
            "in_proj_qkv", (("q", keys), ("k", keys), ("v", values)), 1, channels_key
        )
        for name, rows in (("z", (values, value_rows)), ("b", value_heads), ("a", value_heads)):
            source = f"{theirs}in_proj_{name}.weight"
            yield tensor_spec(f"{ours}{name}.weight", source, rows, hidden)
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
    yield tensor_spec(f"{ours}o.weight", f"{theirs}out_proj.weight", hidden, (values, value_rows))


def _unit(
    ours: str, theirs: str, suffix: str, hidden: Dim, intermediate: Dim
) -> Iterator[TensorSpec]:
    """The matrices of a dense MLP or of an expert, whose number is the suffix of our names."""
    for name, rows, columns in (
        ("gate", intermediate, hidden),
        ("up", intermediate, hidden),
        ("down", hidden, intermediate),
    ):
        yield tensor_spec(
            f"{ours}{name}{suffix}.weight", f"{theirs}{name}_proj.weight", rows, columns
        )


def _mlp(
    shape: Shape, ours: str, theirs: str, *, is_dense: bool, is_per_expert: bool
) -> Iterator[TensorSpec]:
    hidden, experts = shape.hidden, shape.experts
    ours, theirs = f"{ours}mlp.", f"{theirs}mlp."
    if is_dense or experts is None:
        intermediate = (shape.sizes.intermediate, "intermediate_size")
        yield from _unit(ours, theirs, "", hidden, intermediate)
        return
    count = (experts.count, "num_experts")
    intermediate = (experts.intermediate, "moe_intermediate_size")
    yield tensor_spec(f"{ours}router.weight", f"{theirs}gate.weight", count, hidden)
    if is_per_expert:
        for i in range(experts.count):
            yield from _unit(
                f"{ours}experts.", f"{theirs}experts.{i}.", f".{i}", hidden, intermediate
            )
    else:
        wide = (2 * experts.intermediate, "2 * moe_intermediate_size")
        for name, dims in (("gate_up", (wide, hidden)), ("down", (hidden, intermediate))):
            yield tensor_spec(
                f"{ours}experts.{name}.weight", f"{theirs}experts.{name}_proj", count, *dims
            )
    shared = (experts.shared, "shared_expert_intermediate_size")
    yield from _unit(f"{ours}shared.", f"{theirs}shared_expert.", "", hidden, shared)
    yield tensor_spec(
        f"{ours}shared_gate.weight", f"{theirs}shared_expert_gate.weight", (1, "1"), hidden
    )
