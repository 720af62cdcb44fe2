# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a target model, an optional drafter, and the engine that runs them."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline import _core, lifetime
from paceline.checks import check_choice, check_keywords, check_path, checks_keywords, shorten
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
from paceline.loader import ARCHITECTURES, LoadedModel, check_compatible, load_pair
from paceline.logprobs import LogprobReader, check_logprobs
from paceline.memory import group_max_bytes, memory_plan
from paceline.outputs import RequestError, RequestOutput
from paceline.prompts import Prompt, encode, list_params, list_prompts
from paceline.sampling import SamplingParams
from paceline.startup import (
    executor_options,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from paceline.stream import Request, RequestStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_logger = logging.getLogger("paceline")


class LLM:
    """A loaded model that generates, with or without speculative decoding.

    All methods are thread-safe. Requests from several threads run in the same batch.

    Close an LLM with `close()` or a `with` block to free its memory at once; otherwise it is freed
    when the object is collected or the interpreter exits. An LLM cannot be pickled, and it cannot
    be used in a forked child process: build it there, or use multiprocessing's "spawn" method.

    Example:
        >>> llm = LLM("path/to/model", speculative_config={"method": "draft_model",
        ...           "model": "path/to/draft", "num_speculative_tokens": 4})
        >>> llm.generate("def quicksort(", SamplingParams(temperature=0.0))[0].outputs[0].text

    Attributes:
        config: The engine's configuration, as given.
        speculative_config: The configuration of speculative decoding; None without it.
        target: The loaded target model.
        draft: The loaded drafter; None without one.
        max_model_len: Largest number of tokens of a request, prompt and output together.
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
            model: Folder of the target's checkpoint, in Hugging Face layout. If it has no
                `tokenizer.json`, prompts must be token ids and outputs have no text.
            speculative_config: How to draft, as a mapping or JSON with vLLM's keys; see
                `SpeculativeConfig`. None = plain decoding.
            device: Where to run: "cpu", "cuda" (the first visible GPU) or "auto" ("cuda" if a GPU
                is usable, else "cpu"). "cpu" and "cuda" raise an error if that device is
                unavailable.
            dtype: Type of the weights: "float32", "bfloat16" or "auto" (bfloat16 if the checkpoint
                is in bfloat16, else float32). On CUDA, float32 weights run on slow reference
                kernels.
            load_format: "auto" reads the weights from the checkpoint. "dummy" makes random weights
                (normal, standard deviation 0.02) for target and drafter, and needs only their
                `config.json`.
            max_model_len: Largest number of tokens of a request, prompt and output together. None =
                the length that the target supports, but at most 4,096. The drafter must
                support the same length.
            max_num_seqs: Largest number of outputs generated at the same time. Further outputs
                wait.
            max_num_batched_tokens: Largest number of token rows in one iteration. None = 2,048, or
                max_num_seqs * (num_speculative_tokens + 1) if that is more.
            prefill_chunk_size: Largest number of prompt tokens of one request in one iteration.
                None = limited only by max_num_batched_tokens.
            kv_cache_bytes: Size of the KV pool in bytes. None = enough for max_num_seqs sequences
                of max_model_len tokens, but on the CPU at most a quarter of the memory that is free
                now, and on CUDA at most 90 % of the memory that the weights leave free, minus 2
                GiB. `memory_report()` states the size and the reason. If the pool cannot hold all
                sequences at once, some wait, or are preempted and recomputed.
            block_size: Tokens per KV block.
            num_threads: CPU threads of the ops. None = all cores that the process may use.
            seed: Base seed for requests without a seed; see `generate`.
            max_logprobs: Largest `logprobs` and `prompt_logprobs` that a request may have, 0 to 64.
                0 = requests may have neither, and no memory is reserved for them. Otherwise they
                take about as much memory as the logits.
            show_progress: Show progress bars while weights are loaded and CUDA graphs are captured,
                if standard error is a terminal. (The logger "paceline" reports the use of memory at
                level INFO.)

        Raises:
            ValueError: An argument is not allowed, or the drafter does not fit the target.
            NotImplementedError: A method, model or device is not supported yet.
            paceline.ModelNotFoundError: A folder or file does not exist.
            paceline.ModelFileError: A file is damaged or lacks required content.
            paceline.OutOfMemoryError: There is not enough memory for weights, KV pool or workspace.
            paceline.DeviceError: The GPU or its driver failed, or the system refused a
                thread.
            RuntimeError: The Python interpreter is exiting.
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
        with lifetime.delayed_exit():
            target, draft = load_pair(
                model,
                None if speculative is None else speculative.model,
                method=None if speculative is None else speculative.method,
                dtype=config.dtype,
                device=resolved,
                load_format=load_format,
                progress=show_progress,
            )
            lifetime.check_not_exiting()
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
        """Starts an engine on models that are already loaded. Several engines may share models.

        Args:
            target: The result of `paceline.loader.load_checkpoint`.
            draft: The drafter: the result of `load_checkpoint` or `load_drafter`. Required if
                speculative_config has a method with a model, and not allowed otherwise.
            speculative_config: As for `LLM`. Its `model` is only a name here.
            show_progress: As for `LLM`.
            **engine: Fields of `EngineConfig`. The engine runs on the device that the models are
                on; a `device` other than "auto" must be that device.

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
                f"draft is {shorten(draft)} and speculative_config is "
                f"{shorten(speculative_config)}; allowed: both or neither, except that method "
                "'ngram' has no draft"
            )
        if config.device not in ("auto", target.model.device):
            raise ValueError(
                f"device is {config.device!r}, but the target is on {target.model.device!r}; "
                f"allowed: 'auto' or {target.model.device!r}, or a target that is loaded to "
                f"{config.device!r}"
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
        """Generates completions of prompts and waits until all are complete.

        The prompts are queued together. If one is refused, none is queued. A Ctrl-C cancels them.

        Reproducibility: with a seed, or at temperature 0, the output depends only on the prompt,
        the parameters and the target. With rejection_sample_method "standard" or "block" this holds
        only at temperature 0, and with "synthetic" never. A request without a seed gets the seed
        `llm_seed * 2**32 + i` modulo 2**64, where i is the number of outputs that this LLM's
        earlier requests have. So all outputs without a seed have different seeds.

        Args:
            prompts: A string or a sequence of token ids, or a sequence of strings and token id
                sequences.
            sampling_params: One for all prompts, or a sequence with one for each prompt. None =
                `SamplingParams()`.
            use_tqdm: Show a progress bar on standard error.

        Returns:
            One `RequestOutput` per prompt, in the order of the prompts.

        Raises:
            ValueError: A prompt or a parameter is not allowed. The message says which.
            RequestError: The engine failed to complete a request. The error has all outputs.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
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
        """Generates completions of prompts and returns each piece as soon as it is accepted.

        The requests are queued at once. Closing the iterator, leaving its `with` block or deleting
        it cancels the requests that still run.

        Args:
            prompts: As for `generate`.
            sampling_params: As for `generate`.

        Returns:
            An iterator over `StreamChunk`. Chunks of different prompts, and of the `n` outputs of
            one prompt, are interleaved.

        Raises:
            ValueError: A prompt or a parameter is not allowed. The message says which.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
        """
        return self._run(self._prepare(prompts, sampling_params))

    def logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Computes the target's logits at every position of a prompt.

        Args:
            prompt: A string, or a sequence of token ids; at most `max_model_len` tokens.

        Returns:
            float32 array [num_tokens, vocab_size]. Row i has the logits of the token after
            position i.

        Raises:
            ValueError: The prompt is not allowed.
            RuntimeError: The LLM is closed, was built before `fork` in the parent process, or
                failed.
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
            raise RuntimeError(
                f"the logits were not computed: {event.error or event.finish_reason}"
            )
        return event.logits.copy()

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
            can hold in it; and under "kv_cache_rule" the reason for the size of the pool.
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
        """Cancels all requests and frees the engine. Closing twice is fine.

        An LLM that is never closed is freed when it is collected or the interpreter exits.
        """
        self._dispatcher.close()

    def __del__(self) -> None:
        # Not weakref.finalize: a Ctrl-C at its start would leave the engine in its registry.
        if hasattr(self, "_dispatcher"):
            self._dispatcher.close()

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

    # ---- internals -----------------------------------------------------------------------------

    @property
    def _executor(self) -> _core.Executor:
        self._dispatcher.check_running()
        return self._dispatcher.executor

    def _run(self, requests: list[Request]) -> RequestStream:
        """Numbers the outputs, which determines seeds, and queues the requests: all or none."""
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
            # After queueing, so that a refused call does not use up numbers.
            self._num_outputs += len(requests)
        return stream

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Checks and encodes requests, without queueing them. The samples of a prompt are adjacent
        and in order."""
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
    """Lists what this version supports, without a model; see `LLM.capabilities`."""
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
