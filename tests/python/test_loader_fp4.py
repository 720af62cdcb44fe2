# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with Linears in floats of four bits: compressed-tensors and modelopt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import raises
from hf_configs import QWEN3
from paceline import LLM, loader
from paceline._core import ModelFileError
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.section import Section
from paceline.loader.state_dict import StateDict
from quantized_models import (
    FP4_METHODS,
    NVFP4_METHODS,
    from_fp4,
    from_nvfp4,
    quantization_config,
)
from tiny_models import (
    TinySpec,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    plain_copy,
    read_json,
    replace_tensor,
)

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
UP = "model.layers.0.mlp.up_proj"
# A small matrix, for what goes element by element.
KEYS = "model.layers.0.self_attn.k_proj"
ENTRY = {name: {"format": "nvfp4" if name in NVFP4_METHODS else "mxfp4"} for name in FP4_METHODS}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def spec_of(method: str, family: str = "qwen3", **changes: Any) -> TinySpec:
    sizes = SIZES | ({"expert_size": 128} if family == "qwen3_moe" else {})
    return TinySpec(family, quantization=method, **(sizes | changes))


# ---- values -------------------------------------------------------------------------------------


def published_mxfp4(packed: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> Any:
    """The rule of compressed-tensors, element by element, as float32.

    The low four bits of byte j are those of column 2 j. Bit 3 is the sign, and the others choose
    one of eight magnitudes. The scale of 32 columns is two to the power of its byte less 127.
    """
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            byte = int(packed[row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            magnitude = MAGNITUDES[code & 7] * 2.0 ** (int(scales[row, column // 32]) - 127)
            values[row, column] = -magnitude if code & 8 else magnitude
    return values


def memory_values(path: Path, canonical: str) -> Any:
    """The values of a matrix in mxfp4 as the loader hands it over."""
    tensors = {t.spec.name: t for t in open_checkpoint(path).tensors}
    read = [
        np.frombuffer(b"".join(tensors[f"{canonical}.{part}"].chunks()), np.uint8).reshape(
            tensors[f"{canonical}.{part}"].spec.shape
        )
        for part in ("weight", "scales")
    ]
    return published_mxfp4(*read)


def scramble(name: str, seed: int) -> Callable[[dict[str, Any]], None]:
    """Random bytes in place of those of a tensor."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def edit(tensors: dict[str, Any]) -> None:
        low, high = (118, 128) if name.endswith("weight_scale") else (0, 256)
        shape = tensors[name].shape
        tensors[name] = torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    return edit


def test_values_are_those_of_the_published_rule(copy_of: Callable[..., Path]) -> None:
    """Of every byte; the tools of the tests follow the rule, too."""
    path = copy_of(spec_of("mxfp4_packed"))
    for part, seed in (("weight_packed", 1), ("weight_scale", 2)):
        edit_tensors(path, scramble(f"{KEYS}.{part}", seed))
    stored = load_tensors(path)
    packed, scales = (
        stored[f"{KEYS}.{part}"].numpy() for part in ("weight_packed", "weight_scale")
    )
    assert len(np.unique(packed)) == 256
    want = published_mxfp4(packed, scales)
    np.testing.assert_array_equal(from_fp4(stored, KEYS).numpy(), want)
    np.testing.assert_array_equal(memory_values(path, "layers.0.attn.k"), want)


@pytest.mark.parametrize("method", FP4_METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_descriptions(family: str, method: str) -> None:
    path = make(spec_of(method, family, dtype="bfloat16"))
    checkpoint = open_checkpoint(path)
    entry = ENTRY[method]
    for layer in checkpoint.config["layers"]:
        assert [layer["attention"][key] for key in ("qkv", "o")] == [entry, entry]
        assert [layer["mlp"][key] for key in ("gate_up", "down")] == [entry, entry]
    assert checkpoint.weight_dtype == "bfloat16"
    assert len(checkpoint.notes) == (1 if method == "modelopt" else 0)
    used = {name for tensor in checkpoint.tensors for name in tensor.sources}
    unused = set(load_tensors(path)) - used
    assert not unused


@pytest.mark.parametrize("method", FP4_METHODS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_every_way_gives_the_same_model(method: str, family: str, tmp_path: Path) -> None:
    """A folder, shards of it, tensors in memory, a converted folder, and an update."""
    spec = spec_of(method, family)
    path = make(spec)
    want = loader.load_checkpoint(path, progress=False).model.arena()
    shards = make(replace(spec, shards=3))
    assert loader.load_checkpoint(shards, progress=False).model.arena() == want
    config = Section(read_json(path / "config.json"), "config")
    memory = StateDict(config, load_tensors(path), "state_dict")
    assert loader.load_checkpoint(memory, progress=False).model.arena() == want
    out = convert(path, tmp_path / "out", progress=False)
    assert loader.load_checkpoint(out, progress=False).model.arena() == want
    other = make(replace(spec, seed=9))
    with LLM(
        other, device="cpu", max_num_seqs=2, kv_cache_bytes=8 << 20, show_progress=False
    ) as llm:
        assert llm.target.model.arena() != want
        llm.update_weights(load_tensors(path))
        assert llm.target.model.arena() == want
    dummy = loader.load_dummy(path)
    assert len(dummy.model.arena()) == len(want)


def rounded_to_bfloat16(value: float) -> float:
    """The nearest bfloat16 of a float32 number, ties to even, from its bits."""
    bits = int(np.float32(value).view(np.uint32))
    upper, rest = bits >> 16, bits & 0xFFFF
    upper += rest > 0x8000 or (rest == 0x8000 and upper & 1 == 1)
    return float(np.uint32(upper << 16).view(np.float32))


def published_nvfp4(stored: dict[str, Any], module: str) -> Any:
    """The rule of compressed-tensors and of modelopt, element by element, as float32.

    Elements are those of mxfp4. The e4m3 scale of 16 columns is divided by the global scale of
    compressed-tensors, or multiplied by that of modelopt, in float32. So is the element by the
    result, and then it is rounded to bfloat16.
    """
    is_modelopt = f"{module}.weight_scale_2" in stored
    packed = stored[f"{module}.{'weight' if is_modelopt else 'weight_packed'}"].numpy()
    scales = stored[f"{module}.weight_scale"].float().numpy()
    factor = np.float32(
        stored[f"{module}.{'weight_scale_2' if is_modelopt else 'weight_global_scale'}"].item()
    )
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            scale = np.float32(scales[row, column // 16])
            scale = scale * factor if is_modelopt else scale / factor
            byte = int(packed[row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            magnitude = rounded_to_bfloat16(np.float32(MAGNITUDES[code & 7]) * abs(scale))
            is_negative = (code & 8 != 0) != bool(np.signbit(scale))
            values[row, column] = -magnitude if is_negative else magnitude
    return values


def nvfp4_values(path: Path, canonical: str) -> Any:
    """The values of a matrix in nvfp4 as the loader hands it over."""
    tensors = {t.spec.name: t for t in open_checkpoint(path).tensors}
    packed, scales = (tensors[f"{canonical}.{part}"] for part in ("weight", "scales"))
    assert (packed.dtype, scales.dtype) == ("U8", "F32")
    bytes_ = np.frombuffer(b"".join(packed.chunks()), np.uint8).reshape(packed.spec.shape)
    floats = np.frombuffer(b"".join(scales.chunks()), np.float32).reshape(scales.spec.shape)
    import torch

    return from_nvfp4(torch.from_numpy(bytes_.copy()), torch.from_numpy(floats.copy())).numpy()


@pytest.mark.parametrize("method", NVFP4_METHODS)
def test_values_of_nvfp4_are_those_of_the_published_rule(
    method: str, copy_of: Callable[..., Path]
) -> None:
    """Of every byte of elements, and of every e4m3 number as a scale."""
    import torch

    path = copy_of(spec_of(method))
    name = f"{KEYS}.{'weight' if method == 'modelopt' else 'weight_packed'}"
    edit_tensors(path, scramble(name, 1))

    def every_scale(tensors: dict[str, Any]) -> None:
        scales = tensors[f"{KEYS}.weight_scale"]
        bits = (torch.arange(scales.numel()) % 254).to(torch.uint8)
        bits = torch.where(bits < 127, bits, bits + 1)  # without those of NaN
        tensors[f"{KEYS}.weight_scale"] = bits.view(torch.float8_e4m3fn).reshape(scales.shape)

    edit_tensors(path, every_scale)
    stored = load_tensors(path)
    assert len(np.unique(stored[name].numpy())) == 256
    want = published_nvfp4(stored, KEYS)
    np.testing.assert_array_equal(from_fp4(stored, KEYS).numpy(), want)
    np.testing.assert_array_equal(nvfp4_values(path, "layers.0.attn.k"), want)
    loader.load_checkpoint(path, progress=False)


@pytest.mark.parametrize("method", NVFP4_METHODS)
def test_parts_of_a_matrix_keep_their_own_factors(
    method: str, copy_of: Callable[..., Path]
) -> None:
    path = copy_of(spec_of(method))
    suffix = "weight_scale_2" if method == "modelopt" else "weight_global_scale"

    def spread(tensors: dict[str, Any]) -> None:
        for i, part in enumerate("qkv"):
            tensors[f"model.layers.0.self_attn.{part}_proj.{suffix}"] *= 7.0**i

    edit_tensors(path, spread)
    stored = load_tensors(path)
    for part in "qkv":
        want = published_nvfp4(stored, f"model.layers.0.self_attn.{part}_proj")
        np.testing.assert_array_equal(nvfp4_values(path, f"layers.0.attn.{part}"), want)


# ---- faults -------------------------------------------------------------------------------------


def swap_nibbles(tensors: dict[str, Any]) -> None:
    packed = tensors[f"{UP}.weight_packed"]
    tensors[f"{UP}.weight_packed"] = ((packed & 15) << 4) | (packed >> 4)


def shift_scales(tensors: dict[str, Any]) -> None:
    """The scale of the next block."""
    import torch

    scales = tensors[f"{UP}.weight_scale"]
    turned = scales.view(torch.uint8).roll(-1, 1)
    tensors[f"{UP}.weight_scale"] = turned.contiguous().view(scales.dtype)


def turn_factor(tensors: dict[str, Any]) -> None:
    """The divisor as a multiplier."""
    tensors[f"{UP}.weight_global_scale"] = 1 / tensors[f"{UP}.weight_global_scale"]


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("mxfp4_packed", swap_nibbles),
        ("mxfp4_packed", shift_scales),
        ("nvfp4_packed", swap_nibbles),
        ("nvfp4_packed", shift_scales),
        ("nvfp4_packed", turn_factor),
    ],
)
def test_planted_faults_change_the_values(
    method: str, fault: Any, copy_of: Callable[..., Path]
) -> None:
    """The comparison with the published rule sees what a loader could do wrong."""
    values = memory_values if method == "mxfp4_packed" else nvfp4_values
    good, bad = make(spec_of(method)), copy_of(spec_of(method))
    edit_tensors(bad, fault)
    want = values(good, "layers.0.mlp.up")
    assert not np.array_equal(values(bad, "layers.0.mlp.up"), want)
    plain = load_tensors(plain_copy(good))[f"{UP}.weight"]
    np.testing.assert_array_equal(plain.float().numpy(), want)


def test_a_divisor_is_not_turned_into_a_multiplier(copy_of: Callable[..., Path]) -> None:
    """The reciprocal is rounded, so that other scales result, which the test sees."""
    path = copy_of(spec_of("nvfp4_packed"))
    stored = load_tensors(path)
    scales = stored[f"{UP}.weight_scale"].float()
    divisor = stored[f"{UP}.weight_global_scale"]
    (tensor,) = [
        t for t in open_checkpoint(path).tensors if t.spec.name == "layers.0.mlp.up.scales"
    ]
    seen = np.asarray(tensor.converted())
    np.testing.assert_array_equal(seen, (scales / divisor).numpy())
    assert not np.array_equal(seen, (scales * (1 / divisor)).numpy())


# ---- settings -----------------------------------------------------------------------------------


def with_key(value: dict[str, Any]) -> dict[str, Any]:
    return QWEN3 | {"quantization_config": value}


def changed(method: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a method; keys of the group and of weights have prefixes."""
    config = copy.deepcopy(quantization_config(method))
    group = config["config_groups"]["group_0"]
    places = {"weights": group["weights"], "group": group}
    for key, value in changes.items():
        place, found, inner = key.partition("__")
        if found:
            places[place][inner] = value
        else:
            config[key] = value
    return config


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"weights__num_bits": 8}, ('weights.num_bits" is 8', "supported: 4")),
        ({"weights__type": "int"}, ('weights.type" is "int"', '"float"')),
        ({"weights__symmetric": False}, ('symmetric" is false', "true")),
        ({"weights__strategy": "channel"}, ('strategy" is "channel"', '"group"')),
        ({"weights__strategy": "tensor_group"}, ('strategy" is "tensor_group"', '"group"')),
        ({"weights__group_size": 16}, ('group_size" is 16', "supported: 32")),
        ({"weights__dynamic": True}, ('dynamic" is true', "false")),
        (
            {"group__format": "pack-quantized"},
            ('group_0.format" is "pack-', "mxfp4-pack-quantized"),
        ),
        ({"format": "mxfp8-quantized"}, ('format" is "mxfp8-quantized"', '"mxfp4-pack-quantized"')),
        ({"kv_cache_scheme": {"num_bits": 8}}, ("kv_cache_scheme", "null")),
        ({"ignore": []}, ('ignore" is []', 'a list with "lm_head"')),
        (
            {"ignore": ["lm_head", r"re:.*\.0\.mlp\.up_proj"]},
            ('ignore" leaves out mlp.up_proj of layer 0', "all or none of mlp.gate_proj, mlp.up"),
        ),
    ],
)
def test_refused_settings(changes: dict[str, Any], parts: Any) -> None:
    with raises(NotImplementedError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(changed("mxfp4_packed", **changes)), source="here.json")


@pytest.mark.parametrize("method", FP4_METHODS)
def test_columns_of_no_whole_blocks(method: str) -> None:
    config = with_key(quantization_config(method)) | {"intermediate_size": 112}
    with raises(
        ModelFileError,
        'here.json: key "quantization_config.',
        f" says {ENTRY[method]['format']}, but ",
        "layers.0.mlp.down_proj has 112 columns (intermediate_size); expected a multiple of 32",
        "leaves this module out",
    ):
        loader.decoder_config(config, source="here.json")


def test_modules_that_are_left_out() -> None:
    value = changed("mxfp4_packed", ignore=["lm_head", r"re:.*layers\.1\.mlp\.(gate|up)_proj"])
    layers = loader.decoder_config(with_key(value))["layers"]
    assert [layer["mlp"].get("gate_up") for layer in layers] == [{"format": "mxfp4"}, None]
    assert [layer["mlp"].get("down") for layer in layers] == [{"format": "mxfp4"}] * 2


@pytest.mark.parametrize("method", FP4_METHODS)
def test_files_for_inputs_of_four_bits_are_read_as_weights(
    method: str, copy_of: Callable[..., Path]
) -> None:
    path = copy_of(spec_of(method))
    want = loader.load_checkpoint(path, progress=False).model.arena()
    if method == "modelopt":
        edit_config(path, quantization_config=changed(method, quant_algo="W4A16_NVFP4"))
        assert not open_checkpoint(path).notes
    inputs = {"dynamic": True, "num_bits": 4, "strategy": "group", "type": "float"}
    edit_config(path, quantization_config=changed(method, group__input_activations=inputs))
    (note,) = open_checkpoint(path).notes
    assert note.startswith(f"{path / 'config.json'} is made for inputs of four bits; ")
    assert note.endswith("inputs are not quantised")
    assert loader.load_checkpoint(path, progress=False).model.arena() == want


@pytest.mark.parametrize("method", NVFP4_METHODS)
def test_scales_of_inputs_are_not_read(method: str, copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of(spec_of(method))
    want = loader.load_checkpoint(path, progress=False).model.arena()
    name = "input_scale" if method == "modelopt" else "input_global_scale"
    edit_tensors(path, lambda t: t.update({f"{UP}.{name}": torch.ones(1)}))
    assert loader.load_checkpoint(path, progress=False).model.arena() == want


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"weights__group_size": 32}, ('group_size" is 32', "supported: 16")),
        ({"weights__strategy": "group"}, ('strategy" is "group"', '"tensor_group"')),
        ({"group__format": "mxfp4-pack-quantized"}, ('format" is "mxfp4-', "nvfp4-pack")),
    ],
)
def test_refused_settings_of_nvfp4(changes: dict[str, Any], parts: Any) -> None:
    with raises(NotImplementedError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(changed("nvfp4_packed", **changes)), source="here.json")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"quant_algo": "FP8"}, ('quant_algo" is "FP8"', '"NVFP4" or "W4A16_NVFP4"')),
        ({"kv_cache_scheme": {"num_bits": 8}}, ("kv_cache_scheme", "null")),
        ({"kv_cache_quant_algo": "FP8"}, ('kv_cache_quant_algo" is "FP8"', "null")),
        ({"group_size": 32}, ('group_size" is 32', "supported: 16")),
        ({"weights__group_size": 32}, ('weights.group_size" is 32', "supported: 16")),
        ({"weights__num_bits": 8}, ('weights.num_bits" is 8', "supported: 4")),
        ({"weights__type": "int"}, ('weights.type" is "int"', '"float"')),
        ({"ignore": ["lm_head", "re:.*gate"]}, ("ignore", "paths of modules, in which *")),
        ({"ignore": ["lm_head", "a*b*c*d*e"]}, ("ignore", "regular expression", "2 repetitions")),
        ({"ignore": []}, ('ignore" is []', 'a list with "lm_head"')),
        ({"ignore": ["lm_head", "*0.mlp.up_proj"]}, ('ignore" leaves out mlp.up_proj of layer 0',)),
    ],
)
def test_refused_settings_of_modelopt(changes: dict[str, Any], parts: Any) -> None:
    with raises(NotImplementedError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(changed("modelopt", **changes)), source="here.json")


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"],
        ["lm_head*", "model.layers.1.mlp.gate*", "*1.mlp.up_proj"],
        ["*head", "*.1.mlp.*_proj"],
    ],
)
def test_modules_that_modelopt_leaves_out(ignore: list[str]) -> None:
    short = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ignore}
    for value in (changed("modelopt", ignore=ignore), short):
        layers = loader.decoder_config(with_key(value))["layers"]
        nvfp4 = {"format": "nvfp4"}
        assert [layer["mlp"].get("gate_up") for layer in layers] == [nvfp4, None]
        down = None if "*.1.mlp.*_proj" in ignore else nvfp4
        assert [layer["mlp"].get("down") for layer in layers] == [nvfp4, down]
        assert [layer["attention"].get("qkv") for layer in layers] == [nvfp4, nvfp4]


@pytest.mark.parametrize("method", NVFP4_METHODS)
@pytest.mark.parametrize("bad", ["inf", "nan", "0", "-2"])
def test_factors_that_are_no_numbers(method: str, bad: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of(method))
    name = f"{UP}.{'weight_scale_2' if method == 'modelopt' else 'weight_global_scale'}"
    edit_tensors(path, lambda t: t[name].fill_(float(bad)))
    with raises(
        ModelFileError,
        f"{path / 'model.safetensors'}: tensor '{name}' is {float(bad)}; expected a finite number "
        "above 0. The tensor is damaged: download or quantise it again",
    ):
        loader.load_checkpoint(path, progress=False)


@pytest.mark.parametrize("method", NVFP4_METHODS)
def test_scales_that_are_no_numbers(method: str, copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of(spec_of(method))
    edit_tensors(
        path, lambda t: t[f"{UP}.weight_scale"].view(torch.uint8).view(-1)[9:10].fill_(255)
    )
    with raises(
        ModelFileError,
        f"{path / 'model.safetensors'}: tensor '{UP}.weight_scale'[1, 1] is nan",
        "download",
    ):
        loader.load_checkpoint(path, progress=False)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            lambda t: t.pop(f"{UP}.weight_scale"),
            ("1 tensor is missing", f"'{UP}.weight_scale'"),
        ),
        (
            replace_tensor(f"{UP}.weight_packed", lambda t: t[:, :-1]),
            ("up_proj.weight_packed' has shape [256, 63]; expected [256, 64]", "hidden_size / 2"),
        ),
        (
            replace_tensor(f"{UP}.weight_scale", lambda t: t.repeat_interleave(2, 1)),
            ("up_proj.weight_scale' has shape [256, 8]; expected [256, 4]", "hidden_size / 32"),
        ),
        (
            replace_tensor(f"{UP}.weight_scale", lambda t: t.float()),
            ("up_proj.weight_scale' is stored as F32; expected U8",),
        ),
        (
            lambda t: t.update({f"{UP}.weight": t.pop(f"{UP}.weight_packed").float()}),
            ("1 tensor is missing", f"'{UP}.weight' is there, a matrix without scales"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of("mxfp4_packed"))
    edit_tensors(path, edit)
    with raises(ModelFileError, path / "model.safetensors", *parts):
        open_checkpoint(path)


def test_a_scale_that_is_no_number(copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of("mxfp4_packed"))
    edit_tensors(path, lambda t: t[f"{UP}.weight_scale"].view(-1)[5:6].fill_(255))
    with raises(
        ModelFileError,
        f"{path / 'model.safetensors'}: tensor '{UP}.weight_scale'[1, 1] is 255, which is NaN",
    ):
        loader.load_checkpoint(path, progress=False)
