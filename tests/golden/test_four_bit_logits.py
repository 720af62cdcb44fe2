# SPDX-License-Identifier: Apache-2.0
"""Models of four bits against transformers, with the dequantised weights; and drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from int4_models import INT4_METHODS
from logits_golden import assert_close, logits_of
from paceline import LLM, SamplingParams
from quantized_models import FP4_METHODS
from tiny_models import TinySpec, make, plain_copy, reference_logits

pytestmark = pytest.mark.golden

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
}
PROMPT = [5, 17, 3, 99, 64, 21, 8, 77, 40, 2, 63, 31, 12]
PROMPTS = [[5, 17, 3, 99], [64, 21, 8, 77, 40, 2], [63], [31, 12, 9, 55, 70]]


IN_ORDER = [*(name for name, m in INT4_METHODS.items() if not m.has_order), *FP4_METHODS]


def spec_of(family: str, method: str, **changes: Any) -> TinySpec:
    sizes = SIZES | ({"expert_size": 128} if family == "qwen3_moe" else {})
    return TinySpec(family, quantization=method, **(sizes | changes))


@pytest.mark.parametrize("method", [*INT4_METHODS, *FP4_METHODS])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_logits_are_those_of_the_dequantised_model(family: str, method: str) -> None:
    path = make(spec_of(family, method))
    seen = logits_of(path, PROMPT, dtype="float32")
    assert_close(seen, reference_logits(path, PROMPT))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", IN_ORDER)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_bits_are_those_of_the_dequantised_weights(family: str, method: str, dtype: str) -> None:
    """In one row and in many, whose products take different paths."""
    path = make(spec_of(family, method, dtype="bfloat16"))
    plain = plain_copy(path, "bfloat16")
    for prompt in (PROMPT, PROMPT[:1]):
        np.testing.assert_array_equal(
            logits_of(path, prompt, dtype=dtype), logits_of(plain, prompt, dtype=dtype)
        )


@pytest.mark.parametrize("method", ["gptq_order", "gptq_sym_order", "w4a16_order"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_few_rows_of_ordered_inputs_have_the_bits_of_many(family: str, method: str) -> None:
    """In bfloat16, where few rows and many take different paths."""
    path = make(spec_of(family, method, dtype="bfloat16"))
    many = logits_of(path, PROMPT, dtype="bfloat16")
    assert np.isfinite(many).all()
    for num_rows in (1, 2, 6, 7):
        few = logits_of(path, PROMPT[:num_rows], dtype="bfloat16")
        np.testing.assert_array_equal(few, many[:num_rows])


def generate(path: Path, draft: Path | None, temperature: float) -> list[list[int]]:
    config = None
    if draft is not None:
        config = {"model": str(draft), "num_speculative_tokens": 3}
    with LLM(
        path,
        device="cpu",
        speculative_config=config,
        max_num_seqs=2,
        kv_cache_bytes=24 << 20,
        show_progress=False,
    ) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "method", "draft_family", "draft_method"),
    [
        ("qwen3", "gptq_order", "qwen3", "awq"),
        ("qwen3_moe", "w4a16_asym", "llama", "w4a16"),
        ("qwen3", "gptq", "llama", None),
        ("qwen3_moe", "mxfp4_packed", "llama", "mxfp4_packed"),
        ("qwen3", "nvfp4_packed", "qwen3", "modelopt"),
    ],
)
def test_drafters_change_no_token(
    family: str,
    method: str,
    draft_family: str,
    draft_method: str | None,
    dtype: str,
    temperature: float,
) -> None:
    path = make(spec_of(family, method, dtype=dtype))
    changes: dict[str, Any] = {"quantization": draft_method, "dtype": dtype}
    draft = make(TinySpec(draft_family, seed=5, **(SIZES | changes)))
    plain = generate(path, None, temperature)
    assert generate(path, draft, temperature) == plain
    # The target as its own drafter, whose drafts are accepted.
    assert generate(path, path, temperature) == plain


def test_an_int4_model_that_drafts_for_itself_is_always_right() -> None:
    path = make(spec_of("qwen3", "w4a16"))
    with LLM(
        path,
        device="cpu",
        speculative_config={"model": str(path), "num_speculative_tokens": 3},
        max_num_seqs=2,
        kv_cache_bytes=24 << 20,
        show_progress=False,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
        assert llm.stats()["speculative_decoding"]["draft_acceptance_rate"] == 1.0
