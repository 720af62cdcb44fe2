# SPDX-License-Identifier: Apache-2.0
"""Block drafters against `block_reference`: every iteration of a run, at temperature 0."""

from __future__ import annotations

from typing import Any

import pytest

from block_golden import CASES, check, check_preempted
from drafter_golden import BLOCK_ENGINES

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_equations(case: str) -> None:
    check(case, CASES[case][1].max_drafts)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][1].confidence])
def test_drafts_end_before_one_with_a_low_confidence(case: str) -> None:
    check(case, CASES[case][1].max_drafts, stops=True)


@pytest.mark.parametrize(("k", "engine"), BLOCK_ENGINES)
@pytest.mark.parametrize(
    "case", ["deepseek", "speculators, rnn, first row predicts nothing", "dflash2"]
)
def test_drafts_do_not_depend_on_the_engine(case: str, k: int, engine: dict[str, Any]) -> None:
    check(case, k, **engine)


@pytest.mark.parametrize(
    ("k", "engine"),
    [
        (1, {"prefill_chunk_size": 1}),
        (3, {"prefill_chunk_size": 7, "block_size": 5, "draft_driver": "replay"}),
        (5, {"max_num_seqs": 3, "kv_cache_bytes": 8 * 122_880, "draft_driver": "eager"}),
    ],
)
def test_drafts_of_gemma4_do_not_depend_on_the_engine(k: int, engine: dict[str, Any]) -> None:
    check("gemma4", k, **engine)


@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ("deepseek", False),
        ("dflash2", False),
        ("speculators, rnn", False),
        ("speculators, rnn, first row predicts nothing", False),
        ("deepseek, rnn, confidence of hidden states", True),
    ],
)
def test_drafts_of_preempted_sequences(case: str, stops: bool) -> None:
    check_preempted(case, 4, stops=stops, max_num_seqs=4, kv_cache_bytes=8 << 15)
