# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint, and whether a target and a drafter have the same one."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from paceline._core import ModelFileError

from .files import read_file
from .messages import quote

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Those of the largest vocabularies have about 40 MB.
MAX_TOKENIZER_BYTES: Final = 512 << 20

_MAX_NAMED: Final = 5
# Shorter strings are tokenized in a few milliseconds.
_MIN_UNLOCKED_CHARS: Final = 2048
_MAX_REASON_CHARS: Final = 300


class _Silent(dict[int, bool]):
    """Tells whether an id has no text; remembers each answer, since every output token asks."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bool:
        is_silent = token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None
        self[token_id] = is_silent
        return is_silent


class TokenizerInfo:
    """A `tokenizer.json`.

    Padding and truncation that the file may ask for are switched off: a prompt is encoded whole.

    Attributes:
        path: The file.
        digest: SHA-256 of its contents.
        tokenizer: The `tokenizers.Tokenizer`.
        settings: What takes the place of the other files in the folder of `path`: the keys of
            `tokenizer_config.json`. None = those files.
    """

    def __init__(
        self,
        path: Path,
        contents: bytes | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Reads the file.

        Args:
            path: The file.
            contents: Its contents where they were read already.
            settings: The attribute.

        Raises:
            ModelNotFoundError: There is no such file.
            ModelFileError: It is no regular file, cannot be read, is larger than 512 MiB, or is
                not a tokenizer.
        """
        from tokenizers import Tokenizer

        self.path = path
        self.settings = settings
        if contents is None:
            contents = read_tokenizer_file(path)
        self.digest = hashlib.sha256(contents).digest()
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_buffer(contents)
        except BaseException as error:
            self._raise_named("not a tokenizer that the tokenizers package reads", error)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def __repr__(self) -> str:
        return f"TokenizerInfo({str(self.path)!r}, {len(self.id_to_token)} tokens)"

    @cached_property
    def id_to_token(self) -> dict[int, str]:
        """Every token by its id, added tokens included; ids may have gaps."""
        tokens = {
            index: token
            for token, index in self.tokenizer.get_vocab(with_added_tokens=True).items()
        }
        # An added token may replace one of the table.
        for index, added in self.tokenizer.get_added_tokens_decoder().items():
            tokens[index] = added.content
        return tokens

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The text of each added token by its id, special tokens included."""
        decoder = self.tokenizer.get_added_tokens_decoder()
        return {index: token.content for index, token in decoder.items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        decoder = self.tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in decoder.items() if token.special)

    def silent(self, *, skip_special_tokens: bool = True) -> Mapping[int, bool]:
        """By id: whether `decode` gives no text, because no token has the id or it is left out."""
        return self._silent_without_special if skip_special_tokens else self._silent_with_special

    @cached_property
    def _silent_without_special(self) -> Mapping[int, bool]:
        return _Silent(self.tokenizer, self.special_ids)

    @cached_property
    def _silent_with_special(self) -> Mapping[int, bool]:
        return _Silent(self.tokenizer, frozenset())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt, with the special tokens that the file puts around one.

        Raises:
            ModelFileError: The tokenizer fails on it.
        """
        if len(text) >= _MIN_UNLOCKED_CHARS:
            # Unlike `encode`, this lets other threads of Python run meanwhile. It starts threads,
            # and fails if the system refuses them.
            try:
                (encoding,) = self.tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
                return list(encoding.ids)
            except BaseException as error:
                if not _is_failure(error):
                    raise
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except BaseException as error:
            self._raise_named("the tokenizer cannot encode a prompt", error)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; an id without a token gives none.

        Raises:
            ModelFileError: The tokenizer fails on them.
        """
        try:
            return str(
                self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            )
        except BaseException as error:
            self._raise_named("the tokenizer cannot decode token ids", error)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """`decode` with the text of special tokens."""
        return self.decode(token_ids, skip_special_tokens=False)

    def _raise_named(self, message: str, error: BaseException) -> NoReturn:
        """Raises an error of the tokenizers package as one that names the file."""
        if not _is_failure(error):
            raise error
        reason = f"{error!s:.{_MAX_REASON_CHARS}}"
        raise ModelFileError(f"{self.path}: {message}: {reason}") from error


def _is_failure(error: BaseException) -> bool:
    # A fault in the package's Rust code is a PanicException: no Exception, and of a class that the
    # package does not export.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_tokenizer_file(path: Path) -> bytes:
    """The contents of a `tokenizer.json`; errors as for `TokenizerInfo`."""
    return read_file(path, "the model's tokenizer", max_bytes=MAX_TOKENIZER_BYTES)


def check_tokenizers(
    target_path: Path,
    target_tokenizer: TokenizerInfo | None,
    target_vocab_size: int,
    draft_path: Path,
    draft_tokenizer: TokenizerInfo | None,
    draft_vocab_size: int,
) -> None:
    """Checks that token ids mean the same to a target and a drafter; reads no weights.

    Two tokenizers are compared entry by entry. Where one or both are missing, only the sizes of the
    embedding tables can be compared, and they must be equal. Where just one is missing, a warning
    says so.

    Raises:
        ValueError: The tokenizers differ, or one is missing and the sizes differ.
    """
    if target_tokenizer is not None and draft_tokenizer is not None:
        if target_tokenizer.digest != draft_tokenizer.digest:
            compare_vocabularies(
                target_tokenizer, draft_tokenizer, target_vocab_size, draft_vocab_size
            )
        return
    without = [
        str(path / "tokenizer.json")
        for path, tokenizer in ((target_path, target_tokenizer), (draft_path, draft_tokenizer))
        if tokenizer is None
    ]
    absent = f"{' and '.join(dict.fromkeys(without))}: no such file"
    if target_vocab_size != draft_vocab_size:
        raise ValueError(
            f"{absent}, so the vocabularies cannot be compared, and their sizes differ: target "
            f"{target_vocab_size}, draft {draft_vocab_size}; expected a tokenizer.json beside both "
            "models, or equal sizes"
        )
    if len(without) == 1:
        warnings.warn(
            f"{absent}, so only the sizes of the vocabularies were compared "
            f"({target_vocab_size} ids each)",
            stacklevel=3,
        )


def compare_vocabularies(
    target: TokenizerInfo,
    draft: TokenizerInfo,
    target_vocab_size: int,
    draft_vocab_size: int,
) -> None:
    """Checks that the same id is the same token for a target and a drafter.

    Ids below the size of the smaller embedding table are compared, added tokens included; ids
    beyond it are never drafted. Rows that neither tokenizer uses are padding and are not compared.
    Rules for encoding are not compared either, because only the target's tokenizer encodes.

    Args:
        target: The target's tokenizer.
        draft: The drafter's tokenizer.
        target_vocab_size: Rows of the target's embedding table.
        draft_vocab_size: Rows of the drafter's embedding table.

    Raises:
        ValueError: They differ; names the first differing ids with both tokens.
    """
    ours, theirs = target.id_to_token, draft.id_to_token
    common = min(target_vocab_size, draft_vocab_size)
    differing = [
        index
        for index in sorted(ours.keys() | theirs.keys())
        if index < common and ours.get(index) != theirs.get(index)
    ]
    if not differing:
        return
    entries = "; ".join(
        f"id {index}: target {_show(ours.get(index))}, draft {_show(theirs.get(index))}"
        for index in differing[:_MAX_NAMED]
    )
    more = len(differing) - _MAX_NAMED
    raise ValueError(
        f"{draft.path}: the drafter's tokenizer differs from the target's ({target.path}) in "
        f"{len(differing)} of the {common} ids they share: {entries}"
        f"{f'; and {more} more' if more > 0 else ''}; a drafter must use the target's tokenizer"
    )


def _show(token: str | None) -> str:
    return "has none" if token is None else quote(token)
