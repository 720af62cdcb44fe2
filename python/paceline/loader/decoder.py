# SPDX-License-Identifier: Apache-2.0
"""The parts that all families of decoders share: sizes, layers and the canonical description.

A family (`families.py`, `gemma4.py`) or a draft head (`eagle.py`, `gemma4_assistant.py`) reads a
configuration and calls `describe` and `decoder_tensors` with the values it found.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .formats import NO_FORMATS, LayerFormats
from .hf_config import HfConfig
from .layer_types import SLIDING
from .rope import RopeSettings, inverse_frequencies
from .section import REQUIRED, Section

MAX_LAYERS: Final = 1024
#: kMaxExperts of the library, checked before a file's experts are listed.
MAX_EXPERTS: Final = 1024
MAX_HEAD_DIM: Final = 4096
MAX_PER_LAYER_SIZE: Final = 16_384

_ACTIVATIONS: Final[dict[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Sizes:
    """The numbers that every family has."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    qo_heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    eps: float


@dataclass(frozen=True)
class Layer:
    """Settings that may differ from layer to layer.

    Attributes:
        layer_type: One of `LAYER_TYPES`.
        kv_heads: The number of key and value heads.
        head_dim: The number of elements of a head.
        intermediate: The width of the MLP.
        k_eq_v: Values are the keys before norm and rotation.
        kv_source: The earlier layer whose KV this layer reads; None: it has its own.
        reads_target: In a drafter: the layer reads the KV of a layer of the target.
        formats: The formats of its Linears.
    """

    layer_type: str
    kv_heads: int
    head_dim: int
    intermediate: int
    k_eq_v: bool = False
    kv_source: int | None = None
    reads_target: bool = False
    formats: LayerFormats = NO_FORMATS

    @property
    def owns_kv(self) -> bool:
        """Returns whether the layer computes keys and values."""
        return self.kv_source is None and not self.reads_target


def same_layers(sizes: Sizes, layer_types: tuple[str, ...]) -> tuple[Layer, ...]:
    """Layers that differ in their type only."""
    return tuple(
        Layer(layer_type, sizes.kv_heads, sizes.head_dim, sizes.intermediate)
        for layer_type in layer_types
    )


@dataclass(frozen=True)
class PerLayerInputs:
    """Gemma 4's per-layer embeddings."""

    size: int
    vocab: int


def read_sizes(text: Section) -> Sizes:
    """Reads the sizes.

    Two defaults depend on other keys where the section has none, as in transformers: the number of
    key and value heads is that of the query heads, and the head size is the hidden size divided by
    the number of heads.
    """
    hidden = text.integer("hidden_size")
    qo_heads = kv = text.integer("num_attention_heads")
    if text.has_value("num_key_value_heads"):
        kv = text.integer("num_key_value_heads")
    if qo_heads % kv != 0:
        raise text.error(
            "num_key_value_heads", f'a divisor of "{text.name("num_attention_heads")}" ({qo_heads})'
        )
    if text.has_value("head_dim"):
        dim = text.integer("head_dim", high=MAX_HEAD_DIM)
    else:
        if hidden % qo_heads != 0:
            raise text.error(
                "hidden_size",
                f'a multiple of "{text.name("num_attention_heads")}" ({qo_heads}) where '
                f'"{text.name("head_dim")}" is absent',
            )
        dim = hidden // qo_heads
        if dim > MAX_HEAD_DIM:
            raise text.error(
                "hidden_size",
                f'at most {MAX_HEAD_DIM} times "{text.name("num_attention_heads")}" ({qo_heads}) '
                f'where "{text.name("head_dim")}" is absent',
            )
    if dim % 2 != 0:
        raise text.wrong("head_dim", f"is {dim}; expected an even integer")
    return Sizes(
        vocab=text.integer("vocab_size"),
        hidden=hidden,
        intermediate=text.integer("intermediate_size"),
        layers=text.integer("num_hidden_layers", high=MAX_LAYERS),
        qo_heads=qo_heads,
        kv_heads=kv,
        head_dim=dim,
        max_position=text.integer("max_position_embeddings"),
        eps=text.number("rms_norm_eps"),
    )


def check_common(
    hf: HfConfig, *, may_be_bidirectional_in_images: bool = False, may_have_scales: bool = False
) -> None:
    """Refuses settings that no family here supports."""
    for section in (hf.top, hf.text):
        if section.has("quantization_config") and not may_have_scales:
            raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")
        for key in ("is_encoder_decoder", "add_cross_attention"):
            section.only(key, False)
        key = "use_bidirectional_attention"
        if may_be_bidirectional_in_images:
            if section.has(key) and section.values[key] not in ("vision", False):
                raise section.refusal(key, 'null, "vision" (which does not concern text)')
        else:
            section.only(key, False)


def read_activation(text: Section, keys: tuple[str, ...], default: str) -> str:
    """The canonical name of the activation that the first of some keys names.

    Raises:
        ModelFileError: The key has a wrong type.
        NotImplementedError: It names another one.
    """
    key = next((key for key in keys if text.has(key)), keys[0])
    name = text.text(key, default)
    if name not in _ACTIVATIONS:
        raise text.refusal(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def describe(
    name: str,
    sizes: Sizes,
    layers: tuple[Layer, ...],
    *,
    window: int,
    ropes: Mapping[str, RopeSettings],
    attention_scale: float,
    activation: str,
    ties_lm_head: bool,
    has_qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    has_v_norm: bool = False,
    has_post_norms: bool = False,
    has_layer_scale: bool = False,
    has_sinks: bool = False,
    per_layer_inputs: PerLayerInputs | None = None,
    norm_weight_offset: float = 0.0,
    embed_scale: float = 1.0,
    logit_soft_cap: float = 0.0,
) -> dict[str, Any]:
    """Writes the canonical description; `ropes` is by layer type."""
    # The frequencies of a rope depend on the head size. Ropes are in the order of first use.
    rope_of = [(ropes[layer.layer_type], layer.head_dim) for layer in layers]
    distinct = list(dict.fromkeys(rope_of))
    described: list[dict[str, Any]] = []
    for layer, rope in zip(layers, rope_of, strict=True):
        attention: dict[str, Any] = {
            "kind": "sliding" if layer.layer_type == SLIDING else "full",
            "window": window if layer.layer_type == SLIDING else 0,
            "num_qo_heads": sizes.qo_heads,
            "num_kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "scale": attention_scale,
            "soft_cap": 0.0,
            "rope": distinct.index(rope),
            "has_qk_norm": has_qk_norm,
            "has_qkv_bias": attention_bias,
            "has_o_bias": attention_bias,
        }
        if layer.kv_source is not None:
            attention["kv_source"] = layer.kv_source
        if layer.reads_target:
            attention["reads_target"] = True
        if layer.owns_kv and has_v_norm:
            attention["has_v_norm"] = True
        if layer.k_eq_v:
            attention["k_eq_v"] = True
        if has_sinks:
            attention["has_sinks"] = True
        attention |= layer.formats.entries("qkv", "o")
        mlp = {
            "intermediate": layer.intermediate,
            "activation": activation,
            "has_bias": mlp_bias,
            **layer.formats.entries("gate_up", "down"),
        }
        described.append({"attention": attention, "mlp": mlp})
    optional: dict[str, Any] = {}
    if has_layer_scale:
        optional["has_layer_scale"] = True
    if per_layer_inputs is not None:
        optional["per_layer_inputs"] = {
            "size": per_layer_inputs.size,
            "vocab_size": per_layer_inputs.vocab,
            "embed_scale": round_to_float32(math.sqrt(per_layer_inputs.size)),
            "proj_scale": round_to_float32(sizes.hidden**-0.5),
            "scale": round_to_float32(2.0**-0.5),
            "activation": activation,
        }
    return write_description(
        name,
        sizes,
        [
            {"inv_freq": inverse_frequencies(rope, head_dim), "scale": rope.scale}
            for rope, head_dim in distinct
        ],
        described,
        ties_lm_head=ties_lm_head,
        has_post_norms=has_post_norms,
        norm_weight_offset=norm_weight_offset,
        embed_scale=embed_scale,
        logit_soft_cap=logit_soft_cap,
        optional=optional,
    )


def write_description(
    name: str,
    sizes: Sizes,
    ropes: list[dict[str, Any]],
    layers: list[dict[str, Any]],
    *,
    ties_lm_head: bool,
    has_post_norms: bool = False,
    norm_weight_offset: float = 0.0,
    embed_scale: float = 1.0,
    logit_soft_cap: float = 0.0,
    optional: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the canonical description around ropes and layers that are written already."""
    return {
        "format": "paceline-decoder-1",
        "name": name,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "max_position": sizes.max_position,
        "norm_eps": sizes.eps,
        "norm_weight_offset": norm_weight_offset,
        "embed_scale": embed_scale,
        "logit_soft_cap": logit_soft_cap,
        "ties_lm_head": ties_lm_head,
        "has_post_norms": has_post_norms,
        **(optional or {}),
        "ropes": ropes,
        "layers": layers,
    }


def same_fact(text: Section, key: str, other: str, default: int | None = None) -> int:
    """A number of experts that files state under one of two keys, or under both."""
    if not text.has(key) and text.has(other):
        return text.integer(other, high=MAX_EXPERTS)
    value = text.integer(key, REQUIRED if default is None else default, high=MAX_EXPERTS)
    if text.has(other) and text.integer(other) != value:
        raise text.error(other, f'{value}, as "{text.name(key)}" says, or one of the two keys')
    return value


def check_top_k(text: Section, key: str, top_k: int, experts_key: str, experts: int) -> None:
    """Refuses more experts for a token than there are."""
    if top_k > experts:
        allowed = f'an integer from 1 to "{text.name(experts_key)}" ({experts})'
        raise text.wrong(key, f"is {top_k}; expected {allowed}")


def round_to_float32(value: float) -> float:
    """To nearest, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def round_to_bfloat16(value: float) -> float:
    """To nearest, ties to even; for finite values."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
