# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline bench latency`, and what they mean."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, Final

from paceline.bench.models import config_names, is_config_name
from paceline.bench.plot import PLOT_NEEDS
from paceline.bench.workload import Speculation
from paceline.checks import check_int, check_path, parse_json, quoted, shorten
from paceline.commands.options import (
    add_device_option,
    add_hub_options,
    add_quiet_option,
    download_arguments,
)
from paceline.console import integer, number
from paceline.limits import MAX_NUM_SEQS, MAX_NUM_THREADS, MAX_TEMPERATURE
from paceline.sampling import SamplingParams
from paceline.speculative_config import DRAFT_DRIVERS, SpeculativeConfig

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


def add_latency_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `latency` to the subparsers of `bench` and returns its parser."""
    latency: argparse.ArgumentParser = kinds.add_parser(
        "latency",
        help="iteration time, tokens per second, acceptance, and share of the hardware's limit",
        description=(
            "Runs plain and speculative decoding on the same prompts. Without --model and --config "
            "it measures a dummy Gemma-3-shaped pair of 101 M and 10 M parameters. Names of "
            f"configurations: {', '.join(config_names())}."
        ),
    )
    _add_models(latency)
    _add_workload(latency)
    _add_engine(latency)
    _add_output(latency)
    return latency


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        metavar="DIR_OR_ID",
        help="measure this checkpoint: a folder, or a model of the Hugging Face Hub (default: "
        "none, a dummy pair)",
    )
    source.add_argument(
        "--config",
        metavar="DIR_ID_OR_NAME",
        help="measure dummy weights for the config.json of this folder or of this model of the "
        "hub, or for a named configuration (default: none)",
    )
    source.add_argument(
        "--demo",
        action="store_true",
        help="measure the draft_model demo (default: off)",
    )
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="as for `generate` (default: k=4 for the dummy pair, for --demo and for "
        "--draft-config; otherwise none, plain decoding alone)",
    )
    group.add_argument(
        "--draft-config",
        metavar="DIR_ID_OR_NAME",
        help="a drafter with dummy weights for the config.json of this folder or of this model of "
        "the hub, or for a named configuration, instead of 'model' in --speculative-config "
        "(default: none; without --speculative-config, k=4 and synthetic length 2.2)",
    )
    group.add_argument(
        "--num-layers",
        type=integer,
        metavar="N",
        help="with --config: keep the first N layers, N >= 1, and the drafter, for models that do "
        "not fit the machine (default: all)",
    )
    add_hub_options(group)
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of the weights: auto, float32 or bfloat16 (default: auto)",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--concurrency",
        default="1,16,64",
        metavar="LIST",
        help=f"requests at the same time, 1 to {MAX_NUM_SEQS}; one cell each (default: 1,16,64)",
    )
    group.add_argument(
        "--input-len",
        type=integer,
        default=64,
        metavar="N",
        help="prompt tokens of each request, N >= 1 (default: 64)",
    )
    group.add_argument(
        "--output-len",
        type=integer,
        default=64,
        metavar="N",
        help="output tokens of each request, N >= 1 (default: 64)",
    )
    group.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help=f"temperature of every request, 0 to {MAX_TEMPERATURE:,.0f} (default: 0, greedy)",
    )
    group.add_argument(
        "--sampling",
        action="append",
        metavar="JSON",
        help="instead of --temperature: sampling parameters of every request, for example "
        '\'{"temperature": 1, "top_p": 0.95}\'; repeatable, one row each; keys: '
        f"{', '.join(_SAMPLING)} (default: none)",
    )
    group.add_argument(
        "--rounds",
        type=integer,
        default=3,
        metavar="N",
        help="repetitions of each measurement, N >= 1 (default: 3)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_device_option(group)
    group.add_argument(
        "--drivers",
        metavar="LIST",
        help="draft drivers to compare, one row each, instead of 'draft_driver' in "
        f"--speculative-config: any of {', '.join(DRAFT_DRIVERS)} (default: unrolled)",
    )
    group.add_argument(
        "--num-threads",
        type=integer,
        default=0,
        metavar="N",
        help=f"CPU threads of the ops, 1 to {MAX_NUM_THREADS} (default: 0, one per core)",
    )
    group.add_argument(
        "--host-only",
        action="store_true",
        help="run no ops, to measure the work of the host alone (default: off)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as a JSON object after every row; without FILE, print only this "
        "object, at the end (default: none)",
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        help=f"draw time and tokens per second against concurrency; {PLOT_NEEDS} (default: none)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write the time of each kernel of one iteration, in which draft steps run one after "
        "another with every driver; needs --device cuda (default: none)",
    )
    add_quiet_option(group, "show no progress")


def parse_concurrency(text: str) -> list[int]:
    """Reads --concurrency."""
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


def parse_samplings(args: argparse.Namespace) -> list[dict[str, Any]]:
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


def check_can_write(option: str, path: str) -> None:
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


def check_hub_options(args: argparse.Namespace) -> None:
    """Refuses options of models of the hub that are malformed or could have no effect."""
    download_arguments(args)  # checks them
    if args.revision is not None and args.model is None and args.config is None:
        raise ValueError("--revision needs --model or --config with a model of the hub")


def check_num_layers(args: argparse.Namespace) -> None:
    """Refuses --num-layers without dummy weights, or below 1."""
    if args.num_layers is None:
        return
    check_int("num_layers", args.num_layers, 1)
    if args.config is None:
        raise ValueError(
            f"--num-layers is {args.num_layers}, but it needs --config, whose weights are dummies: "
            "a checkpoint is measured as a whole"
        )


def target_source(args: argparse.Namespace) -> tuple[str, bool]:
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


def speculations(
    args: argparse.Namespace,
) -> tuple[SpeculativeConfig | None, list[Speculation]]:
    """The configuration, and one `Speculation` per driver; None and none without a drafter."""
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
        return None, []
    configs = [config]
    if args.drivers is not None:
        drivers = _parse_drivers(args.drivers)
        try:
            configs = [dataclasses.replace(config, draft_driver=driver) for driver in drivers]
        except ValueError as error:  # a stop threshold works with one driver only
            raise ValueError(f"drivers is {shorten(args.drivers)}: {error}") from None
    return config, [speculation_of(config) for config in configs]


def _parse_speculative_config(
    args: argparse.Namespace, default_draft: str | None
) -> SpeculativeConfig:
    """Reads --speculative-config, which may omit the drafter if there is a default."""
    values = parse_json("speculative_config", args.speculative_config)
    if not isinstance(values, dict):
        return SpeculativeConfig.parse(values)  # refuses
    if args.draft_config is not None:
        _check_names_no_drafter(values, args.draft_config)
    if default_draft is not None and values.get("method") not in ("ngram", "mtp"):
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
    if values.get("method") == "mtp":
        raise ValueError(
            f"{given}, but method is 'mtp', whose layer is the target's; leave out --draft-config, "
            "or name another method"
        )
    if "model" in values:
        raise ValueError(
            f"{given}, but speculative_config['model'] is {shorten(values['model'])}; "
            "allowed: one of the two (--draft-config has dummy weights)"
        )


def speculation_of(config: SpeculativeConfig) -> Speculation:
    """What the engine is told of a complete configuration."""
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
