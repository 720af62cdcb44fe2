# SPDX-License-Identifier: Apache-2.0
"""A server with replicas: what its clients see is what one engine gives, whatever replicas do.

Each kind of request loses its replica at one moment; PACELINE_TEST_LEVEL=3 tries 30, which
PACELINE_SEED changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import copying_models
from paceline import LLM, ModelNotFoundError, SamplingParams, StructuredOutputsParams
from paceline.demo import find_demo
from paceline.replicas.replica_set import ReplicaSet
from paceline.replicas.replicated_llm import ReplicatedLLM, start_replicas
from running_server import RunningServer
from time_limits import HANG_LIMIT_S

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "paceline.json"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "def read_lines(path):"
LEVEL = int(os.environ.get("PACELINE_TEST_LEVEL", "1"))
NUM_MOMENTS = 30 if LEVEL >= 3 else 1
SEED = os.environ.get("PACELINE_SEED", "1")
LONG_PROMPT = "def f(x):\n    return x + 1\n" * 8  # several blocks
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 200, "ignore_eos": True},
    "sampled": {"seed": 5, "max_tokens": 150, "n": 3, "ignore_eos": True},
    "penalties": {
        "seed": 6,
        "max_tokens": 200,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "min_tokens": 180,
    },
    "stopped": {"seed": 4, "max_tokens": 400, "stop": ["except", "else"], "min_tokens": 150},
    "fewer drafts": {
        "seed": 3,
        "max_tokens": 200,
        "ignore_eos": True,
        "speculative": {"num_speculative_tokens": 2},
    },
    "grammar": {
        "seed": 2,
        "max_tokens": 250,
        "structured_outputs": {"regex": "([a-z]{3,9} = [0-9]{1,4}\n){90,}"},
    },
    "logprobs": {"seed": 1, "max_tokens": 200, "logprobs": 2, "ignore_eos": True},
}


def arguments(**changes: Any) -> dict[str, Any]:
    demo = find_demo("draft_model")
    return {
        "model": str(demo.target),
        "speculative_config": demo.speculative_config(),
        "max_num_seqs": 8,
        "max_model_len": 512,
        "device": "cpu",
        "show_progress": False,
    } | changes


@pytest.fixture(scope="module")
def reference() -> Iterator[RunningServer]:
    """One engine in this process."""
    with LLM(**arguments()) as llm, RunningServer(llm) as server:
        yield server


@pytest.fixture(scope="module")
def replicas() -> Iterator[RunningServer]:
    llm = start_replicas(2, arguments(), log_level="WARNING")
    with llm, RunningServer(llm) as server:
        yield server
        assert server.service.admission.num_open == 0


def executor_of(server: RunningServer) -> ReplicaSet:
    executor: Any = server.llm._executor
    assert isinstance(executor, ReplicaSet)
    return executor


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_up(server: RunningServer) -> None:
    states = executor_of(server).replica_states
    wait_for(lambda: all(one["state"] == "up" for one in states()))


def num_tokens(executor: ReplicaSet, replica: Any) -> int:
    """The output tokens of the samples that a replica runs."""
    runs = [executor.ledger._runs[run] for run in replica.runs]
    return sum(len(one.tokens) for run in runs for one in run.samples if one.run is run)


def signal_busy_replica(server: RunningServer, number: int, after: int) -> int:
    """Sends a signal to a replica, once the samples that it runs have `after` tokens, at least 1.

    The replica is stopped first, and has the signal if it still runs some then: it could end its
    last one between the look and the signal.

    Returns:
        Its index.
    """
    executor = executor_of(server)

    def is_busy(replica: Any) -> bool:
        with executor.lock:
            return num_tokens(executor, replica) >= max(after, 1)

    while True:
        wait_for(lambda: any(map(is_busy, executor._replicas)))
        for replica in filter(is_busy, executor._replicas):
            assert replica.process is not None
            process = replica.process.pid
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.1)  # what it had sent is read
            still_busy = is_busy(replica)
            if still_busy:
                os.kill(process, number)
            if not still_busy or number not in (signal.SIGKILL, signal.SIGSTOP):
                os.kill(process, signal.SIGCONT)
            if still_busy:
                return replica.index


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not differ between two runs of a request."""
    shown = dict(answer)
    for key in ("id", "created", "metrics"):
        shown.pop(key, None)
    if shown.get("usage"):
        # Which replica has the prompt in its cache is not the client's business.
        shown["usage"] = {key: shown["usage"][key] for key in ("prompt_tokens", "total_tokens")}
    return shown


def merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the chunks of a stream, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            one = choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": []})
            one["text"] += part["text"]
            one["token_ids"] += part["token_ids"]
            if part["logprobs"]:
                one["logprobs"] += part["logprobs"]["token_logprobs"]
            one["ends"] = [part["finish_reason"], part["stop_reason"]]
    return [choices[index] for index in sorted(choices)] + [
        comparable({"usage": events[-1]["usage"]})
    ]


@pytest.mark.parametrize("number", range(NUM_MOMENTS))
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_a_killed_replica_is_not_noticed(
    name: str, is_streamed: bool, number: int, replicas: RunningServer, reference: RunningServer
) -> None:
    body = BODIES[name] | {"prompt": PROMPT, "return_token_ids": True}
    options = {"stream_options": {"include_usage": True}}

    def ask(server: RunningServer) -> Any:
        if is_streamed:
            return merged(server.events(COMPLETIONS, body | options))
        return comparable(server.result(COMPLETIONS, body))

    expected = ask(reference)
    moment = random.Random(f"{SEED} {name} {is_streamed} {number}").randrange(1, 50)
    executor = executor_of(replicas)
    num_before = executor.ledger.num_resumed
    killer = threading.Thread(
        target=signal_busy_replica, args=(replicas, signal.SIGKILL, moment), daemon=True
    )
    killer.start()
    assert ask(replicas) == expected
    killer.join()
    assert executor.ledger.num_resumed > num_before


def test_structured_outputs_go_on_one_by_one(
    replicas: RunningServer, reference: RunningServer
) -> None:
    wait_until_up(replicas)
    grammar = StructuredOutputsParams(regex="([a-z]{3,9} = [0-9]{1,4}\n){90,}")
    params = SamplingParams(seed=2, n=2, max_tokens=300, structured_outputs=grammar)
    (expected,) = reference.llm.generate(PROMPT, params, use_tqdm=False)
    executor = executor_of(replicas)
    num_before = executor.ledger.num_resumed
    killer = threading.Thread(
        target=signal_busy_replica, args=(replicas, signal.SIGKILL, 40), daemon=True
    )
    killer.start()
    (output,) = replicas.llm.generate(PROMPT, params, use_tqdm=False)
    killer.join()
    assert output.outputs == expected.outputs
    assert executor.ledger.num_resumed > num_before


def test_many_requests_survive_many_deaths(
    replicas: RunningServer, reference: RunningServer
) -> None:
    executor = executor_of(replicas)
    prompts = [[1, 2, 3 + number, 4] for number in range(40)]
    params = [
        SamplingParams(
            temperature=number % 3 / 2,
            seed=number,
            max_tokens=20 + 3 * number,
            ignore_eos=True,
            n=1 + number % 2,
        )
        for number in range(40)
    ]
    expected = reference.llm.generate(prompts, params, use_tqdm=False)
    num_before = executor.ledger.num_resumed
    are_done = threading.Event()

    def kill(index: int) -> None:
        wait_for(lambda: executor._replicas[index].num_open > 10 or are_done.is_set())
        time.sleep(0.1)
        with executor.lock:
            process = executor._replicas[index].process
            assert process is not None
            process.kill()
        wait_for(lambda: executor.replica_states()[index]["state"] != "up")

    killer = threading.Thread(target=lambda: [kill(index) for index in (0, 1, 0)], daemon=True)
    killer.start()
    outputs = replicas.llm.generate(prompts, params, use_tqdm=False)
    are_done.set()
    killer.join()
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert executor.ledger.num_resumed > num_before


def test_a_replica_that_starts_again_takes_what_waits(
    replicas: RunningServer, reference: RunningServer
) -> None:
    wait_until_up(replicas)
    executor = executor_of(replicas)
    long = SamplingParams(seed=1, max_tokens=300, ignore_eos=True)
    short = dataclasses.replace(long, max_tokens=4)
    prompts = [[1, 2, 3 + number, 4] for number in range(48)]
    num_long = 40
    expected = reference.llm.generate(prompts[num_long:], short, use_tqdm=False)
    params = [long] * num_long + [short] * len(expected)
    found = {}
    with contextlib.closing(replicas.llm.stream(prompts, params)) as chunks:
        next(chunks)
        lost = signal_busy_replica(replicas, signal.SIGKILL, 1)
        wait_for(lambda: executor.replica_states()[lost]["state"] != "up")
        wait_until_up(replicas)
        held = [one["num_outputs"] for one in executor.replica_states()]
        assert held[lost] >= sum(held) // 2 - 1, held
        while len(found) < len(expected):
            chunk = next(chunks)
            if chunk.output is not None and chunk.index >= num_long:
                found[chunk.index - num_long] = chunk.output.outputs
    assert found == {index: output.outputs for index, output in enumerate(expected)}


@pytest.mark.parametrize("drafter", ["z-lab, windows", "deepseek"])
def test_block_drafters_have_the_outputs_of_one_engine(drafter: str, tmp_path: Path) -> None:
    """A request that goes on elsewhere needs the drafter's context of all its tokens there."""
    target = copying_models.write_target("qwen3", tmp_path / "target")
    config = {
        "model": str(copying_models.write_drafter(drafter, target, tmp_path / "drafter")),
        "num_speculative_tokens": 6,
        "x": {"adaptive": False},
    }
    engine = arguments(model=str(target), speculative_config=config)
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 63) for _ in range(copying_models.PERIOD)] for _ in range(6)]
    params = [
        SamplingParams(
            # At 2.5 one of five tokens is not the copied one.
            temperature=(0.0, 2.5)[number % 2],
            n=1 + number % 3,
            seed=number,
            max_tokens=250,
            ignore_eos=True,
            num_speculative_tokens=(None, 2, 6)[number % 3],
        )
        for number in range(len(prompts))
    ]
    with LLM(**engine) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with start_replicas(2, engine, log_level="WARNING") as llm, RunningServer(llm) as server:
        killer = threading.Thread(
            target=signal_busy_replica, args=(server, signal.SIGKILL, 100), daemon=True
        )
        killer.start()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        killer.join()
        assert executor_of(server).ledger.num_resumed > 0
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    for output, one in zip(outputs, expected, strict=True):
        found, alone = (o.metrics.speculative_decoding for o in (output, one))
        assert found is not None and alone is not None
        assert found["num_spec_tokens"] == alone["num_spec_tokens"]
        # Most drafts are right on the other replica, too.
        assert found["num_accepted_draft_tokens"] > 0.8 * alone["num_accepted_draft_tokens"]


def test_replicas_end_with_their_server() -> None:
    script = (
        "import os, sys; from test_replicas import arguments; "
        "from paceline.replicas.replicated_llm import start_replicas; "
        "llm = start_replicas(2, arguments(), log_level='ERROR'); "
        "print(*(one.process.pid for one in llm._executor._replicas), flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    processes = [Path("/proc") / number for number in done.stdout.split()]
    assert len(processes) == 2

    def has_ended(process: Path) -> bool:
        try:
            # What has ended stays until its new parent asks for it.
            return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_for(lambda: all(map(has_ended, processes)))


def test_chats_go_on_too(replicas: RunningServer, reference: RunningServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "class Stack:"}],
        "max_tokens": 80,
        "temperature": 1,
        "seed": 9,
    }
    expected = reference.events(CHATS, body)
    killer = threading.Thread(
        target=signal_busy_replica, args=(replicas, signal.SIGKILL, 20), daemon=True
    )
    killer.start()
    events = replicas.events(CHATS, body)
    killer.join()
    for each in (events, expected):
        assert each[0]["choices"][0]["delta"]["role"] == "assistant"
        assert len({event["id"] for event in each}) == 1
    texts = [
        "".join(event["choices"][0]["delta"]["content"] for event in each)
        for each in (events, expected)
    ]
    assert texts[0] == texts[1]


def test_one_replica_down_is_reported_and_it_starts_again(replicas: RunningServer) -> None:
    wait_until_up(replicas)
    before = [one["num_restarts"] for one in executor_of(replicas).replica_states()]
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    asking = threading.Thread(target=replicas.result, args=(COMPLETIONS, body))
    asking.start()
    down = signal_busy_replica(replicas, signal.SIGKILL, 1)
    wait_for(lambda: replicas.result("/health")["status"] == "degraded")
    with replicas.send("/metrics") as response:
        text = response.read().decode()
    assert f'paceline_replica_up{{model="served",replica="{down}"}} 0.0' in text
    assert f'paceline_replica_up{{model="served",replica="{1 - down}"}} 1.0' in text
    assert f'paceline_iterations_total{{model="served",replica="{1 - down}"}}' in text
    assert text.count("# TYPE paceline_iterations_total counter") == 1
    dashboard = DASHBOARD.read_text()
    for name in ("replica_up", "replica_outputs", "outputs_resumed_total"):
        assert f"paceline_{name}{{" in text and f"paceline_{name}{{" in dashboard
    assert f'vllm:num_requests_running{{model_name="served",replica="{1 - down}"}}' in text
    asking.join()
    wait_until_up(replicas)
    assert replicas.result("/health")["status"] == "ok"
    after = [one["num_restarts"] for one in executor_of(replicas).replica_states()]
    assert after[down] == before[down] + 1


def test_capabilities_are_those_of_a_replica(
    replicas: RunningServer, reference: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference.result("/v1/capabilities")
    # Asking CUDA would take memory of a GPU that a replica has.
    monkeypatch.delattr("paceline._core.cuda_status")
    found = replicas.result("/v1/capabilities")
    assert found["server"].pop("replicas") == 2 and expected["server"].pop("replicas") == 1
    assert found["server"].pop("max_outputs") == 2 * expected["server"].pop("max_outputs")
    found["configured"]["num_threads"] = expected["configured"]["num_threads"]
    assert found == expected


def test_a_draining_replica_ends_what_it_runs(replicas: RunningServer) -> None:
    wait_until_up(replicas)
    executor = executor_of(replicas)
    num_before = executor.ledger.num_resumed
    restarts = sum(one["num_restarts"] for one in executor.replica_states())
    # Its prefix would lead the second request to the same replica.
    body = {"prompt": LONG_PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    asking = threading.Thread(target=replicas.result, args=(COMPLETIONS, body))
    asking.start()
    drained = signal_busy_replica(replicas, signal.SIGTERM, 1)
    wait_for(lambda: executor.replica_states()[drained]["state"] == "draining")
    other = str(1 - drained)
    finished = executor.replica_stats()[other]["num_finished"]
    replicas.result(COMPLETIONS, body | {"max_tokens": 2})
    assert executor.replica_stats()[other]["num_finished"] == finished + 1
    asking.join()
    wait_until_up(replicas)
    assert executor.ledger.num_resumed == num_before
    assert sum(one["num_restarts"] for one in executor.replica_states()) == restarts + 1


def test_a_replica_that_hangs_is_killed(
    replicas: RunningServer, reference: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_up(replicas)
    monkeypatch.setattr(executor_of(replicas), "_hang_s", 3.0)
    time.sleep(1.1)  # until the next heartbeat, after which the new limit holds
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "return_token_ids": True}
    expected = comparable(reference.result(COMPLETIONS, body))
    stopper = threading.Thread(
        target=signal_busy_replica, args=(replicas, signal.SIGSTOP, 5), daemon=True
    )
    stopper.start()
    assert comparable(replicas.result(COMPLETIONS, body)) == expected
    stopper.join()


def test_what_an_engine_refuses_is_the_fault_of_the_client() -> None:
    small = arguments(kv_cache_bytes=786432, max_model_len=1024)
    with start_replicas(1, small, log_level="WARNING") as llm, RunningServer(llm) as server:
        body = {"prompt": PROMPT, "max_tokens": 900}
        status, answer = server.ask(COMPLETIONS, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
        assert "raise kv_cache_bytes or lower max_tokens" in answer["error"]["message"]
        server.result(COMPLETIONS, body | {"max_tokens": 4})


def test_a_conversation_stays_on_its_replica(replicas: RunningServer) -> None:
    wait_until_up(replicas)
    cached = []
    for number in range(4):
        body = {"prompt": f"x = 1\n{LONG_PROMPT}# {number}\n", "max_tokens": 4, "temperature": 0}
        usage = replicas.result(COMPLETIONS, body)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 64


def test_replicas_have_one_length() -> None:
    """A request may go on in another replica, where it must end at the same length."""
    given = [arguments(kv_cache_bytes=size, max_model_len=None) for size in (3 << 18, 1 << 20)]
    with pytest.raises(
        ValueError, match=r"default of --max-model-len differs, \d+ and \d+"
    ) as error:
        ReplicaSet(given, [{}, {}], log_level="ERROR")
    assert "give --max-model-len" in str(error.value)


def test_replicas_keep_salts_apart(replicas: RunningServer) -> None:
    wait_until_up(replicas)
    body = {"prompt": f"y = 2\n{LONG_PROMPT}", "max_tokens": 4, "temperature": 0}
    results = [
        replicas.result(COMPLETIONS, body | ({"cache_salt": salt} if salt else {}))
        for salt in ("", "", "a", "a", "b")
    ]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in results]
    assert cached[0] == cached[2] == cached[4] == 0 and min(cached[1], cached[3]) >= 64
    assert len({one["choices"][0]["text"] for one in results}) == 1


def test_a_client_that_goes_away_ends_its_request(replicas: RunningServer) -> None:
    wait_until_up(replicas)
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "n": 2, "stream": True}
    with replicas.send(COMPLETIONS, body) as response:
        response.readline()
    wait_for(lambda: replicas.service.admission.num_open == 0)
    wait_for(lambda: replicas.llm.stats()["num_running"] == 0)
    assert all(group["held_blocks"] == 0 for group in replicas.llm.stats()["kv_groups"])
    assert not executor_of(replicas).ledger._requests


def test_without_replicas_requests_are_refused_until_one_is_back(
    replicas: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_up(replicas)
    executor = executor_of(replicas)
    broken = [one | {"model": "/nonexistent"} for one in executor._arguments]
    whole = executor._arguments
    monkeypatch.setattr(executor, "_arguments", broken)
    for replica in executor._replicas:
        assert replica.process is not None
        replica.process.kill()
    wait_for(lambda: "no replica runs" in str(replicas.ask("/health")[1]))
    assert replicas.ask("/health")[0] == 503
    status, answer = replicas.ask(COMPLETIONS, {"prompt": PROMPT})
    assert status == 503
    assert "no replica runs" in answer["error"]["message"]
    monkeypatch.setattr(executor, "_arguments", whole)
    wait_until_up(replicas)
    replicas.result(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})


def test_health_is_503_while_every_replica_starts(
    replicas: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balancer sends requests to another server meanwhile; those that come anyway wait."""
    wait_until_up(replicas)
    executor = executor_of(replicas)
    may_start = threading.Event()
    spawn = executor._spawn

    def spawn_later(replica: Any) -> Any:
        assert may_start.wait(HANG_LIMIT_S)
        return spawn(replica)

    monkeypatch.setattr(executor, "_spawn", spawn_later)
    for replica in executor._replicas:
        assert replica.process is not None
        replica.process.kill()
    wait_for(lambda: all(one["state"] == "starting" for one in executor.replica_states()))
    status, answer = replicas.ask("/health")
    assert status == 503 and answer["status"] == "starting"
    assert [one["state"] for one in answer["replicas"]] == ["starting", "starting"]
    assert "no replica is up" in answer["error"]["message"]
    asked: list[Any] = []
    body = {"prompt": PROMPT, "max_tokens": 2}
    asking = threading.Thread(target=lambda: asked.append(replicas.ask(COMPLETIONS, body)[0]))
    asking.start()
    may_start.set()
    asking.join(HANG_LIMIT_S)
    assert asked == [200]
    wait_until_up(replicas)
    assert replicas.result("/health")["status"] == "ok"


def test_a_model_that_does_not_load_ends_the_start() -> None:
    with pytest.raises(ModelNotFoundError, match="nonexistent"):
        start_replicas(2, arguments(model="/nonexistent"), log_level="ERROR")


def test_arguments_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ValueError, match="chat_template cannot be sent to the process of"):
        start_replicas(2, arguments(chat_template=lambda: ""), log_level="ERROR")


def test_weights_are_not_updated(replicas: RunningServer) -> None:
    assert isinstance(replicas.llm, ReplicatedLLM)
    with pytest.raises(NotImplementedError, match="replicas keep their weights"):
        replicas.llm.update_weights({})
    with pytest.raises(NotImplementedError, match="replicas generate only"):
        replicas.llm.logits("a")
