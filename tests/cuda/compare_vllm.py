# SPDX-License-Identifier: Apache-2.0
"""Measures Paceline beside vLLM on one checkpoint: GPT-OSS-20B with an EAGLE-3 draft head.

    compare_vllm.py make FOLDER                  write both checkpoints: 14 GB of random weights
    compare_vllm.py run FOLDER --json FILE       measure Paceline, then vLLM
    compare_vllm.py make FOLDER --tiny           a pair that a CPU runs in seconds
    compare_vllm.py run FOLDER --json FILE --device cpu --input-len 16 --output-len 512

Both engines read the same files and get the same prompts and the same settings: an imposed
acceptance length, no end-of-sequence id, no prefix cache. Each runs in a process of its own. If
this Python has no vLLM, `run` measures Paceline and prints the command for one that has it;
--vllm-python names that Python. FILE has the figures of both, which docs/scripts/chart.py draws.

A round is a run with short outputs and a run with long ones, with as many requests as run at the
same time. The difference of their times, divided by that of their iterations, is the time of an
iteration: prompts cancel. Tokens per second are those of the long run, prompts included. All
figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SCRIPT: Final = Path(__file__).resolve()
ROOT: Final = SCRIPT.parents[2]
#: Each is also the name of its module.
ENGINES: Final = ("paceline", "vllm")
TARGET: Final = "gpt-oss-20b"
DRAFT: Final = "gpt-oss-20b-eagle3"
#: What the figures call the pair: in a file of the folder, since a folder may hold a tiny one.
PAIR_FILE: Final = "pair.json"
#: Sizes for a CPU. EAGLE-3 reads three layers, so that the target needs eight.
TINY_HEAD: Final = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_TARGET: Final = TINY_HEAD | {
    "num_hidden_layers": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_DRAFT_IDS: Final = 128
#: What two engines must have in common to stand in one table.
SETTINGS: Final = (
    "device",
    "target",
    "drafter",
    "num_speculative_tokens",
    "synthetic_acceptance_length",
    "input_tokens",
    "output_tokens",
    "short_output_tokens",
    "rounds",
)


# ---- the checkpoints -----------------------------------------------------------------------------


def make(folder: Path, *, is_tiny: bool) -> None:
    """Writes the folders "target" and "draft", and what figures call the pair."""
    from make_checkpoint import named_config, write_target
    from make_draft_head import write_head

    target, draft = named_config(TARGET), named_config(DRAFT)
    if is_tiny:
        layer_types = target["layer_types"][: TINY_TARGET["num_hidden_layers"]]
        target |= TINY_TARGET | {"layer_types": layer_types}
        draft["transformer_layer_config"] |= TINY_HEAD
        draft |= {"draft_vocab_size": TINY_DRAFT_IDS, "target_hidden_size": target["hidden_size"]}
    write_target(target, TARGET, folder / "target")
    write_head(draft, folder / "draft")
    name = "a tiny GPT-OSS" if is_tiny else "GPT-OSS-20B"
    pair = {"target": name, "drafter": "EAGLE-3"}
    (folder / PAIR_FILE).write_text(json.dumps(pair) + "\n")


# ---- the engines ---------------------------------------------------------------------------------


def engine_arguments(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of an engine's `LLM`: the same for both, but for what only one has."""
    common: dict[str, Any] = {
        "model": str(args.folder / "target"),
        "speculative_config": {
            "method": "eagle3",
            "model": str(args.folder / "draft"),
            "num_speculative_tokens": args.k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.acceptance_length,
        },
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.concurrency),
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # vLLM counts no drafts without them
    }
    if engine == "paceline":
        return common | {"device": args.device}
    # The folder has no tokenizer, which Paceline finds out by itself.
    return common | {"skip_tokenizer_init": True, **args.vllm_options}


def sampling_arguments(output_len: int) -> dict[str, Any]:
    """The arguments of an engine's `SamplingParams`."""
    return {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True, "detokenize": False}


# ---- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of as many requests as run at the same time.

    Attributes:
        seconds: From the first request to the last token.
        num_tokens: Output tokens of all.
        num_windows: Verify windows of all.
        num_accepted: Accepted drafts of all.
    """

    seconds: float
    num_tokens: int
    num_windows: int
    num_accepted: int


def run_once(
    llm: Any,
    sampling_params: Callable[..., Any],
    prompts: list[list[int]],
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Runs one request for each prompt, all at once."""

    def count(name: str) -> int:
        named = f"vllm:spec_decode_{name}"
        return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == named)

    names = ("num_drafts", "num_accepted_tokens")
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = sampling_params(**sampling_arguments(output_len))
    before = [count(name) for name in names]
    begin = clock()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = clock() - begin
    windows, accepted = (count(name) - n for name, n in zip(names, before, strict=True))
    return Run(seconds, sum(len(o.outputs[0].token_ids) for o in outputs), windows, accepted)


def figures(short: Run, long: Run, concurrency: int) -> dict[str, float]:
    """The figures of a round.

    Raises:
        RuntimeError: The long run has no more verify windows than the short one.
    """
    iterations = (long.num_windows - short.num_windows) / concurrency
    if iterations <= 0:
        raise RuntimeError(
            f"{long.num_windows} verify windows in the long run and {short.num_windows} in the "
            "short one; choose a larger --output-len"
        )
    return {
        "ms": (long.seconds - short.seconds) / iterations * 1e3,
        "tokens_per_s": long.num_tokens / long.seconds,
        "acceptance_length": 1 + long.num_accepted / long.num_windows,
    }


def measure(
    llm: Any,
    sampling_params: Callable[..., Any],
    concurrency: int,
    args: argparse.Namespace,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Warms up, then measures all rounds.

    Returns:
        The medians of `figures`, rounded, and the milliseconds of each round.
    """
    vocab = json.loads((args.folder / "target" / "config.json").read_text())["vocab_size"]

    def once(output_len: int, seed: int) -> Run:
        rng = random.Random(seed)  # the same prompts for every engine
        prompts = [
            [rng.randrange(vocab) for _ in range(args.input_len)] for _ in range(concurrency)
        ]
        return run_once(llm, sampling_params, prompts, output_len, clock)

    once(args.output_len, 0)
    rounds = []
    for turn in range(args.rounds):
        short = once(args.short_output_len, 2 * turn + 1)
        rounds.append(figures(short, once(args.output_len, 2 * turn + 2), concurrency))
    median = {key: statistics.median(of[key] for of in rounds) for key in rounds[0]}
    return {
        "ms": round(median["ms"], 2),
        "tokens_per_s": round(median["tokens_per_s"]),
        "acceptance_length": round(median["acceptance_length"], 2),
        "ms_of_rounds": [round(of["ms"], 3) for of in rounds],
    }


def device_name(device: str) -> str:
    """The name of the GPU, or "CPU"."""
    if device == "cpu":
        return "CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    return names.splitlines()[0].strip()


def heading(args: argparse.Namespace) -> dict[str, Any]:
    """What a comparison says of itself, without the figures of an engine."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(args.device),
        **json.loads((args.folder / PAIR_FILE).read_text()),
        "num_speculative_tokens": args.k,
        "synthetic_acceptance_length": args.acceptance_length,
        "input_tokens": args.input_len,
        "output_tokens": args.output_len,
        "short_output_tokens": args.short_output_len,
        "rounds": args.rounds,
        "weights": "one random checkpoint for both engines, experts in mxfp4; temperature 0",
    }


def run_engine(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Starts one engine in this process and measures it; returns its version and its rows."""
    module = importlib.import_module(engine)
    llm = module.LLM(**engine_arguments(engine, args))
    rows = []
    for concurrency in args.concurrency:
        row = measure(llm, module.SamplingParams, concurrency, args)
        rows.append({"concurrency": concurrency} | {f"{engine}_{key}": row[key] for key in row})
        print(
            f"{engine} c={concurrency}: {row['ms']:.2f} ms per iteration,"
            f" {row['tokens_per_s']:,} tokens/s, acceptance length {row['acceptance_length']:.2f}",
            flush=True,
        )
        if row["ms"] <= 0:
            print("  prompts take too much of that time: choose a longer --output-len", flush=True)
    found = {engine: module.__version__, "rows": rows}
    if engine == "vllm":
        found["vllm_settings"] = json.dumps(args.vllm_options) if args.vllm_options else "defaults"
    return found


def read_earlier(file: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the comparison that a file has, if there is one, before more is measured.

    Args:
        file: In the format of docs/data.
        now: The heading of what will be added.

    Raises:
        ValueError: The other engine ran with other settings; names one and both values.
    """
    if not file.exists():
        return {"commands": [], "rows": []}
    earlier: dict[str, Any] = json.loads(file.read_text())["pairs"][0]
    for key in SETTINGS:
        if earlier[key] != now[key]:
            raise ValueError(
                f"{key} is {now[key]!r}, but the figures in {file} have {earlier[key]!r}; "
                "give the same settings, or another --json"
            )
    return earlier


def merge(earlier: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Adds what was found of one engine; it takes the place of what the file had of that engine."""
    rows = {row["concurrency"]: row for row in earlier["rows"]}
    for row in found["rows"]:
        rows[row["concurrency"]] = rows.get(row["concurrency"], {}) | row
    lists = {
        "commands": list(dict.fromkeys([*earlier["commands"], *found["commands"]])),
        "rows": [rows[c] for c in sorted(rows)],
    }
    return {key: of for key, of in {**earlier, **found}.items() if key not in lists} | lists


# ---- the command line ----------------------------------------------------------------------------


def has_module(python: str, name: str) -> bool:
    """Returns whether another Python has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def run_both(args: argparse.Namespace, words: list[str]) -> int:
    """Runs both engines, each in a process of its own; returns an exit code."""
    for engine in ENGINES:
        command = [str(SCRIPT), *words, "--engine", engine]
        python = args.vllm_python if engine == "vllm" else sys.executable
        if engine == "vllm" and not has_module(python, "vllm"):
            shown = shlex.join(["python", str(SCRIPT.relative_to(ROOT)), *command[1:]])
            print(f"vLLM is not installed for {python}, so it was not measured. Where it is, run:")
            print(f"  {shown}")
            return 0
        code = subprocess.run([python, *command], check=False).returncode
        if code != 0:
            return code
    return 0


def options(text: str) -> dict[str, Any]:
    """Reads a JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return found


def build_parser() -> argparse.ArgumentParser:
    """Describes the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="write the checkpoints of target and draft head")
    maker.add_argument("folder", type=Path, help="gets the folders target and draft")
    maker.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    runner = commands.add_parser("run", help="measure engines on a folder that make wrote")
    runner.add_argument("folder", type=Path, help="as given to make")
    runner.add_argument("--json", type=Path, required=True, help="figures of both engines")
    runner.add_argument("--engine", choices=("both", *ENGINES), default="both")
    runner.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of Paceline")
    runner.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    runner.add_argument("--input-len", type=int, default=256)
    runner.add_argument("--output-len", type=int, default=256)
    # Outputs must last until all prompts are computed, so that all requests decode together and the
    # prompts of both runs delay as many iterations.
    runner.add_argument(
        "--short-output-len", type=int, help="of the shorter run (default: half of --output-len)"
    )
    runner.add_argument("--k", type=int, default=3, help="drafts of an iteration")
    runner.add_argument("--acceptance-length", type=float, default=2.61, help="imposed")
    runner.add_argument("--max-model-len", type=int, default=4096)
    runner.add_argument("--rounds", type=int, default=3)
    runner.add_argument(
        "--vllm-options", type=options, default={}, help="more arguments of vLLM's LLM, as JSON"
    )
    runner.add_argument("--vllm-python", default=sys.executable, help="a Python that has vLLM")
    return parser


def main() -> int:
    """Reads the command line, then writes checkpoints or measures; returns an exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if args.command == "make":
        make(args.folder, is_tiny=args.tiny)
        return 0
    args.short_output_len = args.short_output_len or args.output_len // 2
    if not 1 <= args.short_output_len < args.output_len:
        parser.error(
            f"--short-output-len is {args.short_output_len}; allowed: 1 to {args.output_len - 1}"
        )
    if not (args.folder / PAIR_FILE).exists():
        parser.error(f"{args.folder} has no {PAIR_FILE}; write the folder with: make FOLDER")
    words = sys.argv[1:]
    if args.engine == "both":
        return run_both(args, words)
    now = heading(args)
    now["commands"] = [shlex.join(["python", str(SCRIPT.relative_to(ROOT)), *words])]
    try:
        earlier = read_earlier(args.json, now)
    except ValueError as error:
        parser.error(str(error))
    try:
        found = run_engine(args.engine, args)
    except ModuleNotFoundError as error:
        if error.name != args.engine:
            raise
        print(f"{args.engine} is not installed for {sys.executable}", file=sys.stderr)
        return 1
    args.json.write_text(json.dumps({"pairs": [merge(earlier, now | found)]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
