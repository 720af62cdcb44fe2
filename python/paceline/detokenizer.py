# SPDX-License-Identifier: Apache-2.0
"""Converts token ids to text, one token at a time, without splitting characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

# Decoders write it for bytes that are not a character, or not yet.
_REPLACEMENT: Final = "�"
# Tokens of the prompt that are decoded with the first output tokens, because some tokenizers drop
# the space at the start of a text.
_NUM_CONTEXT_TOKENS: Final = 4
# A character has at most four bytes, so at most four tokens. Twice as many tokens that still do not
# decode are not a character, and their text is released.
_MAX_HELD_TOKENS: Final = 8


class IncrementalDetokenizer:
    """Decodes the output of one request incrementally.

    The text depends only on the sequence of tokens, not on how events divide it, so `stream` and
    `generate` return the same text. (`tokenizers.decoders.DecodeStream` would drop the text that is
    held back at the end.) Not thread-safe.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """Starts after a prompt.

        Args:
            decode: Converts token ids to text, without special tokens.
            prompt_token_ids: The prompt. Its last tokens are the context of the first output token.
        """
        self._decode = decode
        # Context, then tokens whose text was returned, then tokens whose text is held back.
        self._token_ids = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._context_text = decode(self._token_ids) if self._token_ids else ""
        if self._context_text.endswith(_REPLACEMENT):
            # The prompt ends inside a character: decode the output without it.
            self._token_ids, self._context_text = [], ""
        self._num_out = len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Adds a token.

        Args:
            token_id: The token.

        Returns:
            The text that is now final; may be empty.
        """
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        num_held = len(self._token_ids) - self._num_out
        if num_held < _MAX_HELD_TOKENS and (
            text.endswith(_REPLACEMENT) or len(text) <= len(self._context_text)
        ):
            return ""
        return self._release(text)

    def flush(self) -> str:
        """Ends the text.

        Returns:
            The text that was held back, with replacement characters for incomplete ones.
        """
        if self._num_out == len(self._token_ids):
            return ""
        return self._release(self._decode(self._token_ids))

    def _release(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        # The tokens just released are the context of the next ones.
        self._token_ids = self._token_ids[self._num_out :]
        self._num_out = len(self._token_ids)
        self._context_text = self._decode(self._token_ids)
        return new_text
