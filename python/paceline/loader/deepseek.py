# SPDX-License-Identifier: Apache-2.0
"""Decoders of DeepSeek-V3's kind: latent attention, sigmoid routers, shared experts.

GLM-4.7-Flash has the same layers. Both names of its classes in transformers are those of families
here; they differ in the defaults of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from .decoder import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Sizes,
    check_common,
    check_top_k,
    read_activation,
    same_fact,
    write_description,
)
from .decoder_tensors import PRE_NORMS, expert_tensors, mlp_tensors, tensor_spec
from .family import Family, TensorSpec
from .formats import Dim
from .hf_config import HfConfig
from .layer_types import read_types
from .rope import RopeSettings, inverse_frequencies, read_rope
from .section import DEFAULTS, Section

_PREFIXES: Final = ("model.", "")
_DENSE, _SPARSE = "dense", "sparse"


def glm4_moe_lite(hf: HfConfig) -> Family:
    """Translates GLM-4.7-Flash; see `deepseek_v3`."""
    return _translate("glm4_moe_lite", hf)


def deepseek_v3(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    return _translate("deepseek_v3", hf)


def _translate(name: str, hf: HfConfig) -> Family:
    check_common(hf)
    text = hf.text.with_defaults(DEFAULTS[name])
    sizes = _read_sizes(text)
    rope = _read_rope(text)
    attention = _read_attention(text, rope)
    mlp_types = _read_mlp_types(text, sizes.layers)
    experts_key, mixture = _read_mixture(text)
    dense = _mlp(text, sizes.intermediate)
    ties = text.boolean("tie_word_embeddings", False)
    entry = {"inv_freq": inverse_frequencies(rope, sizes.head_dim), "scale": rope.scale}
    if text.boolean("rope_interleave", True):
        entry["interleaved"] = True
    # The layers that predict further tokens are drafters.
    num_more = num_mtp_layers(text)[1]
    ignored = tuple(
        f"{prefix}layers.{sizes.layers + i}." for prefix in _PREFIXES for i in range(num_more)
    )

    def family(mixture: Mapping[str, Any], others: tuple[Family, ...] = ()) -> Family:
        layers = [
            {"attention": attention, "mlp": dense if mlp_type == _DENSE else mixture}
            for mlp_type in mlp_types
        ]
        config = write_description(name, sizes, [entry], layers, ties_lm_head=ties)
        return Family(
            name,
            hf.architecture,
            config,
            tuple(_tensors(config, experts_key)),
            _PREFIXES,
            ignored_prefixes=ignored,
            others=others,
        )

    return family({**mixture, "per_expert": True}, (family(mixture),))


def _read_sizes(text: Section) -> Sizes:
    heads = text.integer("num_attention_heads")
    # transformers repeats keys that are already those of every head.
    text.only("num_key_value_heads", heads, f'"num_attention_heads" ({heads})')
    text.only("attention_bias", False)
    rope = text.integer("qk_rope_head_dim", high=MAX_HEAD_DIM)
    if rope % 2 != 0:
        raise text.error("qk_rope_head_dim", "an even integer")
    return Sizes(
        vocab=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        intermediate=text.integer("intermediate_size"),
        layers=text.integer("num_hidden_layers", high=MAX_LAYERS),
        qo_heads=heads,
        kv_heads=1,
        head_dim=rope,
        max_position=text.integer("max_position_embeddings"),
        eps=text.number("rms_norm_eps"),
    )


def _read_attention(text: Section, rope: RopeSettings) -> dict[str, Any]:
    """The attention of every layer in the description, whose keys are those of the file."""
    # null, unlike an absent key, says that there is one matrix q instead of q_a and q_b.
    has_q_rank = "q_lora_rank" not in text.values or text.has("q_lora_rank")
    ranks = ("q_lora_rank", "kv_lora_rank") if has_q_rank else ("kv_lora_rank",)
    dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    read = {key: text.integer(key) for key in ranks}
    read |= {key: text.integer(key, high=MAX_HEAD_DIM) for key in dims}
    head_dim = read["qk_nope_head_dim"] + read["qk_rope_head_dim"]
    return {
        "kind": "latent",
        "num_qo_heads": text.integer("num_attention_heads"),
        **read,
        "scale": head_dim**-0.5 * rope.score_factor,
        "rope": 0,
        "latent_norm_eps": text.number("latent_norm_eps"),
    }


def _read_mlp_types(text: Section, num_layers: int) -> tuple[str, ...]:
    """Returns whether each layer is dense or sparse, in either spelling."""
    key, old_key = "mlp_layer_types", "first_k_dense_replace"
    num_dense = text.integer(old_key, low=0)
    counted = tuple(_DENSE if i < num_dense else _SPARSE for i in range(num_layers))
    text.only("moe_layer_freq", 1)
    names = read_types(text, key, (_DENSE, _SPARSE), num_layers)
    if names is not None and text.has(old_key) and names != counted:
        raise text.error(
            old_key, f'what "{text.name(key)}" says, which lists {names.count(_DENSE)} dense layers'
        )
    return names or counted


def _read_mixture(text: Section) -> tuple[str, dict[str, Any]]:
    """The key that counts experts; and the mixture of a sparse layer in the description."""
    key = "n_routed_experts"
    if not text.has(key) and text.has("num_local_experts"):
        key = "num_local_experts"
    count = same_fact(text, "n_routed_experts", "num_local_experts")
    top_k = text.integer("num_experts_per_tok")
    check_top_k(text, "num_experts_per_tok", top_k, key, count)
    text.only("scoring_func", "sigmoid")
    text.only("topk_method", "noaux_tc")
    groups = text.integer("n_group")
    if count % groups != 0:
        raise text.error("n_group", f'a divisor of "{text.name(key)}" ({count})')
    width = text.integer("moe_intermediate_size")
    mixture = {
        "num_experts": count,
        "top_k": top_k,
        **_mlp(text, width),
        "router": "sigmoid",
        "has_router_bias": False,
        "num_groups": groups,
        "top_groups": text.integer("topk_group", high=groups),
        "normalises_weights": text.boolean("norm_topk_prob"),
        "weight_scale": text.number("routed_scaling_factor"),
    }
    # The shared expert is this many experts wide.
    if num_shared := text.integer("n_shared_experts", low=0):
        mixture["shared"] = _mlp(text, num_shared * width)
    return key, mixture


def _mlp(text: Section, intermediate: int) -> dict[str, Any]:
    activation = read_activation(text, ("hidden_act",), "silu")
    return {"intermediate": intermediate, "activation": activation, "has_bias": False}


def _read_rope(text: Section) -> RopeSettings:
    rope = read_rope(text, 10_000.0)
    if rope.rope_type not in ("default", "yarn"):
        key = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
        raise text.refusal(key, 'rope types "default", "yarn"')
    return rope


def num_mtp_layers(text: Section) -> tuple[str, int]:
    """The layers after the last one, which predict further tokens, and the key that counts them."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    key = next((key for key in keys if text.has(key)), keys[0])
    return key, text.integer(key, 1, low=0, high=MAX_LAYERS)


def _tensors(config: Mapping[str, Any], experts_key: str) -> Iterator[TensorSpec]:
    """Every tensor of a model, which follows from its description."""
    hidden = (config["hidden_size"], "hidden_size")
    vocab = (config["vocab_size"], "vocab_size")
    yield tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden)
    for i, layer in enumerate(config["layers"]):
        name = f"layers.{i}."
        for norm, source in PRE_NORMS:
            yield tensor_spec(name + norm, name + source, hidden)
        yield from _attention_tensors(
            f"{name}attn.", f"{name}self_attn.", layer["attention"], hidden
        )
        mlp = layer["mlp"]
        if "num_experts" in mlp:
            yield from _mixture_tensors(f"{name}mlp.", mlp, experts_key, hidden)
        else:
            width = (mlp["intermediate"], "intermediate_size")
            yield from mlp_tensors(f"{name}mlp.", f"{name}mlp.", hidden, width)
    yield tensor_spec("final_norm.weight", "norm.weight", hidden)
    if not config["ties_lm_head"]:
        yield tensor_spec("lm_head.weight", "lm_head.weight", vocab, hidden)


def _attention_tensors(
    ours: str, theirs: str, attention: Mapping[str, Any], hidden: Dim
) -> Iterator[TensorSpec]:
    heads = attention["num_qo_heads"]
    kv_rank = attention["kv_lora_rank"]
    nope, rope, v = (attention[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    latent = (kv_rank, "kv_lora_rank")
    entry = (kv_rank + rope, "kv_lora_rank + qk_rope_head_dim")
    q_rows = (
        heads * (nope + rope),
        "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
    )
    kv_rows = (heads * (nope + v), "num_attention_heads * (qk_nope_head_dim + v_head_dim)")
    values = (heads * v, "num_attention_heads * v_head_dim")
    names: tuple[tuple[str, str, tuple[Dim, ...]], ...] = (
        ("kv_a", "kv_a_proj_with_mqa", (entry, hidden)),
        ("kv_a_norm", "kv_a_layernorm", (latent,)),
        ("kv_b", "kv_b_proj", (kv_rows, latent)),
        ("o", "o_proj", (hidden, values)),
    )
    if "q_lora_rank" in attention:
        q_rank = (attention["q_lora_rank"], "q_lora_rank")
        names += (
            ("q_a", "q_a_proj", (q_rank, hidden)),
            ("q_a_norm", "q_a_layernorm", (q_rank,)),
            ("q_b", "q_b_proj", (q_rows, q_rank)),
        )
    else:
        names += (("q", "q_proj", (q_rows, hidden)),)
    for name, source, dims in names:
        yield tensor_spec(f"{ours}{name}.weight", f"{theirs}{source}.weight", *dims)


def _mixture_tensors(
    name: str, mixture: Mapping[str, Any], experts_key: str, hidden: Dim
) -> Iterator[TensorSpec]:
    count = (mixture["num_experts"], experts_key)
    width = (mixture["intermediate"], "moe_intermediate_size")
    yield tensor_spec(f"{name}router.weight", f"{name}gate.weight", count, hidden)
    yield tensor_spec(f"{name}router.correction.bias", f"{name}gate.e_score_correction_bias", count)
    is_joined = "per_expert" not in mixture
    yield from expert_tensors(name, name, count, hidden, width, is_joined=is_joined)
    if "shared" in mixture:
        shared = (
            mixture["shared"]["intermediate"],
            "n_shared_experts * moe_intermediate_size",
        )
        yield from mlp_tensors(f"{name}shared.", f"{name}shared_experts.", hidden, shared)
