# SPDX-License-Identifier: Apache-2.0
"""The engine behind an `LLM`: how it starts with loaded models, its reports, and how it ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self

from paceline import _core, engine_log
from paceline.capture import DEFAULT_MAX_BYTES, ON, Capture, HiddenLayers
from paceline.chat_template import ChatTemplates
from paceline.checks import shorten
from paceline.config import EngineConfig
from paceline.device import capture_progress
from paceline.dispatcher import Dispatcher
from paceline.drafter_changes import log_drafter, with_drafter_facts
from paceline.loader import LoadedModel
from paceline.metrics import Metric, metrics
from paceline.prompt_values import check_layers, patient_hidden_states
from paceline.receipts.maker import Receipts
from paceline.reports import (
    capabilities,
    engine_stats,
    group_max_bytes,
    memory_plan,
    pool_capacity,
    stats_and_memory,
)
from paceline.request_factory import RequestFactory
from paceline.speculative_config import SpeculativeConfig
from paceline.startup import check_max_model_len, executor_options
from paceline.vllm_names import missing_attribute

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_logger = logging.getLogger("paceline")


class RunningEngine:
    """An engine that runs loaded models. `RunningLLM` adds requests, `LLM` the ways to load them.

    Attributes:
        config: The engine's configuration, as given.
        speculative_config: The configuration of speculative decoding; None without it.
        target: The loaded target model.
        draft: The loaded drafter; None without one.
        max_model_len: Largest number of tokens of a request, prompt and output together.
    """

    config: EngineConfig
    speculative_config: SpeculativeConfig | None
    target: LoadedModel
    draft: LoadedModel | None
    max_model_len: int

    def _start(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        *,
        show_progress: bool,
        ignored: Mapping[str, object] | None = None,
    ) -> None:
        if draft is not None:
            assert speculative is not None
            speculative = with_drafter_facts(target, draft, speculative)
            log_drafter(speculative, draft)
        for model in (target,) if draft is None else (target, draft):
            for note in model.notes:
                _logger.info("%s: %s", model.path, note)
        check_max_model_len(config.max_model_len, target, draft)
        options = executor_options(config, speculative)
        ignored = dict(ignored or {})
        if target.model.device != "cuda" and config.gpu_memory_utilization is not None:
            ignored["gpu_memory_utilization"] = config.gpu_memory_utilization
            options["gpu_memory_utilization"] = 0.0
        if ignored:
            _logger.info(
                "arguments that change nothing (docs/from-vllm.md): %s",
                ", ".join(f"{name}={shorten(value)}" for name, value in ignored.items()),
            )
        draft_model = None if draft is None else draft.model
        engine_log.start()
        executor = None
        try:
            with capture_progress(is_shown=show_progress) as report:
                executor = _core.Executor(target.model, draft_model, options, report)
            max_model_len = executor.options["max_model_len"]
            self._describe(target, draft, config, speculative, max_model_len=max_model_len)
            self._dispatcher = Dispatcher(executor)
            engine_log.forward()
            if _logger.isEnabledFor(logging.INFO):
                _logger.info("%s", memory_plan(self.memory_report()))
        except BaseException:
            # The traceback of a Ctrl-C would keep the engine alive.
            if executor is not None:
                executor.close()
            raise

    def _describe(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        *,
        max_model_len: int,
        device: str | None = None,
    ) -> None:
        """Sets what an engine's requests are made with, all but the engine.

        `device` is the class of the device of engines in other processes.
        """
        self._changes = threading.Lock()  # held while the drafter or weights change
        self.config = config
        self.speculative_config = speculative
        self.target = target
        self.draft = draft
        self.max_model_len = max_model_len
        self._chat_templates = ChatTemplates.of_model(target, config.chat_template)
        self._requests = RequestFactory(
            target,
            max_model_len=max_model_len,
            max_logprobs=config.max_logprobs,
            num_speculative_tokens=self._num_speculative_tokens or 0,
            seed=config.seed,
            methods=() if speculative is None else speculative.methods,
            receipts=Receipts(
                target,
                self._chat_templates,
                speculative,
                max_model_len=max_model_len,
                device=device,
            ),
        )

    # ---- reports -------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, Any]:
        """Lists what this version supports and how this LLM is configured.

        Returns:
            A dict of plain JSON types: the values that `speculative_config`, `device` and `dtype`
            take, the methods that are planned ("later_methods"), the architectures, and under
            "configured" the options in effect.
        """
        options = self._executor.options
        speculative = self.speculative_config
        return capabilities() | {
            "configured": {
                "architecture": self.target.architecture,
                "draft_architecture": None if self.draft is None else self.draft.architecture,
                "method": speculative.method if speculative is not None else None,
                "dtype": self.target.weight_dtype,
                "device": self.target.model.device,
                **options,
            }
        }

    def memory_report(self) -> dict[str, Any]:
        """Reports the use of memory.

        Returns:
            A dict of plain JSON types: the "device"; the bytes of weights, KV pool, workspace and
            captured graphs; the numbers of KV slabs; under "workspace" its bytes by purpose
            ("proposals" holds the distributions of drafts that "standard" and "block" sample);
            under "groups" one dict per KV group, whose "max_bytes" is what all sequences together
            can hold in it; under "kv_capacity" the "tokens" that the pool has room for and, with
            recurrent layers, the "states" instead; and under "kv_cache_rule" the reason for the
            size of the pool. With several ranks, bytes are those of all of them together, but slabs
            and groups are those of one; under "ranks" each has a dict with its "gpu" and its bytes.
        """
        report = self._dispatcher.call(lambda executor: executor.memory_report())
        for group in report["groups"]:
            group["max_bytes"] = group_max_bytes(
                group, max_num_seqs=self.config.max_num_seqs, max_model_len=self.max_model_len
            )
        report["kv_capacity"] = pool_capacity(report)
        return {"device": self.target.model.device, **report}

    def stats(self) -> dict[str, Any]:
        """Counts what the engine has done since it started, and what it does now.

        Takes the same time whatever has run, so it can be called often.

        Returns:
            A dict of plain JSON types:

            - num_running, num_waiting: outputs that run and wait now.
            - num_finished, num_failed, num_cancelled: outputs that have ended: with a stop token or
              at their length, with an error, or by `close` or a stop string.
            - num_prompt_tokens: prompt tokens that were computed; those that a preempted request
              computes again count again.
            - num_cached_tokens: prompt tokens whose KV was taken over instead, from another output
              of the prompt or from the prefix cache.
            - prefix_cache: num_query_tokens, the prompt tokens that the prefix cache was asked for,
              and num_hit_tokens, those that it had.
            - num_output_tokens: tokens delivered.
            - num_iterations, num_preemptions.
            - uptime_s: seconds since the engine started.
            - kv_cache_usage: the fraction of the KV pool in use, 0 to 1.
            - kv_groups: for each KV group its "owner" ("target" or "draft"), "kind" and "window" as
              in `memory_report`; its blocks "held_blocks" by outputs, "quarantined_blocks" that
              wait for iterations in flight, "cached_blocks" that no output holds but whose KV can
              be taken over, and "max_blocks" if it had the whole pool; and since the start
              "hit_blocks", taken over from the prefix cache, and "evicted_blocks", whose memory
              went to new blocks.
            - ranks: the memory of each rank, as in `memory_report`; one without ranks.
            - speculative_decoding: None without it. Otherwise a dict with num_spec_tokens (k),
              num_spec_steps, num_draft_tokens, num_accepted_draft_tokens, mean_acceptance_length,
              draft_acceptance_rate and acceptance_per_position [k], as in `RequestMetrics`;
              "drafters", the first three counts by method, as there; and
              "adaptive", None or a dict with the choice of the number of drafts and what it follows
              from: num_drafts now, by_num_drafts, acceptance and costs (docs/adaptive.md).

        Raises:
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
        """
        stats, memory = self._dispatcher.call(stats_and_memory)
        return engine_stats(stats, memory, self._num_speculative_tokens)

    def get_metrics(self) -> list[Metric]:
        """Returns what `stats` counts as vLLM's `LLM.get_metrics` does.

        Returns:
            `Counter`, `Gauge` and `Vector` of `paceline.metrics`, such as
            `Counter("vllm:spec_decode_num_drafts", 12)`.

        Raises:
            RuntimeError: As for `stats`.
        """
        stats = self._dispatcher.call(lambda executor: executor.stats())
        return metrics(stats, is_speculative=self._num_speculative_tokens is not None)

    def start_capture(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        hidden_layers: Sequence[int] | None = None,
    ) -> Capture:
        """Writes prompts, outputs and accepted drafts of the requests that begin from now on.

        They are token ids, from which a drafter can be trained on served traffic (docs/capture.md).
        The log says that it is on. Requests do not wait for the disk, and an error there ends the
        capture alone.

        Args:
            folder: Where the shards are written. It is created if its parent exists.
            max_bytes: Bytes that all shards in the folder have at most, from 1 MiB on; the capture
                ends before it would exceed them.
            hidden_layers: Also write the target's hidden states of prompts and outputs, of these
                layers, which `LLM.hidden_states` numbers. The engine computes them in a further
                request for each output, when a shard is written. None = none.

        Returns:
            The capture, which counts what it has written (`stats`). `close` ends it, as does the
            LLM's.

        Raises:
            ValueError: An argument is not allowed, a capture is on, another process captures in the
                folder, it is full or cannot be written, its disk is full, or a layer does not
                exist.
            NotImplementedError: The engine has no hidden states, as replicas.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
        """
        self._dispatcher.check_running()
        before = self._requests.capture
        if before is not None and before.stats()["state"] == ON:
            raise ValueError(
                f"a capture to {before.folder} is on; allowed: one at a time. Close that one first"
            )
        hidden = None if hidden_layers is None else self._hidden_layers(hidden_layers)
        capture = Capture(folder, max_bytes=max_bytes, hidden=hidden)
        if before is not None:
            before.close()
        capture.describe(model=str(self.target.path))
        self._requests.capture = capture
        _logger.warning(
            "prompts and outputs of all requests are captured in %s, in up to %d bytes",
            capture.folder,
            max_bytes,
        )
        return capture

    def _hidden_layers(self, layers: Sequence[int]) -> HiddenLayers:
        """Checks layers, and says how a capture gets their hidden states."""
        checked = check_layers(layers, len(self.target.config["layers"]), "hidden_layers")
        dispatcher = self._dispatcher  # a capture must not keep the LLM alive

        def compute(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
            return patient_hidden_states(dispatcher, token_ids, checked)

        compute([0])  # the model may not have all of them
        dtype = "F32" if self.target.weight_dtype == "float32" else "BF16"
        return HiddenLayers(checked, self.target.config["hidden_size"], dtype, compute)

    def reset_prefix_cache(self) -> bool:
        """Forgets the KV of requests that have ended, so that no prompt takes it over.

        Returns:
            Whether it was done; False: nothing has changed, because requests run or wait.

        Raises:
            RuntimeError: The LLM is closed, was built before `fork` in the parent process, or
                failed.
        """
        # Once it has let others at the models, the engine forgets the KV of their former weights.
        return self._executor.while_idle(lambda: None) == 0

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, "LLM", name)

    def __repr__(self) -> str:
        speculative = "plain"
        if self.speculative_config is not None:
            speculative = (
                f"{self.speculative_config.method} k="
                f"{self.speculative_config.num_speculative_tokens}"
            )
        closed = ", closed" if self._dispatcher.is_closed else ""
        if self._dispatcher.is_forked:
            closed = ", unusable in this forked process"
        return (
            f"<LLM {str(self.target.path)!r} ({self.target.architecture}, "
            f"{self.target.weight_dtype}, {self.target.model.device}), {speculative}, "
            f"max_model_len={self.max_model_len}{closed}>"
        )

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancels all requests and frees the engine. Closing twice is fine.

        An LLM that is never closed is freed when it is collected or the interpreter exits.
        """
        if self._requests.capture is not None:
            self._requests.capture.close()  # it may need the engine
        self._requests.grammars.close()
        self._dispatcher.close()

    def __del__(self) -> None:
        # Not weakref.finalize: a Ctrl-C at its start would leave the engine in its registry.
        if hasattr(self, "_dispatcher"):
            self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM cannot be pickled or copied: it owns threads and the memory of its engine. "
            "Build it in the process that uses it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- internals -----------------------------------------------------------------------------

    @property
    def _num_speculative_tokens(self) -> int | None:
        speculative = self.speculative_config
        return None if speculative is None else speculative.num_speculative_tokens

    @property
    def _executor(self) -> _core.Executor:
        self._dispatcher.check_running()
        return self._dispatcher.executor
