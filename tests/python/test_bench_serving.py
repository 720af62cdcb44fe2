# SPDX-License-Identifier: Apache-2.0
"""The figures of vLLM's `bench serve`, against values computed by hand."""

from __future__ import annotations

import pytest

from paceline.bench.runs import RequestTimes
from paceline.bench.serving import draft_metrics, serving_metrics


def test_statistics_of_three_requests() -> None:
    metrics = serving_metrics(
        [
            # Tokens at 0.5, 0.75 (two) and 1.25 s (three): TPOT 0.75 / 5.
            RequestTimes(10, 0.0, [0.5, 0.75, 1.25], [1, 2, 3], 1.25),
            # Sent at 0.25 s: TTFT 0.75, TPOT 1.0 / 4. Its last event has no token.
            RequestTimes(20, 0.25, [1.0, 1.5], [1, 4], 2.0),
            # One token: no ITL and no TPOT.
            RequestTimes(30, 1.0, [1.25], [1], 1.25),
        ],
        duration_s=2.0,
    )
    p99 = {
        # Linear between the last two of n sorted values, at position 0.99 (n - 1).
        "ttft": 500 + 0.98 * 250,
        "tpot": 150 + 0.99 * 100,
        "itl": 500,
        "e2el": 1250 + 0.98 * 500,
    }
    assert metrics == {
        "duration": 2.0,
        "completed": 3,
        "failed": 0,
        "total_input_tokens": 60,
        "total_output_tokens": 12,
        "request_throughput": 1.5,
        "output_throughput": 6.0,
        "total_token_throughput": 36.0,
        "mean_ttft_ms": 500,
        "median_ttft_ms": 500,
        "std_ttft_ms": pytest.approx(250 * (2 / 3) ** 0.5),  # 250, 500 and 750 ms
        "p99_ttft_ms": pytest.approx(p99["ttft"]),
        "mean_tpot_ms": 200,
        "median_tpot_ms": 200,
        "std_tpot_ms": pytest.approx(50),
        "p99_tpot_ms": pytest.approx(p99["tpot"]),
        "mean_itl_ms": pytest.approx(1250 / 3),  # 250, 500 and 500 ms
        "median_itl_ms": 500,
        "std_itl_ms": pytest.approx(250 * 2**0.5 / 3),
        "p99_itl_ms": pytest.approx(p99["itl"]),
        "mean_e2el_ms": pytest.approx(3250 / 3),  # 1250, 1750 and 250 ms
        "median_e2el_ms": 1250,
        "std_e2el_ms": pytest.approx(623.6095645),
        "p99_e2el_ms": pytest.approx(p99["e2el"]),
    }


def test_statistics_without_later_tokens() -> None:
    metrics = serving_metrics([RequestTimes(3, 0.0, [0.5], [1], 0.5)], duration_s=0.5)
    assert metrics["mean_tpot_ms"] == metrics["p99_itl_ms"] == metrics["std_ttft_ms"] == 0
    assert metrics["p99_e2el_ms"] == 500


def test_acceptance() -> None:
    # Ten windows of three drafts; the last one has two. 6 + 3 + 1 drafts are accepted.
    stats = {
        "num_verify_windows": 10,
        "num_draft_tokens": 29,
        "num_accepted_tokens": 10,
        "drafted_per_position": [10, 10, 9],
        "accepted_per_position": [6, 3, 1],
    }
    assert draft_metrics(stats) == {
        "spec_decode_acceptance_rate": pytest.approx(1000 / 29),
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 29,
        "spec_decode_accepted_tokens": 10,
        "spec_decode_per_position_acceptance_rates": [0.6, 0.3, 0.1],
    }
    none = dict.fromkeys(("num_verify_windows", "num_draft_tokens", "num_accepted_tokens"), 0)
    lists = {key: [0, 0, 0] for key in ("drafted_per_position", "accepted_per_position")}
    assert list(draft_metrics(none | lists).values()) == [None, None, 0, 0, 0, []]
