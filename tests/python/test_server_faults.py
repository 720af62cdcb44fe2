# SPDX-License-Identifier: Apache-2.0
"""Faults under a server: each request ends cleanly, and the next hundred are served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from paceline import LLM, DeviceError
from running_server import JSON, RunningServer, read_events
from time_limits import HANG_LIMIT_S
from tiny_models import TinySpec

SUPPORT = Path(__file__).parents[1] / "support"
COMPLETIONS = "/v1/completions"
IS_LONG = os.environ.get("PACELINE_TEST_LEVEL") == "3"
# The embedding of this token is NaN.
BAD_TOKEN = 63


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A target and a drafter that cannot read one token."""
    spec = TinySpec("llama", seed=1)
    folder = tmp_path_factory.mktemp("faults") / "model"
    tiny_models.copy_checkpoint(tiny_models.make(spec), folder)

    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan

    tiny_models.edit_tensors(folder, spoil)
    with open_llm(folder) as llm:
        yield llm


def open_llm(folder: Path, **arguments: Any) -> LLM:
    return LLM(
        folder,
        speculative_config={"model": str(folder), "num_speculative_tokens": 3},
        max_num_seqs=8,
        max_model_len=2048,
        device="cpu",
        show_progress=False,
        **arguments,
    )


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(llm, max_queue=100) as server:
        yield server


#: A request that still runs while a test looks at it: one token an iteration.
LONG = {"max_tokens": 1900, "speculative": {"num_speculative_tokens": 0}}


def body_of(index: int, **fields: Any) -> dict[str, Any]:
    """A request whose output does not have the bad token."""
    return {
        "prompt": [1 + index % 50, 2, 3],
        "max_tokens": 20,
        "seed": index,
        "allowed_token_ids": list(range(BAD_TOKEN)),
        "ignore_eos": True,
        "return_token_ids": True,
    } | fields


def tokens_of(server: RunningServer, index: int) -> list[int]:
    choice = server.result(COMPLETIONS, body_of(index))["choices"][0]
    assert choice["finish_reason"] == "length"
    return list(choice["token_ids"])


def check_next_hundred(server: RunningServer, expected: list[list[int]]) -> None:
    """The next hundred requests get what they always get, and all blocks are free afterwards."""
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda i: tokens_of(server, i % len(expected)), range(100)))
    assert seen == [expected[i % len(expected)] for i in range(100)]
    server.wait_until_idle()


def expected_tokens(server: RunningServer) -> list[list[int]]:
    return [tokens_of(server, index) for index in range(10)]


def test_any_allocation_of_the_engine_may_fail(tmp_path: Path) -> None:
    library = tmp_path / "failing_new.so"
    source = SUPPORT / "failing_new.cc"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, SUPPORT / "server_faults.py", "1000", "1" if IS_LONG else "45"],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=2 * HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    print(done.stdout)
    assert done.stdout.endswith("ended\n")


@pytest.mark.parametrize("streams", [False, True])
def test_bad_logits_end_one_request(streams: bool, server: RunningServer) -> None:
    expected = expected_tokens(server)
    body = body_of(3, max_tokens=200)
    whole = server.result(COMPLETIONS, body)["choices"][0]["token_ids"]
    with server.send(COMPLETIONS, body | {"stream": True}) as beside:
        for prompt in ([BAD_TOKEN], [5] * 40 + [BAD_TOKEN], [5] * 20 + [BAD_TOKEN, 6, 7]):
            bad = body_of(0, prompt=prompt)
            if streams:
                error = server.events(COMPLETIONS, bad)[-1]["error"]
            else:
                status, answer = server.ask(COMPLETIONS, bad)
                error = answer["error"]
                assert status == 500
            assert "produce NaN or infinity" in error["message"]
        choices = [event["choices"][0] for event in read_events(beside)]
        seen = [token for choice in choices for token in choice["token_ids"]]
    assert seen == whole
    assert server.ask("/health")[0] == 200
    check_next_hundred(server, expected)


CLIENT = """
import http.client, json, sys, time
for streams in [True, False] * 3:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    body = json.loads(sys.argv[2]) | {"stream": streams}
    connection.request("POST", "/v1/completions", json.dumps(body), json.loads(sys.argv[3]))
    globals().setdefault("kept", []).append(connection)
print("sent", flush=True)
time.sleep(60)
"""


def test_a_killed_client_frees_its_blocks(server: RunningServer) -> None:
    expected = expected_tokens(server)
    cancelled = server.llm.stats()["num_cancelled"]
    body = json.dumps(body_of(1, **LONG))
    command = [sys.executable, "-c", CLIENT, str(server.port), body, json.dumps(JSON)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and client.stdout.readline() == "sent\n"
        while server.llm.stats()["num_running"] < 6:
            time.sleep(0.0005)
        client.send_signal(signal.SIGKILL)
    server.wait_until_idle()
    assert server.llm.stats()["num_cancelled"] - cancelled > 0
    check_next_hundred(server, expected)


class StoppingExecutor:
    """An executor whose device stops when told to, as one that has lost its GPU."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.has_stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.has_stopped.is_set() and name in ("poll", "add_requests", "cancel", "stats"):
            raise DeviceError("the device has stopped")
        return getattr(self._executor, name)


@pytest.mark.serial
def test_a_device_that_stops_ends_all_requests_at_once(llm: LLM, server: RunningServer) -> None:
    """The engine does not survive it. One that takes its place serves the next hundred."""
    expected = expected_tokens(server)
    folder = Path(llm.target.path)
    with open_llm(folder) as broken:
        executor = StoppingExecutor(broken._dispatcher.executor)
        broken._dispatcher.executor = executor
        with RunningServer(broken) as failing, ThreadPoolExecutor(8) as pool:
            body = body_of(1, **LONG)

            def ask(streams: bool) -> str:
                if streams:
                    last = failing.events(COMPLETIONS, body)[-1]
                    return str(last["error"]["message"])
                status, answer = failing.ask(COMPLETIONS, body)
                assert status == 503
                return str(answer["error"]["message"])

            running = [pool.submit(ask, bool(i % 2)) for i in range(8)]
            while broken._dispatcher.executor.stats()["num_running"] < 8:
                time.sleep(0.0005)
            started = time.monotonic()
            executor.has_stopped.set()
            assert {one.result(10) for one in running} == {"the device has stopped"}
            for path, sent in (("/health", None), (COMPLETIONS, body), (COMPLETIONS, body)):
                status, answer = failing.ask(path, sent)
                assert status == 503 and answer["error"]["message"] == "the device has stopped"
            assert time.monotonic() - started < 5
            assert failing.service.admission.num_open == 0
    with open_llm(folder) as whole, RunningServer(whole, max_queue=100) as other:
        check_next_hundred(other, expected)


def test_a_device_that_hangs_is_a_failure(llm: LLM) -> None:
    """As no iteration is fast enough for this limit, any is found to hang."""
    with (
        open_llm(Path(llm.target.path), hang_timeout_s=1e-9) as hung,
        RunningServer(hung) as failing,
    ):
        assert failing.ask("/health")[0] == 200
        for path, sent in ((COMPLETIONS, body_of(1, **LONG)), ("/health", None)):
            status, answer = failing.ask(path, sent)
            assert status == 503
            assert "the device has not completed an iteration for" in answer["error"]["message"]
    for wrong in (0, -1, 1e9, "a"):
        with pytest.raises(ValueError, match="hang_timeout_s is"):
            open_llm(Path(llm.target.path), hang_timeout_s=wrong)
