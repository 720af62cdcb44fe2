# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error of the command line, which may be closed, full or not UTF-8.

What a command prints goes through `emit`, whose failure ends the command; what it says about itself
goes through `tell`, which never fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Final

from paceline.checks import shorten

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_MODEL: Final = 3
EXIT_DEVICE: Final = 4
EXIT_OUT_OF_MEMORY: Final = 5
EXIT_SELF_CHECK: Final = 6
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

EXIT_CODES: Final = """\
exit codes:
  0    success
  1    failure while running, or standard output cannot be written
  2    usage or configuration
  3    model or file
  4    device
  5    out of memory
  6    a self-check failed
  130  interrupted (Ctrl-C)
  141  the reader of standard output has left (nothing is printed)
"""


class OutputError(Exception):
    """Standard output cannot take what was printed."""


def open_standard_streams() -> None:
    """Puts /dev/null in place of standard streams that are closed.

    Otherwise the next file that is opened, a checkpoint's for example, gets the descriptor, and
    what a library prints ends in it. `sys.stdout` stays None, so that `emit` notices.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def check_output(text: str = "") -> None:
    """Checks that standard output is open and has all characters of a text.

    Raises:
        OutputError: It is closed, or its encoding lacks a character.
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
        BrokenPipeError: The reader has left.
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
    """Writes what `emit` buffered; raises as it does."""
    if sys.stdout is not None:
        emit("", end="", flush=True)


def settle_output() -> None:
    """Writes what `emit` buffered, or discards it: the interpreter would try it again at exit."""
    try:
        flush_output()
    except (OSError, OutputError):
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def tell(text: str) -> None:
    """Prints to standard error; where that cannot be written, the text is lost."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _lacks_character(text: str, error: UnicodeEncodeError) -> OutputError:
    return OutputError(
        f"standard output has the encoding {error.encoding!r}, which has no {text[error.start]!a}; "
        "use a UTF-8 locale or PYTHONIOENCODING=utf-8, or --json, which writes ASCII only"
    )


def integer(text: str) -> int:
    """`int`, with a message that shortens what it shows."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not an integer") from None


def number(text: str) -> float:
    """`float`, with a message that shortens what it shows."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a number") from None
