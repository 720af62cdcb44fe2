# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: compressed attention, four residual streams, experts by token and by score.

`deepseek_v4_tensors.py` has the names of its tensors. `docs/deepseek-v4.md` describes the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .decoder import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Sizes,
    check_common,
    check_top_k,
    same_fact,
    write_description,
)
from .deepseek_v4_tensors import DENSE, EXPERTS, MODULES, PUBLISHED, SAVED, Layout, V4Tensors
from .family import Family
from .formats import MXFP4_COLUMNS
from .hf_config import HfConfig
from .layer_types import read_types
from .messages import show
from .quantization import KEY as QUANTIZATION
from .quantization import read_quantization
from .rope import inverse_frequencies, read_rope_of_deepseek_v4
from .section import Section

NAME: Final = "deepseek_v4"
ARCHITECTURE: Final = "DeepseekV4ForCausalLM"

#: Keys of a block drafter in the target's own files (`deepseek_v4_dspark.py`).
_DSPARK_KEYS: Final = "dspark_"
BLOCK_SIZE: Final = "dspark_block_size"
TARGET_LAYERS: Final = "dspark_target_layer_ids"

_SLIDING: Final = "sliding_attention"
_CSA: Final = "compressed_sparse_attention"
_HCA: Final = "heavily_compressed_attention"
# The type that transformers gives a layer of a compress ratio.
_TYPE_OF_RATIO: Final = {0: _SLIDING, 4: _CSA, 128: _HCA}
_RATES: Final = {_CSA: ("compress_rate_csa", 4), _HCA: ("compress_rate_hca", 128)}
_HASH, _MOE = "hash_moe", "moe"
# Settings of which this family has one value.
_ONLY: Final[dict[str, bool | int | str]] = {
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}
# Joined products of experts.
_PRODUCTS: Final = ("gate_up", "down")
# Indices of ropes in the description.
_MAIN_ROPE, _COMPRESS_ROPE = 0, 1


def deepseek_v4(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    sizes, plain_layer, optional, ropes = _read(hf)
    text = hf.text
    types = _read_types(text, sizes.layers)
    rates = _read_rates(text)
    hashed = _read_hashed(text, sizes.layers)
    indexer = _read_indexer(text, plain_layer)
    layers: list[Mapping[str, Any]] = []
    for layer_type, is_hashed in zip(types, hashed, strict=True):
        attention, mlp = dict(plain_layer["attention"]), dict(plain_layer["mlp"])
        if layer_type in rates:
            attention |= {
                "rope": _COMPRESS_ROPE,
                "compressor": {
                    "tokens_per_entry": rates[layer_type],
                    "overlaps": layer_type == _CSA,
                },
            }
        if layer_type == _CSA:
            attention["indexer"] = indexer
        if is_hashed:
            mlp["has_token_experts"] = True
        layers.append({"attention": attention, "mlp": mlp})

    def family(layout: Layout, others: tuple[Family, ...] = ()) -> Family:
        described = [_with_names_of(layout, layer) for layer in layers]
        config = write_description(
            NAME, sizes, ropes, described, ties_lm_head=False, optional=optional
        )
        return Family(
            NAME,
            hf.architecture,
            config,
            tuple(V4Tensors(config, layout).all()),
            (layout.prefix,),
            # The layers that predict further tokens are drafters.
            ignored_prefixes=("mtp.",),
            lm_head_names=(layout.lm_head,),
            others=others,
        )

    # Files with scales are those that were published.
    if "gate_up" in plain_layer["mlp"]:
        return family(PUBLISHED)
    return family(PUBLISHED, (family(SAVED), family(MODULES)))


def has_stages(top: Section) -> bool:
    """Returns whether a configuration is that of a target with a block drafter in its own files."""
    names = top.values.get("architectures")
    is_this = isinstance(names, list) and ARCHITECTURE in names
    return is_this and any(key.startswith(_DSPARK_KEYS) for key in top.values)


def read_target_layers(text: Section) -> list[int]:
    """The key "dspark_target_layer_ids"; a block drafter has a stage for each of them.

    Raises:
        ModelFileError: It is missing, or no list of numbers.
    """
    layers = text.values.get(TARGET_LAYERS)
    if not isinstance(layers, list) or not layers or any(type(i) is not int for i in layers):
        raise text.error(TARGET_LAYERS, "a list of layers of the target")
    return layers


def describe_drafting_layer(hf: HfConfig, more_window: int = 0) -> dict[str, Any]:
    """The description of a layer of `mtp.*`.

    Args:
        hf: The target's configuration.
        more_window: By how much its window is longer than that of the target's layers.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: The layer has a compressor, or a value is not supported.
    """
    sizes, layer, _, _ = _read(hf)
    layer["attention"]["window"] += more_window
    ratios = _read_ratios(hf.text, sizes.layers)
    if ratios is not None and any(ratios[sizes.layers :]):
        raise hf.text.refusal("compress_ratios", "0 for the layers of mtp.*")
    return _with_names_of(PUBLISHED, layer)


def _with_names_of(layout: Layout, layer: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a layer whose experts have the tensors of a layout."""
    own = {} if layout.is_joined else {"per_expert": True}
    return {**layer, "mlp": {**layer["mlp"], **own}}


def _read(hf: HfConfig) -> tuple[Sizes, dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The facts that all layers share.

    Returns:
        The sizes; the description of a layer without a compressor and with experts by score; the
        entries of the model's description that only this family has; and the ropes.
    """
    check_common(hf, may_have_scales=True)
    text = hf.text
    for key, supported in _ONLY.items():
        text.only(key, supported)
    sizes = Sizes(
        vocab=text.integer("vocab_size", 129_280),
        hidden=text.integer("hidden_size", 4096),
        intermediate=text.integer("moe_intermediate_size", 2048),
        layers=text.integer("num_hidden_layers", 43, high=MAX_LAYERS),
        qo_heads=text.integer("num_attention_heads", 64),
        kv_heads=1,
        head_dim=text.integer("head_dim", 512, high=MAX_HEAD_DIM),
        max_position=text.integer("max_position_embeddings", 1_048_576),
        eps=text.number("rms_norm_eps", 1e-6),
    )
    experts = same_fact(text, "n_routed_experts", "num_local_experts", 256)
    top_k = text.integer("num_experts_per_tok", 6)
    check_top_k(text, "num_experts_per_tok", top_k, "n_routed_experts", experts)
    rope_dim = _read_rope_dim(text, sizes.head_dim)
    dense, joined = _read_formats(hf, sizes)
    expert = {
        "intermediate": sizes.intermediate,
        "activation": "clamped_silu",
        "limit": text.number("swiglu_limit", 10.0),
        "has_bias": False,
    }
    layer = {
        "attention": {
            "kind": "compressed",
            "num_qo_heads": sizes.qo_heads,
            "head_dim": sizes.head_dim,
            "rope_head_dim": rope_dim,
            "q_lora_rank": text.integer("q_lora_rank", 1024),
            "window": text.integer("sliding_window", 128),
            "o_groups": text.integer("o_groups", 8),
            "o_lora_rank": text.integer("o_lora_rank", 1024),
            "scale": sizes.head_dim**-0.5,
            "rope": _MAIN_ROPE,
            **dict.fromkeys(("qkv_a", "q_b", "o_a", "o_b") if dense else (), dense),
        },
        "mlp": {
            "num_experts": experts,
            "top_k": top_k,
            **expert,
            "router": "sqrt_softplus",
            "has_router_bias": False,
            "normalises_weights": True,
            "weight_scale": text.number("routed_scaling_factor", 1.5),
            **dict.fromkeys(_PRODUCTS if joined else (), joined),
            "shared": {**expert, **dict.fromkeys(_PRODUCTS if dense else (), dense)},
        },
    }
    streams = {
        "count": text.integer("hc_mult", 4),
        "sinkhorn_iterations": text.integer("hc_sinkhorn_iters", 20),
        "eps": text.number("hc_eps", 1e-6),
    }
    ropes = [
        {
            "inv_freq": inverse_frequencies(rope, rope_dim),
            "scale": rope.scale,
            "interleaved": True,
        }
        for rope in read_rope_of_deepseek_v4(text)
    ]
    return sizes, layer, {"streams": streams}, ropes


def _read_indexer(text: Section, layer: Mapping[str, Any]) -> dict[str, Any]:
    q_b = layer["attention"].get("q_b")
    return {
        "num_heads": text.integer("index_n_heads", 64),
        "head_dim": text.integer("index_head_dim", 128, high=MAX_HEAD_DIM),
        "top_k": text.integer("index_topk", 512),
        **({} if q_b is None else {"q": q_b}),
    }


def _read_rope_dim(text: Section, head_dim: int) -> int:
    """The elements of a head that are rotated, in either spelling."""
    key, part_key = "qk_rope_head_dim", "partial_rotary_factor"
    dim = part = int(head_dim * text.number(part_key, 64 / 512))
    if text.has(key):
        dim = text.integer(key, high=head_dim)
        if text.has(part_key) and dim != part:
            raise text.error(
                key, f'{part}, as "{text.name(part_key)}" says, or one of the two keys'
            )
    if dim < 2 or dim % 2 != 0:
        raise text.error(key if text.has(key) else part_key, "an even number of rotated elements")
    return dim


def _read_ratios(text: Section, num_layers: int) -> list[int] | None:
    """The key "compress_ratios": one for each layer, and perhaps for the layers of MTP."""
    key = "compress_ratios"
    if not text.has(key):
        return None
    ratios = text.values[key]
    known = ", ".join(map(str, _TYPE_OF_RATIO))
    if not isinstance(ratios, list) or any(type(ratio) is not int for ratio in ratios):
        raise text.error(key, f"a list of {known}")
    more_key, num_more = _num_drafting_layers(text)
    if len(ratios) not in (num_layers, num_layers + num_more):
        expected = f'{num_layers}, as "{text.name("num_hidden_layers")}" says, or '
        expected += f'{num_layers + num_more} with those of "{text.name(more_key)}"'
        raise text.wrong(key, f"has {len(ratios)} entries; expected {expected}")
    for ratio in ratios:
        if ratio not in _TYPE_OF_RATIO:
            raise NotImplementedError(
                f'{text.source}: key "{text.name(key)}" has {show(ratio)}, which Paceline does not '
                f"support; supported: {known}"
            )
    return ratios


def _num_drafting_layers(text: Section) -> tuple[str, int]:
    """The layers of `mtp.*`, and the key that counts them."""
    if text.has(TARGET_LAYERS):
        return TARGET_LAYERS, len(read_target_layers(text))
    key = "num_nextn_predict_layers"
    return key, text.integer(key, 1, low=0, high=MAX_LAYERS)


def _read_types(text: Section, num_layers: int) -> Sequence[str]:
    """The attention of each layer, in either spelling."""
    key, old_key = "layer_types", "compress_ratios"
    ratios = _read_ratios(text, num_layers)
    counted = None if ratios is None else tuple(_TYPE_OF_RATIO[r] for r in ratios[:num_layers])
    names = read_types(text, key, tuple(_TYPE_OF_RATIO.values()), num_layers)
    if names is not None:
        if counted is not None and counted != names:
            raise text.error(old_key, f'what "{text.name(key)}" says, or one of the two keys')
        return names
    # The default of transformers.
    return counted or [_HCA if i < 2 or i % 2 == 0 else _CSA for i in range(num_layers)]


def _read_rates(text: Section) -> dict[str, int]:
    """The tokens of an entry by type of layer, in either spelling."""
    section = text.section("compress_rates") or Section({}, text.source, "compress_rates")
    for key in section.values:
        if key not in _RATES:
            raise section.refusal(key, f"no keys but {', '.join(_RATES)}")
    rates: dict[str, int] = {}
    for layer_type, (old_key, default) in _RATES.items():
        rate = section.integer(layer_type, default)
        rates[layer_type] = text.integer(old_key, rate)
        if section.has(layer_type) and rates[layer_type] != rate:
            raise text.error(
                old_key, f'{rate}, as "{section.name(layer_type)}" says, or one of the two keys'
            )
    return rates


def _read_hashed(text: Section, num_layers: int) -> list[bool]:
    """Returns whether each layer's experts are those of a table by token, in either spelling."""
    key, old_key = "mlp_layer_types", "num_hash_layers"
    counted = [i < text.integer(old_key, 3, low=0) for i in range(num_layers)]
    names = read_types(text, key, (_HASH, _MOE), num_layers)
    if names is None:
        return counted
    hashed = [name == _HASH for name in names]
    if text.has(old_key) and hashed != counted:
        raise text.error(old_key, f'what "{text.name(key)}" says, or one of the two keys')
    return hashed


def _read_formats(hf: HfConfig, sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The formats of dense matrices and of experts in the description, both empty without scales.

    Published files have fp8 matrices and mxfp4 experts; the others are plain.
    """
    quantization = read_quantization(hf, ("fp8",))
    if quantization is None:
        return {}, {}
    section = quantization.section
    if quantization.names or quantization.wildcards:
        raise section.refusal(quantization.excluded_key, "no modules")
    key = "expert_dtype"
    (section if section.has(key) else hf.text).only(key, "fp4")
    for size_key, size in (
        ("hidden_size", sizes.hidden),
        ("moe_intermediate_size", sizes.intermediate),
    ):
        if size % MXFP4_COLUMNS != 0:
            raise hf.text.error(size_key, f"a multiple of {MXFP4_COLUMNS}, as fp4 experts need it")
    section.only("scale_fmt", "ue8m0", f'ue8m0 in a "{QUANTIZATION}" of this model')
    return DENSE.entry, EXPERTS.entry
