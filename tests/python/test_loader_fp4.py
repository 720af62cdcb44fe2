# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with Linears in floats of four bits: mxfp4 of compressed-tensors."""

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
from quantized_models import FP4_METHODS, from_fp4, quantization_config
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
ENTRY = {"mxfp4_packed": {"format": "mxfp4"}}


def spec_of(method: str, family: str = "qwen3", **changes: Any) -> TinySpec:
    sizes = SIZES | ({"expert_size": 128} if family == "qwen3_moe" else {})
    return TinySpec(family, quantization=method, **(sizes | changes))


# ---- values -------------------------------------------------------------------------------------


def published_mxfp4(packed: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> Any:
    """The rule of compressed-tensors, element by element, as float32.

    The low four bits of byte j are those of column 2 j. Bit 3 is the sign, and the others choose
    one of eight magnitudes. The scale of 32 columns is two to the power of its byte less 127.
    """
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            byte = int(packed[row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            magnitude = magnitudes[code & 7] * 2.0 ** (int(scales[row, column // 32]) - 127)
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
        edit_tensors(path, scramble(f"{UP}.{part}", seed))
    stored = load_tensors(path)
    packed, scales = (stored[f"{UP}.{part}"].numpy() for part in ("weight_packed", "weight_scale"))
    assert len(np.unique(packed)) == 256
    want = published_mxfp4(packed, scales)
    np.testing.assert_array_equal(from_fp4(stored, UP).numpy(), want)
    np.testing.assert_array_equal(memory_values(path, "layers.0.mlp.up"), want)


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
    assert not checkpoint.notes
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


# ---- faults -------------------------------------------------------------------------------------


def swap_nibbles(tensors: dict[str, Any]) -> None:
    packed = tensors[f"{UP}.weight_packed"]
    tensors[f"{UP}.weight_packed"] = ((packed & 15) << 4) | (packed >> 4)


def shift_scales(tensors: dict[str, Any]) -> None:
    """The scale of the next block."""
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].roll(-1, 1).contiguous()


@pytest.mark.parametrize("fault", [swap_nibbles, shift_scales])
def test_planted_faults_change_the_values(fault: Any, copy_of: Callable[..., Path]) -> None:
    """The comparison with the published rule sees what a loader could do wrong."""
    good, bad = make(spec_of("mxfp4_packed")), copy_of(spec_of("mxfp4_packed"))
    edit_tensors(bad, fault)
    want = memory_values(good, "layers.0.mlp.up")
    assert not np.array_equal(memory_values(bad, "layers.0.mlp.up"), want)
    plain = load_tensors(plain_copy(good))[f"{UP}.weight"]
    np.testing.assert_array_equal(plain.float().numpy(), want)


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
        'here.json: key "quantization_config.format" is ',
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
    inputs = {"dynamic": True, "num_bits": 4, "strategy": "group", "type": "float"}
    edit_config(path, quantization_config=changed(method, group__input_activations=inputs))
    (note,) = open_checkpoint(path).notes
    assert note.startswith(f"{path / 'config.json'} is made for inputs of four bits; ")
    assert note.endswith("inputs are not quantised")
    assert loader.load_checkpoint(path, progress=False).model.arena() == want


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
