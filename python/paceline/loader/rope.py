# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings: reading them from configuration files in both spellings, and frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from paceline._core import ModelFileError

from .layer_types import FULL, LAYER_TYPES, SLIDING
from .messages import shorten
from .section import REQUIRED, Section

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
GEMMA4_ROPE_TYPES: Final = ("default", "proportional")


@dataclass(frozen=True)
class RopeSettings:
    """One rotary embedding as the file describes it, in one spelling.

    Attributes:
        rope_type: "default", "linear", "llama3", "yarn" or "proportional".
        theta: The base of the frequencies.
        factor: The divisor of the frequencies; 1 for "default".
        low_freq_factor: "llama3" only, else 0.
        high_freq_factor: "llama3" only, else 0.
        original_max_position: "llama3" and "yarn" only, else 0.
        partial: "proportional" only: the part of the head that is rotated, else 1.
        beta_fast: "yarn" only: pairs that turn more often within the original positions keep their
            frequency; else 0.
        beta_slow: "yarn" only: pairs that turn less often have theirs divided; else 0.
        truncate: "yarn" only: the limits between such pairs are rounded to whole pairs.
        scale: "yarn" only: the factor on cosines and sines, a float32 value; else 1.
        mscale_all_dim: "yarn" only: what scales the scores of latent attention; see `score_factor`.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0
    partial: float = 1.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = False
    scale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def score_factor(self) -> float:
        """The factor on the scores of latent attention; other attention has none."""
        return _yarn_scale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> list[float]:
    """The rotary frequencies as transformers computes them, in float32 throughout.

    The power is rounded once from float64. torch's own float32 power is sometimes off by one unit
    in the last place, depending on the machine. Everything after it is the same float32 arithmetic
    in the same order.

    Args:
        rope: The settings.
        head_dim: The number of elements of a head, even.

    Returns:
        `head_dim / 2` values, each exactly a float32.
    """
    import numpy as np

    # Values that are not finite are refused with the description.
    with np.errstate(all="ignore"):
        return [float(value) for value in _inverse_frequencies(rope, head_dim)]


def _inverse_frequencies(rope: RopeSettings, head_dim: int) -> npt.NDArray[np.float32]:
    import numpy as np

    exponents = np.arange(0, head_dim, 2, dtype=np.int64).astype(np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64))
    inv_freq = np.float32(1.0) / powers.astype(np.float32)
    if rope.rope_type == "yarn":
        inv_freq = _yarn(rope, head_dim, powers.astype(np.float32))
    elif rope.rope_type == "linear":
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
        # The frequencies of the whole head; those beyond the rotated part are 0.
        inv_freq[int(rope.partial * head_dim // 2) :] = 0.0
        inv_freq = inv_freq / np.float32(rope.factor)
    return inv_freq


def _yarn(
    rope: RopeSettings, head_dim: int, powers: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Blends frequencies with divided ones; a ramp from `low` to `high` decides by pair."""
    import numpy as np

    def pair_that_turns(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    one = np.float32(1.0)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = one - np.clip(ramp, np.float32(0.0), one)
    divided = one / (np.float32(rope.factor) * powers)
    blend: npt.NDArray[np.float32] = divided * (one - kept) + (one / powers) * kept
    return blend


def read_rope(
    text: Section, default_theta: float, default: RopeSettings | None = None
) -> RopeSettings:
    """The rotary embedding of a model whose layers share one.

    Args:
        text: The decoder's part of the configuration.
        default_theta: The base that applies where the file names none.
        default: The settings that apply where the file describes none; their base is the one that
            the file names, else `default_theta`. None: no scaling.

    Raises:
        ModelFileError: A key has a wrong value, or two keys contradict each other.
        NotImplementedError: The kind of scaling is not supported, or only part of the head is
            rotated.
    """
    parameters = text.section("rope_parameters")
    if parameters is not None and any(key in LAYER_TYPES for key in parameters.values):
        # One object per layer type, in a model with one type of layer.
        _check_nested(parameters)
        parameters = parameters.section(FULL) or Section({}, text.source, parameters.name(FULL))
    scaling = text.section("rope_scaling")
    if default is not None and parameters is None and (scaling is None or not scaling.values):
        _check_whole_head(text)
        return replace(default, theta=text.number("rope_theta", default_theta))
    return _rope(text, parameters, scaling, "rope_theta", default_theta)


def read_partial_rope(
    text: Section, default_theta: float, *, default_partial: float
) -> tuple[RopeSettings, float]:
    """The rotary embedding of a model that rotates the first part of each head.

    Args:
        text: The decoder's part of the configuration.
        default_theta: The base that applies where the file names none.
        default_partial: The part of a head that is rotated where the file names none.

    Returns:
        The settings, and the part of a head that is rotated, above 0 and up to 1.

    Raises:
        ModelFileError: A key has a wrong value, or two keys contradict each other.
        NotImplementedError: The kind of scaling is not supported.
    """
    key = "partial_rotary_factor"
    spellings = ("rope_parameters", "rope_scaling")
    sections = [text, *filter(None, map(text.section, spellings))]
    stated = [section for section in sections if section.has(key)]
    for section in stated:
        partial = section.number(key)
        if partial > 1.0:
            raise section.error(key, "a number above 0 and up to 1")
        if partial != stated[0].number(key):
            raise section.error(
                key, f'{stated[0].number(key)}, as "{stated[0].name(key)}" says, or one of the keys'
            )
    # What is left describes the rotation of a head of that size.
    values = {name: value for name, value in text.values.items() if name != key}
    for name in spellings:
        inner = text.section(name)
        if inner is not None:
            values[name] = {k: v for k, v in inner.values.items() if k != key}
    rope = read_rope(Section(values, text.source, text.path), default_theta)
    return rope, stated[0].number(key) if stated else default_partial


def read_rope_by_layer_type(
    text: Section, default_theta: Mapping[str, float]
) -> dict[str, RopeSettings]:
    """The rotary embeddings of a model where they depend on the layer type (Gemma 3).

    In the older spelling "rope_theta" and "rope_scaling" belong to the full layers and
    "rope_local_base_freq", never scaled, to the sliding ones.

    Args:
        text: The decoder's part of the configuration.
        default_theta: The base that applies where the file names none, by layer type.

    Raises:
        ModelFileError: A key has a wrong value, or two keys contradict each other.
        NotImplementedError: The kind of scaling is not supported, or only part of the head is
            rotated.
    """
    parameters = text.section("rope_parameters")
    full: Section | None = None
    sliding: Section | None = None
    if parameters is not None:
        _check_nested(parameters)
        full = parameters.section(FULL)
        sliding = parameters.section(SLIDING)
    scaling = text.section("rope_scaling")
    return {
        FULL: _rope(text, full, scaling, "rope_theta", default_theta[FULL]),
        SLIDING: _rope(text, sliding, None, "rope_local_base_freq", default_theta[SLIDING]),
    }


def read_rope_of_gemma4(
    text: Section, defaults: Mapping[str, RopeSettings]
) -> dict[str, RopeSettings]:
    """The rotary embeddings of Gemma 4, which depend on the layer type and have one spelling.

    Args:
        text: The decoder's part of the configuration.
        defaults: The settings that apply where the file names none, by layer type.

    Raises:
        ModelFileError: A key has a wrong value.
        NotImplementedError: The kind of scaling is not supported, or a key belongs to an older
            spelling, which Gemma 4 files do not have.
    """
    for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
        if text.has(key):
            raise text.refusal(key, 'no such key in a Gemma 4 file, but "rope_parameters"')
    parameters = text.section("rope_parameters")
    if parameters is None:
        return dict(defaults)
    _check_nested(parameters)
    ropes: dict[str, RopeSettings] = {}
    for layer_type, default in defaults.items():
        section = parameters.section(layer_type)
        if section is None:
            ropes[layer_type] = default
            continue
        rope_type = section.text("rope_type", "default")
        if rope_type not in GEMMA4_ROPE_TYPES:
            raise section.refusal("rope_type", ", ".join(GEMMA4_ROPE_TYPES))
        theta = section.number("rope_theta", 10_000.0)
        if rope_type == "default":
            _check_whole_head(section)
            ropes[layer_type] = RopeSettings(theta=theta)
            continue
        partial = section.number("partial_rotary_factor", 1.0)
        if partial > 1.0:
            raise section.error("partial_rotary_factor", "a number above 0 and up to 1")
        factor = section.number("factor", 1.0)
        ropes[layer_type] = RopeSettings(rope_type, theta, factor, partial=partial)
    return ropes


def read_rope_of_deepseek_v4(text: Section) -> tuple[RopeSettings, RopeSettings]:
    """The rotary embeddings of DeepSeek-V4: of layers without a compressor, and of others.

    Scaling belongs to the second one. In the older spelling it is in "rope_scaling", in the newer
    one in "rope_parameters", perhaps with an object for each of the two, "main" and "compress".

    Args:
        text: The decoder's part of the configuration.

    Raises:
        ModelFileError: A key has a wrong value, or two keys contradict each other.
        NotImplementedError: The kind of scaling is not supported; YaRN is.
    """
    key, old_key = "rope_parameters", "rope_scaling"
    parameters, old = text.section(key), text.section(old_key)
    if parameters is not None and old is not None and parameters.values != old.values:
        raise text.error(old_key, f'the same as "{text.name(key)}", or one of the two keys')
    scaling = parameters or old or Section({}, text.source, text.name(key))
    main = Section({}, text.source, scaling.name("main"))
    if scaling.has("main") or scaling.has("compress"):
        main = scaling.section("main") or main
        scaling = scaling.section("compress") or Section({}, text.source, scaling.name("compress"))
        theta = scaling.number("rope_theta", text.number("compress_rope_theta", 160_000.0))
    else:
        # A "rope_theta" beside the scaling is that of the other layers.
        theta = text.number("compress_rope_theta", 160_000.0)
    if main.text("rope_type", "default") != "default":
        raise main.refusal("rope_type", "default")
    plain = RopeSettings(theta=main.number("rope_theta", text.number("rope_theta", 10_000.0)))
    type_key = "rope_type" if scaling.has("rope_type") else "type"
    rope_type = scaling.text(type_key, "default")
    if rope_type == "default":
        return plain, RopeSettings(theta=theta)
    if rope_type != "yarn":
        raise scaling.refusal(type_key, "default, yarn")
    original = scaling.integer("original_max_position_embeddings")
    settings = _yarn_section(text, scaling, theta, scaling.number("factor"), original)
    # Unlike that of other models, this YaRN scales nothing but frequencies.
    scale = scaling.number("attention_factor", 1.0)
    return plain, replace(settings, scale=_round_to_float32(scale), mscale_all_dim=0.0)


def _check_nested(parameters: Section) -> None:
    for key in parameters.values:
        if key not in LAYER_TYPES:
            raise ModelFileError(
                f'{parameters.source}: key "{shorten(parameters.name(key))}" is where one '
                f"object per layer type is expected; allowed: {', '.join(LAYER_TYPES)}"
            )


def _rope(
    text: Section,
    parameters: Section | None,
    scaling: Section | None,
    theta_key: str,
    default_theta: float,
) -> RopeSettings:
    """Reads one rotary embedding that may be described in either spelling, or in both."""
    theta = text.number(theta_key, default_theta)
    if parameters is None or not parameters.values:
        if scaling is None or not scaling.values:
            _check_whole_head(text)
            return RopeSettings(theta=theta)
        return _rope_section(text, scaling, theta)
    new = _rope_section(text, parameters, theta)
    if text.has(theta_key) and new.theta != theta:
        raise ModelFileError(
            f'{text.source}: key "{parameters.name("rope_theta")}" is {new.theta}, but '
            f'"{text.name(theta_key)}" is {theta}; expected the same value, or one of the two keys'
        )
    if scaling is not None and scaling.values:
        old = _rope_section(text, scaling, new.theta)
        if old != new:
            raise ModelFileError(
                f'{text.source}: key "{scaling.path}" says {old}, but "{parameters.path}" says '
                f"{new}; expected the same settings, or one of the two keys"
            )
    return new


def _rope_section(text: Section, section: Section, theta: float) -> RopeSettings:
    type_key = "rope_type" if section.has("rope_type") else "type"
    rope_type = section.text(type_key, "default")
    if rope_type not in ROPE_TYPES:
        raise section.refusal(type_key, ", ".join(ROPE_TYPES))
    _check_whole_head(text)
    _check_whole_head(section)
    theta = section.number("rope_theta", theta)
    if rope_type == "default":
        return RopeSettings(theta=theta)
    factor = section.number("factor")
    if rope_type == "linear":
        return RopeSettings(rope_type, theta, factor)
    # transformers uses the model's own limit by default.
    original = section.integer(
        "original_max_position_embeddings",
        text.integer("max_position_embeddings")
        if text.has("max_position_embeddings")
        else REQUIRED,
    )
    if rope_type == "yarn":
        return _yarn_section(text, section, theta, factor, original)
    low = section.number("low_freq_factor")
    high = section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f'a number above "low_freq_factor" ({low})')
    return RopeSettings(rope_type, theta, factor, low, high, original)


def _yarn_section(
    text: Section, section: Section, theta: float, factor: float, original: int
) -> RopeSettings:
    key = "original_max_position_embeddings"
    if text.has(key) and text.integer(key) != original:
        # transformers prefers the outer one.
        raise text.error(key, f'{original}, as "{section.name(key)}" says, or one of the two keys')
    if theta <= 1.0:
        raise ModelFileError(
            f'{section.source}: key "{section.path}" says "yarn", but the base of the frequencies '
            f'("rope_theta") is {theta}; expected a number above 1'
        )
    fast = section.number("beta_fast", 32.0)
    slow = section.number("beta_slow", 1.0)
    if fast < slow:
        raise section.error("beta_fast", f'a number from "beta_slow" ({slow})')
    truncate = section.boolean("truncate", True)
    if not truncate and section.path.endswith(LAYER_TYPES):
        raise section.refusal("truncate", "true (transformers ignores the key of one layer type)")
    mscale = section.number("mscale", 0.0, allow_zero=True)
    mscale_all = section.number("mscale_all_dim", 0.0, allow_zero=True)
    if section.has("attention_factor"):
        scale = section.number("attention_factor")
    elif mscale and mscale_all:
        scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    else:
        scale = _yarn_scale(factor)
    return RopeSettings(
        "yarn",
        theta,
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        scale=_round_to_float32(scale),
        mscale_all_dim=mscale_all,
    )


def _round_to_float32(value: float) -> float:
    """To nearest; infinite values are refused with the description."""
    import numpy as np

    with np.errstate(all="ignore"):
        return float(np.float32(value))


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _check_whole_head(section: Section) -> None:
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.refusal("partial_rotary_factor", "1.0 (the whole head is rotated)")
