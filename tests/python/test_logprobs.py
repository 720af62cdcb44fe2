# SPDX-License-Identifier: Apache-2.0
"""Logprobs: their values, which speculation does not change, and which do not change the output."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from paceline import LLM, EngineConfig, Logprob, RequestOutput, SamplingParams
from paceline.outputs import TokenLogprobs

PROMPTS: list[Any] = [
    "def read(",
    [1, 2, 3],
    "x = 1\ny",
    [
        (7 * i) % 120 + 1 for i in range(150)
    ],  # more positions than one iteration computes logprobs for
    [5],
]
# Parameters that change the sampled tokens but not the logprobs, which come from the raw logits.
MIX: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 4.0, 9: -100},
    "bad_words": [[1], [2, 3]],
    "min_tokens": 4,
}


def mixed_params(seed: int) -> list[SamplingParams]:
    """Returns different parameters for each of the prompts."""
    rng = random.Random(seed)
    return [
        SamplingParams(
            **{key: value for key, value in MIX.items() if rng.random() < 0.5},
            max_tokens=rng.randint(4, 30),
            seed=rng.randrange(2**40),
            logprobs=rng.choice((None, 0, 1, 5, 20)),
            prompt_logprobs=rng.choice((None, 0, 3)),
        )
        for _ in PROMPTS
    ]


def expected_logprobs(
    llm: LLM, output: RequestOutput, num_best: int
) -> list[dict[int, tuple[float, int]]]:
    """Computes with torch, for each token after the first, a dict from ids to (logprob, rank)."""
    import torch

    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    logits = torch.from_numpy(llm.logits(ids))
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    positions = []
    for row, token in enumerate(ids[1:]):
        best = torch.argsort(logits[row], descending=True, stable=True)[:num_best]
        positions.append(
            {
                i: (logprobs[row, i].item(), 1 + int((logits[row] > logits[row, i]).sum()))
                for i in [token, *best.tolist()]
            }
        )
    return positions


def assert_logprobs(
    seen: list[TokenLogprobs], expected: list[dict[int, tuple[float, int]]]
) -> None:
    assert len(seen) == len(expected)
    for entries, want in zip(seen, expected, strict=True):
        assert list(entries) == list(want)
        for token, entry in entries.items():
            logprob, rank = want[token]
            assert entry.logprob == pytest.approx(logprob, abs=2e-6)
            assert entry.rank == rank


# ---- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_best", [0, 1, 5, 20])
def test_logprobs_come_from_the_raw_logits(llm: LLM, num_best: int) -> None:
    params = SamplingParams(
        **MIX, max_tokens=20, seed=4, logprobs=num_best, prompt_logprobs=num_best
    )
    for output in llm.generate(PROMPTS, params):
        completion = output.outputs[0]
        expected = expected_logprobs(llm, output, num_best)
        num_prompt = len(output.prompt_token_ids)
        assert completion.logprobs is not None and output.prompt_logprobs is not None
        assert_logprobs(completion.logprobs, expected[num_prompt - 1 :])
        first, *others = output.prompt_logprobs
        assert first is None and None not in others
        assert_logprobs([entries for entries in others if entries], expected[: num_prompt - 1])
        total = sum(
            entries[token].logprob
            for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_logprobs_do_not_come_from_the_residual(
    target_dir: Path, speculative_config: dict[str, Any], method: str
) -> None:
    """These methods overwrite the logits of the first rejected row with the residual."""
    config = speculative_config | {"rejection_sample_method": method}
    params = [
        SamplingParams(temperature=1.0, max_tokens=24, seed=seed, logprobs=3)
        for seed in range(len(PROMPTS))
    ]
    with LLM(target_dir, speculative_config=config, device="cpu") as llm:
        for output in llm.generate(PROMPTS, params):
            expected = expected_logprobs(llm, output, 3)[len(output.prompt_token_ids) - 1 :]
            assert output.outputs[0].logprobs is not None
            assert_logprobs(output.outputs[0].logprobs, expected)


def test_output_and_prompt_logprobs_are_independent(llm: LLM) -> None:
    of_output, of_prompt = llm.generate(
        PROMPTS[:2],
        [
            SamplingParams(max_tokens=3, seed=1, logprobs=2),
            SamplingParams(max_tokens=3, seed=1, prompt_logprobs=2),
        ],
    )
    assert of_output.prompt_logprobs is None
    assert of_output.outputs[0].logprobs is not None
    assert of_prompt.outputs[0].logprobs is of_prompt.outputs[0].cumulative_logprob is None
    assert of_prompt.prompt_logprobs is not None


def test_tokens_have_their_text(llm: LLM) -> None:
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    special = next(token for token, entry in added.items() if entry.special)
    plain = tokenizer.encode("x")[-1]
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=20, prompt_logprobs=0, logit_bias={special: 100}
    )
    output = llm.generate([plain, plain], params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert completion.token_ids == [special]
    # A special token is not in the text, but its logprob names it.
    assert completion.text == ""
    assert completion.logprobs[0][special].decoded_token == added[special].content
    assert output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1][plain].decoded_token == "x"


def test_without_a_tokenizer_tokens_have_no_text(tmp_path: Path, target_dir: Path) -> None:
    path = tiny_models.copy_checkpoint(target_dir, tmp_path / "no-tokenizer")
    (path / "tokenizer.json").unlink()
    with LLM(path, device="cpu", max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=0)
        output = llm.generate([1, 2], params)[0]
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    assert output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].decoded_token is None
    assert output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1][2].decoded_token is None


# ---- with and without speculation --------------------------------------------------------------


@pytest.fixture(scope="module")
def tight_llm(target_dir: Path, speculative_config: dict[str, Any]) -> Iterator[LLM]:
    """An LLM with small prefill chunks and a pool for few sequences."""
    with LLM(
        target_dir,
        speculative_config={**speculative_config, "num_speculative_tokens": 7},
        device="cpu",
        max_num_seqs=3,
        max_model_len=256,
        prefill_chunk_size=11,
        kv_cache_bytes=400 << 10,
        block_size=8,
    ) as llm:
        yield llm


def test_speculation_and_batches_do_not_change_logprobs(
    llm: LLM, plain_llm: LLM, tight_llm: LLM
) -> None:
    for seed in range(6):
        params = mixed_params(seed)
        plain = plain_llm.generate(PROMPTS, params)
        for other in (llm, tight_llm):
            for ours, theirs in zip(plain, other.generate(PROMPTS, params), strict=True):
                assert ours.outputs == theirs.outputs  # including logprobs, bit for bit
                assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert tight_llm._executor.check_integrity() == ""


def test_logprobs_do_not_change_the_output(llm: LLM) -> None:
    import dataclasses

    for seed in range(4):
        params = mixed_params(seed)
        silent = [dataclasses.replace(p, logprobs=None, prompt_logprobs=None) for p in params]
        for asked, unasked in zip(
            llm.generate(PROMPTS, params), llm.generate(PROMPTS, silent), strict=True
        ):
            assert asked.outputs[0].token_ids == unasked.outputs[0].token_ids
            assert asked.outputs[0].text == unasked.outputs[0].text


# ---- streams and ends --------------------------------------------------------------------------


def test_chunks_have_the_logprobs_of_their_tokens(llm: LLM) -> None:
    params = mixed_params(3)
    waited = llm.generate(PROMPTS, params)
    seen: list[list[TokenLogprobs]] = [[] for _ in PROMPTS]
    of_prompts: dict[int, Any] = {}
    num_before = [0] * len(PROMPTS)
    with llm.stream(PROMPTS, params) as stream:
        for chunk in stream:
            if params[chunk.index].logprobs is None:
                assert chunk.logprobs is None
            else:
                assert chunk.logprobs is not None
                assert len(chunk.logprobs) == len(chunk.token_ids)
                seen[chunk.index] += chunk.logprobs
            if chunk.prompt_logprobs is not None:
                assert chunk.index not in of_prompts
                assert chunk.token_ids and num_before[chunk.index] == 0
                of_prompts[chunk.index] = chunk.prompt_logprobs
            num_before[chunk.index] += len(chunk.token_ids)
    for index, output in enumerate(waited):
        assert seen[index] == (output.outputs[0].logprobs or [])
        assert of_prompts.get(index) == output.prompt_logprobs


def test_a_stop_string_ends_logprobs_with_the_tokens(llm: LLM, plain_llm: LLM) -> None:
    free = plain_llm.generate(
        "def read(", SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    )[0].outputs[0]
    stop = free.text[15:18]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, stop=stop)
    for one in (llm, plain_llm):
        completion = one.generate("def read(", params)[0].outputs[0]
        assert completion.stop_reason == stop
        assert completion.logprobs is not None and free.logprobs is not None
        num_tokens = len(completion.token_ids)
        assert 0 < num_tokens < 40
        assert completion.logprobs == free.logprobs[:num_tokens]
        assert completion.cumulative_logprob == pytest.approx(
            math.fsum(
                entries[token].logprob
                for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
            )
        )


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 65, True, 1.0, "5"])
def test_other_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; allowed: an integer from 0 to 64"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_max_logprobs_is_refused(llm: LLM, name: str) -> None:
    message = f"^{name} is 21; allowed: None, or 0 to 20, because the LLM was built with"
    fine = SamplingParams(max_tokens=2)
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[:2], [fine, SamplingParams(**{name: 21})])


def test_max_logprobs_0_refuses_all(target_dir: Path) -> None:
    with LLM(target_dir, device="cpu", max_num_seqs=2, max_logprobs=0) as llm:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ValueError, match=f"^{name} is 0; allowed: None, because"):
                llm.generate([1], SamplingParams(**{name: 0}))
        bytes_without = llm.memory_report()["workspace_bytes"]
        assert llm.capabilities()["configured"]["max_logprobs"] == 0
    with LLM(target_dir, device="cpu", max_num_seqs=2) as llm:
        assert llm.memory_report()["workspace_bytes"] > bytes_without


@pytest.mark.parametrize("value", [-1, 65, True, None])
def test_other_values_of_max_logprobs_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_logprobs is .*; allowed: an integer from 0 to 64"):
        EngineConfig(max_logprobs=value)


def test_logprob_is_a_value() -> None:
    entry = Logprob(logprob=-0.5, rank=1, decoded_token="a")
    assert entry == Logprob(-0.5, 1, "a")
    with pytest.raises(AttributeError):
        entry.rank = 2  # type: ignore[misc]
    assert np.exp(entry.logprob) < 1
