# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline bench`: one list for all of its commands."""

from __future__ import annotations

import argparse
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
    metavar: str,
    text: str,
    default: Any = None,
    shown: str = "",
    **more: Any,
) -> None:
    """Adds an option with a value, whose type follows from the metavar.

    Args:
        group: Where to add it.
        flag: Its flag.
        metavar: The name of its value.
        text: Its help, without the default.
        default: Its default.
        shown: What the help says of the default; "" = the default itself, and "none" for None.
        more: Further arguments of argparse.
    """
    shown = shown or ("none" if default is None else str(default))
    kind, text = _TYPES.get(metavar, str), f"{text} (default: {shown})"
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text, **more)


def _add_choice(group: Any, flag: str, choices: tuple[str, ...], text: str, default: str) -> None:
    text += f" (default: {default})"
    group.add_argument(flag, choices=choices, default=default, help=text)


def _add_switch(group: Any, flag: str, text: str, shown: str = "off") -> None:
    group.add_argument(flag, action="store_true", help=f"{text} (default: {shown})")


def _add_json(group: Any, text: str) -> None:
    """Adds --json for commands that may print the JSON instead of a table."""
    _add(group, "--json", "FILE", text, nargs="?", const="-")


def _add_plot(group: Any, curves: str) -> None:
    _add(group, "--plot", "FILE", f"draw {curves}; {PLOT_NEEDS}")


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
    engine = _add_engine(parser, has_demo=True)
    _add(
        engine, "--num-speculative-tokens", "LIST",
        f"k to compare, 1 to {MAX_SPECULATIVE_TOKENS}, one row each, instead of "
        "'num_speculative_tokens' in --speculative-config", shown="its k",
    )  # fmt: skip
    _add_switch(
        engine, "--adaptive",
        "measure also an engine that chooses how many tokens it drafts, up to the largest k",
        "off, the number of drafts is fixed",
    )  # fmt: skip
    _add(
        engine, "--drivers", "LIST",
        "draft drivers to compare, one row each, instead of 'draft_driver' in "
        f"--speculative-config: any of {', '.join(DRAFT_DRIVERS)}", shown="unrolled",
    )  # fmt: skip
    _add_switch(engine, "--host-only", "run no ops, to measure the work of the host alone")
    output = parser.add_argument_group("output")
    _add_json(
        output,
        "write the report as a JSON object after every row; without FILE, print only this object, "
        "at the end",
    )
    _add_plot(output, "time and tokens per second against concurrency")
    _add(
        output, "--trace", "FILE",
        "write the time of each kernel of one iteration, in which draft steps run one after "
        "another with every driver; needs --device cuda",
    )  # fmt: skip
    _add(
        output, "--acceptance-lengths", "LIST",
        "print tokens per second at these acceptance lengths, 1 to k + 1, computed from the "
        "measured iterations; none = do not", DEFAULT_LENGTHS,
    )  # fmt: skip
    add_quiet_option(output, "show no progress")
    return parser


def _add_latency_models(group: Any) -> None:
    source = group.add_mutually_exclusive_group()
    _add(
        source, "--model", "DIR_OR_ID",
        "measure this checkpoint: a folder, or a model of the Hugging Face Hub",
        shown="none, a dummy pair",
    )  # fmt: skip
    _add(
        source, "--config", "DIR_ID_OR_NAME",
        "measure dummy weights for the config.json of this folder or of this model of the hub, or "
        "for a named configuration",
    )  # fmt: skip
    _add_switch(source, "--demo", "measure the draft_model demo")
    _add(
        group, "--speculative-config", "JSON", "as for `generate`",
        shown="k=4 for the dummy pair, for --demo and for --draft-config; otherwise none, plain "
        "decoding alone",
    )  # fmt: skip
    _add(
        group, "--draft-config", "DIR_ID_OR_NAME",
        "a drafter with dummy weights for the config.json of this folder or of this model of the "
        "hub, or for a named configuration, instead of 'model' in --speculative-config",
        shown="none; without --speculative-config, k=4 and synthetic length 2.2",
    )  # fmt: skip
    _add(
        group, "--num-layers", "N",
        "with --config: keep the first N layers, N >= 1, and the drafter, for models that do not "
        "fit the machine", shown="all",
    )  # fmt: skip
    add_hub_options(group)
    dtypes = ("auto", "float32", "bfloat16")
    _add_choice(group, "--dtype", dtypes, "dtype of the weights: auto, float32 or bfloat16", "auto")


def _add_latency_requests(group: Any) -> None:
    # The default takes half a minute with the dummy pair, on two slow cores.
    concurrency = f"requests at the same time, 1 to {MAX_NUM_SEQS}; one cell each"
    _add(group, "--concurrency", "LIST", concurrency, "1,8")
    _add(
        group, "--input-len", "LIST",
        "prompt tokens of each request, 1 or more; one cell each, and with several a table of "
        "times to the first token", "64",
    )  # fmt: skip
    _add(group, "--output-len", "N", "output tokens of each request, N >= 1", 64)
    temperature = f"temperature of every request, 0 to {MAX_TEMPERATURE:,.0f}"
    _add(group, "--temperature", "T", temperature, shown="0, greedy")
    _add(
        group, "--sampling", "JSON",
        "instead of --temperature: sampling parameters of every request, for example "
        '\'{"temperature": 1, "top_p": 0.95}\'; repeatable, one row each; keys: '
        f"{', '.join(SAMPLING_KEYS)}", action="append",
    )  # fmt: skip
    _add(
        group, "--request-rate", "LIST",
        "let requests arrive as a Poisson process, this many a second, and report the time "
        "between the tokens of a request; above 0, or a share of what the engine completes if all "
        "requests are sent at once, such as 60%%", shown="none, all start at once",
    )  # fmt: skip
    _add(
        group, "--num-prompts", "N",
        "requests of each run with --request-rate, N >= 1; --concurrency is the number that runs "
        "at the same time", shown=str(DEFAULT_NUM_PROMPTS),
    )  # fmt: skip
    _add(group, "--rounds", "N", "repetitions of each measurement, N >= 1", 3)


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
    _add_plot(output, "throughput, inter-token latency and share of the floor against concurrency")
    add_quiet_option(output, "print nothing but the results, and no bars")
    return parser


def _add_pairs_requests(group: Any) -> None:
    _add(group, "--temperatures", "LIST", f"temperatures, 0 to {MAX_TEMPERATURE:,.0f}", "0,1")
    concurrency = f"requests at the same time, 1 to {MAX_NUM_SEQS}"
    _add(group, "--concurrency", "LIST", concurrency, "1,16,64")
    _add(
        group, "--num-prompts", "N",
        "requests of a row, N >= 1 and at least the largest concurrency; the next one starts when "
        "one has ended, and prompts of a file repeat",
        shown="the prompts of --prompts-file or 8, but at least as many as run at the same time",
    )  # fmt: skip
    _add(
        group, "--input-len", "N",
        "prompt tokens of each request to dummy weights, random ids, N >= 1", 256,
    )  # fmt: skip
    _add(
        group, "--output-len", "N",
        "output tokens of each request, N >= 1; checkpoints stop earlier at an end-of-sequence id",
        512,
    )  # fmt: skip
    _add(
        group, "--prompts-file", "FILE",
        "prompts for checkpoints: one per line, or with the ending .jsonl as for `generate`",
    )  # fmt: skip
    _add_switch(
        group, "--chat",
        "turn each of these prompts into a conversation with the checkpoint's chat template",
    )  # fmt: skip
    _add_choice(
        group, "--rejection-sample-method", _ACCEPT_METHODS,
        "how drafts of checkpoints are accepted: coupled, standard or block, as in "
        "--speculative-config of `generate`", "coupled",
    )  # fmt: skip


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
    server = parser.add_argument_group("server")
    _add(server, "--base-url", "URL", "the server, without /v1", "http://127.0.0.1:8000")
    routes = f"the route: {COMPLETIONS} or {CHATS}"
    _add_choice(server, "--endpoint", (COMPLETIONS, CHATS), routes, COMPLETIONS)
    _add(server, "--model", "NAME", "name of the model", shown="the server's first")
    key = "the environment variable OPENAI_API_KEY"
    _add(server, "--api-key", "KEY", "bearer token", shown=key)
    _add_serve_requests(parser.add_argument_group("requests"))
    _add_serve_load(parser.add_argument_group("load"))
    output = parser.add_argument_group("output")
    _add(output, "--json", "FILE", "write the result with vLLM's keys; several loads are a list")
    _add_switch(output, "--save-detailed", "add the times and texts of each request to --json")
    _add(output, "--label", "TEXT", "a label of the result")
    _add_plot(output, "throughput, TTFT and ITL against load")
    add_quiet_option(output, "print nothing but the tables, and no bars")
    return parser


def _add_serve_requests(group: Any) -> None:
    _add_choice(
        group, "--dataset-name", DATASETS,
        "random tokens; prefix_repetition, random tokens after one of several common prefixes; "
        "sharegpt, the first messages of a JSON list of conversations; or custom, lines "
        '{"prompt": ..., "output_tokens": ...}', "random",
    )  # fmt: skip
    _add(group, "--dataset-path", "FILE", "file of sharegpt and custom")
    _add(group, "--num-prompts", "N", "requests of each load, N >= 1", 100)
    _add(group, "--input-len", "N", "tokens of a made prompt after its prefix, N >= 1", 256)
    custom = "128, or what the lines of custom say"
    _add(group, "--output-len", "N", "tokens to generate, N >= 1", shown=custom)
    _add(group, "--prefix-len", "N", "common tokens of made prompts, N >= 0", 0)
    _add(group, "--num-prefixes", "N", "different prefixes, N >= 1", 1)
    _add(group, "--seed", "N", "of prompts and arrivals, N >= 0", 0)
    share = "made lengths vary by this share, 0 to less than 1"
    _add(group, "--range-ratio", "X", share, 0.0, "0")
    _add(
        group, "--token-ids", "LOW,HIGH",
        "ids that made prompts have, without special tokens; chats get words instead", "100,999",
    )  # fmt: skip
    _add(group, "--temperature", "T", "sampling temperature, T >= 0", shown="the server's")
    _add_switch(group, "--ignore-eos", "go on after an end-of-sequence token")
    _add(group, "--extra-body", "JSON", "object with further fields of each request")


def _add_serve_load(group: Any) -> None:
    _add(
        group, "--request-rate", "LIST",
        "requests a second, above 0, or inf for all at once; several are measured one after the "
        "other", "inf",
    )  # fmt: skip
    _add(
        group, "--max-concurrency", "LIST",
        "requests that are open at a time, 1 or more; several are measured one after the other",
        shown="any number",
    )  # fmt: skip
    poisson = "1 = a Poisson process, less = bursts, more = evenly, above 0"
    _add(group, "--burstiness", "X", poisson, 1.0, "1")
    warm_ups = "requests before each load that are not measured, N >= 0"
    _add(group, "--num-warmups", "N", warm_ups, 1)
    _add(
        group, "--goodput", "NAME:MS",
        "count requests whose times are at most these, such as ttft:200 tpot:50; names: "
        f"{', '.join(GOODPUT_NAMES)}", nargs="+",
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
