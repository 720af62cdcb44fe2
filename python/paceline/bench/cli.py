# SPDX-License-Identifier: Apache-2.0
"""`paceline bench latency`: plain and speculative decoding side by side."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import _core
from paceline.bench.latency import (
    CUDA_BF16_FLOPS,
    Measurement,
    Speculation,
    Workload,
    can_trace,
    measure,
    with_floor,
)
from paceline.bench.models import BenchModel, config_names, is_config_name, load, load_draft
from paceline.checks import check_int, check_path, parse_json, quoted, shorten
from paceline.config import DRAFT_DRIVERS, SpeculativeConfig
from paceline.console import check_output, emit, integer, number, tell
from paceline.device import resolve_device
from paceline.limits import MAX_NUM_SEQS
from paceline.sampling import SamplingParams

# Name and width of each column; the first one is as wide as its longest entry.
_COLUMNS: Final = (
    ("configuration", 13), ("c", 4), ("ms/iter", 8), ("p99", 8), ("accept", 6), ("tok/s", 9),
    ("TTFT ms", 8), ("GB/iter", 8), ("GFLOP", 8), ("GB/s", 7), ("of floor", 8), ("idle", 6),
    ("host us", 8), ("start s", 8),
)  # fmt: skip

# Keys of --sampling: the parameters that cost time.
_SAMPLING: Final = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip

# Default speculation. Dummy weights would accept no draft, so their acceptance is synthetic.
_DEFAULT_SPECULATION: Final[dict[str, Any]] = {"num_speculative_tokens": 4}
_DUMMY_SPECULATION: Final[dict[str, Any]] = {
    **_DEFAULT_SPECULATION,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.2,
}


@dataclass(frozen=True)
class _Setup:
    """The models and configurations to measure.

    Attributes:
        target: The target.
        draft: The drafter, or None.
        speculations: One per driver; empty = plain decoding alone.
        device: "cpu" or "cuda".
        model_build_s: Seconds for loading the models.
        seconds_before: Seconds from the start of the command until the models were loaded.
    """

    target: BenchModel
    draft: BenchModel | None
    speculations: list[Speculation]
    device: str
    model_build_s: float
    seconds_before: float


def add_parser(commands: Any) -> None:
    """Adds `bench` to the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure this machine")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    latency = kinds.add_parser(
        "latency",
        help="iteration time, tokens per second, acceptance, and share of the hardware's limit",
        description=(
            "Runs plain and speculative decoding on the same prompts. Without --model and --config "
            "it measures a dummy Gemma-3-shaped pair of 101 M and 10 M parameters. Names of "
            f"configurations: {', '.join(config_names())}."
        ),
    )
    source = latency.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="measure this checkpoint")
    source.add_argument(
        "--config",
        metavar="DIR",
        help="measure dummy weights for this folder's config.json, or for a named configuration",
    )
    source.add_argument("--demo", action="store_true", help="measure the demo pair")
    latency.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="as for `generate` (default for the dummy and demo pairs: k=4)",
    )
    latency.add_argument(
        "--draft-config",
        metavar="DIR",
        help="a drafter with dummy weights for this folder's config.json, or for a named "
        "configuration, instead of 'model' in --speculative-config (without that option: k=4, "
        "synthetic length 2.2)",
    )
    latency.add_argument(
        "--concurrency",
        default="1,16,64",
        metavar="LIST",
        help="requests at the same time (default: 1,16,64)",
    )
    latency.add_argument(
        "--input-len", type=integer, default=64, metavar="N", help="prompt tokens (default: 64)"
    )
    latency.add_argument(
        "--output-len",
        type=integer,
        default=64,
        metavar="N",
        help="output tokens (default: 64)",
    )
    latency.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help="temperature of every request (default: 0, greedy)",
    )
    latency.add_argument(
        "--sampling",
        action="append",
        metavar="JSON",
        help="instead of --temperature: sampling parameters of every request, for example "
        f'\'{{"temperature": 1, "top_p": 0.95}}\' (repeatable, one row each; keys: '
        f"{', '.join(_SAMPLING)})",
    )
    latency.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of the weights (default: auto)",
    )
    latency.add_argument(
        "--device", default="auto", help="auto, cpu or cuda (default: auto; with --demo, cpu)"
    )
    latency.add_argument(
        "--drivers",
        metavar="LIST",
        help="draft drivers to compare, one row each, instead of 'draft_driver' in "
        f"--speculative-config: any of {', '.join(DRAFT_DRIVERS)}",
    )
    latency.add_argument(
        "--num-threads", type=integer, default=0, metavar="N", help="CPU threads (default: all)"
    )
    latency.add_argument(
        "--rounds", type=integer, default=3, metavar="N", help="repetitions (default: 3)"
    )
    latency.add_argument(
        "--host-only", action="store_true", help="run no ops, to measure the work of the host alone"
    )
    latency.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as a JSON object after every row; without FILE, print only this "
        "object, at the end",
    )
    latency.add_argument(
        "--trace",
        metavar="FILE",
        help="write the time of each kernel of one iteration, in which draft steps run one after "
        "another with every driver",
    )
    latency.set_defaults(run=run_latency)


def run_latency(args: argparse.Namespace) -> int:
    """Measures, prints the rows and returns the exit code."""
    started: float = getattr(args, "started", time.monotonic())
    concurrency = _parse_concurrency(args.concurrency)
    for option in ("input_len", "output_len", "rounds"):
        check_int(option, getattr(args, option), 1)
    samplings = _parse_samplings(args)
    for option, path in (("--json", args.json), ("--trace", args.trace)):
        if path is not None and (option, path) != ("--json", "-"):
            _check_can_write(option, path)
    check_output()
    for option, path in (
        ("--model", args.model),
        ("--config", args.config),
        ("--draft-config", args.draft_config),
    ):
        if path is not None:
            check_path(option, path)
    is_quiet = args.json == "-"
    setup = _set_up(args, started)
    run_id = uuid.uuid4().hex[:12]
    rows: list[tuple[str, Measurement]] = []
    read_bandwidth = 0.0
    variants = list(_variants(setup))
    names = {
        (variant, i): _row_name(variant, sampling if len(samplings) > 1 else {})
        for variant, _, _ in variants
        for i, sampling in enumerate(samplings)
    }
    name_width = max(len(name) for name in (*names.values(), _COLUMNS[0][0]))
    for c, (variant, drafter, speculation) in itertools.product(concurrency, variants):
        workloads = [Workload(c, args.input_len, args.output_len, s) for s in samplings]
        tell(f"measuring {variant} at {c} sequences ...")
        results = measure(
            setup.target, drafter, speculation, workloads, num_threads=args.num_threads,
            rounds=args.rounds, use_null_device=args.host_only,
            seconds_before=setup.seconds_before, is_traced=args.trace is not None,
        )  # fmt: skip
        if not rows:
            # Measured after the first engine, so that this engine starts in a fresh process.
            read_bandwidth = _measure_read_bandwidth(setup.device, args.num_threads)
            if not is_quiet:
                _print_head(setup, read_bandwidth, results[0], name_width)
        for i, result in enumerate(results):
            row = (names[variant, i], with_floor(result, setup.target, read_bandwidth))
            rows.append(row)
            if not is_quiet:
                _print_row(*row, name_width)
        report = _report(run_id, setup, read_bandwidth, rows)
        if args.json is not None and not is_quiet:
            _write_json(args.json, report)
        if args.trace is not None:
            _write_json(args.trace, _trace_table(run_id, setup, rows))
    if is_quiet:
        emit(json.dumps(report))
    else:
        for speedup in report["speedup"]:
            emit(
                f"{speedup['configuration']} / plain tokens per second at "
                f"{speedup['concurrency']} sequences: {speedup['ratio']:.2f}"
            )
    return 0


def _row_name(variant: str, sampling: dict[str, Any]) -> str:
    return variant + "".join(f" {key}={value:g}" for key, value in sampling.items())


def _parse_concurrency(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > MAX_NUM_SEQS:
        raise ValueError(
            f"concurrency is {shorten(text)}; allowed: integers from 1 to {MAX_NUM_SEQS}, "
            "for example 1,16,64"
        )
    return values


def _parse_samplings(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Reads --sampling and --temperature: at least one entry, each with a temperature.

    `SamplingParams` checks and normalises the values, so that the engine takes them as they are.
    """
    samplings: list[dict[str, Any]]
    if args.sampling is None:
        samplings = [{"temperature": 0.0 if args.temperature is None else args.temperature}]
    elif args.temperature is not None:
        raise ValueError(
            f"temperature is {args.temperature} and sampling is given too; "
            "name the temperature in --sampling"
        )
    else:
        samplings = [_parse_sampling(text) for text in args.sampling]
    return [_check_sampling(sampling, args.output_len) for sampling in samplings]


def _check_sampling(sampling: dict[str, Any], output_len: int) -> dict[str, Any]:
    try:
        params = SamplingParams(**sampling, max_tokens=output_len)
    except ValueError as error:
        raise ValueError(
            f"sampling is {sampling} and max_tokens is output_len = {output_len}: {error}"
        ) from None
    return {name: getattr(params, name) for name in sampling}


def _parse_sampling(text: str) -> dict[str, Any]:
    values = parse_json("sampling", text)
    if not isinstance(values, dict) or not set(values) <= set(_SAMPLING):
        raise ValueError(
            f"sampling is {shorten(text)}; allowed: a JSON object with keys of {quoted(_SAMPLING)}"
        )
    return {"temperature": 0.0, **values}


def _parse_drivers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in DRAFT_DRIVERS:
            raise ValueError(
                f"drivers is {shorten(text)}; allowed: a list of {quoted(DRAFT_DRIVERS)}"
            )
    return names


def _check_can_write(option: str, path: str) -> None:
    """Checks the path before anything runs, since the file is written only after the first row."""
    file = Path(check_path(option, path, "a file to write"))
    if file.is_dir():
        reason = "which is a folder"
    elif not file.parent.is_dir():
        reason = f"but there is no folder {shorten(str(file.parent), 200)}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "which may not be written"
    else:
        return
    raise ValueError(
        f"{option} is {shorten(path, 200)}, {reason}; allowed: a file that may be written, in a "
        "folder that exists"
    )


def _measure_read_bandwidth(device: str, num_threads: int) -> float:
    if device == "cuda":
        return _core.measure_cuda_read_bandwidth()
    return _core.measure_read_bandwidth(num_threads)


def _set_up(args: argparse.Namespace, started: float) -> _Setup:
    """Checks all arguments, then loads the models."""
    target_source, is_dummy = _target(args)
    draft_source, method, speculations = _speculations(args)
    device = resolve_device("cpu" if args.demo and args.device == "auto" else args.device)
    if args.trace is not None and not can_trace(device):
        raise NotImplementedError(
            f"--trace times kernels, but the device is {device!r}; "
            "leave it out, or use --device cuda"
        )
    begin = time.monotonic()
    target = load(target_source, dummy=is_dummy, dtype=args.dtype, device=device)
    draft = None
    if draft_source is not None:
        is_draft_dummy = is_dummy or args.draft_config is not None
        draft = load_draft(
            draft_source, target, method=method, dummy=is_draft_dummy, dtype=args.dtype,
            device=device,
        )  # fmt: skip
    end = time.monotonic()
    return _Setup(target, draft, speculations, device, end - begin, end - started)


def _target(args: argparse.Namespace) -> tuple[str, bool]:
    """The target's folder or name, and whether its weights are dummies."""
    if args.demo:
        from paceline.demo import demo_paths

        return str(demo_paths("draft_model")[0]), False
    if args.model is not None:
        if is_config_name(args.model) and not Path(args.model).is_dir():
            raise ValueError(
                f"--model is {shorten(args.model)}, which names a configuration without weights; "
                f"use --config {args.model}"
            )
        return args.model, False
    return args.config or "gemma3-101m", True


def _speculations(
    args: argparse.Namespace,
) -> tuple[str | None, str | None, list[Speculation]]:
    """The drafter's folder or name, its method, and one `Speculation` per driver."""
    default_draft, default_options = None, _DUMMY_SPECULATION
    if args.draft_config is not None:
        default_draft = args.draft_config
    elif args.demo:
        from paceline.demo import demo_paths

        default_draft, default_options = str(demo_paths("draft_model")[1]), _DEFAULT_SPECULATION
    elif args.model is None and args.config is None:
        default_draft = "gemma3-10m"
    if args.speculative_config is not None:
        config = _parse_speculative_config(args, default_draft)
    elif default_draft is not None:
        config = SpeculativeConfig.parse({"model": default_draft, **default_options})
    elif args.drivers is not None:
        raise ValueError(
            f"drivers is {shorten(args.drivers)}, but there is no drafter; give one with "
            "--speculative-config or --draft-config"
        )
    else:
        return None, None, []
    configs = [config]
    if args.drivers is not None:
        drivers = _parse_drivers(args.drivers)
        try:
            configs = [dataclasses.replace(config, draft_driver=driver) for driver in drivers]
        except ValueError as error:  # a stop threshold works with one driver only
            raise ValueError(f"drivers is {shorten(args.drivers)}: {error}") from None
    return config.model, config.method, [_speculation(config) for config in configs]


def _parse_speculative_config(
    args: argparse.Namespace, default_draft: str | None
) -> SpeculativeConfig:
    """Reads --speculative-config, which may omit the drafter if there is a default."""
    values = parse_json("speculative_config", args.speculative_config)
    if not isinstance(values, dict):
        return SpeculativeConfig.parse(values)  # refuses
    if args.draft_config is not None:
        _check_names_no_drafter(values, args.draft_config)
    if default_draft is not None and values.get("method") != "ngram":
        values = {"model": default_draft} | values
    return SpeculativeConfig.parse(values)


def _check_names_no_drafter(values: dict[str, Any], draft_config: str) -> None:
    """Refuses options that would make --draft-config meaningless."""
    given = f"--draft-config is {shorten(draft_config)}"
    if values.get("method") == "ngram":
        raise ValueError(
            f"{given}, but method is 'ngram', which looks drafts up in the sequence and needs no "
            "model; leave out --draft-config, or name another method"
        )
    if "model" in values:
        raise ValueError(
            f"{given}, but speculative_config['model'] is {shorten(values['model'])}; "
            "allowed: one of the two (--draft-config has dummy weights)"
        )


def _speculation(config: SpeculativeConfig) -> Speculation:
    return Speculation(
        config.k,
        config.rejection_sample_method,
        config.synthetic_acceptance_length or 0.0,
        config.draft_driver,
        config.draft_stop_threshold,
        config.prompt_lookup_min or 0,
        config.prompt_lookup_max or 0,
        config.draft_position,
        config.draft_sample_method == "probabilistic",
        config.draft_proposals or 0,
    )


def _variants(setup: _Setup) -> Iterator[tuple[str, BenchModel | None, Speculation | None]]:
    """The configurations at every concurrency: plain decoding, then every driver."""
    yield "plain", None, None
    for speculation in setup.speculations:
        name = f"k={speculation.num_speculative_tokens}"
        if len(setup.speculations) > 1 or speculation.draft_driver != "unrolled":
            name += f" {speculation.draft_driver}"
        yield name, setup.draft, speculation


def _report(
    run_id: str, setup: _Setup, read_bandwidth: float, rows: list[tuple[str, Measurement]]
) -> dict[str, Any]:
    target, draft = setup.target, setup.draft
    speculation = setup.speculations[0] if setup.speculations else None
    first = rows[0][1]
    status = _core.cuda_status()
    return {
        "run_id": run_id,
        "version": _core.version(),
        "build": _core.build_info(),
        "device": setup.device,
        "device_name": status["name"] if setup.device == "cuda" else None,
        "target": target.name,
        "target_matrix_bytes": target.matrix_bytes,
        "draft": None if draft is None else draft.name,
        "draft_matrix_bytes": None if draft is None else draft.matrix_bytes,
        "weight_dtype": target.model.weight_dtype,
        "accept_method": None if speculation is None else speculation.accept_method,
        "synthetic_acceptance_length": None
        if speculation is None
        else speculation.synthetic_acceptance_length or None,
        "read_bandwidth_gb_per_s": read_bandwidth / 1e9,
        "peak_tflops": CUDA_BF16_FLOPS / 1e12
        if setup.device == "cuda" and target.model.weight_dtype == "bfloat16"
        else None,
        "startup": {
            "model_build_s": setup.model_build_s,
            "engine_start_s": first.engine_start_s,
            "start_to_first_token_s": first.start_to_first_token_s,
        },
        "rows": [{"configuration": name, **row.as_dict()} for name, row in rows],
        "speedup": _speedups(rows),
    }


def _speedups(rows: list[tuple[str, Measurement]]) -> list[dict[str, Any]]:
    """Ratios of speculative to plain tokens per second."""

    def key(row: Measurement) -> tuple[int, str]:
        return row.workload.concurrency, json.dumps(row.workload.sampling)

    plain = {key(row): row.output_tokens_per_s for _, row in rows if row.num_draft_tokens == 0}
    return [
        {
            "configuration": name,
            "concurrency": row.workload.concurrency,
            "ratio": row.output_tokens_per_s / plain[key(row)],
        }
        for name, row in rows
        if row.num_draft_tokens > 0 and plain[key(row)] > 0
    ]


def _trace_table(run_id: str, setup: _Setup, rows: list[tuple[str, Measurement]]) -> dict[str, Any]:
    """The time of each kernel of one iteration, the longest first."""
    return {
        "run_id": run_id,
        "target": setup.target.name,
        "draft": None if setup.draft is None else setup.draft.name,
        "rows": [
            {
                "configuration": name,
                "concurrency": row.workload.concurrency,
                "iteration_us": row.iteration_ms * 1e3,
                "kernels": sorted(row.kernels or [], key=lambda kernel: -float(kernel["total_us"])),
            }
            for name, row in rows
        ],
    }


def _write_json(path: str, value: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:  # of a full disk, without the name of the file
        raise OSError(error.errno, error.strerror, path) from None


def _print_head(setup: _Setup, read_bandwidth: float, first: Measurement, name_width: int) -> None:
    target, draft = setup.target, setup.draft
    emit(f"target {target.name}: {target.matrix_bytes / 1e6:.1f} MB of matrices")
    if draft is not None and setup.speculations:
        speculation = setup.speculations[0]
        length = speculation.synthetic_acceptance_length
        judged = speculation.accept_method + (f" length {length}" if length else "")
        emit(f"draft  {draft.name}: {draft.matrix_bytes / 1e6:.1f} MB of matrices, {judged}")
    device = _core.cuda_status()["name"] if setup.device == "cuda" else "this machine"
    emit(f"read bandwidth of {device}: {read_bandwidth / 1e9:.1f} GB/s")
    emit(
        f"start to first token: {first.start_to_first_token_s:.2f} s, of it models "
        f"{setup.model_build_s:.2f} s, engine {first.engine_start_s:.2f} s"
    )
    _print_cells([name for name, _ in _COLUMNS], name_width)


def _print_row(name: str, row: Measurement, name_width: int) -> None:
    share = "-" if row.floor_share is None else f"{row.floor_share:.0%}"
    cells = (
        name, row.workload.concurrency, f"{row.iteration_ms:.3f}", f"{row.iteration_p99_ms:.3f}",
        f"{row.tokens_per_iteration:.2f}", f"{row.output_tokens_per_s:.1f}",
        f"{row.time_to_first_token_ms:.1f}", f"{row.iteration_bytes / 1e9:.3f}",
        f"{row.flops / 1e9:.1f}", f"{row.gb_per_s:.1f}", share, f"{row.idle_share:.1%}",
        f"{row.host_us:.1f}", f"{row.engine_start_s:.2f}",
    )  # fmt: skip
    _print_cells(cells, name_width)


def _print_cells(cells: Sequence[object], name_width: int) -> None:
    first, *others = zip(cells, _COLUMNS, strict=True)
    line = [f"{first[0]:<{name_width}}", *(f"{cell:>{width}}" for cell, (_, width) in others)]
    emit(" ".join(line), flush=True)
