# SPDX-License-Identifier: Apache-2.0
"""The process that tries to compile grammars before the process of the engine does.

llguidance cannot be interrupted, and its limits do not cover all of its work. So a grammar is first
compiled in a child of this process, which the system ends when it has used up its CPU time or its
memory. A child is a copy of this process, which has read the tokenizer, and has that one grammar.

The process gets sockets over its own socket, one for each grammar. A child reads the parameters
from its socket, and writes `STARTED` and later its answer there. It ends when the other end is
closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from paceline.checks import shorten
from paceline.grammar_text import grammar_text
from paceline.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: What compiling a grammar may take.
MAX_CPU_S: Final = 2
MAX_MEMORY_BYTES: Final = 128 << 20
#: What a grammar may cost llguidance, which refuses or ends what would take more: the limits of
#: compilation cover some of its phases, those of steps all of a mask's. A state of a lexer has 1 to
#: 2 KB.
LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
#: How the error of a grammar begins that llguidance does not compile.
UNSUPPORTED: Final = "structured_outputs is no grammar that this version supports"
#: The first byte of an answer; without it, no child has read the grammar.
STARTED: Final = b"+"
#: The length of the parameters, before them.
LENGTH: Final = struct.Struct("!I")

# Less than any thread of the engine's process has, so that what overflows a stack does so here.
_STACK_BYTES: Final = 1 << 20
# The engine's threads come first.
_NICENESS: Final = 10


def main(control: int, setup: int) -> NoReturn:
    """Runs until the other end of `control` is closed.

    Args:
        control: A socket that brings sockets.
        setup: A file with the tokenizer: a JSON object of arguments of `make_tokenizer`.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process ends with the engine's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(setup, encoding="utf-8") as file:
        tokenizer = make_tokenizer(**json.load(file))
    # What llguidance computes once is not measured as part of the first grammar.
    with contextlib.suppress(ValueError):  # the model has no token for it
        compile_grammar(tokenizer, grammar_text(StructuredOutputsParams(choice=["a"])))
    _free_unused()
    gc.freeze()  # so that children share the memory
    with socket.socket(fileno=control) as sockets:
        while True:
            message, descriptors, _, _ = socket.recv_fds(sockets, 1, 1)
            if not message:
                os._exit(0)
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    sockets.close()
                    _run_child(connection, tokenizer)


def make_tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Makes llguidance's tokenizer of the JSON of a tokenizer."""
    import llguidance

    tokenizer: LLTokenizer = llguidance.LLTokenizer(
        text, n_vocab=vocab_size, eos_token=eos_token_ids
    )
    return tokenizer


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar and computes its first mask.

    Raises:
        ValueError: It is no grammar, too large, not supported, or no output satisfies it.
    """
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)
    compiled: LLMatcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if compiled.is_error():
        raise ValueError(f"{UNSUPPORTED}: {one_line(compiled.get_error())}")
    # All that is forced at the beginning is found here, without the GIL, and not for each request.
    compiled.compute_bitmask()
    if compiled.is_error():
        raise ValueError(
            "structured_outputs is a grammar that no output satisfies; allowed: one that has a "
            f"first token ({one_line(compiled.get_error())})"
        )
    return compiled


def one_line(text: str, limit: int = 300) -> str:
    """The beginning of a message of llguidance, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "..."


def _run_child(connection: socket.socket, tokenizer: LLTokenizer) -> NoReturn:
    try:
        connection.sendall(STARTED)
        (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
        params = StructuredOutputsParams(**json.loads(_receive(connection, length)))
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_answer, args=(connection, tokenizer, params))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
        thread.start()
        connection.recv(1)  # until nobody waits for the answer
    finally:
        os._exit(0)


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _answer(
    connection: socket.socket, tokenizer: LLTokenizer, params: StructuredOutputsParams
) -> None:
    size, resident = _memory()
    if size:
        limit = size + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answer: dict[str, Any]
    try:
        grammar = _text(params)
        compiled = compile_grammar(tokenizer, grammar)
        _free_unused()
        answer = {"grammar": grammar, "num_bytes": max(_memory()[1] - resident, 0)}
        del compiled  # it was measured
    except ValueError as error:
        answer = {"error": str(error)}
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # a panic of Rust code, among others
        answer = {"error": f"{UNSUPPORTED}: {type(error).__name__}: {one_line(str(error))}"}
    connection.sendall(json.dumps(answer).encode())
    os._exit(0)


def _text(params: StructuredOutputsParams) -> str:
    try:
        return grammar_text(params)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"structured_outputs cannot be read: {one_line(str(error))}: {shorten(params)}"
        ) from None


def _free_unused() -> None:
    """Gives the system back what was freed, so that it is not measured."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _memory() -> tuple[int, int]:
    """The bytes of this process, and those of them in memory that no file has; 0 where the system
    does not tell."""
    try:
        pages = [int(count) for count in Path("/proc/self/statm").read_text().split()]
    except OSError:
        return 0, 0
    size, resident, of_files = pages[:3]
    return size * resource.getpagesize(), (resident - of_files) * resource.getpagesize()
