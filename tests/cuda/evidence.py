# SPDX-License-Identifier: Apache-2.0
"""Records GPU test results with the sources, since continuous integration has no GPU.

    evidence.py test [--limit S] [PART ...]  run GPU tests and benches; write docs/gpu-evidence.json
    evidence.py sanitize [TOOL[:PART] ...]   run compute-sanitizer over the op table and the packing
                                             of weights; write docs/gpu-sanitizer.json
    evidence.py check                        report evidence of other sources as STALE
    evidence.py files                        print the files that evidence covers, with hashes

Each result has its own date and source hash, so parts may run at different times. `test` and
`sanitize` need the build of `make cuda`. If a command fails, they still write its result, and exit
with 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda-python" / "tests"
#: What every process has written, also when this one is killed at a time limit.
LOGS = BUILD / "logs"
TEST_FILE = ROOT / "docs" / "gpu-evidence.json"
SANITIZER_FILE = ROOT / "docs" / "gpu-sanitizer.json"

#: The sources that run on the GPU, and those that define its tests.
COVERED = ("cpp", "cuda", "python/bindings", "tests/cuda", "tests/support", "CMakeLists.txt")

#: Not Python: its tests of the GPU lie with those of the CPU and change with them.
SOURCE_SUFFIXES = (".h", ".cc", ".cu", ".cuh", ".txt", ".json")


def speculative(method: str, model: str | None, length: float) -> list[str]:
    """Bench options for k=3 and a synthetic acceptance length, since the weights are random.

    `model` is None for a drafter in the target's own folder.
    """
    config = {
        "method": method,
        **({} if model is None else {"model": model}),
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
    }
    return ["--speculative-config", json.dumps(config)]


def sampling(*values: dict[str, float]) -> list[str]:
    """Bench options that measure every row once with each of `values`."""
    return [word for value in values for word in ("--sampling", json.dumps(value))]


BENCH = ["-m", "paceline", "bench", "latency", "--device", "cuda", "--concurrency", "1,16,64"]
BENCH += ["--input-len", "256", "--output-len", "512", "--rounds", "1"]


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
    sys.path.insert(0, str(ROOT / "python"))
    from paceline.device import find_cublaslt

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
) -> dict[str, Any]:
    """Runs a command for at most `limit` and LIMIT_S seconds; records lines that match `summary`.

    With several shares the command runs once for each of them, side by side. The exit code is the
    first that is not zero.
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


GTEST = r"^\[=+\]|^\[  PASSED|^\[  FAILED|drafts accepted|outputs differ"


TESTS = (
    "packed_weights_test",
    "gemm_order_test",
    "op_parity_test",
    "expert_bits_test",
    "latent_merge_test",
    "runner_test",
    "engine_cuda_test",
    "engine_mixture_cuda_test",
    "engine_compressed_cuda_test",
    "draft_head_cuda_test",
)

#: Tests that spend most of their time in the CPU's twin of an op: their cases run side by side.
SHARDS = {
    "op_parity_test": 12,
    "expert_bits_test": 4,
    "engine_cuda_test": 4,
    "engine_compressed_cuda_test": 2,
    "draft_head_cuda_test": 3,
}
#: Each runs on cores of its own: the engines of the CPU and torch take a thread for each core that
#: they may use, and with all cores for all of them most of the time goes into switching threads.
PYTHON_SHARES = 8
#: Tests that compare the free memory of the GPU before and after.
MEASURING = ("runner_test",)

BENCHES = {
    "qwen3-8b": ["--config", "qwen3-8b", *speculative("eagle3", "qwen3-8b-eagle3", 2.34)],
    # Greedy and sampled rows in one process, so that they compare.
    "sampling": [
        "--config",
        "qwen3-8b",
        *speculative("eagle3", "qwen3-8b-eagle3", 2.34),
        *sampling({"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.95}),
        "--output-len",
        "256",
    ],
    "llama-3-8b": ["--config", "llama-3-8b", *speculative("eagle", "llama-3-8b-eagle", 1.95)],
    "gemma3-27b": [
        "--config",
        "gemma3-27b",
        *speculative("draft_model", "gemma3-270m", 2.3),
        "--drivers",
        "unrolled,replay,while",
    ],
    "qwen3-8b-fp8": ["--config", "qwen3-8b-fp8", *speculative("eagle3", "qwen3-8b-eagle3", 2.34)],
    "gpt-oss-20b": ["--config", "gpt-oss-20b", *speculative("eagle3", "gpt-oss-20b-eagle3", 2.61)],
    "gpt-oss-120b": ["--config", "gpt-oss-120b", *speculative("draft_model", "gpt-oss-20b", 2.3)],
    "glm-4.7-flash": ["--config", "glm-4.7-flash", *speculative("mtp", None, 2.19)],
    # As many layers as one GPU holds beside the KV; contexts that cross both compression ratios.
    "deepseek-v4-flash": [
        "--config",
        "deepseek-v4-flash",
        "--num-layers",
        "12",
        *speculative("mtp", None, 2.19),
        "--concurrency",
        "1,16",
        "--input-len",
        "1024",
        "--output-len",
        "128",
    ],
}

#: A short table of `paceline bench pairs`.
PAIRS = ["--pairs", "gpt-oss-20b+eagle3,qwen3-8b+eagle3", "--concurrency", "1,16"]
PAIRS += ["--output-len", "64"]

#: Full-size checkpoints that a part writes and loads, with their pages cached, and the folder that
#: they are written to. The disk of a GPU machine may be too small for the largest.
CHECKPOINTS = {
    "disk": (("qwen3-8b", "gpt-oss-20b"), None),
    "memory": (("gpt-oss-120b",), "/dev/shm"),
}

#: The Python tests that need a GPU.
PYTHON_TESTS = [path.relative_to(ROOT) for path in ROOT.glob("tests/python/test_cuda*.py")]

#: What `test` runs, in this order, if no part is named.
PARTS = (*TESTS, "python", *BENCHES, "pairs", "server", "demos", *CHECKPOINTS, "ops")
#: Needs two GPUs, so it runs only where it is named.
REPLICAS = "replicas"


def load_checkpoint(
    part: str, name: str, folder: str | None, env: dict[str, str]
) -> list[dict[str, Any]]:
    """Writes a checkpoint of a bench configuration, and runs the bench on it."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        maker = [sys.executable, str(ROOT / "tests" / "cuda" / "make_checkpoint.py")]
        made = run(f"{part}: make {name}", [*maker, name, scratch], r"\S", env, 300)
        command = [sys.executable, "-m", "paceline", "bench", "latency", "--device", "cuda"]
        command += ["--model", scratch, "--concurrency", "1", "--rounds", "1"]
        command += ["--output-len", "64"]
        loaded = run(f"{part}: first token of {name}", command, r"start to|plain", env, 200)
    return [made, loaded]


def python_tests(command: list[str], env: dict[str, str]) -> list[str]:
    """Returns the names of the tests in PYTHON_TESTS."""
    collect = [*command, "--collect-only", *map(str, sorted(PYTHON_TESTS))]
    listed = subprocess.run(collect, cwd=ROOT, env=env, text=True, capture_output=True, check=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def run_part(part: str, env: dict[str, str], benches: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one of PARTS; adds the figures of a bench to `benches`."""
    if part in TESTS:
        shares = shards(SHARDS.get(part, 1))
        return [run(part, [str(BUILD / part), "--gtest_brief=1"], GTEST, env, 500, shares)]
    if part == "python":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        tests = python_tests(command, env)
        cores = sorted(os.sched_getaffinity(0))
        shares = [
            Share(tuple(tests[i::PYTHON_SHARES]), cores=tuple(cores[i::PYTHON_SHARES]))
            for i in range(PYTHON_SHARES)
        ]
        result = run(part, command, r"passed|failed|error", env, 400, shares)
        paths = [str(path) for path in sorted(PYTHON_TESTS)]
        return [{**result, "command": " ".join(["pytest", *paths])}]
    if part in BENCHES:
        figures, kernels = BUILD / "bench.json", BUILD / "trace.json"
        command = [sys.executable, *BENCH, *BENCHES[part]]
        command += ["--json", str(figures), "--trace", str(kernels)]
        result = run(part, command, r"\S", env, 400)
        # Without the folder of this machine, which the bench's own command line names.
        benches[part] = {
            key: json.loads(path.read_text().replace(f"{ROOT}/", "")) if path.exists() else None
            for key, path in (("figures", figures), ("trace", kernels))
        }
        for path in (figures, kernels):
            path.unlink(missing_ok=True)
        return [result]
    if part == "pairs":
        figures = BUILD / "pairs.json"
        command = [sys.executable, "-m", "paceline", "bench", "pairs", "--device", "cuda", *PAIRS]
        result = run(part, [*command, "--json", str(figures)], r"\S", env, 300)
        if figures.exists():
            text = figures.read_text().replace(f"{ROOT}/", "")
            benches[part] = {"figures": json.loads(text), "trace": None}
            figures.unlink()
        return [result]
    if part == "server":
        figures = BUILD / "server.json"
        script = str(ROOT / "tests" / "cuda" / "bench_server.py")
        command = [sys.executable, script, "--json", str(figures)]
        result = run(part, command, r"^c=|^Poisson|^prefix|^short", env, 300)
        if figures.exists():
            benches[part] = {"figures": json.loads(figures.read_text()), "trace": None}
            figures.unlink()
        return [result]
    if part == "demos":
        script = str(ROOT / "python" / "training" / "compare_demos.py")
        return [run(part, [sys.executable, script, "--device", "cuda"], r"^\|", env, 120)]
    if part == REPLICAS:
        script = str(ROOT / "tests" / "cuda" / "check_replicas.py")
        return [run(part, [sys.executable, script], r"GPU|streams|^paceline", env, 120)]
    if part in CHECKPOINTS:
        names, folder = CHECKPOINTS[part]
        return [result for name in names for result in load_checkpoint(part, name, folder, env)]
    command = [str(BUILD / "bench_cuda_ops"), "--json", str(BUILD / "ops.json")]
    return [run(part, command, r"\S", env, 120)]


def test(parts: list[str]) -> int:
    """Runs tests and benches; keeps the earlier results of all other parts."""
    env = environment()
    kept: list[dict[str, Any]] = []
    benches: dict[str, Any] = {}
    if TEST_FILE.exists():
        earlier = json.loads(TEST_FILE.read_text())
        kept = earlier["results"]
        benches = earlier["benches"]
    gone = {result["title"].split(":")[0] for result in kept} - {*PARTS, REPLICAS}

    def record(part: str, results: list[dict[str, Any]]) -> int:
        nonlocal kept
        kept = [r for r in kept if r["title"].split(":")[0] not in (part, *gone)]
        kept += [{**r, "date": today(), "source_hash": source_hash()} for r in results]
        order = {name: rank for rank, name in enumerate((*PARTS, REPLICAS))}
        kept.sort(key=lambda r: order.get(r["title"].split(":")[0], len(order)))
        return write(TEST_FILE, kept, {"benches": benches})  # now, in case a later part times out

    code = 0
    # Tests run at the same time. What measures, times or free memory, has the machine to itself.
    tests = [part for part in parts if part in (*TESTS, "python") and part not in MEASURING]
    with concurrent.futures.ThreadPoolExecutor(len(tests) or 1) as pool:
        running = {pool.submit(run_part, part, env, benches): part for part in tests}
        for done in concurrent.futures.as_completed(running):
            code = record(running[done], done.result())
    for part in parts:
        if part not in tests:
            code = record(part, run_part(part, env, benches))
    return code


#: Parts of the op table for racecheck. racecheck follows every access to shared memory and takes
#: minutes where the other tools take seconds, so it runs part by part. Ops that pass over all ids
#: in shared memory several times, and products by expert (NARROWED), run with few rows and ids,
#: plus the cases in MORE for what those leave out. Running parts at the same time does not finish
#: sooner.
OPS = (
    "gemm",
    "attention",
    "list",
    "rms",
    "draw",
    "rope",
    "gated",
    "clusters",
    "adjust",
    "truncate",
    "proposals",
    "softmax_sums",
    "reject",
    "logprobs",
    "route",
    "sort",
    "combine",
    "expert_gemm",
    "mixture",
    "compress",
    "compressed",
    "index",
    "choose",
    "streams",
)


def cases_of(*ops: str) -> str:
    """Returns the test filter of all cases of some ops."""
    return ":".join(f"*MatchesTheCpu/{op}_*" for op in ops)


#: "large" begins the names of cases that are slow under a sanitizer and reach no other code.
REST = "*:-" + cases_of(*OPS, "large")
#: The other tools take the ops of a mixture of experts apart: their cases of real shapes take the
#: CPU as long as all other cases.
MIXTURES = cases_of("route", "router", "sort", "combine", "expert_gemm", "mixture")
NARROWED = ("truncate", "proposals", "softmax_sums", "logprobs", "expert_gemm", "mixture")
#: truncate and logprobs: more rows than clusters can run at once (at most 33 on 132
#: multiprocessors), so that some clusters take a second row and overwrite their shared memory;
#: limits of all kinds, since the first three rows of `mixed` have none. proposals: a second round
#: of ids.
MORE = {
    "truncate": ("mixed*_v1003_rows16of16", "top_k_top_p_v64_rows70of130"),
    "logprobs": ("emitted_n20_v33_rows70of130", "prompt_n20_v33_rows70of130"),
    "proposals": ("*_v5004_rows1of1",),
    "expert_gemm": ("*_rows70of130",),
    "mixture": ("*_rows70of130",),
}
#: Shapes of real models, of which smaller cases run the same blocks.
REAL_SHAPES = {
    "attention": "*_64x8_*",
    "expert_gemm": "*_n5760_*:*_n2880_*",
    "mixture": "*_h2880_*",
}
LARGE = ":".join(f"*_v{vocab}_rows3of8" for vocab in (5004, 40000, 128000, 151936, 262144))


def racecheck_filter(op: str) -> str:
    """Returns the test filter of one op for racecheck."""
    wanted, left_out = cases_of(op), [REAL_SHAPES[op]] if op in REAL_SHAPES else []
    if op in NARROWED:
        cases = f"*MatchesTheCpu/{op}_"
        wanted = ":".join(cases + name for name in ("*_rows3of8", *MORE.get(op, ())))
        left_out.append(LARGE)
    return wanted + (":-" + ":".join(left_out) if left_out else "")


RACECHECK = {op: racecheck_filter(op) for op in reversed(OPS)}
HALVES = {"others": f"*:-{MIXTURES}:{cases_of('large')}", "mixtures": MIXTURES}
#: The part of every tool that packs weights.
PACKING = "packing"
SANITIZERS = {
    "memcheck": {PACKING: "", **HALVES},
    "initcheck": {PACKING: "", **HALVES},
    "synccheck": {PACKING: "", **HALVES},
    "racecheck": {PACKING: "", "rest": REST, **RACECHECK},
}
SANITIZER_PARTS = [f"{tool}:{part}" for tool, parts in SANITIZERS.items() for part in parts]


def sanitize(wanted: list[str]) -> int:
    """Runs compute-sanitizer over the op table and the packing of weights.

    Keeps the earlier results of all other parts.

    Args:
        wanted: Tools, or parts of a tool as "tool:part".
    """
    env = environment()
    titles = [p for p in SANITIZER_PARTS if p in wanted or p.split(":")[0] in wanted]
    kept: list[dict[str, Any]] = []
    if SANITIZER_FILE.exists():
        earlier = json.loads(SANITIZER_FILE.read_text())["results"]
        kept = [r for r in earlier if r["title"] in SANITIZER_PARTS]
    code = 0
    for title in titles:
        tool, part = title.split(":")
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        if part == PACKING:
            command += [str(BUILD / "packed_weights_test"), "--gtest_filter=PackedRows.MayBeLong"]
        else:
            command += [str(BUILD / "op_parity_test")]
            command += [f"--gtest_filter=Table/OpParity.{SANITIZERS[tool][part]}"]
        command += ["--gtest_brief=1"]
        summary = r"ERROR SUMMARY|RACECHECK SUMMARY|" + GTEST
        result = run(title, command, summary, env, 300)
        kept = [r for r in kept if r["title"] != title]
        # Each part has its own date and hash, since parts may run at different times.
        kept.append({**result, "date": today(), "source_hash": source_hash()})
        kept.sort(key=lambda r: SANITIZER_PARTS.index(r["title"]))
        code = write(SANITIZER_FILE, kept, {})  # now, in case a later part times out
    return code


def check() -> int:
    """Prints which evidence is stale; that is not a failure, since it is true of its sources."""
    now = source_hash()
    for path in (TEST_FILE, SANITIZER_FILE):
        name = path.relative_to(ROOT)
        if not path.exists():
            print(f"{name}: MISSING")
            continue
        evidence = json.loads(path.read_text())
        seen = {r.get("source_hash", evidence["source_hash"]) for r in evidence["results"]}
        state = "current" if seen == {now} else "STALE: the sources have changed since"
        verdict = "passed" if evidence["passed"] else "FAILED"
        print(f"{name}: {verdict} on {evidence['date']}, {evidence['machine']['gpu']}; {state}")
        for result in evidence["results"]:
            if result.get("source_hash", now) != now:
                print(f"  {result['title']}: measured on {result['date']} with other sources")
    return 0


def files() -> int:
    """Prints the files of the hash, to find the file in which two trees differ."""
    for name in covered_files():
        print(hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16], name)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("test", "sanitize", "check", "files"))
    parser.add_argument("parts", nargs="*", help="parts of test or sanitize (default: all)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds that a command of test may take"
    )
    arguments = parser.parse_intermixed_args()  # options may stand before the parts
    LIMIT_S = arguments.limit
    known = {"test": (*PARTS, REPLICAS), "sanitize": (*SANITIZERS, *SANITIZER_PARTS)}.get(
        arguments.what, ()
    )
    for wrong in set(arguments.parts) - set(known):
        parser.error(
            f"{arguments.what} has no part {wrong!r}; allowed: {', '.join(known) or 'none'}"
        )
    if arguments.what == "test":
        sys.exit(test(arguments.parts or list(PARTS)))
    if arguments.what == "sanitize":
        sys.exit(sanitize(arguments.parts or list(SANITIZERS)))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit({"check": check, "files": files}[arguments.what]())
