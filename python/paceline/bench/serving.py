# SPDX-License-Identifier: Apache-2.0
"""The figures of vLLM's `bench serve`, under the keys of its result files.

Times are those of the caller: a request is sent, and its tokens arrive in events of one iteration
each. An inter-token latency (ITL) is the time between two such events, and a time per output token
(TPOT) that from the first event to the last over the tokens after the first. A first event has one
token, so with drafts the TPOT is about the ITL over the acceptance length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.runs import Run
from paceline.outputs import acceptance


def serving_metrics(run: Run) -> dict[str, float | int]:
    """Sums up the requests of a run.

    Returns:
        "duration" in seconds; "completed" and "failed" requests; "total_input_tokens" and
        "total_output_tokens"; "request_throughput", "output_throughput" and
        "total_token_throughput" per second; and "mean_...", "median_...", "std_..." and "p99_..."
        of "ttft_ms", "tpot_ms", "itl_ms" and "e2el_ms".
    """
    requests = run.requests
    num_input = sum(request.num_prompt_tokens for request in requests)
    num_output = sum(request.num_output_tokens for request in requests)
    series: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for request in requests:
        first = request.token_times_s[0]
        series["ttft"].append(first - request.sent_s)
        if request.num_output_tokens > 1:
            series["tpot"].append((request.ended_s - first) / (request.num_output_tokens - 1))
        series["itl"] += [
            later - earlier for earlier, later in itertools.pairwise(request.token_times_s)
        ]
        series["e2el"].append(request.ended_s - request.sent_s)
    metrics: dict[str, float | int] = {
        "duration": run.duration_s,
        "completed": len(requests),
        "failed": 0,  # a request that fails ends the bench
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(requests) / run.duration_s,
        "output_throughput": num_output / run.duration_s,
        "total_token_throughput": (num_input + num_output) / run.duration_s,
    }
    for name, seconds in series.items():
        metrics |= times_in_ms(name, seconds)
    return metrics


def times_in_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Sums up times under vLLM's keys.

    Args:
        name: "ttft", "tpot", "itl" or "e2el".
        seconds: The times.

    Returns:
        Mean, median, standard deviation and 99th percentile in ms; zeros without a value.
    """
    import numpy as np

    values = np.asarray(seconds or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def draft_metrics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Acceptance, from the engine's counters of a run.

    Args:
        stats: The result of `Executor.stats()`.

    Returns:
        "spec_decode_acceptance_rate" in percent, "spec_decode_acceptance_length",
        "spec_decode_num_drafts" (verify windows with drafts), "spec_decode_draft_tokens",
        "spec_decode_accepted_tokens", and "spec_decode_per_position_acceptance_rates": for each
        position, the share of the windows whose draft there was accepted. Without drafts the rate
        and the length are None, and the list is empty.
    """
    num_windows = stats["num_verify_windows"]
    rates = acceptance(
        num_steps=num_windows,
        num_drafted=stats["num_draft_tokens"],
        num_accepted=stats["num_accepted_tokens"],
        drafted_per_position=stats["drafted_per_position"],
        accepted_per_position=stats["accepted_per_position"],
    )
    share = rates["draft_acceptance_rate"]
    return {
        "spec_decode_acceptance_rate": None if share is None else share * 100,
        "spec_decode_acceptance_length": rates["mean_acceptance_length"],
        "spec_decode_num_drafts": num_windows,
        "spec_decode_draft_tokens": rates["num_draft_tokens"],
        "spec_decode_accepted_tokens": rates["num_accepted_draft_tokens"],
        "spec_decode_per_position_acceptance_rates": [
            accepted / num_windows for accepted in stats["accepted_per_position"] if num_windows
        ],
    }
