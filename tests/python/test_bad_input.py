# SPDX-License-Identifier: Apache-2.0
"""Wrong input: each value gives one clear error and does not affect the engine.

Broken checkpoints are in test_loader_*.py, configurations in test_config.py, and what the binding
itself refuses in test_binding_input.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from errors import refuses
from paceline import (
    LLM,
    ModelFileError,
    ModelNotFoundError,
    SamplingParams,
    SpeculativeConfig,
)
from paceline.loader import TokenizerInfo, load_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(autouse=True)
def nothing_is_harmed(llm: LLM) -> Any:
    """After each error the engine is idle and intact, and its output is the same as before."""
    expected = llm.generate("abc", GREEDY)[0].outputs
    yield
    stats = llm._executor.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert llm.generate("abc", GREEDY)[0].outputs == expected
    assert llm._executor.check_integrity() == ""
    assert not llm._dispatcher.sessions


# ---- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [[]], ["a", ""], ["a", []], np.zeros(0, np.int64)])
def test_empty_prompt(llm: LLM, prompt: Any) -> None:
    refuses(lambda: llm.generate(prompt, GREEDY), "is empty", "allowed: at least one")


def test_empty_prompt_says_which(llm: LLM) -> None:
    refuses(lambda: llm.generate(["a", ""]), "prompts[1] is empty")
    refuses(lambda: llm.stream(["a", []]), "prompts[1] is empty")
    refuses(lambda: llm.logits([]), "prompt is empty")


def test_prompt_without_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(TokenizerInfo, "encode", lambda *_, **__: [])
        refuses(
            lambda: llm.generate("ab"), "prompt is 'ab', for which the tokenizer of", "no token"
        )


def test_bytes_get_the_same_advice_everywhere(llm: LLM) -> None:
    for call in (
        lambda: llm.generate(b"x"),  # type: ignore[arg-type]
        lambda: llm.generate(["a", b"x"]),  # type: ignore[list-item]
        lambda: llm.logits(b"x"),  # type: ignore[arg-type]
        lambda: LLM(b"x"),  # type: ignore[arg-type]
        lambda: SpeculativeConfig(model=b"x", num_speculative_tokens=1),  # type: ignore[arg-type]
        lambda: SamplingParams(stop=b"x"),  # type: ignore[arg-type]
    ):
        refuses(call, "is b'x' (bytes)", "; decode the bytes first")


def test_a_model_that_is_no_path_without_a_method() -> None:
    with pytest.raises(ValueError, match=r"on the hub, as a string or a path-like object$"):
        SpeculativeConfig(model=3, num_speculative_tokens=1)  # type: ignore[arg-type]


def test_prompt_that_is_too_long(llm: LLM) -> None:
    longest = llm.max_model_len - 1
    refuses(
        lambda: llm.generate([5] * (longest + 1), GREEDY),
        f"prompt has {longest + 1} tokens",
        f"at most {longest}",
        "made for 2048",
    )
    assert llm.generate([5] * longest, GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("token", [-1, 128, 2**31, 2**70])
def test_token_id_out_of_range(llm: LLM, token: int) -> None:
    allowed = "allowed: 0 to vocab_size - 1 = 127"
    refuses(lambda: llm.generate([1, token]), "prompt[1] is token id", token, allowed)
    refuses(lambda: llm.generate(["a", [1, token]]), "prompts[1][1]", token, allowed)
    refuses(lambda: llm.logits([token]), "prompt[0]", token, allowed)


@pytest.mark.parametrize("token", [1.0, True, None, b"a"])
def test_token_that_is_no_id(llm: LLM, token: Any) -> None:
    refuses(lambda: llm.generate([[1, token]]), "[1] is", repr(token), "allowed: a token id")


@pytest.mark.parametrize("prompts", [3, None, b"abc", bytearray(b"abc"), {1, 2}, object()])
def test_prompts_of_the_wrong_kind(llm: LLM, prompts: Any) -> None:
    kind = f"({type(prompts).__name__})"
    refuses(lambda: llm.generate(prompts), "prompts is ", kind, "allowed: a string")


@pytest.mark.parametrize("prompts", [["a", 3], [[1], None], ["a", b"b"], ["a", bytearray(b"b")]])
def test_one_prompt_of_the_wrong_kind(llm: LLM, prompts: Any) -> None:
    refuses(lambda: llm.generate(prompts), "prompts[1] is", "allowed: a string, a sequence")


def test_one_bad_prompt_queues_nothing(llm: LLM) -> None:
    before = llm._executor.stats()["num_emitted_tokens"]
    refuses(lambda: llm.generate(["a"] * 20 + [[-1]], GREEDY), "prompts[20][0] is token id -1")
    assert llm._executor.stats()["num_emitted_tokens"] == before


def test_string_without_a_tokenizer() -> None:
    folder = tiny_models.make(tiny_models.TinySpec("llama", seed=1, tokenizer_size=0))
    with LLM(folder) as llm:
        refuses(lambda: llm.generate("abc"), "prompt is a string", folder, "allowed: token ids")
        completion = llm.generate([1, 2], GREEDY)[0].outputs[0]
        assert completion.text == "" and len(completion.token_ids) == 8


# ---- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, "greedy", 3, [GREEDY, None]])
def test_sampling_params_of_the_wrong_kind(llm: LLM, params: Any) -> None:
    refuses(lambda: llm.generate(["a", "b"], params), "sampling_params", "allowed: SamplingParams")


def test_too_few_sampling_params(llm: LLM) -> None:
    refuses(lambda: llm.generate(["a", "b"], [GREEDY]), "1 entries for 2 prompts")


def test_stop_token_out_of_range(llm: LLM) -> None:
    params = SamplingParams(stop_token_ids=[128])
    refuses(lambda: llm.generate("a", params), "stop_token_ids has 128", "= 127")


def test_too_many_stop_tokens(tmp_path: Path, target_dir: Path) -> None:
    folder = tiny_models.copy_checkpoint(target_dir, tmp_path / "model")
    tiny_models.edit_config(folder, eos_token_id=[0, 1])
    with LLM(folder) as llm:
        params = SamplingParams(stop_token_ids=list(range(2, 9)))
        refuses(lambda: llm.generate("a", params), "[0, 1]", "9 tokens together", "at most 8")


@pytest.mark.parametrize(
    ("params", "part"),
    [
        ({"logit_bias": {5: 1.0, 128: 1.0}}, "logit_bias has 128"),
        ({"allowed_token_ids": [5, 128]}, "allowed_token_ids has 128"),
        ({"bad_words": ["a", [5, 128]]}, "bad_words[1] has 128"),
    ],
)
def test_parameters_outside_the_vocabulary(llm: LLM, params: dict[str, Any], part: str) -> None:
    refuses(
        lambda: llm.generate("a", SamplingParams(**params)),
        part,
        "allowed: 0 to vocab_size - 1 = 127",
    )


def test_parameters_that_leave_no_token(llm: LLM) -> None:
    for params in (
        SamplingParams(allowed_token_ids=[5, 6], bad_words=[[5], [6]]),
        SamplingParams(allowed_token_ids=[5, 5], stop_token_ids=[5], min_tokens=1),
    ):
        refuses(lambda p=params: llm.generate("a", p), "allowed_token_ids is [5", "at least one")
    every = SamplingParams(bad_words=[[token] for token in range(128)])
    refuses(lambda: llm.generate("a", every), "exclude all 128 tokens")


def test_too_many_bad_words(llm: LLM) -> None:
    refuses(
        lambda: llm.generate("a", SamplingParams(bad_words=["abcdefghij" * 20] * 5 + ["b" * 900])),
        "bad_words are 2 sequences with 1100 tokens",
        "at most 128 sequences with 1024 tokens",
    )


def test_strings_among_parameters_need_a_tokenizer() -> None:
    folder = tiny_models.make(tiny_models.TinySpec("llama", seed=1, tokenizer_size=0))
    with LLM(folder) as llm:
        for params, cure in (
            (SamplingParams(stop="x"), "allowed: stop_token_ids"),
            (SamplingParams(bad_words=[[1], "x"]), "allowed: sequences of token ids"),
        ):
            refuses(lambda p=params: llm.generate([1], p), folder, "has no tokenizer.json", cure)


# ---- the LLM -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 10**9, "3", True, 2.0])
def test_k(target_dir: Path, speculative_config: dict[str, Any], k: Any) -> None:
    config = speculative_config | {"num_speculative_tokens": k}
    refuses(
        lambda: LLM(target_dir, speculative_config=config),
        "num_speculative_tokens",
        k,
        "1 to 16",
    )


def test_configuration_is_checked_before_anything_is_loaded() -> None:
    config = {"method": "nonesuch", "num_speculative_tokens": 2}
    refuses(lambda: LLM("no/such/folder", speculative_config=config), "'nonesuch'")
    refuses(lambda: LLM("no/such/folder", block_size=0), "block_size is 0")


def test_missing_folders(target_dir: Path) -> None:
    refuses(lambda: LLM("no/such/folder"), "no/such/folder", kind=ModelNotFoundError)
    config = {"model": "no/such/draft", "num_speculative_tokens": 2}
    refuses(
        lambda: LLM(target_dir, speculative_config=config),
        "no/such/draft",
        kind=FileNotFoundError,
    )


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (None, ["None (NoneType)", "the folder of "]),
        ("", ["'' (str)", "the folder of "]),
        (b"abc", ["b'abc' (bytes)", "a string or a path-like object"]),
        (3, ["3 (int)", "a path-like object"]),
        (["a"] * 1000, ["['a', 'a', 'a'", "..."]),
        ("x\0y", ["null character"]),
        ("a\udcff", ["'\\udcff'", "UTF-8"]),
        ("x" * 300, ["'xxx", "a path of 300 bytes", "255 a name"]),
        ("a/" * 3000, ["a path of 6000 bytes", "at most 4095 bytes"]),
    ],
)
def test_model_that_is_no_folder(model: Any, parts: list[str]) -> None:
    refuses(lambda: LLM(model), "model ", *parts)
    config = {"method": "draft_model", "num_speculative_tokens": 2, "model": model}
    refuses(lambda: SpeculativeConfig.parse(config), "speculative_config['model']", *parts)


def test_device(target_dir: Path) -> None:
    refuses(lambda: LLM(target_dir, device="cuda"), "no CUDA", kind=NotImplementedError)


def test_max_model_len_beyond_the_target(target_dir: Path) -> None:
    refuses(lambda: LLM(target_dir, max_model_len=2049), "2049", "1 to 2048", target_dir)


def test_drafter_that_supports_fewer_positions(
    target_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    short = tiny_models.copy_checkpoint(draft_dir, tmp_path / "short")
    tiny_models.edit_config(short, max_position_embeddings=100)
    config = {"model": str(short), "num_speculative_tokens": 2}
    refuses(
        lambda: LLM(target_dir, speculative_config=config),
        "max_model_len is 2048",
        target_dir,
        short,
        "supports only 100",
        "max_model_len=100",
    )
    with LLM(target_dir, speculative_config=config, max_model_len=100) as llm:
        assert llm.generate("a", GREEDY)


def test_drafter_with_another_tokenizer(target_dir: Path, draft_dir: Path, tmp_path: Path) -> None:
    other = tiny_models.copy_checkpoint(draft_dir, tmp_path / "other")
    tiny_models.write_tokenizer(other / "tokenizer.json", 128, rename={40: "other"})
    config = {"model": str(other), "num_speculative_tokens": 2}
    refuses(lambda: LLM(target_dir, speculative_config=config), "40", "'other'")


def test_too_few_batched_tokens(target_dir: Path, speculative_config: dict[str, Any]) -> None:
    refuses(
        lambda: LLM(
            target_dir,
            speculative_config=speculative_config,
            max_num_seqs=8,
            max_num_batched_tokens=39,
        ),
        "max_num_batched_tokens is 39",
        "= 40",
    )


def test_no_blocks_for_one_request(target_dir: Path) -> None:
    refuses(lambda: LLM(target_dir, kv_cache_bytes=1000), "kv_cache_bytes", "1000")
    with LLM(target_dir, kv_cache_bytes=256 << 10, max_model_len=2048) as llm:
        before = llm._executor.stats()
        refuses(lambda: llm.generate(["a", [5] * 1500], GREEDY), "KV blocks", "kv_cache_bytes")
        assert llm.generate("a", GREEDY)[0].outputs[0].token_ids
        assert before["num_emitted_tokens"] == 0
        assert llm._executor.check_integrity() == ""


def test_damaged_weights(target_dir: Path, tmp_path: Path) -> None:
    folder = tiny_models.copy_checkpoint(target_dir, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuses(lambda: LLM(folder), weights, kind=ModelFileError)


def test_drafter_and_configuration_belong_together(
    target_dir: Path, speculative_config: dict[str, Any]
) -> None:
    target = load_checkpoint(target_dir)
    refuses(
        lambda: LLM.from_loaded(target, speculative_config=speculative_config),
        "draft is None and speculative_config is",
        "both or neither",
    )
    refuses(lambda: LLM.from_loaded(target, target), "speculative_config is None", "both or")


# ---- strings that are not text -----------------------------------------------------------------


def test_text_that_is_not_unicode(llm: LLM) -> None:
    lone = "ab\ud800"
    refuses(lambda: llm.generate(lone), "prompt has '\\ud800' at character 2", "valid Unicode")
    refuses(lambda: llm.generate(["a", lone]), "prompts[1] has", "valid Unicode")
    refuses(lambda: llm.logits(lone), "prompt has", "valid Unicode")
    refuses(lambda: SamplingParams(bad_words=["a", lone]), "bad_words[1] has", "valid Unicode")
    refuses(lambda: SamplingParams(stop=lone), "stop has '\\ud800'", "valid Unicode")
    refuses(lambda: SamplingParams(stop=["a", lone]), "stop[1] has", "valid Unicode")


def test_bytes_are_no_text() -> None:
    refuses(lambda: SamplingParams(stop=b"ab"), "stop is b'ab'", "a string")
    refuses(lambda: SamplingParams(stop=["a", b"b"]), "stop[1] is b'b' (bytes)", "decode the bytes")
    refuses(lambda: SamplingParams(bad_words=[b"b"]), "bad_words[0] is b'b' (bytes)", "decode the")


def test_numbers_are_no_prompts(llm: LLM) -> None:
    for prompts, shown in ((np.array(5), "array(5) (nd"), (torch.tensor(3), "tensor(3) (T")):
        refuses(lambda p=prompts: llm.generate(p), f"prompts is {shown}", "a sequence of token ids")


def test_tokens_of_a_prompt_that_the_model_does_not_have(target_dir: Path, tmp_path: Path) -> None:
    path = tiny_models.copy_checkpoint(target_dir, tmp_path / "few")
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] = 20
    (path / "config.json").write_text(json.dumps(config))
    with LLM(path, load_format="dummy") as few:
        few.generate([1, 19], GREEDY)
        refuses(lambda: few.generate(["a", "zz"], GREEDY), "prompts[", "vocab_size is 20")


def test_a_drafter_is_checked_before_the_target_is_read(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was read")

    monkeypatch.setattr("paceline.loader.load.load_weights", read)
    config = {"model": str(tmp_path / "none"), "num_speculative_tokens": 2}
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        LLM(target_dir, speculative_config=config)
    refuses(lambda: LLM(target_dir, max_num_batched_tokens=3), "max_num_batched_tokens is 3")
