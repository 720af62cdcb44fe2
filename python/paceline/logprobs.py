# SPDX-License-Identifier: Apache-2.0
"""Logprobs as users see them: from the engine's entries to dicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from paceline.loader.tokenizer import TokenizerInfo
    from paceline.sampling import SamplingParams

# What the engine has of one place: (token id, logprob, rank), the token that is there first.
Entries = Sequence[tuple[int, float, int]]


def check_logprobs(params: SamplingParams, max_logprobs: int) -> None:
    """Checks what a request asks for against what its LLM has room for.

    Raises:
        ValueError: More than that.
    """
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is None or (max_logprobs > 0 and value <= max_logprobs):
            continue
        allowed = "None" if max_logprobs == 0 else f"None, or 0 to {max_logprobs}"
        raise ValueError(
            f"{name} is {value}; allowed: {allowed}, since the LLM has max_logprobs={max_logprobs}"
        )


def needed_max_logprobs(params: SamplingParams) -> int:
    """Returns the least `max_logprobs` of an LLM that serves a request."""
    asked = [n for n in (params.logprobs, params.prompt_logprobs) if n is not None]
    return max(1, *asked) if asked else 0


class LogprobReader:
    """Turns entries into dicts. Tokens are decoded once each; used by one thread at a time."""

    def __init__(self, tokenizer: TokenizerInfo | None) -> None:
        """Starts without decoded tokens.

        Args:
            tokenizer: None: tokens have no text.
        """
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def read(self, places: Iterable[Entries]) -> list[TokenLogprobs]:
        """Returns a dict a place."""
        return [
            {
                token: Logprob(logprob, rank, self._text(token))
                # The token that is there, again among the best, is the same entry.
                for token, logprob, rank in entries
            }
            for entries in places
        ]

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._tokenizer.tokenizer.decode([token], skip_special_tokens=False)
            self._texts[token] = text
        return text


def logprobs_as_json(completion: CompletionOutput) -> dict[str, Any]:
    """The logprobs of an output as plain JSON types.

    Returns:
        Under "logprobs" a list a token of dicts with "token_id", "token", "logprob" and "rank", in
        the order of `CompletionOutput.logprobs`, and the "cumulative_logprob"; nothing where
        nothing was asked for.
    """
    if completion.logprobs is None:
        return {}
    return {
        "logprobs": [_as_json(place) for place in completion.logprobs],
        "cumulative_logprob": completion.cumulative_logprob,
    }


def prompt_logprobs_as_json(output: RequestOutput) -> dict[str, Any]:
    """The same under "prompt_logprobs", None for the first token; nothing without them."""
    if output.prompt_logprobs is None:
        return {}
    return {
        "prompt_logprobs": [
            None if place is None else _as_json(place) for place in output.prompt_logprobs
        ]
    }


def logprob_lines(output: RequestOutput) -> list[str]:
    """The logprobs of a request for people: a line a token, with the best ones behind it."""
    lines = []
    if output.prompt_logprobs is not None:
        lines.append("logprobs of the prompt (token, logprob, rank | the most probable):")
        lines += [_line(place) for place in output.prompt_logprobs if place is not None]
    for completion in output.outputs:
        if completion.logprobs is None:
            continue
        which = f" of [{completion.index}]" if len(output.outputs) > 1 else ""
        lines.append(f"logprobs{which} (token, logprob, rank | the most probable):")
        lines += [_line(place) for place in completion.logprobs]
        lines.append(f"cumulative logprob {completion.cumulative_logprob:.4f}")
    return lines


def _as_json(place: TokenLogprobs) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token,
            "token": entry.decoded_token,
            "logprob": entry.logprob,
            "rank": entry.rank,
        }
        for token, entry in place.items()
    ]


def _line(place: TokenLogprobs) -> str:
    (own, entry), *_ = place.items()
    best = sorted(place.items(), key=lambda item: item[1].rank)
    others = "  ".join(
        f"{_show(token, other)} {other.logprob:.4f}" for token, other in best if len(place) > 1
    )
    line = f"  {_show(own, entry):<16} {entry.logprob:9.4f} {entry.rank:6}"
    return f"{line} | {others}" if others else line


def _show(token: int, entry: Logprob) -> str:
    return str(token) if entry.decoded_token is None else repr(entry.decoded_token)
