# SPDX-License-Identifier: Apache-2.0
"""The measures of the demo checkpoints, independent of any runtime.

The functions take token ids, counts per iteration and texts of any engine.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

REPEATED_NGRAM = 8


@dataclass(frozen=True)
class AcceptanceReport:
    """Acceptance over the continuations, each up to its first repetition."""

    generated_tokens: int
    counted_tokens: int
    counted_iterations: int
    counted_emitted: int

    @property
    def counted_share(self) -> float:
        """Counted tokens / generated tokens."""
        return self.counted_tokens / max(1, self.generated_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verify iteration, bonus token included."""
        return self.counted_emitted / max(1, self.counted_iterations)


def tokens_before_repeat(ids: Sequence[int], n: int = REPEATED_NGRAM) -> int:
    """The index of the first n-gram that occurred earlier in `ids`; len(ids) without one."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(ids) - n + 1):
        gram = tuple(ids[start : start + n])
        if gram in seen:
            return start
        seen.add(gram)
    return len(ids)


def acceptance(
    continuations: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]
) -> AcceptanceReport:
    """Counts accepted tokens before the first repeated n-gram of each continuation.

    An iteration counts if it started before the repetition. Of its emitted tokens, only those
    before the repetition count.

    Args:
        continuations: The generated token ids of each prompt.
        emitted: For each prompt, the number of tokens that each verify iteration emitted, in order.
            The prefill emitted the tokens at the beginning that the list does not cover.

    Raises:
        ValueError: A list covers more tokens than its continuation has.
    """
    counted_tokens = counted_iterations = counted_emitted = 0
    for ids, counts in zip(continuations, emitted, strict=True):
        limit = tokens_before_repeat(ids)
        counted_tokens += limit
        position = len(ids) - sum(counts)
        if position < 0:
            raise ValueError("the iterations emitted more tokens than the continuation has")
        for count in counts:
            if position >= limit:
                break
            counted_iterations += 1
            counted_emitted += min(count, limit - position)
            position += count
    return AcceptanceReport(
        generated_tokens=sum(len(ids) for ids in continuations),
        counted_tokens=counted_tokens,
        counted_iterations=counted_iterations,
        counted_emitted=counted_emitted,
    )


def emitted_per_iteration(matches: Sequence[bool], draft_length: int) -> list[int]:
    """The number of tokens that each verify iteration emits, for a drafter without feedback.

    The prefill emits token 0. Each iteration then emits the drafts before the first wrong one, and
    the target's own token after them.

    Args:
        matches: Entry i says whether the drafter proposes generated token i, given all tokens
            before it.
        draft_length: Drafts per iteration.
    """
    counts = []
    position = 1
    while position < len(matches):
        accepted = 0
        while (
            accepted < draft_length
            and position + accepted < len(matches)
            and matches[position + accepted]
        ):
            accepted += 1
        counts.append(min(accepted + 1, len(matches) - position))
        position += counts[-1]
    return counts


def emitted_by_drafts(continuation: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[int]:
    """The number of tokens that each verify iteration emits, for a drafter that feeds back.

    The prefill emits token 0. Each iteration then emits the drafts before the first wrong one, and
    the target's own token after them.

    Args:
        continuation: The generated token ids.
        drafts: `drafts[s][i]` is the proposal of step s for token i + s + 1, when drafting starts
            after generated token i and the previous steps were right.
    """
    counts = []
    position = 0
    while position + 1 < len(continuation):
        rest = continuation[position + 1 :]
        accepted = 0
        while (
            accepted < min(len(drafts), len(rest)) and drafts[accepted][position] == rest[accepted]
        ):
            accepted += 1
        counts.append(min(accepted + 1, len(rest)))
        position += counts[-1]
    return counts


def tokenizes(text: str) -> bool:
    """Whether Python's tokenizer reads `text` up to its last full line.

    An open bracket, triple-quoted string or indented block at the end is not an error, since the
    text was cut. Everything else is: bad indentation, a string that is not closed on its line, an
    unmatched bracket, a character outside the language.
    """
    full_lines = text[: text.rfind("\n") + 1]
    try:
        for token in tokenize.generate_tokens(io.StringIO(full_lines).readline):
            if _is_foreign(token):
                return False
    except tokenize.TokenError as error:
        return _is_cut_off(str(error.args[0]))
    except SyntaxError:
        return False
    return True


def _is_foreign(token: tokenize.TokenInfo) -> bool:
    """Whether the token is not Python; since 3.12 such characters are unknown operators."""
    if token.type == tokenize.ERRORTOKEN:
        return bool(token.string.strip())
    return token.type == tokenize.OP and token.string not in tokenize.EXACT_TOKEN_TYPES


def _is_cut_off(message: str) -> bool:
    """Whether the tokenizer's message says that the text ended inside a statement or string."""
    return "EOF in multi-line" in message or "unterminated triple-quoted" in message
