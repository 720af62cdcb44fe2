# SPDX-License-Identifier: Apache-2.0
"""The tensors of DeepSeek-V4, which have three sets of names.

Published files have names of their own; transformers saves a mixture of them and of its own; in
memory it has its own, with one tensor for a matrix of all experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .decoder_tensors import tensor_spec
from .family import TensorSpec
from .formats import FP8_DTYPE, MXFP4_COLUMNS, Dim, MatrixFormat

# Stored dtypes.
_E8M0_DTYPES: Final = ("F8_E8M0", "U8")
_FP4_DTYPES: Final = ("I8", "U8")
_ID_DTYPES: Final = ("I64", "I32")

_ROOT_NAMES: Final = {
    "embed.weight": "embed_tokens.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}
# Within a layer, the names of modules in transformers by those in published files.
_MODULE_NAMES: Final = (
    (r"^attn_norm\.", "input_layernorm."),
    (r"^ffn_norm\.", "post_attention_layernorm."),
    (r"^hc_(attn|ffn)_", r"\1_hc."),
    (r"^attn\.indexer\.weights_proj\.", "self_attn.compressor.indexer.scorer.weights_proj."),
    (r"^attn\.indexer\.wq_b\.", "self_attn.compressor.indexer.q_b_proj."),
    (r"^attn\.indexer\.compressor\.", "self_attn.compressor.indexer."),
    (r"^attn\.", "self_attn."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"^ffn\.gate\.bias$", "mlp.gate.e_score_correction_bias"),
    (r"^ffn\.", "mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
)


@dataclass(frozen=True)
class Layout:
    """One set of names.

    Attributes:
        prefix: What all names but that of the lm_head begin with.
        lm_head: The name of the lm_head.
        is_joined: There is one tensor for a matrix of all experts.
    """

    prefix: str
    lm_head: str
    is_joined: bool = False

    def name(self, layer: str, published: str) -> str:
        """The name of a tensor.

        Args:
            layer: "layers.N.", "mtp.0." or nothing.
            published: The published name after that.
        """
        if self == PUBLISHED:
            return layer + published
        if not layer:
            return _ROOT_NAMES.get(published, published)
        if self == SAVED:
            return layer + published.replace("attn.kv_norm.", "attn.norm.")
        for pattern, replacement in _MODULE_NAMES:
            published = re.sub(pattern, replacement, published)
        return layer + published


PUBLISHED: Final = Layout("", "head.weight")
SAVED: Final = Layout("model.", "head.weight")
MODULES: Final = Layout("model.", "lm_head.weight", is_joined=True)


@dataclass(frozen=True)
class V4Shape:
    """The sizes that shapes of tensors follow from."""

    vocab: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    index_heads: int
    index_dim: int
    experts: int
    top_k: int
    intermediate: int
    streams: int


@dataclass(frozen=True)
class V4Layer:
    """The facts that differ from layer to layer.

    Attributes:
        ratio: The tokens of an entry; 0: there are none.
        overlaps: An entry also covers the tokens of the one before it.
        has_indexer: It chooses entries.
        has_token_experts: A table has the experts of each token.
    """

    ratio: int
    overlaps: bool
    has_indexer: bool
    has_token_experts: bool


@dataclass(frozen=True)
class V4Formats:
    """The formats of published files; None: no scales.

    Attributes:
        dense: Of matrices of attention and of shared experts.
        experts: Of experts.
    """

    dense: MatrixFormat | None = None
    experts: MatrixFormat | None = None

    @property
    def has_scales(self) -> bool:
        """Returns whether any matrix has scales."""
        return self.dense is not None or self.experts is not None

    def entries(self, *names: str) -> dict[str, Any]:
        """The entries of dense matrices in a canonical description."""
        return {} if self.dense is None else dict.fromkeys(names, self.dense.entry)

    def expert_entries(self) -> dict[str, Any]:
        """Those of experts."""
        if self.experts is None:
            return {}
        return {"gate_up": self.experts.entry, "down": self.experts.entry}


def decoder_tensors_v4(
    shape: V4Shape, layers: Sequence[V4Layer], formats: V4Formats, layout: Layout
) -> tuple[TensorSpec, ...]:
    """Every tensor of a target."""
    hidden = (shape.hidden, "hidden_size")
    vocab = (shape.vocab, "vocab_size")
    specs = [tensor_spec("embed.weight", layout.name("", "embed.weight"), vocab, hidden)]
    for i, layer in enumerate(layers):
        specs += layer_tensors(shape, layer, formats, layout, f"layers.{i}.", f"layers.{i}.")
    specs.append(tensor_spec("final_norm.weight", layout.name("", "norm.weight"), hidden))
    specs += end_mix(shape, layout, "")
    specs.append(tensor_spec("lm_head.weight", layout.lm_head, vocab, hidden))
    return tuple(specs)


def end_mix(shape: V4Shape, layout: Layout, theirs: str) -> Iterator[TensorSpec]:
    """Returns what sums the residual streams at the end of a model."""
    yield from _mix(shape, layout, "end_mix", theirs, "hc_head_", (shape.streams, "hc_mult"), 1)


def layer_tensors(
    shape: V4Shape, layer: V4Layer, formats: V4Formats, layout: Layout, ours: str, theirs: str
) -> Iterator[TensorSpec]:
    """Every tensor of a layer, whose canonical names begin with `ours` and others with `theirs`."""
    hidden = (shape.hidden, "hidden_size")
    for name, source in (("attn_norm", "attn_norm"), ("mlp_norm", "ffn_norm")):
        yield tensor_spec(f"{ours}{name}.weight", layout.name(theirs, f"{source}.weight"), hidden)
    factors = (shape.streams * (2 + shape.streams), "hc_mult * (2 + hc_mult)")
    yield from _mix(shape, layout, f"{ours}attn_mix", theirs, "hc_attn_", factors, 3)
    yield from _mix(shape, layout, f"{ours}mlp_mix", theirs, "hc_ffn_", factors, 3)
    yield from _attention(shape, layer, formats, layout, ours, theirs)
    yield from _mlp(shape, layer, formats, layout, ours, theirs)


def matrix(
    formats: V4Formats, layout: Layout, ours: str, theirs: str, source: str, rows: Dim, columns: Dim
) -> Iterator[TensorSpec]:
    """A dense matrix of published files, with its scales where it has any."""
    weight = layout.name(theirs, f"{source}.weight")
    if formats.dense is None:
        yield tensor_spec(f"{ours}.weight", weight, rows, columns)
        return
    scales = formats.dense.scale_dims(rows, columns)
    name = layout.name(theirs, f"{source}.{formats.dense.suffix}")
    yield tensor_spec(f"{ours}.weight", weight, rows, columns, dtypes=(FP8_DTYPE,))
    yield tensor_spec(f"{ours}.scales", name, *scales, dtypes=_E8M0_DTYPES)


def _mix(
    shape: V4Shape, layout: Layout, ours: str, theirs: str, source: str, factors: Dim, scales: int
) -> Iterator[TensorSpec]:
    columns = (shape.streams * shape.hidden, "hc_mult * hidden_size")
    for name, published, dims in (
        ("matrix", "fn", (factors, columns)),
        ("bias", "base", (factors,)),
        ("scale", "scale", ((scales, str(scales)),)),
    ):
        yield tensor_spec(f"{ours}.{name}", layout.name(theirs, source + published), *dims)


def _attention(
    shape: V4Shape, layer: V4Layer, formats: V4Formats, layout: Layout, ours: str, theirs: str
) -> Iterator[TensorSpec]:
    hidden = (shape.hidden, "hidden_size")
    q_rank = (shape.q_rank, "q_lora_rank")
    dim = (shape.head_dim, "head_dim")
    q_rows = (shape.heads * shape.head_dim, "num_attention_heads * head_dim")
    o_rows = (shape.o_groups * shape.o_rank, "o_groups * o_lora_rank")
    group = (q_rows[0] // shape.o_groups, "num_attention_heads * head_dim / o_groups")
    attn = f"{ours}attn."

    def vector(name: str, source: str, *dims: Dim) -> TensorSpec:
        return tensor_spec(f"{attn}{name}", layout.name(theirs, f"attn.{source}"), *dims)

    for name, source, rows, columns in (
        ("q_a", "wq_a", q_rank, hidden),
        ("kv", "wkv", dim, hidden),
        ("q_b", "wq_b", q_rows, q_rank),
        ("o_a", "wo_a", o_rows, group),
        ("o_b", "wo_b", hidden, o_rows),
    ):
        yield from matrix(formats, layout, f"{attn}{name}", theirs, f"attn.{source}", rows, columns)
    yield vector("q_a_norm.weight", "q_norm.weight", q_rank)
    yield vector("kv_norm.weight", "kv_norm.weight", dim)
    yield vector("sinks", "attn_sink", (shape.heads, "num_attention_heads"))
    if not layer.ratio:
        return
    ratio = (layer.ratio, "the layer's compress ratio")
    parts = [("compressor", "compressor", dim)]
    if layer.has_indexer:
        index_dim = (shape.index_dim, "index_head_dim")
        parts.append(("indexer", "indexer.compressor", index_dim))
        heads = (shape.index_heads, "index_n_heads")
        yield vector("indexer.weights.weight", "indexer.weights_proj.weight", heads, hidden)
        rows = (heads[0] * index_dim[0], "index_n_heads * index_head_dim")
        yield from matrix(
            formats, layout, f"{attn}indexer.q", theirs, "attn.indexer.wq_b", rows, q_rank
        )
    for name, source, (size, key) in parts:
        wide = (2 * size, f"2 * {key}") if layer.overlaps else (size, key)
        yield vector(f"{name}.kv.weight", f"{source}.wkv.weight", wide, hidden)
        yield vector(f"{name}.gate.weight", f"{source}.wgate.weight", wide, hidden)
        yield vector(f"{name}.position_bias", f"{source}.ape", ratio, wide)
        yield vector(f"{name}.norm.weight", f"{source}.norm.weight", (size, key))


def _mlp(
    shape: V4Shape, layer: V4Layer, formats: V4Formats, layout: Layout, ours: str, theirs: str
) -> Iterator[TensorSpec]:
    hidden = (shape.hidden, "hidden_size")
    inner = (shape.intermediate, "moe_intermediate_size")
    experts = (shape.experts, "n_routed_experts")
    mlp = f"{ours}mlp."

    def source(published: str) -> str:
        return layout.name(theirs, f"ffn.{published}")

    yield tensor_spec(f"{mlp}router.weight", source("gate.weight"), experts, hidden)
    if layer.has_token_experts:
        dims = ((shape.vocab, "vocab_size"), (shape.top_k, "num_experts_per_tok"))
        yield tensor_spec(
            f"{mlp}router.token_experts", source("gate.tid2eid"), *dims, dtypes=_ID_DTYPES
        )
    else:
        yield tensor_spec(f"{mlp}router.correction.bias", source("gate.bias"), experts)
    products = (
        ("gate", "w1", inner, hidden),
        ("up", "w3", inner, hidden),
        ("down", "w2", hidden, inner),
    )
    for name, published, rows, columns in products:
        yield from matrix(
            formats,
            layout,
            f"{mlp}shared.{name}",
            theirs,
            f"ffn.shared_experts.{published}",
            rows,
            columns,
        )
    if layout.is_joined:
        wide = (2 * shape.intermediate, "2 * moe_intermediate_size")
        for name, dims in (("gate_up", (wide, hidden)), ("down", (hidden, inner))):
            joined = f"{theirs}mlp.experts.{name}_proj"
            yield tensor_spec(f"{mlp}experts.{name}.weight", joined, experts, *dims)
        return
    for expert in range(shape.experts):
        for name, published, rows, columns in products:
            canonical = f"{mlp}experts.{name}.{expert}"
            yield from _expert_matrix(
                formats.experts, canonical, source(f"experts.{expert}.{published}"), rows, columns
            )


def _expert_matrix(
    format: MatrixFormat | None, ours: str, source: str, rows: Dim, columns: Dim
) -> Iterator[TensorSpec]:
    if format is None:
        yield tensor_spec(f"{ours}.weight", f"{source}.weight", rows, columns)
        return
    size, key = columns
    pairs = (size // 2, f"{key} / 2")
    blocks = (size // MXFP4_COLUMNS, f"{key} / {MXFP4_COLUMNS}")
    yield tensor_spec(f"{ours}.weight", f"{source}.weight", rows, pairs, dtypes=_FP4_DTYPES)
    yield tensor_spec(
        f"{ours}.scales", f"{source}.{format.suffix}", rows, blocks, dtypes=_E8M0_DTYPES
    )
