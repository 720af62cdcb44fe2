# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5, 3.6 and 3.8, dense and with experts, and Qwen3-Next.

Most layers are gated delta nets, which keep a state instead of keys and values. The others have
full attention with an output gate, and rotate the first part of each head. Qwen3-Next has the same
layers; its checkpoints interleave the projections of a delta net by key head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline._core import ModelFileError

from .decoder import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Sizes,
    check_common,
    check_top_k,
    read_activation,
    write_description,
)
from .family import Family
from .formats import FP8_BLOCK, LayerFormats
from .hf_config import HfConfig
from .layer_types import FULL
from .messages import quote
from .quantization import (
    DENSE_METHODS,
    check_plain_lm_head,
    input_scales,
    read_quantization,
)
from .qwen3_5_formats import PLAIN, Formats, check_plain, read_formats
from .qwen3_5_tensors import DeltaNet, Experts, Shape, decoder_tensors
from .rope import RopeSettings, inverse_frequencies, read_partial_rope
from .section import Section

# The architectures with the "model_type" of each.
QWEN3_5_ARCHITECTURES: Final[dict[str, str]] = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
}
QWEN3_5_MOE_ARCHITECTURES: Final[dict[str, str]] = {
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
QWEN3_NEXT_ARCHITECTURES: Final[dict[str, str]] = {"Qwen3NextForCausalLM": "qwen3_next"}
ARCHITECTURES: Final = (
    *QWEN3_5_ARCHITECTURES,
    *QWEN3_5_MOE_ARCHITECTURES,
    *QWEN3_NEXT_ARCHITECTURES,
)

LINEAR: Final = "linear_attention"
_LAYER_TYPES: Final = (LINEAR, FULL)
# Prefixes of the decoder's tensors: in a published checkpoint with a vision tower, in a plain
# language model, in files of some tools, and in a bare text model.
_PREFIXES: Final = ("model.language_model.", "model.", "language_model.model.", "")
_OTHER_PARTS: Final = ("model.visual.", "visual.", "mtp.")


@dataclass(frozen=True)
class _Defaults:
    """The values of transformers for keys that a file may leave out."""

    vocab: int
    hidden: int
    layers: int
    kv_heads: int
    intermediate: int = 0
    experts: int = 0
    top_k: int = 0


_DENSE: Final = _Defaults(vocab=248_320, hidden=4096, layers=32, kv_heads=4, intermediate=12_288)
_MOE: Final = _Defaults(vocab=248_320, hidden=2048, layers=40, kv_heads=2, experts=256, top_k=8)
_NEXT: Final = _Defaults(
    vocab=151_936,
    hidden=2048,
    layers=48,
    kv_heads=2,
    intermediate=5632,
    experts=512,
    top_k=10,
)


def qwen3_5(hf: HfConfig) -> Family:
    """Translates a dense target of Qwen3.5, 3.6 or 3.8.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    return _translate("qwen3_5", hf, read_shape(hf))


def qwen3_5_moe(hf: HfConfig) -> Family:
    """Translates a target with experts; see `qwen3_5`."""
    return _translate("qwen3_5_moe", hf, read_shape(hf))


def qwen3_next(hf: HfConfig) -> Family:
    """Translates Qwen3-Next; see `qwen3_5`."""
    return _translate("qwen3_next", hf, read_shape(hf))


def read_shape(hf: HfConfig) -> Shape:
    """Reads the sizes of a target of any of the three families; raises as `qwen3_5` does."""
    check_common(hf, may_have_scales=True)
    text = hf.text
    is_next = hf.architecture in QWEN3_NEXT_ARCHITECTURES
    defaults = _DENSE
    if is_next:
        defaults = _NEXT
    elif hf.architecture in QWEN3_5_MOE_ARCHITECTURES:
        defaults = _MOE
    _check_settings(text)
    sizes = _read_sizes(text, defaults)
    experts = _read_experts(text, defaults) if defaults.experts else None
    shape = Shape(
        sizes=sizes,
        layer_types=_read_layer_types(text, sizes.layers),
        delta=_read_delta_net(text),
        rotated=_read_rope(text, sizes.head_dim)[1],
        experts=experts,
        dense_layers=_read_dense_layers(text, sizes.layers, is_next=is_next)
        if experts
        else frozenset(range(sizes.layers)),
        is_interleaved=is_next,
        ties_lm_head=_read_tie(hf),
        formats=(PLAIN,) * sizes.layers,
    )
    quantization = read_quantization(hf, DENSE_METHODS)
    if quantization is None:
        return shape
    check_plain_lm_head(quantization, ties_lm_head=shape.ties_lm_head)
    formats = tuple(
        read_formats(
            quantization,
            f"layers.{i}.",
            _PREFIXES,
            layer_type=layer_type,
            num_experts=0 if experts is None or i in shape.dense_layers else experts.count,
            is_interleaved=is_next,
        )
        for i, layer_type in enumerate(shape.layer_types)
    )
    shape = replace(shape, formats=formats)
    _check_blocks(text, shape)
    return shape


def read_mtp_formats(hf: HfConfig, shape: Shape, prefix: str) -> Formats:
    """The formats of the layer that predicts further tokens; raises as `qwen3_5` does.

    Args:
        hf: The configuration of its target.
        shape: The same, read.
        prefix: The beginning of the layer's names in the file.
    """
    quantization = read_quantization(hf, DENSE_METHODS)
    if quantization is None:
        return PLAIN
    check_plain(quantization, ["fc"], (prefix,))
    formats = read_formats(
        quantization,
        "layers.0.",
        (prefix,),
        layer_type=FULL,
        num_experts=0 if shape.experts is None else shape.experts.count,
        is_interleaved=shape.is_interleaved,
    )
    _check_blocks(hf.text, replace(shape, layer_types=(FULL,), formats=(formats,)))
    return formats


def num_mtp_layers(text: Section) -> tuple[str, int]:
    """The layers that predict further tokens, and the key that counts them."""
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    key = next((key for key in keys if text.has(key)), keys[0])
    return key, text.integer(key, 1, low=0, high=MAX_LAYERS)


def check_mtp_settings(text: Section) -> None:
    """Refuses an MTP layer with embeddings and an lm_head of its own.

    Raises:
        ModelFileError: A key has a wrong type.
        NotImplementedError: It has them.
    """
    key = "mtp_use_dedicated_embeddings"
    if text.boolean(key, False):
        raise text.refusal(key, "false")


def _translate(name: str, hf: HfConfig, shape: Shape) -> Family:
    rope, rotated = _read_rope(hf.text, shape.sizes.head_dim)
    entry = {"inv_freq": inverse_frequencies(rope, rotated), "scale": rope.scale}

    def family(others: tuple[Family, ...], *, is_per_expert: bool) -> Family:
        layers = [
            {
                "attention": describe_attention(shape, formats)
                if layer_type == FULL
                else _describe_delta_net(shape, formats),
                "mlp": describe_mlp(
                    shape, formats, is_dense=i in shape.dense_layers, is_per_expert=is_per_expert
                ),
            }
            for i, (layer_type, formats) in enumerate(
                zip(shape.layer_types, shape.formats, strict=True)
            )
        ]
        tensors = tuple(decoder_tensors(shape, is_per_expert=is_per_expert))
        return Family(
            name,
            hf.architecture,
            write_description(
                name,
                shape.sizes,
                [entry],
                layers,
                ties_lm_head=shape.ties_lm_head,
                norm_weight_offset=1.0,
            ),
            tensors,
            _PREFIXES,
            ignored_prefixes=_OTHER_PARTS,
            ignored_sources=input_scales(tensors),
            others=others,
        )

    if shape.experts is None:
        return family((), is_per_expert=False)
    if have_scales(shape.formats):
        return family((), is_per_expert=True)
    # Published files have one tensor for all experts, and transformers writes one for each.
    return family((family((), is_per_expert=True),), is_per_expert=False)


def have_scales(formats: Iterable[Formats]) -> bool:
    """Returns whether experts have scales, and then tensors of their own in every file."""
    return any(one.own.gate_up or one.own.down for one in formats)


def describe_attention(shape: Shape, formats: Formats) -> dict[str, Any]:
    """The full attention of a layer in a canonical description."""
    sizes = shape.sizes
    return {
        "kind": "full",
        "window": 0,
        "num_qo_heads": sizes.qo_heads,
        "num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
        "soft_cap": 0.0,
        "rope": 0,
        **({} if shape.rotated == sizes.head_dim else {"rope_head_dim": shape.rotated}),
        "has_qk_norm": True,
        "has_qkv_bias": False,
        "has_o_bias": False,
        "has_output_gate": True,
        **formats.own.entries("qkv", "o"),
    }


def _describe_delta_net(shape: Shape, formats: Formats) -> dict[str, Any]:
    delta, inputs = shape.delta, formats.own.qkv
    return {
        "kind": "gated_delta",
        "num_key_heads": delta.key_heads,
        "num_value_heads": delta.value_heads,
        "key_head_dim": delta.key_dim,
        "value_head_dim": delta.value_dim,
        "conv_size": delta.taps,
        "norm_eps": shape.sizes.eps,
        **({} if inputs is None else {"in": inputs.entry}),
        **formats.own.entries("o"),
    }


def describe_mlp(
    shape: Shape, formats: Formats, *, is_dense: bool, is_per_expert: bool
) -> dict[str, Any]:
    """The MLP of a layer in a canonical description."""

    def unit(intermediate: int, own: LayerFormats) -> dict[str, Any]:
        return {
            "intermediate": intermediate,
            "activation": "silu",
            "has_bias": False,
            **own.entries("gate_up", "down"),
        }

    experts = shape.experts
    if is_dense or experts is None:
        return unit(shape.sizes.intermediate, formats.own)
    return {
        **unit(experts.intermediate, formats.own),
        "num_experts": experts.count,
        "top_k": experts.top_k,
        # The softmax over all experts, divided by the sum of the chosen, is that of the chosen.
        "router": "softmax_of_chosen",
        "has_router_bias": False,
        **({"per_expert": True} if is_per_expert else {}),
        "shared": unit(experts.shared, formats.shared),
        "shared_gate": True,
    }


def _check_settings(text: Section) -> None:
    """Refuses settings that change the function."""
    read_activation(text, ("hidden_act",), "silu")
    if text.text("hidden_act", "silu") not in ("silu", "swish"):
        raise text.refusal("hidden_act", "silu")
    if text.boolean("attention_bias", False):
        raise text.refusal("attention_bias", "false")
    if not text.boolean("attn_output_gate", True):
        raise text.refusal("attn_output_gate", "true")
    if text.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise text.refusal("output_gate_type", "swish, silu")
    if text.text("mamba_ssm_dtype", "float32") != "float32":
        raise text.refusal("mamba_ssm_dtype", "float32")
    if text.has("layer_scale") and text.values["layer_scale"] is not False:
        raise text.refusal("layer_scale", "no such key")


def _check_blocks(text: Section, shape: Shape) -> None:
    """Refuses matrices whose parts begin within a block of rows that has one scale."""

    def check(key: str, rows: int, what: str) -> None:
        if rows % FP8_BLOCK != 0:
            raise text.refusal(
                key,
                f"sizes with which {what} have a multiple of {FP8_BLOCK} rows ({rows} here) where "
                f"the matrix has a scale for each {FP8_BLOCK} x {FP8_BLOCK} block",
            )

    delta = shape.delta
    for layer_type, formats in zip(shape.layer_types, shape.formats, strict=True):
        inputs = formats.own.qkv
        if inputs is None or inputs.scales != "block":
            continue
        if layer_type == FULL:
            check("head_dim", shape.sizes.head_dim, "q and the gate of a head")
        elif shape.is_interleaved:
            check("linear_key_head_dim", delta.key_dim, "q and k of a key head")
            values = delta.values // delta.key_heads
            check("linear_value_head_dim", values, "v and z of a key head")
        else:
            check("linear_key_head_dim", delta.keys, "q and k")


def _read_tie(hf: HfConfig) -> bool:
    key = "tie_word_embeddings"
    ties = hf.text.boolean(key, False)
    if hf.top is hf.text or not hf.top.has(key):
        return ties
    outer = hf.top.boolean(key)
    if hf.text.has(key) and outer != ties:
        raise hf.text.error(key, f'{str(outer).lower()}, as "{key}" at the top says')
    return outer


def _read_sizes(text: Section, defaults: _Defaults) -> Sizes:
    heads = text.integer("num_attention_heads", 16)
    kv_heads = text.integer("num_key_value_heads", defaults.kv_heads)
    if heads % kv_heads != 0:
        raise text.error(
            "num_key_value_heads", f'a divisor of "{text.name("num_attention_heads")}" ({heads})'
        )
    head_dim = text.integer("head_dim", 256, high=MAX_HEAD_DIM)
    if head_dim % 2 != 0:
        raise text.error("head_dim", "an even integer")
    return Sizes(
        vocab=text.integer("vocab_size", defaults.vocab),
        hidden=text.integer("hidden_size", defaults.hidden),
        intermediate=text.integer("intermediate_size", defaults.intermediate)
        if defaults.intermediate
        else 0,
        layers=text.integer("num_hidden_layers", defaults.layers, high=MAX_LAYERS),
        qo_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=text.integer("max_position_embeddings", 32_768),
        eps=text.number("rms_norm_eps", 1e-6),
    )


def _read_layer_types(text: Section, num_layers: int) -> tuple[str, ...]:
    key = "layer_types"
    names = text.strings(key)
    if names is None:
        interval = text.integer("full_attention_interval", 4)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    for i, name in enumerate(names):
        if name not in _LAYER_TYPES:
            raise NotImplementedError(
                f'{text.source}: key "{text.name(key)}"[{i}] is {quote(name)}, which Paceline does '
                f"not support; supported: {', '.join(_LAYER_TYPES)}"
            )
    if len(names) != num_layers:
        raise ModelFileError(
            f'{text.source}: key "{text.name(key)}" has {len(names)} entries; expected '
            f'{num_layers}, as "{text.name("num_hidden_layers")}" says'
        )
    return tuple(names)


def _read_delta_net(text: Section) -> DeltaNet:
    key_heads = text.integer("linear_num_key_heads", 16)
    value_heads = text.integer("linear_num_value_heads", 32)
    if value_heads % key_heads != 0:
        raise text.error(
            "linear_num_value_heads",
            f'a multiple of "{text.name("linear_num_key_heads")}" ({key_heads})',
        )
    taps = text.integer("linear_conv_kernel_dim", 4)
    if taps < 2:
        raise text.refusal("linear_conv_kernel_dim", "2 or more taps")
    return DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim", 128, high=MAX_HEAD_DIM),
        value_dim=text.integer("linear_value_head_dim", 128, high=MAX_HEAD_DIM),
        taps=taps,
    )


def _read_rope(text: Section, head_dim: int) -> tuple[RopeSettings, int]:
    """The rotary embedding, and how many elements of a head it rotates."""
    rope, partial = read_partial_rope(text, 10_000.0, default_partial=0.25)
    key = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
    if rope.rope_type not in ("default", "yarn"):
        raise text.refusal(key, 'rope types "default", "yarn"')
    rotated = int(head_dim * partial)
    if rotated < 2 or rotated % 2 != 0:
        raise ModelFileError(
            f'{text.source}: key "partial_rotary_factor" is {partial}, which rotates {rotated} of '
            f'"{text.name("head_dim")}" ({head_dim}) elements; expected an even number from 2'
        )
    _check_mrope(text.section(key), rotated)
    return rope, rotated


def _check_mrope(parameters: Section | None, rotated: int) -> None:
    """Refuses sections of positions that are not those of the rotated elements.

    The three positions of a text token are equal, so that sections which fit change nothing.
    """
    key = "mrope_section"
    if parameters is None or not parameters.has(key):
        return
    sections = parameters.values[key]
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sections)
        or sum(sections) != rotated // 2
    ):
        raise parameters.error(
            key, f"3 integers whose sum is {rotated // 2}, the pairs of rotated elements"
        )


def _read_experts(text: Section, defaults: _Defaults) -> Experts:
    count = text.integer("num_experts", defaults.experts, high=MAX_EXPERTS)
    top_k = text.integer("num_experts_per_tok", defaults.top_k)
    check_top_k(text, "num_experts_per_tok", top_k, "num_experts", count)
    if not text.boolean("norm_topk_prob", True):
        raise text.refusal("norm_topk_prob", "true")
    return Experts(
        count=count,
        top_k=top_k,
        intermediate=text.integer("moe_intermediate_size", 512),
        shared=text.integer("shared_expert_intermediate_size", 512),
    )


def _read_dense_layers(text: Section, num_layers: int, *, is_next: bool) -> frozenset[int]:
    """The layers of a model with experts whose MLP is dense."""
    key, step_key = "mlp_only_layers", "decoder_sparse_step"
    listed: object = text.values[key] if text.has(key) else []
    if not isinstance(listed, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers for i in listed
    ):
        raise text.error(key, f"a list of layers from 0 to {num_layers - 1}")
    step = text.integer(step_key, 1)
    if not is_next and (listed or step != 1):
        raise text.refusal(key if listed else step_key, "experts in every layer")
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step != 0)
