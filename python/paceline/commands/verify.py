# SPDX-License-Identifier: Apache-2.0
"""`paceline verify`: replays the outputs of receipts, and says whether they are equal."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_path, parse_json
from paceline.commands.flags import DEFAULT_DEMO, add_command
from paceline.commands.options import download_arguments
from paceline.commands.text_files import MAX_PROMPT_BYTES, read_text_file
from paceline.console import EXIT_DIFFERENT, EXIT_OK, EXIT_UNVERIFIED, check_output, emit
from paceline.option_schema import given_options
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.receipts.replay import Inputs, Verdict

# Replays at the same time, as in `LLM`.
_MAX_CONCURRENT: Final = 64


def add_parser(commands: Any) -> None:
    """Adds `verify` to the command line's subparsers."""
    add_command(commands, "verify", _run_verify)


def _run_verify(args: argparse.Namespace) -> int:
    from paceline.demo import find_demo
    from paceline.llm import LLM
    from paceline.receipts.replay import verify

    check_output()
    receipts = [found for name in args.receipt for found in _read(name)]
    inputs = _inputs(args.inputs or ())
    engine = _engine_options(args, [value for _, value in receipts])
    with (
        LLM(
            args.model or str(find_demo(DEFAULT_DEMO).target),
            speculative_config={"method": None},
            show_progress=not args.quiet,
            **engine,
            **download_arguments(args),
        ) as llm,
        progress_bar(
            len(receipts), "Verifying", "receipt", is_shown=len(receipts) > 1 and not args.quiet
        ) as bar,
    ):
        _add_prompts(inputs, llm, args.prompt or ())
        verdicts = verify(
            llm,
            receipts,
            inputs=inputs,
            any_model=args.any_model,
            progress=lambda: bar.update(1),
        )
    for verdict in verdicts:
        if args.json:
            emit(json.dumps(verdict.to_dict()))
        elif not args.quiet or verdict.verdict != "equal":
            emit(str(verdict))
    counts = collections.Counter(verdict.verdict for verdict in verdicts)
    if len(verdicts) > 1 and not (args.json or args.quiet):
        emit(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return exit_code(verdicts)


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """Chooses the exit code: differences count more than receipts that could not be replayed."""
    kinds = {verdict.verdict for verdict in verdicts}
    if kinds & {"different", "edited"}:
        return EXIT_DIFFERENT
    return EXIT_UNVERIFIED if "refused" in kinds else EXIT_OK


def _read(name: str) -> list[tuple[str, Any]]:
    """Reads the receipts of a file, or of standard input for "-"."""
    from paceline.receipts.receipt import ReceiptError, read_receipts

    try:
        path = Path(check_path("RECEIPT", name, "a file with receipts"))
        shown = name
        if name == "-":
            path, shown = Path("/dev/stdin"), "standard input"
        return list(read_receipts(shown, read_text_file(path, MAX_PROMPT_BYTES)))
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 at byte {error.start}; allowed: the JSON of receipts"
        return [(name, ReceiptError(reason))]


def _inputs(names: Sequence[str]) -> Inputs:
    """Reads the files of --inputs: "inputs" of receipts, receipts with text, or lines of those."""
    from paceline.receipts.replay import Inputs

    inputs = Inputs()
    for name in names:
        path = Path(check_path("--inputs", name, "a file with the inputs of receipts"))
        text = read_text_file(path, MAX_PROMPT_BYTES).strip()
        is_lines = name.endswith(".jsonl")
        for number, line in enumerate(text.splitlines() if is_lines else [text], start=1):
            where = f"{name}:{number}" if is_lines else name
            value = parse_json(where, line)
            values = value if isinstance(value, list) else [value]
            for one in values:
                inputs.add(one.get("inputs", one) if isinstance(one, dict) else one)
    return inputs


def _add_prompts(inputs: Inputs, llm: LLM, prompts: Sequence[str]) -> None:
    """Tokenizes the texts of --prompt."""
    if prompts and llm.target.tokenizer is None:
        raise ValueError(
            f"--prompt is a text, but {llm.target.path} has no tokenizer.json; give --inputs with "
            "token ids instead"
        )
    for prompt in prompts:
        assert llm.target.tokenizer is not None
        inputs.add({"prompt": llm.target.tokenizer.encode(prompt)})


def _engine_options(args: argparse.Namespace, values: Sequence[Any]) -> dict[str, Any]:
    """The options of the engine: those that are given, and what the receipts say of others."""
    from paceline.receipts.receipt import check_receipt

    options = given_options(args, "all") | {
        "device": "cpu" if args.model is None and args.device == "auto" else args.device,
        "max_num_seqs": max(1, min(len(values), _MAX_CONCURRENT)),
    }
    dtypes: collections.Counter[str] = collections.Counter()
    for value in values:
        with contextlib.suppress(ValueError):  # `verify` says why
            dtypes[check_receipt(value)["model"]["dtype"]] += 1
    if options["dtype"] == "auto" and dtypes:
        ((options["dtype"], _),) = dtypes.most_common(1)
    return options
