# SPDX-License-Identifier: Apache-2.0
"""`paceline bench latency`: plain and speculative decoding side by side."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from paceline import _core
from paceline.bench.latency import Measurement, Speculation, Workload, measure
from paceline.bench.models import BenchModel, load

_HEADER = (
    "configuration", "c", "ms/iter", "p99", "tok/iter", "tok/s", "TTFT ms", "GB/s", "of read bw",
    "host us",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Adds `bench` to the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure this machine")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    latency = kinds.add_parser(
        "latency",
        help="time of an iteration, tokens a second, acceptance, share of the bandwidth floor",
        description=(
            "Runs plain and speculative decoding on the same prompts. Without --model and --config "
            "a dummy Gemma-3-shaped pair of 101 M and 10 M parameters is measured."
        ),
    )
    source = latency.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="measure this checkpoint")
    source.add_argument("--config", metavar="DIR", help="dummy weights of this folder's config")
    source.add_argument("--demo", action="store_true", help="measure the demo pair")
    latency.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="as for `generate`; default for the dummy and demo pairs: k=4",
    )
    latency.add_argument("--concurrency", default="1,16,64", metavar="LIST")
    latency.add_argument("--input-len", type=int, default=64, metavar="N")
    latency.add_argument("--output-len", type=int, default=64, metavar="N")
    latency.add_argument("--temperature", type=float, default=0.0, metavar="T")
    latency.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    latency.add_argument("--num-threads", type=int, default=0, metavar="N")
    latency.add_argument("--rounds", type=int, default=3, metavar="N")
    latency.add_argument(
        "--host-only", action="store_true", help="run no op: measure the host's work alone"
    )
    latency.add_argument("--json", action="store_true", help="print one JSON object")
    latency.set_defaults(run=run_latency)


def run_latency(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    concurrency = _parse_concurrency(args.concurrency)
    target, draft, speculation = _models(args)
    read_bandwidth = _core.measure_read_bandwidth(args.num_threads)
    rows: list[tuple[str, Measurement]] = []
    for c in concurrency:
        workload = Workload(c, args.input_len, args.output_len, args.temperature)
        variants: list[tuple[str, BenchModel | None, Speculation | None]] = [("plain", None, None)]
        if speculation is not None:
            variants.append((f"k={speculation.num_speculative_tokens}", draft, speculation))
        for name, drafter, chosen in variants:
            print(f"measuring {name} at {c} sequences ...", file=sys.stderr, flush=True)
            result = measure(
                target, drafter, chosen, workload, num_threads=args.num_threads,
                read_bandwidth=read_bandwidth, rounds=args.rounds, use_null_device=args.host_only,
            )  # fmt: skip
            rows.append((name, result))
    if args.json:
        print(json.dumps(_report(target, draft, speculation, read_bandwidth, rows)))
    else:
        _print_table(target, draft, speculation, read_bandwidth, rows)
    return 0


def _parse_concurrency(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > 1024:
        raise ValueError(f"concurrency is {text!r}; allowed: integers 1 to 1024, e.g. 1,16,64")
    return values


def _models(
    args: argparse.Namespace,
) -> tuple[BenchModel, BenchModel | None, Speculation | None]:
    from paceline.config import SpeculativeConfig

    given = None
    if args.speculative_config is not None:
        given = SpeculativeConfig.parse(args.speculative_config)
    if args.demo:
        from paceline.demo import demo_paths

        target_path, draft_path = demo_paths("draft_model")
        speculation = _speculation(given) or Speculation(4)
        return (
            load(str(target_path), dummy=False, dtype=args.dtype),
            load(str(draft_path), dummy=False, dtype=args.dtype),
            speculation,
        )
    if args.model is None and args.config is None:
        speculation = _speculation(given) or Speculation(4, "synthetic", 2.2)
        return (
            load("gemma3-101m", dummy=True, dtype=args.dtype),
            load("gemma3-10m", dummy=True, dtype=args.dtype),
            speculation,
        )
    dummy = args.config is not None
    target = load(args.config or args.model, dummy=dummy, dtype=args.dtype)
    if given is None or given.model is None:
        return target, None, None
    return target, load(given.model, dummy=dummy, dtype=args.dtype), _speculation(given)


def _speculation(config: Any) -> Speculation | None:
    if config is None:
        return None
    return Speculation(
        config.num_speculative_tokens,
        config.rejection_sample_method,
        config.synthetic_acceptance_length or 0.0,
    )


def _report(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: Speculation | None,
    read_bandwidth: float,
    rows: list[tuple[str, Measurement]],
) -> dict[str, Any]:
    return {
        "target": target.name,
        "target_matrix_bytes": target.matrix_bytes,
        "draft": None if draft is None else draft.name,
        "draft_matrix_bytes": None if draft is None else draft.matrix_bytes,
        "accept_method": None if speculation is None else speculation.accept_method,
        "read_bandwidth_gb_per_s": read_bandwidth / 1e9,
        "build": _core.build_info(),
        "rows": [{"configuration": name, **row.as_dict()} for name, row in rows],
        "speedup": _speedups(rows),
    }


def _speedups(rows: list[tuple[str, Measurement]]) -> dict[str, float]:
    """Speculative over plain tokens a second, by concurrency."""
    plain = {r.workload.concurrency: r.output_tokens_per_s for n, r in rows if n == "plain"}
    return {
        str(r.workload.concurrency): r.output_tokens_per_s / plain[r.workload.concurrency]
        for n, r in rows
        if n != "plain" and plain[r.workload.concurrency] > 0
    }


def _print_table(
    target: BenchModel,
    draft: BenchModel | None,
    speculation: Speculation | None,
    read_bandwidth: float,
    rows: list[tuple[str, Measurement]],
) -> None:
    print(f"target {target.name}: {target.matrix_bytes / 1e6:.1f} MB of matrices")
    if draft is not None and speculation is not None:
        length = speculation.synthetic_acceptance_length
        judged = speculation.accept_method + (f" length {length}" if length else "")
        print(f"draft  {draft.name}: {draft.matrix_bytes / 1e6:.1f} MB of matrices, {judged}")
    print(f"read bandwidth of this machine: {read_bandwidth / 1e9:.1f} GB/s")
    widths = (14, 4, 8, 8, 8, 9, 8, 7, 10, 8)
    print(" ".join(f"{name:>{width}}" for name, width in zip(_HEADER, widths, strict=True)))
    for name, row in rows:
        cells = (
            name, row.workload.concurrency, f"{row.iteration_ms:.3f}",
            f"{row.iteration_p99_ms:.3f}", f"{row.tokens_per_iteration:.2f}",
            f"{row.output_tokens_per_s:.1f}", f"{row.time_to_first_token_ms:.1f}",
            f"{row.weight_gb_per_s:.1f}", f"{row.bandwidth_share:.0%}", f"{row.host_us:.1f}",
        )  # fmt: skip
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    for c, speedup in _speedups(rows).items():
        print(f"speculative / plain tokens a second at {c} sequences: {speedup:.2f}")
