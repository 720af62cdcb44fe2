# SPDX-License-Identifier: Apache-2.0
"""`LLM.get_tokenizer` and `LLM.get_default_sampling_params`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import tiny_models
from errors import raises
from paceline import LLM, ModelFileError, SamplingParams, Tokenizer
from paceline.demo import find_demo
from paceline.loader import TokenizerInfo

OPTIONS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "max_logprobs": 0}


@pytest.fixture
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.get_tokenizer()


def test_names_mean_what_they_mean_in_transformers(llm: LLM, tokenizer: Tokenizer) -> None:
    path = llm.target.path / "tokenizer.json"
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<eos>")
    ids = reference.encode("ab c")
    assert tokenizer.encode("ab c") == ids
    assert tokenizer("ab c") == dict(reference("ab c", return_token_type_ids=False))
    assert tokenizer(["a", "bc"]).input_ids == reference(["a", "bc"]).input_ids
    assert tokenizer("ab").attention_mask == [1, 1]
    mixed = [*ids, 0, *ids]
    for skips in (True, False):
        text = reference.decode(mixed, skip_special_tokens=skips)
        assert tokenizer.decode(np.array(mixed), skip_special_tokens=skips) == text
        assert tokenizer.batch_decode([mixed], skip_special_tokens=skips) == [text]
    assert tokenizer.decode(mixed) == reference.decode(mixed)
    assert tokenizer.decode(ids[0]) == reference.decode(ids[0])
    assert tokenizer.convert_ids_to_tokens(mixed) == reference.convert_ids_to_tokens(mixed)
    assert tokenizer.convert_ids_to_tokens(5) == reference.convert_ids_to_tokens(5)
    tokens = tokenizer.tokenize("ab c")
    assert tokens == reference.tokenize("ab c")
    assert tokenizer.convert_tokens_to_ids(["a", "<eos>"]) == [ids[0], 0]
    assert tokenizer.convert_tokens_to_ids("a") == reference.convert_tokens_to_ids("a")
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer.vocab_size == reference.vocab_size and len(tokenizer) == len(reference)
    assert tokenizer.all_special_ids == reference.all_special_ids
    assert tokenizer.all_special_tokens == reference.all_special_tokens
    added = reference.num_special_tokens_to_add()
    assert tokenizer.num_special_tokens_to_add() == added
    assert tokenizer.backend_tokenizer.encode("ab c").ids == ids
    assert Path(tokenizer.name_or_path) == llm.target.path


def test_ids_of_the_checkpoint(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    tiny_models.edit_config(path, eos_token_id=[4, 7], bos_token_id=6)
    with LLM(path, **OPTIONS) as llm:
        tokenizer = llm.get_tokenizer()
        assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (4, 6)
        assert tokenizer.eos_token == tokenizer.convert_ids_to_tokens(4)
        assert tokenizer.bos_token == tokenizer.convert_ids_to_tokens(6)


def test_special_tokens_that_the_tokenizers_settings_name(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    tiny_models.edit_config(path, eos_token_id=[4, 7], bos_token_id=6)
    named = {"eos_token": "<eos>", "pad_token": {"content": "a"}, "bos_token": "not a token"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    with LLM(path, **OPTIONS) as llm:
        tokenizer = llm.get_tokenizer()
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (0, "<eos>")
    assert tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("a")
    assert (tokenizer.bos_token_id, tokenizer.pad_token) == (6, "a")


def test_what_a_tokenizer_refuses(tokenizer: Tokenizer) -> None:
    for call, part in (
        (lambda: tokenizer.encode(b"a"), "text is b'a' (bytes)"),
        (lambda: tokenizer(["a", 3]), "text is 3 (int)"),
        (lambda: tokenizer.encode("a", add_special_tokens=1), "add_special_tokens is 1"),
        (lambda: tokenizer.decode("ab"), "token_ids is 'ab' (str); allowed: a token id or"),
        (lambda: tokenizer.decode([1, -1]), "token_ids[1] is -1; allowed: an integer from 0"),
        (lambda: tokenizer.decode([1.0]), "token_ids[0] is 1.0"),
        (lambda: tokenizer.decode(True), "token_ids is True"),
        (lambda: tokenizer.convert_tokens_to_ids([3]), "tokens is 3 (int)"),
    ):
        with raises(ValueError, part):
            call()
    with raises(AttributeError, "no 'ids'; it has: input_ids"):
        _ = tokenizer("a").ids


def test_a_model_without_a_tokenizer() -> None:
    folder = tiny_models.make(tiny_models.TinySpec("llama", seed=1, tokenizer_size=0))
    with LLM(folder, **OPTIONS) as llm, raises(ValueError, folder, "no tokenizer.json"):
        llm.get_tokenizer()


# ---- generation_config.json --------------------------------------------------------------------


def with_generation_config(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_parameters_that_a_checkpoint_recommends(copy_of: Callable[..., Path]) -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    stated |= {"repetition_penalty": 1.05, "max_new_tokens": 9}
    path = with_generation_config(
        copy_of(), **stated, do_sample=True, num_beams=1, length_penalty=None
    )
    del stated["max_new_tokens"]
    expected = SamplingParams(**stated, max_tokens=9)
    with LLM(path, **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == expected
        chosen = llm.generate(["a", "b"])
        assert [len(output.outputs[0].token_ids) for output in chosen] == [9, 9]
        # The first request of an engine with seed 0 has seed 0.
        with_seed = SamplingParams(**stated, max_tokens=9, seed=0)
        assert llm.generate("a", with_seed)[0].outputs == chosen[0].outputs
        assert len(llm.generate("a", SamplingParams())[0].outputs[0].token_ids) == 16
        streamed = [token for chunk in llm.stream("a") for token in chunk.token_ids]
        assert len(streamed) == 9


def test_without_recommendations_there_are_the_defaults(
    llm: LLM, copy_of: Callable[..., Path]
) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    path = with_generation_config(copy_of(), eos_token_id=0, temperature=None)
    with LLM(path, **OPTIONS, load_format="dummy") as other:
        assert other.get_default_sampling_params() == SamplingParams()


def test_recommendations_that_are_not_allowed(copy_of: Callable[..., Path]) -> None:
    path = with_generation_config(copy_of(), top_p=0.0, temperature=1.0)
    with LLM(path, **OPTIONS) as llm:
        for call in (lambda: llm.generate("a"), llm.get_default_sampling_params):
            with raises(
                ModelFileError,
                f'{path}/generation_config.json: key "top_p" is no default',
                "top_p is 0.0; allowed: a number above 0",
                "give sampling_params",
            ):
                call()
        assert llm.generate("a", SamplingParams(max_tokens=1))  # nothing else is affected


def test_long_strings_have_the_same_tokens() -> None:
    """They take another way through the tokenizers package, which may fail without threads."""
    info = TokenizerInfo(find_demo("draft_model").target / "tokenizer.json")
    text = "def grüße(x):  # 日本語 🙂<|endoftext|>\n\treturn x ** 2\n" * 100
    original = info.tokenizer

    class WithoutThreads:
        encode = original.encode

        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no threads")

    for adds in (True, False):
        expected = original.encode(text, add_special_tokens=adds).ids
        info.tokenizer = original
        assert info.encode(text, add_special_tokens=adds) == expected
        info.tokenizer = WithoutThreads()  # type: ignore[assignment]
        assert info.encode(text, add_special_tokens=adds) == expected
