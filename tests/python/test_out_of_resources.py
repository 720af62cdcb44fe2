# SPDX-License-Identifier: Apache-2.0
"""If the system refuses threads or memory, an error names which, and the process continues."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.bench.models import named_config
from paceline.demo import demo_paths
from paceline.loader import dummy_model
from time_limits import HANG_LIMIT_S

PROLOGUE = """
import resource, sys
import paceline

def status(name):  # of this process; sizes are in KiB
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1])

def limit_address_space(more):
    limit = resource.RLIM_INFINITY if more is None else (status("VmSize") << 10) + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
"""

BUILD_WITHOUT_THREADS = (
    PROLOGUE
    + """
llm = paceline.LLM(sys.argv[1], max_model_len=64, kv_cache_bytes=8 << 20, num_threads=1)
llm.close()
before = status("Threads")
# Each thread wants several MiB of address space for its stack: a few fit, 1023 do not.
limit_address_space(160 << 20)
try:
    paceline.LLM(sys.argv[1], max_model_len=64, kv_cache_bytes=8 << 20, num_threads=1024)
except paceline.DeviceError as error:
    print(error)
limit_address_space(None)
assert status("Threads") == before, (status("Threads"), before)
with paceline.LLM(sys.argv[1], max_model_len=64, kv_cache_bytes=8 << 20) as llm:
    print("then", len(llm.generate("abc", paceline.SamplingParams(max_tokens=5))))
"""
)

SCORE_WITHOUT_MEMORY = (
    PROLOGUE
    + """
from paceline import _core
from paceline.loader import load_checkpoint

model = load_checkpoint(sys.argv[1]).model
executor = _core.Executor(model, None, {"max_model_len": 2048, "kv_cache_bytes": 8 << 20})
requests = [_core.Request([1] * 2000, score_prompt=True) for _ in range(1000)]
limit_address_space(32 << 20)  # the logits of all would take more
try:
    executor.add_requests(requests, [])
except MemoryError as error:
    message = str(error)
limit_address_space(None)
print(message)
ids = []
assert executor.add_requests(requests[:1], ids)
events = []
while not events:
    events = executor.poll(1000)
print("then", events[0].finish_reason)
"""
)

GENERATE_WITHOUT_MEMORY = (
    PROLOGUE
    + """
from paceline import _core
from paceline.loader import load_checkpoint

model = load_checkpoint(sys.argv[1]).model
options = {"max_model_len": 512, "kv_cache_bytes": 8 << 20, "num_threads": 4}
executor = _core.Executor(model, None, options)

def finish_reason():
    assert executor.add_requests([_core.Request([5] * 200, max_tokens=4)], [])
    events = []
    while not events or events[-1].finish_reason is None:
        events += executor.poll(1000)
    return events[-1].finish_reason

held = [bytes(1 << 18) for _ in range(64)]  # no free block of the heap holds a thread's buffer
limit_address_space(256 << 10)
first = finish_reason()
limit_address_space(None)
print(first)
print("then", finish_reason())
"""
)

# The engine's thread throws its first exception while there is no memory at all.
RUN_WITHOUT_MEMORY = (
    PROLOGUE
    + """
import ctypes, time
from paceline import _core
from paceline.loader import load_checkpoint

library = ctypes.CDLL(sys.argv[2])
model = load_checkpoint(sys.argv[1]).model
options = {"max_model_len": 1024, "kv_cache_bytes": 16 << 20, "max_num_seqs": 16}
executor = _core.Executor(model, None, options)

def finish_reasons(exhausted_ms):
    requests = [_core.Request([5] * 50, max_tokens=900) for _ in range(16)]
    assert executor.add_requests(requests, [])
    if exhausted_ms:
        time.sleep(0.02)
        library.exhaust_memory(exhausted_ms)
    reasons = []
    while len(reasons) < 16:
        reasons += [e.finish_reason for e in executor.poll(1000) if e.finish_reason is not None]
    return reasons

print(len(finish_reasons(300)))
print("then", *set(finish_reasons(0)))
"""
)


def run(program: str, model: Path, *arguments: str, **variables: str) -> list[str]:
    """Returns the lines that a process under a resource limit prints."""
    command = [sys.executable, "-c", program, str(model), *arguments]
    environment = os.environ | variables
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_LIMIT_S, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_no_more_threads_is_an_error(target_dir: Path) -> None:
    message, last = run(BUILD_WITHOUT_THREADS, target_dir)
    assert "num_threads is 1024, which takes 1023 threads" in message
    assert "could be started" in message
    assert last == "then 1"


def test_no_more_memory_is_an_error(target_dir: Path) -> None:
    message, last = run(SCORE_WITHOUT_MEMORY, target_dir)
    assert message.startswith("the process is out of memory")
    assert last == "then length"


def test_ops_need_no_memory_that_the_llm_does_not_have() -> None:
    # bfloat16 weights: their product converts rows in a buffer of each thread.
    target, _ = demo_paths("draft_model")
    first, last = run(GENERATE_WITHOUT_MEMORY, target)
    assert first == "length"
    assert last == "then length"


def test_no_memory_at_all_does_not_end_the_process(tmp_path: Path) -> None:
    library = tmp_path / "exhausting.so"
    source = Path(__file__).parents[1] / "support" / "exhausting.cc"
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-o", library, source], check=True)
    target, _ = demo_paths("draft_model")
    # With one heap for all threads, what one takes is not there for another.
    num_ended, last = run(RUN_WITHOUT_MEMORY, target, str(library), MALLOC_ARENA_MAX="1")
    assert num_ended == "16" and last == "then length"


@pytest.mark.serial
def test_weights_that_do_not_fit_are_refused_before_they_are_written() -> None:
    # The system would grant this and then end the process, or refuse it without a number.
    config = named_config("gemma3-101m") | {"vocab_size": 2**23, "hidden_size": 2**16}
    begin = time.monotonic()
    with pytest.raises(
        MemoryError, match=r"MiB for the weights of \S+, but .* [0-9]+ MiB; free mem"
    ):
        dummy_model(config, "large")
    assert time.monotonic() - begin < 5
