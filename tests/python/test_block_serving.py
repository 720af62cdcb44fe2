# SPDX-License-Identifier: Apache-2.0
"""Block drafters behind `AsyncLLM` and the server: mixed requests have the outputs of plain
decoding. The drafters are those of `copying_models`, whose windows are accepted in part."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import block_models
import copying_models
from async_tasks import idle, last, run
from block_models import BlockSpec
from copying_models import PERIOD
from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.demo import find_demo
from running_server import RunningServer, read_events

TARGET = "qwen3"
DRAFTERS = ("z-lab, windows", "deepseek", "speculators, windows")
K = 6
# A pool for a third of the sequences, so that some are preempted.
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 12, "max_model_len": 384, "show_progress": False,
    "kv_cache_bytes": 4 << 20,
}  # fmt: skip
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copying_models.write_target(TARGET, tmp_path_factory.mktemp("copying") / "target")


@pytest.fixture(scope="module", params=DRAFTERS)
def llm(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    out = tmp_path_factory.mktemp("drafter") / "drafter"
    drafter = copying_models.write_drafter(request.param, target, out)
    config = {"model": str(drafter), "num_speculative_tokens": K, "x": {"adaptive": False}}
    with LLM(target, speculative_config=config, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def mixed(target: Path) -> tuple[list[list[int]], list[SamplingParams], list[RequestOutput]]:
    """Requests with different numbers of drafts and of samples, and their plain outputs."""
    rng = random.Random(1)
    preamble = [rng.randrange(1, 63) for _ in range(40)]
    prompts, params = [], []
    for i, own in enumerate((None, 0, 1, K, None, 3, 0, None, 5, 2, None, 4)):
        prompts.append(preamble + [rng.randrange(1, 63) for _ in range(PERIOD)])
        params.append(
            SamplingParams(
                # At 2.5 one of five tokens is not the copied one.
                temperature=(0.0, 2.5)[i % 2],
                n=(1, 3, 2)[i % 3],
                seed=i,
                max_tokens=60,
                num_speculative_tokens=own,
            )
        )
    plain = [SamplingParams(**vars_of(one) | {"num_speculative_tokens": None}) for one in params]
    with LLM(target, **ENGINE | {"kv_cache_bytes": 64 << 20}) as llm:
        return prompts, params, llm.generate(prompts, plain)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "n", "seed", "max_tokens", "num_speculative_tokens")
    return {name: getattr(params, name) for name in names}


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [one.token_ids for one in output.outputs]


def test_mixed_requests_beside_aborted_ones(
    llm: LLM, mixed: tuple[list[list[int]], list[SamplingParams], list[RequestOutput]]
) -> None:
    prompts, params, expected = mixed

    async def aborted(allm: AsyncLLM, i: int) -> RequestOutput:
        """A neighbour that ends in mid-stream, inside what windows have drafted."""
        long = SamplingParams(temperature=0.0, max_tokens=200)
        running = allm.generate(prompts[i], long, f"neighbour {i}")
        async for output in running:
            if len(output.outputs[0].token_ids) > 5 + 3 * i:
                await allm.abort(f"neighbour {i}")
        return output

    async def main() -> tuple[list[RequestOutput], list[RequestOutput]]:
        async with AsyncLLM.from_llm(llm) as allm:
            ended = [asyncio.create_task(aborted(allm, i)) for i in range(6)]
            kept = [
                asyncio.create_task(last(allm.generate(prompt, one)))
                for prompt, one in zip(prompts, params, strict=True)
            ]
            found = await asyncio.gather(*kept), await asyncio.gather(*ended)
            await idle(llm)
            return found

    before = llm._executor.stats()
    kept, ended = run(main())
    stats = llm._executor.stats()
    assert [tokens_of(output) for output in kept] == [tokens_of(output) for output in expected]
    for i, output in enumerate(ended):
        (completion,) = output.outputs
        assert completion.finish_reason == "abort"
        copied = prompts[i][-PERIOD:] * 3
        assert completion.token_ids == copied[: len(completion.token_ids)]
    for output, one in zip(kept, params, strict=True):
        counters = output.metrics.speculative_decoding
        if one.num_speculative_tokens == 0:
            assert counters is None
            continue
        assert counters is not None
        k = K if one.num_speculative_tokens is None else one.num_speculative_tokens
        assert counters["num_spec_tokens"] == k
        assert 0 < counters["num_accepted_draft_tokens"] <= counters["num_draft_tokens"]
    # How many sequences run at once, and so whether some are preempted, depends on the event loop.
    for name in ("num_shared_tokens", "num_prefix_hit_tokens"):
        assert stats[name] > before[name], name


def test_mixed_requests_that_are_preempted(
    llm: LLM, mixed: tuple[list[list[int]], list[SamplingParams], list[RequestOutput]]
) -> None:
    """All requests are given at once, more than the pool has room for."""
    prompts, params, expected = mixed
    before = llm._executor.stats()["num_preemptions"]
    outputs = llm.generate(prompts, params)
    assert [tokens_of(output) for output in outputs] == [tokens_of(one) for one in expected]
    assert llm._executor.stats()["num_preemptions"] > before


def test_a_prompt_from_the_cache_has_the_bits_of_the_first_time(llm: LLM) -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(1, 63) for _ in range(PERIOD + 49)]
    params = SamplingParams(temperature=0.0, max_tokens=100, logprobs=0)
    first, again = (llm.generate([prompt], params)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(prompt) // 16 * 16)
    assert again.outputs == first.outputs
    # The drafter's own cache: as many of its drafts are right.
    assert again.metrics.speculative_decoding == first.metrics.speculative_decoding


def test_served_from_the_target_with_its_subfolder(tmp_path: Path) -> None:
    """A client of the server: whole and streamed, fewer drafts, several outputs, gone away."""
    path = tmp_path / "target"
    demo = find_demo("draft_model").target
    path.mkdir()
    for file in demo.iterdir():
        (path / file.name).symlink_to(file)
    block_models.write(BlockSpec("deepseek", markov_rank=8), demo, path / "dspark")
    settings = {"max_num_seqs": 4, "device": "cpu", "show_progress": False, "max_model_len": 256}
    body: dict[str, Any] = {
        "prompt": "def read_lines(path):", "max_tokens": 32, "temperature": 1.0, "seed": 4, "n": 3,
        "return_token_ids": True,
    }  # fmt: skip
    with LLM(path, speculative_config={"method": None}, **settings) as plain:
        (expected,) = plain.generate(
            body["prompt"], SamplingParams(n=3, seed=4, max_tokens=32, temperature=1.0)
        )
    with LLM(path, **settings) as llm, RunningServer(llm) as server:
        assert llm.speculative_config is not None and llm.speculative_config.method == "dspark"
        for given in ({}, {"num_speculative_tokens": 2}, {"enabled": False}):
            answer = server.result(COMPLETIONS, body | {"speculative": given})
            assert [c["token_ids"] for c in answer["choices"]] == tokens_of(expected)
            counted = answer["metrics"]["speculative_decoding"]
            own = {"num_speculative_tokens": 2}.items() <= given.items()
            assert (counted is None) == (given == {"enabled": False})
            assert counted is None or counted["num_spec_tokens"] == (2 if own else 5)
        events = server.events(COMPLETIONS, body)
        for i, tokens in enumerate(tokens_of(expected)):
            parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == i]
            assert [token for part in parts for token in part["token_ids"]] == tokens
        # A client that goes away in mid-stream.
        with server.send(COMPLETIONS, body | {"stream": True, "max_tokens": 200}) as response:
            next(read_events(response))
        server.wait_until_idle()
