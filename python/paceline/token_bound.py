# SPDX-License-Identifier: Apache-2.0
"""A lower bound of the number of tokens of a string, computed from its length alone.

Tokenizing 10 MB takes seconds, so a prompt that is far too long should be refused before. A token
represents a limited number of characters, unless a part of the tokenizer drops characters or merges
any number of them. This file inspects each part; if one is not known to keep characters, there is
no bound.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from paceline.loader.tokenizer import TokenizerInfo

# Normalizers that never give fewer characters than they take.
_KEEPING_NORMALIZERS: Final = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
# Normalizers that compose. n characters decompose into at least n, and each composed character has
# a canonical decomposition of at most 4, so at least n / 4 remain.
_COMPOSING_NORMALIZERS: Final = ("NFC", "NFKC")
_MAX_DECOMPOSITION: Final = 4
# Pre-tokenizers that only split, or replace each byte or space by a character.
_KEEPING_PRE_TOKENIZERS: Final = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
# Pre-tokenizers that may remove the separators.
_SPLITTING_PRE_TOKENIZERS: Final = ("Split", "Punctuation")
_ADDING_POST_PROCESSORS: Final = ("ByteLevel", "BertProcessing", "RobertaProcessing")


_bounds: weakref.WeakKeyDictionary[TokenizerInfo, int | None] = weakref.WeakKeyDictionary()


def min_num_tokens(tokenizer: TokenizerInfo, text: str) -> int:
    """Finds a lower bound of the number of tokens of a string, without tokenizing it.

    The first call for a tokenizer reads its vocabulary and stores the result.

    Returns:
        The bound; 0 if none is known.
    """
    if tokenizer not in _bounds:
        try:
            _bounds[tokenizer] = max_chars_per_token(tokenizer.tokenizer)
        except (AttributeError, KeyError, TypeError, ValueError):
            _bounds[tokenizer] = None  # a description that this file does not understand
    most = _bounds[tokenizer]
    return 0 if most is None else -(-len(text) // most)


def max_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Finds the maximum number of characters of a string that one token can represent.

    Args:
        tokenizer: The tokenizer, without truncation.

    Returns:
        The number m: a string of n characters becomes at least n / m tokens. None if no such bound
        is known.
    """
    shrinkage = _normalizer_shrinkage(tokenizer)
    if shrinkage is None or not _keeps_all_tokens(tokenizer):
        return None
    pre_tokenizers = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
    if not all(map(_is_keeping_pre_tokenizer, pre_tokenizers)):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    if not _has_token_for_every_character(tokenizer.model, vocabulary, is_byte_level):
        return None
    lengths = [len(token) for token in vocabulary]
    for added in tokenizer.get_added_tokens_decoder().values():
        if added.lstrip or added.rstrip:  # it absorbs any number of spaces
            return None
        lengths.append(len(added.content))
        if tokenizer.normalizer is not None:
            lengths.append(len(tokenizer.normalizer.normalize_str(added.content)))
    return max(lengths, default=0) * shrinkage or None


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yields the description of a component, or of each part of a sequence."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending += part[key]
        else:
            yield part


def _normalizer_shrinkage(tokenizer: Tokenizer) -> int | None:
    """The largest factor by which the normalizer may shorten a string; None if unknown."""
    shrinkage = 1
    for part in _parts(tokenizer.normalizer, "normalizers"):
        if part["type"] in _COMPOSING_NORMALIZERS:
            shrinkage *= _MAX_DECOMPOSITION
        elif part["type"] == "Replace" and "String" in part["pattern"] and part["content"]:
            shrinkage *= math.ceil(len(part["pattern"]["String"]) / len(part["content"]))
        elif part["type"] not in _KEEPING_NORMALIZERS:
            return None
    return shrinkage


def _is_keeping_pre_tokenizer(part: dict[str, Any]) -> bool:
    if part["type"] in _SPLITTING_PRE_TOKENIZERS:
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _has_token_for_every_character(
    model: Any, vocabulary: dict[str, int], is_byte_level: bool
) -> bool:
    """Returns whether the model drops no character and merges no unknown ones into one token."""
    if type(model).__name__ != "BPE":
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(character in vocabulary for character in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{i:02X}>" in vocabulary for i in range(256))


def _keeps_all_tokens(tokenizer: Tokenizer) -> bool:
    """Returns whether the post-processor only adds tokens."""
    for part in _parts(tokenizer.post_processor, "processors"):
        if part["type"] == "TemplateProcessing":
            if not any(piece.get("Sequence", {}).get("id") == "A" for piece in part["single"]):
                return False
        elif part["type"] not in _ADDING_POST_PROCESSORS:
            return False
    return True
