# SPDX-License-Identifier: Apache-2.0
"""What ends a capture, what a crash leaves behind, and what is refused."""

from __future__ import annotations

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

from captured_requests import (
    capture_figures,
    capturing,
    num_bytes,
    read_shard,
    requests_of,
    shards,
    wait_for,
)
from paceline import LLM, CompletionOutput, RequestOutput, cli
from paceline.capture import MIN_MAX_BYTES, Capture, Step
from running_server import RunningServer
from time_limits import HANG_LIMIT_S

COMPLETIONS = "/v1/completions"


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
    from test_capture_limits import add, request_of

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
        found = capture_figures(server)
        stats = capture.stats()
    (line,) = [line for line in caplog.messages if "has stopped" in line]
    assert line.startswith(f"the capture to {folder} has stopped: ") and "requests go on" in line
    assert {path.name for path in folder.iterdir()} == {".lock", "capture-000000.safetensors"}
    assert len(requests_of(folder)) == stats["num_requests"] == 2
    assert found["capture_state{state=failed}"] == 1 and found["capture_state{state=on}"] == 0
    assert found["capture_dropped_requests_total"] == stats["num_dropped_requests"] >= 3


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
    assert cli.main(["serve", "--port", "0", "--capture-max-bytes", "2000000"]) != 0
    assert "--capture-max-bytes is given without --capture" in capsys.readouterr().err
