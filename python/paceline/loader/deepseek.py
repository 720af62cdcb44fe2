# SPDX-License-Identifier: Apache-2.0
"""Decoders of DeepSeek-V3's kind: latent attention, sigmoid routers, shared experts.

GLM-4.7-Flash has the same layers. Both names of its classes in transformers are those of families
here; they differ in the defaults of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from paceline._core import ModelFileError

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
from .decoder_tensors import PRE_NORMS, tensor_spec
from .family import Family, TensorSpec
from .formats import Dim
from .hf_config import HfConfig
from .rope import RopeSettings, inverse_frequencies, read_rope
from .section import Section

_PREFIXES: Final = ("model.", "")
_DENSE, _SPARSE = "dense", "sparse"


@dataclass(frozen=True)
class _Defaults:
    """The values of transformers for keys that a file may leave out."""

    vocab: int
    hidden: int
    intermediate: int
    expert_intermediate: int
    layers: int
    heads: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    dense_layers: int
    scale: float
    q_rank: int
    nope: int
    v: int
    max_position: int
    eps: float


_GLM: Final = _Defaults(
    vocab=154_880,
    hidden=2048,
    intermediate=10_240,
    expert_intermediate=1536,
    layers=47,
    heads=20,
    experts=64,
    top_k=4,
    groups=1,
    top_groups=1,
    dense_layers=1,
    scale=1.8,
    q_rank=768,
    nope=192,
    v=256,
    max_position=202_752,
    eps=1e-5,
)
_DEEPSEEK: Final = _Defaults(
    vocab=129_280,
    hidden=7168,
    intermediate=18_432,
    expert_intermediate=2048,
    layers=61,
    heads=128,
    experts=256,
    top_k=8,
    groups=8,
    top_groups=4,
    dense_layers=3,
    scale=2.5,
    q_rank=1536,
    nope=128,
    v=128,
    max_position=4096,
    eps=1e-6,
)
# transformers gives the norms of latents this epsilon, whatever "rms_norm_eps" says.
_LATENT_EPS: Final = 1e-6


@dataclass(frozen=True)
class _Latent:
    """The attention of every layer.

    Attributes:
        q_rank: The rank of q_a and q_b; 0: there is one matrix q.
        kv_rank: The elements of a latent.
        nope: The elements of a head of q that are not rotated.
        rope: Those that are.
        v: The elements of a head's output.
        eps: The epsilon of the norms of latents.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int
    eps: float


@dataclass(frozen=True)
class _Experts:
    """The mixture of a sparse layer.

    Attributes:
        count: How many experts there are.
        key: The key of the file that says so.
        top_k: How many of them a token uses.
        groups: The groups that they form.
        top_groups: The groups that a token may use.
        intermediate: The width of each of them.
        shared: How many experts wide the shared expert is; 0: there is none.
        normalises: The weights of a token's experts are divided by their sum.
        scale: The last factor of the weights.
    """

    count: int
    key: str
    top_k: int
    groups: int
    top_groups: int
    intermediate: int
    shared: int
    normalises: bool
    scale: float


def glm4_moe_lite(hf: HfConfig) -> Family:
    """Translates GLM-4.7-Flash; see `deepseek_v3`."""
    return _translate("glm4_moe_lite", hf, _GLM)


def deepseek_v3(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    return _translate("deepseek_v3", hf, _DEEPSEEK)


def _translate(name: str, hf: HfConfig, defaults: _Defaults) -> Family:
    check_common(hf)
    text = hf.text
    sizes = _read_sizes(text, defaults)
    latent = _read_latent(text, defaults)
    mlp_types = _read_mlp_types(text, sizes.layers, defaults)
    experts = _read_experts(text, defaults)
    rope = _read_rope(text)
    activation = read_activation(text, ("hidden_act",), "silu")
    ties = text.boolean("tie_word_embeddings", False)
    entry = {"inv_freq": inverse_frequencies(rope, latent.rope), "scale": rope.scale}
    if text.boolean("rope_interleave", True):
        entry["interleaved"] = True
    attention = {
        "kind": "latent",
        "num_qo_heads": sizes.qo_heads,
        **({"q_lora_rank": latent.q_rank} if latent.q_rank else {}),
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.v,
        "scale": (latent.nope + latent.rope) ** -0.5 * rope.score_factor,
        "rope": 0,
        "latent_norm_eps": latent.eps,
    }
    dense = {"intermediate": sizes.intermediate, "activation": activation, "has_bias": False}
    # The layers that predict further tokens are drafters.
    num_more = num_mtp_layers(text)[1]
    ignored = tuple(
        f"{prefix}layers.{sizes.layers + i}." for prefix in _PREFIXES for i in range(num_more)
    )

    def family(others: tuple[Family, ...], *, is_joined: bool) -> Family:
        mixture = _describe_mixture(experts, activation, is_joined=is_joined)
        layers = [
            {"attention": attention, "mlp": dense if mlp_type == _DENSE else mixture}
            for mlp_type in mlp_types
        ]
        tensors = _tensors(
            sizes, latent, experts, mlp_types, ties_lm_head=ties, is_joined=is_joined
        )
        return Family(
            name,
            hf.architecture,
            write_description(name, sizes, [entry], layers, ties_lm_head=ties),
            tuple(tensors),
            _PREFIXES,
            ignored_prefixes=ignored,
            others=others,
        )

    return family((family((), is_joined=True),), is_joined=False)


def _read_sizes(text: Section, defaults: _Defaults) -> Sizes:
    heads = text.integer("num_attention_heads", defaults.heads)
    # transformers repeats keys that are already those of every head.
    if text.integer("num_key_value_heads", heads) != heads:
        raise text.refusal("num_key_value_heads", f'"num_attention_heads" ({heads})')
    if text.boolean("attention_bias", False):
        raise text.refusal("attention_bias", "false")
    return Sizes(
        vocab=text.integer("vocab_size", defaults.vocab),
        hidden=text.integer("hidden_size", defaults.hidden),
        intermediate=text.integer("intermediate_size", defaults.intermediate),
        layers=text.integer("num_hidden_layers", defaults.layers, high=MAX_LAYERS),
        qo_heads=heads,
        kv_heads=1,
        head_dim=text.integer("qk_rope_head_dim", 64, high=MAX_HEAD_DIM),
        max_position=text.integer("max_position_embeddings", defaults.max_position),
        eps=text.number("rms_norm_eps", defaults.eps),
    )


def _read_latent(text: Section, defaults: _Defaults) -> _Latent:
    rope = text.integer("qk_rope_head_dim", 64, high=MAX_HEAD_DIM)
    if rope % 2 != 0:
        raise text.error("qk_rope_head_dim", "an even integer")
    # null, unlike an absent key, says that there is no rank.
    has_rank = "q_lora_rank" not in text.values or text.has("q_lora_rank")
    return _Latent(
        q_rank=text.integer("q_lora_rank", defaults.q_rank) if has_rank else 0,
        kv_rank=text.integer("kv_lora_rank", 512),
        nope=text.integer("qk_nope_head_dim", defaults.nope, high=MAX_HEAD_DIM),
        rope=rope,
        v=text.integer("v_head_dim", defaults.v, high=MAX_HEAD_DIM),
        eps=text.number("latent_norm_eps", _LATENT_EPS),
    )


def _read_mlp_types(text: Section, num_layers: int, defaults: _Defaults) -> tuple[str, ...]:
    """Returns whether each layer is dense or sparse, in either spelling."""
    key, old_key = "mlp_layer_types", "first_k_dense_replace"
    num_dense = text.integer(old_key, defaults.dense_layers, low=0)
    counted = tuple(_DENSE if i < num_dense else _SPARSE for i in range(num_layers))
    if text.integer("moe_layer_freq", 1) != 1:
        raise text.refusal("moe_layer_freq", "1")
    names = text.strings(key)
    if names is None:
        return counted
    for name in names:
        if name not in (_DENSE, _SPARSE):
            raise text.refusal(key, f"a list of {_DENSE}, {_SPARSE}")
    if len(names) != num_layers:
        raise ModelFileError(
            f'{text.source}: key "{text.name(key)}" has {len(names)} entries; expected '
            f'{num_layers}, as "{text.name("num_hidden_layers")}" says'
        )
    if text.has(old_key) and tuple(names) != counted:
        raise text.error(
            old_key, f'what "{text.name(key)}" says, which lists {names.count(_DENSE)} dense layers'
        )
    return tuple(names)


def _read_experts(text: Section, defaults: _Defaults) -> _Experts:
    key = "n_routed_experts"
    if not text.has(key) and text.has("num_local_experts"):
        key = "num_local_experts"
    count = same_fact(text, "n_routed_experts", "num_local_experts", defaults.experts)
    top_k = text.integer("num_experts_per_tok", defaults.top_k)
    check_top_k(text, "num_experts_per_tok", top_k, key, count)
    for setting, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if text.text(setting, supported) != supported:
            raise text.refusal(setting, supported)
    groups = text.integer("n_group", defaults.groups)
    if count % groups != 0:
        raise text.error("n_group", f'a divisor of "{text.name(key)}" ({count})')
    return _Experts(
        count=count,
        key=key,
        top_k=top_k,
        groups=groups,
        top_groups=text.integer("topk_group", defaults.top_groups, high=groups),
        intermediate=text.integer("moe_intermediate_size", defaults.expert_intermediate),
        shared=text.integer("n_shared_experts", 1, low=0),
        normalises=text.boolean("norm_topk_prob", True),
        scale=text.number("routed_scaling_factor", defaults.scale),
    )


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


def _describe_mixture(experts: _Experts, activation: str, *, is_joined: bool) -> dict[str, Any]:
    mixture: dict[str, Any] = {
        "num_experts": experts.count,
        "top_k": experts.top_k,
        "intermediate": experts.intermediate,
        "activation": activation,
        "has_bias": False,
        "router": "sigmoid",
        "has_router_bias": False,
        "num_groups": experts.groups,
        "top_groups": experts.top_groups,
        "normalises_weights": experts.normalises,
        "weight_scale": experts.scale,
    }
    if not is_joined:
        mixture["per_expert"] = True
    if experts.shared:
        mixture["shared"] = {
            "intermediate": experts.shared * experts.intermediate,
            "activation": activation,
            "has_bias": False,
        }
    return mixture


def _tensors(
    sizes: Sizes,
    latent: _Latent,
    experts: _Experts,
    mlp_types: tuple[str, ...],
    *,
    ties_lm_head: bool,
    is_joined: bool,
) -> Iterator[TensorSpec]:
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")
    yield tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden)
    for i, mlp_type in enumerate(mlp_types):
        layer = f"layers.{i}."
        for name, source in PRE_NORMS:
            yield tensor_spec(layer + name, layer + source, hidden)
        yield from _attention_tensors(f"{layer}attn.", f"{layer}self_attn.", sizes, latent)
        ours = theirs = f"{layer}mlp."
        if mlp_type == _DENSE:
            intermediate = (sizes.intermediate, "intermediate_size")
            yield from _mlp_tensors(ours, theirs, "", hidden, intermediate)
        else:
            yield from _mixture_tensors(ours, theirs, experts, hidden, is_joined=is_joined)
    yield tensor_spec("final_norm.weight", "norm.weight", hidden)
    if not ties_lm_head:
        yield tensor_spec("lm_head.weight", "lm_head.weight", vocab, hidden)


def _attention_tensors(
    ours: str, theirs: str, sizes: Sizes, latent: _Latent
) -> Iterator[TensorSpec]:
    hidden = (sizes.hidden, "hidden_size")
    kv_rank = (latent.kv_rank, "kv_lora_rank")
    q_rank = (latent.q_rank, "q_lora_rank")
    heads = sizes.qo_heads
    q_rows = (
        heads * (latent.nope + latent.rope),
        "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
    )
    kv_rows = (
        heads * (latent.nope + latent.v),
        "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
    )
    entry = (latent.kv_rank + latent.rope, "kv_lora_rank + qk_rope_head_dim")
    values = (heads * latent.v, "num_attention_heads * v_head_dim")
    names: tuple[tuple[str, str, tuple[Dim, ...]], ...] = (
        ("kv_a", "kv_a_proj_with_mqa", (entry, hidden)),
        ("kv_a_norm", "kv_a_layernorm", (kv_rank,)),
        ("kv_b", "kv_b_proj", (kv_rows, kv_rank)),
        ("o", "o_proj", (hidden, values)),
    )
    if latent.q_rank:
        names += (
            ("q_a", "q_a_proj", (q_rank, hidden)),
            ("q_a_norm", "q_a_layernorm", (q_rank,)),
            ("q_b", "q_b_proj", (q_rows, q_rank)),
        )
    else:
        names += (("q", "q_proj", (q_rows, hidden)),)
    for name, source, dims in names:
        yield tensor_spec(f"{ours}{name}.weight", f"{theirs}{source}.weight", *dims)


def _mlp_tensors(
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


def _mixture_tensors(
    ours: str, theirs: str, experts: _Experts, hidden: Dim, *, is_joined: bool
) -> Iterator[TensorSpec]:
    count = (experts.count, experts.key)
    intermediate = (experts.intermediate, "moe_intermediate_size")
    yield tensor_spec(f"{ours}router.weight", f"{theirs}gate.weight", count, hidden)
    yield tensor_spec(
        f"{ours}router.correction.bias", f"{theirs}gate.e_score_correction_bias", count
    )
    if is_joined:
        wide = (2 * experts.intermediate, "2 * moe_intermediate_size")
        for name, dims in (("gate_up", (wide, hidden)), ("down", (hidden, intermediate))):
            yield tensor_spec(
                f"{ours}experts.{name}.weight", f"{theirs}experts.{name}_proj", count, *dims
            )
    for i in () if is_joined else range(experts.count):
        yield from _mlp_tensors(
            f"{ours}experts.", f"{theirs}experts.{i}.", f".{i}", hidden, intermediate
        )
    if experts.shared:
        shared = (
            experts.shared * experts.intermediate,
            "n_shared_experts * moe_intermediate_size",
        )
        yield from _mlp_tensors(f"{ours}shared.", f"{theirs}shared_experts.", "", hidden, shared)
