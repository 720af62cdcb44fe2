# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline bench latency`, and what they mean."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.bench.arrivals import DEFAULT_NUM_PROMPTS, Arrivals, parse_arrivals
from paceline.bench.lengths import DEFAULT_LENGTHS, parse_lengths
from paceline.bench.models import config_names, is_config_name
from paceline.bench.plot import PLOT_NEEDS, check_can_plot
from paceline.checks import check_int, check_path, parse_json, quoted, shorten
from paceline.commands.options import (
    add_device_option,
    add_hub_options,
    add_quiet_option,
    download_arguments,
)
from paceline.console import integer, number
from paceline.limits import (
    MAX_INT,
    MAX_NUM_SEQS,
    MAX_NUM_THREADS,
    MAX_SPECULATIVE_TOKENS,
    MAX_TEMPERATURE,
)
from paceline.sampling import SamplingParams
from paceline.speculative_fields import DRAFT_DRIVERS

# Keys of --sampling: the parameters that cost time.
_SAMPLING: Final = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip


def add_latency_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `latency` to the subparsers of `bench` and returns its parser."""
    latency: argparse.ArgumentParser = kinds.add_parser(
        "latency",
        help="iteration time, tokens per second, acceptance, and share of the hardware's limit",
        description=(
            "Runs plain and speculative decoding on the same prompts. Without --model, --config "
            "and --demo it measures a dummy Gemma-3-shaped pair of 101 M and 10 M parameters, "
            "whose acceptance length is set to 2.2: seconds on two cores, and the times say "
            f"nothing of other models. Names of configurations: {', '.join(config_names())}."
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
        default="1,8",  # with the dummy pair, half a minute on two slow cores
        metavar="LIST",
        help=f"requests at the same time, 1 to {MAX_NUM_SEQS}; one cell each (default: 1,8)",
    )
    group.add_argument(
        "--input-len",
        default="64",
        metavar="LIST",
        help="prompt tokens of each request, 1 or more; one cell each, and with several a table of "
        "times to the first token (default: 64)",
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
        "--request-rate",
        metavar="LIST",
        help="let requests arrive as a Poisson process, this many a second, and report the time "
        "between the tokens of a request; above 0, or a share of what the engine completes if all "
        "requests are sent at once, such as 60%% (default: none, all start at once)",
    )
    group.add_argument(
        "--num-prompts",
        type=integer,
        metavar="N",
        help="requests of each run with --request-rate, N >= 1; --concurrency is the number that "
        f"runs at the same time (default: {DEFAULT_NUM_PROMPTS})",
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
        "--num-speculative-tokens",
        metavar="LIST",
        help=f"k to compare, 1 to {MAX_SPECULATIVE_TOKENS}, one row each, instead of "
        "'num_speculative_tokens' in --speculative-config (default: its k)",
    )
    group.add_argument(
        "--adaptive",
        action="store_true",
        help="measure also an engine that chooses how many tokens it drafts, up to the largest k "
        "(default: off, the number of drafts is fixed)",
    )
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
    group.add_argument(
        "--acceptance-lengths",
        default=DEFAULT_LENGTHS,
        metavar="LIST",
        help="print tokens per second at these acceptance lengths, 1 to k + 1, computed from the "
        f"measured iterations; none = do not (default: {DEFAULT_LENGTHS})",
    )
    add_quiet_option(group, "show no progress")


@dataclass(frozen=True)
class LatencyOptions:
    """The checked options of the cells and of the output.

    Attributes:
        concurrency: Numbers of requests at the same time.
        input_lens: Prompt tokens of each request.
        samplings: Sampling parameters of each request.
        lengths: Acceptance lengths at which tokens per second are reported.
        arrivals: How requests arrive; None = all at once.
    """

    concurrency: list[int]
    input_lens: list[int]
    samplings: list[dict[str, Any]]
    lengths: list[float]
    arrivals: Arrivals | None


def parse_latency_options(args: argparse.Namespace) -> LatencyOptions:
    """Checks what can be checked before models are named.

    Raises:
        ValueError: An option is wrong, or two do not go together.
    """
    concurrency = parse_concurrency(args.concurrency)
    input_lens = parse_input_lens(args.input_len)
    for option in ("output_len", "rounds"):
        check_int(option, getattr(args, option), 1, MAX_INT)
    check_int("num_threads", args.num_threads, 0, MAX_NUM_THREADS)
    lengths = parse_lengths(args.acceptance_lengths)
    samplings = parse_samplings(args)
    arrivals = parse_arrivals(args, len(samplings))
    for option, path in (("--json", args.json), ("--plot", args.plot), ("--trace", args.trace)):
        if path is not None and (option, path) != ("--json", "-"):
            check_can_write(option, path)
    if args.plot is not None:
        check_can_plot("--plot", args.plot)
    for option, path in (
        ("--model", args.model),
        ("--config", args.config),
        ("--draft-config", args.draft_config),
    ):
        if path is not None:
            check_path(option, path)
    return LatencyOptions(concurrency, input_lens, samplings, lengths, arrivals)


def parse_input_lens(text: str) -> list[int]:
    """Reads --input-len."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ValueError(
            f"input_len is {shorten(text)}; allowed: integers of 1 or more, for example 2000,8000"
        )
    return list(dict.fromkeys(values))


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
        temperature = 0.0 if args.temperature is None else args.temperature
        SamplingParams(temperature=temperature)  # checks the option by its name
        samplings = [{"temperature": temperature}]
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
