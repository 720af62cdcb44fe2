# SPDX-License-Identifier: Apache-2.0
"""The GPT-OSS family: a mixture of experts in every layer, sinks, alternating windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from .decoder import (
    Layer,
    check_common,
    check_top_k,
    describe,
    read_sizes,
    round_to_float32,
    same_fact,
    same_layers,
)
from .decoder_tensors import decoder_tensors, tensor_spec
from .family import Family, TensorSpec
from .formats import MXFP4_COLUMNS, MXFP4_DTYPE, NO_FORMATS, LayerFormats
from .hf_config import HfConfig
from .layer_types import FULL, SLIDING, read_layer_types
from .quantization import Quantization, read_quantization
from .rope import RopeSettings, read_rope
from .section import DEFAULTS, Section

# The default of transformers, which is that of the published files.
_ROPE: Final = RopeSettings(
    "yarn",
    150_000.0,
    32.0,
    original_max_position=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    scale=round_to_float32(1.3465735902799727),  # 0.1 ln(32) + 1
)
_PREFIXES: Final = ("model.", "")


def gpt_oss(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    check_common(hf, may_have_scales=True)
    text = hf.text.with_defaults(DEFAULTS["gpt_oss"])
    sizes = read_sizes(text)
    layer_types = read_layer_types(text, sizes.layers, 2)
    window = text.integer("sliding_window") if SLIDING in layer_types else 0
    text.only("hidden_act", "silu", "silu (with swiglu_alpha and swiglu_limit)")
    formats = NO_FORMATS
    quantization = read_quantization(hf, ("mxfp4",))
    if quantization is not None:
        _check_experts(text, quantization, sizes.layers)
        formats = LayerFormats(gate_up=quantization.format, down=quantization.format)
    layers = tuple(replace(layer, formats=formats) for layer in same_layers(sizes, layer_types))
    mixture = _read_mixture(text, formats)
    rope = read_rope(text, 150_000.0, _ROPE)
    config = describe(
        "gpt_oss",
        sizes,
        layers,
        window=window,
        ropes={FULL: rope, SLIDING: rope},
        attention_scale=sizes.head_dim**-0.5,
        activation="swiglu_oai",
        ties_lm_head=text.boolean("tie_word_embeddings", False),
        attention_bias=text.boolean("attention_bias", True),
        mlp_bias=True,
        has_sinks=True,
    )
    for entry in config["layers"]:
        entry["mlp"] |= mixture
    tensors = decoder_tensors(config, sizes, layers, partial(_mixture_tensors, sizes.hidden))
    return Family("gpt_oss", hf.architecture, config, tensors, _PREFIXES)


def _read_mixture(text: Section, formats: LayerFormats) -> dict[str, Any]:
    """The entries of the description that the MLP of every layer has."""
    experts = same_fact(text, "num_local_experts", "num_experts", 128)
    top_k = same_fact(text, "num_experts_per_tok", "experts_per_token", 4)
    check_top_k(text, "num_experts_per_tok", top_k, "num_local_experts", experts)
    return {
        "num_experts": experts,
        "top_k": top_k,
        "router": "softmax_of_chosen",
        "has_router_bias": True,
        # The factor in the sigmoid of the activation.
        "alpha": text.number("swiglu_alpha", 1.702),
        # The upper limit of gates, and of the magnitudes of ups.
        "limit": text.number("swiglu_limit", 7.0),
        "interleaved": True,
        **({"transposed": True} if formats.gate_up is None else {}),
    }


def _mixture_tensors(
    hidden_size: int, mlp: str, mixture: Mapping[str, Any], layer: Layer
) -> Iterator[TensorSpec]:
    """The router and the experts of a layer."""
    experts = (mixture["num_experts"], "num_local_experts")
    hidden = (hidden_size, "hidden_size")
    width = (layer.intermediate, "intermediate_size")
    wide = (2 * width[0], f"2 * {width[1]}")
    yield tensor_spec(f"{mlp}router.weight", f"{mlp}router.weight", experts, hidden)
    yield tensor_spec(f"{mlp}router.bias", f"{mlp}router.bias", experts)
    for name, rows, columns in (("gate_up", wide, hidden), ("down", hidden, width)):
        canonical, source = f"{mlp}experts.{name}", f"{mlp}experts.{name}_proj"
        if "transposed" in mixture:
            # x @ W, not x @ W^T.
            yield tensor_spec(f"{canonical}.weight", source, experts, columns, rows)
        else:
            size, keys = columns
            scales = (experts, rows, (size // MXFP4_COLUMNS, f"{keys} / {MXFP4_COLUMNS}"))
            block = (MXFP4_COLUMNS // 2, f"{MXFP4_COLUMNS // 2}")
            u8 = (MXFP4_DTYPE,)
            yield tensor_spec(f"{canonical}.weight", f"{source}_blocks", *scales, block, dtypes=u8)
            yield tensor_spec(f"{canonical}.scales", f"{source}_scales", *scales, dtypes=u8)
        yield tensor_spec(f"{canonical}.bias", f"{source}_bias", experts, rows)


def _check_experts(text: Section, quantization: Quantization, num_layers: int) -> None:
    """Refuses mxfp4 experts that the format does not fit, or that only some layers have."""
    for key in ("hidden_size", "intermediate_size"):
        if text.integer(key) % MXFP4_COLUMNS != 0:
            raise text.error(key, f"a multiple of {MXFP4_COLUMNS}, as mxfp4 needs it")
    for i in range(num_layers):
        if quantization.excludes(f"layers.{i}.mlp.experts", _PREFIXES):
            raise quantization.section.refusal(
                quantization.excluded_key, "a list without the experts of any layer"
            )
