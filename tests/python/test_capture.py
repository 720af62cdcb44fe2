# SPDX-License-Identifier: Apache-2.0
"""Captures: what they have of served requests, and when they begin and end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_tasks import idle, last, run
from captured_requests import (
    SMALL,
    CapturedRequest,
    capture_figures,
    capturing,
    num_bytes,
    requests_of,
    shards,
)
from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.capture import MIN_MAX_BYTES
from paceline.outputs import token_sources
from paceline.replicas.replicated_llm import start_replicas
from running_server import RunningServer

COMPLETIONS = "/v1/completions"


@pytest.fixture
def small_llm(target_dir: Path, speculative_config: dict[str, Any]) -> Iterator[LLM]:
    with LLM(target_dir, speculative_config=speculative_config, **SMALL) as llm:
        yield llm


def expected(output: RequestOutput, temperature: float) -> CapturedRequest:
    """What a capture has of a request, but for its iterations."""
    outputs = [
        (one.token_ids, one.finish_reason, one.token_sources)
        for one in output.outputs
        if one.token_ids
    ]
    return CapturedRequest(output.prompt_token_ids, temperature, "draft_model", outputs)  # type: ignore[arg-type]


def seen(request: CapturedRequest) -> CapturedRequest:
    """A captured request with the sources of its tokens instead of its iterations."""
    outputs = [
        (
            one.token_ids,
            one.finish_reason,
            [source for step in one.steps for source in token_sources(*step)],
        )
        for one in request.outputs
    ]
    return request._replace(outputs=outputs)  # type: ignore[arg-type]


def ordered(requests: list[CapturedRequest]) -> list[CapturedRequest]:
    return sorted(requests, key=repr)


@pytest.mark.parametrize("seed", [1, 2])
def test_captured_ids_are_the_outputs(small_llm: LLM, tmp_path: Path, seed: int) -> None:
    """Many requests at once: several outputs, aborts, stop strings, preemption, cached prompts."""
    rng = random.Random(seed)
    preamble = [rng.randrange(128) for _ in range(32)]
    requests = []
    for i in range(40):
        prompt = preamble * (i % 2) + [rng.randrange(128) for _ in range(rng.randrange(1, 30))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            n=rng.choice([1, 1, 2, 4]),
            seed=i,
            max_tokens=rng.choice([1, 20, 150, 150]),
            num_speculative_tokens=rng.choice([None, None, 0, 2]),
            stop=rng.choice([[], [], ["a", "e"]]),
            return_token_sources=True,
        )
        requests.append((prompt, params, i % 5 == 4))
    gone = []  # the prompts of requests whose task ends before them

    async def one(
        allm: AsyncLLM, i: int, prompt: list[int], params: SamplingParams, is_aborted: bool
    ) -> RequestOutput | None:
        running = allm.generate(prompt, params, f"request {i}")
        if i % 10 == 3:
            gone.append(prompt)
            async for _ in running:
                break
            return None
        if is_aborted:
            async for output in running:
                if output.outputs[0].token_ids:
                    await allm.abort(f"request {i}")
            return output
        return await last(running)

    async def main() -> list[RequestOutput | None]:
        async with AsyncLLM.from_llm(small_llm) as allm:
            tasks = [one(allm, i, *request) for i, request in enumerate(requests)]
            found = await asyncio.gather(*tasks)
            await idle(small_llm)
            return found

    with capturing(small_llm, tmp_path / "capture") as capture:
        outputs = run(main())
    stats = small_llm._executor.stats()
    assert stats["num_preemptions"] > 0 and stats["num_prefix_hit_tokens"] > 0
    check_acceptance_records([output for output in outputs if output is not None])
    wanted = [
        expected(output, params.temperature)
        for output, (_, params, _) in zip(outputs, requests, strict=True)
        if output is not None and any(one.token_ids for one in output.outputs)
    ]
    reasons = {reason for request in wanted for _, reason, _ in request.outputs}
    assert reasons == {"stop", "length", "abort"}
    found = requests_of(tmp_path / "capture")
    # A request whose task has gone may still have ended before that was noticed.
    kept = [request for request in found if request.prompt not in gone]
    assert ordered([seen(request) for request in kept]) == ordered(wanted), f"seed {seed}"
    assert capture.stats() == {
        "state": "closed",
        "num_bytes": num_bytes(tmp_path / "capture"),
        "max_bytes": 2**30,
        "num_requests": len(found),
        "num_outputs": sum(len(request.outputs) for request in found),
        "num_tokens": sum(len(one.token_ids) for request in found for one in request.outputs),
        "num_dropped_requests": 0,
    }


def check_acceptance_records(outputs: list[RequestOutput]) -> None:
    """AIPerf drops a record whose counts contradict each other."""
    counted = [output.metrics.speculative_decoding for output in outputs]
    records = [one for one in counted if one is not None]
    assert len(records) > 10
    for one in records:
        histogram = one["acceptance_histogram"]
        steps, accepted = one["num_spec_steps"], one["num_accepted_draft_tokens"]
        assert len(histogram) == one["num_spec_tokens"] + 1
        assert sum(histogram) == steps
        assert sum(i * count for i, count in enumerate(histogram)) == accepted
        assert accepted <= one["num_draft_tokens"] <= steps * one["num_spec_tokens"]
        if steps:
            assert one["mean_acceptance_length"] == 1 + accepted / steps
            assert one["mean_draft_length"] == one["num_draft_tokens"] / steps


def test_steps_are_those_of_the_metrics(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=50)
    with capturing(llm, tmp_path / "capture"):
        (output,) = llm.generate([[1, 2, 3]], params)
    (request,) = requests_of(tmp_path / "capture")
    steps = [step for one in request.outputs for step in one.steps if step.num_drafted]
    counted = output.metrics.speculative_decoding
    assert counted is not None and counted["drafter"] == request.drafter == "draft_model"
    assert len(steps) == counted["num_spec_steps"]
    assert sum(step.num_drafted for step in steps) == counted["num_draft_tokens"]
    assert sum(step.num_accepted for step in steps) == counted["num_accepted_draft_tokens"] > 0
    assert counted["mean_draft_length"] == counted["num_draft_tokens"] / len(steps)


def test_without_a_capture_nothing_is_kept(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        requests = llm._prepare([[1, 2, 3]], SamplingParams(max_tokens=8))
        with llm._run(requests) as stream:
            list(stream)
    assert [request.steps for request in requests] == [[]]
    assert "captured" not in caplog.text


def test_it_ends_with_its_llm_and_says_when_it_begins(
    target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(target_dir, device="cpu") as llm, caplog.at_level(logging.INFO, "paceline"):
        capture = llm.start_capture(tmp_path / "capture", max_bytes=MIN_MAX_BYTES)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, seed=1))
        assert capture.stats()["state"] == "on" and shards(tmp_path / "capture") == []
        with pytest.raises(ValueError, match="is on; allowed: one at a time"):
            llm.start_capture(tmp_path / "other")
    assert f"captured in {tmp_path / 'capture'}" in caplog.text
    (request,) = requests_of(tmp_path / "capture")
    assert request.drafter == "" and {step.num_drafted for step in request.outputs[0].steps} == {0}
    # The folder is free again, and a new capture writes beside what is there.
    with LLM(target_dir, device="cpu") as llm:
        llm.start_capture(tmp_path / "capture")
        llm.generate([[4]], SamplingParams(max_tokens=8, seed=1))
    assert [one.prompt for one in requests_of(tmp_path / "capture")] == [[1, 2, 3], [4]]


def test_replicas_are_captured(
    target_dir: Path, speculative_config: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {
        "model": str(target_dir), "speculative_config": speculative_config, "num_threads": 1,
        "device": "cpu", "max_model_len": 64, "show_progress": False,
    }  # fmt: skip
    params = SamplingParams(n=2, seed=1, max_tokens=20, return_token_sources=True)
    llm = start_replicas(2, arguments, log_level="WARNING")
    try:
        llm.start_capture(tmp_path / "capture")
        outputs = llm.generate([[i, 3, 4] for i in range(10)], params)
    finally:
        llm.close()
    found = [seen(request) for request in requests_of(tmp_path / "capture")]
    assert ordered(found) == ordered([expected(output, 1.0) for output in outputs])


def test_a_server_captures_all_routes(llm: LLM, tmp_path: Path) -> None:
    with RunningServer(llm) as server:
        assert capture_figures(server) == {}
    folder = tmp_path / "capture"
    with capturing(llm, folder) as capture, RunningServer(llm) as server:
        whole = server.result(
            COMPLETIONS, {"prompt": [7, 8], "max_tokens": 9, "return_token_ids": True}
        )
        events = server.events(
            COMPLETIONS, {"prompt": [[1], [2]], "max_tokens": 5, "return_token_ids": True}
        )
        assert server.ask(COMPLETIONS, {"prompt": "x", "n": 0})[0] == 400
        server.wait_until_idle()
        capture.close()
        found = capture_figures(server)
    requests = requests_of(folder)
    assert requests[0].prompt == [7, 8]
    assert requests[0].outputs[0].token_ids == whole["choices"][0]["token_ids"]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["token_ids"] or []
    by_prompt = {request.prompt[0]: request.outputs[0].token_ids for request in requests[1:]}
    assert by_prompt == {1: streamed[0], 2: streamed[1]}
    assert found["capture_requests_total"] == found["capture_outputs_total"] == 3
    assert found["capture_tokens_total"] == 19
    assert found["capture_bytes"] == num_bytes(folder)
    assert found["capture_max_bytes"] == 2**30
