# SPDX-License-Identifier: Apache-2.0
"""Records GPU test results with the sources, since continuous integration has no GPU.

    evidence.py test [--limit S] [--within S] [PART ...]
                                             run GPU tests and benches; write docs/gpu-evidence.json
    evidence.py sanitize [--within S] [--cases GLOB] [TOOL[:PART] ...]
                                             run compute-sanitizer (sanitizers.py says over what);
                                             write docs/gpu-sanitizer.json
    evidence.py check                        report failures, and evidence of other sources as
                                             STALE; exit with 1 if a result is a failure
    evidence.py drop --because WHY PART ...  record these failures as not run, for that reason, such
                                             as a change that is the cure and has not run yet
    evidence.py files                        print the files that evidence covers, with hashes

Each result has its own date and source hash, so parts may run at different times. `test` and
`sanitize` need the build of `make cuda`. If a command fails, they still write its result, and exit
with 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import gpu_runs
import sanitizers
from gpu_runs import (
    BUILD,
    GTEST,
    NOT_RUN,
    ROOT,
    Share,
    covered_files,
    environment,
    on_one_gpu,
    run,
    shards,
    source_hash,
    today,
    verdict,
    write,
)
from sanitizers import DEVICE_ONLY, SANITIZER_FILE

TEST_FILE = ROOT / "docs" / "gpu-evidence.json"
#: The target of the Makefile that writes each file.
MAKERS = {TEST_FILE: "gpu-test", SANITIZER_FILE: "gpu-sanitize"}


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


TESTS = (
    "packed_weights_test",
    "gemm_order_test",
    "op_parity_test",
    "expert_bits_test",
    "prefill_bits_test",
    "latent_merge_test",
    "runner_test",
    "engine_cuda_test",
    "engine_mixture_cuda_test",
    "engine_compressed_cuda_test",
    "engine_recurrent_cuda_test",
    "draft_head_cuda_test",
    "ranks_cuda_test",
)

#: Tests that spend most of their time in the CPU's twin of an op: their cases run side by side, so
#: many processes on so many cores each. Others are one process on one core.
SHARDS = {
    "op_parity_test": (max(16, len(os.sched_getaffinity(0)) - 24), 1),
    "expert_bits_test": (4, 1),
    "engine_cuda_test": (4, 3),
    "engine_mixture_cuda_test": (1, 2),
    "engine_compressed_cuda_test": (2, 2),
    "draft_head_cuda_test": (3, 3),
}
PYTHON_SHARES = 8
#: Tests that have the machine to themselves: the first compares the free memory of the GPU before
#: and after, and the other uses all GPUs, each of which waits for all others.
ALONE = ("runner_test", "ranks_cuda_test")

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
    "qwen3-8b-int4": ["--config", "qwen3-8b-int4", *speculative("eagle3", "qwen3-8b-eagle3", 2.34)],
    "gpt-oss-20b": ["--config", "gpt-oss-20b", *speculative("eagle3", "gpt-oss-20b-eagle3", 2.61)],
    "gpt-oss-120b": ["--config", "gpt-oss-120b", *speculative("draft_model", "gpt-oss-20b", 2.3)],
    "glm-4.7-flash": ["--config", "glm-4.7-flash", *speculative("mtp", None, 2.19)],
    "qwen3.8-27b": ["--config", "qwen3.8-27b", *speculative("mtp", None, 2.6)],
    "qwen3.6-35b-a3b": ["--config", "qwen3.6-35b-a3b", *speculative("mtp", None, 2.6)],
    "qwen3-30b-a3b": [
        "--config",
        "qwen3-30b-a3b",
        *speculative("eagle3", "qwen3-30b-a3b-eagle3", 2.34),
    ],
    "gemma4-26b-a4b": [
        "--config",
        "gemma4-26b-a4b",
        *speculative("gemma4_mtp", "gemma4-26b-a4b-assistant", 2.19),
    ],
    "qwen3-8b-dflash2": [
        "--config",
        "qwen3-8b",
        *speculative("dflash2", "qwen3-8b-dflash2", 2.34),
    ],
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
    "draft-lengths": [
        *("--config", "qwen3-8b", *speculative("eagle3", "qwen3-8b-eagle3", 1.8)),
        *("--num-speculative-tokens", "1,3,5,7", "--concurrency", "1,16,64,256"),
        *("--output-len", "64"),
    ],
    "first-token": [
        *("--config", "qwen3-8b", *speculative("eagle3", "qwen3-8b-eagle3", 2.34)),
        *("--concurrency", "1", "--input-len", "256,2000,8000,32000", "--output-len", "16"),
    ],
    "arrivals": [
        *("--config", "qwen3-8b", *speculative("eagle3", "qwen3-8b-eagle3", 2.34)),
        *("--concurrency", "32", "--input-len", "2000", "--output-len", "128"),
        *("--request-rate", "60%", "--num-prompts", "40"),
    ],
}
#: Benches of which no kernel is traced.
UNTRACED = ("draft-lengths", "first-token", "arrivals")

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
        shares = shards(*SHARDS.get(part, (1, 1)))
        if part not in ALONE:
            shares = on_one_gpu(shares)
        return [run(part, [str(BUILD / part)], GTEST, env, 500, shares)]
    if part == "python":
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        try:
            tests = python_tests([*command, "-q"], env)
        except subprocess.CalledProcessError as error:  # a test file that cannot be imported
            lines = error.stdout.splitlines()[-20:]
            return [{"title": part, "command": "pytest --collect-only", "exit": error.returncode,
                     "seconds": 0.0, "summary": lines}]  # fmt: skip
        shares = [Share(tuple(tests[i::PYTHON_SHARES]), num_cores=2) for i in range(PYTHON_SHARES)]
        shares = on_one_gpu(shares)
        summary = r"^=+ .*(passed|failed|error)|^(FAILED|ERROR) "
        result = run(part, [*command, "-v"], summary, env, 500, shares)
        paths = [str(path) for path in sorted(PYTHON_TESTS)]
        return [{**result, "command": " ".join(["pytest", *paths])}]
    if part in BENCHES:
        figures, kernels = BUILD / "bench.json", BUILD / "trace.json"
        command = [sys.executable, *BENCH, *BENCHES[part]]
        command += ["--json", str(figures)]
        if part not in UNTRACED:
            command += ["--trace", str(kernels)]
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
    # Tests run at the same time, and what measures has the machine to itself.
    tests = [part for part in parts if part in (*TESTS, "python") and part not in ALONE]
    with concurrent.futures.ThreadPoolExecutor(len(tests) or 1) as pool:
        running = {pool.submit(run_part, part, env, benches): part for part in tests}
        for done in concurrent.futures.as_completed(running):
            code = record(running[done], done.result())
    for part in parts:
        if part not in tests:
            code = record(part, run_part(part, env, benches))
    return code


def check() -> int:
    """Prints what failed, what did not run to its end, and what is stale.

    Stale evidence is no failure, since it is true of its sources. A failure is one with any
    sources: whoever mends it runs its part again, or says with `drop` why it is none.

    Returns:
        1 if a result is a failure or there is no evidence, else 0.
    """
    now = source_hash()
    code = 0
    for path in (TEST_FILE, SANITIZER_FILE):
        if not path.exists():
            print(f"{path.name}: MISSING; `make {MAKERS[path]}` writes it")
            code = 1
            continue
        evidence = json.loads(path.read_text())
        results = evidence["results"]
        is_current = all(result["source_hash"] == now for result in results)
        state = "current" if is_current else "STALE: the sources have changed since"
        about = f"on {evidence['machine']['gpu']}, last on {evidence['date']}; {state}"
        print(f"{path.name}: {verdict(results)}, {about}")
        for result in results:
            is_failure = result["exit"] not in (0, NOT_RUN)
            said = {0: "passed", NOT_RUN: "NOT RUN to its end"}.get(result["exit"], "FAILED")
            sources = "these" if result["source_hash"] == now else "other"
            if is_failure or result["exit"] == NOT_RUN or sources == "other":
                print(f"  {result['title']}: {said} on {result['date']} with {sources} sources")
            if result["summary"] and result["summary"][0].startswith(DROPPED):
                print(f"    {result['summary'][0]}")
            if is_failure:
                code = 1
                print("".join(f"    {line}\n" for line in result["summary"][-5:]), end="")
    if code != 0:
        print(
            "FAILED: run these parts again on a GPU, or say why they are no failures of the code:"
        )
        print("  python3 tests/cuda/evidence.py drop --because WHY PART ...")
    return code


#: How the summary of a failure begins that `drop` has recorded as not run.
DROPPED = "failed with exit"


def drop(parts: Sequence[str], why: str) -> int:
    """Records failures of these titles as not run, for a reason that `check` repeats.

    Returns:
        2 if a title is that of no failure, else 0.
    """
    files = {path: json.loads(path.read_text()) for path in MAKERS if path.exists()}
    failures = [
        result
        for evidence in files.values()
        for result in evidence["results"]
        if result["exit"] not in (0, NOT_RUN)
    ]
    titles = list(dict.fromkeys(result["title"] for result in failures))
    for part in parts:
        if part not in titles:
            allowed = ", ".join(titles) or "none, since nothing failed"
            print(f"evidence.py: error: {part!r} is no failure; allowed: {allowed}")
            return 2
    for result in failures:
        if result["title"] not in parts:
            continue
        said = f"{DROPPED} {result['exit']}, dropped on {today()}: {why}"
        result["exit"], result["summary"] = NOT_RUN, [said, *result["summary"]]
    for path, evidence in files.items():
        path.write_text(json.dumps(evidence, indent=1) + "\n")
    return 0


def files() -> int:
    """Prints the files of the hash, to find the file in which two trees differ."""
    for name in covered_files():
        print(hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16], name)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("test", "sanitize", "check", "drop", "files"))
    parser.add_argument(
        "parts", nargs="*", help="parts of test or sanitize (default: all), or failures to drop"
    )
    parser.add_argument(
        "--limit", type=float, default=gpu_runs.LIMIT_S, help="seconds that any command may take"
    )
    parser.add_argument(
        "--within", type=float, default=3600.0, help="seconds that test or sanitize may take in all"
    )
    parser.add_argument(
        "--cases", help="glob of cases of the op table: run sanitize on them; record nothing"
    )
    parser.add_argument("--because", help="why the parts of drop are no failures of the code")
    arguments = parser.parse_intermixed_args()  # options may stand before the parts
    gpu_runs.LIMIT_S = arguments.limit
    gpu_runs.DEADLINE = time.monotonic() + arguments.within
    known = {"test": (*PARTS, REPLICAS), "sanitize": (*sanitizers.TOOLS, *sanitizers.PARTS)}
    allowed = known.get(arguments.what, ())
    if arguments.what == "drop":
        if not arguments.because:
            parser.error("drop needs --because WHY")
        sys.exit(drop(arguments.parts, arguments.because))
    for wrong in sorted(set(arguments.parts) - set(allowed)):
        parser.error(
            f"{arguments.what} has no part {wrong!r}; allowed: {', '.join(allowed) or 'none'}"
        )
    if arguments.what == "test":
        if DEVICE_ONLY in os.environ:
            parser.error(f"{DEVICE_ONLY} is set, but test compares with the CPU; unset it")
        sys.exit(test(arguments.parts or list(PARTS)))
    if arguments.what == "sanitize":
        wanted = arguments.parts or list(sanitizers.TOOLS)
        sys.exit(sanitizers.sanitize(wanted, arguments.within, arguments.cases))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit({"check": check, "files": files}[arguments.what]())
