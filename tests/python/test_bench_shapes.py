# SPDX-License-Identifier: Apache-2.0
"""The shapes of GPT-OSS and of weights with scales that ship as configurations, by their sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench_work import all_parameters, kv_bytes_read, logit_parameters, pass_bytes, row_parameters
from errors import raises
from paceline.bench import floor, models
from paceline.bench.costs import matrix_costs
from paceline.cli import main
from paceline.loader import decoder_config, drafter_config, families, open_checkpoint
from paceline.loader.drafters import Target
from paceline.loader.hf_config import parse_hf_config
from tiny_models import TinyDelta, TinySpec, describe, make

STORED_BYTES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}


def named(name: str) -> dict[str, Any]:
    return decoder_config(models.named_config(name), "bfloat16", name)


def stored(name: str) -> tuple[int, int]:
    """The bytes of a checkpoint's tensors, and its parameters, as the loader expects them."""
    hf_config = parse_hf_config(models.named_config(name), name, families.ARCHITECTURES)
    num_bytes = num_parameters = 0
    for spec in families.translate(hf_config).tensors:
        size = math.prod(spec.shape)
        num_bytes += size * STORED_BYTES[spec.dtypes[0]]
        if not spec.name.endswith(".scales"):
            num_parameters += size * (2 if spec.dtypes == ("U8",) else 1)  # two values a byte
    return num_bytes, num_parameters


@pytest.mark.parametrize(
    ("name", "num_bytes", "num_parameters"),
    [
        ("gpt-oss-20b", 13_761_264_768, 20_914_757_184),
        ("gpt-oss-120b", 65_248_815_744, 116_829_156_672),
        ("qwen3-8b", 2 * 8_190_735_360, 8_190_735_360),
        ("llama-3-8b", 2 * 8_030_261_248, 8_030_261_248),
        ("gemma4-12b", 2 * 11_907_350_320, 11_907_350_320),
        ("qwen3.5-9b", 2 * 8_953_803_264, 8_953_803_264),
        ("qwen3.8-27b", 2 * 26_895_998_464, 26_895_998_464),
        ("qwen3.6-35b-a3b", 2 * 34_660_610_688, 34_660_610_688),
        ("qwen3-30b-a3b", 2 * 30_532_122_624, 30_532_122_624),
    ],
)
def test_sizes_of_checkpoints(name: str, num_bytes: int, num_parameters: int) -> None:
    assert stored(name) == (num_bytes, num_parameters)


@pytest.mark.parametrize(
    ("name", "plain"), [("qwen3-8b-fp8", "qwen3-8b"), ("llama-3-8b-fp8", "llama-3-8b")]
)
def test_fp8_shapes_have_the_parameters_of_the_plain_ones(name: str, plain: str) -> None:
    assert stored(name)[1] == stored(plain)[1]
    scaled, whole = matrix_costs(named(name), "bfloat16"), matrix_costs(named(plain), "bfloat16")
    assert (row_parameters(scaled), logit_parameters(scaled)) == (
        row_parameters(whole),
        logit_parameters(whole),
    )
    # A GPU pads matrices to whole tiles, which these are.
    assert matrix_costs(named(name), "bfloat16", "cuda") == scaled
    # A byte for each parameter of the layers, and float scales; the lm_head is as it was.
    num_scale_bytes = scaled.all_bytes - row_parameters(whole) - 2 * logit_parameters(whole)
    rows_and_blocks = {
        # q, k, v, o, gate, up and down in blocks of 128 x 128.
        "qwen3-8b-fp8": 36 * (32 * (32 + 8 + 8 + 32) + 3 * 96 * 32),
        "llama-3-8b-fp8": 32 * (4096 + 1024 + 1024 + 4096 + 2 * 14336 + 4096),
    }
    assert num_scale_bytes == 4 * rows_and_blocks[name]


def test_the_int4_shape_has_the_parameters_of_the_plain_one() -> None:
    scaled = matrix_costs(named("qwen3-8b-int4"), "bfloat16")
    whole = matrix_costs(named("qwen3-8b"), "bfloat16")
    assert row_parameters(scaled) == row_parameters(whole)
    # A GPU pads matrices to whole tiles, which these are.
    assert matrix_costs(named("qwen3-8b-int4"), "bfloat16", "cuda") == scaled
    # Half a byte for each parameter of the layers, and 3 bytes for 128 of them: AWQ has a scale in
    # float16 and a zero point for each group. The lm_head is as it was.
    groups = row_parameters(whole) // 128
    assert scaled.all_bytes == 67 * groups + 2 * logit_parameters(whole)


def test_the_nvfp4_shape_has_the_parameters_of_the_plain_one() -> None:
    scaled = matrix_costs(named("qwen3-8b-nvfp4"), "bfloat16")
    whole = matrix_costs(named("qwen3-8b"), "bfloat16")
    assert row_parameters(scaled) == row_parameters(whole)
    # On a GPU, whose tiles are whole, what packing makes of a scale takes its four bytes.
    assert matrix_costs(named("qwen3-8b-nvfp4"), "bfloat16", "cuda") == scaled
    # Half a byte for each parameter of the layers, and 4 bytes for 16 of them.
    groups = row_parameters(whole) // 16
    assert scaled.all_bytes == 12 * groups + 2 * logit_parameters(whole)


@pytest.mark.parametrize(
    ("name", "num_layers", "num_experts", "active", "kv_bytes"),
    [
        ("gpt-oss-20b", 24, 32, 3_608_307_264, 49_152),
        ("gpt-oss-120b", 36, 128, 5_132_849_472, 73_728),
    ],
)
def test_what_a_token_of_gpt_oss_reads(
    name: str, num_layers: int, num_experts: int, active: int, kv_bytes: int
) -> None:
    config = named(name)
    costs = matrix_costs(config, "bfloat16")
    # The published number has norms, biases and sinks: of attention, the router and four experts.
    vectors = 2 * 2880 + (4096 + 2 * 512 + 2880) + 64 + num_experts + 4 * (5760 + 2880)
    assert all_parameters(costs) + num_layers * vectors + 2880 == active
    # 17 bytes for 32 values.
    expert = (5760 + 2880) * 2880 * 17 // 32
    assert (costs.expert_bytes, costs.num_experts) == (num_layers * expert, num_experts)
    attention = 2880 * (4096 + 2 * 512) + 4096 * 2880
    shared = num_layers * (attention + num_experts * 2880) + 201_088 * 2880
    assert costs.shared_bytes == 2 * shared
    assert pass_bytes(costs, 4.0) == costs.shared_bytes + 4 * num_layers * expert
    assert kv_bytes_read(config, 1, 2) == kv_bytes
    # Sliding layers read at most 128 tokens.
    assert kv_bytes_read(config, 1000, 2) == kv_bytes / 2 * (1000 + 128)


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec("gpt_oss", seed=32),
        TinySpec("gpt_oss", seed=32, quantization="mxfp4"),
        # q, k and v begin within blocks of 128 rows, so memory holds more scales than the file.
        TinySpec("llama", seed=32, hidden_size=192, heads=6, head_dim=32, quantization="fp8_block"),
        TinySpec("qwen3", seed=32, quantization="fp8_row"),
        TinySpec(
            "qwen3_5",
            seed=32,
            head_dim=128,
            quantization="fp8_block",
            delta=TinyDelta(key_dim=64, value_dim=32),
        ),
    ],
    ids=describe,
)
def test_costs_are_the_bytes_in_memory(spec: TinySpec) -> None:
    model = models.load(str(make(spec)), dummy=False, show_progress=False)
    tensors = open_checkpoint(make(spec), "auto").tensors
    embeddings = spec.vocab_size * spec.hidden_size
    vectors = sum(
        math.prod(tensor.spec.shape)
        for tensor in tensors
        if not tensor.spec.name.endswith(".scales") and not tensor.spec.is_matrix
    )
    expected = model.costs.all_bytes + 4 * (embeddings + vectors)
    padding = model.model.weight_bytes - expected
    assert 0 <= padding < 64 * len(tensors)  # every region begins at a multiple of 64 bytes


@pytest.mark.parametrize(
    ("name", "state", "kv", "mixer", "attention", "layer"),
    [
        # MiB of a state; bytes of KV of a token; millions of parameters of a recurrent layer's
        # mixer, of attention, and of the MTP layer.
        ("qwen3.5-9b", 2, 32_768, 67.4, 58.7, 243_290_624),
        ("qwen3.8-27b", 3, 65_536, 115.9, 104.9, 424_699_392),
        ("qwen3.6-35b-a3b", 2, 20_480, 33.7, 27.3, 844_640_768),
    ],
)
def test_shapes_with_recurrent_layers(
    name: str, state: int, kv: int, mixer: float, attention: float, layer: int
) -> None:
    config = named(name)
    costs = matrix_costs(config, "bfloat16")

    def millions(index: int) -> float:
        begin = f"layers.{index}.attn."
        return sum(m.parameters for m in costs.matrices if m.name.startswith(begin)) / 1e6

    assert (millions(0), millions(3)) == (
        pytest.approx(mixer, abs=0.1),
        pytest.approx(attention, abs=0.1),
    )
    num_states = sum(one["attention"]["kind"] == "gated_delta" for one in config["layers"])
    assert kv_bytes_read(config, 0, 2) == num_states * state * 2**20
    assert kv_bytes_read(config, 10, 2) - kv_bytes_read(config, 0, 2) == 10 * kv
    target = Target(Path(name), models.named_config(name)["architectures"][0], config, "bfloat16")
    top = models.named_config(name)
    described = drafter_config(top, target, method="mtp", source=name)
    own = matrix_costs(described, "bfloat16")
    norms = 5 * config["hidden_size"] + 2 * 256
    experts = sum(m.parameters for m in own.matrices if m.num_experts)
    # A row is multiplied with 8 experts of 256.
    parameters = all_parameters(own) + experts * (256 // 8 - 1) if experts else all_parameters(own)
    assert parameters - config["vocab_size"] * config["hidden_size"] + norms == layer


def test_the_draft_head_of_gpt_oss() -> None:
    config = named("gpt-oss-20b")
    target = Target(Path("gpt-oss-20b"), "GptOssForCausalLM", config, "bfloat16")
    head = models.named_config("gpt-oss-20b-eagle3")
    described = drafter_config(head, target, source="gpt-oss-20b-eagle3")
    assert described["drafter"]["aux_layers"] == [2, 12, 21]
    assert described["drafter"]["norm_before_fc"] is True
    # fc, the layer with its doubled qkv input, and 64,000 rows of lm_head.
    layer = (4096 + 2 * 512) * 5760 + 2880 * 4096 + 3 * 2880 * 2880
    parameters = all_parameters(matrix_costs(described, "bfloat16"))
    assert parameters == 2880 * 8640 + layer + 64_000 * 2880
    assert 2 * parameters / 2**30 == pytest.approx(0.513, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "backbone", "head", "chain", "context", "kv"),
    [
        # Millions of parameters of published files; GB of the lm_head, of the Markov head, and of
        # fc with the keys and values of all layers; bytes of KV of a token. Codebooks do not count.
        ("qwen3-8b-dflash", 1048.6, 1.245, 0.0, 0.252, 20_480),
        # Eight layers with two convolutions each, of 4.2 million parameters, and the projection.
        ("qwen3-8b-dflash2", 1695.7, 1.245, 0.0, 0.302, 32_768),
        ("qwen3-8b-dspark", 1048.6, 1.245, 0.0778, 0.252, 20_480),
        ("llama-3-8b-dflash", 1048.6, 1.051, 0.0, 0.252, 20_480),
        ("gpt-oss-20b-dflash", 784.8, 1.158, 0.0, 0.130, 16_384),
        ("gemma4-12b-dspark", 1283.0, 2.013, 0.1342, 0.167, 10_240),
    ],
)
def test_block_drafters(
    name: str, backbone: float, head: float, chain: float, context: float, kv: int
) -> None:
    target_name = name.rpartition("-")[0]
    config = named(target_name)
    architecture = models.named_config(target_name)["architectures"][0]
    target = Target(Path(target_name), architecture, config, "bfloat16")
    described = drafter_config(models.named_config(name), target, source=name)
    sizes = {
        matrix.name: matrix.num_bytes for matrix in matrix_costs(described, "bfloat16").matrices
    }
    layers = described["layers"]
    attention = layers[0]["attention"]
    hidden, heads, dim = described["hidden_size"], attention["num_qo_heads"], attention["head_dim"]
    kv_heads = attention["num_kv_heads"]
    vectors = 2 * hidden + len(layers) * (2 * hidden + 2 * dim)
    if described["has_post_norms"]:
        vectors += len(layers) * (2 * hidden + 1)  # and the factor of a layer
    if attention["has_qkv_bias"]:
        vectors += len(layers) * ((heads + 2 * kv_heads) * dim + hidden)
    matrices = sum(sizes.values()) - sizes["lm_head"] - sizes.get("markov", 0)
    assert (matrices // 2 + vectors) / 1e6 == pytest.approx(backbone, abs=0.1)

    class Drafter:
        config, costs = described, matrix_costs(described, "bfloat16")

    # Without the context's own reads of keys and values, which the block reads again.
    k = described["drafter"]["block"]["size"] - (0 if chain else 1)
    parts = 1 if attention.get("k_eq_v") else 2
    again = 2 * len(layers) * parts * kv_heads * dim * hidden
    assert (sizes["fc"] + again) / 1e9 == pytest.approx(context, abs=5e-4)
    products = floor._block_passes(Drafter(), None, k + 1, k, 1, 0.0, 2)  # type: ignore[arg-type]
    read = floor.work_of(products).weight_bytes
    assert read == matrices + sizes["lm_head"] + k * sizes.get("markov", 0) + again
    assert sizes["lm_head"] / 1e9 == pytest.approx(head, abs=1e-3)
    assert sizes.get("markov", 0) / 1e9 == pytest.approx(chain, abs=1e-4)
    assert kv_bytes_read(described, 1, 2) == kv


def test_the_assistant_of_gemma4() -> None:
    config = named("gemma4-12b")
    # A full layer has one KV head of 512 whose keys are its values, in memory too; a sliding one 8.
    assert kv_bytes_read(config, 1, 2) == 344_064
    assert kv_bytes_read(config, 5000, 2) == 16_384 * 5000 + (344_064 - 16_384) * 1024
    target = Target(Path("gemma4-12b"), "Gemma4UnifiedForCausalLM", config, "bfloat16")
    assistant = models.named_config("gemma4-12b-assistant")
    described = drafter_config(assistant, target, source="gemma4-12b-assistant")
    step = matrix_costs(described, "bfloat16").all_bytes / 2**20
    assert step == pytest.approx(806.5, abs=0.1)  # as published


@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3.6-35b-a3b"])
def test_fp8_shapes_of_hybrids_have_the_parameters_of_the_plain_ones(name: str) -> None:
    assert stored(f"{name}-fp8")[1] == stored(name)[1]
    scaled = matrix_costs(named(f"{name}-fp8"), "bfloat16")
    whole = matrix_costs(named(name), "bfloat16")
    assert row_parameters(scaled) == row_parameters(whole)
    # The embedding and the lm_head stay; most of the rest takes half of its bytes, and scales.
    kept = 2 * logit_parameters(whole)
    assert 0.5 < (scaled.all_bytes - kept) / (whole.all_bytes - kept) < 0.51


def test_qwen3_moe_and_its_draft_head() -> None:
    config = named("qwen3-30b-a3b")
    costs = matrix_costs(config, "bfloat16")
    assert (costs.num_experts, costs.expert_bytes) == (128, 48 * 9_437_184)
    # The published bytes of a token have norms, too: of layers, heads, and the last one.
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048
    assert pass_bytes(costs, 8) == 2 * (3_041_867_776 - vectors)
    assert kv_bytes_read(config, 1, 2) == 98_304
    # A byte for each element of an expert, and float scales of 128 x 128 blocks.
    scaled = matrix_costs(named("qwen3-30b-a3b-fp8"), "bfloat16")
    assert scaled.expert_bytes == 48 * (9_437_184 // 2 + 4 * 3 * 6 * 16)
    assert stored("qwen3-30b-a3b-fp8")[1] == 30_532_122_624
    target = Target(Path("qwen3-30b-a3b"), "Qwen3MoeForCausalLM", config, "bfloat16")
    head = models.named_config("qwen3-30b-a3b-eagle3")
    described = drafter_config(head, target, source="qwen3-30b-a3b-eagle3")
    assert described["drafter"]["aux_layers"] == [2, 24, 45]
    layer = (4096 + 2 * 512) * 4096 + 2048 * 4096 + 3 * 12_288 * 2048
    parameters = all_parameters(matrix_costs(described, "bfloat16"))
    assert parameters == 2048 * 6144 + layer + 32_000 * 2048


def test_gemma4_with_experts_and_its_assistant() -> None:
    config = named("gemma4-26b-a4b")
    costs = matrix_costs(config, "bfloat16")
    assert (costs.num_experts, costs.expert_bytes) == (128, 30 * 11_894_784)
    dense, router = 3 * 2112 * 2816, 128 * 2816
    sliding = 2816 * (4096 + 2 * 2048) + 4096 * 2816
    full = 2816 * (8192 + 1024) + 8192 * 2816
    shared = 30 * (dense + router) + 25 * sliding + 5 * full + 262_144 * 2816
    assert costs.shared_bytes == 2 * shared
    # 25 sliding layers with 8 KV heads of 256, 5 full ones with 2 of 512 whose keys are values.
    assert kv_bytes_read(config, 1, 2) == 25 * 8192 + 5 * 4096
    target = Target(Path("gemma4-26b-a4b"), "Gemma4ForConditionalGeneration", config, "bfloat16")
    assistant = models.named_config("gemma4-26b-a4b-assistant")
    described = drafter_config(assistant, target, source="gemma4-26b-a4b-assistant")
    assert described["drafter"]["target_hidden_size"] == 2816
    assert [layer["attention"]["num_kv_heads"] for layer in described["layers"]] == [8, 8, 8, 2]
    step = all_parameters(matrix_costs(described, "bfloat16"))
    assert step == pytest.approx(0.4e9, rel=0.06)  # as published


def test_glm_and_its_mtp_layer() -> None:
    config = named("glm-4.7-flash")
    costs = matrix_costs(config, "bfloat16")
    assert all_parameters(costs) == pytest.approx(3_579_571_840, rel=1e-4)  # without norms
    assert (costs.num_experts, costs.expert_bytes) == (64, 46 * 18_874_368)
    assert kv_bytes_read(config, 1, 2) == 54_144
    target = Target(Path("glm-4.7-flash"), "Glm4MoeLiteForCausalLM", config, "bfloat16")
    source = models.named_config("glm-4.7-flash")
    layer = drafter_config(source, target, method="mtp", source="glm-4.7-flash")
    step = matrix_costs(layer, "bfloat16")
    assert 2 * all_parameters(step) / 2**30 == pytest.approx(0.735, abs=1e-3)
    assert 2 * logit_parameters(step) / 2**30 == pytest.approx(0.591, abs=1e-3)


def test_deepseek_v4_and_its_mtp_layer() -> None:
    config = named("deepseek-v4-flash")
    costs = matrix_costs(config, "bfloat16")
    assert costs.num_experts == 256
    # Scales of fp8 are float32 in memory and a byte each in the file; of fp4 they are bytes.
    assert costs.expert_bytes == 43 * 13_369_344
    assert pass_bytes(costs, 6) == pytest.approx(10.447 * 2**30, rel=3e-3)
    # Two layers see a window alone; 21 see 512 of the entries of 4 tokens as well, whose index keys
    # they read all; 20 all entries of 128 tokens.
    context = 4096
    elements = 43 * 128 * 512 + 21 * (512 * 512 + 1024 * 128) + 20 * 32 * 512
    assert kv_bytes_read(config, context, 2) == 2 * elements
    target = Target(Path("deepseek-v4-flash"), "DeepseekV4ForCausalLM", config, "bfloat16")
    source = models.named_config("deepseek-v4-flash")
    layer = drafter_config(source, target, method="mtp", source="deepseek-v4-flash")
    step = matrix_costs(layer, "bfloat16")
    assert pass_bytes(step, 6) == pytest.approx(1.2205 * 2**30, rel=3e-3)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v4-flash",
        "gpt-oss-20b",
        "gemma3-27b",
        "gemma4-12b",
        "gemma4-26b-a4b",
        "qwen3-30b-a3b",
    ],
)
def test_the_first_layers_of_a_shape(name: str) -> None:
    whole = named(name)["layers"]
    cut = models.first_layers(models.named_config(name), 6, name)
    assert decoder_config(cut)["layers"] == whole[:6]
    with raises(ValueError, "--num-layers is 99", f"{name} has {len(whole)} layers", "allowed: 1"):
        models.first_layers(models.named_config(name), 99, name)


def test_the_first_layers_keep_the_drafter() -> None:
    source = models.first_layers(models.named_config("deepseek-v4-flash"), 3, "cut")
    target = Target(Path("cut"), "DeepseekV4ForCausalLM", decoder_config(source), "bfloat16")
    whole = models.named_config("deepseek-v4-flash")
    of_whole = Target(Path("x"), "DeepseekV4ForCausalLM", decoder_config(whole), "bfloat16")
    assert drafter_config(source, target, method="mtp") == drafter_config(
        whole, of_whole, method="mtp"
    )


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--num-layers", "2"], ("--num-layers is 2", "it needs --config")),
        (["--model", "x", "--num-layers", "2"], ("--num-layers is 2", "it needs --config")),
        (["--config", "qwen3-8b", "--num-layers", "0"], ("--num-layers is 0", "allowed")),
        (["--config", "qwen3-8b", "--num-layers", "37"], ("qwen3-8b has 36 layers", "1 to 36")),
    ],
)
def test_refused_numbers_of_layers(
    argv: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", "--device", "cpu", "--quiet", *argv]) != 0
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
