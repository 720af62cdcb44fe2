# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error of the command line, which may be closed, full or not UTF-8.

Commands print results with `emit`, whose failure ends the command, and progress and errors with
`tell`, which never fails. `signals_as_errors` turns a request to end into an exception.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

from paceline.checks import shorten

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_MODEL: Final = 3
EXIT_DEVICE: Final = 4
EXIT_OUT_OF_MEMORY: Final = 5
EXIT_SELF_CHECK: Final = 6
EXIT_DIFFERENT: Final = 7
EXIT_UNVERIFIED: Final = 8
# Of a signal: 128 + its number.
EXIT_HUNG_UP: Final = 128 + signal.SIGHUP
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE
EXIT_TERMINATED: Final = 128 + signal.SIGTERM

EXIT_CODES: Final = """\
exit codes:
  0    success
  1    failure while running, or standard output cannot be written
  2    usage or configuration; without a command, after this help
  3    model or file
  4    device
  5    out of memory
  6    a self-check failed
  7    an output is not the one that its receipt says, or the receipt was edited
  8    a receipt cannot be verified, and none is as above
  129  the terminal closed (SIGHUP)
  130  interrupted (Ctrl-C, SIGINT)
  141  the reader of standard output closed it (no message)
  143  terminated (SIGTERM)
"""


class OutputError(Exception):
    """Standard output cannot be written."""


class Terminated(KeyboardInterrupt):
    """A signal asks the command to end. What a Ctrl-C undoes, it undoes too.

    Attributes:
        exit_code: 128 + the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


@contextlib.contextmanager
def signals_as_errors() -> Iterator[None]:
    """Raises `Terminated` in the main thread for the first SIGTERM or SIGHUP.

    The next one ends the process at once. A signal that is ignored, as by nohup, stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_standard_streams() -> None:
    """Puts /dev/null in place of standard streams that are closed.

    Otherwise the next file that is opened, for example one that `convert` writes, gets the
    descriptor, and receives what libraries print. `sys.stdout` stays None, so that `emit` notices.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def check_output(text: str = "") -> None:
    """Checks that standard output is open and can encode a text.

    Raises:
        OutputError: It is closed, or its encoding lacks a character of the text.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed; redirect it to a file or to /dev/null")
    try:
        text.encode(sys.stdout.encoding or "utf-8", sys.stdout.errors or "strict")
    except UnicodeEncodeError as error:
        raise _lacks_character(text, error) from None


def emit(text: str, *, end: str = "\n", flush: bool = False) -> None:
    """Prints to standard output.

    Raises:
        BrokenPipeError: Its reader has closed it.
        OutputError: It cannot be written for another reason.
    """
    check_output()
    try:
        print(text, end=end, flush=flush)
    except UnicodeEncodeError as error:
        raise _lacks_character(text, error) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror}") from None


def flush_output() -> None:
    """Flushes standard output; raises the errors of `emit`."""
    if sys.stdout is not None:
        emit("", end="", flush=True)


def settle_output() -> None:
    """Flushes standard output, or discards its buffer, which would fail again at exit."""
    try:
        flush_output()
    except (OSError, OutputError):
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def tell(text: str) -> None:
    """Prints to standard error; the text is lost if that cannot be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def print_usage_help(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs a command that needs another one and has none: prints its help to standard error.

    Returns:
        The exit code of a usage error, so that a script notices that it names no command.
    """
    tell(parser.format_help().rstrip())
    return EXIT_USAGE


def _lacks_character(text: str, error: UnicodeEncodeError) -> OutputError:
    return OutputError(
        f"standard output has the encoding {error.encoding!r}, which has no {text[error.start]!a}; "
        "use a UTF-8 locale or PYTHONIOENCODING=utf-8, or --json, which writes ASCII only"
    )


def integer(text: str) -> int:
    """Reads an integer; the message of an error shortens the argument."""
    try:
        return int(text)
    except ValueError:
        reason = "has too many digits" if text.isdecimal() else "is not an integer"
        raise argparse.ArgumentTypeError(f"{shorten(text)} {reason}") from None


def integers(text: str) -> list[int]:
    """Reads integers with commas between them; the message of an error shortens the argument."""
    return [integer(part) for part in text.split(",")]


def number(text: str) -> float:
    """Reads a number; the message of an error shortens the argument."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a number") from None
