# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a target, maybe a drafter, and an engine that runs them."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline import _core, lifetime
from paceline.checks import check_choice, check_keywords, check_path, checks_keywords
from paceline.config import (
    DRAFT_DRIVERS,
    DRAFT_POSITIONS,
    DRAFT_SAMPLE_METHODS,
    DTYPES,
    LATER_METHODS,
    LOAD_FORMATS,
    METHODS,
    REJECTION_SAMPLE_METHODS,
    EngineConfig,
    SpeculativeConfig,
)
from paceline.detokenizer import IncrementalDetokenizer
from paceline.device import capture_progress, resolve_device, usable_devices
from paceline.dispatcher import Dispatcher
from paceline.engine_sampling import engine_arguments
from paceline.limits import (
    MAX_BLOCK_SIZE,
    MAX_DRAFT_PROPOSALS,
    MAX_NUM_SEQS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
)
from paceline.loader import (
    ARCHITECTURES,
    LoadedModel,
    check_compatible,
    check_pair,
)
from paceline.logprobs import LogprobReader, check_logprobs
from paceline.memory import group_max_bytes, memory_plan
from paceline.outputs import RequestError, RequestOutput
from paceline.prompts import Prompt, encode, list_params, list_prompts
from paceline.sampling import SamplingParams
from paceline.startup import (
    executor_options,
    load_models,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from paceline.stream import Request, RequestStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_logger = logging.getLogger("paceline")


class LLM:
    """A model ready to generate, with or without a drafter.

    All methods may be called from several threads; their requests run together.

    Example:
        >>> llm = LLM("path/to/model", speculative_config={"method": "draft_model",
        ...           "model": "path/to/draft", "num_speculative_tokens": 4})
        >>> llm.generate("def quicksort(", SamplingParams(temperature=0.0))[0].outputs[0].text

    Attributes:
        config: The engine's configuration, as given.
        speculative_config: The speculator's configuration, or None.
        target: The loaded target.
        draft: The loaded drafter, or None.
        max_model_len: Most tokens of prompt and output of one request.
    """

    @checks_keywords
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        prefill_chunk_size: int | None = None,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        num_threads: int | None = None,
        seed: int = 0,
        max_logprobs: int = 20,
        show_progress: bool = True,
    ) -> None:
        """Loads the models and starts the engine.

        Args:
            model: Folder of the target's checkpoint in Hugging Face layout. Without a
                `tokenizer.json` it takes token ids only.
            speculative_config: vLLM's keys as a mapping or JSON, see `SpeculativeConfig`; None =
                plain decoding.
            device: "cpu", "cuda" (the first visible GPU), or "auto": "cuda" where it can be used,
                else "cpu".
            dtype: Of the weights: "auto" (BF16 stays bfloat16, anything else becomes float32),
                "float32" or "bfloat16". On CUDA float32 weights run on slow reference kernels.
            load_format: "auto" reads the weights; "dummy" makes them up (normal, standard deviation
                0.02), for the drafter too. A folder then needs no more than `config.json`.
            max_model_len: Most tokens of prompt and output of one request. None = what the target
                was made for, at most 4,096. The drafter must have been made for as many.
            max_num_seqs: Outputs that are generated at the same time; further ones wait.
            max_num_batched_tokens: Rows of one iteration; None = 2,048, or more where max_num_seqs
                verify windows need more.
            prefill_chunk_size: Most prompt tokens of one request in one iteration; None = what the
                iteration has room for.
            kv_cache_bytes: Bytes of the KV pool. None = enough for max_num_seqs sequences of
                max_model_len tokens, but at most a quarter of the memory that is free now, or on
                CUDA 90 % of what the weights leave free, less 2 GiB; `memory_report()` has the size
                and the reason. A pool that is too small for all sequences at once is no error: some
                wait, or are computed again later.
            block_size: Tokens of a KV block.
            num_threads: CPU threads; None = all cores that the process may use.
            seed: Seeds requests that have no seed of their own.
            max_logprobs: The most probable tokens whose logprobs a request may ask for, 0 to 64. 0
                = none may ask for logprobs, and no memory is taken for them; else they take about
                as much as the logits do.
            show_progress: Show progress bars while loading and while graphs are captured, where
                standard error is a terminal. (What memory is used for is logged at level INFO by
                the logger "paceline".)

        Raises:
            ValueError: An argument that is not allowed, or a drafter that does not fit the target.
            NotImplementedError: A method, model or device that is not there yet.
            paceline.ModelNotFoundError: A folder or file that does not exist.
            paceline.ModelFileError: A file that does not hold what it must.
            paceline.OutOfMemoryError: No memory for weights, KV pool or workspace.
            paceline.DeviceError: The GPU or its driver failed, or the system refuses a thread.
        """
        model = check_path("model", model)
        check_choice("load_format", load_format, LOAD_FORMATS)
        config = EngineConfig(
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_chunk_size=prefill_chunk_size,
            kv_cache_bytes=kv_cache_bytes,
            block_size=block_size,
            num_threads=num_threads,
            seed=seed,
            max_logprobs=max_logprobs,
        )
        speculative = None
        if speculative_config is not None:
            speculative = SpeculativeConfig.parse(speculative_config)
        resolve_max_num_batched_tokens(config, speculative)
        resolved = resolve_device(config.device)
        if speculative is not None and speculative.model is not None and load_format == "auto":
            check_pair(model, speculative.model, method=speculative.method, dtype=config.dtype)
        with lifetime.delayed_exit():
            target, draft = load_models(
                model,
                speculative,
                dtype=config.dtype,
                device=resolved,
                is_dummy=load_format == "dummy",
                progress=show_progress,
            )
            self._start(target, draft, config, speculative, show_progress=show_progress)

    @classmethod
    def from_loaded(
        cls,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        show_progress: bool = True,
        **engine: Any,
    ) -> LLM:
        """Starts an engine on models that are loaded already; they may be shared.

        Args:
            target: What `paceline.loader.load_checkpoint` returned.
            draft: The same, or what `load_drafter` returned, for the drafter; needed if and only if
                there is a speculative_config whose method has a model.
            speculative_config: As for `LLM`; its `model` is only a name here.
            show_progress: As for `LLM`.
            **engine: Fields of `EngineConfig`. The engine runs where the models lie; a `device`
                other than "auto" has to say the same.

        Returns:
            The LLM.

        Raises:
            ValueError: As for `LLM`.
        """
        check_keywords("EngineConfig", engine, [f.name for f in dataclasses.fields(EngineConfig)])
        config = EngineConfig(**engine)
        speculative = None
        if speculative_config is not None:
            speculative = SpeculativeConfig.parse(speculative_config)
        needs_draft = speculative is not None and speculative.method != "ngram"
        if needs_draft != (draft is not None):
            raise ValueError(
                "draft and speculative_config belong together: "
                f"draft is {draft!r:.60}, speculative_config is {speculative_config!r}"
            )
        if config.device not in ("auto", target.model.device):
            raise ValueError(
                f"device is {config.device!r}, but the target lies on {target.model.device!r}; "
                f"allowed: 'auto' or {target.model.device!r}, or load it to the other device"
            )
        resolve_device(target.model.device)
        llm = cls.__new__(cls)
        with lifetime.delayed_exit():
            llm._start(target, draft, config, speculative, show_progress=show_progress)
        return llm

    def _start(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        *,
        show_progress: bool,
    ) -> None:
        if draft is not None:
            assert speculative is not None
            speculative = speculative.resolved(draft.method)
            check_compatible(target, draft)
        self.config = config
        self.speculative_config = speculative
        self.target = target
        self.draft = draft
        self.max_model_len = resolve_max_model_len(config.max_model_len, target, draft)
        options = executor_options(config, speculative, max_model_len=self.max_model_len)
        draft_model = None if draft is None else draft.model
        self._num_outputs = 0  # of the requests so far
        self._numbering = threading.Lock()
        executor = None
        try:
            with capture_progress(is_shown=show_progress) as report:
                executor = _core.Executor(target.model, draft_model, options, report)
            self._dispatcher = Dispatcher(executor)
            # Holds the dispatcher, not this object.
            self._finalizer = weakref.finalize(self, self._dispatcher.close)
            self._finalizer.atexit = False  # `lifetime` closes the dispatcher then
            if _logger.isEnabledFor(logging.INFO):
                _logger.info("%s", memory_plan(self.memory_report()))
        except BaseException:
            # The traceback of a Ctrl-C would keep the engine alive.
            if executor is not None:
                executor.close()
            raise

    # ---- generating ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continues prompts and waits for all of them.

        All prompts are queued, or where one is refused none. A Ctrl-C cancels them.

        The output of a request with a seed, or at temperature 0, depends on nothing but the prompt,
        the parameters and the target; with rejection_sample_method "standard" or "block" that holds
        at temperature 0 only, and with "synthetic" never. A request without a seed has the seed
        `llm_seed * 2**32 + i` modulo 2**64, where i counts the outputs of this LLM's requests
        before it; so no two outputs without a seed share one.

        Args:
            prompts: A text or a sequence of token ids, or a sequence of those.
            sampling_params: For all prompts, or one for each; None = `SamplingParams()`.
            use_tqdm: Show a progress bar on standard error.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: A prompt or parameter that is not allowed; says which prompt.
            RequestError: The engine gave up on a request; the outputs of the others are attached.
            RuntimeError: The LLM is closed.
        """
        requests = self._prepare(prompts, sampling_params)
        num_prompts = sum(request.sample == 0 for request in requests)
        outputs: list[RequestOutput | None] = [None] * num_prompts
        with (
            self._run(requests) as stream,
            _progress_bar(num_prompts, is_shown=use_tqdm) as bar,
        ):
            for chunk in stream:
                if chunk.output is not None:
                    outputs[chunk.index] = chunk.output
                    bar.update(1)
        finished = [output for output in outputs if output is not None]
        for index, output in enumerate(finished):
            if output.error is not None:
                raise RequestError(f"prompt {index}: {output.error}", finished)
        return finished

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RequestStream:
        """Continues prompts and gives out text as it is accepted.

        The requests are queued at once. Closing the iterator, leaving its `with` block or dropping
        it cancels what still runs.

        Args:
            prompts: As for `generate`.
            sampling_params: As for `generate`.

        Returns:
            An iterator over `StreamChunk`; the chunks of several prompts and of the outputs of one
            are interleaved.

        Raises:
            ValueError: A prompt or parameter that is not allowed; says which prompt.
            RuntimeError: The LLM is closed.
        """
        return self._run(self._prepare(prompts, sampling_params))

    def logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Computes the target's logits at every position of a prompt.

        Args:
            prompt: A text or a sequence of at most `max_model_len` token ids.

        Returns:
            float32 array [num_tokens, vocab_size]; row i judges the token after position i.

        Raises:
            ValueError: A prompt that is not allowed.
            RuntimeError: The LLM is closed, or the engine gave up.
        """
        _, token_ids = encode(
            prompt, "prompt", self.target, max_model_len=self.max_model_len, spare=0
        )
        session = self._dispatcher.open()
        try:
            session.add_requests([_core.Request(token_ids, score_prompt=True)])
            event = session.get()
            while event.finish_reason is None:
                event = session.get()
        finally:
            session.close()
        if event.logits is None:
            raise RuntimeError(f"the prompt was not scored: {event.error or event.finish_reason}")
        return event.logits.copy()

    # ---- about ---------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, Any]:
        """Says what this version can do and how this LLM is set up.

        Returns:
            A dict of plain JSON types: what `speculative_config`, `device` and `dtype` take, which
            methods come later, the architectures, and under "configured" the limits in effect.
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
        """Says where the memory goes.

        Returns:
            The "device"; bytes of weights, KV pool, workspace and captured graphs, counts of slabs;
            the bytes of the "workspace" by what they are for ("proposals": of drafts that
            "standard" or "block" draw); one dict a KV group under "groups", with "max_bytes" for
            what all sequences together can hold in it; and under "kv_cache_rule" why the pool has
            its size.
        """
        report = self._executor.memory_report()
        for group in report["groups"]:
            group["max_bytes"] = group_max_bytes(
                group, max_num_seqs=self.config.max_num_seqs, max_model_len=self.max_model_len
            )
        return {"device": self.target.model.device, **report}

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

    def close(self) -> None:
        """Cancels what runs and frees the engine. Closing twice is fine; so is never closing."""
        self._finalizer()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM cannot be pickled or copied: it owns threads and the memory of its engine. "
            "Build it in the process that uses it"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------

    @property
    def _executor(self) -> _core.Executor:
        self._dispatcher.check_running()
        return self._dispatcher.executor

    def _run(self, requests: list[Request]) -> RequestStream:
        """Numbers the outputs, which gives the seeds, and queues the requests: all or none."""
        with self._numbering:
            for number, request in enumerate(requests, self._num_outputs):
                if request.sample == 0:
                    seed = request.params.seed
                    if seed is None:
                        seed = (self.config.seed * 2**32 + number) & MAX_SEED
                    request.sampling = {**request.sampling, "seed": seed}
            stream = RequestStream(
                self._dispatcher,
                requests,
                num_speculative_tokens=None
                if self.speculative_config is None
                else self.speculative_config.num_speculative_tokens,
                owner=self,
            )
            # Only now, so that a refused call numbers no output.
            self._num_outputs += len(requests)
        return stream

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Checks what the engine does not; queues nothing. The samples of a prompt come side by
        side, in order."""
        self._dispatcher.check_running()
        listed = list_prompts(prompts)
        params = list_params(sampling_params, len(listed))
        checked = []
        for index, (prompt, param) in enumerate(zip(listed, params, strict=True)):
            name = f"prompts[{index}]" if len(listed) > 1 else "prompt"
            text, token_ids = encode(
                prompt, name, self.target, max_model_len=self.max_model_len, spare=1
            )
            check_logprobs(param, self.config.max_logprobs)
            checked.append((text, token_ids, param, engine_arguments(param, self.target)))
        tokenizer = self.target.tokenizer
        logprobs = LogprobReader(tokenizer)
        return [
            Request(
                index,
                text,
                token_ids,
                param,
                sampling=sampling,
                detokenizer=None
                if tokenizer is None
                else IncrementalDetokenizer(tokenizer.decode, token_ids),
                logprobs=logprobs,
                sample=sample,
            )
            for index, (text, token_ids, param, sampling) in enumerate(checked)
            for sample in range(param.n)
        ]


def capabilities() -> dict[str, Any]:
    """Says what this version can do, without any model; see `LLM.capabilities`."""
    return {
        "methods": list(METHODS),
        "later_methods": list(LATER_METHODS),
        "max_num_speculative_tokens": MAX_SPECULATIVE_TOKENS,
        "rejection_sample_methods": list(REJECTION_SAMPLE_METHODS),
        "draft_sample_methods": list(DRAFT_SAMPLE_METHODS),
        "max_draft_proposals": MAX_DRAFT_PROPOSALS,
        "draft_drivers": list(DRAFT_DRIVERS),
        "draft_positions": list(DRAFT_POSITIONS),
        "architectures": sorted(ARCHITECTURES),
        "devices": usable_devices(),
        "has_cuda": _core.build_info()["has_cuda"],
        "dtypes": list(DTYPES),
        "load_formats": list(LOAD_FORMATS),
        "block_sizes": {"min": 1, "max": MAX_BLOCK_SIZE},
        "max_num_seqs": {"min": 1, "max": MAX_NUM_SEQS},
        "max_n": MAX_SAMPLES,
        "sampling_parameters": list(SamplingParams.__dataclass_fields__),
    }


def _progress_bar(total: int, *, is_shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Generating", unit="request", disable=not is_shown)
