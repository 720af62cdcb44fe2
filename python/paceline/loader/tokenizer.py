# SPDX-License-Identifier: Apache-2.0
"""The tokenizer beside a checkpoint, and whether a target and a drafter speak the same one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline._core import ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME: Final = "tokenizer.json"
_MAX_NAMED: Final = 5


class TokenizerInfo:
    """A `tokenizer.json`.

    Padding and truncation that the file may ask for are switched off: a prompt is encoded whole.

    Attributes:
        path: The file.
        tokenizer: The `tokenizers.Tokenizer`.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ModelFileError: The file is not a tokenizer.
        """
        from tokenizers import Tokenizer

        self.path = path
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ModelFileError(
                f"{path}: not a tokenizer that the tokenizers package reads: {error}"
            ) from error
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
        # An added token may take the place of one in the table.
        for index, added in self.tokenizer.get_added_tokens_decoder().items():
            tokens[index] = added.content
        return tokens

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the file puts around one."""
        return list(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; an id that has no token gives nothing."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(directory: Path) -> TokenizerInfo | None:
    """Reads the tokenizer in a model's folder.

    Returns:
        The tokenizer, or None where there is no `tokenizer.json`: such a model takes token ids.

    Raises:
        ModelFileError: The file is not a tokenizer.
    """
    path = directory / TOKENIZER_NAME
    return TokenizerInfo(path) if path.exists() else None


def check_tokenizers(
    target_path: Path,
    target_tokenizer: TokenizerInfo | None,
    target_vocab_size: int,
    draft_path: Path,
    draft_tokenizer: TokenizerInfo | None,
    draft_vocab_size: int,
) -> None:
    """Checks that token ids mean the same to a target and a drafter; reads no weights.

    With a tokenizer on both sides they are compared entry by entry. Without one on a side there is
    nothing to compare but the sizes of the embedding tables, which then have to be equal; where one
    side has a tokenizer a warning says so.

    Raises:
        ValueError: The tokenizers differ, or one is missing and the sizes differ.
    """
    if target_tokenizer is not None and draft_tokenizer is not None:
        if not _is_same_file(target_tokenizer.path, draft_tokenizer.path):
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

    Ids are compared up to the smaller of the two embedding tables, added tokens included: rows
    beyond it are never drafted. Rows of the table that neither tokenizer uses are padding and do
    not count, and neither do rules that only matter when text is encoded, which the target's
    tokenizer alone does.

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
    return "has none" if token is None else repr(token)


def _is_same_file(left: Path, right: Path) -> bool:
    """Whether two tokenizer files have the same bytes: then there is nothing to compare."""
    return left.samefile(right) or (
        left.stat().st_size == right.stat().st_size and left.read_bytes() == right.read_bytes()
    )
