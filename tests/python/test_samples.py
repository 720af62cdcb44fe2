# SPDX-License-Identifier: Apache-2.0
"""Several outputs of one prompt (`n`): their tokens, what they share, and how each ends."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, CompletionOutput, RequestError, SamplingParams, cli
from paceline.demo import demo_names, find_demo
from paceline.limits import MAX_SEED
from paceline.loader import load_checkpoint
from time_limits import HANG_LIMIT_S

PROMPT = list(range(5, 45))
DEMO_PROMPTS = Path(__file__).parents[1] / "support" / "demo_prompts.json"


def params_of(seed: int | None = 7, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 30, "seed": seed} | changes)


def tokens_of(completions: list[CompletionOutput]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def separately(llm: LLM, prompt: Any, n: int, seed: int, **changes: Any) -> list[CompletionOutput]:
    """Returns the same outputs from separate requests, one after another."""
    return [
        llm.generate(prompt, params_of(seed + i & MAX_SEED, **changes))[0].outputs[0]
        for i in range(n)
    ]


def wait_until_idle(llm: LLM) -> dict[str, Any]:
    end = time.monotonic() + HANG_LIMIT_S
    while True:
        stats = llm._executor.stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        assert time.monotonic() < end, stats
        time.sleep(0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 8, "min_p": 0.01},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"bad_words": [[PROMPT[-1], 9], [11]], "min_tokens": 30, "logit_bias": {20: 3.0}},
        {"allowed_token_ids": list(range(10, 40)), "stop_token_ids": [17]},
    ],
)
def test_outputs_equal_those_of_separate_requests(
    llm: LLM, plain_llm: LLM, changes: dict[str, Any]
) -> None:
    expected = separately(plain_llm, PROMPT, 6, 7, **changes)
    for engine in (llm, plain_llm):
        engine._executor.reset_stats()
        (output,) = engine.generate(PROMPT, params_of(n=6, **changes))
        assert [completion.index for completion in output.outputs] == list(range(6))
        assert tokens_of(output.outputs) == tokens_of(expected)
        for got, want in zip(output.outputs, expected, strict=True):
            assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        # The prompt, except its last token, was computed once.
        stats = engine._executor.stats()
        num_forked = stats["num_shared_tokens"] - stats["num_prefix_hit_tokens"]
        assert num_forked == 5 * (len(PROMPT) - 1)
    assert (len({tuple(ids) for ids in tokens_of(expected)}) > 1) == (changes != {"temperature": 0})


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("name", demo_names())
def test_trained_drafters_draft_as_for_separate_requests(name: str, temperature: float) -> None:
    """A drafter has the same state of the prompt for each output as for a separate request."""
    demo = find_demo(name)
    texts = [entry["text"] for entry in json.loads(DEMO_PROMPTS.read_text())[:3]]
    config = demo.speculative_config()
    with (
        LLM(demo.target, speculative_config=config, max_num_seqs=16, device="cpu") as llm,
        LLM(demo.target, max_num_seqs=16, device="cpu") as plain,
    ):
        for text in texts:
            params = params_of(n=5, temperature=temperature)
            (output,) = llm.generate(text, params)
            each = [
                llm.generate(text, params_of(7 + i, temperature=temperature))[0] for i in range(5)
            ]
            expected = tokens_of(separately(plain, text, 5, 7, temperature=temperature))
            assert tokens_of(output.outputs) == expected
            assert [alone.outputs[0].token_ids for alone in each] == expected
            assert output.metrics.speculative_decoding is not None
            for key in ("num_draft_tokens", "num_accepted_draft_tokens"):
                assert output.metrics.speculative_decoding[key] == sum(
                    (alone.metrics.speculative_decoding or {})[key] for alone in each
                )
        num_prompt_tokens = sum(len(llm.generate(text)[0].prompt_token_ids) for text in texts)
        stats = llm._executor.stats()
        num_forked = stats["num_shared_tokens"] - stats["num_prefix_hit_tokens"]
        assert num_forked == 4 * (num_prompt_tokens - len(texts))
        assert stats["num_accepted_tokens"] > 0


def test_more_outputs_than_run_at_a_time(llm: LLM, plain_llm: LLM) -> None:
    prompts: list[Any] = [PROMPT, "def read(", [3]]
    params = [params_of(n=20, max_tokens=9), params_of(n=1), params_of(3, n=11, max_tokens=40)]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs) for output in outputs] == [20, 1, 11]
    assert tokens_of(outputs[0].outputs) == tokens_of(
        separately(plain_llm, prompts[0], 20, 7, max_tokens=9)
    )
    assert tokens_of(outputs[1].outputs) == tokens_of(separately(plain_llm, prompts[1], 1, 7))
    assert tokens_of(outputs[2].outputs) == tokens_of(
        separately(plain_llm, prompts[2], 11, 3, max_tokens=40)
    )
    assert llm._executor.check_integrity() == ""


def test_seeds_wrap_around(plain_llm: LLM) -> None:
    (output,) = plain_llm.generate(PROMPT, params_of(MAX_SEED, n=2))
    assert tokens_of(output.outputs) == tokens_of(separately(plain_llm, PROMPT, 2, MAX_SEED))
    assert output.outputs[1].token_ids == separately(plain_llm, PROMPT, 1, 0)[0].token_ids


def test_outputs_without_a_seed_have_different_seeds(target_dir: Path) -> None:
    target = load_checkpoint(target_dir)
    with LLM.from_loaded(target, seed=3, max_num_seqs=8) as llm:
        two = llm.generate([PROMPT, PROMPT], params_of(None, n=3))
        (third,) = llm.generate(PROMPT, params_of(None))
        seeded = separately(llm, PROMPT, 7, 3 * 2**32)
    found = [*two[0].outputs, *two[1].outputs, *third.outputs]
    assert tokens_of(found) == tokens_of(seeded)
    assert len({tuple(ids) for ids in tokens_of(found)}) == 7


def test_a_stream_labels_the_chunks_of_each_output(llm: LLM) -> None:
    params = [params_of(n=4), params_of(2, n=2, max_tokens=12)]
    expected = llm.generate([PROMPT, "x = 1"], params)
    parts: dict[tuple[int, int], list[Any]] = {}
    outputs = {}
    with llm.stream([PROMPT, "x = 1"], params) as stream:
        for chunk in stream:
            parts.setdefault((chunk.index, chunk.sample), []).append(chunk)
            if chunk.output is not None:
                outputs[chunk.index] = chunk.output
    assert sorted(parts) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    for (index, sample), chunks in parts.items():
        completion = expected[index].outputs[sample]
        assert [id for chunk in chunks for id in chunk.token_ids] == completion.token_ids
        assert "".join(chunk.text for chunk in chunks) == completion.text
        assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for index, output in enumerate(expected):
        assert outputs[index].outputs == output.outputs
        # Only the last chunk of the request has it.
        num_with_output = sum(
            chunk.output is not None for key in parts if key[0] == index for chunk in parts[key]
        )
        assert num_with_output == 1


def test_a_stop_string_ends_one_output(llm: LLM) -> None:
    free = llm.generate(PROMPT, params_of(n=4, max_tokens=60))[0].outputs
    # A character of one output that ends it early.
    stop = free[2].text[len(free[2].text) // 3]
    (output,) = llm.generate(PROMPT, params_of(n=4, max_tokens=60, stop=stop))
    for got, unstopped in zip(output.outputs, free, strict=True):
        assert got.text == unstopped.text.split(stop)[0]
        is_stopped = stop in unstopped.text
        assert (got.finish_reason, got.stop_reason) == (
            ("stop", stop) if is_stopped else ("length", None)
        )
    assert wait_until_idle(llm)["num_running"] == 0


def test_a_failed_output_does_not_affect_others(llm: LLM) -> None:
    allowed = list(range(10, 110))
    free = llm.generate(PROMPT, params_of(n=6, max_tokens=3, allowed_token_ids=allowed))[0].outputs
    # No token may follow the first token of the third output.
    dead_end = free[2].token_ids[0]
    params = params_of(
        n=6,
        max_tokens=3,
        allowed_token_ids=allowed,
        bad_words=[[dead_end, token] for token in allowed],
    )
    with pytest.raises(RequestError, match="prompt 0: no token can be drawn") as error:
        llm.generate(PROMPT, params)
    (output,) = error.value.outputs
    for got, unbanned in zip(output.outputs, free, strict=True):
        is_dead = dead_end in unbanned.token_ids[:2]
        assert got.finish_reason == ("error" if is_dead else "length")
        if not is_dead:
            assert got.token_ids == unbanned.token_ids
    reasons = {completion.finish_reason for completion in output.outputs}
    assert reasons == {"error", "length"}


def test_metrics_cover_all_outputs(llm: LLM, plain_llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, params_of(n=3))
    metrics = output.metrics
    alone = [llm.generate(PROMPT, params_of(7 + i))[0].metrics for i in range(3)]
    assert metrics.num_prompt_tokens == len(PROMPT)
    assert metrics.num_output_tokens == sum(m.num_output_tokens for m in alone) == 90
    assert metrics.speculative_decoding is not None
    each = [m.speculative_decoding or {} for m in alone]
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert metrics.speculative_decoding[name] == sum(m[name] for m in each)
    assert metrics.speculative_decoding["acceptance_histogram"] == [
        sum(counts) for counts in zip(*(m["acceptance_histogram"] for m in each), strict=True)
    ]
    assert metrics.time_to_first_token_ms is not None and metrics.generation_time_ms is not None
    assert 0 < metrics.time_to_first_token_ms <= metrics.total_time_ms
    assert metrics.time_to_first_token_ms + metrics.generation_time_ms == pytest.approx(
        metrics.total_time_ms
    )
    assert plain_llm.generate(PROMPT, params_of(n=2))[0].metrics.speculative_decoding is None


def test_closing_a_stream_cancels_every_output(llm: LLM) -> None:
    stream = llm.stream([PROMPT, [1]], params_of(n=20, max_tokens=1500))
    next(stream)
    stream.close()
    wait_until_idle(llm)
    stream = llm.stream(PROMPT, params_of(n=20, max_tokens=1500))
    next(stream)
    del stream
    gc.collect()
    wait_until_idle(llm)
    assert not llm._dispatcher.sessions and not llm._dispatcher.open_samples
    assert llm._executor.check_integrity() == ""


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", True, None])
def test_other_numbers_of_outputs_are_refused(n: Any) -> None:
    with pytest.raises(ValueError, match=r"n is .*allowed: an integer from 1 to 128"):
        SamplingParams(n=n)


def test_the_engine_also_refuses_other_numbers(llm: LLM) -> None:
    with pytest.raises(ValueError, match="num_samples is 129; allowed: 1 to 128"):
        llm._executor.add_request([1], num_samples=129)
    with pytest.raises(ValueError, match="scored prompt has no samples"):
        llm._executor.add_request([1], num_samples=2, score_prompt=True)
    assert llm.capabilities()["max_n"] == 128


def test_the_command_line_prints_several_completions(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "def read(", "--temperature", "1", "--max-tokens", "12", "--n", "3"]
    assert cli.main([*command, "--json", "--compare"]) == 0
    report = json.loads(capsys.readouterr().out)
    texts = [report["text"], *(other["text"] for other in report["others"])]
    assert len(set(texts)) == 3
    assert report["plain"]["is_same"]
    assert cli.main([*command, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert shown == "".join(f"\n[{i}] {text}\n" for i, text in enumerate(texts))
    assert cli.main([*command[:-1], "0"]) != 0
    assert "n is 0" in capsys.readouterr().err


def test_logprobs_of_every_output_and_of_the_prompt_once(
    target_dir: Path, plain_llm: LLM, speculative_config: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.2}
    prompts = [PROMPT, PROMPT[:9], PROMPT[::-1]]
    expected = [separately(plain_llm, prompt, 4, 7, **asked) for prompt in prompts]
    (first,) = plain_llm.generate(PROMPT, params_of(**asked))
    with LLM(
        target_dir,
        speculative_config=speculative_config,
        max_num_seqs=5,
        max_model_len=128,
        block_size=8,
        kv_cache_bytes=120 << 10,  # too few blocks for all sequences: some are preempted
    ) as llm:
        outputs = llm.generate(prompts, params_of(n=4, **asked))
        stats = llm._executor.stats()
        assert stats["num_preemptions"] > 0 and stats["num_shared_tokens"] > 0
    for output, wants in zip(outputs, expected, strict=True):
        for got, want in zip(output.outputs, wants, strict=True):
            assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
    assert outputs[0].prompt_logprobs == first.prompt_logprobs
