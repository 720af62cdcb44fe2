# SPDX-License-Identifier: Apache-2.0
"""The engine's log lines reach the logger "paceline" and can block nothing."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams, _core, engine_log, running_engine
from test_llm_processes import run_script
from time_limits import HANG_LIMIT_S

PROMPT = list(range(3, 30))
LONG = SamplingParams(temperature=1.0, max_tokens=400, seed=0)


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds of work after which the next LLM logs a line."""

    def change(seconds: float) -> None:
        original = running_engine.executor_options

        def changed(*arguments: Any, **named: Any) -> dict[str, Any]:
            return {"log_interval_s": seconds} | original(*arguments, **named)

        monkeypatch.setattr(running_engine, "executor_options", changed)

    return change


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Returns the messages at level INFO so far."""
    _core.take_log_lines()  # of other tests
    with caplog.at_level("INFO", logger="paceline"):
        yield lambda: [record.getMessage() for record in caplog.records]


def is_interval(message: str) -> bool:
    return message.startswith("Running: ")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {HANG_LIMIT_S} seconds"
        time.sleep(0.01)


def test_lines_of_figures(
    target_dir: Path,
    speculative_config: dict[str, Any],
    short_interval: Callable[[float], None],
    records: Callable[[], list[str]],
) -> None:
    short_interval(0.02)
    with LLM(target_dir, speculative_config=speculative_config, max_num_seqs=2) as llm:
        starts = [message for message in records() if "The engine has started on cpu" in message]
        assert len(starts) == 1 and "k = 4; a KV pool of" in starts[0]
        assert not any(map(is_interval, records()))
        llm.generate([PROMPT, PROMPT, PROMPT], LONG)
        # On a busy machine the first interval may have been the prefill's.
        wait_for(lambda: any("Speculative" in message for message in records()))
    line = next(message for message in records() if "Speculative" in message)
    number = r"[0-9]+\.[0-9]"
    assert re.fullmatch(
        rf"Running: [0-2] samples, waiting: [01] samples, prompt throughput: {number} tokens/s, "
        rf"generation throughput: {number} tokens/s, KV cache usage: {number}%, preemptions: 0"
        rf"\. Speculative decoding: mean acceptance length: {number}[0-9], draft acceptance rate: "
        rf"{number}%, accepted: {number} tokens/s, drafted: {number} tokens/s, acceptance per "
        rf"position: ([01]\.[0-9]+, ){{3}}[01]\.[0-9]+",
        line,
    ), line
    assert not any(str(PROMPT)[1:-1] in message for message in records())


def test_the_line_of_an_engine_that_chooses(
    target_dir: Path,
    speculative_config: dict[str, Any],
    short_interval: Callable[[float], None],
    records: Callable[[], list[str]],
) -> None:
    short_interval(0.02)
    config = speculative_config | {"x": {"adaptive": True}}
    with LLM(target_dir, speculative_config=config, max_num_seqs=2) as llm:
        llm.generate([PROMPT, PROMPT, PROMPT], LONG)
        wait_for(lambda: any("Drafts" in message for message in records()))
    line = next(message for message in records() if "Drafts" in message)
    of = r"[0-9.]+% of the time, [0-9.]+ tokens in ([0-9.]+ ms|unknown time)"
    choice = rf"\. Drafts: [0-4] now \(0: {of}; 1: {of}; 2: {of}; 4: {of}\)"
    assert re.search(choice, line), line


def test_lines_can_be_disabled(
    target_dir: Path, short_interval: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = _core.take_log_lines
    take()
    taken: list[tuple[int, str]] = []  # a thread may still log lines of other tests

    def recorded() -> list[tuple[int, str]]:
        lines = take()
        taken.extend(lines)
        return lines

    monkeypatch.setattr(_core, "take_log_lines", recorded)
    short_interval(0.001)
    with LLM(target_dir, max_num_seqs=2, disable_log_stats=True) as llm:
        assert llm._executor.options["log_interval_s"] == 0
        llm.generate(PROMPT, LONG)
    recorded()
    assert taken and not any(is_interval(line) for _, line in taken)
    with LLM(target_dir, max_num_seqs=2) as llm:
        assert llm._executor.options["log_interval_s"] == 0.001
    with pytest.raises(ValueError, match="disable_log_stats is 1; allowed: True or False"):
        LLM(target_dir, disable_log_stats=1)  # type: ignore[arg-type]


def test_lines_keep_their_level(caplog: pytest.LogCaptureFixture) -> None:
    lines = [(40, "the engine has failed"), (30, "the process ran out of memory")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "take_log_lines", lambda: lines)
        engine_log.forward()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == lines


def test_closing_does_not_wait_for_handlers(
    target_dir: Path, short_interval: Callable[[float], None]
) -> None:
    """A thread may close an engine while it holds a handler's lock, for example when the garbage
    collector runs inside of the handler."""
    short_interval(1e-6)  # a line each iteration
    llm = LLM(target_dir, max_num_seqs=2)
    logger = logging.getLogger("paceline")
    handler = logging.StreamHandler(io.StringIO())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    closing = threading.Thread(target=llm.close, daemon=True)
    handler.acquire()
    try:
        stream = llm.stream(PROMPT, LONG)
        for _ in range(5):
            next(stream)
        time.sleep(0.1)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        handler.release()
        closing.join(10)
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_exit_and_fork_while_an_engine_logs(target_dir: Path) -> None:
    script = """
    import logging
    from paceline import running_engine
    original = running_engine.executor_options
    running_engine.executor_options = lambda *a, **k: original(*a, **k) | {"log_interval_s": 1e-6}
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    llm = build()
    stream = llm.stream([[1, 2, 3]] * 2, LONG)
    next(iter(stream))
    codes = []
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            with build() as child:
                child.generate([[1, 2]], GREEDY)
            os._exit(0)
        codes.append(waited(pid))
    print(codes)
    # The process ends while requests run and lines are logged.
    """
    done = run_script(script, target_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 0, 0, 0, 0]", done.stderr
    assert "Running: 2 samples" in done.stderr
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr
