# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline bench`: one list for all of its commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final

from paceline.bench.arrivals import DEFAULT_NUM_PROMPTS
from paceline.bench.compare.reading import FACTS
from paceline.bench.lengths import DEFAULT_LENGTHS
from paceline.bench.models import config_names
from paceline.bench.pairs.known import ASSUMED_LENGTH, NUM_SPECULATIVE_TOKENS, PAIRS
from paceline.bench.plot import PLOT_NEEDS
from paceline.bench.serve.client import CHATS, COMPLETIONS
from paceline.bench.serve.datasets import DATASETS
from paceline.bench.serving import GOODPUT_NAMES
from paceline.commands.options import add_device_option, add_hub_options, add_quiet_option
from paceline.console import integer, number
from paceline.limits import MAX_NUM_SEQS, MAX_NUM_THREADS, MAX_SPECULATIVE_TOKENS, MAX_TEMPERATURE
from paceline.speculative_fields import (
    DRAFT_DRIVERS,
    METHODS,
    MODEL_FREE_METHODS,
    REJECTION_SAMPLE_METHODS,
)

#: Keys of --sampling: the parameters that cost time.
SAMPLING_KEYS: Final = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip
#: Methods whose drafter is a model of its own.
PAIR_METHODS: Final = tuple(method for method in METHODS if method not in MODEL_FREE_METHODS)
# Acceptance methods that measure acceptance.
_ACCEPT_METHODS: Final = tuple(m for m in REJECTION_SAMPLE_METHODS if m != "synthetic")

# By metavar; others are strings.
_TYPES: Final = {"N": integer, "T": number, "X": number}


def _add(
    group: Any,
    flag: str,
    kind: str | tuple[str, ...],
    text: str,
    default: Any = None,
    shown: str = "",
    **more: Any,
) -> None:
    """Adds an option.

    Args:
        group: Where to add it.
        flag: Its flag.
        kind: The metavar of its value, which decides the type; "" for a switch; or its choices.
        text: Its help, without the default.
        default: Its default.
        shown: What the help says of the default; "" = the default itself, and "none" for None.
        more: Further arguments of argparse.
    """
    if kind == "":
        group.add_argument(flag, action="store_true", help=f"{text} (default: {shown or 'off'})")
        return
    shown = shown or ("none" if default is None else str(default))
    if isinstance(kind, str):
        more |= {"metavar": kind, "type": _TYPES.get(kind, str)}
    else:
        more["choices"] = kind
    group.add_argument(flag, default=default, help=f"{text} (default: {shown})", **more)


def _add_all(group: Any, options: Iterable[tuple[Any, ...]]) -> None:
    """Adds options, each with the arguments of `_add` from `flag` to `shown`."""
    for option in options:
        _add(group, *option)


def _add_json(group: Any, text: str) -> None:
    """Adds --json for commands that may print the JSON instead of a table."""
    _add(group, "--json", "FILE", text, nargs="?", const="-")


def _add_engine(parser: argparse.ArgumentParser, *, has_demo: bool) -> Any:
    """Adds the options of engines that a bench starts; returns their group."""
    group = parser.add_argument_group("engine")
    add_device_option(group, has_demo=has_demo)
    threads = f"CPU threads of the ops, 1 to {MAX_NUM_THREADS}"
    _add(group, "--num-threads", "N", threads, 0, "0, one per core")
    return group


# ---- latency -------------------------------------------------------------------------------------


def add_latency_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `latency` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "latency",
        help="iteration time, tokens per second, acceptance, and share of the hardware's limit",
        description=(
            "Runs plain and speculative decoding on the same prompts. Without --model, --config "
            "and --demo it measures a dummy Gemma-3-shaped pair of 101 M and 10 M parameters, "
            "whose acceptance length is set to 2.2: seconds on two cores, and the times say "
            f"nothing of other models. Names of configurations: {', '.join(config_names())}."
        ),
    )
    _add_latency_models(parser.add_argument_group("models"))
    _add_latency_requests(parser.add_argument_group("requests"))
    _add_all(_add_engine(parser, has_demo=True), (
        ("--num-speculative-tokens", "LIST",
         f"k to compare, 1 to {MAX_SPECULATIVE_TOKENS}, one row each, instead of "
         "'num_speculative_tokens' in --speculative-config", None, "its k"),
        ("--adaptive", "",
         "measure also an engine that chooses how many tokens it drafts, up to the largest k",
         False, "off, the number of drafts is fixed"),
        ("--drivers", "LIST",
         "draft drivers to compare, one row each, instead of 'draft_driver' in "
         f"--speculative-config: any of {', '.join(DRAFT_DRIVERS)}", None, "unrolled"),
        ("--host-only", "", "run no ops, to measure the work of the host alone"),
    ))  # fmt: skip
    output = parser.add_argument_group("output")
    _add_json(
        output,
        "write the report as a JSON object after every row; without FILE, print only this object, "
        "at the end",
    )
    _add_all(output, (
        ("--plot", "FILE", f"draw time and tokens per second against concurrency; {PLOT_NEEDS}"),
        ("--trace", "FILE",
         "write the time of each kernel of one iteration, in which draft steps run one after "
         "another with every driver; needs --device cuda"),
        ("--acceptance-lengths", "LIST",
         "print tokens per second at these acceptance lengths, 1 to k + 1, computed from the "
         "measured iterations; none = do not", DEFAULT_LENGTHS),
    ))  # fmt: skip
    add_quiet_option(output, "show no progress")
    return parser


def _add_latency_models(group: Any) -> None:
    _add_all(group.add_mutually_exclusive_group(), (
        ("--model", "DIR_OR_ID",
         "measure this checkpoint: a folder, or a model of the Hugging Face Hub",
         None, "none, a dummy pair"),
        ("--config", "DIR_ID_OR_NAME",
         "measure dummy weights for the config.json of this folder or of this model of the hub, "
         "or for a named configuration"),
        ("--demo", "", "measure the draft_model demo"),
    ))  # fmt: skip
    _add_all(group, (
        ("--speculative-config", "JSON", "as for `generate`", None,
         "k=4 for the dummy pair, for --demo and for --draft-config; otherwise none, plain "
         "decoding alone"),
        ("--draft-config", "DIR_ID_OR_NAME",
         "a drafter with dummy weights for the config.json of this folder or of this model of the "
         "hub, or for a named configuration, instead of 'model' in --speculative-config",
         None, "none; without --speculative-config, k=4 and synthetic length 2.2"),
        ("--num-layers", "N",
         "with --config: keep the first N layers, N >= 1, and the drafter, for models that do not "
         "fit the machine", None, "all"),
    ))  # fmt: skip
    add_hub_options(group)
    dtypes = ("auto", "float32", "bfloat16")
    _add(group, "--dtype", dtypes, "dtype of the weights: auto, float32 or bfloat16", "auto")


def _add_latency_requests(group: Any) -> None:
    # The default of --concurrency takes half a minute with the dummy pair, on two slow cores.
    _add_all(group, (
        ("--concurrency", "LIST",
         f"requests at the same time, 1 to {MAX_NUM_SEQS}; one cell each", "1,8"),
        ("--input-len", "LIST",
         "prompt tokens of each request, 1 or more; one cell each, and with several a table of "
         "times to the first token", "64"),
        ("--output-len", "N", "output tokens of each request, N >= 1", 64),
        ("--temperature", "T",
         f"temperature of every request, 0 to {MAX_TEMPERATURE:,.0f}", None, "0, greedy"),
    ))  # fmt: skip
    _add(
        group, "--sampling", "JSON",
        "instead of --temperature: sampling parameters of every request, for example "
        '\'{"temperature": 1, "top_p": 0.95}\'; repeatable, one row each; keys: '
        f"{', '.join(SAMPLING_KEYS)}", action="append",
    )  # fmt: skip
    _add_all(group, (
        ("--request-rate", "LIST",
         "let requests arrive as a Poisson process, this many a second, and report the time "
         "between the tokens of a request; above 0, or a share of what the engine completes if "
         "all requests are sent at once, such as 60%%", None, "none, all start at once"),
        ("--num-prompts", "N",
         "requests of each run with --request-rate, N >= 1; --concurrency is the number that runs "
         "at the same time", None, str(DEFAULT_NUM_PROMPTS)),
        ("--rounds", "N", "repetitions of each measurement, N >= 1", 3),
    ))  # fmt: skip


# ---- pairs ---------------------------------------------------------------------------------------


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
    pairs = parser.add_argument_group("pairs")
    _add(
        pairs, "--pairs", "LIST", "names of pairs, separated by commas",
        shown="those of --model and --config, or without them all",
    )  # fmt: skip
    for flag, what in (
        ("--model", "measure checkpoints: two folders, or models of the Hugging Face Hub"),
        ("--config", "measure dummy weights for two config.json, each in a folder or of a model "
         "of the hub, or for named configurations"),
    ):  # fmt: skip
        _add(
            pairs, flag, "NAME=TARGET,DRAFTER[,METHOD]",
            f"{what}; NAME is a pair above, which they replace, or a new one; METHOD is one of "
            f"{', '.join(PAIR_METHODS)}; repeatable",
            shown="none; METHOD as for the pair above, or as the drafter's files say",
            action="append",
        )  # fmt: skip
    _add_pairs_requests(parser.add_argument_group("requests"))
    _add_engine(parser, has_demo=False)
    output = parser.add_argument_group("output")
    _add_json(
        output,
        "write the report as a JSON object after every row, with the keys of vLLM's result files; "
        "without FILE, print only this object, at the end",
    )
    curves = "throughput, inter-token latency and share of the floor against concurrency"
    _add(output, "--plot", "FILE", f"draw {curves}; {PLOT_NEEDS}")
    add_quiet_option(output, "print nothing but the results, and no bars")
    return parser


def _add_pairs_requests(group: Any) -> None:
    _add_all(group, (
        ("--temperatures", "LIST", f"temperatures, 0 to {MAX_TEMPERATURE:,.0f}", "0,1"),
        ("--concurrency", "LIST", f"requests at the same time, 1 to {MAX_NUM_SEQS}", "1,16,64"),
        ("--num-prompts", "N",
         "requests of a row, N >= 1 and at least the largest concurrency; the next one starts "
         "when one has ended, and prompts of a file repeat", None,
         "the prompts of --prompts-file or 8, but at least as many as run at the same time"),
        ("--input-len", "N",
         "prompt tokens of each request to dummy weights, random ids, N >= 1", 256),
        ("--output-len", "N",
         "output tokens of each request, N >= 1; checkpoints stop earlier at an end-of-sequence "
         "id", 512),
        ("--prompts-file", "FILE",
         "prompts for checkpoints: one per line, or with the ending .jsonl as for `generate`"),
        ("--chat", "",
         "turn each of these prompts into a conversation with the checkpoint's chat template"),
        ("--rejection-sample-method", _ACCEPT_METHODS,
         "how drafts of checkpoints are accepted: coupled, standard or block, as in "
         "--speculative-config of `generate`", "coupled"),
    ))  # fmt: skip


# ---- serve ---------------------------------------------------------------------------------------


def add_serve_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `serve` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "serve",
        help="throughput and latency of a running server with OpenAI's API",
        description="Sends streamed requests to a running server with OpenAI's API, prints the "
        "table of vLLM's `bench serve` for each load, and writes its JSON. Needs aiohttp: pip "
        "install 'paceline[bench]'.",
    )
    _add_all(parser.add_argument_group("server"), (
        ("--base-url", "URL", "the server, without /v1", "http://127.0.0.1:8000"),
        ("--endpoint", (COMPLETIONS, CHATS), f"the route: {COMPLETIONS} or {CHATS}", COMPLETIONS),
        ("--model", "NAME", "name of the model", None, "the server's first"),
        ("--api-key", "KEY", "bearer token", None, "the environment variable OPENAI_API_KEY"),
    ))  # fmt: skip
    _add_serve_requests(parser.add_argument_group("requests"))
    _add_serve_load(parser.add_argument_group("load"))
    output = parser.add_argument_group("output")
    _add_all(output, (
        ("--json", "FILE", "write the result with vLLM's keys; several loads are a list"),
        ("--save-detailed", "", "add the times and texts of each request to --json"),
        ("--label", "TEXT", "a label of the result"),
        ("--plot", "FILE", f"draw throughput, TTFT and ITL against load; {PLOT_NEEDS}"),
    ))  # fmt: skip
    add_quiet_option(output, "print nothing but the tables, and no bars")
    return parser


def _add_serve_requests(group: Any) -> None:
    _add_all(group, (
        ("--dataset-name", DATASETS,
         "random tokens; prefix_repetition, random tokens after one of several common prefixes; "
         "sharegpt, the first messages of a JSON list of conversations; or custom, lines "
         '{"prompt": ..., "output_tokens": ...}', "random"),
        ("--dataset-path", "FILE", "file of sharegpt and custom"),
        ("--num-prompts", "N", "requests of each load, N >= 1", 100),
        ("--input-len", "N", "tokens of a made prompt after its prefix, N >= 1", 256),
        ("--output-len", "N", "tokens to generate, N >= 1", None,
         "128, or what the lines of custom say"),
        ("--prefix-len", "N", "common tokens of made prompts, N >= 0", 0),
        ("--num-prefixes", "N", "different prefixes, N >= 1", 1),
        ("--seed", "N", "of prompts and arrivals, N >= 0", 0),
        ("--range-ratio", "X", "made lengths vary by this share, 0 to less than 1", 0.0, "0"),
        ("--token-ids", "LOW,HIGH",
         "ids that made prompts have, without special tokens; chats get words instead", "100,999"),
        ("--temperature", "T", "sampling temperature, T >= 0", None, "the server's"),
        ("--ignore-eos", "", "go on after an end-of-sequence token"),
        ("--extra-body", "JSON", "object with further fields of each request"),
    ))  # fmt: skip


def _add_serve_load(group: Any) -> None:
    _add_all(group, (
        ("--request-rate", "LIST",
         "requests a second, above 0, or inf for all at once; several are measured one after the "
         "other", "inf"),
        ("--max-concurrency", "LIST",
         "requests that are open at a time, 1 or more; several are measured one after the other",
         None, "any number"),
        ("--burstiness", "X",
         "1 = a Poisson process, less = bursts, more = evenly, above 0", 1.0, "1"),
        ("--num-warmups", "N", "requests before each load that are not measured, N >= 0", 1),
    ))  # fmt: skip
    names = ", ".join(GOODPUT_NAMES)
    _add(
        group, "--goodput", "NAME:MS",
        "count requests whose times are at most these, such as ttft:200 tpot:50; names: " + names,
        nargs="+",
    )  # fmt: skip


# ---- compare and plot ----------------------------------------------------------------------------


def add_compare_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `compare` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "compare",
        help="the ratios of two reports, or of reports by turns, with their spread",
        description=(
            "Prints the ratio B / A of each figure of each row that two reports share. Further "
            "reports are those of further turns, measured A B A B ..., so that a machine that gets "
            "warmer or slower meanwhile does so for both. Reports of different commands or "
            "machines are refused."
        ),
    )
    parser.add_argument("a", metavar="A.json", help="a report of `latency`, `pairs` or `serve`")
    parser.add_argument("b", metavar="B.json", help="one of the same bench, to compare with it")
    parser.add_argument(
        "more",
        metavar="MORE.json",
        nargs="*",
        default=[],  # without a default, argparse names it where B.json is missing
        help="reports of further turns: A, B, A, B, ...",
    )
    differ = f"compare although these differ: {', '.join(FACTS)}"
    _add(parser, "--allow-different", "LIST", differ)
    _add_json(parser, "write the ratios as a JSON object; without FILE, print only this object")
    return parser


def add_plot_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `plot` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "plot",
        help="draw a report of `latency --json FILE` or `pairs --json FILE`",
        description="Draws what `latency --plot` or `pairs --plot` draws, from a report that "
        "--json FILE wrote.",
    )
    parser.add_argument("report", metavar="REPORT", help="the JSON file of the report")
    out = f"the file to write; {PLOT_NEEDS}"
    parser.add_argument("--out", metavar="FILE", required=True, help=out)
    return parser
