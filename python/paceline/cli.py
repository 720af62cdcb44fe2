# PYTHON_ARGCOMPLETE_OK
# SPDX-License-Identifier: Apache-2.0
"""The command line: `paceline generate | chat | convert | serve | verify | bench | doctor`.

EXIT_CODES has the exit codes. Every error is one line on standard error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from paceline.bench import cli as bench
from paceline.checks import MODEL, check_choice, check_path, check_revision, did_you_mean, shorten
from paceline.commands import chat, generate, serve, verify
from paceline.commands.environment import check_environment
from paceline.commands.flag_names import with_flags
from paceline.commands.flags import add_command
from paceline.commands.options import download_arguments
from paceline.commands.vllm_flags import refusals, take_flags
from paceline.console import (
    EXIT_BROKEN_PIPE,
    EXIT_CODES,
    EXIT_DEVICE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    EXIT_SELF_CHECK,
    EXIT_USAGE,
    OutputError,
    Terminated,
    check_output,
    emit,
    flush_output,
    open_standard_streams,
    print_usage_help,
    settle_output,
    signals_as_errors,
    tell,
)

_MAX_MESSAGE: Final = 500


class _VersionAction(argparse.Action):
    """Prints the version, and imports the runtime only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import paceline

        emit(f"paceline {paceline.__version__}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Prints help with `emit`, and an error as one short line without the usage."""

    def print_help(self, file: Any = None) -> None:
        if file is None:
            emit(self.format_help(), end="")
        else:
            super().print_help(file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments where they occur, so that the message names that command."""
        options = [option for action in self._actions for option in action.option_strings]
        flags: dict[str, Any] = {}
        if args is not None and self.prog == "paceline serve":
            args, flags = take_flags(args, options)
        known, unknown = super().parse_known_args(args, namespace)
        refused = refusals(flags, vars(known))
        if unknown or refused:
            options = [option for option in options if option != "--help"]  # named in any case
            problem = ""
            if unknown:
                hint = did_you_mean(unknown[0].split("=")[0], options)
                problem = f"unrecognized arguments: {' '.join(unknown)}{hint}"
            cures = [f"{words}: {advice}" for words, advice in refused.items()]
            self.error(problem, cures)
        if flags:
            known.vllm_flags = flags
        if "parser" not in known:  # the innermost parser is that of the command
            known.parser = self
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses values that are not among the choices, with the most similar one."""
        if action.choices is None or value in action.choices:
            return
        allowed = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action,
            f"there is no {shorten(value)}{did_you_mean(str(value), allowed)}; allowed: "
            f"{', '.join(allowed)}",
        )

    def error(self, message: str, cures: Sequence[str] = ()) -> NoReturn:
        line = " ".join(message.splitlines())
        if len(line) > _MAX_MESSAGE:
            line = line[:_MAX_MESSAGE] + "..."
        parts = [part for part in (line, *cures, f"see {self.prog} --help") if part]
        tell(f"{self.prog}: error: {'; '.join(parts)}")
        self.exit(EXIT_USAGE)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser; `args.run(args)` runs the chosen command."""
    parser = _Parser(
        prog="paceline",
        description="Speculative decoding of large language models.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_VersionAction)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=functools.partial(print_usage_help, parser))
    generate.add_parser(commands)
    chat.add_parser(commands)
    add_command(commands, "convert", _run_convert)
    serve.add_parser(commands)
    verify.add_parser(commands)
    bench.add_parser(commands)
    add_command(commands, "doctor", _run_doctor)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks for completions, and ends the process; else does nothing.

    `eval "$(register-python-argcomplete paceline)"` makes a shell ask, which needs the extra
    `completion`.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; None = those of the process.

    Returns:
        The exit code.
    """
    started = time.monotonic()
    open_standard_streams()
    args = None
    try:
        try:
            parser = build_parser()
            _complete(parser)
            args = parser.parse_args(argv)
        except SystemExit:  # after --help, --version or a usage error
            flush_output()
            raise
        args.started = started
        args.command_line = shlex.join(["paceline", *(sys.argv[1:] if argv is None else argv)])
        with signals_as_errors():
            check_environment(os.environ)
            code = int(args.run(args))
            flush_output()
        return code
    except Terminated as error:
        settle_output()
        tell("paceline: terminated")
        return error.exit_code
    except KeyboardInterrupt:
        settle_output()
        tell("paceline: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        settle_output()
        return EXIT_BROKEN_PIPE
    except BaseException as error:
        code = exit_code_of(error)
        settle_output()
        message = _message_of(error)
        tell(f"paceline: error: {message if args is None else with_flags(message, args)}")
        return code


def exit_code_of(error: BaseException) -> int:
    """Chooses the exit code of an error; re-raises errors that can only be bugs of Paceline."""
    from paceline._core import DeviceError, InternalError, ModelFileError

    if isinstance(error, OutputError) or _is_rust_panic(error):
        return EXIT_FAILURE
    if isinstance(error, ModelFileError | OSError):
        return EXIT_MODEL
    if isinstance(error, MemoryError):
        return EXIT_OUT_OF_MEMORY
    if isinstance(error, DeviceError):
        return EXIT_DEVICE
    if isinstance(error, InternalError):
        return EXIT_FAILURE
    if isinstance(error, ValueError | NotImplementedError):
        return EXIT_USAGE
    if isinstance(error, RuntimeError):
        return EXIT_FAILURE
    raise error


def _is_rust_panic(error: BaseException) -> bool:
    """Returns whether an extension written in Rust, such as tokenizers, failed; no Exception."""
    return type(error).__name__ == "PanicException"


def _message_of(error: BaseException) -> str:
    """Puts an error in one line."""
    if _is_rust_panic(error):
        return f"the tokenizers package failed: {shorten(str(error), _MAX_MESSAGE)}"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).splitlines()) or type(error).__name__


# ---- convert, doctor ---------------------------------------------------------------------------


def _run_convert(args: argparse.Namespace) -> int:
    from paceline.hub import find_folder
    from paceline.loader.block_kinds import block_subfolders
    from paceline.loader.convert import check_options, convert
    from paceline.speculative_fields import METHODS

    if not args.quiet:
        check_output()
    # Everything that needs no download is checked before the first one.
    check_path("model", args.model, MODEL)
    check_path("out", args.out, "the folder to write")
    if args.draft is not None:
        check_path("--draft", args.draft, MODEL)
    elif args.draft_revision is not None:
        raise ValueError("--draft-revision needs --draft with a model of the hub")
    if args.method is not None:
        check_choice("--method", args.method, METHODS)
    check_options(args.out, args.num_speculative_tokens, args.dtype)
    download = download_arguments(args)
    check_revision("--draft-revision", args.draft_revision)
    target = find_folder(args.model, progress=not args.quiet, **download)
    draft = None
    if args.draft is not None:
        draft = find_folder(
            args.draft,
            progress=not args.quiet,
            argument="--draft",
            **{**download, "revision": args.draft_revision},
        )
    out = convert(
        target,
        args.out,
        draft_dir=draft,
        num_speculative_tokens=args.num_speculative_tokens,
        dtype=args.dtype,
        method=args.method,
        allow_pickle=args.allow_pickle,
        progress=not args.quiet,
    )
    if not args.quiet:
        emit(f"wrote {out}")
        if args.draft is None and args.method is None:
            for name in block_subfolders(target):
                emit(f"without the drafter in {target / name}; --method {name} writes it too")
    return EXIT_OK


def _run_doctor(args: argparse.Namespace) -> int:
    from paceline.doctor import examine, report_text

    check_output()
    report = examine()
    emit(json.dumps(report) if args.json else report_text(report))
    return EXIT_OK if report["self_check"]["is_ok"] else EXIT_SELF_CHECK
