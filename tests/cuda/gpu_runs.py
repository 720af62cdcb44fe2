# SPDX-License-Identifier: Apache-2.0
"""What GPU tests and sanitizers share: processes with time limits, and their evidence."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
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

GTEST = r"^\[=+\]|^\[  PASSED|^\[  FAILED|drafts accepted|outputs differ"

#: Seconds that any command may take at most; --limit lowers it.
LIMIT_S = 600.0


class Share(NamedTuple):
    """One of several processes that share the cases of a test."""

    arguments: tuple[str, ...] = ()  # added to the command
    variables: tuple[tuple[str, str], ...] = ()  # added to the environment
    cores: tuple[int, ...] = ()  # those that it may run on; empty: all


def shards(count: int) -> list[Share]:
    """Returns the shares of a GoogleTest binary whose cases `count` processes divide."""
    return [
        Share((), (("GTEST_TOTAL_SHARDS", str(count)), ("GTEST_SHARD_INDEX", str(index))))
        for index in range(count)
    ]


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

    With several shares the command runs once for each of them, side by side. The exit code is the
    first that is not zero. With `is_part` the lines are not printed.
    """
    start = time.monotonic()
    limit = min(limit, LIMIT_S)
    lines, code = [], 0
    LOGS.mkdir(exist_ok=True)
    processes = []
    for index, share in enumerate(shares):
        log = LOGS / f"{re.sub(r'[^a-z0-9_.-]+', '_', title)}-{index}.log"
        with log.open("w") as stream:
            pinned = ["taskset", "-c", ",".join(map(str, share.cores))] if share.cores else []
            process = subprocess.Popen(
                [*pinned, *command, *share.arguments], cwd=ROOT,
                env={**env, **dict(share.variables)}, stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
        processes.append((process, log))
    for process, log in processes:
        try:
            done = process.wait(max(0.0, start + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            done = 124
        output = log.read_text(errors="replace")
        lines += [line.strip() for line in output.splitlines() if re.search(summary, line)]
        code = code or done
        if done != 0:
            print(output[:3000], "\n[...]\n", output[-5000:])
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


def write(path: Path, results: list[dict[str, Any]], extra: dict[str, Any]) -> int:
    """Writes the evidence; returns 0 if every result passed, else 1."""
    passed = all(result["exit"] == 0 for result in results)
    evidence = {
        "date": today(),
        "passed": passed,
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
    print(f"{path.relative_to(ROOT)}: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1
