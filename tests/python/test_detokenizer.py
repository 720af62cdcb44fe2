# SPDX-License-Identifier: Apache-2.0
"""IncrementalDetokenizer: text is returned as early as it is final, in whole characters.

test_output_text.py checks that none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

import tiny_models
from paceline.detokenizer import IncrementalDetokenizer

REPLACEMENT = "�"


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer like those of Llama 3 and Qwen3."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tiny_models.write_tokenizer(path, 260)
    return Tokenizer.from_file(str(path))


def piece_tokenizer() -> Tokenizer:
    """A tokenizer like Gemma's: pieces with spaces and byte fallback. It drops a leading space."""
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "a", "b"] + [f"<0x{i:02X}>" for i in range(256)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def by_pieces() -> Tokenizer:
    return piece_tokenizer()


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(decoder(tokenizer), prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_pieces_join_to_the_text(by_bytes: Tokenizer, text: str, prompt: str) -> None:
    pieces = pieces_of(by_bytes, by_bytes.encode(text).ids, by_bytes.encode(prompt).ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_is_returned_with_its_last_byte(by_bytes: Tokenizer) -> None:
    ids = by_bytes.encode("a😀b").ids
    assert pieces_of(by_bytes, ids) == ["a", "", "", "", "😀", "b", ""]


def test_flush_returns_an_incomplete_character(by_bytes: Tokenizer) -> None:
    ids = by_bytes.encode("a😀").ids[:-1]
    assert pieces_of(by_bytes, ids) == ["a", "", "", "", REPLACEMENT]


def test_invalid_bytes_do_not_hold_text_back_forever(by_bytes: Tokenizer) -> None:
    lead_byte = by_bytes.encode("😀").ids[0]
    detokenizer = IncrementalDetokenizer(decoder(by_bytes))
    pieces = [detokenizer.push(lead_byte) for _ in range(64)]
    assert sum(map(len, pieces)) >= 48


def test_special_tokens_have_no_text(by_bytes: Tokenizer) -> None:
    ids = [*by_bytes.encode("ab").ids, *([0] * 20), *by_bytes.encode("c").ids]
    assert "".join(pieces_of(by_bytes, ids)) == "abc"


def test_a_prompt_that_ends_inside_a_character(by_bytes: Tokenizer) -> None:
    head, tail = by_bytes.encode("é").ids
    pieces = pieces_of(by_bytes, [tail, *by_bytes.encode("x").ids], [head])
    assert "".join(pieces) == REPLACEMENT + "x"


def test_the_space_after_the_prompt_is_kept(by_pieces: Tokenizer) -> None:
    hello, world = by_pieces.token_to_id("▁Hello"), by_pieces.token_to_id("▁world")
    assert decoder(by_pieces)([world]) == "world"
    assert pieces_of(by_pieces, [world, world], [hello]) == [" world", " world", ""]


def test_fallback_bytes_form_characters(by_pieces: Tokenizer) -> None:
    ids = [by_pieces.token_to_id("a")]
    ids += [by_pieces.token_to_id(f"<0x{byte:02X}>") for byte in "é中😀".encode()]
    ids += [by_pieces.token_to_id("b")]
    pieces = pieces_of(by_pieces, ids)
    assert "".join(pieces) == "aé中😀b"
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_no_tokens_give_no_text(by_bytes: Tokenizer) -> None:
    assert pieces_of(by_bytes, []) == [""]
