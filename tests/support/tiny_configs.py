# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations of Hugging Face models for tests; `tiny_models` makes checkpoints of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
FAMILIES = ("llama", "qwen3", "gemma3", "gemma4", "gpt_oss", "qwen3_moe")
# Families with latent attention and sigmoid routers.
DEEPSEEK = ("glm4_moe_lite", "deepseek_v3")
# Families with gated delta nets and output gates; the last two have experts.
QWEN3_5 = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
_THETA = {
    "llama": 500_000.0,
    "qwen3": 1_000_000.0,
    "gemma3": 1_000_000.0,
    "gemma4": 1_000_000.0,
    "gpt_oss": 150_000.0,
    "glm4_moe_lite": 1_000_000.0,
    "deepseek_v3": 10_000.0,
    **dict.fromkeys(QWEN3_5, 10_000_000.0),
    "qwen3_moe": 1_000_000.0,
}
_EPS = {
    "llama": 1e-5,
    "qwen3": 1e-6,
    "gemma3": 1e-6,
    "gemma4": 1e-6,
    "gpt_oss": 1e-5,
    "glm4_moe_lite": 1e-5,
    "deepseek_v3": 1e-6,
    **dict.fromkeys(QWEN3_5, 1e-6),
    "qwen3_moe": 1e-6,
}


@dataclass(frozen=True)
class TinyLatent:
    """Latent attention and the mixtures of `DEEPSEEK`.

    Attributes:
        q_rank: The rank of q_a; None: there is one matrix q.
        kv_rank: Elements of a latent.
        nope: Elements of a head that are not rotated.
        rope: Those that are.
        v: Elements of a head's output.
        interleaved: Pairs that are rotated are side by side.
        groups: Groups of experts.
        top_groups: Those that a token may use.
        shared: Experts that the shared expert is wide.
        dense_layers: First layers without a mixture.
        expert_size: Width of each expert.
        normalises: Weights are divided by their sum.
        scale: The last factor of weights.
    """

    q_rank: int | None = 24
    kv_rank: int = 32
    nope: int = 24
    rope: int = 8
    v: int = 20
    interleaved: bool = True
    groups: int = 1
    top_groups: int = 1
    shared: int = 1
    dense_layers: int = 1
    expert_size: int = 40
    normalises: bool = True
    scale: float = 1.8


@dataclass(frozen=True)
class TinyDelta:
    """What `QWEN3_5` has besides full attention.

    Attributes:
        key_heads: Heads of q and k of a gated delta net.
        value_heads: Heads of v.
        key_dim: Elements of a head of q or k.
        value_dim: Elements of a head of v.
        taps: Of the convolution.
        expert_size: Width of each expert.
        shared_size: Width of the shared expert.
        dense_layers: "qwen3_next" only: layers without experts.
    """

    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 16
    value_dim: int = 24
    taps: int = 4
    expert_size: int = 40
    shared_size: int = 56
    dense_layers: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class TinySpec:
    """A tiny checkpoint.

    Attributes:
        family: One of `FAMILIES`, `DEEPSEEK` and `QWEN3_5`.
        seed: The seed of the weights.
        vocab_size: Rows of the embedding table; more than `tokenizer_size` makes padding rows.
        hidden_size: Width.
        intermediate_size: Width of the MLP, or of each expert.
        num_layers: Layers; None: 2, 3 for Gemma 3, 4 for `QWEN3_5` and 6 for Gemma 4.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        head_dim: Elements of a head.
        layer_types: Gemma, GPT-OSS and `QWEN3_5` only; None: sliding, but every third layer full,
            in GPT-OSS every second; in `QWEN3_5` linear, but every fourth layer full.
        window: Gemma and GPT-OSS only: keys a sliding layer sees.
        query_pre_attn_scalar: Gemma 3 only; None: one that is not `head_dim`.
        tied: Whether the embedding table is the lm_head; None: as the family usually does.
        attention_bias: Biases on q, k, v and o; GPT-OSS always has them.
        mlp_bias: Llama only: biases on gate, up and down.
        rope: "default", "linear", "llama3" or "yarn"; for Gemma 3 it is that of the full layers,
            whose own default Gemma 4 always has; GPT-OSS always has "yarn".
        logit_soft_cap: Gemma only: the soft cap on logits; 0: none.
        full_head_dim: Gemma 4 only, as all below: elements of a full layer's head; None: twice
            `head_dim`.
        full_kv_heads: With `k_eq_v`, key and value heads of a full layer; None: 1.
        k_eq_v: Full layers have no v projection.
        shared_layers: Last layers that read the KV of earlier ones; None: half of them.
        wide_mlp: The MLPs of those layers are twice as wide.
        per_layer_size: Of a layer's own input; 0: none.
        partial_rotary: The rotated part of a full layer's head; also of `QWEN3_5`.
        unified: The architecture of the 12B model; `per_layer_size` counts as 0.
        has_experts: Every layer has a mixture beside its dense MLP, as the 26B model.
        num_experts: Of mixtures, as the next three: experts of a layer.
        top_k: Experts of a token.
        expert_size: Qwen3-MoE and Gemma 4 only: the width of each expert.
        normalises: Qwen3-MoE only, as the next two: weights are divided by their sum.
        sparse_step: Every n-th layer has a mixture.
        dense_layers: Those that have none all the same.
        latent: `DEEPSEEK` only: what those families have.
        delta: `QWEN3_5` only: what those families have.
        swiglu_limit: GPT-OSS only: the limit on gates and ups, which many values of tiny models
            exceed.
        quantization: None, or one of `quantized_models.METHODS`: the matrices that it concerns are
            stored in fewer bits. `reference_logits` computes with the values that they stand for.
        exact_scales: Their scales are powers of two; those of "mxfp4" always are.
        max_position: The number of positions.
        dtype: The dtype of the stored tensors: "float32", "float16" or "bfloat16".
        shards: Files to spread the tensors over; 1: `model.safetensors`.
        old_spelling: Write `config.json` with the keys of transformers 4.
        prefix: The prefix of the decoder's tensors.
        eos_token_id: The end-of-sequence id; None: there is none.
        tokenizer_size: Entries of `tokenizer.json`; 0: write none.
    """

    family: str = "llama"
    seed: int = 0
    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layer_types: tuple[str, ...] | None = None
    window: int = 8
    query_pre_attn_scalar: int | None = None
    tied: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: str = "default"
    logit_soft_cap: float = 0.0
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    k_eq_v: bool = False
    shared_layers: int | None = None
    wide_mlp: bool = True
    per_layer_size: int = 8
    partial_rotary: float = 0.25
    unified: bool = False
    has_experts: bool = False
    num_experts: int = 8
    top_k: int = 4
    expert_size: int = 24
    normalises: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    latent: TinyLatent = TinyLatent()
    delta: TinyDelta = TinyDelta()
    swiglu_limit: float = 2.0
    quantization: str | None = None
    exact_scales: bool = False
    max_position: int = 2048
    dtype: str = "float32"
    shards: int = 1
    old_spelling: bool = False
    prefix: str = "model."
    eos_token_id: int | None = None
    tokenizer_size: int = 128


def is_tied(spec: TinySpec) -> bool:
    """Whether the embedding table is the lm_head."""
    return spec.family.startswith("gemma") if spec.tied is None else spec.tied


def hf_config(spec: TinySpec) -> Any:
    """The transformers configuration of a checkpoint."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": _EPS[spec.family],
        "tie_word_embeddings": is_tied(spec),
        "attention_bias": spec.attention_bias,
        "bos_token_id": None,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": None,
    }
    kind = "yarn" if spec.family == "gpt_oss" else spec.rope
    rope = {"rope_type": kind, "rope_theta": _THETA[spec.family], **_rope_scaling(kind, spec)}
    if spec.family.startswith("gemma"):
        layer_types = _layer_types(spec)
        values |= {
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "sliding_window": spec.window,
            "final_logit_softcapping": spec.logit_soft_cap or None,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
                FULL: rope,
            },
        }
        if spec.family == "gemma4":
            values |= _gemma4_values(spec, len(layer_types))
        else:
            values["query_pre_attn_scalar"] = spec.query_pre_attn_scalar or spec.head_dim * 3 // 2
    elif spec.family == "gpt_oss":
        layer_types = _layer_types(spec)
        values |= {
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "sliding_window": spec.window,
            "attention_bias": True,
            "num_local_experts": spec.num_experts,
            "num_experts_per_tok": spec.top_k,
            "swiglu_limit": spec.swiglu_limit,
            "rope_parameters": rope,
        }
    elif spec.family in DEEPSEEK:
        del values["head_dim"]  # another name of qk_rope_head_dim
        values |= {"rope_parameters": rope, **_deepseek_values(spec)}
    elif spec.family in QWEN3_5:
        values |= _qwen3_5_values(spec, rope)
    else:
        values |= {"num_hidden_layers": spec.num_layers or 2, "rope_parameters": rope}
        if spec.family == "llama":
            values["mlp_bias"] = spec.mlp_bias
        if spec.family == "qwen3_moe":
            values |= {
                "num_experts": spec.num_experts,
                "num_experts_per_tok": spec.top_k,
                "moe_intermediate_size": spec.expert_size,
                "norm_topk_prob": spec.normalises,
                "decoder_sparse_step": spec.sparse_step,
                "mlp_only_layers": list(spec.dense_layers),
            }
    return getattr(transformers, classes(spec)[0])(**values)


def classes(spec: TinySpec) -> tuple[str, str]:
    """The classes of transformers: of the configuration and of the model."""
    return _CLASSES["gemma4_unified" if spec.unified else spec.family]


def _layer_types(spec: TinySpec) -> tuple[str, ...]:
    if spec.layer_types is not None:
        return spec.layer_types
    if spec.family == "gpt_oss":
        return tuple((SLIDING, FULL)[i % 2] for i in range(spec.num_layers or 2))
    if spec.family in QWEN3_5:
        return tuple(LINEAR if (i + 1) % 4 else FULL for i in range(spec.num_layers or 4))
    count = spec.num_layers or (6 if spec.family == "gemma4" else 3)
    # The last layer of Gemma 4 is always a full one.
    is_last_full = spec.family == "gemma4"
    return tuple(
        FULL if (i + 1) % 3 == 0 or (is_last_full and i + 1 == count) else SLIDING
        for i in range(count)
    )


def _deepseek_values(spec: TinySpec) -> dict[str, Any]:
    latent = spec.latent
    num_layers = spec.num_layers or 3
    values: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_key_value_heads": spec.heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.v,
        "rope_interleave": latent.interleaved,
        "n_routed_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "n_group": latent.groups,
        "topk_group": latent.top_groups,
        "n_shared_experts": latent.shared,
        "moe_intermediate_size": latent.expert_size,
        "norm_topk_prob": latent.normalises,
        "routed_scaling_factor": latent.scale,
    }
    if spec.family == "deepseek_v3":
        return values | {"first_k_dense_replace": latent.dense_layers}
    types = ["dense"] * latent.dense_layers + ["sparse"] * (num_layers - latent.dense_layers)
    return values | {"mlp_layer_types": types}


def _qwen3_5_values(spec: TinySpec, rope: dict[str, Any]) -> dict[str, Any]:
    delta = spec.delta
    layer_types = _layer_types(spec)
    pairs = int(spec.head_dim * spec.partial_rotary) // 2
    values: dict[str, Any] = {
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
        "rope_parameters": {**rope, "partial_rotary_factor": spec.partial_rotary},
    }
    if spec.family != "qwen3_next":
        # As in published files, more for the first of the three positions.
        sections = [pairs - pairs // 3 * 2, pairs // 3, pairs // 3]
        values["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    if spec.family == "qwen3_5":
        return values
    values |= {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "moe_intermediate_size": delta.expert_size,
        "shared_expert_intermediate_size": delta.shared_size,
    }
    if spec.family == "qwen3_next":
        values["mlp_only_layers"] = list(delta.dense_layers)
    return values


def _gemma4_values(spec: TinySpec, num_layers: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "global_head_dim": spec.full_head_dim or 2 * spec.head_dim,
        "attention_k_eq_v": spec.k_eq_v,
        "num_global_key_value_heads": (spec.full_kv_heads or 1) if spec.k_eq_v else None,
        "num_kv_shared_layers": (
            num_layers // 2 if spec.shared_layers is None else spec.shared_layers
        ),
        "use_double_wide_mlp": spec.wide_mlp,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": spec.partial_rotary,
                "rope_theta": _THETA["gemma4"],
            },
        },
    }
    if spec.has_experts:
        values |= {
            "enable_moe_block": True,
            "num_experts": spec.num_experts,
            "top_k_experts": spec.top_k,
            "moe_intermediate_size": spec.expert_size,
        }
    if not spec.unified:
        values |= {
            "hidden_size_per_layer_input": spec.per_layer_size,
            "vocab_size_per_layer_input": spec.vocab_size,
        }
    return values


def _rope_scaling(kind: str, spec: TinySpec) -> dict[str, Any]:
    if kind == "linear":
        return {"factor": 4.0}
    if kind == "yarn" and spec.family == "gpt_oss":
        return {
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    if kind == "yarn" and spec.family in DEEPSEEK:
        # As DeepSeek-V3, but with two values of mscale that differ.
        return {
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
            "original_max_position_embeddings": 64,
        }
    if kind == "yarn":
        # With the defaults of all other keys, as Qwen3 documents it.
        return {"factor": 4.0, "original_max_position_embeddings": 512}
    if kind == "llama3":
        # The wavelengths of tiny heads are below, between and above these limits.
        return {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    return {}


def to_old_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites a `config.json` with the keys that transformers 4 wrote.

    For Gemma 4, which transformers 4 did not know: with those of the published files.
    """
    old = dict(config)
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    by_layer = old.pop("per_layer_config", None)
    if by_layer is not None:
        (full,) = {tuple(sorted(overrides.items())) for overrides in by_layer.values()}
        old["global_head_dim"] = dict(full)["head_dim"]
        old["num_global_key_value_heads"] = dict(full).get("num_key_value_heads")
        return old
    rope = old.pop("rope_parameters", None)
    if rope is not None:
        whole = dict(rope.get(FULL, rope))
        if SLIDING in rope:
            old["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        old["rope_theta"] = whole.pop("rope_theta")
        old["rope_scaling"] = None if whole.get("rope_type", "default") == "default" else whole
        # transformers 5 ignores "type" in a Gemma 3 file; published files have "rope_type".
        if whole.get("rope_type") == "linear" and SLIDING not in rope:
            old["rope_scaling"] = {"type": "linear", "factor": whole["factor"]}
    mlp_types = old.pop("mlp_layer_types", None)
    if mlp_types is not None:
        old["first_k_dense_replace"] = mlp_types.count("dense")
    layer_types = old.pop("layer_types", None)
    if layer_types is not None and SLIDING in layer_types and old.get("model_type") != "gpt_oss":
        pattern = layer_types.index(FULL) + 1
        expected = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(len(layer_types))]
        if layer_types != expected:
            raise ValueError(f"layer types {layer_types} have no sliding_window_pattern")
        old["sliding_window_pattern"] = pattern
    return old
