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

from cuda_engines import (
    DRIVERS,
    VOCAB,
    Logits,
    bfloat16_transformers,
    check_a_drafter_agrees_with_itself,
    check_bfloat16_logits,
    check_float32_logits,
    check_logits_do_not_depend_on_chunks,
    check_mtp_changes_no_token,
    generate,
    gpu,
    logits_of,
    open_mtp,
    plain_tokens,
    scoring_prompt,
)
from deepseek_v4_models import V4Spec, make, make_saved, reference_logits

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
# Of scored prompts: more than an entry of 128 tokens.
LENGTH = 150


@pytest.fixture(scope="module", params=SPECS)
def model(request: pytest.FixtureRequest) -> Path:
    return make(SPECS[request.param])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_layer_changes_no_token(model: Path, driver: str, temperature: float) -> None:
    check_mtp_changes_no_token(model, driver, temperature)


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
    check_a_drafter_agrees_with_itself(model, driver)


def test_logits_do_not_depend_on_chunks(model: Path) -> None:
    check_logits_do_not_depend_on_chunks(model, scoring_prompt(2, LENGTH))


def test_formats_have_the_bits_of_the_values_that_they_stand_for() -> None:
    """fp4 and fp8 with scales of powers of two are exact in bfloat16."""
    prompt = scoring_prompt(4, LENGTH)
    seen = logits_of(make(SPECS["formats"]), prompt)
    plain = logits_of(make_saved(SPECS["formats"]), prompt, dtype="bfloat16")
    np.testing.assert_array_equal(plain, seen)


@pytest.mark.golden
@pytest.mark.parametrize("which", SPECS)
def test_float32_logits_equal_transformers(which: str) -> None:
    spec = replace(SPECS[which], dtype="float32")
    prompt = scoring_prompt(1, LENGTH)
    check_float32_logits(make(spec), prompt, reference_logits(spec, prompt))


@pytest.mark.golden
def test_bfloat16_logits_are_as_good_as_those_of_transformers(bfloat16_transformers: Any) -> None:
    """As in `test_cuda`; rows that choose other experts or entries have the largest errors."""

    def case(seed: int) -> tuple[Logits, Logits, Logits]:
        spec = replace(SMALL, seed=seed, index_top_k=100)
        path = make(spec)
        prompt = scoring_prompt(seed, LENGTH)
        exact = logits_of(path, prompt, device="cpu", dtype="float32")
        return logits_of(path, prompt), bfloat16_transformers(make_saved(spec), prompt), exact

    check_bfloat16_logits("DeepSeek-V4", map(case, range(3, 7)))
