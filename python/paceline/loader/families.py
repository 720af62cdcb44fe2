# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face checkpoints as canonical decoder descriptions and tensor names.

Only this file, `gemma4.py`, `gpt_oss.py`, `deepseek.py`, `deepseek_v4.py`, `qwen3_moe.py` and
`qwen3_5.py` know the names of families of targets. Their result is the description and the tensor
names of `docs/model-format.md`, and no later code depends on the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from .decoder import (
    Sizes,
    check_common,
    describe,
    read_activation,
    read_sizes,
    round_to_float32,
    same_layers,
)
from .decoder_tensors import decoder_tensors
from .deepseek import deepseek_v3, glm4_moe_lite
from .deepseek_v4 import deepseek_v4
from .description import check_description
from .family import Family
from .gemma4 import GEMMA4_ARCHITECTURES, gemma4
from .gpt_oss import gpt_oss
from .hf_config import HfConfig, parse_hf_config
from .layer_types import FULL, SLIDING, check_full_layers, read_layer_types
from .quantization import (
    FOUR_BIT_METHODS,
    check_plain_lm_head,
    input_scales,
    read_quantization,
    with_formats,
)
from .qwen3_5 import (
    QWEN3_5_ARCHITECTURES,
    QWEN3_5_MOE_ARCHITECTURES,
    QWEN3_NEXT_ARCHITECTURES,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from .qwen3_moe import qwen3_moe
from .rope import read_rope, read_rope_by_layer_type
from .section import DEFAULTS

DTYPES: Final = ("auto", "float32", "bfloat16")

# Prefixes of the decoder's tensors: in a plain language model, in a published Gemma 3 with a vision
# tower, in the same after transformers 5 saved it again, and in a bare text model.
_PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.", "")
_VISION_PREFIXES: Final = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def check_dtype(dtype: object) -> None:
    """Checks a `dtype` argument.

    Raises:
        ValueError: It is none of "auto", "float32" and "bfloat16".
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        hint = " (float16 checkpoints load as float32, which is lossless)"
        raise ValueError(
            f"dtype is {dtype!r:.80}; allowed: {', '.join(map(repr, DTYPES))}"
            f"{hint if dtype == 'float16' else ''}"
        )


def translate(hf: HfConfig) -> Family:
    """Translates a configuration.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    family = _TRANSLATORS[hf.architecture](hf)
    check_description(family.config, (hf.text, hf.top))
    return family


def decoder_config(
    hf_config: Mapping[str, object], weight_dtype: str = "float32", source: str = "config.json"
) -> dict[str, Any]:
    """The canonical description, made from a configuration without any weights.

    Args:
        hf_config: The object in a `config.json`.
        weight_dtype: "float32" or "bfloat16".
        source: The name of the configuration in messages.

    Returns:
        The description of `docs/model-format.md`, ready for `json.dumps`.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    return translate(parse_hf_config(hf_config, source, ARCHITECTURES)).config_for(weight_dtype)


def _all_alike(
    name: str, hf: HfConfig, sizes: Sizes, *, has_qk_norm: bool = False, mlp_bias: bool = False
) -> Family:
    """A family whose layers are all full layers of the same shape."""
    text = hf.text
    ties = text.boolean("tie_word_embeddings", False)
    quantization = read_quantization(hf, FOUR_BIT_METHODS)
    check_plain_lm_head(quantization, ties_lm_head=ties)
    layers = with_formats(same_layers(sizes, (FULL,) * sizes.layers), quantization, _PREFIXES)
    config = describe(
        name,
        sizes,
        layers,
        window=0,
        ropes={FULL: read_rope(text, 10_000.0)},
        attention_scale=sizes.head_dim**-0.5,
        activation=read_activation(text, ("hidden_act",), "silu"),
        ties_lm_head=ties,
        has_qk_norm=has_qk_norm,
        attention_bias=text.boolean("attention_bias", False),
        mlp_bias=mlp_bias,
    )
    tensors = decoder_tensors(config, sizes, layers)
    return Family(
        name,
        hf.architecture,
        config,
        tensors,
        _PREFIXES,
        ignored_sources=input_scales(tensors),
    )


def _llama(hf: HfConfig) -> Family:
    check_common(hf, may_have_scales=True)
    sizes = read_sizes(hf.text.with_defaults(DEFAULTS["llama"]))
    return _all_alike("llama", hf, sizes, mlp_bias=hf.text.boolean("mlp_bias", False))


def _qwen3(hf: HfConfig) -> Family:
    check_common(hf, may_have_scales=True)
    sizes = read_sizes(hf.text.with_defaults(DEFAULTS["qwen3"]))
    check_full_layers(hf.architecture, hf.text, sizes.layers)
    return _all_alike("qwen3", hf, sizes, has_qk_norm=True)


def _gemma3(hf: HfConfig) -> Family:
    check_common(hf, may_have_scales=True)
    text = hf.text.with_defaults(DEFAULTS["gemma3"])
    sizes = read_sizes(text)
    layer_types = read_layer_types(text, sizes.layers, 6)
    window = text.integer("sliding_window") if SLIDING in layer_types else 0
    if text.number("attn_logit_softcapping", 0.0, allow_zero=True) != 0.0:
        # transformers has the key and ignores it for Gemma 3, so a value has no defined meaning.
        raise text.refusal("attn_logit_softcapping", "null")
    # A checkpoint with a vision tower has the key at the top, and transformers reads that one.
    ties = (hf.top if hf.top.has("tie_word_embeddings") else text).boolean(
        "tie_word_embeddings", True
    )
    quantization = read_quantization(hf, FOUR_BIT_METHODS)
    check_plain_lm_head(quantization, ties_lm_head=ties)
    layers = with_formats(same_layers(sizes, layer_types), quantization, _PREFIXES)
    config = describe(
        "gemma3",
        sizes,
        layers,
        window=window,
        ropes=read_rope_by_layer_type(text, {FULL: 1_000_000.0, SLIDING: 10_000.0}),
        attention_scale=text.number("query_pre_attn_scalar") ** -0.5,
        activation=read_activation(text, ("hidden_activation", "hidden_act"), "gelu_pytorch_tanh"),
        ties_lm_head=ties,
        has_qk_norm=True,
        attention_bias=text.boolean("attention_bias", False),
        has_post_norms=True,
        norm_weight_offset=1.0,
        embed_scale=round_to_float32(math.sqrt(sizes.hidden)),
        logit_soft_cap=text.number("final_logit_softcapping", 0.0, allow_zero=True),
    )
    tensors = decoder_tensors(config, sizes, layers)
    return Family(
        "gemma3",
        hf.architecture,
        config,
        tensors,
        _PREFIXES,
        ignored_prefixes=_VISION_PREFIXES,
        ignored_sources=input_scales(tensors),
        rounds_embed_scale=True,
    )


# What translates each family, and the "model_type" of its architectures.
_FAMILIES: Final[tuple[tuple[Callable[[HfConfig], Family], Mapping[str, str]], ...]] = (
    (_llama, {"LlamaForCausalLM": "llama"}),
    (_qwen3, {"Qwen3ForCausalLM": "qwen3"}),
    (
        _gemma3,
        {
            "Gemma3ForCausalLM": "gemma3_text",
            "Gemma3ForConditionalGeneration": "gemma3",
            "Gemma3TextModel": "gemma3_text",
        },
    ),
    (gemma4, GEMMA4_ARCHITECTURES),
    (gpt_oss, {"GptOssForCausalLM": "gpt_oss"}),
    (glm4_moe_lite, {"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}),
    (deepseek_v3, {"DeepseekV3ForCausalLM": "deepseek_v3"}),
    (deepseek_v4, {"DeepseekV4ForCausalLM": "deepseek_v4"}),
    (qwen3_moe, {"Qwen3MoeForCausalLM": "qwen3_moe"}),
    (qwen3_5, QWEN3_5_ARCHITECTURES),
    (qwen3_5_moe, QWEN3_5_MOE_ARCHITECTURES),
    (qwen3_next, QWEN3_NEXT_ARCHITECTURES),
)
_TRANSLATORS: Final = {name: translator for translator, names in _FAMILIES for name in names}
#: The "model_type" of each supported architecture.
ARCHITECTURES: Final = {name: kind for _, names in _FAMILIES for name, kind in names.items()}


def is_same_family(architecture: str, other: str) -> bool:
    """Returns whether two architectures are of one family.

    A text model and the same with a vision tower are; unknown architectures are compared by name.
    """
    family = _TRANSLATORS.get(architecture)
    return architecture == other or (family is not None and _TRANSLATORS.get(other) is family)
