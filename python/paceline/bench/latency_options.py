# SPDX-License-Identifier: Apache-2.0
"""Reads the options of `paceline bench latency`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.bench.arrivals import Arrivals, parse_arrivals
from paceline.bench.lengths import parse_lengths
from paceline.bench.models import is_config_name
from paceline.bench.values import check_outputs, parse_concurrency, parse_list
from paceline.checks import check_int, check_path, parse_json, quoted, shorten, wrong_value
from paceline.commands.options import download_arguments
from paceline.limits import MAX_INT, MAX_NUM_THREADS
from paceline.option_schema import ENGINE
from paceline.sampling import SamplingParams

#: Keys of --sampling: the parameters that cost time.
SAMPLING_KEYS: Final = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip


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
    allowed = "integers of 1 or more, for example 2000,8000"
    input_lens = parse_list("input_len", args.input_len, int, allowed, 1)
    for option in ("output_len", "rounds"):
        check_int(option, getattr(args, option), 1, MAX_INT)
    check_int("num_threads", args.num_threads, 0, MAX_NUM_THREADS)
    ranks = ENGINE["tensor_parallel_size"]
    check_int(ranks.name, args.tensor_parallel_size, ranks.low or 1, ranks.high)
    lengths = parse_lengths(args.acceptance_lengths)
    samplings = parse_samplings(args)
    arrivals = parse_arrivals(args, len(samplings))
    check_outputs(args)
    for option in ("model", "config", "draft_config"):
        if getattr(args, option) is not None:
            check_path(f"--{option.replace('_', '-')}", getattr(args, option))
    return LatencyOptions(
        concurrency, list(dict.fromkeys(input_lens)), samplings, lengths, arrivals
    )


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
    if not isinstance(values, dict) or not set(values) <= set(SAMPLING_KEYS):
        raise wrong_value("sampling", text, f"a JSON object with keys of {quoted(SAMPLING_KEYS)}")
    return {"temperature": 0.0, **values}


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
