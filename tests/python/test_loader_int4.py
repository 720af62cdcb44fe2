# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with int4 matrices: GPTQ, AWQ and compressed-tensors."""

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
from int4_models import INT4_METHODS, Int4Method, from_int4, int4_config, nibbles, pack, words
from paceline import LLM, loader
from paceline._core import ModelFileError
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.section import Section
from paceline.loader.state_dict import StateDict
from tiny_models import TinySpec, edit_section, edit_tensors, load_tensors, make, read_json

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
UP = "model.layers.0.mlp.up_proj"
GATE = "model.layers.0.mlp.gate_proj"


def spec_of(method: str, family: str = "qwen3", **changes: Any) -> TinySpec:
    return TinySpec(family, quantization=method, **(SIZES | changes))


# ---- the tools of these tests -------------------------------------------------------------------


def test_the_packers_of_the_tests_follow_the_published_words() -> None:
    """Words written out by hand: GPTQ and compressed-tensors from the low end, AWQ by its order."""
    import torch

    eight = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert int(words(eight, 1)) % 2**32 == 0x87654321
    assert int(words(eight, 1, (0, 4, 1, 5, 2, 6, 3, 7))) % 2**32 == 0x86427531
    assert nibbles(words(eight, 1), 1).tolist() == eight.tolist()
    # A zero of 0 borrows from the next one: 0x88885032 - 0x11111111.
    zeros = torch.tensor([[2], [3], [0], [5], [8], [8], [8], [8]])
    groups = torch.zeros(8, dtype=torch.long)
    codes = torch.zeros(8, 8, dtype=torch.long)
    scales = torch.ones(8, 1)
    stored = pack("m", codes, scales, zeros, groups, Int4Method("gptq", group=0))
    assert int(stored["m.qzeros"]) % 2**32 == 0x77773F21
    stored = pack("m", codes, scales, zeros, groups, Int4Method("gptq_v2", group=0))
    assert int(stored["m.qzeros"]) % 2**32 == 0x88885032


# ---- reading ------------------------------------------------------------------------------------


def model_values(path: Path, module: str, canonical: str) -> Any:
    """The values of a matrix as the loader hands it over, columns in the order of the inputs."""
    import torch

    checkpoint = open_checkpoint(path)
    arrays = {t.spec.name: t.converted() for t in checkpoint.tensors if t.spec.conversion}
    dtypes = {t.spec.name: t.dtype for t in checkpoint.tensors}
    packed = np.asarray(arrays[f"{canonical}.weight"])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).astype(np.int64)
    bits = np.array(arrays[f"{canonical}.scales"], order="C")
    scales = torch.from_numpy(bits.view(np.int16))
    is_half = dtypes[f"{canonical}.scales"] == "F16"
    scales = scales.view(torch.float16 if is_half else torch.bfloat16).float()
    zeros = arrays.get(f"{canonical}.zeros")
    zero = torch.from_numpy(np.asarray(zeros).astype(np.int64)) if zeros is not None else 8
    group = codes.shape[1] // scales.shape[1]
    differences = torch.from_numpy(codes).unflatten(1, (-1, group))
    differences = differences - (zero.unsqueeze(2) if zeros is not None else 8)  # type: ignore[union-attr]
    values = (differences.float() * scales.unsqueeze(2)).flatten(1).bfloat16().float()
    joined = canonical.replace("mlp.up", "mlp.gate_up")
    order = arrays.get(f"{joined}.order")
    if order is None:
        return values
    plain = torch.empty_like(values)
    plain[:, torch.from_numpy(np.asarray(order)).long()] = values
    return plain


@pytest.mark.parametrize("method", INT4_METHODS)
def test_values_are_those_of_the_format(method: str) -> None:
    import torch

    path = make(spec_of(method))
    config = read_json(path / "config.json")["quantization_config"]
    stored = load_tensors(path)
    for module, canonical in (
        (UP, "layers.0.mlp.up"),
        ("model.layers.1.mlp.down_proj", "layers.1.mlp.down"),
    ):
        assert torch.equal(model_values(path, module, canonical), from_int4(stored, module, config))


def test_zero_points_of_zero_borrow_from_the_next_one(copy_of: Callable[..., Path]) -> None:
    """Words of any bits: v1 adds one to the whole word, not to each of its eight parts."""
    import torch

    path = copy_of(spec_of("gptq"))
    name = f"{UP}.qzeros"

    def scramble(tensors: dict[str, Any]) -> None:
        bits = torch.randint(-(2**31), 2**31, tensors[name].shape, dtype=torch.int64)
        tensors[name] = bits.to(torch.int32)

    edit_tensors(path, scramble)
    config = read_json(path / "config.json")["quantization_config"]
    want = from_int4(load_tensors(path), UP, config)
    assert torch.equal(model_values(path, UP, "layers.0.mlp.up"), want)


@pytest.mark.parametrize("method", INT4_METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_descriptions(family: str, method: str) -> None:
    sizes = {"expert_size": 128} if family == "qwen3_moe" else {}
    path = make(spec_of(method, family, dtype="bfloat16", **sizes))
    checkpoint = open_checkpoint(path)
    how = INT4_METHODS[method]
    entry: dict[str, Any] = {"format": "int4", "group": how.group or "row"}
    if not how.is_symmetric:
        entry["has_zeros"] = True
    if how.has_order:
        entry["has_order"] = True
    for layer in checkpoint.config["layers"]:
        assert [layer["attention"][key] for key in ("qkv", "o")] == [entry, entry]
        assert [layer["mlp"][key] for key in ("gate_up", "down")] == [entry, entry]
    # Matrices with scales have no say in the dtype.
    assert checkpoint.weight_dtype == "bfloat16"
    used = {name for tensor in checkpoint.tensors for name in tensor.sources}
    unused = set(load_tensors(path)) - used
    assert not unused
    names = {tensor.spec.name for tensor in checkpoint.tensors}
    assert ("layers.0.attn.qkv.order" in names) == how.has_order


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("gptq", "qwen3"),
        ("gptq_order", "qwen3"),
        ("awq", "llama"),
        ("w4a16_asym", "gemma3"),
        ("gptq_sym_order", "qwen3_moe"),
    ],
)
def test_every_way_gives_the_same_model(method: str, family: str, tmp_path: Path) -> None:
    """A folder, shards of it, tensors in memory, and a converted folder."""
    spec = spec_of(method, family, **({"expert_size": 128} if family == "qwen3_moe" else {}))
    path = make(spec)
    want = loader.load_checkpoint(path, progress=False).model.arena()
    shards = make(replace(spec, shards=3))
    assert loader.load_checkpoint(shards, progress=False).model.arena() == want
    config = Section(read_json(path / "config.json"), "config")
    memory = StateDict(config, load_tensors(path), "state_dict")
    assert loader.load_checkpoint(memory, progress=False).model.arena() == want
    out = convert(path, tmp_path / "out", progress=False)
    assert loader.load_checkpoint(out, progress=False).model.arena() == want


def test_scales_in_bfloat16_and_matrices_in_float16(copy_of: Callable[..., Path]) -> None:
    """GPTQ files may have either; the other matrices are rounded to bfloat16 if asked."""
    import torch

    path = copy_of(spec_of("gptq", dtype="float16"))
    assert open_checkpoint(path).weight_dtype == "float32"
    notes = open_checkpoint(path, "bfloat16").notes
    assert any("rounded to bfloat16" in note for note in notes)
    loader.load_checkpoint(path, dtype="bfloat16", progress=False)

    def to_bfloat16(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(".scales"):
                tensors[name] = tensors[name].to(torch.bfloat16)

    edit_tensors(path, to_bfloat16)
    config = read_json(path / "config.json")["quantization_config"]
    assert torch.equal(
        model_values(path, UP, "layers.0.mlp.up"), from_int4(load_tensors(path), UP, config)
    )
    loader.load_checkpoint(path, progress=False)


def test_symmetric_gptq_files_may_store_8(copy_of: Callable[..., Path]) -> None:
    """Published v1 files exist that store 8 in place of 7, and mean 8 all the same."""
    path = copy_of(spec_of("gptq_sym"))
    want = loader.load_checkpoint(path, progress=False).model.arena()

    def store_8(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name].fill_(0x88888888 - 2**32)

    edit_tensors(path, store_8)
    assert loader.load_checkpoint(path, progress=False).model.arena() == want
    edit_tensors(path, lambda t: [t.pop(name) for name in list(t) if name.endswith(".qzeros")])
    assert loader.load_checkpoint(path, progress=False).model.arena() == want


@pytest.mark.parametrize("method", ["gptq_order", "awq", "w4a16_asym"])
def test_updates(method: str) -> None:
    """With scales in float16 and in bfloat16."""
    path = make(spec_of(method))
    other = make(spec_of(method, seed=9))
    want = loader.load_checkpoint(other, progress=False).model.arena()
    with LLM(
        path, device="cpu", max_num_seqs=2, kv_cache_bytes=8 << 20, show_progress=False
    ) as llm:
        llm.update_weights(load_tensors(other))
        assert llm.target.model.arena() == want


# ---- modules that are left out ------------------------------------------------------------------

INT4 = {"format": "int4", "group": 32, "has_zeros": True}


def with_key(value: dict[str, Any]) -> dict[str, Any]:
    return QWEN3 | {"quantization_config": value}


def packed(**changes: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors; keys of weights begin with "weights__"."""
    config = copy.deepcopy(int4_config("w4a16_asym"))
    for key, value in changes.items():
        inner = key.removeprefix("weights__")
        group = config["config_groups"]["group_0"]
        (group["weights"] if inner != key else config)[inner] = value
    return config


GPTQ, AWQ = int4_config("gptq"), int4_config("awq")


@pytest.mark.parametrize(
    "value",
    [
        GPTQ | {"dynamic": {r"-:.*layers\.1\.mlp\.(gate|up)_proj": {}}},
        AWQ | {"modules_to_not_convert": ["layers.1.mlp.gate_proj", "1.mlp.up_proj"]},
        packed(ignore=["lm_head", r"re:.*layers\.1\.mlp\.(gate|up)_proj"]),
    ],
)
def test_modules_that_are_left_out(value: dict[str, Any]) -> None:
    layers = loader.decoder_config(with_key(value))["layers"]
    assert [layer["mlp"].get("gate_up") for layer in layers] == [INT4, None]
    assert [layer["mlp"].get("down") for layer in layers] == [INT4, INT4]


def test_w_bit_and_q_group_size() -> None:
    old = {key: value for key, value in AWQ.items() if key not in ("bits", "group_size")}
    config = loader.decoder_config(with_key(old | {"w_bit": 4, "q_group_size": 32}))
    assert config == loader.decoder_config(with_key(AWQ))


def test_a_layout_under_either_of_two_keys() -> None:
    """GPTQModel writes `format` beside `checkpoint_format`."""
    rest = {key: value for key, value in GPTQ.items() if key != "checkpoint_format"}
    config = loader.decoder_config(with_key(GPTQ | {"checkpoint_format": "gptq_v2"}))
    assert loader.decoder_config(with_key(rest | {"format": "gptq_v2"})) == config


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (GPTQ | {"bits": 8}, ('.bits" is 8', "supported: 4")),
        (GPTQ | {"group_size": 16}, ('.group_size" is 16', "a multiple of 32, or -1")),
        (GPTQ | {"checkpoint_format": "marlin"}, ('format" is "marlin"', '"gptq" or "gptq_v2"')),
        (GPTQ | {"format": "marlin"}, ('format" is "marlin"', '"gptq" or "gptq_v2"')),
        (GPTQ | {"is_marlin_format": True}, ('is_marlin_format" is true', "supported: false")),
        (AWQ | {"dynamic": {"-:x": {}}}, ("dynamic", "supported: null")),
        (GPTQ | {"pack_dtype": "int16"}, ('pack_dtype" is "int16"', '"int32"')),
        (GPTQ | {"lm_head": True}, ('lm_head" is true', "supported: false")),
        (GPTQ | {"dynamic": {"+:a": {"bits": 8}}}, ("dynamic", 'that begin with "-:"')),
        (
            GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"]]},
            ('modules_in_block_to_quantize" is [["mlp', "null"),
        ),
        (
            GPTQ | {"dynamic": {r"-:.*\.0\.mlp\.up_proj": {}}},
            ('dynamic" leaves out mlp.up_proj of layer 0', "all or none of mlp.gate_proj, mlp.up"),
        ),
        (AWQ | {"bits": 3}, ('.bits" is 3', "supported: 4")),
        (AWQ | {"version": "gemv"}, ('version" is "gemv"', '"gemm"')),
        (AWQ | {"zero_point": False}, ('zero_point" is false', "true")),
        (
            AWQ | {"modules_to_not_convert": ["k_proj"]},
            ('modules_to_not_convert" leaves out self_attn.k_proj of layer 0', "all or none of"),
        ),
        (packed(weights__num_bits=8), ('weights.num_bits" is 8', "supported: 4")),
        (packed(weights__type="float"), ('weights.type" is "float"', '"int"')),
        (packed(weights__strategy="tensor"), ('strategy" is "tensor"', '"group" or "channel"')),
        (packed(weights__group_size=48), ('weights.group_size" is 48', "a multiple of 32")),
        (packed(weights__actorder="x"), ('actorder" is "x"', '"weight"')),
        (packed(ignore=[]), ('ignore" is []', 'a list with "lm_head"')),
        ({"quant_method": "auto-round"}, ('"auto-round"', "fp8, compressed-tensors, gptq, awq")),
    ],
)
def test_refused_settings(value: dict[str, Any], parts: Any) -> None:
    with raises(NotImplementedError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(value), source="here.json")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (GPTQ | {"format": "gptq_v2"}, ('format" is "gptq_v2"', 'expected "gptq", as')),
        (AWQ | {"w_bit": 8}, ('w_bit" is 8', 'expected 4, as "bits" says')),
        (AWQ | {"q_group_size": 64}, ('q_group_size" is 64', 'expected 32, as "group_size" says')),
        (AWQ | {"format": "gemv"}, ('format" is "gemv"', 'expected "gemm", as "version" says')),
    ],
)
def test_contradictions(value: dict[str, Any], parts: Any) -> None:
    with raises(ModelFileError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(value), source="here.json")


@pytest.mark.parametrize("value", [GPTQ, AWQ, packed()])
def test_a_group_that_does_not_divide(value: dict[str, Any]) -> None:
    value = copy.deepcopy(value)
    place = value
    if "config_groups" in value:
        place = value["config_groups"]["group_0"]["weights"]
    place["group_size"] = 96
    with raises(
        ModelFileError,
        'here.json: key "quantization_config',
        'group_size" is 96; expected a divisor of the 64 columns (hidden_size)',
        "leaves it out",
    ):
        loader.decoder_config(with_key(value), source="here.json")


def pop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def change(name: str, edit: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({name: edit(tensors[name]).contiguous()})


def set_item(name: str, index: int, value: int) -> Callable[[dict[str, Any]], None]:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name].view(-1)[index] = value

    return edit


def unpacked_zeros(tensors: dict[str, Any]) -> None:
    import torch

    tensors[f"{UP}.weight_zero_point"] = torch.zeros(256, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("method", "edit", "parts"),
    [
        ("gptq", pop(f"{UP}.qzeros"), ("1 tensor is missing", f"'{UP}.qzeros'")),
        ("awq", pop(f"{UP}.qzeros"), ("1 tensor is missing", f"'{UP}.qzeros'")),
        (
            "w4a16_asym",
            pop(f"{UP}.weight_zero_point"),
            ("1 tensor is missing", f"'{UP}.weight_zero_point'"),
        ),
        ("gptq_order", pop(f"{UP}.g_idx"), ("1 tensor is missing", f"'{UP}.g_idx'")),
        (
            "gptq",
            change(f"{UP}.qzeros", lambda t: t[:, :-1]),
            ("up_proj.qzeros' has shape [4, 31]; expected [4, 32]", "hidden_size / 32", "of"),
        ),
        (
            "awq",
            change(f"{UP}.qzeros", lambda t: t[:2]),
            ("up_proj.qzeros' has shape [2, 32]; expected [4, 32]",),
        ),
        (
            "w4a16_asym",
            unpacked_zeros,
            ("up_proj.weight_zero_point' is stored as I8; expected I32",),
        ),
        (
            "w4a16_asym",
            change(f"{UP}.weight_zero_point", lambda t: t.T),
            ("up_proj.weight_zero_point' has shape [4, 32]; expected [32, 4]",),
        ),
        (
            "awq",
            change(f"{UP}.qweight", lambda t: t.T),
            ("up_proj.qweight' has shape [32, 128]; expected [128, 32]",),
        ),
        (
            "gptq",
            change(f"{UP}.scales", lambda t: t.float()),
            ("up_proj.scales' is stored as F32; expected F16 or BF16",),
        ),
        (
            "gptq",
            change(f"{UP}.g_idx", lambda t: t[:64]),
            ("up_proj.g_idx' has shape [64]; expected [128] (hidden_size of",),
        ),
        (
            "w4a16",
            lambda t: t.update({f"{UP}.weight": t.pop(f"{UP}.weight_packed").float()}),
            (
                "1 tensor is missing",
                f"'{UP}.weight_packed'",
                f"'{UP}.weight' is there, a matrix without scales",
                '"quantization_config" have to leave out',
            ),
        ),
    ],
)
def test_refused_tensors(method: str, edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of(method))
    edit_tensors(path, edit)
    with raises(ModelFileError, path / "model.safetensors", *parts):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("method", "edit", "parts"),
    [
        (
            "gptq",
            set_item(f"{UP}.g_idx", 40, 3),
            ("puts column 40 into group 3", "config.group_size", "expected group 1"),
        ),
        (
            "gptq_order",
            set_item(f"{UP}.g_idx", 40, 4),
            ("names group 4; expected groups 0 to 3", "128 columns in groups of 32"),
        ),
        (
            "gptq_order",
            set_item(f"{UP}.g_idx", 40, -1),
            ("names group -1; expected groups 0 to 3",),
        ),
        (
            "gptq_order",
            lambda t: t[f"{UP}.g_idx"].fill_(0),
            ("puts 128 columns into group 0; expected 32 in each group",),
        ),
        (
            "gptq_sym",
            set_item(f"{UP}.qzeros", 5, 0x77777767),
            ("up_proj.qzeros' has the word 0x", "words 0x77777777", '"sym": false'),
        ),
        (
            "w4a16",
            set_item(f"{UP}.weight_shape", 0, 250),
            ("up_proj.weight_shape' is [250, 128]; expected [256, 128]",),
        ),
        (
            "gptq",
            lambda t: t[f"{UP}.scales"].view(-1)[300:301].fill_(float("inf")),
            ("up_proj.scales'[44, 1] is inf", "finite scales"),
        ),
    ],
)
def test_refused_values(method: str, edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of(method))
    edit_tensors(path, edit)
    with raises(
        ModelFileError, f"{path / 'model.safetensors'}: tensor 'model.layers.0.mlp.", *parts
    ):
        loader.load_checkpoint(path, progress=False)


def test_orders_that_differ_within_a_matrix(copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of("gptq_order"))
    edit_tensors(path, change(f"{UP}.g_idx", lambda t: t.flip(0)))
    with raises(
        NotImplementedError,
        f"{path / 'model.safetensors'}: tensor '{UP}.g_idx' orders the inputs unlike "
        f"'{GATE}.g_idx'",
        "supported: one order for both",
        "without an activation order",
    ):
        loader.load_checkpoint(path, progress=False)


def test_scales_of_two_dtypes_within_a_matrix(copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of("gptq"))
    edit_tensors(path, change(f"{UP}.scales", lambda t: t.bfloat16()))
    with raises(ValueError, f"tensor '{UP}.scales' is bfloat16", "gate.scales", "one dtype"):
        loader.load_checkpoint(path, progress=False)


def test_an_order_that_the_configuration_does_not_name(copy_of: Callable[..., Path]) -> None:
    path = copy_of(spec_of("gptq_order"))
    edit_section(path, "quantization_config", desc_act=False)
    with raises(ModelFileError, ".g_idx' puts column", "names an activation order"):
        loader.load_checkpoint(path, progress=False)


def test_dummy_weights() -> None:
    path = make(spec_of("gptq_order"))
    model = loader.load_dummy(path)
    real = loader.load_checkpoint(path, progress=False)
    assert len(model.model.arena()) == len(real.model.arena())
