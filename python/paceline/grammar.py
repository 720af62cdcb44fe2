# SPDX-License-Identifier: Apache-2.0
"""Grammars of llguidance as constraints of the engine."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import shorten

if TYPE_CHECKING:
    from types import ModuleType

    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from paceline.loader import LoadedModel
    from paceline.structured_outputs import StructuredOutputsParams

# Compiled grammars that are kept: most servers see few different ones.
_MAX_COMPILED: Final = 64
# What a grammar may cost. Compiling takes at most about 0.1 s, and the masks of a token a few
# milliseconds; llguidance refuses or ends what would take more. A lexer state has 1 to 2 KB.
_LIMITS: Final = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_MAX_MESSAGE: Final = 300
#: How the error of a request begins whose grammar has reached one of these limits.
TOO_COSTLY: Final = "structured_outputs is a grammar that this output makes too costly"
# What a panic of Rust code becomes; no subclass of Exception.
_PANIC: Final = "PanicException"
# What has a meaning in regular expressions.
_SYNTAX: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_CORES_PER_THREAD: Final = 4
_MAX_THREADS: Final = 4


class GrammarConstraint:
    """Constrains one sample to a grammar; see `constraints` of `_core.Request`."""

    def __init__(
        self, matcher: LLMatcher, executor: LLExecutor, row_bytes: int, eos: frozenset[int]
    ) -> None:
        """Takes over a matcher at the beginning of the output."""
        self._matcher = matcher
        self._executor = executor
        self._row_bytes = row_bytes
        self._eos = eos

    def constrain(
        self, emitted: list[int], drafts: list[int], max_drafts: int, masks: int
    ) -> list[int]:
        """Follows the output, checks the drafts, and writes the masks."""
        matcher = self._matcher
        if emitted:
            matcher.consume_tokens(emitted)
        kept = drafts[: matcher.validate_tokens(drafts)] if drafts else []
        ends = False
        if len(kept) < max_drafts:
            num_kept = len(kept)
            if kept:
                matcher.consume_tokens(kept)
            if num_kept < len(drafts) and drafts[num_kept] in self._eos:
                ends = matcher.is_accepting()
            elif not matcher.is_stopped():
                # Tokens that the grammar forces cost no drafter.
                kept = kept + matcher.compute_ff_tokens()[: max_drafts - num_kept]
            if num_kept:
                matcher.rollback(num_kept)
        # One call for all rows, since each call waits for the GIL when it returns.
        if kept:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                [(matcher, 0, kept)], masks, self._row_bytes, max_drafts + 1
            )
        else:
            matcher.unsafe_compute_mask_ptr(masks, self._row_bytes)
        if matcher.is_error():
            raise RuntimeError(
                f"{TOO_COSTLY}: {_line(matcher.get_error())}; allowed: a grammar with fewer "
                "alternatives at a time"
            )
        return [*kept, drafts[len(kept)]] if ends else kept


class Grammars:
    """Compiles grammars for the tokens of one model. Thread-safe."""

    def __init__(self, target: LoadedModel) -> None:
        """Compiles nothing yet."""
        self._target = target
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: collections.OrderedDict[str, LLMatcher] = collections.OrderedDict()

    def read_tokenizer(self) -> None:
        """Reads the tokenizer, if grammars can be used at all, so that no request has to.

        That takes about a second for a large vocabulary and keeps the GIL for all of it, so no
        thread could stream meanwhile. What fails here is an error of the first request.
        """
        target = self._target
        if target.tokenizer is None or not target.eos_token_ids:
            return
        with contextlib.suppress(RuntimeError, ValueError):
            self._ensure_tokenizer(_import_llguidance())

    def check(self, params: StructuredOutputsParams) -> str:
        """Compiles what an output must look like.

        Returns:
            The grammar as llguidance writes it.

        Raises:
            ValueError: It is no valid grammar, too large, or not supported; or the model has no
                tokenizer or no end-of-sequence token.
            RuntimeError: The package llguidance is missing.
        """
        llguidance = _import_llguidance()
        if self._target.tokenizer is None:
            raise ValueError(
                f"structured_outputs is given, but {self._target.path} has no tokenizer.json, so "
                "the output has no text; allowed: allowed_token_ids instead"
            )
        if not self._target.eos_token_ids:
            raise ValueError(
                f"structured_outputs is given, but {self._target.path} names no end-of-sequence "
                'token that could end an output; name one as "eos_token_id" in its '
                "generation_config.json"
            )
        try:
            grammar = _grammar_text(llguidance, params)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs cannot be read: {_line(str(error))}: {shorten(params)}"
            ) from None
        self._compile(grammar)
        return grammar

    def constraints(self, grammar: str, count: int) -> list[GrammarConstraint]:
        """Makes the constraints of `count` samples.

        Args:
            grammar: What `check` has returned, in this process or another one.
            count: How many.
        """
        compiled = self._compile(grammar)
        assert self._executor is not None
        row_bytes = (self._target.vocab_size + 31) // 32 * 4
        eos = frozenset(self._target.eos_token_ids)
        return [
            GrammarConstraint(compiled.deep_copy(), self._executor, row_bytes, eos)
            for _ in range(count)
        ]

    def _compile(self, grammar: str) -> LLMatcher:
        llguidance = _import_llguidance()
        self._ensure_tokenizer(llguidance)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        limits = llguidance.LLParserLimits(**_LIMITS)
        compiled: LLMatcher = llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=limits
        )
        if compiled.is_error():
            raise ValueError(
                f"structured_outputs is no grammar that this version supports: "
                f"{_line(compiled.get_error())}"
            )
        probe = compiled.deep_copy()
        probe.compute_bitmask()
        if probe.is_error():
            raise ValueError(
                "structured_outputs is a grammar that no output satisfies; allowed: one that has "
                f"a first token ({_line(probe.get_error())})"
            )
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _ensure_tokenizer(self, llguidance: ModuleType) -> None:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer(llguidance)
                share = (os.cpu_count() or 1) // _CORES_PER_THREAD
                self._executor = llguidance.LLExecutor(min(max(share, 1), _MAX_THREADS))

    def _make_tokenizer(self, llguidance: ModuleType) -> LLTokenizer:
        target = self._target
        assert target.tokenizer is not None
        try:
            tokenizer: LLTokenizer = llguidance.LLTokenizer(
                target.tokenizer.tokenizer.to_str(),
                n_vocab=target.vocab_size,
                eos_token=list(target.eos_token_ids),
            )
            return tokenizer
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            raise ValueError(
                f"structured_outputs is given, but llguidance does not read the tokenizer of "
                f"{target.path}: {_line(str(error))}"
            ) from None


def _grammar_text(llguidance: ModuleType, params: StructuredOutputsParams) -> str:
    matcher: Any = llguidance.LLMatcher
    if params.regex is not None:
        return str(matcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        # Not llguidance's own grammar of choices, which has an item for each of them.
        choices = dict.fromkeys(_SYNTAX.sub(r"\\\g<0>", choice) for choice in params.choice)
        return str(matcher.grammar_from_regex("|".join(choices)))
    if params.grammar is not None:
        return str(llguidance.grammar_from("grammar", params.grammar))
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    schema = '{"type": "object"}' if params.json is None else params.json
    return str(matcher.grammar_from_json_schema(schema, overrides=options))


def _import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise RuntimeError(
            "structured_outputs needs the package llguidance: pip install 'paceline[structured]' "
            f"({error})"
        ) from None
    return llguidance


def _line(text: str) -> str:
    """The beginning of a message of llguidance, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "..."
