# SPDX-License-Identifier: Apache-2.0
"""Sampled speculative output == plain output with trained models, where drafts are often accepted.

200 prompts x k 1 to 8 x three drafters x five temperatures x random mixes of top-k, top-p, min-p,
penalties and bias x batch 1 and 32 x size of the KV pool. Level 1 (CI) gives each prompt one of the
temperatures, and each drafter every second k with one batch; PACELINE_TEST_LEVEL=2 (nightly) has
all of these cells, and 3 each prompt at all temperatures. PACELINE_SEED replaces the seed; failures
print it.
"""

from __future__ import annotations

import os

import pytest

from sampling_jobs import BATCHES, DRAFTERS, Seen, check_cell

SEED = int(os.environ.get("PACELINE_SEED", "20261121"))
LEVEL = int(os.environ.get("PACELINE_TEST_LEVEL", "1"))

CELLS = [
    (drafter, k, batch)
    for i, drafter in enumerate(DRAFTERS)
    for k in range(1, 9)
    for batch in BATCHES
    if LEVEL >= 2 or (k % 2 == i % 2 and batch == BATCHES[(k // 2 + i + 1) % 2])
]

totals = Seen()


@pytest.mark.parametrize(("drafter", "k", "batch"), CELLS)
def test_speculative_output_is_plain_output(drafter: str, k: int, batch: int) -> None:
    seen = check_cell(
        drafter, k, batch, device="cpu", seed=SEED, is_full=LEVEL >= 3, is_tight=k % 2 == 0
    )
    assert 0 < seen.accepted < seen.drafted
    totals.preemptions += seen.preemptions


def test_sequences_were_preempted() -> None:
    """Runs last. If no other test has run, it runs one cell itself."""
    if totals.preemptions == 0:
        totals.preemptions = check_cell(
            "draft_model", 4, max(BATCHES), device="cpu", seed=SEED, is_full=False, is_tight=True
        ).preemptions
    assert totals.preemptions > 0
