# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, one token at a time, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

# What a decoder writes for bytes that are no character, or not yet.
_REPLACEMENT: Final = "�"
# Tokens of the prompt that the first output tokens are decoded with: some tokenizers drop the space
# at the start of a text.
_NUM_CONTEXT_TOKENS: Final = 4
# A character has at most four bytes, so at most four tokens; what still does not decode after twice
# as many is no character, and is let go.
_MAX_HELD_TOKENS: Final = 8


class IncrementalDetokenizer:
    """Decodes the output of one request as it grows.

    The text is a function of the sequence of tokens alone, not of how it was cut into deliveries;
    so streaming and waiting give the same. (`tokenizers.decoders.DecodeStream` gives up what is
    still held back at the end.) Not thread-safe.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """Starts after a prompt.

        Args:
            decode: Token ids to text, special tokens left out.
            prompt_token_ids: The prompt; its last few tokens are the context of the first output.
        """
        self._decode = decode
        # Context, then tokens whose text is out, then tokens whose text is held back.
        self._token_ids = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._context_text = decode(self._token_ids) if self._token_ids else ""
        if self._context_text.endswith(_REPLACEMENT):
            # A prompt that ends inside a character: the output's bytes stand for themselves.
            self._token_ids, self._context_text = [], ""
        self._num_out = len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Adds a token.

        Args:
            token_id: The token.

        Returns:
            Text that is now certain; may be empty.
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
            What was held back: bytes that never became a character, as replacement characters.
        """
        if self._num_out == len(self._token_ids):
            return ""
        return self._release(self._decode(self._token_ids))

    def _release(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        # What was just let go is the context of what follows.
        self._token_ids = self._token_ids[self._num_out :]
        self._num_out = len(self._token_ids)
        self._context_text = self._decode(self._token_ids)
        return new_text
