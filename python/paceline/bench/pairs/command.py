# SPDX-License-Identifier: Apache-2.0
"""Runs `paceline bench pairs`."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from paceline.bench.drafting import with_fixed_k
from paceline.bench.floor import Speed, with_floor
from paceline.bench.latency import measure
from paceline.bench.models import BenchModel, load, load_draft
from paceline.bench.pairs.known import Pair, imposed_length
from paceline.bench.pairs.options import PairsOptions, parse_options, speculative_config
from paceline.bench.pairs.report import legend, line_of, pair_row, table_of
from paceline.bench.plot import draw_report
from paceline.bench.report import Output, machine_name, report_facts
from paceline.bench.runs import Requests
from paceline.bench.workload import Workload
from paceline.chat_template import ChatTemplates
from paceline.commands.prompt_input import Input, as_conversation, render_chat
from paceline.console import EXIT_OK, EXIT_OUT_OF_MEMORY, check_output, tell
from paceline.device import resolve_device
from paceline.loader import LoadedModel
from paceline.progress import progress_bar
from paceline.prompts import encode
from paceline.tokenizer import model_tokenizer

# Fewer requests than these would say nothing about a percentile.
_MIN_PROMPTS: Final = 8
# Runs of a row: the warm-up, and the one that counts.
_RUNS: Final = 2


def run_pairs(args: argparse.Namespace) -> int:
    """Measures, prints the rows and returns the exit code."""
    options = parse_options(args)
    check_output()
    device = resolve_device(args.device)
    command = getattr(args, "command_line", "paceline bench pairs")
    table = table_of(device, max(len(pair.name) for pair in options.pairs))
    speed = Speed(device, args.num_threads)
    read_bandwidth = speed.memory  # now, since models may leave no memory to measure in
    rows: list[dict[str, Any]] = []
    unmeasured: list[dict[str, Any]] = []
    measured: dict[str, Any] = {}
    num_runs = _RUNS * len(options.pairs) * len(options.temperatures) * len(options.concurrency)
    with progress_bar(num_runs, "Measuring", "run", is_shown=not args.quiet) as bar:
        output = Output(args.json, bar)
        for pair in options.pairs:
            for result in _measure_pair(pair, options, args, device, speed, bar):
                if not measured:
                    output.show([f"machine: {machine_name(device)}", *table.heading()])
                if "reason" in result:
                    unmeasured.append(result)
                else:
                    rows.append(result)
                    read_bandwidth = speed.memory
                output.show([line_of(table, result)])
                measured = report_facts("pairs", command, device, read_bandwidth)
                measured |= {"rows": rows, "not_measured": unmeasured}
                output.write(measured)
    output.close(measured, [legend(device, rows)] if rows else [])
    if not rows:
        return EXIT_OUT_OF_MEMORY
    if args.plot is not None:
        draw_report(measured, args.plot)
    return EXIT_OK


def _measure_pair(
    pair: Pair,
    options: PairsOptions,
    args: argparse.Namespace,
    device: str,
    speed: Speed,
    bar: Any,
) -> Iterator[dict[str, Any]]:
    """Measures all rows of a pair; what does not fit into memory, or needs what the device does not
    have, is not measured.
    """
    cells = list(itertools.product(options.temperatures, options.concurrency))
    # A reason is yielded after its `except`, whose traceback keeps models alive.
    reason = None
    try:
        target, draft = _load_pair(pair, device, is_quiet=args.quiet)
    except (MemoryError, NotImplementedError) as error:
        reason = str(error)
    if reason is not None:
        bar.update(_RUNS * len(cells))
        yield _unmeasured(pair, None, None, reason)
        return
    prompts = _encode_prompts(pair, options.prompts, target.loaded, args)
    for temperature, c in cells:
        what = f"{pair.name} at T={temperature:g}, c={c}"
        if bar.disable and not args.quiet:
            tell(f"measuring {what} ...")
        bar.set_description(f"Measuring {what}")
        try:
            row = _measure_row(
                pair, target, draft, temperature, c, prompts, args, speed, bar.update
            )
        except (MemoryError, NotImplementedError) as error:
            reason = str(error)
        else:
            yield row
            continue
        yield _unmeasured(pair, temperature, c, reason)


def _unmeasured(
    pair: Pair, temperature: float | None, concurrency: int | None, reason: str
) -> dict[str, Any]:
    """A row that was not measured, or with None the whole pair."""
    row = {"pair": pair.name, "temperature": temperature, "max_concurrency": concurrency}
    return row | {"reason": reason}


def _load_pair(pair: Pair, device: str, *, is_quiet: bool) -> tuple[BenchModel, BenchModel]:
    target = load(pair.target, dummy=pair.is_dummy, device=device, show_progress=not is_quiet)
    draft = load_draft(
        pair.drafter, target, method=pair.method, dummy=pair.is_dummy, device=device,
        show_progress=not is_quiet,
    )  # fmt: skip
    return target, draft


def _measure_row(
    pair: Pair,
    target: BenchModel,
    draft: BenchModel,
    temperature: float,
    concurrency: int,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    speed: Speed,
    after_run: Any,
) -> dict[str, Any]:
    imposed = imposed_length(pair.name, temperature, concurrency) if pair.is_dummy else None
    config = speculative_config(
        replace(pair, method=draft.loaded.method),
        None if imposed is None else imposed.tokens,
        args.rejection_sample_method,
    )
    count = args.num_prompts or max(concurrency, len(prompts) or _MIN_PROMPTS)
    input_len = round(statistics.fmean(map(len, prompts))) if prompts else args.input_len
    workload = Workload(concurrency, input_len, args.output_len, {"temperature": temperature})
    eos = () if pair.is_dummy else target.loaded.eos_token_ids
    [row] = measure(
        target, draft, with_fixed_k(config), [workload], num_threads=args.num_threads, rounds=1,
        requests=Requests(count, prompts, eos), show_progress=not args.quiet, after_run=after_run,
    )  # fmt: skip
    speed.forget()
    row = with_floor(row, target, draft, speed)
    return pair_row(pair, config, imposed, row)


def _encode_prompts(
    pair: Pair, prompts: Sequence[Input], target: LoadedModel, args: argparse.Namespace
) -> list[list[int]]:
    """The prompts of a pair as token ids, with room for the output; none with dummy weights."""
    num_tokens = args.output_len + (args.input_len if pair.is_dummy else 1)
    if num_tokens > target.max_position:
        raise ValueError(
            f"output_len is {args.output_len}, so requests have {num_tokens} tokens or more, but "
            f"the target of {pair.name} was made for {target.max_position}; use a smaller "
            f"--output-len{' or --input-len' if pair.is_dummy else ''}"
        )
    if pair.is_dummy:
        return []
    templates = ChatTemplates.of_model(target) if args.chat else None
    encoded = []
    for index, prompt in enumerate(prompts):
        given: Any = prompt
        if templates is not None:
            given = render_chat(
                model_tokenizer(target, templates), target, target.max_position,
                as_conversation(prompt, None),
            )  # fmt: skip
        _, token_ids = encode(
            given, f"prompt {index} of --prompts-file", target,
            max_model_len=target.max_position, spare=args.output_len,
        )  # fmt: skip
        encoded.append(token_ids)
    return encoded
