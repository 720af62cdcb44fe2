# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of four bits on a GPU: GPTQ, AWQ, W4A16, mxfp4 and nvfp4, with and without experts,
and drafters.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from cuda_engines import (
    DRIVERS,
    check_a_drafter_agrees_with_itself,
    check_float32_logits,
    check_logits_do_not_depend_on_chunks,
    generate,
    gpu,
    logits_of,
    open_llm,
    plain_tokens,
    scoring_prompt,
    spec,
)
from int4_models import INT4_METHODS
from paceline.bench import models as bench_models
from paceline.loader import load_dummy
from quantized_models import FP4_METHODS

__all__ = ["gpu"]  # a fixture
IN_ORDER = [name for name, method in INT4_METHODS.items() if not method.has_order]
# Of every layout one with all that it may have.
SOME = ("gptq_order", "awq", "w4a16_128", "nvfp4_packed")


def int4(method: str, family: str = "qwen3", **changes: Any) -> Path:
    sizes = {"expert_size": 128} if family == "qwen3_moe" else {}
    return tiny_models.make(replace(spec(family), quantization=method, **(sizes | changes)))


# ---- logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*IN_ORDER, *FP4_METHODS])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_bits_are_those_of_the_dequantised_weights(family: str, method: str) -> None:
    """In one row and in many, whose products are those of different kernels."""
    path = int4(method, family)
    plain = tiny_models.plain_copy(path, "bfloat16")
    for length in (1, 12, 120):
        prompt = scoring_prompt(2, length)
        np.testing.assert_array_equal(logits_of(path, prompt), logits_of(plain, prompt))


@pytest.mark.parametrize("method", [*INT4_METHODS, *FP4_METHODS])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_float32_logits_are_those_of_the_cpu(family: str, method: str) -> None:
    path = int4(method, family, dtype="float32")
    prompt = scoring_prompt(3, 40)
    check_float32_logits(path, prompt, logits_of(path, prompt, device="cpu", dtype="float32"))


@pytest.mark.parametrize("method", [name for name in INT4_METHODS if name not in IN_ORDER])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_order_of_inputs_adds_no_error(family: str, method: str) -> None:
    """Other orders of sums: both are compared with float32 arithmetic on the CPU."""
    path = int4(method, family)
    plain = tiny_models.plain_copy(path, "bfloat16")
    prompt = scoring_prompt(4)
    exact = logits_of(path, prompt, device="cpu", dtype="float32")
    seen, other = (np.square(logits_of(p, prompt) - exact).mean() for p in (path, plain))
    assert seen <= 1.5 * other


@pytest.mark.parametrize("method", SOME)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_do_not_depend_on_chunks(family: str, method: str) -> None:
    check_logits_do_not_depend_on_chunks(int4(method, family), scoring_prompt(2))


# ---- generating --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("family", "method", "draft_family", "draft_method"),
    [
        ("qwen3", "gptq_order", "qwen3", "awq"),
        ("qwen3_moe", "w4a16_asym", "llama", "w4a16"),
        ("qwen3", "gptq", "llama", None),
        ("llama", "awq_row", "qwen3_moe", "gptq_order"),
        ("qwen3_moe", "mxfp4_packed", "llama", "mxfp4_packed"),
        ("qwen3", "nvfp4_packed", "llama", "modelopt"),
        ("qwen3_moe", "modelopt", "qwen3_moe", "nvfp4_packed"),
    ],
)
def test_drafters_change_no_token(
    family: str, method: str, draft_family: str, draft_method: str | None, temperature: float
) -> None:
    target = int4(method, family)
    draft = (
        tiny_models.make(spec(draft_family, seed=5))
        if draft_method is None
        else int4(draft_method, draft_family, seed=5)
    )
    with open_llm(target, draft) as llm:
        assert generate(llm, temperature) == plain_tokens(target, temperature)


@pytest.mark.parametrize("method", SOME)
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_drafter_agrees_with_itself(method: str, driver: str) -> None:
    check_a_drafter_agrees_with_itself(int4(method), driver)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "scale_bytes"), [("qwen3-8b-int4", 3), ("qwen3-8b-nvfp4", 32)])
def test_dummy_weights_of_the_shape_of_qwen3_8b_take_half_a_byte_each(
    tmp_path: Path, name: str, scale_bytes: int
) -> None:
    """Two layers: elements, and for 128 of them 2 bytes of scales and 1 of zero points, or 32."""
    config = bench_models.named_config(name) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_dummy(tmp_path, device="cuda").model
    matrices = 2 * (6144 * 4096 + 4096 * 4096 + 24576 * 4096 + 4096 * 12288)
    others = 2 * 2 * 151936 * 4096
    expected = matrices // 2 + matrices // 128 * scale_bytes + others
    assert expected <= model.weight_bytes <= expected + (1 << 20)
