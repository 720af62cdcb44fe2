# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the op table, the packing of weights, and whole engines.

The op table has more cases than a sanitizer can run in minutes, so `choose` takes a sample. It
knows from `op_kernels` which kernels a case launches, and it takes the smallest cases that together
reach each kernel with each kind of case there is for it. So a new op or kernel needs no entry here.
The cases run without the CPU op (PACELINE_DEVICE_ONLY), in shards over all GPUs of the machine.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gpu_runs import (
    BUILD,
    GTEST,
    LOGS,
    NOT_RUN,
    ROOT,
    code_of,
    environment,
    run,
    source_hash,
    today,
    write,
)

SANITIZER_FILE = ROOT / "docs" / "gpu-sanitizer.json"

#: The variable that leaves out the CPU op in op_parity_test.
DEVICE_ONLY = "PACELINE_DEVICE_ONLY"
#: The part of every tool that has the op table.
OPS = "ops"
#: The cases of racecheck whose kernels have rings that one lane of a warp hands back for all,
#: after __syncwarp. racecheck takes that for a race unless RACECHECK_OPTIONS is understood.
RINGS = "rings"
RING_KERNELS = ("wide_gemm_kernel", "matrix_gemm_kernel", "split_gemm_kernel", "PromptVariant")


class Program(NamedTuple):
    """A test binary as a part."""

    binary: str
    cases: str  # a filter of GoogleTest
    limit: float  # seconds


PACKING = Program("packed_weights_test", "PackedRows.MayBeLong", 120)
#: Whole engines, for memcheck alone: what the op table cannot have is addresses that one op makes
#: for another.
ENGINES = {
    # What once crashed an engine: more than two MTP tokens.
    "engine": Program("engine_compressed_cuda_test", "*.AThousandIterationsOfFiveMtpTokens", 120),
    "decoder": Program("engine_cuda_test", "*.BadLogitsEndOneRequestOnly:*.ScoresEqual*", 120),
    "mixture": Program("engine_mixture_cuda_test", "*.Mxfp4*:*.ASharedExpert*", 120),
    "draft_head": Program("draft_head_cuda_test", "*.LogitsAreThoseOfTheCpu*", 120),
    "latent_merge": Program("latent_merge_test", "*", 60),
}
TOOLS: dict[str, dict[str, Program]] = {
    "memcheck": {"packing": PACKING, **ENGINES},
    "initcheck": {"packing": PACKING},
    "synccheck": {"packing": PACKING},
    "racecheck": {"packing": PACKING},
}
PARTS = [f"{tool}:{part}" for tool, programs in TOOLS.items() for part in (*programs, OPS)]
PARTS.append(f"racecheck:{RINGS}")
#: What runs first, so that it has ended if time is short; the others follow.
FIRST = ("memcheck:engine", *(f"{tool}:{OPS}" for tool in ("memcheck", "racecheck", "synccheck")))

#: Cases of which names and kernels do not tell that they reach code of their own. Clusters:
#: more rows than can run at once (33 on 132 multiprocessors), so that some take a second row and
#: overwrite their shared memory, with limits of all kinds, of which the first three rows of `mixed`
#: have none. Proposals: a second round of ids.
NAMED = (
    "truncate_mixed*_v1003_rows16of16",
    "truncate_top_k_top_p_v64_rows70of130",
    "logprobs_emitted_n20_v33_rows70of130",
    "logprobs_prompt_n20_v33_rows70of130",
    "proposals_*_v5004_rows1of1",
)
#: Numbers of rows that all tools but memcheck tell apart: few, and more than a tile or a round of
#: clusters. Others, such as none, are about addresses.
FEW_ROWS = ("rows3of8", "rows70of130")
#: Follows threads for which others arrive at a barrier in shared memory.
RACECHECK_OPTIONS = ("--racecheck-indirect-barrier-dependency", "yes")

#: Seconds that a shard may take.
SHARD_LIMIT_S = 200.0
SUMMARY = r"ERROR SUMMARY|RACECHECK SUMMARY|Internal Sanitizer|" + GTEST + "|" + DEVICE_ONLY


class Kernel(NamedTuple):
    """A launch of a case: a kernel, which names all its template arguments, and its block."""

    name: str
    threads: int
    shared_bytes: int


class Case(NamedTuple):
    """A case of the op table."""

    name: str
    num_bytes: int  # of its arrays
    kernels: tuple[Kernel, ...]


def read_cases(text: str) -> list[Case]:
    """Reads the output of op_kernels."""
    cases = []
    for line in text.splitlines():
        name, num_bytes, *launches = line.split("\t")
        kernels = []
        for launch in launches:
            kernel, threads, shared = launch.split(" ")
            kernels.append(Kernel(kernel, int(threads), int(shared)))
        cases.append(Case(name, int(num_bytes), tuple(kernels)))
    return cases


def kinds_of(name: str) -> set[str]:
    """Returns what the name of a case says: its words, with numbers by kind.

    A number is few (below 64), whole (a multiple of 64) or ragged: whether tiles and vectors are
    full depends on that. Numbers of rows stay as they are.
    """

    def kind(number: re.Match[str]) -> str:
        value = int(number[0])
        return "few" if value < 64 else "whole" if value % 64 == 0 else "ragged"

    words = name.removeprefix("large_").split("_")
    return {word if word.startswith("rows") else re.sub(r"\d+", kind, word) for word in words}


def features(tool: str, case: Case) -> set[tuple[str, int, str]]:
    """Returns what a case reaches: each of its kernels, alone and with each kind of the case.

    racecheck looks at shared memory alone, so kernels without any count for nothing there.
    """
    kinds = kinds_of(case.name)
    kernels = case.kernels
    if tool == "racecheck":
        kernels = tuple(kernel for kernel in kernels if kernel.shared_bytes > 0)
    if tool != "memcheck":
        kinds = {k for k in kinds if not k.startswith("rows") or k in FEW_ROWS}
    return {(k.name, k.threads, kind) for k in kernels for kind in ("", *kinds)}


def choose(tool: str, cases: Sequence[Case], named: Sequence[str] = NAMED) -> list[Case]:
    """Returns the cases to run: `named`, then from the smallest on each with a new feature.

    Raises:
        ValueError: A pattern of `named` matches no case.
    """
    chosen = []
    for pattern in named:
        matching = [case for case in cases if fnmatchcase(case.name, pattern)]
        if not matching:
            raise ValueError(f"NAMED in tests/cuda/sanitizers.py: no case matches {pattern!r}")
        chosen += matching
    reached = {feature for case in chosen for feature in features(tool, case)}
    for case in sorted(cases, key=lambda case: (case.num_bytes, case.name)):
        new = features(tool, case) - reached
        if new:
            reached |= new
            chosen.append(case)
    return sorted(set(chosen), key=lambda case: case.name)


def has_rings(case: Case) -> bool:
    """Whether a case launches one of RING_KERNELS."""
    return any(ring in kernel.name for kernel in case.kernels for ring in RING_KERNELS)


def split(cases: Sequence[Case], count: int) -> list[list[Case]]:
    """Divides cases into at most `count` shards of about equal work.

    Cases of the same kernels stay together, since a sanitizer rewrites a kernel at its first launch
    in a process.
    """

    def work(case: Case) -> int:  # what any case takes, and what its size adds
        return (1 << 20) + case.num_bytes

    total = sum(work(case) for case in cases)
    shards: list[list[Case]] = [[] for _ in range(count)]
    done = 0
    for case in sorted(cases, key=lambda case: (case.kernels, case.name)):
        shards[done * count // total].append(case)
        done += work(case)
    return [shard for shard in shards if shard]


class Task(NamedTuple):
    """One process of a part."""

    part: str
    binary: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    num_cases: int  # that it must run; 0: any, but one at least
    limit: float


def tasks_of_ops(part: str, cases: Sequence[Case], num_shards: int) -> list[Task]:
    """Returns a task for each shard; its filter is in a file, since it is too long for a line."""
    tasks = []
    LOGS.mkdir(exist_ok=True)
    for index, shard in enumerate(split(cases, num_shards)):
        flags = LOGS / f"{part.replace(':', '_')}-{index}.flags"
        names = ":".join(f"Table/OpParity.MatchesTheCpu/{case.name}" for case in shard)
        flags.write_text(f"--gtest_filter={names}\n")
        arguments = (f"--gtest_flagfile={flags}",)
        variables = {DEVICE_ONLY: "1"}
        tasks.append(Task(part, "op_parity_test", arguments, variables, len(shard), SHARD_LIMIT_S))
    return tasks


def num_run(lines: Sequence[str]) -> int:
    """Returns how many tests GoogleTest has run, by its summary."""
    return sum(int(m[1]) for line in lines if (m := re.match(r"\[=+\] (\d+) tests? ", line)))


@functools.cache
def racecheck_options() -> tuple[str, ...]:
    """Returns RACECHECK_OPTIONS, or none if this compute-sanitizer does not have it."""
    said = subprocess.run(["compute-sanitizer", "--help"], text=True, capture_output=True)
    return RACECHECK_OPTIONS if RACECHECK_OPTIONS[0] in said.stdout + said.stderr else ()


def run_task(task: Task, index: int, env: dict[str, str], deadline: float) -> dict[str, Any]:
    """Runs a task. A result that lacks cases is a failure, and so is one that was not started."""
    tool = task.part.split(":")[0]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += racecheck_options() if tool == "racecheck" else ()
    command += [str(BUILD / task.binary), *task.arguments]
    left = deadline - time.monotonic()
    if left <= 0:
        lines = [f"not started: the time of --within was over before shard {index}"]
        return {"exit": NOT_RUN, "seconds": 0.0, "summary": lines}
    title = f"{task.part}-{index}"
    result = run(title, command, SUMMARY, env, min(task.limit, left), is_part=True)
    about = [re.sub("^process 0:", f"shard {index}:", line) for line in result["summary"]]
    result["summary"] = about
    count = num_run(about)
    if result["exit"] == 0 and (count == 0 or (task.num_cases and count != task.num_cases)):
        result["exit"] = 1
        result["summary"].append(f"ran {count} cases, not {task.num_cases or 'any'}")
    return result


def merge(part: str, command: str, results: Sequence[dict[str, Any]], about: str) -> dict[str, Any]:
    """Returns the result of a part from those of its processes."""
    lines = [line for result in results for line in result["summary"]]
    passed = sum(int(m[1]) for line in lines if (m := re.match(r"\[  PASSED  \] (\d+)", line)))
    others = Counter(
        re.sub(r"^=+ ", "", line)
        for line in lines
        if not line.startswith("[=")
        and not line.startswith("[  PASSED")
        and not line.startswith(DEVICE_ONLY)
    )
    count = len(results)
    summary = [about] if about else []
    summary += [f"{passed} of {num_run(lines)} tests passed, in {count} processes"]
    summary += [f"{line} ({times} processes)" for line, times in others.items()]
    return {
        "title": part,
        "command": command,
        "exit": code_of(r["exit"] for r in results),
        "seconds": round(sum(r["seconds"] for r in results), 1),
        "summary": summary,
    }


def run_all(
    tasks: Sequence[Task],
    gpus: Sequence[str],
    env: dict[str, str],
    deadline: float,
    record: Callable[[str, list[dict[str, Any]]], None],
) -> None:
    """Runs tasks in their order, one at a time for each entry of `gpus`.

    Calls `record` with the results of a part as soon as its last task has ended.
    """
    waiting: queue.SimpleQueue[tuple[int, Task]] = queue.SimpleQueue()
    for numbered in enumerate(tasks):
        waiting.put(numbered)
    left = Counter(task.part for task in tasks)
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in left}
    lock = threading.Lock()

    def work(gpu: str) -> None:
        while True:
            try:
                index, task = waiting.get_nowait()
            except queue.Empty:
                return
            own = {**env, **task.variables, "CUDA_VISIBLE_DEVICES": gpu}
            result = run_task(task, index, own, deadline)
            with lock:
                results[task.part].append(result)
                left[task.part] -= 1
                if left[task.part] == 0:
                    record(task.part, results[task.part])

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gpu_names() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")
    listed = subprocess.check_output(["nvidia-smi", "-L"], text=True)
    return [str(index) for index in range(len(listed.splitlines()))]


def places(gpus: Sequence[str], num_cores: int) -> list[str]:
    """Returns the GPU of each process that may run at a time: two for each GPU, if there are cores.

    The GPU runs one process at a time, and each copy of an array waits for its turn. With eight
    processes a case took 0.7 s instead of 0.03 s.
    """
    return [gpu for _ in range(2 if num_cores > 2 * len(gpus) else 1) for gpu in gpus]


def list_cases(env: dict[str, str], limit: float) -> list[Case] | dict[str, Any]:
    """Returns the cases of the op table, or the result of a failure to list them."""
    table = BUILD / "op_kernels.tsv"
    with table.open("w") as stream:
        try:
            listed = subprocess.run(
                [str(BUILD / "op_kernels")], env=env, stdout=stream, stderr=subprocess.PIPE,
                text=True, timeout=min(limit, SHARD_LIMIT_S),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"exit": NOT_RUN, "seconds": SHARD_LIMIT_S, "summary": ["op_kernels: too slow"]}
    if listed.returncode != 0:
        lines = listed.stderr.splitlines()[-5:]
        return {"exit": listed.returncode, "seconds": 0.0, "summary": lines}
    return read_cases(table.read_text())


def sanitize(wanted: list[str], within: float, pattern: str | None) -> int:
    """Runs compute-sanitizer; records each part, and keeps the earlier results of all others.

    Args:
        wanted: Tools, or parts of a tool as "tool:part".
        within: Seconds in all; what has not ended by then has failed.
        pattern: A glob of cases of the op table: runs all of them and no other part, and records
            nothing.
    """
    deadline = time.monotonic() + within
    env = environment()
    slots = places(gpu_names(), len(os.sched_getaffinity(0)))
    parts = [p for p in PARTS if p in wanted or p.split(":")[0] in wanted]
    if pattern is not None:
        parts = [part for part in parts if part.split(":")[1] in (OPS, RINGS)]
    about: dict[str, str] = {}
    commands: dict[str, str] = {}
    tasks: list[Task] = []
    code = 0
    kept: list[dict[str, Any]] = []
    if SANITIZER_FILE.exists():
        earlier = json.loads(SANITIZER_FILE.read_text())["results"]
        kept = [r for r in earlier if r["title"] in PARTS]

    def record(part: str, results: list[dict[str, Any]]) -> None:
        nonlocal code, kept
        result = merge(part, commands[part], results, about.get(part, ""))
        print("\n".join([f"== {part}: exit {result['exit']}, {result['seconds']} s of processes",
                         *result["summary"][:40]]), flush=True)  # fmt: skip
        code = code or result["exit"]
        if pattern is None:
            kept = [r for r in kept if r["title"] != part]
            # Each part has its own date and hash, since parts may run at different times.
            kept.append({**result, "date": today(), "source_hash": source_hash()})
            kept.sort(key=lambda r: PARTS.index(r["title"]))
            write(SANITIZER_FILE, kept, {})  # now, in case a later part times out

    tables = [part for part in parts if part.split(":")[1] in (OPS, RINGS)]
    cases: list[Case] = []
    if tables:
        listed = list_cases(env, within)
        if isinstance(listed, dict):
            for part in tables:
                commands[part] = "op_kernels"
                record(part, [listed])
            parts = [part for part in parts if part not in tables]
        else:
            cases = listed
    for part in sorted(parts, key=lambda p: FIRST.index(p) if p in FIRST else len(FIRST)):
        tool, name = part.split(":")
        if name == RINGS and not racecheck_options():
            option = RACECHECK_OPTIONS[0]
            commands[part] = f"compute-sanitizer --tool {tool} {option}"
            lines = [f"this compute-sanitizer has no {option}, so it cannot follow rings"]
            record(part, [{"exit": NOT_RUN, "seconds": 0.0, "summary": lines}])
            continue
        if part in tables:
            own = cases
            if tool == "racecheck":
                own = [case for case in cases if has_rings(case) == (name == RINGS)]
            chosen = choose(tool, own, () if name == RINGS else NAMED)
            if pattern is not None:
                chosen = [case for case in own if fnmatchcase(case.name, pattern)]
            reached = {f for case in chosen for f in features(tool, case) if not f[2]}
            every = {f for case in own for f in features(tool, case) if not f[2]}
            about[part] = (
                f"{len(chosen)} of {len(own)} cases, which launch {len(reached)} of "
                f"{len(every)} kernels, without the CPU"
            )
            commands[part] = f"compute-sanitizer --tool {tool} op_parity_test"
            if not chosen and pattern is None:
                record(part, [{"exit": 1, "seconds": 0.0, "summary": ["no case is of this part"]}])
            tasks += tasks_of_ops(part, chosen, len(slots) * (4 if tool == "racecheck" else 2))
        else:
            program = TOOLS[tool][name]
            argument = f"--gtest_filter={program.cases}"
            commands[part] = f"compute-sanitizer --tool {tool} {program.binary} {argument}"
            tasks.append(Task(part, program.binary, (argument,), {}, 0, program.limit))
    if not tasks and code == 0:
        print(f"no case of {', '.join(parts)} matches {pattern!r}")
        return 1
    run_all(tasks, slots, env, deadline, record)
    return code
