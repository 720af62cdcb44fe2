# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline bench pairs`, and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.bench.models import is_config_name
from paceline.bench.options import check_can_write, parse_concurrency
from paceline.bench.pairs.known import (
    ASSUMED_LENGTH,
    NUM_SPECULATIVE_TOKENS,
    PAIRS,
    Pair,
)
from paceline.bench.plot import PLOT_NEEDS, check_can_plot
from paceline.checks import check_choice, check_int, check_path, shorten
from paceline.commands.options import add_device_option, add_quiet_option
from paceline.commands.prompt_input import Input, read_prompts
from paceline.console import integer
from paceline.limits import MAX_INT, MAX_NUM_SEQS, MAX_NUM_THREADS, MAX_TEMPERATURE
from paceline.sampling import SamplingParams
from paceline.speculative_config import SpeculativeConfig
from paceline.speculative_fields import METHODS, MODEL_FREE_METHODS, REJECTION_SAMPLE_METHODS

#: Methods whose drafter is a model of its own.
_METHODS: Final = tuple(method for method in METHODS if method not in MODEL_FREE_METHODS)
#: Acceptance methods that measure acceptance.
_ACCEPT_METHODS: Final = tuple(m for m in REJECTION_SAMPLE_METHODS if m != "synthetic")


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


def add_pairs_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `pairs` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "pairs",
        help="one table of throughput, latency and acceptance for several targets with drafters",
        description=(
            "Measures pairs of a target and a drafter as vLLM's `bench serve` does, with "
            f"{NUM_SPECULATIVE_TOKENS} draft tokens, at each temperature and concurrency. The "
            f"pairs are: {', '.join(PAIRS)}. They have dummy weights, with an imposed acceptance "
            "length: the one published for vLLM where there is one, else "
            f"{ASSUMED_LENGTH}. With --model, checkpoints take their place, and acceptance is "
            "measured on the prompts of --prompts-file. A pair that does not fit into memory is "
            "listed with the reason."
        ),
    )
    _add_pairs(parser)
    _add_requests(parser)
    engine = parser.add_argument_group("engine")
    add_device_option(engine, has_demo=False)
    engine.add_argument(
        "--num-threads",
        type=integer,
        default=0,
        metavar="N",
        help=f"CPU threads of the ops, 1 to {MAX_NUM_THREADS} (default: 0, one per core)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as a JSON object after every row, with the keys of vLLM's result "
        "files; without FILE, print only this object, at the end (default: none)",
    )
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="draw throughput, inter-token latency and share of the floor against concurrency; "
        f"{PLOT_NEEDS} (default: none)",
    )
    add_quiet_option(output, "print nothing but the results, and no bars")
    return parser


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pairs")
    group.add_argument(
        "--pairs",
        metavar="LIST",
        help="names of pairs, separated by commas (default: those of --model and --config, or "
        "without them all)",
    )
    for option, what in (
        ("--model", "measure checkpoints: two folders, or models of the Hugging Face Hub"),
        ("--config", "measure dummy weights for two config.json, each in a folder or of a model "
         "of the hub, or for named configurations"),
    ):  # fmt: skip
        group.add_argument(
            option,
            action="append",
            metavar="NAME=TARGET,DRAFTER[,METHOD]",
            help=f"{what}; NAME is a pair above, which they replace, or a new one; METHOD is one "
            f"of {', '.join(_METHODS)} (default: none; METHOD as for the pair above, or as the "
            "drafter's files say); repeatable",
        )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--temperatures",
        default="0,1",
        metavar="LIST",
        help=f"temperatures, 0 to {MAX_TEMPERATURE:,.0f} (default: 0,1)",
    )
    group.add_argument(
        "--concurrency",
        default="1,16,64",
        metavar="LIST",
        help=f"requests at the same time, 1 to {MAX_NUM_SEQS} (default: 1,16,64)",
    )
    group.add_argument(
        "--num-prompts",
        type=integer,
        metavar="N",
        help="requests of a row, N >= 1 and at least the largest concurrency; the next one starts "
        "when one has ended, and prompts of a file repeat (default: the prompts of --prompts-file "
        "or 8, but at least as many as run at the same time)",
    )
    group.add_argument(
        "--input-len",
        type=integer,
        default=256,
        metavar="N",
        help="prompt tokens of each request to dummy weights, random ids, N >= 1 (default: 256)",
    )
    group.add_argument(
        "--output-len",
        type=integer,
        default=512,
        metavar="N",
        help="output tokens of each request, N >= 1; checkpoints stop earlier at an "
        "end-of-sequence id (default: 512)",
    )
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="prompts for checkpoints: one per line, or with the ending .jsonl as for `generate` "
        "(default: none)",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="turn each of these prompts into a conversation with the checkpoint's chat template "
        "(default: off)",
    )
    group.add_argument(
        "--rejection-sample-method",
        choices=_ACCEPT_METHODS,
        default="coupled",
        help="how drafts of checkpoints are accepted: coupled, standard or block, as in "
        "--speculative-config of `generate` (default: coupled)",
    )


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
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (option, path) != ("--json", "-"):
            check_can_write(option, path)
    if args.plot is not None:
        check_can_plot("--plot", args.plot)
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
        method = check_choice(f"METHOD of {option}", parts[2], _METHODS)
    return Pair(name, parts[0], parts[1], method, is_dummy)


def _parse_temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"temperatures is {shorten(text)}; allowed: numbers from 0 to "
            f"{MAX_TEMPERATURE:,.0f}, for example 0,1"
        ) from None
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
