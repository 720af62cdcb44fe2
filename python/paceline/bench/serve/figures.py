# SPDX-License-Identifier: Apache-2.0
"""The figures of vLLM's `bench serve`: the keys of its result files, and its table."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from paceline.bench.report import TABLES
from paceline.bench.serve.client import Answer
from paceline.bench.serve.load import Load
from paceline.bench.serving import draft_metrics, serving_metrics

# Names of the times: key, short name and title.
_TIMES: Final = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
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
    peak_tokens, peak_requests = _peaks(good)
    is_unlimited = math.isinf(load.request_rate)
    met = sum(_meets(answer, goals_ms) for answer in good)
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        **facts,
        "num_prompts": len(answers),
        "request_rate": "inf" if is_unlimited else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "request_goodput": met / duration_s if goals_ms else None,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        **serving_metrics(good, duration_s, num_failed=len(answers) - len(good)),
    }


def details_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns what `--save-detailed` adds: the times and texts of each request."""
    return {
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [0.0 if answer.error else answer.ttft_s for answer in answers],
        "itls": [answer.itls_s for answer in answers],
        "start_times": [answer.sent_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def draft_figures(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, Any]:
    """Acceptance during a run, from a server's counters; empty if it did not speculate."""
    if before is None or after is None:
        return {}
    rise = {key: int(value - before.get(key, 0.0)) for key, value in after.items()}
    if rise["num_drafts"] <= 0 or rise.get("num_draft_tokens", 0) <= 0:
        return {}
    accepted = {
        int(position): value
        for (name, _, position), value in ((key.partition("/"), n) for key, n in rise.items())
        if name == "num_accepted_tokens_per_pos" and position.isdigit()
    }
    return draft_metrics(
        {
            "num_verify_windows": rise["num_drafts"],
            "num_draft_tokens": rise["num_draft_tokens"],
            "num_accepted_tokens": rise.get("num_accepted_tokens", 0),
            "accepted_per_position": [value for _, value in sorted(accepted.items())],
        }
    )


def table(result: Mapping[str, Any]) -> str:
    """Formats a result as vLLM does."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    rate, peak = result["request_rate"], float(result["max_concurrent_requests"])
    shown = {"request_rate": None if rate == "inf" else rate, "max_concurrent_requests": peak}
    lines += _lines({**result, **shown}, TABLES["serve"]["load"])
    for key, short, title in _TIMES:
        lines.append(title.center(_WIDTH, "-"))
        rows = [(name, f"{name}_{key}_ms") for name in ("mean", "median", "p99")]
        lines += _lines(result, [(f"{name.capitalize()} {short} (ms):", key) for name, key in rows])
    if "spec_decode_acceptance_rate" in result:
        lines.append("Speculative Decoding".center(_WIDTH, "-"))
        lines += [*_lines(result, TABLES["serve"]["drafts"]), "Per-position acceptance (%):"]
        rates = result["spec_decode_per_position_acceptance_rates"]
        lines += [_line(f"  Position {at}:", rate * 100) for at, rate in enumerate(rates)]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _lines(result: Mapping[str, Any], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of figures that exist."""
    return [_line(name, result[key]) for name, key in rows if result[key] is not None]


def _line(name: str, value: float) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{name:<40} {shown}"


def _meets(answer: Answer, goals_ms: Mapping[str, float]) -> bool:
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2el_s}
    return all(times[name] * 1e3 <= goal for name, goal in goals_ms.items())


def _peaks(answers: Sequence[Answer]) -> tuple[float, int]:
    """The most tokens in a second, and the most requests open in one.

    The tokens of a request count evenly over its events, which need not have one each.
    """
    if not answers:
        return 0.0, 0
    start = min(answer.sent_s for answer in answers)
    tokens: collections.Counter[int] = collections.Counter()
    open_in: collections.Counter[int] = collections.Counter()
    for answer in answers:
        share = answer.num_output_tokens / len(answer.token_times_s)
        for moment in answer.token_times_s:
            tokens[int(moment - start)] += share  # type: ignore[assignment]
        first, last = int(answer.sent_s - start), int(answer.ended_s - start)
        for second in range(first, last + 1):
            open_in[second] += 1
    return float(max(tokens.values())), max(open_in.values())
