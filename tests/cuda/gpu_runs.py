# SPDX-License-Identifier: Apache-2.0
"""What GPU tests and sanitizers share: processes with time limits, and their evidence."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda-python" / "tests"
#: What every process has written, also when this one is killed at a time limit.
LOGS = BUILD / "logs"

#: The sources that run on the GPU, and those that define its tests.
COVERED = ("cpp", "cuda", "python/bindings", "tests/cuda", "tests/support", "CMakeLists.txt")

#: Not Python: its tests of the GPU lie with those of the CPU and change with them.
SOURCE_SUFFIXES = (".h", ".cc", ".cu", ".cuh", ".txt", ".json")

GTEST = r"^\[=+\] \d|^\[  PASSED|^\[  FAILED|drafts accepted|outputs differ"

#: A case that passed and one that failed, in the output of GoogleTest, pytest and the sanitizers.
CASE_PASSED = r"^\[       OK \]|::\S+ PASSED"
CASE_FAILED = (
    r"^\[  FAILED  \]|::\S+ (FAILED|ERROR)|^=+ (Error|Invalid|Uninitialized|Barrier error)"
)

#: The exit code of a process that ran into a time limit: it has neither passed nor failed.
NOT_RUN = 124

#: Seconds that any command may take at most; --limit lowers it.
LIMIT_S = 600.0
#: When all commands end, by time.monotonic(); --within sets it.
DEADLINE = float("inf")


class Share(NamedTuple):
    """One of several processes that share the cases of a test."""

    arguments: tuple[str, ...] = ()  # added to the command
    variables: tuple[tuple[str, str], ...] = ()  # added to the environment
    num_cores: int = 0  # of its own, for which it waits; 0: it runs at once, on any


def shards(count: int, num_cores: int) -> list[Share]:
    """Returns the shares of a GoogleTest binary whose cases `count` processes divide."""
    return [
        Share(
            (), (("GTEST_TOTAL_SHARDS", str(count)), ("GTEST_SHARD_INDEX", str(index))), num_cores
        )
        for index in range(count)
    ]


def visible_gpus() -> list[str]:
    """Returns the GPUs that processes may use: those of CUDA_VISIBLE_DEVICES, else all."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    listed = subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines()
    return [str(index) for index in range(len(listed))]


#: Counts the processes that run on one GPU, so that they take turns.
ON_ONE_GPU = itertools.count()


def on_one_gpu(shares: Iterable[Share]) -> list[Share]:
    """Returns the shares, each of which sees one of the visible GPUs, in turn."""
    gpus = visible_gpus()
    if not gpus:
        return list(shares)  # they fail, and say why
    return [
        share._replace(
            variables=(
                *share.variables,
                ("CUDA_VISIBLE_DEVICES", gpus[next(ON_ONE_GPU) % len(gpus)]),
            )
        )
        for share in shares
    ]


class Cores:
    """Cores, which processes take for themselves in the order in which they ask.

    Ops and engines of the CPU take a thread for each core that they may use. With all cores for all
    processes, most of the time would go into switching threads.
    """

    def __init__(self, cores: Iterable[int]) -> None:
        self._free = sorted(cores)
        self._count = len(self._free)
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[int]]:
        """Waits for `count` cores, or all if there are fewer, or for DEADLINE; yields the cores,
        none at DEADLINE.
        """
        count = min(count, self._count)
        me = object()

        def is_my_turn() -> bool:
            return self._waiting[0] is me and len(self._free) >= count

        with self._changed:
            self._waiting.append(me)
            left = DEADLINE - time.monotonic()
            ready = self._changed.wait_for(is_my_turn, min(left, threading.TIMEOUT_MAX))
            self._waiting.remove(me)
            mine = self._free[:count] if ready else []
            self._free = self._free[len(mine) :]
            self._changed.notify_all()
        try:
            yield mine
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()


CORES = Cores(os.sched_getaffinity(0))


def covered_files() -> list[str]:
    """Lists the covered files, sorted. Does not ask git: a copy on a GPU machine may lack it."""
    roots = [ROOT / covered for covered in COVERED]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in SOURCE_SUFFIXES)


def source_hash() -> str:
    """Returns the SHA-256 over the names and contents of the covered files."""
    digest = hashlib.sha256()
    for name in covered_files():
        digest.update(name.encode())
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """Returns the environment of the commands: it requires a GPU and has the path of cuBLASLt.

    The caller's PYTHONPATH stays, for packages that the machine has in another version than
    tests/constraints.txt.
    """
    env = dict(os.environ)
    env["PACELINE_REQUIRE_GPU"] = "1"
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Not for longer than the import: processes that this one starts may get its path.
    sys.path.insert(0, str(ROOT / "python"))
    from paceline.device import find_cublaslt

    sys.path.remove(str(ROOT / "python"))
    path = find_cublaslt()
    if path:
        env["LD_LIBRARY_PATH"] = f"{path}:{env.get('LD_LIBRARY_PATH', '')}"
    return env


def machine() -> dict[str, str]:
    """Returns the names of the GPU, its driver and the CUDA compiler."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = (subprocess.check_output(query, text=True).splitlines()[0] + ",").split(",")[:2]
    nvcc = subprocess.check_output(["nvcc", "--version"], text=True).splitlines()
    return {"gpu": name.strip(), "driver": driver.strip(), "nvcc": nvcc[-1].strip()}


def code_of(codes: Iterable[int]) -> int:
    """Returns the exit code of several processes: the first failure, else NOT_RUN if any was."""
    found = [code for code in codes if code != 0]
    return next((code for code in found if code != NOT_RUN), found[0] if found else 0)


def run_share(
    command: list[str], share: Share, log: Path, env: dict[str, str], limit: float
) -> tuple[int, str]:
    """Runs a process for at most `limit` seconds and until DEADLINE.

    Returns:
        Its exit code and what is to be said of a process that did not end. That code is NOT_RUN
        unless a case of it had failed.
    """
    with CORES.taken(share.num_cores) as cores, log.open("w") as stream:
        start = time.monotonic()
        limit = min(limit, LIMIT_S, DEADLINE - start)
        if limit <= 0:
            return NOT_RUN, "not started: the time of --within was over"
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        process = subprocess.Popen(
            [*pinned, *command, *share.arguments], cwd=ROOT,
            env={**env, **dict(share.variables)}, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            return process.wait(min(limit, threading.TIMEOUT_MAX)), ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    output = log.read_text(errors="replace")
    passed = len(re.findall(CASE_PASSED, output, re.MULTILINE))
    has_failed = re.search(CASE_FAILED, output, re.MULTILINE)
    about = f"ended at {time.monotonic() - start:.1f} s, after {passed} cases that passed"
    return (1 if has_failed else NOT_RUN), about


def run(
    title: str,
    command: list[str],
    summary: str,
    env: dict[str, str],
    limit: float,
    shares: Sequence[Share] = (Share(),),
    is_part: bool = False,
) -> dict[str, Any]:
    """Runs a command for at most `limit` and LIMIT_S seconds; records lines that match `summary`.

    With several shares the command runs once for each of them, side by side where there are cores.
    The exit code is that of the first share that failed. A share that ran into the time limit has
    not failed unless one of its cases has; then the code is NOT_RUN. With `is_part` the lines are
    not printed.
    """
    start = time.monotonic()
    lines = []
    LOGS.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9_.-]+", "_", title)
    logs = [LOGS / f"{name}-{index}.log" for index in range(len(shares))]
    with ThreadPoolExecutor(len(shares)) as pool:
        futures = [
            pool.submit(run_share, command, share, log, env, limit)
            for share, log in zip(shares, logs, strict=True)
        ]
        ended = [future.result() for future in futures]
    for index, (log, (code, about)) in enumerate(zip(logs, ended, strict=True)):
        output = log.read_text(errors="replace")
        lines += [line.strip() for line in output.splitlines() if re.search(summary, line)]
        if about:
            lines.append(f"process {index}: {about}")
        if code != 0:
            print(output[:3000], "\n[...]\n", output[-5000:])
    code = code_of(code for code, _ in ended)
    seconds = round(time.monotonic() - start, 1)
    if not is_part:
        print("\n".join([f"== {title}: exit {code}, {seconds} s", *lines[-40:]]), flush=True)
    shown = [Path(part).name if part.startswith("/") else part for part in command]
    return {
        "title": title,
        "command": " ".join(shown),
        "exit": code,
        "seconds": seconds,
        "summary": lines,
    }


def today() -> str:
    """Returns the date in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def verdict(results: Sequence[dict[str, Any]]) -> str:
    """Returns how many results passed, FAILED, and were NOT RUN to their end."""
    codes = [result["exit"] for result in results]
    not_run = codes.count(NOT_RUN)
    failed = len(codes) - codes.count(0) - not_run
    counts = {"passed": codes.count(0), "FAILED": failed, "NOT RUN to their end": not_run}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no results"


def write(path: Path, results: list[dict[str, Any]], extra: dict[str, Any]) -> int:
    """Writes the evidence; returns 0 if every result passed, else 1."""
    evidence = {
        "date": today(),
        "machine": machine(),
        "source_hash": source_hash(),
        "covers": list(COVERED),
        **extra,
        "results": results,
    }
    path.write_text(json.dumps(evidence, indent=1) + "\n")
    out = os.environ.get("OUT")
    if out:
        (Path(out) / path.name).write_text(path.read_text())
    print(f"{path.relative_to(ROOT)}: {verdict(results)}")
    return 0 if all(result["exit"] == 0 for result in results) else 1
