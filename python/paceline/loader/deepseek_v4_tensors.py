# SPDX-License-Identifier: Apache-2.0
"""The tensors of DeepSeek-V4, which have three sets of names.

Published files have names of their own; transformers saves a mixture of them and of its own; in
memory it has its own, with one tensor for a matrix of all experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .decoder_tensors import tensor_spec
from .family import TensorSpec
from .formats import FP8_DTYPE, Dim, MatrixFormat
from .fp4 import mxfp4_specs

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


#: The formats of published files: of matrices of attention and of shared experts, and of experts.
DENSE: Final = MatrixFormat("fp8", "block", "scale", is_exact=True)
EXPERTS: Final = MatrixFormat("mxfp4", "", "scale")


class V4Tensors:
    """The tensors of a model, or of a drafter for it, which follow from the target's description.

    Attributes:
        layout: Their names.
        hidden: The hidden size.
        vocab: The size of the vocabulary.
    """

    def __init__(self, config: Mapping[str, Any], layout: Layout) -> None:
        """Lists nothing yet.

        Args:
            config: The target's description.
            layout: The attribute.
        """
        self.layout = layout
        self.hidden: Dim = (config["hidden_size"], "hidden_size")
        self.vocab: Dim = (config["vocab_size"], "vocab_size")
        self._layers = config["layers"]
        self._streams = config["streams"]["count"]
        # Files have scales everywhere or nowhere.
        self._has_scales = "gate_up" in self._layers[0]["mlp"]

    def all(self) -> Iterator[TensorSpec]:
        """Every tensor of the target."""
        embeddings = self.layout.name("", "embed.weight")
        yield tensor_spec("embed.weight", embeddings, self.vocab, self.hidden)
        for i, layer in enumerate(self._layers):
            yield from self.layer(layer, f"layers.{i}.", f"layers.{i}.")
        yield tensor_spec("final_norm.weight", self.layout.name("", "norm.weight"), self.hidden)
        yield from self.end_mix("")
        yield tensor_spec("lm_head.weight", self.layout.lm_head, self.vocab, self.hidden)

    def end_mix(self, theirs: str) -> Iterator[TensorSpec]:
        """Returns what sums the residual streams at the end of a model."""
        yield from self._mix("end_mix", theirs, "hc_head_", (self._streams, "hc_mult"), 1)

    def layer(self, layer: Mapping[str, Any], ours: str, theirs: str) -> Iterator[TensorSpec]:
        """Every tensor of a layer.

        Args:
            layer: Its description.
            ours: The beginning of canonical names.
            theirs: The beginning of names in files.
        """
        for name, source in (("attn_norm", "attn_norm"), ("mlp_norm", "ffn_norm")):
            published = self.layout.name(theirs, f"{source}.weight")
            yield tensor_spec(f"{ours}{name}.weight", published, self.hidden)
        factors = (self._streams * (2 + self._streams), "hc_mult * (2 + hc_mult)")
        yield from self._mix(f"{ours}attn_mix", theirs, "hc_attn_", factors, 3)
        yield from self._mix(f"{ours}mlp_mix", theirs, "hc_ffn_", factors, 3)
        yield from self._attention(layer["attention"], f"{ours}attn.", theirs)
        yield from self._mlp(layer["mlp"], f"{ours}mlp.", theirs)

    def matrix(
        self, ours: str, theirs: str, source: str, rows: Dim, columns: Dim
    ) -> Iterator[TensorSpec]:
        """A dense matrix of published files, with its scales where it has any."""
        weight = self.layout.name(theirs, f"{source}.weight")
        if not self._has_scales:
            yield tensor_spec(f"{ours}.weight", weight, rows, columns)
            return
        scales = DENSE.scale_dims(rows, columns)
        name = self.layout.name(theirs, f"{source}.{DENSE.suffix}")
        yield tensor_spec(f"{ours}.weight", weight, rows, columns, dtypes=(FP8_DTYPE,))
        yield tensor_spec(f"{ours}.scales", name, *scales, dtypes=_E8M0_DTYPES)

    def _mix(
        self, ours: str, theirs: str, source: str, factors: Dim, scales: int
    ) -> Iterator[TensorSpec]:
        columns = (self._streams * self.hidden[0], "hc_mult * hidden_size")
        for name, published, dims in (
            ("matrix", "fn", (factors, columns)),
            ("bias", "base", (factors,)),
            ("scale", "scale", ((scales, str(scales)),)),
        ):
            yield tensor_spec(f"{ours}.{name}", self.layout.name(theirs, source + published), *dims)

    def _attention(
        self, attention: Mapping[str, Any], attn: str, theirs: str
    ) -> Iterator[TensorSpec]:
        hidden = self.hidden
        heads, head_dim = attention["num_qo_heads"], attention["head_dim"]
        q_rank = (attention["q_lora_rank"], "q_lora_rank")
        dim = (head_dim, "head_dim")
        q_rows = (heads * head_dim, "num_attention_heads * head_dim")
        o_rows = (attention["o_groups"] * attention["o_lora_rank"], "o_groups * o_lora_rank")
        group = (
            q_rows[0] // attention["o_groups"],
            "num_attention_heads * head_dim / o_groups",
        )

        def vector(name: str, source: str, *dims: Dim) -> TensorSpec:
            return tensor_spec(f"{attn}{name}", self.layout.name(theirs, f"attn.{source}"), *dims)

        for name, source, rows, columns in (
            ("q_a", "wq_a", q_rank, hidden),
            ("kv", "wkv", dim, hidden),
            ("q_b", "wq_b", q_rows, q_rank),
            ("o_a", "wo_a", o_rows, group),
            ("o_b", "wo_b", hidden, o_rows),
        ):
            yield from self.matrix(f"{attn}{name}", theirs, f"attn.{source}", rows, columns)
        yield vector("q_a_norm.weight", "q_norm.weight", q_rank)
        yield vector("kv_norm.weight", "kv_norm.weight", dim)
        yield vector("sinks", "attn_sink", (heads, "num_attention_heads"))
        compressor = attention.get("compressor")
        if compressor is None:
            return
        ratio = (compressor["tokens_per_entry"], "the layer's compress ratio")
        parts = [("compressor", "compressor", dim)]
        if indexer := attention.get("indexer"):
            index_dim = (indexer["head_dim"], "index_head_dim")
            parts.append(("indexer", "indexer.compressor", index_dim))
            index_heads = (indexer["num_heads"], "index_n_heads")
            yield vector(
                "indexer.weights.weight", "indexer.weights_proj.weight", index_heads, hidden
            )
            rows = (index_heads[0] * index_dim[0], "index_n_heads * index_head_dim")
            yield from self.matrix(f"{attn}indexer.q", theirs, "attn.indexer.wq_b", rows, q_rank)
        for name, source, (size, key) in parts:
            wide = (2 * size, f"2 * {key}") if compressor["overlaps"] else (size, key)
            yield vector(f"{name}.kv.weight", f"{source}.wkv.weight", wide, hidden)
            yield vector(f"{name}.gate.weight", f"{source}.wgate.weight", wide, hidden)
            yield vector(f"{name}.position_bias", f"{source}.ape", ratio, wide)
            yield vector(f"{name}.norm.weight", f"{source}.norm.weight", (size, key))

    def _mlp(self, mixture: Mapping[str, Any], mlp: str, theirs: str) -> Iterator[TensorSpec]:
        hidden = self.hidden
        inner = (mixture["intermediate"], "moe_intermediate_size")
        experts = (mixture["num_experts"], "n_routed_experts")

        def source(published: str) -> str:
            return self.layout.name(theirs, f"ffn.{published}")

        yield tensor_spec(f"{mlp}router.weight", source("gate.weight"), experts, hidden)
        if "has_token_experts" in mixture:
            dims = (self.vocab, (mixture["top_k"], "num_experts_per_tok"))
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
            published = f"ffn.shared_experts.{published}"
            yield from self.matrix(f"{mlp}shared.{name}", theirs, published, rows, columns)
        if self.layout.is_joined:
            wide = (2 * inner[0], f"2 * {inner[1]}")
            for name, dims in (("gate_up", (wide, hidden)), ("down", (hidden, inner))):
                joined = f"{theirs}mlp.experts.{name}_proj"
                yield tensor_spec(f"{mlp}experts.{name}.weight", joined, experts, *dims)
            return
        for expert in range(experts[0]):
            for name, published, rows, columns in products:
                canonical = f"{mlp}experts.{name}.{expert}"
                published = source(f"experts.{expert}.{published}")
                yield from self._expert_matrix(canonical, published, rows, columns)

    def _expert_matrix(
        self, ours: str, source: str, rows: Dim, columns: Dim
    ) -> Iterator[TensorSpec]:
        if not self._has_scales:
            yield tensor_spec(f"{ours}.weight", f"{source}.weight", rows, columns)
            return
        elements, scales = f"{source}.weight", f"{source}.{EXPERTS.suffix}"
        yield from mxfp4_specs(ours, elements, scales, rows, columns, _FP4_DTYPES, _E8M0_DTYPES)
