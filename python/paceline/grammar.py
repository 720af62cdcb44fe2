# SPDX-License-Identifier: Apache-2.0
"""Grammars of llguidance as constraints of the engine."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from paceline import lifetime
from paceline.grammar_text import check_params
from paceline.grammar_trial import TOO_COSTLY, Trial, TrialProcess
from paceline.grammar_worker import compile_grammar, make_tokenizer, one_line

if TYPE_CHECKING:
    from types import ModuleType

    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from paceline.loader import LoadedModel
    from paceline.structured_outputs import StructuredOutputsParams

# Compiled grammars that are kept, and refusals: most servers see few different ones.
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 256 << 20
_MAX_REFUSALS: Final = 256
# What a panic of Rust code becomes; no subclass of Exception.
_PANIC: Final = "PanicException"
_CORES_PER_THREAD: Final = 4
_MAX_THREADS: Final = 4


@dataclasses.dataclass(eq=False)
class CompiledGrammar:
    """A grammar that requests can use.

    Attributes:
        text: As llguidance writes it.
        matcher: At the beginning of the output. Its copies share the states of its lexer, whose
            number is limited.
        num_bytes: What it takes, without the states that requests add.
        is_spent: Whether a request has reached a limit, after which the copies fail too.
    """

    text: str
    matcher: LLMatcher
    num_bytes: int
    is_spent: bool = False


class GrammarConstraint:
    """Constrains one sample to a grammar; see `constraints` of `_core.Request`."""

    def __init__(
        self, grammar: CompiledGrammar, executor: LLExecutor, row_bytes: int, eos: frozenset[int]
    ) -> None:
        """Starts at the beginning of the output."""
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
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
            self._grammar.is_spent = True
            raise RuntimeError(
                f"{TOO_COSTLY} this output makes too costly: {one_line(matcher.get_error())}; "
                "allowed: a grammar with fewer alternatives at a time"
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
        self._trials = TrialProcess(self._setup)
        # Those that are kept, and all that are in use.
        self._kept: collections.OrderedDict[str, CompiledGrammar] = collections.OrderedDict()
        self._live: weakref.WeakValueDictionary[str, CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        # What parameters become: the text of a grammar, or an error.
        self._texts: collections.OrderedDict[StructuredOutputsParams, str | ValueError] = (
            collections.OrderedDict()
        )

    def read_tokenizer(self, *, compiles: bool = True) -> None:
        """Reads the tokenizer, if grammars can be used at all, so that no request has to.

        That takes about a second for a large vocabulary and keeps the GIL for all of it, so no
        thread could stream meanwhile. What fails here is an error of the first request.

        Args:
            compiles: Whether `compile` will be called here, and not in another process.
        """
        target = self._target
        if target.tokenizer is None or not target.eos_token_ids:
            return
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            _import_llguidance()
            if compiles:
                self._start_trials()  # which reads it too, at the same time
            self._ensure_tokenizer()

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """Returns a grammar that is compiled already; None if it has to be compiled.

        Raises:
            ValueError: It was refused before.
        """
        with self._lock:
            known = self._texts.get(params)
            if known is None:
                return None
            self._texts.move_to_end(params)
        if isinstance(known, ValueError):
            raise type(known)(*known.args)
        return self._find(known)

    def compile(
        self,
        params: StructuredOutputsParams,
        trial: Trial | None = None,
        max_bytes: int | None = None,
    ) -> CompiledGrammar:
        """Compiles what an output must look like, which takes a bounded time and memory.

        Args:
            params: What it must look like.
            trial: Lets other threads cancel it.
            max_bytes: Of all grammars that are kept or that requests use; None = no limit.

        Raises:
            ValueError: It is no valid grammar, too costly, or not supported; or the model has no
                tokenizer or no end-of-sequence token.
            RuntimeError: The package llguidance is missing, the process that compiles does not run,
                or the grammars in use take more than `max_bytes`.
            Cancelled: It was cancelled, or the LLM is closed.
        """
        _import_llguidance()
        self._check_target()
        found = self.find(params)
        if found is not None:
            return found
        check_params(params)
        self._start_trials()
        self._ensure_tokenizer()
        try:
            text, num_bytes = self._trials.compile(params, trial or Trial())
            self._remember(params, text)
            return self._find(text) or self._compile(text, num_bytes, max_bytes)
        except ValueError as error:
            self._remember(params, error)
            raise

    def constraints(self, grammar: str, count: int) -> list[GrammarConstraint]:
        """Makes the constraints of `count` samples.

        Args:
            grammar: The text of a compiled grammar, of this process or another one.
            count: How many.
        """
        with self._lock:
            # Spent ones too: nothing is compiled here, where other requests may wait.
            compiled = self._live.get(grammar)
        if compiled is None:
            compiled = self.ensure(grammar)
        assert self._executor is not None
        row_bytes = (self._target.vocab_size + 31) // 32 * 4
        eos = frozenset(self._target.eos_token_ids)
        return [GrammarConstraint(compiled, self._executor, row_bytes, eos) for _ in range(count)]

    def ensure(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar that `compile` of another process has accepted, unless it is compiled.

        Args:
            grammar: Its text.
        """
        found = self._find(grammar)
        if found is not None:
            return found
        self._ensure_tokenizer()
        return self._compile(grammar, 0, None)

    def close(self) -> None:
        """Ends what is being compiled, and takes no more."""
        self._trials.close()

    def abandon(self) -> None:
        """Makes it unusable in a forked child; see `lifetime`."""
        self._trials.abandon()

    def _start_trials(self) -> None:
        self._trials.start()
        lifetime.register(self)

    def _check_target(self) -> None:
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

    def _find(self, text: str) -> CompiledGrammar | None:
        with self._lock:
            found = self._live.get(text)
            if found is None or found.is_spent:
                return None
            self._keep(found)
            return found

    def _compile(self, text: str, num_bytes: int, max_bytes: int | None) -> CompiledGrammar:
        assert self._tokenizer is not None
        if max_bytes is not None:
            with self._lock:
                used = sum(grammar.num_bytes for grammar in self._live.values())
            if used + num_bytes > max_bytes:
                raise RuntimeError(
                    f"the grammars in use take {used >> 20} MiB, and structured_outputs takes "
                    f"{num_bytes >> 20} MiB more; allowed: {max_bytes >> 20} MiB. Try again "
                    "later, or use a smaller grammar"
                )
        compiled = CompiledGrammar(text, compile_grammar(self._tokenizer, text), num_bytes)
        with self._lock:
            self._live[text] = compiled
            self._keep(compiled)
        return compiled

    def _keep(self, grammar: CompiledGrammar) -> None:
        """Keeps a grammar as the last one that was used; the caller holds the lock."""
        self._kept[grammar.text] = grammar
        self._kept.move_to_end(grammar.text)
        num_bytes = sum(kept.num_bytes for kept in self._kept.values())
        while len(self._kept) > _MAX_KEPT or num_bytes > _MAX_KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes

    def _remember(self, params: StructuredOutputsParams, outcome: str | ValueError) -> None:
        with self._lock:
            self._texts[params] = outcome
            self._texts.move_to_end(params)
            if len(self._texts) > _MAX_KEPT + _MAX_REFUSALS:
                self._texts.popitem(last=False)

    def _setup(self) -> dict[str, Any]:
        """The arguments of `make_tokenizer`."""
        assert self._target.tokenizer is not None
        return {
            "text": self._target.tokenizer.tokenizer.to_str(),
            "vocab_size": self._target.vocab_size,
            "eos_token_ids": list(self._target.eos_token_ids),
        }

    def _ensure_tokenizer(self) -> None:
        llguidance = _import_llguidance()
        with self._lock:
            if self._tokenizer is not None:
                return
            try:
                self._tokenizer = make_tokenizer(**self._setup())
            except BaseException as error:
                if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                    raise
                raise ValueError(
                    f"structured_outputs is given, but llguidance does not read the tokenizer of "
                    f"{self._target.path}: {one_line(str(error))}"
                ) from None
            share = (os.cpu_count() or 1) // _CORES_PER_THREAD
            self._executor = llguidance.LLExecutor(min(max(share, 1), _MAX_THREADS))


def _import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise RuntimeError(
            "structured_outputs needs the package llguidance: pip install 'paceline[structured]' "
            f"({error})"
        ) from None
    return llguidance
