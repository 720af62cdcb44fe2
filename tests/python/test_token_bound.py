# SPDX-License-Identifier: Apache-2.0
"""Only prompts that are far too long are refused without being tokenized."""

from __future__ import annotations

import random
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

import tiny_models
from errors import raises
from paceline import LLM, SamplingParams
from paceline.demo import demo_paths
from paceline.token_bound import max_chars_per_token

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = [f"<0x{i:02X}>" for i in range(256)]
ASCII = [chr(i) for i in range(32, 127)]


def tokenizer(
    tokens: list[str] = BYTES,
    merges: tuple[tuple[str, str], ...] = (),
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    post_processor: Any = None,
    added: AddedToken | None = None,
    **options: Any,
) -> Tokenizer:
    """Makes a BPE tokenizer, by default a byte-level one."""
    vocabulary = [*tokens, *("".join(pair) for pair in merges)]
    ids = {token: i for i, token in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(vocab=ids, merges=list(merges), **options))
    if tokens is BYTES and pre_tokenizer is None:
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in (
        ("normalizer", normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("post_processor", post_processor),
    ):
        if part is not None:
            setattr(made, name, part)
    if added is not None:
        made.add_special_tokens([added])
    return made


MERGES = (("a", "b"), ("ab", "ab"), ("abab", "abab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"))
TEMPLATE = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
EMPTY_TEMPLATE = processors.TemplateProcessing(single="<s>", special_tokens=[("<s>", 0)])

BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: Tokenizer.from_file(str(demo_paths("draft_model")[0] / "tokenizer.json")),
    "bytes": lambda: tokenizer(merges=MERGES),
    "bytes of NFC": lambda: tokenizer(merges=MERGES, normalizer=normalizers.NFC()),
    "bytes of NFKC": lambda: tokenizer(merges=MERGES, normalizer=normalizers.NFKC()),
    "bytes of NFKD and lowercase": lambda: tokenizer(
        normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    ),
    "shorter replacement": lambda: tokenizer(
        merges=MERGES, normalizer=normalizers.Replace("abab", "a")
    ),
    "fallback": lambda: tokenizer(
        ["▁", "a", "b", *FALLBACK],
        (("a", "b"), ("▁", "▁")),
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        ),
        byte_fallback=True,
        fuse_unk=True,
        unk_token="a",
    ),
    "metaspace": lambda: tokenizer(
        ["▁", "a", *FALLBACK], pre_tokenizer=pre_tokenizers.Metaspace(), byte_fallback=True
    ),
    "unknown characters, each": lambda: tokenizer(ASCII, unk_token="~"),
    "added": lambda: tokenizer(added=AddedToken("<a long added token>", normalized=False)),
    "added and normalized": lambda: tokenizer(
        added=AddedToken("Ab", normalized=True), normalizer=normalizers.NFKD()
    ),
    "template": lambda: tokenizer(["<s>", *BYTES], (), pre_tokenizer=pre_tokenizers.ByteLevel(),
                                  post_processor=TEMPLATE),
    "splits": lambda: tokenizer(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
                pre_tokenizers.Punctuation("merged_with_next"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(use_regex=False),
            ]
        )
    ),
}  # fmt: skip

# Each has a piece that becomes few tokens, however often it is repeated.
UNBOUNDED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "stripped": (lambda: tokenizer(normalizer=normalizers.Strip()), " "),
    "replaced runs": (lambda: tokenizer(normalizer=normalizers.Replace(Regex(" +"), "a")), " "),
    "replaced by nothing": (lambda: tokenizer(normalizer=normalizers.Replace("a", "")), "a"),
    "stripped accents": (
        lambda: tokenizer(
            normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
        ),
        "\u0301",
    ),
    "removed by splitting": (
        lambda: tokenizer(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        ),
        " ",
    ),
    "white space": (lambda: tokenizer(ASCII, pre_tokenizer=pre_tokenizers.Whitespace()), " "),
    "unknown characters, fused": (lambda: tokenizer(ASCII, unk_token="~", fuse_unk=True), "é"),
    "unknown characters, dropped": (lambda: tokenizer(ASCII), "é"),
    "a byte is missing": (lambda: tokenizer([*BYTES[:-1], "x0"]), BYTES[-1]),
    "a fallback is missing": (lambda: tokenizer(FALLBACK[:-60], byte_fallback=True), "\U0010ffff"),
    "spaces beside a token": (
        lambda: tokenizer(added=AddedToken("<s>", rstrip=True, normalized=False)),
        " ",
    ),
    "template without the text": (
        lambda: tokenizer(["<s>", *BYTES], pre_tokenizer=pre_tokenizers.ByteLevel(),
                          post_processor=EMPTY_TEMPLATE),
        "a",
    ),
}  # fmt: skip

# Pieces that could shrink a text: composition, merged runs, spaces, unknown characters.
PIECES = [
    "a", "b", "ab" * 8, " ", " " * 9, "\n", "\t", "1", ".", "é", "e\u0301", "\u1100\u1161\u11a8",
    "\u03b1\u0313\u0300\u0345", "ﬁ", "\ufdfa", "\u212b", "İ", "\U0001f600", "中", "\x00", "\u0301",
    "<a long added token>", "Ab", "▁", "~", "def f(x):\n        return x\n", "\u200d", "\ufeff",
]  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_becomes_fewer_tokens(name: str) -> None:
    made = BOUNDED[name]()
    most = max_chars_per_token(made)
    assert most is not None
    rng = random.Random(name)
    texts = [piece * 200 for piece in PIECES]
    texts += ["".join(rng.choices(PIECES, k=rng.randint(1, 60))) for _ in range(300)]
    for text in texts:
        assert len(made.encode(text).ids) * most >= len(text), repr(text[:40])


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bound_where_there_is_none(name: str) -> None:
    make, piece = UNBOUNDED[name]
    made = make()
    assert max_chars_per_token(made) is None
    text = "<s>" + piece * 9990 if name == "spaces beside a token" else piece * 9990
    assert len(made.encode(text).ids) <= 9


@pytest.mark.parametrize(
    "model", [models.WordLevel({"a": 0}, "a"), models.WordPiece({"a": 0}, unk_token="a")]
)
def test_no_bound_for_words(model: Any) -> None:
    assert max_chars_per_token(Tokenizer(model)) is None


def test_composition_takes_at_most_four_characters() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(i))) for i in range(sys.maxunicode + 1))
    assert longest == 4


@pytest.fixture
def untokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM whose tokenizer fails if it is called."""

    def encode(text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    assert llm.target.tokenizer is not None
    monkeypatch.setattr(llm.target.tokenizer, "encode", encode)
    return llm


def test_ten_megabytes_are_refused_before_they_are_tokenized(untokenized: LLM) -> None:
    for call in (untokenized.generate, untokenized.stream, untokenized.logits):
        with raises(ValueError, "prompt has 10000000 characters, at least ", "at most 204"):
            call("x" * 10_000_000)
    with raises(ValueError, "prompts[1] has 10000000 characters, at least ", "tokens"):
        untokenized.generate([[1], "é " * 5_000_000])


@pytest.mark.serial
def test_ten_megabytes_of_bad_words_are_refused_before_they_are_tokenized(llm: LLM) -> None:
    begin = time.monotonic()
    with raises(ValueError, "bad_words[1] has 10000000 characters, at least ", "at most 1024"):
        llm.generate([1], SamplingParams(bad_words=["a", "x " * 5_000_000]))
    assert time.monotonic() - begin < 2  # tokenizing takes some ten seconds
    # Leading spaces do not count.
    assert llm.generate([1], SamplingParams(bad_words=[" " * 100_000 + "a"]))


def test_too_many_token_ids_are_refused_before_they_are_checked(llm: LLM) -> None:
    with raises(ValueError, "prompt has 1000000 tokens", "at most 2047"):
        llm.generate([10**9] * 1_000_000)


def test_the_longest_prompt_is_taken_whatever_its_characters(target_dir: Path) -> None:
    with LLM(target_dir, max_model_len=64) as llm:
        assert llm.target.tokenizer is not None
        word = max(llm.target.tokenizer.id_to_token.values(), key=len)
        llm.target.tokenizer.tokenizer.add_tokens([word])  # else it is spelt
        prompt = word * 63
        assert len(prompt) > 8 * 64  # long enough for the bound to be checked
        output = llm.generate(prompt, SamplingParams(max_tokens=1))[0]
        assert len(output.prompt_token_ids) == 63
        with raises(ValueError, "prompt has 640 characters, at least 64 tokens", "at most 63"):
            llm.generate(word * 64)
        with raises(ValueError, "prompt has 69 tokens; allowed: at most 63"):
            llm.generate("a" * 69)


def test_a_tokenizer_without_a_bound_decides_itself(target_dir: Path, tmp_path: Path) -> None:
    folder = tiny_models.copy_checkpoint(target_dir, tmp_path / "model")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.normalizer = normalizers.Strip()
    made.save(str(folder / "tokenizer.json"))
    with LLM(folder, max_model_len=64) as llm:
        output = llm.generate(" " * 100_000 + "ab", SamplingParams(max_tokens=1))[0]
        assert len(output.prompt_token_ids) == 2
        with raises(ValueError, "prompt has 1000 tokens; allowed: at most 63"):
            llm.generate("a" * 1000)
