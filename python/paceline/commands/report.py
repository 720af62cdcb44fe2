# SPDX-License-Identifier: Apache-2.0
"""The report of a request: lines of text, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.outputs import RequestMetrics, RequestOutput

# Of at least one iteration after the first, with k = 16.
_LEAST_TOKENS: Final = 18


def measured_rate(metrics: RequestMetrics) -> float | None:
    """Tokens per second after the first token; None where too few came for a rate: those of one
    iteration arrive together."""
    rate = metrics.tokens_per_second
    return rate if rate is not None and metrics.num_output_tokens >= _LEAST_TOKENS else None


def report_lines(output: RequestOutput, plain: RequestOutput | None = None) -> list[str]:
    """Formats the metrics of a request.

    Args:
        output: The request.
        plain: The same request with plain decoding, if it ran.

    Returns:
        Lines of text.
    """
    metrics = output.metrics
    ends = ", ".join(
        f"{completion.finish_reason}"
        + ("" if completion.stop_reason is None else f" ({completion.stop_reason!r})")
        for completion in output.outputs
    )
    first = metrics.time_to_first_token_ms
    lines = [
        f"{metrics.num_output_tokens} tokens in {metrics.total_time_ms / 1e3:.3f} s"
        + (f", the first after {first:.1f} ms" if first is not None else "")
        + f"; ended by {ends}",
        f"{_rate(measured_rate(metrics))} after the first token",
    ]
    speculative = metrics.speculative_decoding
    if speculative is not None:
        k = speculative["num_spec_tokens"]
        if speculative["mean_acceptance_length"] is None:
            lines.append("no drafts were verified")
        else:
            lines.append(_acceptance([speculative]))
            if len(speculative["drafters"]) > 1:
                lines.append(
                    "; ".join(
                        f"{method}: {of['num_accepted_draft_tokens']} of {of['num_draft_tokens']} "
                        "drafts accepted"
                        for method, of in speculative["drafters"].items()
                    )
                )
            positions = "  ".join(
                "-" if share is None else f"{100 * share:.0f} %"
                for share in speculative["acceptance_per_position"]
            )
            lines.append(f"acceptance at draft position 1 to {k}: {positions}")
    if plain is not None:
        same = "the same output" if plain.outputs == output.outputs else "a DIFFERENT output"
        lines.append(_comparison(measured_rate(metrics), measured_rate(plain.metrics), same))
    return lines


def _acceptance(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The acceptance of requests of which at least one had drafts."""
    num_steps = sum(one["num_spec_steps"] for one in metrics)
    accepted = sum(one["num_accepted_draft_tokens"] for one in metrics)
    drafted = sum(one["num_draft_tokens"] for one in metrics)
    return (
        f"acceptance length {1 + accepted / num_steps:.2f} of at most "
        f"{metrics[0]['num_spec_tokens'] + 1}; {accepted} of {drafted} drafts accepted "
        f"({100 * accepted / drafted:.0f} %)"
    )


def _comparison(rate: float | None, plain_rate: float | None, same: str) -> str:
    """Plain decoding beside speculation."""
    speed = ""
    if rate and plain_rate:
        speed = f"; speculation is {rate / plain_rate:.2f} times as fast"
    return f"plain decoding: {_rate(plain_rate)}, {same}{speed}"


def _total_rate(num_tokens: int, seconds: float) -> float | None:
    """Tokens per second of several requests; None as in `measured_rate`."""
    return num_tokens / seconds if seconds and num_tokens >= _LEAST_TOKENS else None


def total_lines(outputs: Sequence[RequestOutput], plains: Sequence[RequestOutput]) -> list[str]:
    """Formats the metrics of several requests that were queued together.

    Args:
        outputs: The requests.
        plains: The same requests with plain decoding; empty if they did not run.

    Returns:
        Lines of text.
    """
    num_tokens, seconds = _total(outputs)
    lines = [
        f"{len(outputs)} prompts, {num_tokens} tokens in {seconds:.3f} s: "
        f"{_rate(_total_rate(num_tokens, seconds))}"
    ]
    speculative = [
        metrics
        for output in outputs
        if (metrics := output.metrics.speculative_decoding) is not None
    ]
    if any(metrics["num_spec_steps"] for metrics in speculative):
        lines.append(_acceptance(speculative))
    if plains:
        num_same = sum(
            plain.outputs == output.outputs for output, plain in zip(outputs, plains, strict=True)
        )
        num_plain, plain_seconds = _total(plains)
        rate, plain_rate = _total_rate(num_tokens, seconds), _total_rate(num_plain, plain_seconds)
        same = (
            "the same outputs"
            if num_same == len(outputs)
            else f"DIFFERENT outputs for {len(outputs) - num_same} prompts"
        )
        lines.append(_comparison(rate, plain_rate, same))
    return lines


def _total(outputs: Sequence[RequestOutput]) -> tuple[int, float]:
    """Tokens of all requests, and seconds until the last one ended."""
    num_tokens = sum(output.metrics.num_output_tokens for output in outputs)
    return num_tokens, max(output.metrics.total_time_ms for output in outputs) / 1e3


def _rate(tokens_per_second: float | None) -> str:
    return "- tokens/s" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def _metrics(output: RequestOutput) -> dict[str, Any]:
    return output.metrics.to_dict() | {"tokens_per_second": measured_rate(output.metrics)}


def json_report(output: RequestOutput, plain: RequestOutput | None) -> dict[str, Any]:
    """Returns a request as plain JSON types.

    Args:
        output: The request.
        plain: The same request with plain decoding, if it ran.
    """
    from paceline.logprobs import logprobs_as_json, prompt_logprobs_as_json

    first, *others = (
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **logprobs_as_json(completion),
        }
        for completion in output.outputs
    )
    report: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **first,
        **prompt_logprobs_as_json(output),
        "metrics": _metrics(output),
    }
    if others:
        report["others"] = others
    if plain is not None:
        rate, plain_rate = measured_rate(output.metrics), measured_rate(plain.metrics)
        report["plain"] = {
            "is_same": plain.outputs == output.outputs,
            "metrics": _metrics(plain),
            "speedup": rate / plain_rate if rate and plain_rate else None,
        }
    return report
