# SPDX-License-Identifier: Apache-2.0
"""`paceline generate`: continues prompts and streams the output as it is accepted."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_path
from paceline.commands.colors import TokenColors, legend, wants_color
from paceline.commands.flags import add_command
from paceline.commands.options import (
    choose_model,
    download_arguments,
    engine_arguments,
    sampling_params,
)
from paceline.commands.prompt_input import Input, as_conversation, chat_prompt, read_prompts
from paceline.commands.report import json_report, report_lines, total_lines
from paceline.console import (
    EXIT_OK,
    EXIT_SELF_CHECK,
    check_output,
    emit,
    tell,
)
from paceline.limits import MAX_NUM_SEQS
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput
    from paceline.sampling import SamplingParams
    from paceline.speculative_config import SpeculativeConfig

_RULE: Final = "-" * 50
# Outputs that are generated at the same time, as in `LLM`.
_MAX_CONCURRENT: Final = 64


def add_parser(commands: Any) -> None:
    """Adds `generate` to the command line's subparsers."""
    add_command(commands, "generate", _run_generate)


def _run_generate(args: argparse.Namespace) -> int:
    from paceline.llm import LLM
    from paceline.logprobs import needed_max_logprobs
    from paceline.sampling import WITH_TEXT
    from paceline.speculative_config import SpeculativeConfig

    show_text = not args.json
    show_progress = show_text and not args.quiet
    check_output()
    for option, value in (("--system", args.system), ("--chat-template", args.chat_template)):
        if value is not None and not args.chat:
            raise ValueError(f"{option} needs --chat")
    if args.with_text and args.receipts is None:
        raise ValueError("--with-text needs --receipts FILE")
    prompts = read_prompts(args)
    if show_progress:
        check_output("".join(prompt for prompt in prompts if isinstance(prompt, str)))
    params = sampling_params(args)
    if args.receipts is not None:
        check_path("--receipts", args.receipts, "the file to write receipts to")
        params = dataclasses.replace(params, receipt=WITH_TEXT if args.with_text else True)
    model, speculative_config = choose_model(args)
    speculative = None
    if speculative_config is not None:
        speculative = SpeculativeConfig.parse(speculative_config)
    if args.compare and speculative is not None:
        _check_comparable(speculative, params)
    engine = engine_arguments(args) | {
        "max_num_seqs": min(len(prompts) * params.n, max(_MAX_CONCURRENT, params.n), MAX_NUM_SEQS),
        "max_logprobs": needed_max_logprobs(params),
    }
    with LLM(
        model,
        speculative_config=speculative,
        show_progress=show_progress,
        **engine,
        **download_arguments(args),
    ) as llm:
        if args.compare:  # again: a model may bring its own drafter
            _check_comparable(llm.speculative_config, params)
        if show_progress:
            tell(f"paceline: {_first_line(args, llm)}")
        outputs = _run(llm, args, prompts, params, is_shown=show_text)
        target, draft = llm.target, llm.draft
        configured = llm.capabilities()["configured"]
    if args.receipts is not None:
        _write_receipts(args.receipts, outputs)
    plains: Sequence[RequestOutput | None] = [None] * len(outputs)
    if args.compare:
        with LLM.from_loaded(target, show_progress=show_progress, **engine) as llm:
            plains = _run(llm, args, prompts, params, is_shown=False)
    is_same = all(
        plain is None or plain.outputs == output.outputs
        for output, plain in zip(outputs, plains, strict=True)
    )
    if args.json:
        for output, plain in zip(outputs, plains, strict=True):
            report = json_report(output, plain)
            report["model"] = str(target.path)
            report["draft_model"] = None if draft is None else str(draft.path)
            report["configured"] = configured
            emit(json.dumps(report))
    elif not args.quiet:
        _print_report(args, outputs, plains)
    if not is_same:
        tell("paceline: error: speculative and plain decoding produced different tokens")
        return EXIT_SELF_CHECK
    return EXIT_OK


def _first_line(args: argparse.Namespace, llm: LLM) -> str:
    """Says what runs, where, how it drafts, and in how much memory."""
    report = llm.memory_report()
    parts = ("target_weight_bytes", "draft_weight_bytes", "kv_pool_bytes", "workspace_bytes",
             "graph_bytes")  # fmt: skip
    mib = sum(report[part] for part in parts) / 2**20
    name = llm.target.path.name if args.model is not None else "a demo of the package"
    config = llm.speculative_config
    drafts = "no drafter"
    if config is not None:
        drafts = f"{config.method} with {config.num_speculative_tokens} drafts an iteration"
    device = {"cpu": "the CPU", "cuda": "the GPU"}.get(report["device"], report["device"])
    return f"{name} on {device}, {drafts}, {mib:,.0f} MiB"


def _check_comparable(speculative: SpeculativeConfig | None, params: SamplingParams) -> None:
    """Refuses --compare with methods whose output may differ from plain decoding by design."""
    if speculative is None:
        raise ValueError("--compare needs a drafter; see --speculative-config")
    method = speculative.rejection_sample_method
    allowed = "allowed: rejection_sample_method 'coupled'"
    if method == "synthetic":
        raise ValueError(
            "--compare expects the output of plain decoding, but rejection_sample_method is "
            f"'synthetic', whose verdicts are artificial; {allowed}, or no --compare"
        )
    if method != "coupled" and params.temperature > 0:
        raise ValueError(
            f"--compare expects the output of plain decoding, but rejection_sample_method is "
            f"{method!r} and temperature is {params.temperature:g}, which keeps the "
            f"distribution but not the tokens of a seed; {allowed}, temperature 0, or no --compare"
        )


def _run(
    llm: LLM,
    args: argparse.Namespace,
    prompts: Sequence[Input],
    params: SamplingParams,
    *,
    is_shown: bool,
) -> list[RequestOutput]:
    """Generates and prints: one output as it arrives, those of several prompts behind a bar.

    Hidden runs take the same path.
    """
    from paceline.outputs import RequestError

    is_single = len(prompts) == 1
    is_streamed = is_single and is_shown and not args.no_stream and params.n == 1
    is_colored = is_shown and wants_color(args.color)
    has_bar = not (is_single or args.quiet)
    colors = [[TokenColors() for _ in range(params.n)] for _ in prompts]
    texts = [[""] * params.n for _ in prompts]
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    with (
        llm.stream([_encoded(llm, args, prompt) for prompt in prompts], params) as stream,
        progress_bar(len(prompts), "Generating", "prompt", is_shown=has_bar) as bar,
    ):
        if is_single and is_shown and not args.quiet:
            _print_prompt(args, prompts[0])
        for chunk in stream:
            painter = colors[chunk.index][chunk.sample]
            text = painter.paint(chunk) if is_colored else chunk.text
            if is_streamed:
                emit(text, end="", flush=True)
            texts[chunk.index][chunk.sample] += text
            if chunk.output is not None:
                outputs[chunk.index] = chunk.output
                bar.update(1)
    if is_streamed:
        emit("")
    elif is_shown:
        for index, (prompt, of_prompt) in enumerate(zip(prompts, texts, strict=True)):
            if not (is_single or args.quiet):
                emit(f"{_RULE} prompt {index}")
                _print_prompt(args, prompt)
            _print_texts(of_prompt)
    finished = [output for output in outputs if output is not None]
    for index, output in enumerate(finished):
        if output.error is not None:
            name = "" if is_single else f"prompt {index}: "
            raise RequestError(f"{name}{output.error}", finished)
    return finished


def _encoded(llm: LLM, args: argparse.Namespace, prompt: Input) -> Any:
    """The prompt as `LLM.stream` takes it."""
    if not args.chat:
        return prompt
    return chat_prompt(llm, as_conversation(prompt, args.system))


def _print_prompt(args: argparse.Namespace, prompt: Input) -> None:
    """Prints a prompt that is text; the output continues it, or answers on the next line."""
    if isinstance(prompt, str):
        emit(prompt, end="\n" if args.chat else "", flush=True)


def _print_texts(texts: Sequence[str]) -> None:
    """Prints the completions of a prompt; several have their index before them."""
    if len(texts) == 1:
        emit(texts[0])
        return
    for index, text in enumerate(texts):
        emit(f"\n[{index}] {text}")


def _write_receipts(path: str, outputs: Sequence[RequestOutput]) -> None:
    """Writes the receipts of outputs, one in each line."""
    from paceline.receipts.receipt import shown

    lines = [
        shown(completion.receipt)
        for output in outputs
        for completion in output.outputs
        if completion.receipt is not None
    ]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def _print_report(
    args: argparse.Namespace,
    outputs: Sequence[RequestOutput],
    plains: Sequence[RequestOutput | None],
) -> None:
    from paceline.logprobs import logprob_lines

    emit(_RULE)
    if wants_color(args.color):
        emit(legend())
    if len(outputs) == 1:
        emit("\n".join([*logprob_lines(outputs[0]), *report_lines(outputs[0], plains[0])]))
        return
    for index, output in enumerate(outputs):
        lines = logprob_lines(output)
        if lines:
            emit("\n".join([f"prompt {index}:", *lines]))
    emit("\n".join(total_lines(outputs, [plain for plain in plains if plain is not None])))
