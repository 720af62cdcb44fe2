# SPDX-License-Identifier: Apache-2.0
"""What families of decoders are made of: sizes, layers, the canonical description, tensor names.

A family (`families.py`, `gemma4.py`) or a drafter (`eagle.py`, `gemma4_assistant.py`) reads a
configuration and calls `describe` and `decoder_tensors` with what it found.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline._core import ModelFileError

from .hf_config import (
    MAX_INT,
    REQUIRED,
    SLIDING,
    HfConfig,
    RopeSettings,
    Section,
)

MAX_LAYERS: Final = 1024
MAX_HEAD_DIM: Final = 4096
MAX_PER_LAYER_SIZE: Final = 16_384

_ACTIVATIONS: Final[dict[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Where the lm_head of a target may stand.
LM_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")


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
        name: "llama", "qwen3", "gemma3" or "gemma4"; of a drafter, its kind.
        architecture: The class name in `config.json`.
        config: The canonical description, for float32 weights; see `config_for`.
        tensors: Every tensor the model needs.
        prefixes: What may stand before `TensorSpec.source`, the likeliest first.
        ignored_prefixes: Tensors of other parts of the checkpoint.
        ignored_sources: Tensors of the decoder that nobody reads, as `TensorSpec.source`.
        rounds_embed_scale: Whether factors on embeddings are rounded to the weight dtype.
        lm_head_names: Where the lm_head may stand.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...] = ()
    ignored_sources: frozenset[str] = frozenset()
    rounds_embed_scale: bool = False
    lm_head_names: tuple[str, ...] = LM_HEADS

    @property
    def tied_table(self) -> str | None:
        """Canonical name of the table that is embeddings and lm_head in one; None: they are two."""
        if self.config["ties_lm_head"]:
            return "embed.weight"
        # An assistant's table is its lm_head alone, under the name of embeddings.
        return None if self.lm_head_names == LM_HEADS else "lm_head.weight"

    def config_for(self, weight_dtype: str) -> dict[str, Any]:
        """The canonical description for weights of one dtype.

        Gemma multiplies embeddings by a factor that transformers first casts to the dtype of the
        table, so in bfloat16 it is a rounded one.

        Args:
            weight_dtype: "float32" or "bfloat16".
        """
        config = dict(self.config)
        if self.rounds_embed_scale and weight_dtype == "bfloat16":
            config["embed_scale"] = round_to_bfloat16(config["embed_scale"])
            if "per_layer_inputs" in config:
                inputs = dict(config["per_layer_inputs"])
                inputs["embed_scale"] = round_to_bfloat16(inputs["embed_scale"])
                config["per_layer_inputs"] = inputs
        return config


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
    """What may differ from layer to layer; the second half is Gemma 4's alone.

    Attributes:
        layer_type: One of `LAYER_TYPES`.
        kv_heads: Key and value heads.
        head_dim: Elements of a head.
        intermediate: Width of the MLP.
        k_eq_v: Values are the keys before norm and rotation.
        kv_source: The earlier layer whose KV it reads; None: its own.
        reads_target: In a drafter: it reads the KV of a layer of the target.
    """

    layer_type: str
    kv_heads: int
    head_dim: int
    intermediate: int
    k_eq_v: bool = False
    kv_source: int | None = None
    reads_target: bool = False

    @property
    def owns_kv(self) -> bool:
        """Whether it makes keys and values."""
        return self.kv_source is None and not self.reads_target


def same_layers(sizes: Sizes, layer_types: tuple[str, ...]) -> tuple[Layer, ...]:
    """Layers that differ in nothing but their type."""
    return tuple(
        Layer(layer_type, sizes.kv_heads, sizes.head_dim, sizes.intermediate)
        for layer_type in layer_types
    )


@dataclass(frozen=True)
class PerLayerInputs:
    """Gemma 4's per-layer embeddings."""

    size: int
    vocab: int


def read_sizes(
    text: Section,
    *,
    vocab: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_position: int | None = None,
    eps: float | None = None,
) -> Sizes:
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
    return Sizes(
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


def check_common(hf: HfConfig, *, may_be_bidirectional_in_images: bool = False) -> None:
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
    per_layer_inputs: PerLayerInputs | None = None,
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
        if layer.reads_target:
            attention["reads_target"] = True
        if layer.owns_kv and has_v_norm:
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
            "embed_scale": round_to_float32(math.sqrt(per_layer_inputs.size)),
            "proj_scale": round_to_float32(sizes.hidden**-0.5),
            "scale": round_to_float32(2.0**-0.5),
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
LINEARS: Final = (
    ("attn.q", "self_attn.q_proj"),
    ("attn.k", "self_attn.k_proj"),
    ("attn.v", "self_attn.v_proj"),
    ("attn.o", "self_attn.o_proj"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
)
QK_NORMS: Final = (
    ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    ("attn.k_norm.weight", "self_attn.k_norm.weight"),
)
PRE_NORMS: Final = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
)
SANDWICH_NORMS: Final = (
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_post_norm.weight", "post_attention_layernorm.weight"),
    ("mlp_norm.weight", "pre_feedforward_layernorm.weight"),
    ("mlp_post_norm.weight", "post_feedforward_layernorm.weight"),
)


_PER_LAYER_GATE: Final = ("per_layer.gate.weight", "per_layer_input_gate.weight")
_PER_LAYER_PROJ: Final = ("per_layer.proj.weight", "per_layer_projection.weight")
_PER_LAYER_NORM: Final = ("per_layer.norm.weight", "post_per_layer_input_norm.weight")


def decoder_tensors(
    sizes: Sizes,
    layers: tuple[Layer, ...],
    *,
    ties_lm_head: bool,
    norms: tuple[tuple[str, str], ...] = PRE_NORMS,
    has_qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    has_layer_scale: bool = False,
    per_layer_inputs: PerLayerInputs | None = None,
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
        if not layer.owns_kv:
            absent = {"attn.k", "attn.v", "attn.k_norm.weight"}
        specs += [spec(ours + name, theirs + source, hidden) for name, source in norms]
        if has_qk_norm:
            specs += [
                spec(ours + name, theirs + source, head_dim)
                for name, source in QK_NORMS
                if name not in absent
            ]
        for name, source in LINEARS:
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


def round_to_float32(value: float) -> float:
    """To nearest, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def round_to_bfloat16(value: float) -> float:
    """To nearest, ties to even; for finite values."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
