# SPDX-License-Identifier: Apache-2.0
"""Captures: what they have of served requests, their limit, and what stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open

import deepseek_v4_models
from async_tasks import idle, last, run
from captured_requests import CapturedRequest, num_bytes, read_shard, requests_of, shards
from deepseek_v4_models import V4Spec
from paceline import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams, cli
from paceline.capture import MIN_MAX_BYTES, Capture, Step
from paceline.outputs import token_sources
from paceline.prompt_values import score_prompt
from paceline.replicas.replicated_llm import start_replicas
from running_server import RunningServer
from time_limits import HANG_LIMIT_S

COMPLETIONS = "/v1/completions"
#: Room for a few of the sequences that run at once, so that some are preempted.
SMALL: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 8, "max_model_len": 512, "show_progress": False,
    "kv_cache_bytes": 512 << 10, "block_size": 16,
}  # fmt: skip


@pytest.fixture
def small_llm(target_dir: Path, speculative_config: dict[str, Any]) -> Iterator[LLM]:
    with LLM(target_dir, speculative_config=speculative_config, **SMALL) as llm:
        yield llm


@contextmanager
def capturing(llm: LLM, folder: Path, **options: Any) -> Iterator[Capture]:
    """A capture of an LLM that other tests use too."""
    capture = llm.start_capture(folder, **options)
    try:
        yield capture
    finally:
        capture.close()
        llm._requests.capture = None


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


# ---- hidden states -----------------------------------------------------------------------------


def hidden_states(folder: Path) -> list[tuple[list[int], Any]]:
    """Prompt and output of each output of a folder, and its hidden states [n, layers, size]."""
    found = []
    for path in shards(folder):
        with safe_open(path, framework="pt") as shard:
            states, offsets = shard.get_tensor("hidden_states"), shard.get_tensor("hidden_offsets")
        texts = [r.prompt + one.token_ids for r in read_shard(path) for one in r.outputs]
        assert len(offsets) == len(texts) + 1 and offsets[-1] == len(states)
        for text, begin, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
            found.append((text, states[begin:end]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_are_those_of_the_target(
    target_dir: Path, speculative_config: dict[str, Any], tmp_path: Path, dtype: str
) -> None:
    """Computed beside other requests, and after them: closing the engine comes last."""
    with LLM(
        target_dir, speculative_config=speculative_config, dtype=dtype,
        **SMALL | {"kv_cache_bytes": 4 << 20, "max_model_len": 128},
    ) as llm:  # fmt: skip
        capture = llm.start_capture(tmp_path / "capture", hidden_layers=[1, -1, 0])
        capture._shard_bytes = 700_000
        for seed in range(3):
            prompts = [[seed, i, 7] * (1 + 5 * i) for i in range(4)]
            llm.generate(prompts, SamplingParams(n=2, seed=seed, max_tokens=100, ignore_eos=True))
    stats = capture.stats()
    assert (stats["state"], stats["num_requests"], stats["num_dropped_requests"]) == (
        "closed",
        12,
        0,
    )
    with safe_open(shards(tmp_path / "capture")[0], framework="pt") as shard:
        assert shard.metadata()["hidden_layers"] == f"1,{num_layers(llm)},0"
    found = hidden_states(tmp_path / "capture")
    assert len(found) == 24 and {len(text) for text, _ in found} >= {103, 118}
    with LLM(target_dir, dtype=dtype, device="cpu", max_model_len=128) as plain:
        for text, states in found:
            expected = torch.from_numpy(plain.hidden_states(text, [1, -1, 0])).transpose(0, 1)
            assert states.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
            assert torch.equal(states, expected.to(states.dtype))


def num_layers(llm: LLM) -> int:
    return len(llm.target.config["layers"])


def test_hidden_states_count_towards_the_limit(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    with capturing(
        llm, tmp_path / "capture", max_bytes=MIN_MAX_BYTES, hidden_layers=[0, 1, 2, 3]
    ) as capture:
        capture._shard_bytes = 300_000
        while capture.stats()["state"] == "on":
            llm.generate([[5] * 200] * 4, params)
        stats = wait_for(capture, "full")
    assert (
        MIN_MAX_BYTES // 2 < num_bytes(tmp_path / "capture") == stats["num_bytes"] <= MIN_MAX_BYTES
    )
    assert len(hidden_states(tmp_path / "capture")) == stats["num_outputs"] > 0


def test_a_full_queue_only_delays_hidden_states(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*args: Any, **request: Any) -> Any:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise RuntimeError("the queue of waiting requests is full; try again later")
        return score_prompt(*args, **request)

    num_refused = 3
    monkeypatch.setattr("paceline.prompt_values.score_prompt", score)
    with capturing(llm, tmp_path / "capture", hidden_layers=[1]) as capture:
        num_refused = 0
        llm.generate([[1, 2]], SamplingParams(max_tokens=4, seed=1))
    assert num_refused == 3 and capture.stats()["num_requests"] == 1
    assert len(hidden_states(tmp_path / "capture")) == 1


def test_engines_without_such_hidden_states(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(deepseek_v4_models.make(V4Spec()), device="cpu", max_model_len=64) as streams:
        last = num_layers(streams)
        with pytest.raises(ValueError, match=rf"hidden_layers\[0\] is 1, .*; allowed: {last}"):
            streams.start_capture(tmp_path / "capture", hidden_layers=[1])
        with streams.start_capture(tmp_path / "last", hidden_layers=[last]):
            streams.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1))
    assert len(hidden_states(tmp_path / "last")) == 1
    asked = []

    def refuse(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise NotImplementedError("replicas generate only")

    monkeypatch.setattr("paceline.prompt_values.score_prompt", refuse)
    with pytest.raises(NotImplementedError, match="replicas generate only"):
        llm.start_capture(tmp_path / "capture", hidden_layers=[1])
    assert asked == [1] and not (tmp_path / "capture").exists()


def test_layers_that_do_not_exist(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = num_layers(llm)
    for layers, message in (
        ([last + 1], rf"hidden_layers\[0\] is {last + 1}; allowed: an integer from -{last + 1} to"),
        ([0, 1.5], r"hidden_layers\[1\] is 1.5"),
        ([], r"hidden_layers is \[\]; allowed: a list of indices"),
        ("1", r"hidden_layers is '1'"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.start_capture(tmp_path / "capture", hidden_layers=layers)  # type: ignore[arg-type]
    assert not (tmp_path / "capture").exists() and llm._requests.capture is None
    folder = ["--capture", str(tmp_path / "capture")]
    for argv, error in (
        ([*folder, "--capture-hidden-layers", "7"], "--capture-hidden-layers[0] is 7; allowed: an"),
        ([*folder, "--capture-hidden-layers", "a"], "'a' is not a list of layers"),
        (["--capture-hidden-layers", "1"], "is given without --capture"),
        (
            [*folder, "--capture-hidden-layers", "1", "--replicas", "2"],
            "hidden states of one engine",
        ),
    ):
        with contextlib.suppress(SystemExit):
            assert cli.main(["serve", "--port", "0", "--quiet", *argv]) != 0
        assert error in capsys.readouterr().err


# ---- the folder and its limit ------------------------------------------------------------------


def request_of(rng: random.Random) -> tuple[RequestOutput, list[list[Step]]]:
    """A request of any size that is none of an engine's."""
    outputs, steps = [], []
    for index in range(rng.randrange(1, 4)):
        ids = [rng.randrange(2**31) for _ in range(rng.choice([1, 5, 400]))]
        reason = rng.choice(["stop", "length", "abort"])
        outputs.append(CompletionOutput("", ids, None, reason, index=index))
        steps.append([Step(1, 4, 0)] * len(ids))
    prompt = [rng.randrange(2**31) for _ in range(rng.choice([0, 1, 50, 3000]))]
    return RequestOutput(None, prompt, outputs, None), steps  # type: ignore[arg-type]


def add(capture: Capture, request: tuple[RequestOutput, list[list[Step]]]) -> None:
    capture.add(*request, temperature=0.5, drafter="ngram")


def wait_for(capture: Capture, state: str) -> dict[str, Any]:
    """Waits until the capture has ended by itself, and has logged why."""
    capture._thread.join(HANG_LIMIT_S)
    stats = capture.stats()
    assert stats["state"] == state
    return stats


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """All shards together stay below the limit, and hold all requests up to the one too many."""
    rng = random.Random(seed)
    limit = MIN_MAX_BYTES + rng.randrange(2**20)
    shard_bytes = rng.choice([10_000, 100_000, 10_000_000])
    with Capture(tmp_path, max_bytes=limit, shard_bytes=shard_bytes) as capture:
        given = []
        while capture.stats()["state"] == "on":
            request = request_of(rng)
            given.append(request[0])
            waiting = capture.stats()["num_dropped_requests"]
            add(capture, request)
            if capture.stats()["num_dropped_requests"] > waiting:
                given.pop()  # the limit, or a disk slower than this loop
        stats = wait_for(capture, "full")
        add(capture, request_of(rng))
        assert capture.stats()["num_dropped_requests"] == stats["num_dropped_requests"] + 1
    found = requests_of(tmp_path)
    assert [one.prompt for one in found] == [one.prompt_token_ids for one in given], f"seed {seed}"
    for request, output in zip(found, given, strict=True):
        assert [one.token_ids for one in request.outputs] == [
            one.token_ids for one in output.outputs
        ]
    assert limit // 2 < num_bytes(tmp_path) == stats["num_bytes"] <= limit
    lines = [line for line in caplog.messages if "has stopped" in line]
    assert lines == [
        f"the capture to {tmp_path} has stopped at its limit of {limit} bytes; requests go on"
    ]
    assert [path for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    with pytest.raises(ValueError, match="bytes of shards, and max_bytes is"):
        Capture(tmp_path, max_bytes=limit)


def test_a_request_is_written_after_a_while(tmp_path: Path) -> None:
    with Capture(tmp_path, max_age_s=0.05) as capture:
        add(capture, request_of(random.Random(1)))
        deadline = time.monotonic() + HANG_LIMIT_S
        while not shards(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert capture.stats()["state"] == "on"


KILLED = """
    import random
    import sys
    from pathlib import Path

    from paceline.capture import Capture
    from test_capture import add, request_of

    rng = random.Random(7)
    capture = Capture(Path(sys.argv[1]), shard_bytes=20_000, max_bytes=2**40)
    while True:
        add(capture, request_of(rng))
        while capture._waiting_bytes >= 20_000:
            pass
"""


def test_a_process_that_is_killed_leaves_whole_shards(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    for turn in range(4):
        before = len(shards(folder))
        script = textwrap.dedent(KILLED)
        with subprocess.Popen(
            [sys.executable, "-c", script, folder],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process:
            try:
                deadline = time.monotonic() + HANG_LIMIT_S
                while len(shards(folder)) < before + 3:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.001)
                if turn == 0:
                    with pytest.raises(ValueError, match="is that of another engine"):
                        Capture(folder)
            finally:
                process.kill()
        rng = random.Random(7)  # each process begins again
        for shard in shards(folder)[before:]:
            for request in read_shard(shard):
                output, _ = request_of(rng)
                assert request.prompt == output.prompt_token_ids
                assert [one.token_ids for one in request.outputs] == [
                    one.token_ids for one in output.outputs
                ]
    (folder / ".capture-000099.safetensors.part").write_bytes(b"half of a shard")
    with Capture(folder, max_bytes=2**40):
        assert not list(folder.glob(".*.part"))


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """A file that grows beyond this fails, as it does on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_stops_the_capture_alone(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "capture"
    body = {"prompt": [5] * 400, "max_tokens": 40, "n": 2, "seed": 1}
    with capturing(llm, folder) as capture, RunningServer(llm) as server:
        capture._shard_bytes = 3_000  # two requests
        first = [server.result(COMPLETIONS, body) for _ in range(2)]
        deadline = time.monotonic() + HANG_LIMIT_S
        while not shards(folder):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        with full_disk(1_000):
            while capture.stats()["state"] == "on":
                assert server.result(COMPLETIONS, body)["choices"] == first[0]["choices"]
            wait_for(capture, "failed")
        assert server.result(COMPLETIONS, body)["choices"] == first[0]["choices"]
        found = figures(server)
        stats = capture.stats()
    (line,) = [line for line in caplog.messages if "has stopped" in line]
    assert line.startswith(f"the capture to {folder} has stopped: ") and "requests go on" in line
    assert {path.name for path in folder.iterdir()} == {".lock", "capture-000000.safetensors"}
    assert len(requests_of(folder)) == stats["num_requests"] == 2
    assert found["capture_state{state=failed}"] == 1 and found["capture_state{state=on}"] == 0
    assert found["capture_dropped_requests_total"] == stats["num_dropped_requests"] >= 3


def figures(server: RunningServer) -> dict[str, float]:
    """The figures of the capture, by name and further label."""
    with server.send("/metrics") as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("paceline_capture"):
                labels = [
                    f"{key}={value}" for key, value in sample.labels.items() if key != "model"
                ]
                shown = f"{{{','.join(labels)}}}" if labels else ""
                found[sample.name.removeprefix("paceline_") + shown] = sample.value
    return found


def test_a_server_captures_all_routes(llm: LLM, tmp_path: Path) -> None:
    with RunningServer(llm) as server:
        assert figures(server) == {}
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
        found = figures(server)
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


# ---- what is refused ---------------------------------------------------------------------------


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "none" / "such", tmp_path / "file" / "x"):
        with pytest.raises(ValueError, match=r"cannot be written: .*; allowed: a folder that this"):
            Capture(folder)
    Capture(tmp_path / "capture").close()
    with Capture(tmp_path / "capture"), pytest.raises(ValueError, match="that of another engine"):
        Capture(tmp_path / "capture")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("paceline.capture.shutil.disk_usage", lambda _: free)
    with pytest.raises(ValueError, match="has 1000 bytes left; allowed: at least 1048576"):
        Capture(tmp_path / "capture", max_bytes=MIN_MAX_BYTES)
    for limit in (MIN_MAX_BYTES - 1, 2.5, True):
        with pytest.raises(ValueError, match=r"max_bytes is .*; allowed: an integer from 1048576"):
            Capture(tmp_path / "capture", max_bytes=limit)  # type: ignore[arg-type]
    monkeypatch.undo()
    Capture(tmp_path / "capture").close()  # an error keeps no lock


def test_options_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("paceline.llm.load_pair", load)
    argv = ["serve", "--port", "0", "--capture", str(tmp_path / "capture")]
    with Capture(tmp_path / "capture"):
        assert cli.main(argv) != 0
    assert "is that of another engine, which runs" in capsys.readouterr().err
    assert cli.main([*argv, "--capture-max-bytes", "1000"]) != 0
    error = capsys.readouterr().err
    assert "--capture-max-bytes is 1000; allowed: an integer from 1048576" in error
