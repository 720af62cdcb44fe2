# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: compressed attention, four residual streams, experts by token and by score.

`deepseek_v4_tensors.py` has the names of its tensors. `docs/deepseek-v4.md` describes the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline._core import ModelFileError

from .decoder import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Sizes,
    check_common,
    check_top_k,
    same_fact,
    write_description,
)
from .deepseek_v4_tensors import (
    MODULES,
    PUBLISHED,
    SAVED,
    Layout,
    V4Formats,
    V4Layer,
    V4Shape,
    decoder_tensors_v4,
)
from .family import Family
from .formats import MXFP4_COLUMNS, MatrixFormat
from .hf_config import HfConfig
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
# Indices of ropes in the description.
_MAIN_ROPE, _COMPRESS_ROPE = 0, 1


@dataclass(frozen=True)
class _Config:
    """The content of a configuration."""

    sizes: Sizes
    shape: V4Shape
    layers: tuple[V4Layer, ...]
    formats: V4Formats
    window: int
    index_top_k: int
    activation: Mapping[str, Any]
    weight_scale: float
    streams: Mapping[str, Any]
    ropes: list[dict[str, Any]]


def deepseek_v4(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    config = _read(hf)

    def family(layout: Layout, others: tuple[Family, ...] = ()) -> Family:
        layers = [describe_layer(config, layer, layout) for layer in config.layers]
        description = write_description(
            NAME,
            config.sizes,
            config.ropes,
            layers,
            ties_lm_head=False,
            optional={"streams": config.streams},
        )
        return Family(
            NAME,
            hf.architecture,
            description,
            decoder_tensors_v4(config.shape, config.layers, config.formats, layout),
            (layout.prefix,),
            # The layers that predict further tokens are drafters.
            ignored_prefixes=("mtp.",),
            lm_head_names=(layout.lm_head,),
            others=others,
        )

    # Files with scales are those that were published.
    if config.formats.has_scales:
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


def describe_drafting_layer(
    hf: HfConfig, more_window: int = 0
) -> tuple[dict[str, Any], V4Shape, V4Layer, V4Formats]:
    """A layer of `mtp.*`: its description, and what its tensors follow from.

    Args:
        hf: The target's configuration.
        more_window: By how much its window is longer than that of the target's layers.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: The layer has a compressor, or a value is not supported.
    """
    config = _read(hf)
    config = replace(config, window=config.window + more_window)
    ratios = _read_ratios(hf.text, config.sizes.layers)
    if ratios is not None and any(ratios[config.sizes.layers :]):
        raise hf.text.refusal("compress_ratios", "0 for the layers of mtp.*")
    layer = V4Layer(ratio=0, overlaps=False, has_indexer=False, has_token_experts=False)
    description = describe_layer(config, layer, PUBLISHED)
    return description, config.shape, layer, config.formats


def describe_layer(config: _Config, layer: V4Layer, layout: Layout) -> dict[str, Any]:
    """The description of one layer."""
    shape, formats = config.shape, config.formats
    attention: dict[str, Any] = {
        "kind": "compressed",
        "num_qo_heads": shape.heads,
        "head_dim": shape.head_dim,
        "rope_head_dim": shape.rope_dim,
        "q_lora_rank": shape.q_rank,
        "window": config.window,
        "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_rank,
        "scale": shape.head_dim**-0.5,
        "rope": _COMPRESS_ROPE if layer.ratio else _MAIN_ROPE,
        **formats.entries("qkv_a", "q_b", "o_a", "o_b"),
    }
    if layer.ratio:
        attention["compressor"] = {"tokens_per_entry": layer.ratio, "overlaps": layer.overlaps}
    if layer.has_indexer:
        attention["indexer"] = {
            "num_heads": shape.index_heads,
            "head_dim": shape.index_dim,
            "top_k": config.index_top_k,
            **formats.entries("q"),
        }
    expert = {"intermediate": shape.intermediate, **config.activation, "has_bias": False}
    mlp: dict[str, Any] = {
        "num_experts": shape.experts,
        "top_k": shape.top_k,
        **expert,
        "router": "sqrt_softplus",
        "has_router_bias": False,
        "normalises_weights": True,
        "weight_scale": config.weight_scale,
        **formats.expert_entries(),
        "shared": {**expert, **formats.entries("gate_up", "down")},
    }
    if layer.has_token_experts:
        mlp["has_token_experts"] = True
    if not layout.is_joined:
        mlp["per_expert"] = True
    return {"attention": attention, "mlp": mlp}


def _read(hf: HfConfig) -> _Config:
    check_common(hf, may_have_scales=True)
    text = hf.text
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if text.boolean(key, False):
            raise text.refusal(key, "false")
    for key, supported in (
        ("hidden_act", "silu"),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
    ):
        if text.text(key, supported) != supported:
            raise text.refusal(key, supported)
    if not text.boolean("norm_topk_prob", True):
        raise text.refusal("norm_topk_prob", "true")
    for key in ("num_key_value_heads", "n_shared_experts"):
        if text.integer(key, 1) != 1:
            raise text.refusal(key, "1")
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
    shape = _read_shape(text, sizes)
    ropes = read_rope_of_deepseek_v4(text)
    return _Config(
        sizes=sizes,
        shape=shape,
        layers=_read_layers(text, sizes.layers),
        formats=_read_formats(hf, shape),
        window=text.integer("sliding_window", 128),
        index_top_k=text.integer("index_topk", 512),
        activation={
            "activation": "clamped_silu",
            "limit": text.number("swiglu_limit", 10.0),
        },
        weight_scale=text.number("routed_scaling_factor", 1.5),
        streams={
            "count": text.integer("hc_mult", 4),
            "sinkhorn_iterations": text.integer("hc_sinkhorn_iters", 20),
            "eps": text.number("hc_eps", 1e-6),
        },
        ropes=[
            {
                "inv_freq": inverse_frequencies(rope, shape.rope_dim),
                "scale": rope.scale,
                "interleaved": True,
            }
            for rope in ropes
        ],
    )


def _read_shape(text: Section, sizes: Sizes) -> V4Shape:
    experts = same_fact(text, "n_routed_experts", "num_local_experts", 256)
    top_k = text.integer("num_experts_per_tok", 6)
    check_top_k(text, "num_experts_per_tok", top_k, "n_routed_experts", experts)
    return V4Shape(
        vocab=sizes.vocab,
        hidden=sizes.hidden,
        heads=sizes.qo_heads,
        head_dim=sizes.head_dim,
        rope_dim=_read_rope_dim(text, sizes.head_dim),
        q_rank=text.integer("q_lora_rank", 1024),
        o_groups=text.integer("o_groups", 8),
        o_rank=text.integer("o_lora_rank", 1024),
        index_heads=text.integer("index_n_heads", 64),
        index_dim=text.integer("index_head_dim", 128, high=MAX_HEAD_DIM),
        experts=experts,
        top_k=top_k,
        intermediate=sizes.intermediate,
        streams=text.integer("hc_mult", 4),
    )


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
        raise ModelFileError(
            f'{text.source}: key "{text.name(key)}" has {len(ratios)} entries; expected '
            f'{num_layers}, as "{text.name("num_hidden_layers")}" says, or {num_layers + num_more} '
            f'with those of "{text.name(more_key)}"'
        )
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


def _read_layers(text: Section, num_layers: int) -> tuple[V4Layer, ...]:
    types = _read_types(text, num_layers)
    rates = _read_rates(text)
    hashed = _read_hashed(text, num_layers)
    return tuple(
        V4Layer(
            ratio=rates.get(layer_type, 0),
            overlaps=layer_type == _CSA,
            has_indexer=layer_type == _CSA,
            has_token_experts=is_hashed,
        )
        for layer_type, is_hashed in zip(types, hashed, strict=True)
    )


def _read_types(text: Section, num_layers: int) -> Sequence[str]:
    """The attention of each layer, in either spelling."""
    key, old_key = "layer_types", "compress_ratios"
    ratios = _read_ratios(text, num_layers)
    counted = None if ratios is None else [_TYPE_OF_RATIO[r] for r in ratios[:num_layers]]
    names = _read_list(text, key, tuple(_TYPE_OF_RATIO.values()), num_layers)
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
    names = _read_list(text, key, (_HASH, _MOE), num_layers)
    if names is None:
        return counted
    hashed = [name == _HASH for name in names]
    if text.has(old_key) and hashed != counted:
        raise text.error(old_key, f'what "{text.name(key)}" says, or one of the two keys')
    return hashed


def _read_list(
    text: Section, key: str, allowed: Sequence[str], num_layers: int
) -> list[str] | None:
    names = text.strings(key)
    if names is None:
        return None
    if any(name not in allowed for name in names):
        raise text.refusal(key, f"a list of {', '.join(allowed)}")
    if len(names) != num_layers:
        raise ModelFileError(
            f'{text.source}: key "{text.name(key)}" has {len(names)} entries; expected '
            f'{num_layers}, as "{text.name("num_hidden_layers")}" says'
        )
    return names


def _read_formats(hf: HfConfig, shape: V4Shape) -> V4Formats:
    """fp8 matrices and mxfp4 experts of published files; the others are plain."""
    quantization = read_quantization(hf, ("fp8",))
    if quantization is None:
        return V4Formats()
    section = quantization.section
    if quantization.names or quantization.wildcards:
        raise section.refusal(quantization.excluded_key, "no modules")
    key = "expert_dtype"
    holder = section if section.has(key) else hf.text
    if holder.text(key, "fp4") != "fp4":
        raise holder.refusal(key, "fp4")
    for size_key, size in (
        ("hidden_size", shape.hidden),
        ("moe_intermediate_size", shape.intermediate),
    ):
        if size % MXFP4_COLUMNS != 0:
            raise hf.text.error(size_key, f"a multiple of {MXFP4_COLUMNS}, as fp4 experts need it")
    if section.text("scale_fmt", "ue8m0") != "ue8m0":
        raise section.refusal("scale_fmt", f'ue8m0 in a "{QUANTIZATION}" of this model')
    return V4Formats(
        MatrixFormat("fp8", "block", "scale", is_exact=True), MatrixFormat("mxfp4", "", "scale")
    )
