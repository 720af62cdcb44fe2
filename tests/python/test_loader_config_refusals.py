# SPDX-License-Identifier: Apache-2.0
"""Refused values in config.json: each error names the file, the key, the value and the cure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from hf_configs import GEMMA3, GEMMA4, GPT_OSS, LLAMA, LLAMA3_ROPE, QWEN3, YARN_ROPE
from paceline import loader
from paceline._core import ModelFileError, ModelNotFoundError
from paceline.loader import section
from paceline.loader.checkpoint import open_checkpoint
from quantized_models import quantization_config
from tiny_models import FULL, SLIDING, write_json

ALL_ARCHITECTURES = (
    "LlamaForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, "
    "Gemma3TextModel, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextModel, "
    "Gemma4UnifiedForCausalLM, Gemma4UnifiedForConditionalGeneration, GptOssForCausalLM"
)


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        (
            ModelFileError,
            {"enable_moe_block": True},
            ('"num_experts" is missing', "an integer from 1"),
        ),
        (
            ModelFileError,
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            ('"top_k_experts" is 5', "from 1 to", '"num_experts" (4)'),
        ),
        (
            ModelFileError,
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 20,
            },
            (
                '"moe_intermediate_size": layers[0].mlp.mixture.intermediate is 20',
                "a multiple of 8",
            ),
        ),
        (
            NotImplementedError,
            {"use_bidirectional_attention": "all"},
            ('"use_bidirectional_attention" is "all"', "vision"),
        ),
        (
            NotImplementedError,
            {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}},
            ("yarn", "default, proportional"),
        ),
        (NotImplementedError, {"rope_theta": 1e4}, ('"rope_theta"', '"rope_parameters"')),
        (
            ModelFileError,
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            ('"rope_parameters.full_attention.partial_rotary_factor" is 2', "up to 1"),
        ),
        (
            ModelFileError,
            {"num_kv_shared_layers": 7},
            ('"num_kv_shared_layers" is 7', "0 to 6", "assistant"),
        ),
        (
            ModelFileError,
            {"num_kv_shared_layers": 2},
            ('"num_kv_shared_layers" is 2', "layer 5 is the first full_attention layer"),
        ),
        (
            ModelFileError,
            {"layer_types": [FULL] + [SLIDING] * 6},
            ("\"layer_types\" ends with 'sliding_attention'", "full_attention"),
        ),
        (ModelFileError, {"per_layer_config": {"7": {}}}, ('"per_layer_config.7"', '"0" to "6"')),
        (
            NotImplementedError,
            {"per_layer_config": {"1": {"intermediate_size": 8}}},
            ('"per_layer_config.1.intermediate_size" is 8', "head_dim, num_key_value_heads"),
        ),
        (
            ModelFileError,
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            ("layer 1 has 3 key and value heads", "a divisor of", "(4)"),
        ),
        (ModelFileError, {"global_head_dim": 31}, ("layer 5", "31", "an even integer")),
        (
            ModelFileError,
            {"per_layer_config": {"6": {"head_dim": 32}}, "num_kv_shared_layers": 1},
            ("layer 6", "2 key and value heads of 32", "layer 5 with 2 of 16"),
        ),
    ],
)
def test_refusals_of_gemma4(
    kind: type[Exception], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with raises(kind, "here.json", *parts):
        loader.decoder_config(GEMMA4 | changes, source="here.json")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", ..., "missing; expected an integer from 1 to"),
        ("hidden_size", None, "null; expected an integer from 1 to"),
        ("hidden_size", "64", '"64"; expected an integer from 1 to'),
        ("hidden_size", 64.5, "64.5; expected an integer"),
        ("hidden_size", True, "true; expected an integer"),
        ("hidden_size", 0, "0; expected an integer from 1 to"),
        ("hidden_size", -64, "-64; expected an integer from 1 to"),
        ("hidden_size", 10**40, "expected an integer from 1 to"),
        ("hidden_size", 66, '66; expected a multiple of "num_attention_heads" (4)'),
        ("hidden_size", 2**16, '65536; expected at most 4096 times "num_attention_heads" (4)'),
        ("vocab_size", ..., "missing; expected an integer"),
        ("intermediate_size", [1], "[1]; expected an integer"),
        ("num_hidden_layers", 10**9, "1000000000; expected an integer from 1 to 1024"),
        ("num_attention_heads", ..., "missing; expected an integer"),
        ("num_key_value_heads", 3, '3; expected a divisor of "num_attention_heads" (4)'),
        ("head_dim", 15, "15; expected an even integer"),
        ("head_dim", 10**9, "1000000000; expected an integer from 1 to 4096"),
        ("rms_norm_eps", "small", '"small"; expected a finite number above 0'),
        ("rms_norm_eps", -1e-5, "-1e-05; expected a finite number above 0"),
        ("rms_norm_eps", math.nan, "NaN; expected a finite number above 0"),
        ("tie_word_embeddings", "yes", '"yes"; expected true or false'),
        ("attention_bias", 1, "1; expected true or false"),
        ("architectures", "LlamaForCausalLM", "expected a list of strings"),
        ("architectures", ..., f"missing; expected a list with one of {ALL_ARCHITECTURES}"),
        ("hidden_act", 3, "3; expected a string"),
        ("rope_theta", 0, "0; expected a finite number above 0"),
        ("rope_scaling", "linear", '"linear"; expected a JSON object'),
    ],
)
def test_bad_key(key: str, value: Any, expected: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    write_json(
        path / "config.json", {k: v for k, v in (LLAMA | {key: value}).items() if v is not ...}
    )
    with raises(ModelFileError, f'{path / "config.json"}: key "{key}" is ', expected):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("base", "changes", "parts"),
    [
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, ('"rope_scaling.factor" is missing',)),
        (
            LLAMA,
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
            ('"rope_scaling.high_freq_factor" is 1.0', 'above "low_freq_factor" (1.0)'),
        ),
        (
            LLAMA,
            {"rope_scaling": YARN_ROPE | {"beta_fast": 0.5}},
            ('"rope_scaling.beta_fast" is 0.5', 'from "beta_slow" (1.0)'),
        ),
        (
            LLAMA,
            {"rope_scaling": YARN_ROPE | {"factor": None}},
            ('"rope_scaling.factor" is null', "above 0"),
        ),
        (
            LLAMA,
            {"rope_scaling": YARN_ROPE, "rope_theta": 1.0},
            ('"rope_scaling" says "yarn"', '("rope_theta") is 1.0', "above 1"),
        ),
        (
            LLAMA,
            {"rope_scaling": YARN_ROPE, "original_max_position_embeddings": 4096},
            ('"original_max_position_embeddings" is 4096', "expected 32768", "rope_scaling.orig"),
        ),
        (
            LLAMA,
            {"rope_theta": 10_000.0, "rope_parameters": {"rope_theta": 5.0}},
            ('"rope_parameters.rope_theta" is 5.0', '"rope_theta" is 10000.0', "the same value"),
        ),
        (
            LLAMA,
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            ('"rope_scaling"', "factor=2.0", '"rope_parameters"', "factor=4.0", "the same"),
        ),
        (GEMMA3, {"layer_types": [FULL]}, ('"layer_types" has 1 entries', "expected 7")),
        (
            GEMMA3,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
            ('"rope_parameters.rope_type"', f"allowed: {FULL}, {SLIDING}"),
        ),
        (GEMMA3, {"sliding_window": 0}, ('"sliding_window" is 0', "from 1")),
        (GEMMA3, {"query_pre_attn_scalar": 0}, ('"query_pre_attn_scalar" is 0', "above 0")),
        (LLAMA, {"eos_token_id": -1}, ('"eos_token_id" is -1', "a token id from 0")),
        (LLAMA, {"eos_token_id": [1, "2"]}, ('"eos_token_id" is [1, "2"]', "a token id")),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            {"text_config": {"hidden_size": "x"}},
            ('"text_config.hidden_size" is "x"', "an integer"),
        ),
    ],
)
def test_bad_combination(
    base: dict[str, Any], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with raises(ModelFileError, "here.json", *parts):
        loader.decoder_config(base | changes, source="here.json")


@pytest.mark.parametrize(
    ("base", "changes", "parts"),
    [
        (
            LLAMA,
            {"architectures": ["MixtralForCausalLM"]},
            ("'MixtralForCausalLM'", '"architectures"', f"supported: {ALL_ARCHITECTURES}"),
        ),
        (
            LLAMA,
            {"architectures": None, "model_type": "gpt2"},
            ("'gpt2'", '"model_type"', ALL_ARCHITECTURES),
        ),
        *(
            (LLAMA, {key: {"rope_type": kind, "factor": 2.0}}, (f'"{key}.rope_type"', kind, known))
            for key in ("rope_scaling", "rope_parameters")
            for kind in ("dynamic", "longrope", "proportional")
            for known in ("supported: default, linear, llama3, yarn",)
        ),
        (LLAMA, {"partial_rotary_factor": 0.5}, ('"partial_rotary_factor" is 0.5', "1.0")),
        (LLAMA, {"hidden_act": "relu"}, ('"hidden_act" is "relu"', "silu", "gelu_pytorch_tanh")),
        (QWEN3, {"use_sliding_window": True}, ('"use_sliding_window" is true', "false")),
        (
            QWEN3,
            {"layer_types": [FULL, SLIDING]},
            ('"layer_types"[1]', SLIDING, "Qwen3ForCausalLM", f"supported: {FULL}"),
        ),
        (
            GEMMA3,
            {"layer_types": ["linear_attention"] * 7},
            ('"layer_types"[0]', "linear_attention", FULL),
        ),
        (
            GEMMA3,
            {"rope_parameters": {FULL: YARN_ROPE | {"truncate": False}}},
            ('"rope_parameters.full_attention.truncate" is false', "true"),
        ),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, ('"attn_logit_softcapping" is 50.0', "null")),
        (
            GEMMA3,
            {"use_bidirectional_attention": True},
            ('"use_bidirectional_attention" is true', "false"),
        ),
    ],
)
def test_refusals_list_what_is_supported(
    base: dict[str, Any], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with raises(NotImplementedError, "here.json", *parts):
        loader.decoder_config(base | changes, source="here.json")


# Values beyond the library's limits; errors begin with the key of the file.
LIMITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"max_position_embeddings": 2**31 - 1}, "max_position is 2147483647; allowed: an int"),
    (
        LLAMA | {"head_dim": 16},
        {"hidden_size": 2**21},
        "hidden_size is 2097152; allowed: an integer from 1 to 1048576",
    ),
    (LLAMA, {"vocab_size": 2**24}, "vocab_size is 16777216; allowed: an integer from 1 to 8388608"),
    (LLAMA, {"intermediate_size": 2**25}, "layers[0].mlp.intermediate is 33554432; allowed: an in"),
    (
        LLAMA | {"head_dim": 16},
        {"num_attention_heads": 8192},
        "layers[0].attention.num_qo_heads is 8192; allowed: an integer from 1 to 4096",
    ),
    (LLAMA, {"rope_theta": 1e-30}, "ropes[0].inv_freq[2] is 3162277"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "linear", "factor": 1e-40}},
        "ropes[0].inv_freq[0] is inf; allowed: a finite number",
    ),
    (
        LLAMA,
        {"rope_scaling": YARN_ROPE | {"factor": 1e30, "mscale": 3e38, "mscale_all_dim": 1e-30}},
        "ropes[0].scale is inf; allowed: a finite number",
    ),
    (LLAMA, {"rope_parameters": {"rope_theta": 1e-45}}, "ropes[0].inv_freq[7] is inf; allowed"),
    (
        LLAMA | {"hidden_size": 72, "head_dim": 16},
        {"quantization_config": quantization_config("fp8_row")},
        "layers[0].attention.qkv.format is 'fp8'; allowed: a format only where hidden_size is a",
    ),
    (
        GPT_OSS | {"num_local_experts": 64},
        {"num_experts_per_tok": 33},
        "layers[0].mlp.top_k is 33; allowed: an integer from 1 to 32",
    ),
    (GEMMA3, {"sliding_window": 2**31 - 1}, "layers[0].attention.window is 2147483647; allowed"),
    (
        GEMMA4,
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2**24},
        "per_layer_inputs.vocab_size is 16777216; allowed: an integer from 1 to 8388608",
    ),
]


@pytest.mark.parametrize(("base", "changes", "part"), LIMITS)
def test_limits_of_the_library_name_file_and_key(
    base: dict[str, Any], changes: dict[str, Any], part: str, copy_of: Callable[..., Path]
) -> None:
    path = copy_of()
    write_json(path / "config.json", base | changes)
    key = list(changes)[-1]
    for load in (open_checkpoint, loader.load_dummy):
        with raises(ModelFileError, f'{path / "config.json"}: key "{key}": {part}'):
            load(path)


def test_limits_of_the_library_in_a_nested_configuration() -> None:
    text = {key: value for key, value in GEMMA4.items() if key != "architectures"}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text | {"max_position_embeddings": 2**31 - 1},
    }
    with raises(ModelFileError, 'here.json: key "text_config.max_position_embeddings": max_pos'):
        loader.decoder_config(config, source="here.json")


def test_limits_of_the_library_on_several_keys() -> None:
    scaling = {"rope_type": "linear", "factor": 1e-40}
    with raises(ModelFileError, 'here.json: keys "rope_scaling", "rope_theta": ropes[0].inv'):
        loader.decoder_config(
            LLAMA | {"rope_theta": 1e4, "rope_scaling": scaling}, source="here.json"
        )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ("not valid JSON",)),
        ("", ("not valid JSON",)),
        ("[" * 100_000, ("nested too deeply", "the model's configuration")),
        ("[1, 2]", ("holds [1, 2]", "expected a JSON object")),
        ("\udcff", ("cannot read",)),
    ],
)
def test_config_that_is_no_object(
    text: str, parts: tuple[str, ...], copy_of: Callable[..., Path]
) -> None:
    path = copy_of()
    (path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with raises(ModelFileError, path / "config.json", *parts):
        open_checkpoint(path)


def test_missing_config(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "config.json").unlink()
    with raises(ModelNotFoundError, path / "config.json", "no such file"):
        open_checkpoint(path)


def test_huge_config(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    with (path / "config.json").open("r+b") as file:
        file.truncate(section.MAX_CONFIG_BYTES + 1)
    with raises(ModelFileError, path / "config.json", "bytes", "at most"):
        open_checkpoint(path)
