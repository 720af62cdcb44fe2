# SPDX-License-Identifier: Apache-2.0
"""`detokenize`, `skip_special_tokens` and `spaces_between_special_tokens`.

The text of an output, however it is divided, is what the tokenizer makes of all its tokens at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

import tiny_models
from paceline import LLM, SamplingParams
from paceline.loader.tokenizer import TokenizerInfo
from paceline.request_factory import make_detokenizer
from test_detokenizer import piece_tokenizer

SPECIAL = ["<eos>", "<pad>", "<end>"]


def save(tokenizer: Tokenizer, folder: Path) -> TokenizerInfo:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenizerInfo(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> TokenizerInfo:
    """A byte-level tokenizer like those of Llama 3 and Qwen3; id 0 is special, 260 has no token."""
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tiny_models.write_tokenizer(path, 260)
    return TokenizerInfo(path)


@pytest.fixture(scope="module")
def by_pieces(tmp_path_factory: pytest.TempPathFactory) -> TokenizerInfo:
    """A tokenizer like Gemma's, which drops a leading space; its last three tokens are special."""
    tokenizer = piece_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return save(tokenizer, tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def by_words(tmp_path_factory: pytest.TempPathFactory) -> TokenizerInfo:
    """A tokenizer that puts a space between tokens, special ones included."""
    words = {"[UNK]": 0, "one": 1, "two": 2, "##s": 3}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return save(tokenizer, tmp_path_factory.mktemp("words"))


def text_of(info: TokenizerInfo, ids: Sequence[int], params: SamplingParams) -> str:
    detokenizer = make_detokenizer(info, [], params)
    assert detokenizer is not None
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skips=st.booleans())
def test_text_is_that_of_all_tokens_at_once(
    by_bytes: TokenizerInfo, data: st.DataObject, skips: bool
) -> None:
    # Bytes of long characters and tokens without text are far likelier than by chance.
    likely = st.sampled_from([*by_bytes.encode("é中😀"), 0, 260])
    ids = data.draw(st.lists(st.one_of(likely, st.integers(0, 260))))
    params = SamplingParams(skip_special_tokens=skips)
    assert text_of(by_bytes, ids, params) == by_bytes.decode(ids, skip_special_tokens=skips)


def test_a_character_behind_many_invalid_bytes_is_kept(by_bytes: TokenizerInfo) -> None:
    first, *others = by_bytes.encode("😀")
    for skips, between, num in itertools.product((True, False), ([], [0], [260]), range(1, 12)):
        ids = [first] * num + [token for other in others for token in (*between, other)]
        params = SamplingParams(skip_special_tokens=skips)
        text = text_of(by_bytes, ids, params)
        assert text == by_bytes.decode(ids, skip_special_tokens=skips)
        assert text.endswith("😀") or (between == [0] and not skips)


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(st.sampled_from([" Hello", " world", "a", " ", "é", "中", "😀", *SPECIAL])),
    skips=st.booleans(),
)
def test_spaces_and_fallback_bytes(by_pieces: TokenizerInfo, parts: list[str], skips: bool) -> None:
    ids = [token for part in parts for token in by_pieces.encode(part)]
    params = SamplingParams(skip_special_tokens=skips)
    assert text_of(by_pieces, ids, params) == by_pieces.decode(ids, skip_special_tokens=skips)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 6)))
def test_spaces_between_special_tokens(by_words: TokenizerInfo, ids: list[int]) -> None:
    assert by_words.decode([1, 4, 5, 6], skip_special_tokens=False) == "one <eos> <pad> <end>"
    whole = by_words.decode(ids, skip_special_tokens=False)
    params = SamplingParams(skip_special_tokens=False)
    assert text_of(by_words, ids, params) == whole
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    specials = "|".join(SPECIAL)
    assert text_of(by_words, ids, params) == re.sub(f"(?<=({specials})) (?={specials})", "", whole)
    # Without special tokens there is nothing between them.
    params = SamplingParams(spaces_between_special_tokens=False)
    assert text_of(by_words, ids, params) == by_words.decode(ids)


# ---- through the engine ------------------------------------------------------------------------

# Half of the tokens are special.
MIXED = {"allowed_token_ids": [0, 40, 41], "max_tokens": 30, "seed": 1, "ignore_eos": True}


@pytest.mark.parametrize("skips", [True, False])
def test_outputs_and_chunks_have_the_text(llm: LLM, skips: bool) -> None:
    params = SamplingParams(**MIXED, skip_special_tokens=skips)
    (completion,) = llm.generate("a", params)[0].outputs
    assert set(completion.token_ids) == {0, 40, 41}
    info = llm.target.tokenizer
    assert info is not None
    assert completion.text == info.decode(completion.token_ids, skip_special_tokens=skips)
    assert ("<eos>" in completion.text) != skips
    assert "".join(chunk.text for chunk in llm.stream("a", params)) == completion.text


def test_stop_strings_see_special_tokens_only_if_they_are_text(llm: LLM) -> None:
    free = llm.generate("a", SamplingParams(**MIXED, skip_special_tokens=False))[0].outputs[0]
    start = free.text.index("<eos>") + 2
    stop = free.text[start : start + 4]  # begins inside of a special token and ends behind it
    params = SamplingParams(**MIXED, skip_special_tokens=False, stop=stop)
    (completion,) = llm.generate("a", params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == free.text[:start]
    assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
    missed = llm.generate("a", SamplingParams(**MIXED, stop="<eos>"))[0].outputs[0]
    assert (missed.finish_reason, missed.token_ids) == ("length", free.token_ids)


def test_no_text_without_detokenize(llm: LLM) -> None:
    params = SamplingParams(**MIXED, detokenize=False, logprobs=1)
    (completion,) = llm.generate("a", params)[0].outputs
    expected = llm.generate("a", SamplingParams(**MIXED))[0].outputs[0]
    assert completion.text == "" and completion.token_ids == expected.token_ids
    assert completion.logprobs is not None
    shown = {entry.decoded_token for position in completion.logprobs for entry in position.values()}
    assert shown == {None}
    assert all(chunk.text == "" for chunk in llm.stream("a", params))
