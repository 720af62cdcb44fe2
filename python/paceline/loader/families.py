# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face checkpoints as canonical decoder descriptions and tensor names.

This is the only place that knows their names. What comes out is the description and the tensor
names of `docs/model-format.md`, and nothing downstream asks which family it came from.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline._core import ModelFileError

from .hf_config import (
    FULL,
    MAX_INT,
    REQUIRED,
    SLIDING,
    HfConfig,
    RopeSettings,
    Section,
    parse_hf_config,
    read_layer_types,
    read_rope,
    read_rope_by_layer_type,
)

DTYPES: Final = ("auto", "float32", "bfloat16")
MAX_LAYERS: Final = 1024
MAX_HEAD_DIM: Final = 4096

_ACTIVATIONS: Final[dict[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Where the decoder's tensors stand. A plain language model, a published Gemma 3 with a vision
# tower, the same after transformers 5 saved it again, and a bare text model.
_PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.", "")
_LM_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")
_VISION_PREFIXES: Final = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model needs.

    Attributes:
        name: The canonical name.
        source: The name in the checkpoint, after the prefix; the lm_head has no prefix.
        shape: The shape it must have.
        shape_keys: The same in words of `config.json`, for messages.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    shape_keys: str

    @property
    def is_matrix(self) -> bool:
        """Whether it is stored in the weight dtype; norms and biases are always float32."""
        return len(self.shape) == 2


@dataclass(frozen=True)
class Family:
    """A decoder of one family, translated.

    Attributes:
        name: "llama", "qwen3" or "gemma3".
        architecture: The class name in `config.json`.
        config: The canonical description, for float32 weights; see `config_for`.
        tensors: Every tensor the model needs.
        prefixes: What may stand before `TensorSpec.source`, the likeliest first.
        ignored_prefixes: Tensors of other parts of the checkpoint.
        rounds_embed_scale: Whether the factor on embeddings is rounded to the weight dtype.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...] = ()
    rounds_embed_scale: bool = False

    @property
    def lm_head_names(self) -> tuple[str, ...]:
        """Where the lm_head may stand."""
        return _LM_HEADS

    @property
    def ties_lm_head(self) -> bool:
        """Whether the embedding table is the lm_head."""
        return bool(self.config["ties_lm_head"])

    def config_for(self, weight_dtype: str) -> dict[str, Any]:
        """The canonical description for weights of one dtype.

        Gemma multiplies embeddings by a factor that transformers first casts to the dtype of the
        table, so in bfloat16 it is a rounded one.

        Args:
            weight_dtype: "float32" or "bfloat16".
        """
        config = dict(self.config)
        if self.rounds_embed_scale and weight_dtype == "bfloat16":
            config["embed_scale"] = _round_to_bfloat16(config["embed_scale"])
        return config


def check_dtype(dtype: object) -> None:
    """Checks a `dtype` argument.

    Raises:
        ValueError: It is none of "auto", "float32" and "bfloat16".
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        hint = " (float16 checkpoints load as float32, which is lossless)"
        raise ValueError(
            f"dtype is {dtype!r}; allowed: {', '.join(map(repr, DTYPES))}"
            f"{hint if dtype == 'float16' else ''}"
        )


def translate(hf: HfConfig) -> Family:
    """Translates a configuration.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: The model needs something that Paceline does not do.
    """
    return _FAMILIES[hf.architecture](hf)


def decoder_config(
    hf_config: Mapping[str, object], weight_dtype: str = "float32", source: str = "config.json"
) -> dict[str, Any]:
    """The canonical description for a configuration at hand, without any weights.

    Args:
        hf_config: The object in a `config.json`.
        weight_dtype: "float32" or "bfloat16".
        source: What messages call the configuration.

    Returns:
        The description of `docs/model-format.md`, ready for `json.dumps`.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: The model needs something that Paceline does not do.
    """
    return translate(parse_hf_config(hf_config, source, ARCHITECTURES)).config_for(weight_dtype)


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> list[float]:
    """The rotary frequencies as transformers computes them, in float32 throughout.

    The power is rounded once from float64. torch's own float32 power is off by one unit in the last
    place now and then (which ones depends on the machine); everything after it is the same float32
    arithmetic in the same order.

    Args:
        rope: The settings.
        head_dim: Elements of a head, even.

    Returns:
        `head_dim / 2` values, each exactly a float32.
    """
    import numpy as np

    exponents = np.arange(0, head_dim, 2, dtype=np.int64).astype(np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64))
    inv_freq = np.float32(1.0) / powers.astype(np.float32)
    if rope.rope_type == "linear":
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.rope_type == "llama3":
        # torch divides a number by a tensor as the number times the tensor's reciprocal.
        one = np.float32(1.0)
        original = rope.original_max_position
        low_wavelength = np.float32(original / rope.low_freq_factor)
        high_wavelength = np.float32(original / rope.high_freq_factor)
        factor = np.float32(rope.factor)
        span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
        wavelength = (one / inv_freq) * np.float32(2 * math.pi)
        rotations = (one / wavelength) * np.float32(original)
        smooth = (rotations - np.float32(rope.low_freq_factor)) / span
        scaled = np.where(wavelength > low_wavelength, inv_freq / factor, inv_freq)
        smoothed = (one - smooth) * scaled / factor + smooth * scaled
        is_between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
        inv_freq = np.where(is_between, smoothed, scaled)
    return [float(value) for value in inv_freq]


@dataclass(frozen=True)
class _Sizes:
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


def _read_sizes(
    text: Section,
    *,
    vocab: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_position: int | None = None,
    eps: float | None = None,
) -> _Sizes:
    """Reads the sizes. An argument is the default of a key that may be absent; None: required.

    Exceptions, as in transformers: absent kv heads are as many as query heads, and an absent head
    size is the hidden size over the heads.
    """

    def integer(key: str, default: int | None, high: int = MAX_INT) -> int:
        return text.integer(key, REQUIRED if default is None else default, high=high)

    hidden = text.integer("hidden_size")
    qo_heads = integer("num_attention_heads", heads)
    kv = text.integer("num_key_value_heads", kv_heads if kv_heads is not None else qo_heads)
    if qo_heads % kv != 0:
        raise text.error(
            "num_key_value_heads", f'a divisor of "{text.name("num_attention_heads")}" ({qo_heads})'
        )
    if head_dim is None and not text.has("head_dim"):
        if hidden % qo_heads != 0:
            raise text.error(
                "hidden_size",
                f'a multiple of "{text.name("num_attention_heads")}" ({qo_heads}) where '
                f'"{text.name("head_dim")}" is absent',
            )
        head_dim = hidden // qo_heads
    dim = integer("head_dim", head_dim, MAX_HEAD_DIM)
    if dim % 2 != 0:
        raise ModelFileError(
            f'{text.source}: key "{text.name("head_dim")}" is {dim}; expected an even integer'
        )
    return _Sizes(
        vocab=integer("vocab_size", vocab),
        hidden=hidden,
        intermediate=text.integer("intermediate_size"),
        layers=text.integer("num_hidden_layers", high=MAX_LAYERS),
        qo_heads=qo_heads,
        kv_heads=kv,
        head_dim=dim,
        max_position=integer("max_position_embeddings", max_position),
        eps=text.number("rms_norm_eps") if eps is None else text.number("rms_norm_eps", eps),
    )


def _check_common(hf: HfConfig) -> None:
    """Refuses what no family here does."""
    for section in (hf.top, hf.text):
        if section.has("quantization_config"):
            raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")
        for key in ("use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"):
            if section.boolean(key, False):
                raise section.refusal(key, "false")


def _activation(text: Section, keys: tuple[str, ...], default: str) -> str:
    key = next((key for key in keys if text.has(key)), keys[0])
    name = text.text(key, default)
    if name not in _ACTIVATIONS:
        raise text.refusal(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _describe(
    name: str,
    sizes: _Sizes,
    *,
    layer_types: tuple[str, ...],
    window: int,
    ropes: Mapping[str, RopeSettings],
    attention_scale: float,
    activation: str,
    ties_lm_head: bool,
    has_qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    has_post_norms: bool = False,
    norm_weight_offset: float = 0.0,
    embed_scale: float = 1.0,
    logit_soft_cap: float = 0.0,
) -> dict[str, Any]:
    """Writes the canonical description; `ropes` is by layer type."""
    distinct: list[RopeSettings] = []
    for layer_type in dict.fromkeys(layer_types):
        if ropes[layer_type] not in distinct:
            distinct.append(ropes[layer_type])
    layers = [
        {
            "attention": {
                "kind": "sliding" if layer_type == SLIDING else "full",
                "window": window if layer_type == SLIDING else 0,
                "num_qo_heads": sizes.qo_heads,
                "num_kv_heads": sizes.kv_heads,
                "head_dim": sizes.head_dim,
                "scale": attention_scale,
                "soft_cap": 0.0,
                "rope": distinct.index(ropes[layer_type]),
                "has_qk_norm": has_qk_norm,
                "has_qkv_bias": attention_bias,
                "has_o_bias": attention_bias,
            },
            "mlp": {
                "intermediate": sizes.intermediate,
                "activation": activation,
                "has_bias": mlp_bias,
            },
        }
        for layer_type in layer_types
    ]
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
        "ropes": [
            {"inv_freq": inverse_frequencies(rope, sizes.head_dim), "scale": 1.0}
            for rope in distinct
        ],
        "layers": layers,
    }


# Tensors of a layer: canonical name, name in the checkpoint.
_LINEARS: Final = (
    ("attn.q", "self_attn.q_proj"),
    ("attn.k", "self_attn.k_proj"),
    ("attn.v", "self_attn.v_proj"),
    ("attn.o", "self_attn.o_proj"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
)
_QK_NORMS: Final = (
    ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    ("attn.k_norm.weight", "self_attn.k_norm.weight"),
)
_PRE_NORMS: Final = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
)
_SANDWICH_NORMS: Final = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_post_norm.weight", "post_attention_layernorm.weight"),
    ("mlp_norm.weight", "pre_feedforward_layernorm.weight"),
    ("mlp_post_norm.weight", "post_feedforward_layernorm.weight"),
)


def _tensors(
    sizes: _Sizes,
    *,
    ties_lm_head: bool,
    norms: tuple[tuple[str, str], ...] = _PRE_NORMS,
    has_qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
) -> tuple[TensorSpec, ...]:
    """Every tensor, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")
    qo_rows = (sizes.qo_heads * sizes.head_dim, "num_attention_heads * head_dim")
    kv_rows = (sizes.kv_heads * sizes.head_dim, "num_key_value_heads * head_dim")
    intermediate = (sizes.intermediate, "intermediate_size")
    head_dim = (sizes.head_dim, "head_dim")
    out_in = {
        "attn.q": (qo_rows, hidden),
        "attn.k": (kv_rows, hidden),
        "attn.v": (kv_rows, hidden),
        "attn.o": (hidden, qo_rows),
        "mlp.gate": (intermediate, hidden),
        "mlp.up": (intermediate, hidden),
        "mlp.down": (hidden, intermediate),
    }

    def spec(name: str, source: str, *dims: tuple[int, str]) -> TensorSpec:
        return TensorSpec(
            name, source, tuple(size for size, _ in dims), ", ".join(key for _, key in dims)
        )

    specs = [spec("embed.weight", "embed_tokens.weight", vocab, hidden)]
    for i in range(sizes.layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        specs += [spec(ours + name, theirs + source, hidden) for name, source in norms]
        if has_qk_norm:
            specs += [spec(ours + name, theirs + source, head_dim) for name, source in _QK_NORMS]
        for name, source in _LINEARS:
            rows, columns = out_in[name]
            specs.append(spec(f"{ours}{name}.weight", f"{theirs}{source}.weight", rows, columns))
            if mlp_bias if name.startswith("mlp.") else attention_bias:
                specs.append(spec(f"{ours}{name}.bias", f"{theirs}{source}.bias", rows))
    specs.append(spec("final_norm.weight", "norm.weight", hidden))
    if not ties_lm_head:
        specs.append(spec("lm_head.weight", "lm_head.weight", vocab, hidden))
    return tuple(specs)


def _llama(hf: HfConfig) -> Family:
    _check_common(hf)
    text = hf.text
    sizes = _read_sizes(text, max_position=2048, eps=1e-6)
    ties = text.boolean("tie_word_embeddings", False)
    attention_bias = text.boolean("attention_bias", False)
    mlp_bias = text.boolean("mlp_bias", False)
    config = _describe(
        "llama",
        sizes,
        layer_types=(FULL,) * sizes.layers,
        window=0,
        ropes={FULL: read_rope(text, 10_000.0)},
        attention_scale=sizes.head_dim**-0.5,
        activation=_activation(text, ("hidden_act",), "silu"),
        ties_lm_head=ties,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
    )
    tensors = _tensors(sizes, ties_lm_head=ties, attention_bias=attention_bias, mlp_bias=mlp_bias)
    return Family("llama", hf.architecture, config, tensors, _PREFIXES)


def _qwen3(hf: HfConfig) -> Family:
    _check_common(hf)
    text = hf.text
    if text.boolean("use_sliding_window", False):
        raise text.refusal("use_sliding_window", "false")
    # The head size is never hidden / heads here: 128 where the file is silent.
    sizes = _read_sizes(text, head_dim=128, max_position=32_768, eps=1e-6)
    if text.has("layer_types"):
        for i, layer_type in enumerate(read_layer_types(text, sizes.layers, 1)):
            if layer_type != FULL:
                raise NotImplementedError(
                    f'{text.source}: key "{text.name("layer_types")}"[{i}] is {layer_type!r}, '
                    f"which Paceline does not support for {hf.architecture}; supported: {FULL}"
                )
    ties = text.boolean("tie_word_embeddings", False)
    attention_bias = text.boolean("attention_bias", False)
    config = _describe(
        "qwen3",
        sizes,
        layer_types=(FULL,) * sizes.layers,
        window=0,
        ropes={FULL: read_rope(text, 10_000.0)},
        attention_scale=sizes.head_dim**-0.5,
        activation=_activation(text, ("hidden_act",), "silu"),
        ties_lm_head=ties,
        has_qk_norm=True,
        attention_bias=attention_bias,
    )
    tensors = _tensors(sizes, ties_lm_head=ties, has_qk_norm=True, attention_bias=attention_bias)
    return Family("qwen3", hf.architecture, config, tensors, _PREFIXES)


def _gemma3(hf: HfConfig) -> Family:
    _check_common(hf)
    text = hf.text
    # Published files of the larger sizes leave out whatever equals the class's default.
    sizes = _read_sizes(
        text, vocab=262_208, heads=8, kv_heads=4, head_dim=256, max_position=131_072, eps=1e-6
    )
    layer_types = read_layer_types(text, sizes.layers, 6)
    window = text.integer("sliding_window", 4096) if SLIDING in layer_types else 0
    if text.number("attn_logit_softcapping", 0.0, allow_zero=True) != 0.0:
        # transformers has the key and overlooks it for Gemma 3: what a value means is open.
        raise text.refusal("attn_logit_softcapping", "null")
    # A checkpoint with a vision tower says it at the top, and that is what transformers obeys.
    ties = (hf.top if hf.top.has("tie_word_embeddings") else text).boolean(
        "tie_word_embeddings", True
    )
    attention_bias = text.boolean("attention_bias", False)
    config = _describe(
        "gemma3",
        sizes,
        layer_types=layer_types,
        window=window,
        ropes=read_rope_by_layer_type(text, {FULL: 1_000_000.0, SLIDING: 10_000.0}),
        attention_scale=text.number("query_pre_attn_scalar", 256.0) ** -0.5,
        activation=_activation(text, ("hidden_activation", "hidden_act"), "gelu_pytorch_tanh"),
        ties_lm_head=ties,
        has_qk_norm=True,
        attention_bias=attention_bias,
        has_post_norms=True,
        norm_weight_offset=1.0,
        embed_scale=_round_to_float32(math.sqrt(sizes.hidden)),
        logit_soft_cap=text.number("final_logit_softcapping", 0.0, allow_zero=True),
    )
    tensors = _tensors(
        sizes,
        ties_lm_head=ties,
        norms=_SANDWICH_NORMS,
        has_qk_norm=True,
        attention_bias=attention_bias,
    )
    return Family(
        "gemma3",
        hf.architecture,
        config,
        tensors,
        _PREFIXES,
        ignored_prefixes=_VISION_PREFIXES,
        rounds_embed_scale=True,
    )


_FAMILIES: Final[dict[str, Callable[[HfConfig], Family]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma3TextModel": _gemma3,
}

# Supported architectures and the "model_type" each goes with.
ARCHITECTURES: Final[dict[str, str]] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextModel": "gemma3_text",
}


def _round_to_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _round_to_bfloat16(value: float) -> float:
    """To nearest, ties to even; for finite values."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
