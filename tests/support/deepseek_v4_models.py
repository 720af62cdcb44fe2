# SPDX-License-Identifier: Apache-2.0
"""Tiny random DeepSeek-V4 models: checkpoints in each layout, and their logits in transformers.

    path = make(V4Spec(seed=1))                  # as published, with its MTP layer
    reference_logits(V4Spec(seed=1), tokens)     # of transformers

No code of Paceline is used: names are translated here once more.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny_models
from quantized_models import from_fp8, from_mxfp4, to_fp8, to_mxfp4

ARCHITECTURE = "DeepseekV4ForCausalLM"
_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
# Published names by those of transformers; in this order.
_PUBLISHED = (
    ("model.hc_head.hc_", "hc_head_"),
    ("lm_head.", "head."),
    ("model.", ""),
    ("embed_tokens.", "embed."),
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("self_attn.compressor.indexer.scorer.weights_proj.", "attn.indexer.weights_proj."),
    ("self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.compressor.indexer.", "attn.indexer.compressor."),
    ("self_attn.", "attn."),
    ("compressor.kv_norm.", "compressor.norm."),
    ("sinks", "attn_sink"),
    ("position_bias", "ape"),
    ("q_a_norm.", "q_norm."),
    ("q_a_proj.", "wq_a."),
    ("q_b_proj.", "wq_b."),
    ("o_a_proj.", "wo_a."),
    ("o_b_proj.", "wo_b."),
    (".kv_proj.", ".wkv."),
    ("compressor.gate_proj.", "compressor.wgate."),
    ("mlp.", "ffn."),
    ("e_score_correction_bias", "bias"),
    ("experts.gate_proj.", "experts.w1."),
    ("experts.up_proj.", "experts.w3."),
    ("experts.down_proj.", "experts.w2."),
)
# Matrices of published files in fp8.
_FP8 = re.compile(
    r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|[eh]_proj|main_proj)"
    r"\.weight"
)
_FP4 = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")


@dataclass(frozen=True)
class V4Spec:
    """A tiny model.

    Attributes:
        seed: Of the weights.
        ratios: The compress ratio of each layer: 0, 4 or 128.
        hca: The tokens of an entry in layers of ratio 128.
        hash_layers: How many layers choose experts by token.
        index_top_k: The entries that the indexer chooses.
        window: The sliding window.
        sinkhorn: The iterations that balance the mixing matrix.
        has_scales: fp8 and fp4 matrices, as published.
        dtype: Of matrices without scales.
        vocab_size: Token ids.
        hidden: A multiple of 32 where there are scales.
        head_dim: Elements of a head.
        rope_dim: Those that are rotated.
        index_dim: Elements of a head of the indexer.
        o_rank: Rows of each group of the output projection; on a GPU a multiple of 128 with scales.
    """

    seed: int = 0
    ratios: tuple[int, ...] = (0, 4, 128, 4)
    hca: int = 8
    hash_layers: int = 1
    index_top_k: int = 3
    window: int = 8
    sinkhorn: int = 20
    has_scales: bool = False
    dtype: str = "float32"
    vocab_size: int = 128
    hidden: int = 64
    head_dim: int = 32
    rope_dim: int = 8
    index_dim: int = 16
    o_rank: int = 32


@functools.cache
def _session_dir() -> Path:
    path = Path(tempfile.mkdtemp(prefix="paceline-v4-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def hf_config(spec: V4Spec, *, with_mtp: bool = False) -> Any:
    """The configuration in transformers; with the MTP layer as one layer more."""
    from transformers import DeepseekV4Config

    ratios = [*spec.ratios, *([0] if with_mtp else [])]
    return DeepseekV4Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        num_attention_heads=4,
        num_hidden_layers=len(ratios),
        num_key_value_heads=1,
        head_dim=spec.head_dim,
        qk_rope_head_dim=spec.rope_dim,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=spec.o_rank,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        sliding_window=spec.window,
        compress_ratios=ratios,
        compress_rate_hca=spec.hca,
        mlp_layer_types=["hash_moe" if i < spec.hash_layers else "moe" for i in range(len(ratios))],
        # With few heads, scores are often exactly 0, and transformers may choose any of equals.
        index_n_heads=16,
        index_head_dim=spec.index_dim,
        index_topk=spec.index_top_k,
        hc_mult=4,
        hc_sinkhorn_iters=spec.sinkhorn,
        rope_theta=1e4,
        compress_rope_theta=160_000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        max_position_embeddings=1 << 16,
        swiglu_limit=0.8,  # clamps often
    )


@functools.cache
def whole_state(spec: V4Spec) -> dict[str, Tensor]:
    """Every tensor in transformers' names, the MTP layer as the last one, and what only that has.

    With scales, the values that they stand for.
    """
    from transformers import DeepseekV4ForCausalLM

    state = dict(DeepseekV4ForCausalLM(hf_config(spec, with_mtp=True)).state_dict())
    hidden = spec.hidden
    for name in ("e_proj", "h_proj"):
        state[f"mtp.{name}.weight"] = torch.empty(hidden, hidden)
    for name in ("enorm", "hnorm", "norm"):
        state[f"mtp.{name}.weight"] = torch.empty(hidden)
    for name in ("fn", "base", "scale"):
        state[f"mtp.hc_head_{name}"] = torch.empty_like(state[f"model.hc_head.hc_{name}"])
    for name, tensor in state.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {name}".encode()))
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("tid2eid"):
            state[name] = torch.rand(tensor.shape[0], 8, generator=generator).argsort(1)[:, :2]
        elif name in ("model.norm.weight", "mtp.norm.weight"):
            state[name] = 3.0 + 0.2 * noise
        elif "norm" in name or name.endswith("scale"):
            state[name] = 1.0 + 0.2 * noise
        elif name.endswith(("base", "sinks", "position_bias")):
            state[name] = noise
        else:
            state[name] = 0.2 * noise
        if spec.dtype == "bfloat16" and tensor.is_floating_point() and "hc" not in name:
            state[name] = state[name].bfloat16().float()
    if not spec.has_scales:
        return state
    stored = published_tensors(spec, state)
    values = {name: value_of(stored, name) for name in stored if not name.endswith(".scale")}
    return {name: _find(values, spec, name) for name in state}


def published_name(spec: V4Spec, name: str) -> str:
    """The published name of a tensor; of a matrix of all experts, without their numbers."""
    last = f"model.layers.{len(spec.ratios)}."
    if name.startswith("mtp."):
        return name.replace("mtp.", "mtp.0.", 1)
    is_mtp = name.startswith(last)
    name = name.removeprefix(last)
    for theirs, published in _PUBLISHED:
        name = name.replace(theirs, published, 1)
    return f"mtp.0.{name}" if is_mtp else name


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of each expert, for a matrix of all of them."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    base = name.rsplit(".", 1)[0]
    split: dict[str, Tensor] = {}
    for i, matrix in enumerate(tensor):
        parts = {"w2": matrix}
        if name.endswith("gate_up_proj"):
            gate, up = matrix.chunk(2)
            parts = {"w1": gate, "w3": up}
        split |= {f"{base}.{i}.{part}.weight": value for part, value in parts.items()}
    return split


def _find(values: dict[str, Tensor], spec: V4Spec, name: str) -> Tensor:
    """A tensor in transformers' form, from published tensors without scales."""
    found = published_name(spec, name)
    if found in values:
        return values[found]
    base = found.rsplit(".", 1)[0]

    def of(part: str) -> Tensor:
        return torch.stack([values[f"{base}.{i}.{part}.weight"] for i in range(8)])

    return of("w2") if name.endswith("down_proj") else torch.cat([of("w1"), of("w3")], dim=1)


def published_tensors(spec: V4Spec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published file."""
    values: dict[str, Tensor] = {}
    for original, value in state.items():
        values |= _split(published_name(spec, original), value)
    return stored_tensors(spec, values)


def stored_tensors(spec: V4Spec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a published file, in its formats, from values by their published names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in values.items():
        scale = f"{name.removesuffix('weight')}scale"
        if spec.has_scales and _FP8.fullmatch(name):
            tensors[name], scales = to_fp8(tensor, "fp8_block", exact_scales=True)
            tensors[scale] = scales.to(torch.float8_e8m0fnu)
        elif spec.has_scales and _FP4.fullmatch(name):
            blocks, scales = to_mxfp4(tensor)
            tensors[name] = blocks.flatten(-2).view(torch.int8)
            tensors[scale] = scales.view(torch.float8_e8m0fnu)
        elif "hc_" in name or name.endswith((".bias", "ape", "attn_sink", "tid2eid")):
            tensors[name] = tensor
        else:
            tensors[name] = tensor.to(getattr(torch, spec.dtype))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def value_of(stored: dict[str, Tensor], name: str) -> Tensor:
    tensor, scale = stored[name], stored.get(f"{name.removesuffix('weight')}scale")
    if scale is None or not name.endswith("weight"):
        return tensor if tensor.dtype == torch.int64 else tensor.float()
    if tensor.dtype == torch.int8:
        blocks = tensor.view(torch.uint8).unflatten(-1, (-1, 16))
        return from_mxfp4(blocks, scale.view(torch.uint8))
    return from_fp8(tensor, scale.float())


def published_config(spec: V4Spec) -> dict[str, Any]:
    """`config.json`, as published files spell it."""
    whole = json.loads(hf_config(spec).to_json_string(use_diff=False))
    config = {
        key: whole[key]
        for key in (
            "vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim",
            "num_key_value_heads", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window",
            "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts",
            "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters",
            "hc_eps", "rope_theta", "compress_rope_theta", "max_position_embeddings",
            "swiglu_limit", "rms_norm_eps", "routed_scaling_factor", "scoring_func",
        )
    }  # fmt: skip
    config |= {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v4",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "num_hash_layers": spec.hash_layers,
        "qk_rope_head_dim": spec.rope_dim,
        "compress_ratios": [*spec.ratios, 0],
        "compress_rate_hca": spec.hca,
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    if spec.has_scales:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    return config


@functools.cache
def make(spec: V4Spec) -> Path:
    """A folder in the published layout, with the MTP layer; read-only."""
    path = _session_dir() / f"published-{zlib.crc32(repr(spec).encode()):08x}"
    path.mkdir()
    tiny_models.save_tensors(path, published_tensors(spec, whole_state(spec)))
    tiny_models.write_json(path / "config.json", published_config(spec))
    return path


@functools.cache
def model(spec: V4Spec) -> Any:
    """The target in transformers, float32."""
    from transformers import DeepseekV4ForCausalLM

    config = hf_config(spec)
    config._attn_implementation = "eager"
    made: Any = DeepseekV4ForCausalLM(config).eval().requires_grad_(False)
    state = whole_state(spec)
    made.load_state_dict({name: state[name] for name in made.state_dict()})
    return made


@functools.cache
def make_saved(spec: V4Spec) -> Path:
    """A folder as transformers saves it, without the MTP layer; read-only."""
    path = _session_dir() / f"saved-{zlib.crc32(repr(spec).encode()):08x}"
    model(spec).save_pretrained(path)
    return path


def reference_logits(spec: V4Spec, tokens: Sequence[int]) -> Any:
    """The logits of transformers, float32 [tokens, vocab]."""
    with torch.no_grad():
        return model(spec)(torch.tensor([list(tokens)])).logits[0].float().numpy()
