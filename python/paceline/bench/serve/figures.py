# SPDX-License-Identifier: Apache-2.0
"""The figures of vLLM's `bench serve`: the keys of its result files, and its table."""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.bench.serve.client import Answer
from paceline.bench.serve.load import Load
from paceline.bench.serving import times_in_ms

#: Names of the times: key, short name and title.
_TIMES: Final = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
GOODPUT_NAMES: Final = ("ttft", "tpot", "e2el")
_WIDTH: Final = 50


def result_of(
    answers: Sequence[Answer],
    duration_s: float,
    load: Load,
    goals_ms: Mapping[str, float],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Sums up a run.

    Args:
        answers: Of all requests.
        duration_s: What all took.
        load: How requests arrived.
        goals_ms: By name of a time: its largest value in a good request; empty = no goodput.
        facts: What else the result has.

    Returns:
        The dict that vLLM writes as JSON.
    """
    good = [answer for answer in answers if not answer.error]
    num_input = sum(answer.num_prompt_tokens for answer in good)
    num_output = sum(answer.num_output_tokens for answer in good)
    peak_tokens, peak_requests = _peaks(good)
    is_unlimited = math.isinf(load.request_rate)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        **facts,
        "num_prompts": len(answers),
        "request_rate": "inf" if is_unlimited else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    if goals_ms:
        met = sum(_meets(answer, goals_ms) for answer in good)
        result["request_goodput"] = met / duration_s
    for name, seconds in _series(good).items():
        result |= times_in_ms(name, seconds)
    return result


def details_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns what `--save-detailed` adds: the times and texts of each request."""
    return {
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [0.0 if answer.error else answer.ttft_s for answer in answers],
        "itls": [_gaps(answer) for answer in answers],
        "start_times": [answer.started_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def draft_figures(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, Any]:
    """Acceptance during a run, from a server's counters; empty if it did not speculate."""
    if before is None or after is None:
        return {}
    rise = {key: value - before.get(key, 0.0) for key, value in after.items()}
    drafts, drafted = rise["num_drafts"], rise.get("num_draft_tokens", 0.0)
    if drafts <= 0 or drafted <= 0:
        return {}
    accepted = rise.get("num_accepted_tokens", 0.0)
    per_position: dict[int, float] = {}
    for key, value in rise.items():
        name, _, position = key.partition("/")
        if name == "num_accepted_tokens_per_pos" and position.isdigit():
            per_position[int(position)] = value / drafts
    return {
        "spec_decode_acceptance_rate": accepted / drafted * 100,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            rate for _, rate in sorted(per_position.items())
        ],
    }


def table(result: Mapping[str, Any]) -> str:
    """Formats a result as vLLM does."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]

    def row(name: str, value: float | None) -> None:
        if value is not None:
            shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
            lines.append(f"{name:<40} {shown}")

    row("Successful requests:", result["completed"])
    row("Failed requests:", result["failed"])
    row("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        row("Request rate configured (RPS):", float(result["request_rate"]))
    row("Benchmark duration (s):", result["duration"])
    row("Total input tokens:", result["total_input_tokens"])
    row("Total generated tokens:", result["total_output_tokens"])
    row("Request throughput (req/s):", result["request_throughput"])
    row("Request goodput (req/s):", result["request_goodput"])
    row("Output token throughput (tok/s):", result["output_throughput"])
    row("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"]))
    row("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    row("Total token throughput (tok/s):", result["total_token_throughput"])
    for key, short, title in _TIMES:
        lines.append(title.center(_WIDTH, "-"))
        for statistic in ("mean", "median", "p99"):
            shown = statistic.capitalize()
            row(f"{shown} {short} (ms):", float(result[f"{statistic}_{key}_ms"]))
    if "spec_decode_acceptance_rate" in result:
        lines.append("Speculative Decoding".center(_WIDTH, "-"))
        row("Acceptance rate (%):", result["spec_decode_acceptance_rate"])
        row("Acceptance length:", result["spec_decode_acceptance_length"])
        row("Drafts:", result["spec_decode_num_drafts"])
        row("Draft tokens:", result["spec_decode_draft_tokens"])
        row("Accepted tokens:", result["spec_decode_accepted_tokens"])
        lines.append("Per-position acceptance (%):")
        for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            row(f"  Position {position}:", rate * 100)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _gaps(answer: Answer) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(answer.token_times_s)]


def _series(answers: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers if answer.tpot_s is not None],
        "itl": [gap for answer in answers for gap in _gaps(answer)],
        "e2el": [answer.latency_s for answer in answers],
    }


def _meets(answer: Answer, goals_ms: Mapping[str, float]) -> bool:
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.latency_s}
    return all(times[name] * 1e3 <= goal for name, goal in goals_ms.items())


def _peaks(answers: Sequence[Answer]) -> tuple[float, int]:
    """The most tokens in a second, and the most requests open in one.

    The tokens of a request count evenly over its events, which need not have one each.
    """
    if not answers:
        return 0.0, 0
    start = min(answer.started_s for answer in answers)
    tokens: collections.Counter[int] = collections.Counter()
    open_in: collections.Counter[int] = collections.Counter()
    for answer in answers:
        share = answer.num_output_tokens / len(answer.token_times_s)
        for moment in answer.token_times_s:
            tokens[int(moment - start)] += share  # type: ignore[assignment]
        first, last = int(answer.started_s - start), int(answer.token_times_s[-1] - start)
        for second in range(first, last + 1):
            open_in[second] += 1
    return float(max(tokens.values())), max(open_in.values())
