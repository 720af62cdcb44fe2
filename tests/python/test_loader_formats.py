# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with matrices of fewer bits: mxfp4 and fp8."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from hf_configs import GEMMA3, GEMMA4, LLAMA, QWEN3
from paceline import LLM, loader
from paceline._core import ModelFileError
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.section import Section
from paceline.loader.state_dict import StateDict
from quantized_models import (
    METHODS,
    dequantize,
    from_fp8,
    from_mxfp4,
    quantization_config,
    to_fp8,
    to_mxfp4,
)
from tiny_models import TinySpec, edit_config, edit_tensors, load_tensors, make, read_json

FP8_METHODS = METHODS[1:]
BLOCK = {"format": "fp8", "scales": [128, 128]}

# ---- the tools of these tests -------------------------------------------------------------------


def test_mxfp4_of_the_tests_is_that_of_transformers() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 5, 2), dtype=torch.uint8, generator=generator)
    values = from_mxfp4(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(values.transpose(1, 2), expected)
    assert torch.equal(values, values.bfloat16().float()), "values are exact in bfloat16"
    # Values that mxfp4 holds stay as they are.
    again = from_mxfp4(*to_mxfp4(values))
    assert torch.equal(again, values)


def test_fp8_blocks_of_the_tests_are_those_of_transformers() -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 384, generator=generator)
    weight, scales = to_fp8(matrix, "fp8_block")
    assert scales.shape == (2, 3)
    assert scales.unique().numel() == 6
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales)
    assert torch.equal(from_fp8(weight, scales), expected)
    # 3 bits of mantissa.
    for method, shape in (("fp8_block", (2, 3)), ("fp8_row", (256, 1)), ("fp8_tensor", (1,))):
        for exact in (False, True):
            weight, scales = to_fp8(matrix, method, exact_scales=exact)
            assert scales.shape == shape
            error = (from_fp8(weight, scales) - matrix).abs()
            assert (error <= matrix.abs() / 16 + matrix.abs().amax() / 448 / 256).all()
            is_exact = bool((torch.frexp(scales).mantissa == 0.5).all())
            assert is_exact == exact


@pytest.mark.parametrize("method", METHODS)
def test_tiny_checkpoints_store_matrices_of_fewer_bits(method: str) -> None:
    family = "gpt_oss" if method == "mxfp4" else "qwen3"
    stored = load_tensors(make(TinySpec(family, quantization=method)))
    wide = load_tensors(make(TinySpec(family)))
    plain = dequantize(stored)
    assert plain.keys() == wide.keys()
    narrowed = [name for name in wide if name not in stored or stored[name].dtype.itemsize == 1]
    assert len(narrowed) == 2 * (2 if method == "mxfp4" else 7)
    for name, tensor in wide.items():
        scale = float(tensor.abs().max())
        difference = float((plain[name] - tensor).abs().max())
        assert (0 < difference < scale / 5) if name in narrowed else difference == 0, name


# ---- reading ------------------------------------------------------------------------------------


def formats_of(config: dict[str, Any]) -> list[list[Any]]:
    """The formats of q, k and v, of o, of gate and up, and of down, by layer."""
    return [
        [
            layer["attention"].get("qkv"),
            layer["attention"].get("o"),
            layer["mlp"].get("gate_up"),
            layer["mlp"].get("down"),
        ]
        for layer in config["layers"]
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("method", "scales", "suffix", "shape"),
    [
        ("fp8_block", [128, 128], "weight_scale_inv", (2, 1)),
        ("fp8_row", "row", "weight_scale", (160, 1)),
        ("fp8_tensor", "tensor", "weight_scale", (1,)),
    ],
)
def test_every_linear_of_a_layer_has_scales(
    method: str, scales: Any, suffix: str, shape: tuple[int, ...], family: str
) -> None:
    spec = TinySpec(family, quantization=method, intermediate_size=160, dtype="bfloat16")
    path = make(spec)
    checkpoint = open_checkpoint(path)
    format = {"format": "fp8", "scales": scales}
    layers = len(checkpoint.config["layers"])
    assert formats_of(checkpoint.config) == [[format] * 4] * layers
    sources = {t.spec.name: (t.source, t.spec.shape) for t in checkpoint.tensors}
    up = "model.layers.1.mlp.up_proj"
    assert sources["layers.1.mlp.up.weight"] == (f"{up}.weight", (160, 64))
    assert sources["layers.1.mlp.up.scales"] == (f"{up}.{suffix}", shape)
    assert {tensor.source for tensor in checkpoint.tensors} == set(load_tensors(path))
    # Matrices with scales have no say in the dtype.
    assert checkpoint.weight_dtype == "bfloat16"
    assert checkpoint.stored_dtypes["F8_E4M3"] == 7 * layers


def compressed(**changes: Any) -> dict[str, Any]:
    """The configuration of fp8 with a scale for each row; a key may be a path with dots."""
    config = copy.deepcopy(quantization_config("fp8_row"))
    for path, value in changes.items():
        *outer, key = path.split("__")
        section = config
        for name in outer:
            section = section["config_groups"]["group_0"] if name == "group" else section[name]
        section[key] = value
    return config


def with_key(value: dict[str, Any], base: dict[str, Any] = QWEN3) -> dict[str, Any]:
    return base | {"quantization_config": value}


FP8 = quantization_config("fp8_block")
ROW = {"format": "fp8", "scales": "row"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (FP8, [[BLOCK] * 4] * 2),
        (
            FP8 | {"activation_scheme": "static", "scale_fmt": "ue8m0", "dequantize": False},
            [[BLOCK] * 4] * 2,
        ),
        # Paths from their start, to their end, and with any part.
        (
            FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp", "o_proj"]},
            [[BLOCK, None, None, None], [BLOCK, None, BLOCK, BLOCK]],
        ),
        (
            FP8 | {"ignored_layers": ["model.layers.*.mlp.down_proj", "gate", "model.layer"]},
            [[BLOCK, BLOCK, BLOCK, None], [BLOCK, BLOCK, BLOCK, None]],
        ),
        (compressed(), [[ROW] * 4] * 2),
        (
            compressed(
                ignore=["lm_head", "model.layers.0.self_attn.o_proj", "down_proj", "model.layers"]
            ),
            [[ROW, None, ROW, ROW], [ROW] * 4],
        ),
        (
            compressed(ignore=["re:.*lm_head", r"re:model\.layers\.[1-9]\.self_attn\..*"]),
            [[ROW] * 4, [None, None, ROW, ROW]],
        ),
        (
            compressed(group__input_activations=None, sparsity_config={}, transform_config={}),
            [[ROW] * 4] * 2,
        ),
        (
            compressed(sparsity_config={"format": "dense"}, format="naive-quantized"),
            [[ROW] * 4] * 2,
        ),
    ],
)
def test_modules_that_are_left_out(value: dict[str, Any], expected: list[list[Any]]) -> None:
    assert formats_of(loader.decoder_config(with_key(value))) == expected


def test_paths_are_matched_under_every_prefix() -> None:
    """The configuration of a model with a vision tower names paths as its file has them."""
    text = {key: value for key, value in GEMMA3.items() if key != "architectures"}
    ignored = ["re:.*lm_head", "re:vision_tower.*"]
    ignored += [f"language_model.model.layers.3.{name}" for name in ("mlp.down_proj",)]
    config = loader.decoder_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text,
            "quantization_config": compressed(ignore=ignored),
        }
    )
    assert formats_of(config)[3] == [ROW, ROW, ROW, None]
    assert formats_of(config)[2] == [ROW] * 4


def test_scales_of_inputs_are_ignored(copy_of: Callable[..., Path]) -> None:
    import torch

    path = copy_of(TinySpec("qwen3", quantization="fp8_tensor"))
    name = "model.layers.0.mlp.up_proj.input_scale"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(1)}))
    assert name not in {tensor.source for tensor in open_checkpoint(path).tensors}
    other = "model.layers.0.mlp.act.input_scale"
    edit_tensors(path, lambda tensors: tensors.update({other: torch.ones(1)}))
    with raises(ModelFileError, "1 tensor is not part of", other):
        open_checkpoint(path)


# ---- refusals -----------------------------------------------------------------------------------

WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({"quant_method": "nf4"}, ('quant_method" is "nf4"', "fp8, compressed-tensors")),
        ({"quant_method": "mxfp4"}, ('quant_method" is "mxfp4"', "fp8, compressed-tensors")),
        (FP8 | {"weight_block_size": [64, 128]}, ('block_size" is [64, 128]', "[128, 128]")),
        (FP8 | {"weight_block_size": None}, ('block_size" is null', "supported: [128, 128]")),
        (FP8 | {"fmt": "e5m2"}, ('fmt" is "e5m2"', 'supported: "e4m3"')),
        (FP8 | {"activation_scheme": "x"}, ('scheme" is "x"', '"dynamic" or "static"')),
        (FP8 | {"scale_fmt": "x"}, ('scale_fmt" is "x"', '"float" or "ue8m0"')),
        (FP8 | {"modules_to_convert": ["a"]}, ('to_convert" is ["a"]', "null or []")),
        (FP8 | {"modules_to_not_convert": ["a|b"]}, ('["a|b"]', "paths of modules")),
        (FP8 | {"modules_to_not_convert": ["*.a"] * 9}, ("to_not_convert", "at most 8 paths")),
        (
            FP8 | {"modules_to_not_convert": ["k_proj", "model.layers.0.mlp.up_proj"]},
            ("modules_to_not_convert", "leaves out self_attn.k_proj of layer 0", "all or none of"),
        ),
        (compressed(format="mixed"), ('format" is "mixed', '"naive-quantized" or "pack-quantized')),
        (compressed(kv_cache_scheme={"num_bits": 8}), ('kv_cache_scheme" is {', "null")),
        (compressed(transform_config={"a": 1}), ('transform_config" is {"a": 1}', "null or {}")),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            ('sparsity_config.format" is "sparse-24', '"dense"'),
        ),
        (
            compressed(config_groups={"a": {}, "b": {}}),
            ('config_groups" is {"a"', "one group of modules"),
        ),
        (compressed(group__targets=["re:.*"]), ('group_0.targets" is ["re:.*"]', '["Linear"]')),
        (compressed(group__format="x"), ('group_0.format" is "x"', '"float-quantized" or')),
        (compressed(group__output_activations={}), ('output_activations" is {}', "null")),
        (compressed(group__weights__num_bits=4), (f'{WEIGHTS}.num_bits" is 4', "supported: 8")),
        (compressed(group__weights__type="int"), (f'{WEIGHTS}.type" is "int"', '"float"')),
        (compressed(group__weights__symmetric=False), ("symmetric", "supported: true")),
        (compressed(group__weights__dynamic=True), ("dynamic", "supported: false")),
        (
            compressed(group__weights__strategy="group"),
            (f'{WEIGHTS}.strategy" is "group"', '"tensor" or "channel"'),
        ),
        (compressed(group__weights__strategy=None), ('strategy" is null', '"tensor" or "channel"')),
        (compressed(ignore=[]), ('ignore" is []', 'a list with "lm_head"')),
        (
            compressed(ignore=["lm_head", "model.layers.1.mlp.gate_proj"]),
            ('.ignore" leaves out mlp.gate_proj of layer 1', "all or none"),
        ),
        (compressed(ignore=["re:a"] * 9), ("ignore", "at most 8 regular expressions")),
        *(
            (
                compressed(ignore=[f"re:{pattern}"]),
                ("ignore", f"'{pattern[:70]}", "up to 200 characters with at most 2 repetitions"),
            )
            for pattern in (
                "a" * 201,
                "(a+)+b",
                "(?:a)*b",
                ".*.*.*b",
                ".?.?.?b",
                "(?=a)b",
                "(a)(b)(c)",
                "|".join("abcdefghij"),
                "a{1,9}" * 3,
            )
        ),
    ],
)
def test_refused_settings(value: dict[str, Any], parts: Any) -> None:
    with raises(NotImplementedError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(value), source="here.json")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({}, ('quant_method" is missing', "a string")),
        (FP8 | {"modules_to_not_convert": "lm_head"}, ("a list of strings",)),
        (compressed(config_groups=None), ('config_groups" is null', "one group of modules")),
        (
            compressed(config_groups={"a": None}),
            ('config_groups.a" is null', "targets and weights"),
        ),
        (compressed(group__weights=None), ('weights" is null', "num_bits and type")),
        (compressed(ignore=["re:a["]), ("ignore", "'a['", "expected a regular expression")),
    ],
)
def test_wrong_settings(value: dict[str, Any], parts: Any) -> None:
    with raises(ModelFileError, 'here.json: key "quantization_config', *parts):
        loader.decoder_config(with_key(value), source="here.json")


def test_two_keys_that_contradict_each_other() -> None:
    text = {key: value for key, value in with_key(FP8, GEMMA3).items() if key != "architectures"}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    twice = loader.decoder_config(config | {"quantization_config": FP8})
    assert twice == loader.decoder_config(config)
    with raises(
        ModelFileError,
        'here.json: key "text_config.quantization_config" is {',
        'the same as "quantization_config", or one of the two keys',
    ):
        loader.decoder_config(config | {"quantization_config": compressed()}, source="here.json")


def test_families_without_scales() -> None:
    with raises(NotImplementedError, '"quantization_config" is {', "none (weights in BF16"):
        loader.decoder_config(with_key(FP8, GEMMA4))


@pytest.mark.serial
def test_a_hostile_expression_is_not_slow() -> None:
    begin = time.perf_counter()
    slow = ["re:lm_head", *["re:(?:.|a|b|c)(?:.|a|b|c|d).*.*!"] * 7]
    loader.decoder_config(with_key(compressed(ignore=slow), LLAMA | {"num_hidden_layers": 60}))
    assert time.perf_counter() - begin < 5


UP = "model.layers.0.mlp.up_proj"
LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("method", "edit", "parts"),
    [
        (
            "fp8_block",
            lambda t: t.update({f"{UP}.weight_scale_inv": t[f"{UP}.weight_scale_inv"][:1]}),
            (
                "up_proj.weight_scale_inv' has shape [1, 1]; expected [2, 1]",
                "(intermediate_size / 128 rounded up, hidden_size / 128 rounded up of",
            ),
        ),
        (
            "fp8_row",
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].reshape(-1)}),
            ("up_proj.weight_scale' has shape [160]; expected [160, 1]",),
        ),
        (
            "fp8_tensor",
            lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].float()}),
            ("up_proj.weight' is stored as F32; expected F8_E4M3", '"quantization_config" of'),
        ),
        (
            "fp8_tensor",
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].half()}),
            ("up_proj.weight_scale' is stored as F16; expected F32 or BF16",),
        ),
        (
            "fp8_row",
            lambda t: t.pop(f"{UP}.weight_scale"),
            ("1 tensor is missing: 'model.layers.0.mlp.up_proj.weight_scale'",),
        ),
    ],
)
def test_refused_tensors(method: str, edit: Any, parts: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("qwen3", quantization=method, intermediate_size=160))
    edit_tensors(path, edit)
    with raises(ModelFileError, path / "model.safetensors", *parts):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("method", "name", "canonical", "value", "parts"),
    [
        (
            "mxfp4",
            "mlp.experts.down_proj_scales",
            "mlp.experts.down.scales",
            255,
            ("[0, 0, 5] is 255, which is NaN", "0 to 254"),
        ),
        (
            "fp8_block",
            "mlp.up_proj.weight_scale_inv",
            "mlp.up.scales",
            float("-inf"),
            ("[5, 0] is -inf", "finite scales"),
        ),
        (
            "fp8_row",
            "self_attn.k_proj.weight_scale",
            "attn.k.scales",
            float("inf"),
            ("[5, 0] is inf", "finite scales"),
        ),
        (
            "fp8_tensor",
            "mlp.down_proj.weight_scale",
            "mlp.down.scales",
            float("nan"),
            ("[0] is nan", "finite scales"),
        ),
    ],
)
def test_scales_that_are_no_numbers(
    method: str,
    name: str,
    canonical: str,
    value: float,
    parts: tuple[str, ...],
    copy_of: Callable[..., Path],
) -> None:
    """The same in a folder, in memory and in a converted folder, whose names are canonical."""
    family = "gpt_oss" if method == "mxfp4" else "qwen3"
    spec = TinySpec(family, quantization=method, intermediate_size=768, num_layers=2)
    path = copy_of(spec)

    def spoil(tensors: dict[str, Any]) -> None:
        scales = tensors[f"{LAYER}{name}"]
        scales.view(-1)[min(5, scales.numel() - 1)] = value

    edit_tensors(path, spoil)
    shown = f"tensor '{LAYER}{name}'"
    with raises(ModelFileError, f"{path / 'model.safetensors'}: {shown}", *parts):
        loader.load_checkpoint(path, progress=False)
    tensors = load_tensors(path)
    with raises(ModelFileError, f"state_dict: {shown}", *parts):
        loader.load_checkpoint(
            StateDict(Section(read_json(path / "config.json"), "config"), tensors, "state_dict"),
            progress=False,
        )
    out = convert(path, path.parent / "out", progress=False)
    shown = f"'layers.1.{canonical}'"
    with raises(ModelFileError, f"{out / 'target.safetensors'}: {shown}", *parts):
        loader.load_checkpoint(out, progress=False)


def test_an_update_with_a_scale_that_is_no_number_changes_nothing() -> None:
    path = make(TinySpec("qwen3", quantization="fp8_row"))
    tensors = load_tensors(path)
    tensors[f"{LAYER}mlp.up_proj.weight_scale"][3] = float("nan")
    with LLM(
        path, device="cpu", max_num_seqs=2, kv_cache_bytes=8 << 20, show_progress=False
    ) as llm:
        before = llm.target.model.arena()
        with raises(ModelFileError, "state_dict: tensor", "weight_scale'[3, 0] is nan"):
            llm.update_weights(tensors)
        assert llm.target.model.arena() == before


def test_scales_that_the_configuration_does_not_name(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec("qwen3", quantization="fp8_row"))
    edit_config(path, quantization_config=...)
    with raises(
        NotImplementedError,
        path / "model.safetensors",
        "is stored as F8_E4M3",
        "supported: BF16, F16, F32",
        'only where "quantization_config" of',
    ):
        open_checkpoint(path)
