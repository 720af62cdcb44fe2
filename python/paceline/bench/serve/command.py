# SPDX-License-Identifier: Apache-2.0
"""Runs `paceline bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.plot import draw_results
from paceline.bench.report import Output
from paceline.bench.serve.client import CHATS, Client, find_model, read_draft_counters
from paceline.bench.serve.datasets import (
    FILE_DATASETS,
    Lengths,
    Question,
    make_questions,
    read_questions,
)
from paceline.bench.serve.figures import details_of, draft_figures, result_of, table
from paceline.bench.serve.load import Load, run_load
from paceline.bench.serving import GOODPUT_NAMES
from paceline.bench.values import ABOVE_ZERO, check_outputs, parse_list
from paceline.checks import check_finite, check_int, check_path, parse_json, shorten
from paceline.console import EXIT_FAILURE, EXIT_OK, check_output, emit, tell
from paceline.limits import MAX_INT, MAX_SEED, MAX_TEMPERATURE
from paceline.progress import progress_bar

if TYPE_CHECKING:
    import aiohttp

_DEFAULT_OUTPUT_LEN = 128


def run_serve(args: argparse.Namespace) -> int:
    """Measures, prints the tables and returns the exit code."""
    check_output()
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError("`paceline bench serve` needs aiohttp: pip install 'paceline[bench]'")
    check_outputs(args)
    if args.save_detailed and args.json is None:
        raise ValueError("--save-detailed needs --json")
    if not args.base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url is {shorten(args.base_url)}; allowed: http://... or https://")
    for name, least in (
        ("num_prompts", 1), ("input_len", 1), ("prefix_len", 0), ("num_prefixes", 1),
        ("num_warmups", 0),
    ):  # fmt: skip
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), least, MAX_INT)
    check_int("--seed", args.seed, 0, MAX_SEED)
    if args.temperature is not None:
        allowed = f"0 to {MAX_TEMPERATURE:,.0f}"
        if not 0 <= check_finite("--temperature", args.temperature, allowed) <= MAX_TEMPERATURE:
            raise ValueError(f"--temperature is {args.temperature:g}; allowed: {allowed}")
    loads = _loads(args)
    goals = _goals(args.goodput or [])
    extra = _extra(args)
    questions = _questions(args)
    results = asyncio.run(_measure(args, questions, loads, goals, extra))
    Output(args.json).write(results[0] if len(results) == 1 else results)
    if args.plot is not None:
        draw_results(results, _command_of(args), args.plot)
    return EXIT_OK if all(result["completed"] for result in results) else EXIT_FAILURE


async def _measure(
    args: argparse.Namespace,
    questions: list[Question],
    loads: list[Load],
    goals: dict[str, float],
    extra: dict[str, Any],
) -> list[dict[str, Any]]:
    import aiohttp

    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    base_url = args.base_url.rstrip("/")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"authorization": f"Bearer {key}"} if key else {},
        read_bufsize=2**20,
    ) as session:
        model = args.model or await find_model(session, base_url)
        client = Client(session, base_url, args.endpoint, model, extra)
        facts = {
            "backend": "openai-chat" if args.endpoint == CHATS else "openai",
            "endpoint_type": "openai-chat" if args.endpoint == CHATS else "openai",
            "command": _command_of(args),
            "label": args.label,
            "model_id": model,
            "tokenizer_id": model,
        }
        results = []
        for load in loads:
            result = await _measure_load(args, session, client, questions, load, goals, facts)
            results.append(result)
            emit(table(result))
        return results


async def _measure_load(
    args: argparse.Namespace,
    session: aiohttp.ClientSession,
    client: Client,
    questions: list[Question],
    load: Load,
    goals: dict[str, float],
    facts: dict[str, Any],
) -> dict[str, Any]:
    import numpy as np

    for question in itertools.islice(itertools.cycle(questions), args.num_warmups):
        answer = await client.ask(question)
        if answer.error:
            raise ValueError(f"the server refuses a request: {answer.error}")
    base_url = args.base_url.rstrip("/")
    before = await read_draft_counters(session, base_url)
    with progress_bar(len(questions), "Requests", "request", is_shown=not args.quiet) as bar:
        answers, seconds = await run_load(
            client, questions, load, np.random.default_rng(args.seed), bar.update
        )
    after = await read_draft_counters(session, base_url)
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        tell(f"paceline: {len(failed)} requests failed; the first: {failed[0]}")
    result = result_of(answers, seconds, load, goals, facts) | draft_figures(before, after)
    return result | (details_of(answers) if args.save_detailed else {})


def _command_of(args: argparse.Namespace) -> str:
    """The command line, for files that others read: without the key."""
    words = shlex.split(getattr(args, "command_line", "paceline bench serve"))
    if args.api_key:
        words = [word.replace(args.api_key, "...") for word in words]
    return shlex.join(words)


def _questions(args: argparse.Namespace) -> list[Question]:
    import numpy as np

    rng = np.random.default_rng(args.seed)
    is_file = args.dataset_name in FILE_DATASETS
    if is_file != (args.dataset_path is not None):
        raise ValueError(
            f"--dataset-name is {args.dataset_name} "
            + ("without --dataset-path" if is_file else "with --dataset-path")
            + f"; allowed: --dataset-path with {' and '.join(FILE_DATASETS)}"
        )
    output_len = args.output_len
    if output_len is not None:
        check_int("--output-len", output_len, 1, MAX_INT)
    if is_file:
        path = Path(check_path("--dataset-path", args.dataset_path, "a file with prompts"))
        if args.dataset_name == "sharegpt" and output_len is None:
            output_len = _DEFAULT_OUTPUT_LEN
        return read_questions(args.dataset_name, path, args.num_prompts, output_len, rng)
    if not 0 <= check_finite("--range-ratio", args.range_ratio, "0 to less than 1") < 1:
        raise ValueError(f"--range-ratio is {args.range_ratio:g}; allowed: 0 to less than 1")
    if args.dataset_name == "prefix_repetition" and args.prefix_len == 0:
        raise ValueError("--dataset-name prefix_repetition needs --prefix-len")
    lengths = Lengths(
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes,
        input_len=args.input_len,
        output_len=output_len or _DEFAULT_OUTPUT_LEN,
        range_ratio=args.range_ratio,
        token_ids=_token_ids(args.token_ids),
    )
    return make_questions(args.num_prompts, lengths, rng, is_text=args.endpoint == CHATS)


def _token_ids(text: str) -> tuple[int, int]:
    try:
        low, high = map(int, text.split(","))
    except ValueError:
        low, high = 1, 0
    if not 0 <= low <= high:
        raise ValueError(f"--token-ids is {shorten(text)}; allowed: LOW,HIGH with 0 <= LOW <= HIGH")
    return low, high


def _loads(args: argparse.Namespace) -> list[Load]:
    """Each rate with each concurrency."""
    if not check_finite("--burstiness", args.burstiness, "a number above 0") > 0:
        raise ValueError(f"--burstiness is {args.burstiness:g}; allowed: a number above 0")
    allowed = "numbers above 0, or inf"
    rates = [
        rate
        for text in args.request_rate.split(",")
        for rate in parse_list("--request-rate", text, float, allowed, ABOVE_ZERO)
    ]
    limits: list[int | None] = [None]
    if args.max_concurrency is not None:
        name, text = "--max-concurrency", args.max_concurrency
        limits = [*parse_list(name, text, int, "integers >= 1", 1)]
    return [Load(rate, args.burstiness, limit) for rate in rates for limit in limits]


def _goals(given: list[str]) -> dict[str, float]:
    goals = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = math.nan
        if name not in GOODPUT_NAMES or not goals[name] > 0:
            raise ValueError(
                f"--goodput has {shorten(text)}; allowed: NAME:MS with a name of "
                f"{', '.join(GOODPUT_NAMES)}"
            )
    return goals


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    extra: Any = {}
    if args.extra_body is not None:
        extra = parse_json("--extra-body", args.extra_body)
        if not isinstance(extra, dict):
            raise ValueError(f"--extra-body is {shorten(extra)}; allowed: a JSON object")
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    if args.ignore_eos:
        extra["ignore_eos"] = True
    return dict(extra)
