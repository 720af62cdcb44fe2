# SPDX-License-Identifier: Apache-2.0
"""The key "quantization_config" of configuration files: which matrices have scales of what form.

Products run on the values that a checkpoint stands for, so the settings of inputs, such as
"activation_scheme" and "input_activations", change nothing, and scales of inputs are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from paceline._core import ModelFileError

from .decoder import Layer
from .family import TensorSpec
from .formats import (
    FP8_BLOCK,
    FP8_DTYPE,
    MXFP4_COLUMNS,
    NVFP4_COLUMNS,
    LayerFormats,
    MatrixFormat,
)
from .fp4 import MODELOPT, MXFP4_PACKED, NVFP4_PACKED, fp4_input_scales
from .hf_config import HfConfig
from .int4 import AWQ, GPTQ, GPTQ_V2, GROUP_STEP, PACKED
from .messages import quote, show
from .section import Section

KEY: Final = "quantization_config"
DENSE_METHODS: Final = ("fp8", "compressed-tensors")
# With formats of four bits, which "compressed-tensors" has, too.
FOUR_BIT_METHODS: Final = (*DENSE_METHODS, "gptq", "awq", MODELOPT)

# Bounds on the time of matching: patterns come with the checkpoint, and matching tries every
# alternative before it fails.
_MAX_PATTERNS: Final = 8
_MAX_PATTERN_CHARS: Final = 200
_MAX_REPEATS: Final = 2
_MAX_GROUPS: Final = 2
_MAX_CHOICES: Final = 8

# Those of "compressed-tensors".
_FP8_FORMATS: Final = ("float-quantized", "naive-quantized")
_FP4_FORMATS: Final = (MXFP4_PACKED, NVFP4_PACKED)
# Those of modelopt with weights in nvfp4; the second leaves inputs as they are.
_NVFP4: Final = "NVFP4"
_NVFP4_WEIGHTS: Final = "W4A16_NVFP4"
# What stands before a regular expression, by the key that has it.
_MARKS: Final = {"ignore": "re:", "dynamic": "-:"}

# Linears that are joined in memory, by the name of their format.
_JOINED: Final = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Quantization:
    """The content of the key.

    Attributes:
        section: The key's object.
        format: The format of the matrices that have one.
        excluded_key: The key that lists modules without scales.
        names: Paths of such modules in the file; with `has_parts` also their first or last parts.
        has_parts: As transformers reads "modules_to_not_convert".
        wildcards: Such paths with "*" for a part.
        patterns: Regular expressions of paths.
        are_substrings: Names may be anywhere in a path, as AWQ reads "modules_to_not_convert".
        beginnings: Beginnings of such paths.
    """

    section: Section
    format: MatrixFormat
    excluded_key: str
    names: frozenset[str]
    has_parts: bool = False
    wildcards: tuple[tuple[str, ...], ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()
    are_substrings: bool = False
    beginnings: tuple[str, ...] = ()

    def excludes(self, module: str, prefixes: Sequence[str]) -> bool:
        """Returns whether a module has no scales.

        Args:
            module: Its path after the prefix, such as "layers.0.mlp.up_proj".
            prefixes: Prefixes that the path may have in the file.
        """
        return any(self._excludes(prefix + module) for prefix in prefixes)

    def joined(
        self, names: Sequence[str], layer: str, prefixes: Sequence[str]
    ) -> MatrixFormat | None:
        """The format of Linears of a layer that are one matrix in memory; None: no scales.

        Args:
            names: Their paths after that of the layer, such as "mlp.up_proj".
            layer: The path of the layer after the prefix, such as "layers.0.".
            prefixes: Prefixes that the path may have in the file.

        Raises:
            NotImplementedError: Some of them have scales and others have none.
        """
        excluded = [name for name in names if self.excludes(layer + name, prefixes)]
        if excluded and len(excluded) < len(names):
            number = layer.removesuffix(".").rpartition(".")[2]
            raise NotImplementedError(
                f'{self.section.source}: key "{self.section.name(self.excluded_key)}" leaves '
                f"out {', '.join(excluded)} of layer {number}; supported: all or none of "
                f"{', '.join(names)}"
            )
        return None if excluded else self.format

    def of_experts(
        self, names: Sequence[str], count: int, layer: str, prefixes: Sequence[str]
    ) -> MatrixFormat | None:
        """The format of Linears of all experts of a layer; None: no scales.

        Args:
            names: Those of an expert, such as "down_proj".
            count: How many experts there are.
            layer: As in `joined`.
            prefixes: As in `joined`.

        Raises:
            NotImplementedError: Some of them have scales and others have none.
        """
        excluded = [
            self.excludes(f"{layer}mlp.experts.{e}.{name}", prefixes)
            for e in range(count)
            for name in names
        ]
        if any(excluded) and not all(excluded):
            number = layer.removesuffix(".").rpartition(".")[2]
            raise self.section.refusal(
                self.excluded_key,
                f"a list with all or none of {', '.join(names)} of the experts of layer {number}",
            )
        return None if any(excluded) else self.format

    def _excludes(self, path: str) -> bool:
        if path in self.names or path.startswith(self.beginnings):
            return True
        if any(pattern.match(path) for pattern in self.patterns):
            return True
        if self.are_substrings:
            return any(name in path for name in self.names)
        if not self.has_parts:
            return False
        parts = path.split(".")
        ends = [end for n in range(1, len(parts)) for end in (parts[:n], parts[n:])]
        if any(".".join(end) in self.names for end in ends):
            return True
        return any(
            len(end) == len(wildcard)
            and all(ours in ("*", theirs) for ours, theirs in zip(wildcard, end, strict=True))
            for wildcard in self.wildcards
            for end in (*ends, parts)
        )


def read_quantization(hf: HfConfig, methods: Sequence[str]) -> Quantization | None:
    """Reads the key.

    Args:
        hf: The configuration.
        methods: The methods that the family has; "fp8", "compressed-tensors", "mxfp4", "gptq",
            "awq", "modelopt".

    Returns:
        What it says; None without the key.

    Raises:
        ModelFileError: A key has a wrong type, or two of them contradict each other.
        NotImplementedError: Another method, or a setting that is not supported.
    """
    section, inner = hf.top.section(KEY), hf.text.section(KEY)
    if section is not None and inner is not None and section.values != inner.values:
        raise hf.text.error(KEY, f'the same as "{section.path}", or one of the two keys')
    section = section or inner
    if section is None:
        return None
    method = section.text("quant_method")
    if method not in methods:
        raise section.refusal("quant_method", ", ".join(methods))
    if method == "fp8":
        return _read_fp8(section)
    if method == "mxfp4":
        return _with_paths(section, MatrixFormat("mxfp4"), "modules_to_not_convert")
    if method == "gptq":
        return _read_gptq(section)
    if method == "awq":
        return _read_awq(section)
    if method == MODELOPT:
        return _read_modelopt(section)
    formats = (*_FP8_FORMATS, *([PACKED, *_FP4_FORMATS] if "gptq" in methods else []))
    _check(section, "format", *formats)
    if section.text("format") == PACKED:
        return _read_packed(section)
    if section.text("format") in _FP4_FORMATS:
        return _read_fp4_packed(section, section.text("format"))
    return _read_compressed_tensors(section)


def _read_fp8(section: Section) -> Quantization:
    _check(section, "fmt", "e4m3", default="e4m3")
    _check(section, "activation_scheme", "dynamic", "static", default="dynamic")
    _check(section, "scale_fmt", "float", "ue8m0", default="float")
    _check(section, "modules_to_convert", None, [])
    # Without a value, some programs read one scale per matrix and others one per 128 x 128 block.
    _check(section, "weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    key = "modules_to_not_convert"
    if not section.has(key) and section.has("ignored_layers"):
        key = "ignored_layers"
    return _with_paths(section, MatrixFormat("fp8", "block", "weight_scale_inv"), key)


def _read_compressed_tensors(section: Section) -> Quantization:
    weights = _weights_of_group(section, _FP8_FORMATS)
    _check(weights, "num_bits", 8)
    _check(weights, "type", "float")
    _check(weights, "symmetric", True, default=True)
    _check(weights, "strategy", "tensor", "channel")
    scales = {"tensor": "tensor", "channel": "row"}[weights.text("strategy")]
    return _with_ignored(section, MatrixFormat("fp8", scales, "weight_scale"))


def _read_packed(section: Section) -> Quantization:
    weights = _weights_of_group(section, (PACKED,))
    _check(weights, "num_bits", 4)
    _check(weights, "type", "int")
    _check(weights, "strategy", "group", "channel")
    has_groups = weights.text("strategy") == "group"
    # With the first four, which concern the quantiser only, columns stay in the order of inputs.
    _check(weights, "actorder", None, False, "weight", "static", "group", "dynamic", True)
    has_order = weights.values.get("actorder") in ("group", "dynamic", True)
    return _with_ignored(
        section,
        MatrixFormat(
            "int4",
            layout=PACKED,
            group=_group_size(weights, "group_size") if has_groups else 0,
            has_zeros=not weights.boolean("symmetric", True),
            has_order=has_groups and has_order,
            key=_place(weights, "group_size" if has_groups else "strategy"),
        ),
    )


def _read_fp4_packed(section: Section, layout: str) -> Quantization:
    is_mxfp4 = layout == MXFP4_PACKED
    weights = _weights_of_group(section, (layout,))
    _check(weights, "num_bits", 4)
    _check(weights, "type", "float")
    _check(weights, "symmetric", True, default=True)
    _check(weights, "strategy", "group" if is_mxfp4 else "tensor_group")
    _check(weights, "group_size", MXFP4_COLUMNS if is_mxfp4 else NVFP4_COLUMNS)
    name = "mxfp4" if is_mxfp4 else "nvfp4"
    format = MatrixFormat(name, layout=layout, key=_place(section, "format"))
    return _with_ignored(section, format)


def _read_modelopt(section: Section) -> Quantization:
    _check(section, "quant_algo", _NVFP4, _NVFP4_WEIGHTS)
    _check(section, "kv_cache_scheme", None)
    _check(section, "kv_cache_quant_algo", None)
    # Beside the algorithm these say nothing new, but they may contradict it.
    _check(section, "group_size", NVFP4_COLUMNS, default=NVFP4_COLUMNS)
    if section.has("config_groups"):
        weights = _weights_of(_group_of(section))
        _check(weights, "num_bits", 4)
        _check(weights, "type", "float")
        _check(weights, "group_size", NVFP4_COLUMNS)
    key = "exclude_modules" if section.has("exclude_modules") else "ignore"
    names = section.strings(key) or []
    for name in names:
        if not re.fullmatch(r"[\w*.-]+", name):
            raise section.refusal(key, "paths of modules, in which * stands for any characters")
    ends = [name for name in names if name.find("*") == len(name) - 1]
    inner = [name for name in names if "*" in name and name not in ends]
    expressions = [".*".join(map(re.escape, name.split("*"))) + "$" for name in inner]
    return Quantization(
        section,
        MatrixFormat("nvfp4", layout=MODELOPT, key=_place(section, "quant_algo")),
        key,
        frozenset(names),
        patterns=_patterns(section, key, expressions),
        beginnings=tuple(name[:-1] for name in ends),
    )


def _weights_of_group(section: Section, formats: Sequence[str]) -> Section:
    """What "compressed-tensors" says of the weights of its only group of modules."""
    _check(section, "kv_cache_scheme", None)
    _check(section, "transform_config", None, {})
    sparsity = section.section("sparsity_config")
    if sparsity is not None:
        _check(sparsity, "format", "dense", default="dense")
    group = _group_of(section)
    _check(group, "targets", ["Linear"])
    _check(group, "format", *formats, default=formats[0])
    _check(group, "output_activations", None)
    return _weights_of(group)


def _weights_of(group: Section) -> Section:
    """What a group of modules says of weights."""
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "an object with num_bits and type")
    _check(weights, "dynamic", False, default=False)
    return weights


def _group_of(section: Section) -> Section:
    """The only group of modules of "compressed-tensors"."""
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise section.error("config_groups", "an object with one group of modules")
    if len(groups.values) > 1:
        raise section.refusal("config_groups", "one group of modules")
    (name,) = groups.values
    group = groups.section(name)
    if group is None:
        raise groups.error(name, "an object with targets and weights")
    return group


def _with_ignored(section: Section, format: MatrixFormat) -> Quantization:
    names = section.strings("ignore") or []
    return Quantization(
        section,
        format,
        "ignore",
        frozenset(name for name in names if not name.startswith("re:")),
        patterns=_patterns(
            section, "ignore", [name[3:] for name in names if name.startswith("re:")]
        ),
    )


def _read_gptq(section: Section) -> Quantization:
    _check(section, "bits", 4)
    layout = _gptq_layout(section)
    _check(section, "pack_dtype", "int32", default="int32")
    _check(section, "lm_head", False, default=False)
    _check(section, "modules_in_block_to_quantize", None)
    dynamic = section.section("dynamic")
    rules = [] if dynamic is None else list(dynamic.values)
    if not all(rule.startswith("-:") for rule in rules):
        raise section.refusal("dynamic", 'only keys that begin with "-:"')
    group = _group_size(section, "group_size", may_be_row=True)
    return Quantization(
        section,
        MatrixFormat(
            "int4",
            layout=layout,
            group=group,
            has_zeros=not section.boolean("sym", True),
            has_order=section.boolean("desc_act", False) and group > 0,
            key=_place(section, "group_size"),
        ),
        "dynamic",
        frozenset(),
        patterns=_patterns(section, "dynamic", [rule[2:] for rule in rules]),
    )


def _gptq_layout(section: Section) -> str:
    """The layout of zero points, which writers state under one of two keys, or under both."""
    keys = [key for key in ("checkpoint_format", "format") if section.has(key)]
    for key in keys:
        _check(section, key, GPTQ, GPTQ_V2, default=GPTQ)
    _check(section, "is_marlin_format", False, default=False)
    layouts = [section.text(key, GPTQ) for key in keys]
    if len(set(layouts)) > 1:
        raise section.error("format", f'{show(layouts[0])}, as "checkpoint_format" says')
    return layouts[0] if layouts else GPTQ


def _read_awq(section: Section) -> Quantization:
    bits = _one_of(section, "bits", "w_bit")
    size = _one_of(section, "group_size", "q_group_size")
    version = _one_of(section, "version", "format")
    _check(section, bits, 4)
    _check(section, version, "gemm", "GEMM", default="gemm")
    _check(section, "zero_point", True, default=True)
    _check(section, "dynamic", None, {})
    key = "modules_to_not_convert"
    format = MatrixFormat(
        "int4",
        layout=AWQ,
        group=_group_size(section, size, may_be_row=True),
        has_zeros=True,
        key=_place(section, size),
    )
    names = frozenset(section.strings(key) or [])
    return Quantization(section, format, key, names, are_substrings=True)


def _one_of(section: Section, key: str, other: str) -> str:
    """Which of two keys for the same fact a file has.

    Raises:
        ModelFileError: Both, with different values.
    """
    if not section.has(other):
        return key
    if not section.has(key):
        return other
    value = section.values[key]
    if section.values[other] != value:
        raise section.error(other, f'{show(value)}, as "{key}" says')
    return key


def _group_size(section: Section, key: str, *, may_be_row: bool = False) -> int:
    """The columns of a group; 0: those of a row, which the files call -1."""
    size = section.integer(key, low=-1)
    if size == -1 and may_be_row:
        return 0
    if size < 1 or size % GROUP_STEP != 0:
        row = ", or -1" if may_be_row else ""
        raise section.refusal(key, f"a multiple of {GROUP_STEP}{row}")
    return size


def _place(section: Section, key: str) -> str:
    """A key and its file, for messages."""
    return f'{section.source}: key "{section.name(key)}"'


def _check(section: Section, key: str, *allowed: object, default: object = None) -> None:
    """Refuses a value that is none of those allowed."""
    value = section.values.get(key)
    if value is None:
        value = default
    if not any(type(value) is type(other) and value == other for other in allowed):
        raise section.refusal(key, " or ".join(map(show, allowed)))


def _with_paths(section: Section, format: MatrixFormat, key: str) -> Quantization:
    names = section.strings(key) or []
    for name in names:
        if not re.fullmatch(r"[\w*.-]+", name):
            raise section.refusal(key, "paths of modules, whose parts are names or *")
    wildcards = [tuple(name.split(".")) for name in names if "*" in name]
    if len(wildcards) > _MAX_PATTERNS:
        raise section.refusal(key, f"at most {_MAX_PATTERNS} paths with *")
    return Quantization(
        section, format, key, frozenset(names), has_parts=True, wildcards=tuple(wildcards)
    )


def _is_fast(pattern: str) -> bool:
    """Returns whether a regular expression fails on 60 characters after at most 50,000 steps."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        return False
    # Without escaped characters, sets and the marks of plain groups.
    rest = re.sub(r"\[[^]]*\]", "_", re.sub(r"\\.", "_", pattern)).replace("(?:", "(")
    return (
        "(?" not in rest
        and re.search(r"\)[*+?{]", rest) is None
        and len(re.findall(r"[*+?{]", rest)) <= _MAX_REPEATS
        and rest.count("(") <= _MAX_GROUPS
        and rest.count("|") <= _MAX_CHOICES
    )


def _patterns(section: Section, key: str, patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Compiles regular expressions that a hostile file cannot make slow."""
    if len(patterns) > _MAX_PATTERNS:
        raise section.refusal(key, f"at most {_MAX_PATTERNS} regular expressions")
    compiled: list[re.Pattern[str]] = []
    for pattern in patterns:
        if not _is_fast(pattern):
            raise NotImplementedError(
                f'{section.source}: key "{section.name(key)}" has the regular expression '
                f"{quote(pattern)}, which Paceline does not support; supported: up to "
                f"{_MAX_PATTERN_CHARS} characters with at most {_MAX_REPEATS} repetitions (*, +, "
                f"?, {{}}) but no repeated group, {_MAX_GROUPS} groups and {_MAX_CHOICES} |"
            )
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError) as error:
            raise ModelFileError(
                f'{section.source}: key "{section.name(key)}" has {quote(pattern)} after '
                f'"{_MARKS[key]}"; expected a regular expression ({error!s:.80})'
            ) from None
    return tuple(compiled)


def with_formats(
    layers: Sequence[Layer],
    quantization: Quantization | None,
    prefixes: Sequence[str],
    *,
    is_sparse: Sequence[bool] = (),
) -> tuple[Layer, ...]:
    """Layers of decoders with the formats of their Linears.

    Args:
        layers: The layers.
        quantization: What the file says.
        prefixes: Prefixes that paths of modules may have in the file.
        is_sparse: Whether each layer has a mixture, whose formats are not set, in place of a dense
            MLP; empty: none has.

    Raises:
        NotImplementedError: Linears that are joined in memory do not have the same format.
    """
    if quantization is None:
        return tuple(layers)
    return tuple(
        replace(
            layer,
            formats=LayerFormats(
                **{
                    name: quantization.joined(modules, f"layers.{i}.", prefixes)
                    for name, modules in _JOINED.items()
                    if not (is_sparse and is_sparse[i] and modules[0].startswith("mlp."))
                }
            ),
        )
        for i, layer in enumerate(layers)
    )


def input_scales(tensors: Sequence[TensorSpec]) -> frozenset[str]:
    """The scales of inputs that checkpoints in fp8 and nvfp4 may have, which are not used."""
    return fp4_input_scales(tensors) | {
        spec.source.removesuffix("weight") + "input_scale"
        for spec in tensors
        if spec.dtypes == (FP8_DTYPE,) and spec.is_matrix
    }


def input_notes(hf: HfConfig) -> list[str]:
    """Says so where files of four bits are made for products with inputs of four bits.

    Args:
        hf: A configuration that was translated.
    """
    section = hf.top.section(KEY) or hf.text.section(KEY)
    if section is None:
        return []
    if section.values.get("format") in _FP4_FORMATS:
        has_inputs = _group_of(section).values.get("input_activations") is not None
    else:
        has_inputs = section.values.get("quant_algo") == _NVFP4
    if not has_inputs:
        return []
    return [
        f"{section.source} is made for inputs of four bits; Paceline reads the weights only, and "
        "inputs are not quantised"
    ]


def check_plain_lm_head(quantization: Quantization | None, *, ties_lm_head: bool) -> None:
    """Refuses an lm_head with scales.

    "fp8" of transformers always leaves it out; "compressed-tensors" and "modelopt" name what they
    leave out.

    Raises:
        NotImplementedError: The lm_head is not left out.
    """
    if quantization is None or ties_lm_head:
        return
    key = quantization.excluded_key
    if key not in ("ignore", "exclude_modules"):
        return
    if not quantization.excludes("lm_head", ("", "language_model.")):
        raise quantization.section.refusal(
            key, 'a list with "lm_head", in a checkpoint whose lm_head has no scales'
        )
