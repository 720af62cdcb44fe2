# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 on a GPU: compressed attention, residual streams, formats, the MTP layer.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepseek_v4_models import V4Spec, make, make_saved, reference_logits
from paceline import LLM
from test_cuda import (
    DRIVERS,
    MAX_MODEL_LEN,
    PROMPTS,
    VOCAB,
    bfloat16_transformers,
    generate,
    gpu,
    open_llm,
    params_of,
    plain_tokens,
)

__all__ = ["bfloat16_transformers", "gpu"]  # fixtures

SMALL = V4Spec(seed=3, dtype="bfloat16", vocab_size=VOCAB, hidden=256)
# Heads, windows and entries as published.
WIDE = replace(
    SMALL, ratios=(0, 4, 128), hca=128, window=128, index_top_k=16, head_dim=512, rope_dim=64,
    index_dim=128,
)  # fmt: skip
SPECS = {
    "small": SMALL,
    "wide": WIDE,
    "formats": replace(SMALL, has_scales=True, o_rank=128),
}


@pytest.fixture(scope="module", params=SPECS)
def model(request: pytest.FixtureRequest) -> Path:
    return make(SPECS[request.param])


def scoring_prompt(seed: int, length: int = 150) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def open_mtp(path: Path, k: int, *, x: dict[str, Any] | None = None, **changes: Any) -> LLM:
    """An LLM on the GPU that drafts with its MTP layer."""
    config = {"method": "mtp", "num_speculative_tokens": k, "x": x or {}}
    settings = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 64 << 20}
    settings |= {"device": "cuda", "show_progress": False} | changes
    return LLM(path, speculative_config=config, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_layer_changes_no_token(model: Path, driver: str, temperature: float) -> None:
    for k in (3, 16):
        with open_mtp(model, k, x={"draft_driver": driver}) as llm:
            assert generate(llm, temperature) == plain_tokens(model, temperature)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 13},
        {"prefill_chunk_size": 16},
        {"prefill_chunk_size": 3},
        {"block_size": 32},
    ],
    ids=str,
)
def test_nothing_else_changes_a_token(model: Path, changes: dict[str, Any]) -> None:
    with open_mtp(model, 3, **changes) as llm:
        assert generate(llm, 0.8) == plain_tokens(model, 0.8)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_drafter_agrees_with_itself(model: Path, driver: str) -> None:
    with open_llm(model, model, x={"draft_driver": driver}) as llm:
        outputs = llm.generate(PROMPTS, params_of(1.0))
    for output in outputs:
        counters = output.metrics.speculative_decoding
        assert counters is not None
        assert counters["num_accepted_draft_tokens"] == counters["num_draft_tokens"] > 0


def test_logits_do_not_depend_on_chunks(model: Path) -> None:
    prompt = scoring_prompt(2)
    with open_llm(model) as llm:
        whole = llm.logits(prompt)
    for chunk in (1, 16, 63):
        with open_llm(model, prefill_chunk_size=chunk) as llm:
            np.testing.assert_array_equal(llm.logits(prompt), whole)


def test_formats_have_the_bits_of_the_values_that_they_stand_for() -> None:
    """fp4 and fp8 with scales of powers of two are exact in bfloat16."""
    prompt = scoring_prompt(4)
    spec = SPECS["formats"]
    with open_llm(make(spec)) as llm:
        seen = llm.logits(prompt)
    with open_llm(make_saved(spec), dtype="bfloat16") as llm:
        np.testing.assert_array_equal(llm.logits(prompt), seen)


@pytest.mark.golden
@pytest.mark.parametrize("which", SPECS)
def test_float32_logits_equal_transformers(which: str) -> None:
    spec = replace(SPECS[which], dtype="float32")
    prompt = scoring_prompt(1)
    expected = reference_logits(spec, prompt)
    with open_llm(make(spec), dtype="float32") as llm:
        seen = llm.logits(prompt)
    assert np.isfinite(seen).all()
    assert np.abs(seen - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.mark.golden
def test_bfloat16_logits_are_as_good_as_those_of_transformers(bfloat16_transformers: Any) -> None:
    """As in `test_cuda`; rows that choose other experts or entries have the largest errors."""
    ours, theirs = [], []
    for seed in range(3, 7):
        spec = replace(SMALL, seed=seed, index_top_k=100)
        prompt = scoring_prompt(seed)
        with open_llm(make(spec), device="cpu", dtype="float32") as llm:
            expected = llm.logits(prompt)
        with open_llm(make(spec)) as llm:
            seen = llm.logits(prompt)
        assert np.isfinite(seen).all()
        ours.append(seen - expected)
        theirs.append(bfloat16_transformers(make_saved(spec), prompt) - expected)
    our_rms, their_rms = (float(np.sqrt(np.mean(np.square(x)))) for x in (ours, theirs))
    print(f"DeepSeek-V4: RMS error {our_rms:.4g}, of transformers {their_rms:.4g}")
    assert our_rms <= 1.25 * their_rms
