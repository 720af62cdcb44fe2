# SPDX-License-Identifier: Apache-2.0
"""Logprobs for users: converts the engine's entries to dicts, JSON and lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from paceline.loader.tokenizer import TokenizerInfo
    from paceline.sampling import SamplingParams

# The engine's logprobs at one position: (token id, logprob, rank), the actual token first.
Entries = Sequence[tuple[int, float, int]]


def check_logprobs(params: SamplingParams, max_logprobs: int) -> None:
    """Checks the logprobs of a request against the LLM's `max_logprobs`.

    Raises:
        ValueError: The request asks for more.
    """
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is None or (max_logprobs > 0 and value <= max_logprobs):
            continue
        allowed = "None" if max_logprobs == 0 else f"None, or 0 to {max_logprobs}"
        raise ValueError(
            f"{name} is {value}; allowed: {allowed}, because the LLM was built with "
            f"max_logprobs={max_logprobs}"
        )


def needed_max_logprobs(params: SamplingParams) -> int:
    """Returns the smallest `max_logprobs` with which an LLM accepts a request."""
    asked = [n for n in (params.logprobs, params.prompt_logprobs) if n is not None]
    return max(1, *asked) if asked else 0


class LogprobReader:
    """Converts entries to dicts. It decodes each token only once. Not thread-safe."""

    def __init__(self, tokenizer: TokenizerInfo | None) -> None:
        """Starts without decoded tokens.

        Args:
            tokenizer: Decodes tokens; None if tokens have no text.
        """
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def read(self, positions: Iterable[Entries]) -> list[TokenLogprobs]:
        """Returns one dict per position."""
        return [
            {
                token: Logprob(logprob, rank, self._text(token))
                # The actual token may also be among the best, with the same values.
                for token, logprob, rank in entries
            }
            for entries in positions
        ]

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._texts[token] = text
        return text


def logprobs_as_json(completion: CompletionOutput) -> dict[str, Any]:
    """Converts the logprobs of a completion to plain JSON types.

    Returns:
        A dict with the "cumulative_logprob", and under "logprobs" one list per token. The list has
        dicts with "token_id", "token", "logprob" and "rank", in the order of
        `CompletionOutput.logprobs`. Empty if the request has no logprobs.
    """
    if completion.logprobs is None:
        return {}
    return {
        "logprobs": [_as_json(logprobs) for logprobs in completion.logprobs],
        "cumulative_logprob": completion.cumulative_logprob,
    }


def prompt_logprobs_as_json(output: RequestOutput) -> dict[str, Any]:
    """Converts the logprobs of a prompt likewise.

    Returns:
        A dict with one list per token under "prompt_logprobs", None for the first token. Empty if
        the request has no prompt_logprobs.
    """
    if output.prompt_logprobs is None:
        return {}
    return {
        "prompt_logprobs": [
            None if logprobs is None else _as_json(logprobs) for logprobs in output.prompt_logprobs
        ]
    }


def logprob_lines(output: RequestOutput) -> list[str]:
    """Formats the logprobs of a request: one line per token, followed by the best tokens."""
    lines = []
    if output.prompt_logprobs is not None:
        lines.append("logprobs of the prompt (token, logprob, rank | most probable tokens):")
        lines += [_line(logprobs) for logprobs in output.prompt_logprobs if logprobs is not None]
    for completion in output.outputs:
        if completion.logprobs is None:
            continue
        which = f" of [{completion.index}]" if len(output.outputs) > 1 else ""
        lines.append(f"logprobs{which} (token, logprob, rank | most probable tokens):")
        lines += [_line(logprobs) for logprobs in completion.logprobs]
        lines.append(f"cumulative logprob {completion.cumulative_logprob:.4f}")
    return lines


def _as_json(logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token,
            "token": entry.decoded_token,
            "logprob": entry.logprob,
            "rank": entry.rank,
        }
        for token, entry in logprobs.items()
    ]


def _line(logprobs: TokenLogprobs) -> str:
    (own, entry), *_ = logprobs.items()
    best = sorted(logprobs.items(), key=lambda item: item[1].rank)
    others = "  ".join(
        f"{_show(token, other)} {other.logprob:.4f}" for token, other in best if len(logprobs) > 1
    )
    line = f"  {_show(own, entry):<16} {entry.logprob:9.4f} {entry.rank:6}"
    return f"{line} | {others}" if others else line


def _show(token: int, entry: Logprob) -> str:
    return str(token) if entry.decoded_token is None else repr(entry.decoded_token)
