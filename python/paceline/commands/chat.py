# SPDX-License-Identifier: Apache-2.0
"""`paceline chat`: a conversation, line by line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import check_text, shorten
from paceline.commands.colors import TokenColors, wants_color
from paceline.commands.flag_names import with_flags
from paceline.commands.flags import add_command
from paceline.commands.options import model_arguments, sampling_params
from paceline.commands.prompt_input import chat_prompt
from paceline.commands.report import measured_rate
from paceline.console import EXIT_OK, Terminated, check_output, emit, tell

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput
    from paceline.sampling import SamplingParams

_EXIT: Final = "/exit"
_NEW: Final = "/new"
_HINT: Final = f"{_NEW} begins a new conversation, {_EXIT} or Ctrl-D leaves, Ctrl-C ends an answer"


def add_parser(commands: Any) -> None:
    """Adds `chat` to the command line's subparsers."""
    add_command(commands, "chat", _run_chat, HINT=_HINT)


def _run_chat(args: argparse.Namespace) -> int:
    from paceline.llm import LLM

    check_output()
    if sys.stdin is None:
        raise ValueError("standard input is closed; allowed: a terminal, or lines of text")
    if args.system is not None:
        check_text("--system", args.system)
    sampling_params(args)  # refuses before a model is loaded
    with LLM(**model_arguments(args), max_num_seqs=1, max_logprobs=0) as llm:
        params = sampling_params(args, llm.get_default_sampling_params())
        _converse(llm, args, params)
    return EXIT_OK


def _converse(llm: LLM, args: argparse.Namespace, params: SamplingParams) -> None:
    is_interactive = sys.stdin.isatty()
    if is_interactive and not args.quiet:
        tell(f"paceline: {_HINT}")
    beginning = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(beginning)
    for line in _lines(is_interactive=is_interactive):
        text = line.strip()
        if text == _EXIT:
            return
        if text == _NEW:
            messages = list(beginning)
        elif text.startswith("/") and is_interactive:
            tell(f"paceline: there is no command {shorten(text)}; {_HINT}")
        elif text:
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, args, messages, params, is_interactive=is_interactive)
            except ValueError as error:
                if not is_interactive:
                    raise
                # The conversation has become too long, or the template refuses the message.
                message = with_flags(str(error), args)
                tell(f"paceline: error: {message}; {_NEW} begins a new conversation")
                answer = ""
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


def _lines(*, is_interactive: bool) -> Iterator[str]:
    """The lines of standard input, without their ends."""
    if not is_interactive:
        for number, raw in enumerate(sys.stdin.buffer, start=1):
            try:
                yield raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                raise ValueError(f"line {number} of standard input is not UTF-8") from None
        return
    import readline  # noqa: F401  # `input` edits lines with it

    was_interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            emit("")
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            tell(f"\npaceline: Ctrl-C again or {_EXIT} leaves")
            continue
        was_interrupted = False
        yield line


def _answer(
    llm: LLM,
    args: argparse.Namespace,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    *,
    is_interactive: bool,
) -> str:
    """Streams the answer to the last message and returns it; a Ctrl-C of a user ends it early."""
    from paceline.outputs import RequestError

    colors = TokenColors() if wants_color(args.color) else None
    answer = ""
    output: RequestOutput | None = None
    try:
        with llm.stream([chat_prompt(llm, messages)], params) as stream:
            for chunk in stream:
                answer += chunk.text
                text = chunk.text if colors is None else colors.paint(chunk)
                emit(text, end="", flush=True)
                output = chunk.output or output
    except Terminated:
        raise
    except KeyboardInterrupt:
        if not is_interactive:
            raise
        emit("")
        tell("paceline: the answer was cancelled")
        return answer
    emit("")
    assert output is not None
    if output.error is not None:
        raise RequestError(output.error, [output])
    if not args.quiet:
        tell(_summary(output))
    return answer


def _summary(output: RequestOutput) -> str:
    metrics = output.metrics
    parts = [f"{metrics.num_output_tokens} tokens"]
    rate = measured_rate(metrics)
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    speculative = metrics.speculative_decoding
    if speculative is not None and speculative["mean_acceptance_length"] is not None:
        parts.append(f"acceptance length {speculative['mean_acceptance_length']:.2f}")
    if output.outputs[0].stop_reason == "max_model_len":
        parts.append("ended by --max-model-len")
    elif output.outputs[0].finish_reason == "length":
        parts.append("ended by --max-tokens")
    return f"paceline: {', '.join(parts)}"
