# SPDX-License-Identifier: Apache-2.0
"""The drafter of `speculative_config={"method": "custom", ...}`: a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.checks import check_int, shorten
from paceline.limits import MAX_INT

#: Proposes token ids that may follow the tokens of prompt and output.
Drafter = Callable[[list[int]], Sequence[int]]


class CustomDrafter:
    """Calls the function and checks what it returns. The engine calls one at a time."""

    def __init__(self, function: Drafter, num_speculative_tokens: int) -> None:
        """Stores the function and k."""
        self._function = function
        self._num_speculative_tokens = num_speculative_tokens

    def __call__(self, tokens: list[int], max_drafts: int) -> list[int]:
        """Returns at most `max_drafts` ids. What it raises ends the request with its text."""
        name = "the drafter of speculative_config"
        try:
            drafts = self._function(tokens)
        except Exception as error:
            raise RuntimeError(f"{name} raised {type(error).__name__}: {error}") from error
        try:
            ids = list(drafts)
        except TypeError:
            raise TypeError(
                f"{name} returned {shorten(drafts)} ({type(drafts).__name__}); allowed: a sequence "
                "of token ids"
            ) from None
        if len(ids) > self._num_speculative_tokens:
            raise ValueError(
                f"{name} returned {len(ids)} ids; allowed: at most num_speculative_tokens = "
                f"{self._num_speculative_tokens}"
            )
        # Near the end of an output fewer fit.
        return [
            check_int(f"draft {i} of {name}", token, 0, MAX_INT) for i, token in enumerate(ids)
        ][:max_drafts]
