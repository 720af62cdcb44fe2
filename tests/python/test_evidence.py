# SPDX-License-Identifier: Apache-2.0
"""Which cases the sanitizers run on a GPU, how, and what counts as a failure. Needs no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import evidence
import gpu_runs
import sanitizers
from paceline import cli
from paceline.bench import models
from paceline.speculative_config import SpeculativeConfig
from sanitizers import DEVICE_ONLY, Case, Kernel, Task, choose, kinds_of, split

EVIDENCE = Path(sanitizers.__file__).with_name("evidence.py")


def case(name: str, num_bytes: int = 1, *kernels: str, shared: int = 0) -> Case:
    return Case(name, num_bytes, tuple(Kernel(k, 128, shared) for k in kernels or ("k",)))


# To the program behind the sanitizer's own options.
SKIP = 'while [ "${1#/}" = "$1" ]; do shift; done; '
NAMED = [case(pattern.replace("*", "x")) for pattern in sanitizers.NAMED]


def chosen(tool: str, *cases: Case) -> set[str]:
    return {c.name for c in choose(tool, [*NAMED, *cases])} - {c.name for c in NAMED}


@pytest.mark.parametrize("part", evidence.BENCHES)
def test_a_bench_names_shapes_that_ship(part: str) -> None:
    argv = [*evidence.BENCH[2:], *evidence.BENCHES[part]]
    args = cli.build_parser().parse_args(argv)
    names = models.config_names()
    assert args.config in names
    config = SpeculativeConfig.parse(json.loads(args.speculative_config))
    assert config.model is None or config.model in names


def test_every_kind_of_drafter_that_models_are_released_with_has_a_bench() -> None:
    found = {
        json.loads(words[words.index("--speculative-config") + 1])["method"]
        for words in evidence.BENCHES.values()
    }
    assert found >= {"eagle", "eagle3", "draft_model", "mtp", "gemma4_mtp", "dflash2"}


def test_every_kernel_and_kind_is_reached_by_the_smallest_case() -> None:
    small, large = case("gemm_n64_k96_rows3of8", 10, "a"), case("gemm_n640_k320_rows3of8", 90, "a")
    assert kinds_of(small.name) == {"gemm", "nwhole", "kragged", "rows3of8"}
    assert chosen("memcheck", large, small) == {small.name, large.name}  # k is ragged, then whole
    same = case("gemm_n128_k97_rows3of8", 20, "a")
    assert chosen("memcheck", same, small) == {small.name}
    # Another kernel, block, word or number of rows is something else.
    for other in (
        case("gemm_n128_k97_rows3of8", 20, "b"),
        Case("gemm_n128_k97_rows3of8", 20, (Kernel("a", 256, 0),)),
        case("gemm_n128_k97_bias_rows3of8", 20, "a"),
        case("gemm_n128_k97_rows70of130", 20, "a"),
    ):
        assert chosen("memcheck", other, small) == {small.name, other.name}
    # A large case brings nothing for being large.
    assert chosen("memcheck", case("large_gemm_n64_k99_rows3of8", 99, "a"), small) == {small.name}


def test_racecheck_runs_kernels_with_shared_memory() -> None:
    plain = case("copy_w64_rows3of8", 5, "copy")
    few = case("sort_n64_rows3of8", 5, "sort", shared=512)
    full = case("sort_n64_rows16of16", 6, "sort", shared=512)
    assert chosen("memcheck", plain, few, full) == {plain.name, few.name, full.name}
    assert chosen("racecheck", plain, few, full) == {few.name}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no case matches 'truncate_mixed"):
        choose("memcheck", NAMED[1:])


def test_shards_have_all_cases_once_and_equal_work() -> None:
    cases = [case(f"op_{i}", 3_000_000 * (i % 5), f"kernel{i % 7}") for i in range(200)]
    shards = split(cases, 8)
    assert sorted(c for shard in shards for c in shard) == sorted(cases)
    work = [sum((1 << 20) + c.num_bytes for c in shard) for shard in shards]
    assert len(shards) == 8 and max(work) < 1.3 * min(work)
    assert all(split(cases[:3], 8))  # no shard is empty


def test_places_are_spread_over_the_gpus() -> None:
    assert sanitizers.places(["4", "7"], 32) == ["4", "7", "4", "7"]
    assert sanitizers.places(["0"], 6) == ["0", "0"]
    assert sanitizers.places(["0"], 1) == ["0"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder of test binaries, on a machine with two GPUs and a compute-sanitizer."""
    for module in (gpu_runs, sanitizers):
        monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(sanitizers, "BUILD", tmp_path)
    monkeypatch.setattr(sanitizers, "SANITIZER_FILE", tmp_path / "evidence.json")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    helps = f'[ "$1" != --help ] || {{ echo {sanitizers.RACECHECK_OPTIONS[0]}; exit; }}\n'
    ends = '"$@" && echo "=== ERROR SUMMARY: 0 errors"'
    program(tmp_path, "compute-sanitizer", helps + SKIP + ends)
    sanitizers.racecheck_options.cache_clear()
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def passes(count: str) -> str:
    return f'echo "[==========] {count} tests from 1"; echo "[  PASSED  ] {count} tests."'


def run(folder: Path, tasks: list[Task], seconds: float = 60) -> dict[str, dict[str, Any]]:
    found = {}

    def record(part: str, results: list[dict[str, Any]]) -> None:
        found[part] = sanitizers.merge(part, "", results, "")

    places = ["0", "1"]
    sanitizers.run_all(tasks, places, dict(os.environ), time.monotonic() + seconds, record)
    return found


def test_shards_run_side_by_side_on_their_gpus_without_the_cpu(machine: Path) -> None:
    # Each waits for the other GPU's, and runs as many tests as its filter has.
    count = "$(tr ':' '\\n' < ${1#--gtest_flagfile=} | grep -c .)"
    program(
        machine,
        "op_parity_test",
        f'echo "$PACELINE_DEVICE_ONLY" > "{machine}/saw$CUDA_VISIBLE_DEVICES"\n'
        f'until [ -e "{machine}/saw0" ] && [ -e "{machine}/saw1" ]; do sleep 0.01; done\n'
        + passes(count),
    )
    tasks = sanitizers.tasks_of_ops("memcheck:ops", [case(f"a_{i}") for i in range(10)], 4)
    assert {task.variables[DEVICE_ONLY] for task in tasks} == {"1"}
    result = run(machine, tasks)["memcheck:ops"]
    assert result["exit"] == 0
    assert result["summary"] == [
        "10 of 10 tests passed, in 4 processes",
        "ERROR SUMMARY: 0 errors (4 processes)",
    ]
    assert (machine / "saw0").read_text() == "1\n"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (passes("9"), 1, "ran 9 cases, not 10"),
        (passes("0"), 1, "ran 0 cases, not 10"),
        ("exit 9", 9, "0 of 0 tests passed"),
        ("exec sleep 30", 124, "shard 0: ended at"),
        # A case that failed before the limit is a failure all the same.
        ("echo '[  FAILED  ] a'; exec sleep 30", 1, "shard 0: ended at"),
    ],
)
def test_what_a_part_lacks_is_a_failure(machine: Path, script: str, code: int, said: str) -> None:
    program(machine, "compute-sanitizer", f'{SKIP}exec "$@"')
    program(machine, "op_parity_test", script)
    tasks = sanitizers.tasks_of_ops("memcheck:ops", [case(f"a_{i}") for i in range(10)], 1)
    limit = 0.5 if "sleep" in script else 30
    result = run(machine, [task._replace(limit=limit) for task in tasks])
    assert result["memcheck:ops"]["exit"] == code
    assert any(said in line for line in result["memcheck:ops"]["summary"])


def test_what_has_not_begun_in_time_is_a_failure(machine: Path) -> None:
    program(machine, "latent_merge_test", passes("2"))
    task = Task("memcheck:latent_merge", "latent_merge_test", (), {}, 0, 30)
    assert run(machine, [task], -1)[task.part]["exit"] == 124
    assert run(machine, [task])[task.part]["exit"] == 0


def test_a_whole_run_is_recorded_part_by_part(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(sanitizers, "write", lambda path, results, _: written.append(results))
    lines = [f"{c.name}\t1\tk 128 512" for c in NAMED]
    lines.append("gemm_n64_rows3of8\t1\twide_gemm_kernel 128 512")
    program(machine, "op_kernels", "\n".join(f"echo '{line}'" for line in lines))
    count = "$(tr ':' '\\n' < ${1#--gtest_flagfile=} | grep -c .)"
    program(machine, "op_parity_test", passes(count))
    program(machine, "latent_merge_test", passes("2"))
    wanted = ["memcheck:ops", "racecheck:ops", "memcheck:latent_merge", "racecheck:rings"]
    assert sanitizers.sanitize(wanted, 60, None) == 0
    assert [r["title"] for r in written[-1]] == [p for p in sanitizers.PARTS if p in wanted]
    said = {r["title"]: r["summary"][0] for r in written[-1]}
    assert "6 of 6 cases, which launch 2 of 2 kernels" in said["memcheck:ops"]
    assert "5 of 5 cases, which launch 1 of 1 kernels" in said["racecheck:ops"]
    assert "1 of 1 cases, which launch 1 of 1 kernels" in said["racecheck:rings"]
    assert sanitizers.racecheck_options() == sanitizers.RACECHECK_OPTIONS
    # A pattern records nothing, and a table that cannot be listed fails its parts.
    written.clear()
    assert sanitizers.sanitize(wanted, 60, "truncate*") == 0 and not written
    assert sanitizers.sanitize(wanted, 60, "nothing*") == 1 and not written
    # A part that no case is of has failed.
    program(machine, "op_kernels", "\n".join(f"echo '{line}'" for line in lines[:-1]))
    assert sanitizers.sanitize(["racecheck:rings"], 60, None) == 1
    assert written[-1][0]["summary"][-1] == "no case is of this part (1 processes)"
    program(machine, "op_kernels", "echo no GPU >&2; exit 3")
    assert sanitizers.sanitize(wanted, 60, None) == 3
    assert written[-1][-1]["summary"][-1] == "no GPU (1 processes)"


def test_rings_need_a_tool_that_can_follow_them(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(sanitizers, "write", lambda path, results, _: written.append(results))
    monkeypatch.setattr(sanitizers, "racecheck_options", tuple)
    program(machine, "op_kernels", "echo 'gemm_n64_rows3of8\t1\twide_gemm_kernel 128 512'")
    assert sanitizers.sanitize(["racecheck:rings"], 60, None) == gpu_runs.NOT_RUN
    (result,) = written[-1]
    assert result["exit"] == gpu_runs.NOT_RUN
    assert "has no --racecheck-indirect-barrier-dependency" in result["summary"][-1]


def test_tests_refuse_to_run_without_the_cpu() -> None:
    command = [sys.executable, EVIDENCE, "test", "op_parity_test"]
    env = {**os.environ, DEVICE_ONLY: "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 2 and f"{DEVICE_ONLY} is set" in result.stderr


def test_a_part_has_the_first_failure_of_its_processes() -> None:
    assert gpu_runs.code_of([]) == gpu_runs.code_of([0, 0]) == 0
    assert gpu_runs.code_of([0, gpu_runs.NOT_RUN, 0]) == gpu_runs.NOT_RUN
    assert gpu_runs.code_of([gpu_runs.NOT_RUN, 9, 3]) == 9


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("echo '[       OK ] a'; exec sleep 30", gpu_runs.NOT_RUN, "after 1 cases that passed"),
        ("echo 't.py::a PASSED'; echo 't.py::b FAILED'; exec sleep 30", 1, "after 1 cases"),
        ("exit 3", 3, ""),
    ],
)
def test_a_time_limit_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int, said: str
) -> None:
    monkeypatch.setattr(gpu_runs, "LOGS", tmp_path / "logs")
    limit = 0.5 if "sleep" in script else 30
    result = gpu_runs.run("one", ["/bin/sh", "-c", script], "x^", dict(os.environ), limit)
    assert result["exit"] == code
    assert said in "".join(result["summary"])


def test_cores_are_taken_in_the_order_of_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = gpu_runs.Cores([5, 2, 7])
    order: list[tuple[str, list[int]]] = []

    def take(name: str, count: int) -> None:
        with cores.taken(count) as mine:
            order.append((name, mine))

    def waits(count: int) -> bool:
        return len(cores._waiting) == count

    threads = [threading.Thread(target=take, args=("all", 99)),
               threading.Thread(target=take, args=("one", 1))]  # fmt: skip
    with cores.taken(1) as first:
        assert first == [2]
        for number, thread in enumerate(threads, 1):
            thread.start()
            while not waits(number):
                time.sleep(0.001)
        # Two are free, but whoever asked first wants three.
        assert not order
    for thread in threads:
        thread.join()
    assert [(name, len(mine)) for name, mine in order] == [("all", 3), ("one", 1)]
    # Who gets none before the deadline does not start.
    monkeypatch.setattr(gpu_runs, "DEADLINE", time.monotonic())
    with cores.taken(3), cores.taken(1) as none:
        assert none == []


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that writes evidence with exit codes by title."""
    tests, sanitizer = tmp_path / "gpu-evidence.json", tmp_path / "gpu-sanitizer.json"
    monkeypatch.setattr(evidence, "TEST_FILE", tests)
    monkeypatch.setattr(evidence, "SANITIZER_FILE", sanitizer)
    monkeypatch.setattr(evidence, "MAKERS", {tests: "gpu-test", sanitizer: "gpu-sanitize"})
    monkeypatch.setattr(evidence, "source_hash", lambda: "now")

    def write(**results: tuple[int, str]) -> None:
        for path in (tests, sanitizer):
            entries = [
                {"title": title, "exit": code, "source_hash": sources, "date": "2026-01-02",
                 "summary": [f"end of {title}"]}
                for title, (code, sources) in results.items()
            ]  # fmt: skip
            one = {"date": "2026-01-02", "machine": {"gpu": "G"}, "results": entries}
            path.write_text(json.dumps(one))

    return write


def test_check_fails_on_a_failure_alone(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.check() == 1  # there is no evidence
    assert "gpu-evidence.json: MISSING; `make gpu-test` writes it" in capsys.readouterr().out
    recorded(a=(0, "now"))
    assert evidence.check() == 0
    said = "gpu-evidence.json: 1 passed, on G, last on 2026-01-02; current\n"
    assert capsys.readouterr().out.startswith(said)
    recorded(a=(0, "now"), b=(gpu_runs.NOT_RUN, "now"), c=(0, "old"))
    assert evidence.check() == 0
    out = capsys.readouterr().out
    assert "2 passed, 1 NOT RUN to their end, on G, last on 2026-01-02; STALE" in out
    assert "  b: NOT RUN to its end on 2026-01-02 with these sources\n" in out
    assert "  c: passed on 2026-01-02 with other sources\n" in out
    for sources, words in (("now", "these"), ("old", "other")):
        recorded(a=(0, "now"), b=(9, sources))
        assert evidence.check() == 1
        out = capsys.readouterr().out
        assert f"  b: FAILED on 2026-01-02 with {words} sources\n    end of b\n" in out
        assert "drop --because WHY PART" in out


def test_only_a_failure_can_be_dropped(recorded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(a=(0, "now"), b=(9, "old"))
    assert evidence.drop(["a"], "x") == evidence.drop(["b", "c"], "x") == 2
    assert "'a' is no failure; allowed: b" in capsys.readouterr().out
    assert evidence.check() == 1
    assert evidence.drop(["b"], "the tool") == 0
    capsys.readouterr()
    assert evidence.check() == 0
    assert "    failed with exit 9, dropped on " in capsys.readouterr().out
    entry = json.loads(evidence.TEST_FILE.read_text())["results"][1]
    assert entry["exit"] == gpu_runs.NOT_RUN
    assert re.fullmatch(r"failed with exit 9, dropped on \S+: the tool", entry["summary"][0])
