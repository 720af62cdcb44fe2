# SPDX-License-Identifier: Apache-2.0
"""The figures of vLLM's `bench serve`, under the keys of its result files.

Times are those of the caller: a request is sent, and its tokens arrive in events of one iteration
each. An inter-token latency (ITL) is the time between two such events, and a time per output token
(TPOT) that from the first event to the last over the tokens after the first. A first event has one
token, so with drafts the TPOT is about the ITL over the acceptance length.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Names of the times that a goodput may bound.
GOODPUT_NAMES: Final = ("ttft", "tpot", "e2el")


class TimedRequest(abc.ABC):
    """A request that has ended, with the times of its events.

    Attributes:
        sent_s: When it was sent.
        token_times_s: When each event with tokens came.
        num_prompt_tokens: Tokens of the prompt.
    """

    sent_s: float
    token_times_s: list[float]
    num_prompt_tokens: int

    @property
    @abc.abstractmethod
    def num_output_tokens(self) -> int:
        """Tokens of the output."""

    @property
    @abc.abstractmethod
    def ended_s(self) -> float:
        """When the last event came."""

    @property
    def ttft_s(self) -> float:
        """Time to the first event."""
        return self.token_times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None without such tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.ended_s - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between events."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]

    @property
    def e2el_s(self) -> float:
        """Time to the last event."""
        return self.ended_s - self.sent_s


def serving_metrics(
    requests: Sequence[TimedRequest], duration_s: float, num_failed: int = 0
) -> dict[str, float | int]:
    """Sums up the requests of a run.

    Args:
        requests: Those that did not fail.
        duration_s: Seconds that all took.
        num_failed: The number of others.

    Returns:
        "duration" in seconds; "completed" and "failed" requests; "total_input_tokens" and
        "total_output_tokens"; "request_throughput", "output_throughput" and
        "total_token_throughput" per second; and "mean_...", "median_...", "std_..." and "p99_..."
        of "ttft_ms", "tpot_ms", "itl_ms" and "e2el_ms".
    """
    num_input = sum(request.num_prompt_tokens for request in requests)
    num_output = sum(request.num_output_tokens for request in requests)
    series = {
        "ttft": [request.ttft_s for request in requests],
        "tpot": [request.tpot_s for request in requests if request.tpot_s is not None],
        "itl": [gap for request in requests for gap in request.itls_s],
        "e2el": [request.e2el_s for request in requests],
    }
    metrics: dict[str, float | int] = {
        "duration": duration_s,
        "completed": len(requests),
        "failed": num_failed,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(requests) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    for name, seconds in series.items():
        metrics |= _times_in_ms(name, seconds)
    return metrics


def _times_in_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and 99th percentile in ms; zeros without a value."""
    import numpy as np

    values = np.asarray(seconds or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


def draft_metrics(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Acceptance, from the counters of a run.

    Args:
        stats: As `Executor.stats()` has them: "num_verify_windows", "num_draft_tokens",
            "num_accepted_tokens" and "accepted_per_position".

    Returns:
        "spec_decode_acceptance_rate" in percent, "spec_decode_acceptance_length",
        "spec_decode_num_drafts" (verify windows with drafts), "spec_decode_draft_tokens",
        "spec_decode_accepted_tokens", and "spec_decode_per_position_acceptance_rates": for each
        position, the share of the windows whose draft there was accepted. Without drafts the rate
        and the length are None, and the list is empty.
    """
    num_windows, num_drafted = stats["num_verify_windows"], stats["num_draft_tokens"]
    num_accepted = stats["num_accepted_tokens"]
    return {
        "spec_decode_acceptance_rate": num_accepted / num_drafted * 100 if num_drafted else None,
        "spec_decode_acceptance_length": 1 + num_accepted / num_windows if num_windows else None,
        "spec_decode_num_drafts": num_windows,
        "spec_decode_draft_tokens": num_drafted,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_per_position_acceptance_rates": [
            accepted / num_windows for accepted in stats["accepted_per_position"] if num_windows
        ],
    }
