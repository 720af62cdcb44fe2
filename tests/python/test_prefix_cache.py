# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: the output with it is that without it, for every speculator and layout.

`tests/property/test_equality.py` runs random trees of prompts under preemption and eviction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mtp_models
from paceline import LLM, AsyncLLM, SamplingParams
from tiny_models import TinySpec, load_tensors, make

ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 3, "max_model_len": 256, "kv_cache_bytes": 16 << 20,
    "show_progress": False,
}  # fmt: skip
K = 3
MAX_TOKENS = 20
PARAMS = [
    SamplingParams(temperature=0.8, seed=5, max_tokens=MAX_TOKENS),
    SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logprobs=2,
    ),
]
TARGETS = {
    "full": TinySpec("llama", seed=1),
    "sliding": TinySpec("gemma3", seed=2),
    "reads_other_layers": TinySpec("gemma4", seed=3),
    "mixture": TinySpec("gpt_oss", seed=4),
    "latent": TinySpec("glm4_moe_lite", seed=5),
}
DRAFTERS = ("draft_model", "eagle", "eagle3", "gemma4_mtp", "dflash", "dspark")
A = [(7 * i + 3) % 100 for i in range(70)]
B = [(5 * i + 1) % 100 for i in range(66)]


def prompts(outputs: list[list[int]]) -> list[list[int]]:
    """A, B, A again, A with its output, and branches off A within a block and at its end."""
    return [
        A, B, A, [*A, *outputs[0], 9, 8, 7], [*A[:40], *B[:30]], [*A[:48], *B[:5]], A[:64], A[:65],
    ]  # fmt: skip


def generated(llm: LLM, params: SamplingParams) -> tuple[list[Any], list[int]]:
    """What each prompt yields, one after the other, and its cached tokens."""
    results: list[Any] = []
    cached: list[int] = []
    tokens: list[list[int]] = []
    for i in range(8):
        (output,) = llm.generate([prompts(tokens or [[]])[i]], params)
        assert output.error is None
        tokens.append(output.outputs[0].token_ids)
        # The drafter's KV shows in how many drafts are accepted only.
        drafts = output.metrics.speculative_decoding
        results.append((tokens[-1], output.outputs[0].logprobs, drafts))
        cached.append(output.num_cached_tokens)
    assert llm._executor.check_integrity() == ""
    return results, cached


@pytest.mark.parametrize("case", [*TARGETS, *DRAFTERS, "ngram", "mtp"])
def test_hits_and_misses_have_the_same_output(
    case: str, pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    # Fixed: what the drafter has missed is not cached.
    config: dict[str, Any] = {"num_speculative_tokens": K, "x": {"adaptive": False}}
    if case in TARGETS:
        path, config = make(TARGETS[case]), {"method": None}
    elif case == "ngram":
        path = make(TARGETS["full"])
        config["method"] = "ngram"
    elif case == "mtp":
        path = mtp_models.write(TARGETS["latent"], tmp_path / "mtp")
        config["method"] = "mtp"
    else:
        path, drafter = pair_of(case)
        config["model"] = str(drafter)
    with (
        LLM(path, speculative_config=config, enable_prefix_caching=False, **ENGINE) as never,
        LLM(path, speculative_config=config, **ENGINE) as llm,
    ):
        for params in PARAMS:
            expected, none = generated(never, params)
            actual, cached = generated(llm, params)
            assert actual == expected
            assert none == [0] * 8
            if params is not PARAMS[0]:
                continue
            # The drafter may not have followed the last window of the output.
            assert cached.pop(3) in (64, 80)
            # Where KV depends on the next token, a block misses if another token follows it.
            depends = case in ("eagle", "eagle3", "mtp")
            assert cached == [0, 0, 64, 32, 32 if depends else 48, 48, 64]
        stats = llm.stats()
        hits = stats["prefix_cache"]
        assert 0 < hits["num_hit_tokens"] == stats["num_cached_tokens"] < hits["num_query_tokens"]
        assert all(group["hit_blocks"] > 0 for group in stats["kv_groups"])
        assert all(group["cached_blocks"] > 0 for group in stats["kv_groups"])
        assert all(group["held_blocks"] == 0 for group in stats["kv_groups"])


def test_what_the_draft_model_has_missed_is_cached_without_it(
    pair_of: Callable[[str], tuple[Path, Path]],
) -> None:
    path, drafter = pair_of("draft_model")
    config = {"model": str(drafter), "num_speculative_tokens": K, "x": {"adaptive": False}}
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=MAX_TOKENS)
    plain = SamplingParams(temperature=0.8, seed=5, max_tokens=MAX_TOKENS, num_speculative_tokens=0)
    with LLM(path, speculative_config=config, enable_prefix_caching=False, **ENGINE) as never:
        (expected,) = never.generate([A], params)
    with LLM(path, speculative_config=config, **ENGINE) as llm:

        def blocks(count: str) -> dict[str, int]:
            groups: dict[str, int] = {}
            for group in llm.stats()["kv_groups"]:
                groups[group["owner"]] = groups.get(group["owner"], 0) + group[count]
            return groups

        # Requests that never draft: the target computes them alone, their output too.
        for cached in (0, 64):
            (output,) = llm.generate([A], plain)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.num_cached_tokens == cached
        assert blocks("cached_blocks")["draft"] == 0
        assert blocks("hit_blocks")["draft"] == 0
        # Those that draft use the target's blocks. The draft model catches up, and what it has
        # computed is cached, too.
        outputs = [llm.generate([A], params)[0] for _ in range(2)]
        for output in outputs:
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.num_cached_tokens == 64
        assert blocks("hit_blocks")["target"] == 3 * blocks("hit_blocks")["draft"] > 0
        # The second one drafts from the start, as after a miss.
        counters = outputs[1].metrics.speculative_decoding
        assert counters is not None and counters["num_draft_tokens"] > 0
        assert counters == expected.metrics.speculative_decoding
        assert llm._executor.check_integrity() == ""


def test_rows_with_results_are_computed() -> None:
    """Prompt logprobs, logits and hidden states need every row, and have the bits of a miss."""
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    with LLM(make(TARGETS["sliding"]), **ENGINE) as llm:
        (miss,) = llm.generate([A], params)
        logits, hidden = llm.logits(A), llm.hidden_states(A, layers=[1])
        (hit,) = llm.generate([A], SamplingParams(temperature=0.0, max_tokens=4))
        assert hit.num_cached_tokens == 64 and hit.outputs[0].token_ids == miss.outputs[0].token_ids
        (again,) = llm.generate([A], params)
        assert again.num_cached_tokens == 0 and again.prompt_logprobs == miss.prompt_logprobs
        assert np.array_equal(np.asarray(llm.logits(A)), np.asarray(logits))
        assert np.array_equal(np.asarray(llm.hidden_states(A, layers=[1])), np.asarray(hidden))
        assert llm.stats()["prefix_cache"]["num_query_tokens"] == len(A)


def test_new_weights_forget_all_prefixes() -> None:
    old, new = make(TARGETS["full"]), make(TinySpec("llama", seed=11))
    with LLM(new, **ENGINE) as llm:
        (expected,) = llm.generate([A], PARAMS[0])
    with LLM(old, **ENGINE) as llm:
        llm.generate([A], PARAMS[0])
        assert llm.stats()["kv_groups"][0]["cached_blocks"] > 0
        llm.update_weights(load_tensors(new))
        (output,) = llm.generate([A], PARAMS[0])
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.stats()["kv_groups"][0]["evicted_blocks"] == 0


def test_suffixes_are_evicted_before_prefixes() -> None:
    """The pool has 9 blocks, and each request takes 6, of which 5 are full in the end."""
    with LLM(make(TARGETS["full"]), **ENGINE | {"kv_cache_bytes": 10 * 8192}) as llm:
        cached = [llm.generate([p], PARAMS[0])[0].num_cached_tokens for p in (A, B, A, B)]
        assert cached == [0, 0, 48, 48]
        (group,) = llm.stats()["kv_groups"]
        assert (group["hit_blocks"], group["evicted_blocks"]) == (6, 6)


def test_it_can_be_switched_off() -> None:
    with LLM(make(TARGETS["full"]), enable_prefix_caching=False, **ENGINE) as llm:
        assert [llm.generate([A], PARAMS[0])[0].num_cached_tokens for _ in range(2)] == [0, 0]
        assert llm.stats()["kv_groups"][0]["cached_blocks"] == 0
    with pytest.raises(ValueError, match="enable_prefix_caching is 1"):
        LLM(make(TARGETS["full"]), enable_prefix_caching=1, **ENGINE)  # type: ignore[arg-type]


def test_async_and_samples() -> None:
    async def run(allm: AsyncLLM) -> list[int]:
        cached = []
        for _ in range(2):
            async for output in allm.generate(A, SamplingParams(max_tokens=4, n=2, seed=1)):
                last = output
            cached.append(last.num_cached_tokens)
        return cached

    with LLM(make(TARGETS["full"]), **ENGINE) as llm:
        assert asyncio.run(run(AsyncLLM.from_llm(llm))) == [0, 64]
        # The second samples have forked: twice all but the last token.
        assert llm.stats()["num_cached_tokens"] == 64 + 2 * (len(A) - 1)


@pytest.mark.parametrize("case", ["full", "sliding", "eagle3", "draft_model"])
def test_salts_are_kept_apart_and_change_no_output(
    case: str, pair_of: Callable[[str], tuple[Path, Path]]
) -> None:
    config: dict[str, Any] = {"method": None}
    if case in TARGETS:
        path = make(TARGETS[case])
    else:
        path, drafter = pair_of(case)
        config = {"model": str(drafter), "num_speculative_tokens": K, "x": {"adaptive": False}}
    with LLM(path, speculative_config=config, **ENGINE) as llm:
        for params, first in zip(PARAMS, (0, 64), strict=True):
            cached, results = [], []
            for salt in (None, None, "a", "b", "a", "b", None):
                prompt: dict[str, Any] = {"prompt_token_ids": A}
                (output,) = llm.generate(prompt | ({"cache_salt": salt} if salt else {}), params)
                results.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
                cached.append(output.num_cached_tokens)
            assert all(one == results[0] for one in results)
            assert cached == [first, 64, first, first, 64, 64, 64]
        assert llm._executor.check_integrity() == ""
