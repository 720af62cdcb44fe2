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
    read_rope_of_gemma4,
)

DTYPES: Final = ("auto", "float32", "bfloat16")
MAX_LAYERS: Final = 1024
MAX_HEAD_DIM: Final = 4096
MAX_PER_LAYER_SIZE: Final = 16_384

_ACTIVATIONS: Final[dict[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Where the decoder's tensors stand. A plain language model, a published Gemma 3 with a vision
# tower, the same after transformers 5 saved it again, and a bare text model.
_PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.", "")
# Published Gemma 4 files are multimodal, and text-only ones are saved again from them.
_GEMMA4_PREFIXES: Final = ("model.language_model.", "model.", "language_model.model.", "")
_LM_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")
_VISION_PREFIXES: Final = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_GEMMA4_OTHER_PREFIXES: Final = tuple(
    f"model.{part}."
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
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
        name: "llama", "qwen3", "gemma3" or "gemma4".
        architecture: The class name in `config.json`.
        config: The canonical description, for float32 weights; see `config_for`.
        tensors: Every tensor the model needs.
        prefixes: What may stand before `TensorSpec.source`, the likeliest first.
        ignored_prefixes: Tensors of other parts of the checkpoint.
        ignored_sources: Tensors of the decoder that nobody reads, as `TensorSpec.source`.
        rounds_embed_scale: Whether factors on embeddings are rounded to the weight dtype.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...] = ()
    ignored_sources: frozenset[str] = frozenset()
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
            if "per_layer_inputs" in config:
                inputs = dict(config["per_layer_inputs"])
                inputs["embed_scale"] = _round_to_bfloat16(inputs["embed_scale"])
                config["per_layer_inputs"] = inputs
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
    elif rope.rope_type == "proportional":
        # The frequencies of the whole head; those beyond the rotated part stand still.
        inv_freq[int(rope.partial * head_dim // 2) :] = 0.0
        inv_freq = inv_freq / np.float32(rope.factor)
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


@dataclass(frozen=True)
class _Layer:
    """What may differ from layer to layer; the second half is Gemma 4's alone."""

    layer_type: str
    kv_heads: int
    head_dim: int
    intermediate: int
    k_eq_v: bool = False
    kv_source: int | None = None


def _same_layers(sizes: _Sizes, layer_types: tuple[str, ...]) -> tuple[_Layer, ...]:
    return tuple(
        _Layer(layer_type, sizes.kv_heads, sizes.head_dim, sizes.intermediate)
        for layer_type in layer_types
    )


@dataclass(frozen=True)
class _PerLayerInputs:
    """Gemma 4's per-layer embeddings."""

    size: int
    vocab: int


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


def _check_common(hf: HfConfig, *, may_be_bidirectional_in_images: bool = False) -> None:
    """Refuses what no family here does."""
    for section in (hf.top, hf.text):
        if section.has("quantization_config"):
            raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")
        for key in ("is_encoder_decoder", "add_cross_attention"):
            if section.boolean(key, False):
                raise section.refusal(key, "false")
        key = "use_bidirectional_attention"
        if may_be_bidirectional_in_images:
            if section.has(key) and section.values[key] not in ("vision", False):
                raise section.refusal(key, 'null, "vision" (which text does not notice)')
        elif section.boolean(key, False):
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
    layers: tuple[_Layer, ...],
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
    per_layer_inputs: _PerLayerInputs | None = None,
    norm_weight_offset: float = 0.0,
    embed_scale: float = 1.0,
    logit_soft_cap: float = 0.0,
) -> dict[str, Any]:
    """Writes the canonical description; `ropes` is by layer type."""
    # A rope belongs to a head size. Layers in the order of their first appearance.
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
        else:
            if has_v_norm:
                attention["has_v_norm"] = True
            if layer.k_eq_v:
                attention["k_eq_v"] = True
        mlp = {
            "intermediate": layer.intermediate,
            "activation": activation,
            "has_bias": mlp_bias,
        }
        described.append({"attention": attention, "mlp": mlp})
    optional: dict[str, Any] = {}
    if has_layer_scale:
        optional["has_layer_scale"] = True
    if per_layer_inputs is not None:
        optional["per_layer_inputs"] = {
            "size": per_layer_inputs.size,
            "vocab_size": per_layer_inputs.vocab,
            "embed_scale": _round_to_float32(math.sqrt(per_layer_inputs.size)),
            "proj_scale": _round_to_float32(sizes.hidden**-0.5),
            "scale": _round_to_float32(2.0**-0.5),
            "activation": activation,
        }
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
        **optional,
        "ropes": [
            {"inv_freq": inverse_frequencies(rope, head_dim), "scale": 1.0}
            for rope, head_dim in distinct
        ],
        "layers": described,
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


_PER_LAYER_GATE: Final = ("per_layer.gate.weight", "per_layer_input_gate.weight")
_PER_LAYER_PROJ: Final = ("per_layer.proj.weight", "per_layer_projection.weight")
_PER_LAYER_NORM: Final = ("per_layer.norm.weight", "post_per_layer_input_norm.weight")


def _tensors(
    sizes: _Sizes,
    layers: tuple[_Layer, ...],
    *,
    ties_lm_head: bool,
    norms: tuple[tuple[str, str], ...] = _PRE_NORMS,
    has_qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    has_layer_scale: bool = False,
    per_layer_inputs: _PerLayerInputs | None = None,
) -> tuple[TensorSpec, ...]:
    """Every tensor, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")

    def spec(name: str, source: str, *dims: tuple[int, str]) -> TensorSpec:
        return TensorSpec(
            name, source, tuple(size for size, _ in dims), ", ".join(key for _, key in dims)
        )

    specs = [spec("embed.weight", "embed_tokens.weight", vocab, hidden)]
    size = width = (0, "")
    if per_layer_inputs is not None:
        size = (per_layer_inputs.size, "hidden_size_per_layer_input")
        width = (
            len(layers) * per_layer_inputs.size,
            "num_hidden_layers * hidden_size_per_layer_input",
        )
        rows = (per_layer_inputs.vocab, "vocab_size_per_layer_input")
        specs += [
            spec("per_layer.embed.weight", "embed_tokens_per_layer.weight", rows, width),
            spec("per_layer.proj.weight", "per_layer_model_projection.weight", width, hidden),
            spec("per_layer.norm.weight", "per_layer_projection_norm.weight", size),
        ]
    for i, layer in enumerate(layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        # Names of keys for messages; where layers differ, the configuration has several.
        its = "" if layer.head_dim == sizes.head_dim else "the layer's "
        head_dim = (layer.head_dim, f"{its}head_dim")
        qo_rows = (sizes.qo_heads * layer.head_dim, f"num_attention_heads * {its}head_dim")
        kv_rows = (layer.kv_heads * layer.head_dim, f"{its}num_key_value_heads * {its}head_dim")
        wide = "" if layer.intermediate == sizes.intermediate else "2 * "
        intermediate = (layer.intermediate, f"{wide}intermediate_size")
        out_in = {
            "attn.q": (qo_rows, hidden),
            "attn.k": (kv_rows, hidden),
            "attn.v": (kv_rows, hidden),
            "attn.o": (hidden, qo_rows),
            "mlp.gate": (intermediate, hidden),
            "mlp.up": (intermediate, hidden),
            "mlp.down": (hidden, intermediate),
        }
        absent: set[str] = set()
        if layer.k_eq_v:
            absent = {"attn.v"}
        if layer.kv_source is not None:
            absent = {"attn.k", "attn.v", "attn.k_norm.weight"}
        specs += [spec(ours + name, theirs + source, hidden) for name, source in norms]
        if has_qk_norm:
            specs += [
                spec(ours + name, theirs + source, head_dim)
                for name, source in _QK_NORMS
                if name not in absent
            ]
        for name, source in _LINEARS:
            if name in absent:
                continue
            rows, columns = out_in[name]
            specs.append(spec(f"{ours}{name}.weight", f"{theirs}{source}.weight", rows, columns))
            if mlp_bias if name.startswith("mlp.") else attention_bias:
                specs.append(spec(f"{ours}{name}.bias", f"{theirs}{source}.bias", rows))
        if per_layer_inputs is not None:
            for (name, source), dims in (
                (_PER_LAYER_GATE, (size, hidden)),
                (_PER_LAYER_PROJ, (hidden, size)),
                (_PER_LAYER_NORM, (hidden,)),
            ):
                specs.append(spec(ours + name, theirs + source, *dims))
        if has_layer_scale:
            specs.append(spec(f"{ours}scale", f"{theirs}layer_scalar", (1, "1")))
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
    layers = _same_layers(sizes, (FULL,) * sizes.layers)
    config = _describe(
        "llama",
        sizes,
        layers,
        window=0,
        ropes={FULL: read_rope(text, 10_000.0)},
        attention_scale=sizes.head_dim**-0.5,
        activation=_activation(text, ("hidden_act",), "silu"),
        ties_lm_head=ties,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
    )
    tensors = _tensors(
        sizes, layers, ties_lm_head=ties, attention_bias=attention_bias, mlp_bias=mlp_bias
    )
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
    layers = _same_layers(sizes, (FULL,) * sizes.layers)
    config = _describe(
        "qwen3",
        sizes,
        layers,
        window=0,
        ropes={FULL: read_rope(text, 10_000.0)},
        attention_scale=sizes.head_dim**-0.5,
        activation=_activation(text, ("hidden_act",), "silu"),
        ties_lm_head=ties,
        has_qk_norm=True,
        attention_bias=attention_bias,
    )
    tensors = _tensors(
        sizes, layers, ties_lm_head=ties, has_qk_norm=True, attention_bias=attention_bias
    )
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
    layers = _same_layers(sizes, layer_types)
    config = _describe(
        "gemma3",
        sizes,
        layers,
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
        layers,
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


# What transformers assumes where a Gemma 4 file says nothing.
_GEMMA4_ROPES: Final = {
    FULL: RopeSettings("proportional", 1_000_000.0, partial=0.25),
    SLIDING: RopeSettings(theta=10_000.0),
}
_GEMMA4_GLOBAL_HEAD_DIM: Final = 512


def _gemma4(hf: HfConfig) -> Family:
    _check_common(hf, may_be_bidirectional_in_images=True)
    text = hf.text
    is_unified = "Unified" in hf.architecture
    if not is_unified and text.boolean("enable_moe_block", False):
        raise text.refusal(
            "enable_moe_block", "false (the dense sizes; mixtures of experts are not there yet)"
        )
    sizes = _read_sizes(
        text,
        vocab=262_144,
        heads=8,
        kv_heads=4,
        head_dim=256,
        max_position=262_144 if is_unified else 131_072,
        eps=1e-6,
    )
    layers = _gemma4_layers(text, sizes)
    has_sliding = any(layer.layer_type == SLIDING for layer in layers)
    window = text.integer("sliding_window", 1024 if is_unified else 512) if has_sliding else 0
    per_layer_inputs = None
    if not is_unified:
        size = text.integer("hidden_size_per_layer_input", 256, low=0, high=MAX_PER_LAYER_SIZE)
        if size > 0:
            vocab = text.integer("vocab_size_per_layer_input", 262_144)
            per_layer_inputs = _PerLayerInputs(size, vocab)
    ties = (hf.top if hf.top.has("tie_word_embeddings") else text).boolean(
        "tie_word_embeddings", True
    )
    attention_bias = text.boolean("attention_bias", False)
    config = _describe(
        "gemma4",
        sizes,
        layers,
        window=window,
        ropes=read_rope_of_gemma4(text, _GEMMA4_ROPES),
        attention_scale=1.0,
        activation=_activation(text, ("hidden_activation",), "gelu_pytorch_tanh"),
        ties_lm_head=ties,
        has_qk_norm=True,
        has_v_norm=True,
        attention_bias=attention_bias,
        has_post_norms=True,
        has_layer_scale=True,
        per_layer_inputs=per_layer_inputs,
        embed_scale=_round_to_float32(math.sqrt(sizes.hidden)),
        logit_soft_cap=text.number("final_logit_softcapping", 0.0, allow_zero=True),
    )
    tensors = _tensors(
        sizes,
        layers,
        ties_lm_head=ties,
        norms=_SANDWICH_NORMS,
        has_qk_norm=True,
        attention_bias=attention_bias,
        has_layer_scale=True,
        per_layer_inputs=per_layer_inputs,
    )
    # Published files hold the projections of layers that read another's cache; nobody uses them.
    unused = frozenset(
        f"layers.{i}.self_attn.{name}"
        for i, layer in enumerate(layers)
        if layer.kv_source is not None
        for name in (
            "k_proj.weight",
            "k_proj.bias",
            "v_proj.weight",
            "v_proj.bias",
            "k_norm.weight",
            "v_norm.weight",
        )
    )
    return Family(
        "gemma4",
        hf.architecture,
        config,
        tensors,
        _GEMMA4_PREFIXES,
        ignored_prefixes=_GEMMA4_OTHER_PREFIXES,
        ignored_sources=unused,
        rounds_embed_scale=True,
    )


def _gemma4_layers(text: Section, sizes: _Sizes) -> tuple[_Layer, ...]:
    """The layers, whose sizes depend on their type; the last ones read the KV of earlier ones."""
    layer_types = read_layer_types(text, sizes.layers, 6)
    if text.has("layer_types"):
        if layer_types[-1] != FULL:
            raise ModelFileError(
                f'{text.source}: key "{text.name("layer_types")}" ends with {layer_types[-1]!r}; '
                f"expected {FULL!r}, which the last layer of Gemma 4 always is"
            )
    else:
        layer_types = (*layer_types[:-1], FULL)
    k_eq_v = text.boolean("attention_k_eq_v", False)
    num_shared = text.integer("num_kv_shared_layers", 0, low=0)
    if num_shared >= sizes.layers:
        raise text.error(
            "num_kv_shared_layers",
            f'an integer from 0 to {sizes.layers - 1}, below "{text.name("num_hidden_layers")}" '
            "(a model whose layers all read another's KV is an assistant, not a target)",
        )
    first_shared = sizes.layers - num_shared
    last_owner = {layer_type: i for i, layer_type in enumerate(layer_types[:first_shared])}
    is_wide = text.boolean("use_double_wide_mlp", False)
    overrides = _gemma4_overrides(text, sizes, layer_types, k_eq_v=k_eq_v)
    layers: list[_Layer] = []
    for i, layer_type in enumerate(layer_types):
        is_shared = i >= first_shared
        if is_shared and layer_type not in last_owner:
            raise text.error(
                "num_kv_shared_layers",
                f"fewer, since layer {i} is the first {layer_type} layer and so has no layer to "
                "read KV from",
            )
        kv_heads, head_dim = overrides[i]
        source = last_owner[layer_type] if is_shared else None
        if source is not None and overrides[source] != overrides[i]:
            raise ModelFileError(
                f"{text.source}: layer {i} has {kv_heads} key and value heads of {head_dim}, but "
                f"reads the KV of layer {source} with {overrides[source][0]} of "
                f"{overrides[source][1]}; expected the same"
            )
        layers.append(
            _Layer(
                layer_type,
                kv_heads,
                head_dim,
                sizes.intermediate * (2 if is_wide and is_shared else 1),
                k_eq_v=k_eq_v and layer_type == FULL and not is_shared,
                kv_source=source,
            )
        )
    return tuple(layers)


def _gemma4_overrides(
    text: Section, sizes: _Sizes, layer_types: tuple[str, ...], *, k_eq_v: bool
) -> list[tuple[int, int]]:
    """Key and value heads and the head size of every layer, from either spelling.

    Published files have "global_head_dim" and "num_global_key_value_heads" for the full layers (the
    second counts only beside "attention_k_eq_v"), re-saved ones "per_layer_config".
    """
    by_layer = text.section("per_layer_config")
    seen: list[tuple[int, int]] | None = None
    if by_layer is not None:
        overrides = {_layer_index(by_layer, key, sizes.layers): key for key in by_layer.values}
        seen = []
        for i in range(sizes.layers):
            section = by_layer.section(overrides[i]) if i in overrides else None
            seen.append((sizes.kv_heads, sizes.head_dim))
            if section is None:
                continue
            for key in section.values:
                if key not in ("head_dim", "num_key_value_heads"):
                    raise section.refusal(key, "head_dim, num_key_value_heads")
            seen[i] = (
                section.integer("num_key_value_heads", sizes.kv_heads),
                section.integer("head_dim", sizes.head_dim, high=MAX_HEAD_DIM),
            )
    keys = ("global_head_dim", "num_global_key_value_heads")
    if seen is None or any(text.has(key) for key in keys):
        head_dim = text.integer(keys[0], _GEMMA4_GLOBAL_HEAD_DIM, high=MAX_HEAD_DIM)
        kv_heads = text.integer(keys[1], sizes.kv_heads) if k_eq_v else sizes.kv_heads
        spelled = [
            (kv_heads, head_dim) if layer_type == FULL else (sizes.kv_heads, sizes.head_dim)
            for layer_type in layer_types
        ]
        if seen is not None and seen != spelled:
            layer = next(i for i in range(sizes.layers) if seen[i] != spelled[i])
            raise ModelFileError(
                f'{text.source}: keys "per_layer_config" and "{keys[0]}", "{keys[1]}" disagree on '
                f"layer {layer}: {seen[layer]} and {spelled[layer]} (key and value heads, head "
                "size); expected the same, or one of the spellings"
            )
        seen = spelled
    for i, (kv_heads, head_dim) in enumerate(seen):
        if sizes.qo_heads % kv_heads != 0:
            raise ModelFileError(
                f"{text.source}: layer {i} has {kv_heads} key and value heads; expected a divisor "
                f'of "{text.name("num_attention_heads")}" ({sizes.qo_heads})'
            )
        if head_dim % 2 != 0:
            raise ModelFileError(
                f"{text.source}: layer {i} has a head size of {head_dim}; expected an even integer"
            )
    return seen


def _layer_index(by_layer: Section, key: str, num_layers: int) -> int:
    if not key.isdecimal() or not key.isascii() or int(key) >= num_layers:
        raise by_layer.error(key, f'no such key: "0" to "{num_layers - 1}" stand for layers')
    return int(key)


_FAMILIES: Final[dict[str, Callable[[HfConfig], Family]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma3TextModel": _gemma3,
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4TextModel": _gemma4,
    "Gemma4UnifiedForCausalLM": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4,
}

# Supported architectures and the "model_type" each goes with.
ARCHITECTURES: Final[dict[str, str]] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextModel": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4TextModel": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}


def _round_to_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _round_to_bfloat16(value: float) -> float:
    """To nearest, ties to even; for finite values."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
