# SPDX-License-Identifier: Apache-2.0
"""Reads the `config.json` and `generation_config.json` of a Hugging Face checkpoint.

Published checkpoints use two spellings of the same facts. Older ones write `rope_theta`,
`rope_scaling`, `rope_local_base_freq` and `sliding_window_pattern`; newer ones `rope_parameters`
(perhaps one object per layer type) and `layer_types`. Both are read here, so that the rest of the
loader sees one. (`torch_dtype` and `dtype` are not read: the tensors themselves say what they are.)
A key whose value is `null` counts as absent, as it does in transformers. What a file says twice, it
has to say the same way both times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from paceline._core import ModelFileError, ModelNotFoundError

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LAYER_TYPES: Final = (FULL, SLIDING)
ROPE_TYPES: Final = ("default", "linear", "llama3")
GEMMA4_ROPE_TYPES: Final = ("default", "proportional")

# A JSON file of settings is small; anything above this is not one.
MAX_CONFIG_BYTES: Final = 64 << 20
MAX_INT: Final = 2**31 - 1

_Scalar = TypeVar("_Scalar", bool, int, float, str)


class _Required:
    """The type of `REQUIRED`: this key has no default."""


REQUIRED: Final = _Required()


def read_json_object(path: Path, what: str) -> dict[str, object]:
    """Reads one JSON object.

    Args:
        path: The file.
        what: What the file is for, as it reads in a message, e.g. "the model's configuration".

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFileError: It cannot be read, is larger than 64 MiB, is no JSON, or no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelFileError(
                f"{path}: {size} bytes; {what} may have at most {MAX_CONFIG_BYTES} bytes"
            )
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(
            f"{path}: no such file; expected {what} in the model's folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot read {what}: {error}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{path}: holds {_describe(value)}; expected a JSON object with {what}"
        )
    return value


class Section:
    """One JSON object of a configuration file, read key by key with checks.

    Every message names the file, the key (with its path in the file), the value seen and the values
    allowed.
    """

    def __init__(self, values: Mapping[str, object], source: str, path: str = "") -> None:
        """Wraps an object.

        Args:
            values: The object.
            source: The file it came from, for messages.
            path: Where in the file it stands, e.g. "text_config"; empty for the whole file.
        """
        self.values = values
        self.source = source
        self.path = path

    def name(self, key: str) -> str:
        """The key with its path in the file, e.g. "text_config.hidden_size"."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def error(self, key: str, expected: str) -> ModelFileError:
        """The error for a key with a wrong value, or without one."""
        if not self.has(key):
            seen = "null" if key in self.values else "missing"
        else:
            seen = _describe(self.values[key])
        return ModelFileError(
            f'{self.source}: key "{self.name(key)}" is {seen}; expected {expected}'
        )

    def refusal(self, key: str, supported: str) -> NotImplementedError:
        """The error for a valid value that Paceline does not do."""
        seen = _describe(self.values.get(key))
        return NotImplementedError(
            f'{self.source}: key "{self.name(key)}" is {seen}, which Paceline does not support; '
            f"supported: {supported}"
        )

    def integer(
        self,
        key: str,
        default: int | _Required = REQUIRED,
        *,
        low: int = 1,
        high: int = MAX_INT,
    ) -> int:
        """An integer from `low` to `high`."""
        expected = f"an integer from {low} to {high}"
        value = self._scalar(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, expected)
        return value

    def number(
        self,
        key: str,
        default: float | _Required = REQUIRED,
        *,
        allow_zero: bool = False,
    ) -> float:
        """A finite number above 0 (or from 0)."""
        expected = "a finite number " + ("from 0" if allow_zero else "above 0")
        value = self._scalar(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, expected)
        try:
            result = float(value)
        except OverflowError:
            raise self.error(key, expected) from None
        if not math.isfinite(result) or result < 0 or (result == 0 and not allow_zero):
            raise self.error(key, expected)
        return result

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        """true or false."""
        value = self._scalar(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        """A string."""
        value = self._scalar(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, or None when the key is absent."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return list(value)

    def section(self, key: str) -> Section | None:
        """A nested object, or None when the key is absent."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object")
        return Section(value, self.source, self.name(key))

    def _scalar(self, key: str, default: object, expected: str) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self.error(key, expected)
        return default


@dataclass(frozen=True)
class RopeSettings:
    """One rotary embedding as the file describes it, in one spelling.

    Attributes:
        rope_type: "default", "linear", "llama3" or "proportional".
        theta: The base of the frequencies.
        factor: What frequencies are divided by; 1 for "default".
        low_freq_factor: "llama3" only, else 0.
        high_freq_factor: "llama3" only, else 0.
        original_max_position: "llama3" only, else 0.
        partial: "proportional" only: the part of the head that is rotated, else 1.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0
    partial: float = 1.0


@dataclass(frozen=True)
class HfConfig:
    """The configuration of a checkpoint.

    Attributes:
        source: The file, for messages.
        architecture: The class name under "architectures", or one implied by "model_type".
        top: The whole file.
        text: The part that describes the decoder: "text_config" where there is one, else `top`.
        eos_token_ids: Ids that end a text; those of generation_config.json win. Maybe empty.
        bos_token_id: The id that starts a text, if the file names one.
    """

    source: str
    architecture: str
    top: Section
    text: Section
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_hf_config(directory: Path, architectures: Mapping[str, str]) -> HfConfig:
    """Reads the configuration of the checkpoint in a folder.

    Args:
        directory: The folder, with `config.json` and maybe `generation_config.json`.
        architectures: Model type by supported architecture, see `parse_hf_config`.

    Raises:
        ModelNotFoundError: `config.json` is missing.
        ModelFileError: A file is no JSON object, or a key has a wrong type.
        NotImplementedError: The architecture is not supported.
    """
    path = directory / "config.json"
    values = read_json_object(path, "the model's configuration")
    generation: Section | None = None
    generation_path = directory / "generation_config.json"
    if generation_path.exists():
        generation = Section(
            read_json_object(generation_path, "the model's generation settings"),
            str(generation_path),
        )
    return parse_hf_config(values, str(path), architectures, generation)


def parse_hf_config(
    values: Mapping[str, object],
    source: str,
    architectures: Mapping[str, str],
    generation: Section | None = None,
) -> HfConfig:
    """Finds the architecture and the part of a configuration that describes the decoder.

    Args:
        values: The object in `config.json`.
        source: The file's name, for messages.
        architectures: The "model_type" by supported architecture; a file without "architectures" is
            accepted by its "model_type".
        generation: The object in `generation_config.json`, if there is one.

    Raises:
        ModelFileError: A key has a wrong type.
        NotImplementedError: The architecture is not supported; the message lists those that are.
    """
    top = Section(values, source)
    architecture = _architecture(top, architectures)
    text = top.section("text_config") or top
    return HfConfig(
        source=source,
        architecture=architecture,
        top=top,
        text=text,
        eos_token_ids=_eos_token_ids(top, text, generation),
        bos_token_id=_bos_token_id(top, text, generation),
    )


def _architecture(top: Section, architectures: Mapping[str, str]) -> str:
    supported = ", ".join(architectures)
    names = top.strings("architectures")
    if names:
        for name in names:
            if name in architectures:
                return name
        raise NotImplementedError(
            f'{top.source}: architecture {", ".join(map(repr, names))} (key "architectures") is '
            f"not supported; supported: {supported}"
        )
    if not top.has("model_type"):
        raise top.error("architectures", f"a list with one of {supported}")
    model_type = top.text("model_type")
    for name, known_type in architectures.items():
        if known_type == model_type:
            return name
    raise NotImplementedError(
        f'{top.source}: model type {model_type!r} (key "model_type") is not supported; '
        f"supported architectures: {supported}"
    )


def _token_ids(section: Section, key: str) -> tuple[int, ...]:
    value = section.values[key]
    items: Sequence[object] = value if isinstance(value, list) else [value]
    ids: list[int] = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INT:
            raise section.error(key, "a token id from 0, or a list of them")
        if item not in ids:
            ids.append(item)
    return tuple(ids)


def _eos_token_ids(top: Section, text: Section, generation: Section | None) -> tuple[int, ...]:
    for section in (generation, top, text):
        if section is not None and section.has("eos_token_id"):
            return _token_ids(section, "eos_token_id")
    return ()


def _bos_token_id(top: Section, text: Section, generation: Section | None) -> int | None:
    for section in (generation, top, text):
        if section is not None and section.has("bos_token_id"):
            return section.integer("bos_token_id", low=0)
    return None


def read_layer_types(text: Section, num_layers: int, default_pattern: int) -> tuple[str, ...]:
    """The kind of attention of each layer.

    Args:
        text: The decoder's part of the configuration.
        num_layers: How many layers there are.
        default_pattern: Without "layer_types" and "sliding_window_pattern", every so many-th layer
            attends to everything.

    Returns:
        `num_layers` names out of `LAYER_TYPES`.

    Raises:
        ModelFileError: The list has another length.
        NotImplementedError: It names another kind.
    """
    names = text.strings("layer_types")
    if names is None:
        # The older spelling, with an underscore in files of some versions.
        key = "sliding_window_pattern"
        if not text.has(key) and text.has("_sliding_window_pattern"):
            key = "_sliding_window_pattern"
        pattern = text.integer(key, default_pattern)
        return tuple(FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers))
    for i, name in enumerate(names):
        if name not in LAYER_TYPES:
            raise NotImplementedError(
                f'{text.source}: key "{text.name("layer_types")}"[{i}] is {name!r}, which Paceline '
                f"does not support; supported: {', '.join(LAYER_TYPES)}"
            )
    if len(names) != num_layers:
        raise ModelFileError(
            f'{text.source}: key "{text.name("layer_types")}" has {len(names)} entries; expected '
            f'{num_layers}, as "{text.name("num_hidden_layers")}" says'
        )
    return tuple(names)


def read_rope(text: Section, default_theta: float) -> RopeSettings:
    """The rotary embedding of a model whose layers share one.

    Args:
        text: The decoder's part of the configuration.
        default_theta: The base where the file names none.

    Raises:
        ModelFileError: A key has a wrong value, or two keys contradict each other.
        NotImplementedError: Another kind of scaling, or a rotation of part of the head.
    """
    parameters = text.section("rope_parameters")
    if parameters is not None and any(key in LAYER_TYPES for key in parameters.values):
        # One object per layer type, in a model with one type of layer.
        _check_nested(parameters)
        parameters = parameters.section(FULL) or Section({}, text.source, parameters.name(FULL))
    return _rope(text, parameters, text.section("rope_scaling"), "rope_theta", default_theta)


def read_rope_by_layer_type(
    text: Section, default_theta: Mapping[str, float]
) -> dict[str, RopeSettings]:
    """The rotary embeddings of a model where they depend on the layer type (Gemma 3).

    In the older spelling "rope_theta" and "rope_scaling" belong to the full layers and
    "rope_local_base_freq", never scaled, to the sliding ones.

    Args:
        text: The decoder's part of the configuration.
        default_theta: The base where the file names none, by layer type.

    Raises:
        ModelFileError: A key has a wrong value, or two keys contradict each other.
        NotImplementedError: Another kind of scaling, or a rotation of part of the head.
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
        defaults: By layer type, where the file says nothing.

    Raises:
        ModelFileError: A key has a wrong value.
        NotImplementedError: Another kind of scaling, or a spelling that Gemma 4 has not.
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


def _check_nested(parameters: Section) -> None:
    for key in parameters.values:
        if key not in LAYER_TYPES:
            raise ModelFileError(
                f'{parameters.source}: key "{parameters.name(key)}" stands where one object per '
                f"layer type is expected; allowed: {', '.join(LAYER_TYPES)}"
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
    low = section.number("low_freq_factor")
    high = section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f'a number above "low_freq_factor" ({low})')
    # transformers falls back on the model's own limit.
    original = section.integer(
        "original_max_position_embeddings",
        text.integer("max_position_embeddings")
        if text.has("max_position_embeddings")
        else REQUIRED,
    )
    return RopeSettings(rope_type, theta, factor, low, high, original)


def _check_whole_head(section: Section) -> None:
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.refusal("partial_rotary_factor", "1.0 (the whole head is rotated)")


def _describe(value: object) -> str:
    """A JSON value as it reads in a message: short, and in JSON's own words."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
