# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline bench serve`."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.bench.plot import PLOT_NEEDS
from paceline.bench.serve.client import CHATS, COMPLETIONS
from paceline.bench.serve.datasets import DATASETS
from paceline.bench.serve.figures import GOODPUT_NAMES
from paceline.commands.options import add_quiet_option
from paceline.console import integer, number


def add_serve_parser(kinds: Any) -> argparse.ArgumentParser:
    """Adds `serve` to the subparsers of `bench` and returns its parser."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "serve",
        help="throughput and latency of a running server with OpenAI's API",
        description="Sends streamed requests to a running server with OpenAI's API, prints the "
        "table of vLLM's `bench serve` for each load, and writes its JSON. Needs aiohttp: pip "
        "install 'paceline[bench]'.",
    )
    _add_server(parser.add_argument_group("server"))
    _add_requests(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_server(group: Any) -> None:
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server, without /v1 (default: http://127.0.0.1:8000)",
    )
    group.add_argument(
        "--endpoint",
        choices=(COMPLETIONS, CHATS),
        default=COMPLETIONS,
        help=f"the route: {COMPLETIONS} or {CHATS} (default: {COMPLETIONS})",
    )
    group.add_argument(
        "--model", metavar="NAME", help="name of the model (default: the server's first)"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="bearer token (default: the environment variable OPENAI_API_KEY)",
    )


def _add_requests(group: Any) -> None:
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        help="random tokens; prefix_repetition, random tokens after one of several common "
        "prefixes; sharegpt, the first messages of a JSON list of conversations; or custom, lines "
        '{"prompt": ..., "output_tokens": ...} (default: random)',
    )
    group.add_argument(
        "--dataset-path", metavar="FILE", help="file of sharegpt and custom (default: none)"
    )
    for flag, default, text in (
        ("--num-prompts", 100, "requests of each load, N >= 1 (default: 100)"),
        ("--input-len", 256, "tokens of a made prompt after its prefix, N >= 1 (default: 256)"),
        (
            "--output-len",
            None,
            "tokens to generate, N >= 1 (default: 128, or what the lines of custom say)",
        ),
        ("--prefix-len", 0, "common tokens of made prompts, N >= 0 (default: 0)"),
        ("--num-prefixes", 1, "different prefixes, N >= 1 (default: 1)"),
        ("--seed", 0, "of prompts and arrivals, N >= 0 (default: 0)"),
    ):
        group.add_argument(flag, type=integer, default=default, metavar="N", help=text)
    group.add_argument(
        "--range-ratio",
        type=number,
        default=0.0,
        metavar="X",
        help="made lengths vary by this share, 0 to less than 1 (default: 0)",
    )
    group.add_argument(
        "--token-ids",
        default="100,999",
        metavar="LOW,HIGH",
        help="ids that made prompts have, without special tokens; chats get words instead "
        "(default: 100,999)",
    )
    group.add_argument(
        "--temperature",
        type=number,
        metavar="T",
        help="sampling temperature, T >= 0 (default: the server's)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after an end-of-sequence token (default: off)",
    )
    group.add_argument(
        "--extra-body",
        metavar="JSON",
        help="object with further fields of each request (default: none)",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        default="inf",
        metavar="LIST",
        help="requests a second, above 0, or inf for all at once; several are measured one after "
        "the other (default: inf)",
    )
    group.add_argument(
        "--max-concurrency",
        metavar="LIST",
        help="requests that are open at a time, 1 or more; several are measured one after the "
        "other (default: any number)",
    )
    group.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="X",
        help="1 = a Poisson process, less = bursts, more = evenly, above 0 (default: 1)",
    )
    group.add_argument(
        "--num-warmups",
        type=integer,
        default=1,
        metavar="N",
        help="requests before each load that are not measured, N >= 0 (default: 1)",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help=f"count requests whose times are at most these, such as ttft:200 tpot:50; names: "
        f"{', '.join(GOODPUT_NAMES)} (default: none)",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--json",
        metavar="FILE",
        help="write the result with vLLM's keys; several loads are a list (default: none)",
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="add the times and texts of each request to --json (default: off)",
    )
    group.add_argument("--label", metavar="TEXT", help="a label of the result (default: none)")
    group.add_argument(
        "--plot",
        metavar="FILE",
        help=f"draw throughput, TTFT and ITL against load; {PLOT_NEEDS} (default: none)",
    )
    add_quiet_option(group, "print nothing but the tables, and no bars")
