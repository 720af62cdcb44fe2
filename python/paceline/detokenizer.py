# SPDX-License-Identifier: Apache-2.0
"""Converts token ids to text, one token at a time, without splitting characters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

# Decoders write it for bytes that are not a character, or not yet.
_REPLACEMENT: Final = "�"
# Tokens of the prompt that are decoded with the first output tokens, because some tokenizers drop
# the space at the start of a text.
_NUM_CONTEXT_TOKENS: Final = 4
# A character has at most four bytes, so at most four tokens. The text of twice as many tokens that
# still do not decode is released, except for the last character, which may be incomplete.
_MAX_HELD_TOKENS: Final = 8


class IncrementalDetokenizer:
    """Decodes the output of one request incrementally.

    The text depends only on the sequence of tokens, not on how events divide it, so `stream` and
    `generate` return the same text. (`tokenizers.decoders.DecodeStream` would drop the text that is
    held back at the end.) Not thread-safe.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int] = (),
        *,
        silent: Mapping[int, bool] | None = None,
        joined: Mapping[int, str] | None = None,
    ) -> None:
        """Starts after a prompt.

        Args:
            decode: Converts token ids to text.
            prompt_token_ids: The prompt. Its last tokens are the context of the first output token.
            silent: Whether each token has no text: it does not exist, or is left out. None = all
                have text.
            joined: The text of each token that is not separated by a space from another one of
                them directly before it. None = none.
        """
        self._decode = decode
        self._silent = silent
        self._joined = joined or {}
        self._follows_joined = False
        # Context, then tokens whose text was returned, then tokens whose text is held back.
        self._token_ids = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        context_text = decode(self._token_ids) if self._token_ids else ""
        if context_text.endswith(_REPLACEMENT):
            # The prompt ends inside a character: decode the output without it.
            self._token_ids, context_text = [], ""
        self._num_out = len(self._token_ids)  # tokens that are not held back
        self._num_characters = len(context_text)  # characters that are not held back

    def push(self, token_id: int) -> str:
        """Adds a token.

        Args:
            token_id: The token.

        Returns:
            The text that is now final; may be empty.
        """
        if self._silent is not None and self._silent[token_id]:
            return ""
        is_joined = False
        if self._joined:
            follows_joined, self._follows_joined = self._follows_joined, token_id in self._joined
            is_joined = follows_joined and self._follows_joined
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        num_held = len(self._token_ids) - self._num_out
        if text.endswith(_REPLACEMENT):
            return "" if num_held < _MAX_HELD_TOKENS else self._release_start(text)
        if num_held < _MAX_HELD_TOKENS and len(text) <= self._num_characters:
            return ""
        new_text = self._release(text)
        return self._joined[token_id] if is_joined else new_text

    def flush(self) -> str:
        """Ends the text.

        Returns:
            The text that was held back, with replacement characters for incomplete ones.
        """
        if self._num_out == len(self._token_ids):
            return ""
        return self._release(self._decode(self._token_ids))

    def _release(self, text: str) -> str:
        """Returns all text; the tokens of the new text become the context."""
        new_text = text[self._num_characters :]
        self._token_ids = self._token_ids[self._num_out :]
        self._num_out = len(self._token_ids)
        self._num_characters = len(self._decode(self._token_ids))
        return new_text

    def _release_start(self, text: str) -> str:
        """Returns all text but the last character, of which the next tokens may be a part."""
        new_text = text[self._num_characters : -1]
        self._token_ids = self._token_ids[-_NUM_CONTEXT_TOKENS:]
        self._num_out = _NUM_CONTEXT_TOKENS - 1
        self._num_characters = len(self._decode(self._token_ids)) - 1
        return new_text
