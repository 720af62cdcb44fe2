# SPDX-License-Identifier: Apache-2.0
"""Reads the options of `paceline bench pairs`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.bench.models import is_config_name
from paceline.bench.pairs.known import NUM_SPECULATIVE_TOKENS, PAIRS, Pair
from paceline.bench.values import check_outputs, parse_concurrency, parse_list
from paceline.checks import check_choice, check_int, check_path, shorten
from paceline.commands.prompt_input import Input, read_prompts
from paceline.limits import MAX_INT, MAX_NUM_THREADS, MAX_TEMPERATURE
from paceline.sampling import SamplingParams
from paceline.speculative_config import SpeculativeConfig
from paceline.speculative_fields import METHODS, MODEL_FREE_METHODS

#: Methods whose drafter is a model of its own.
PAIR_METHODS: Final = tuple(method for method in METHODS if method not in MODEL_FREE_METHODS)


@dataclass(frozen=True)
class PairsOptions:
    """The checked options.

    Attributes:
        pairs: The pairs to measure.
        temperatures: Their temperatures.
        concurrency: Their numbers of requests at the same time.
        prompts: The prompts of pairs with checkpoints; empty if there are no such pairs.
    """

    pairs: list[Pair]
    temperatures: list[float]
    concurrency: list[int]
    prompts: list[Input]


def parse_options(args: argparse.Namespace) -> PairsOptions:
    """Checks all options, before anything is loaded.

    Raises:
        ValueError: An option is wrong, or two do not go together.
        OSError: The file with prompts cannot be read.
    """
    for option in ("input_len", "output_len"):
        check_int(option, getattr(args, option), 1, MAX_INT)
    check_int("num_threads", args.num_threads, 0, MAX_NUM_THREADS)
    concurrency = parse_concurrency(args.concurrency)
    if args.num_prompts is not None:
        check_int("num_prompts", args.num_prompts, 1, MAX_INT)
    if args.num_prompts is not None and args.num_prompts < max(concurrency):
        raise ValueError(
            f"num_prompts is {args.num_prompts}, but concurrency is {shorten(args.concurrency)}; "
            f"allowed: at least {max(concurrency)}, so that as many requests can run at the same "
            "time"
        )
    check_outputs(args)
    pairs = _chosen_pairs(args)
    return PairsOptions(
        pairs,
        _parse_temperatures(args.temperatures),
        concurrency,
        _read_prompts(args, pairs),
    )


def _chosen_pairs(args: argparse.Namespace) -> list[Pair]:
    given: dict[str, Pair] = {}
    for option, texts, is_dummy in (
        ("--config", args.config, True),
        ("--model", args.model, False),
    ):
        for text in texts or ():
            pair = _parse_pair(option, text, is_dummy=is_dummy)
            if pair.name in given:
                raise ValueError(
                    f"{option} names the pair {shorten(pair.name)} again; allowed: each pair once, "
                    "in --model or in --config"
                )
            given[pair.name] = pair
    known = PAIRS | given
    if args.pairs is None:
        return list((given or PAIRS).values())
    names = args.pairs.split(",")
    for name in names:
        if name not in known:
            raise ValueError(
                f"--pairs has the pair {shorten(name)}; allowed: a list of {', '.join(known)}, or "
                "names of --model and --config"
            )
    for name in given:
        if name not in names:
            raise ValueError(
                f"--pairs is {shorten(args.pairs, 200)}, without the pair {shorten(name)} of "
                "--model or --config; add it, or leave out its option"
            )
    return [known[name] for name in dict.fromkeys(names)]


def _parse_pair(option: str, text: str, *, is_dummy: bool) -> Pair:
    name, _, value = text.partition("=")
    parts = value.split(",")
    if not name or "," in name or len(parts) not in (2, 3) or not all(parts):
        raise ValueError(
            f"{option} is {shorten(text, 200)}; allowed: NAME=TARGET,DRAFTER or "
            "NAME=TARGET,DRAFTER,METHOD, for example "
            "qwen3-8b+eagle3=path/to/target,path/to/drafter"
        )
    for part in parts[:2]:
        check_path(option, part)
        if not is_dummy and is_config_name(part) and not Path(part).is_dir():
            raise ValueError(
                f"{option} is {shorten(text, 200)}, but {part} names a configuration without "
                "weights; use --config"
            )
    method = PAIRS[name].method if name in PAIRS else None
    if len(parts) == 3:
        method = check_choice(f"METHOD of {option}", parts[2], PAIR_METHODS)
    return Pair(name, parts[0], parts[1], method, is_dummy)


def _parse_temperatures(text: str) -> list[float]:
    allowed = f"numbers from 0 to {MAX_TEMPERATURE:,.0f}, for example 0,1"
    values = parse_list("temperatures", text, float, allowed)
    return [SamplingParams(temperature=value).temperature for value in values]


def _read_prompts(args: argparse.Namespace, pairs: list[Pair]) -> list[Input]:
    has_checkpoints = not all(pair.is_dummy for pair in pairs)
    if args.prompts_file is None:
        if has_checkpoints:
            raise ValueError(
                "--model needs --prompts-file, because acceptance is measured on prompts; "
                "--config measures dummy weights"
            )
        for option in ("chat", "rejection_sample_method"):
            if getattr(args, option) not in (False, "coupled"):
                raise ValueError(
                    f"--{option.replace('_', '-')} needs --model: dummy weights have random "
                    "prompts and an imposed acceptance length"
                )
        return []
    if not has_checkpoints:
        raise ValueError(
            f"--prompts-file is {shorten(args.prompts_file, 200)}, but all pairs have dummy "
            "weights, which read no prompts; name checkpoints with --model"
        )
    names = argparse.Namespace(prompts_file=args.prompts_file, prompt=[], chat=args.chat)
    return read_prompts(names)


def speculative_config(pair: Pair, length: float | None, accept_method: str) -> SpeculativeConfig:
    """The drafting of a pair.

    Args:
        pair: The pair.
        length: The acceptance length to impose; None = it is measured.
        accept_method: The acceptance method if it is measured.
    """
    values: dict[str, Any] = {
        "model": pair.drafter,
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "rejection_sample_method": accept_method,
    }
    if pair.method is not None:
        values["method"] = pair.method
    if length is not None:
        values["rejection_sample_method"] = "synthetic"
        values["synthetic_acceptance_length"] = length
    return SpeculativeConfig.parse(values)
