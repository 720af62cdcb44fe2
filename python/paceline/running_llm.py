# SPDX-License-Identifier: Apache-2.0
"""Requests to loaded models: the part of an `LLM` behind its constructors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Never, overload

from paceline import _core, lifetime
from paceline.chat_messages import Conversation
from paceline.chat_template import ChatTemplates
from paceline.checks import check_bool, check_unknown
from paceline.default_params import default_params
from paceline.dispatcher import Dispatcher
from paceline.drafter_changes import load_for, log_drafter, update_drafter
from paceline.loader import LoadedModel
from paceline.outputs import RequestError, RequestOutput
from paceline.progress import progress_bar
from paceline.prompt_values import check_layers, score_prompt
from paceline.prompts import Prompt, Prompts, encode, encode_chats, given_prompts
from paceline.request import Request
from paceline.request_factory import RequestFactory
from paceline.running_engine import RunningEngine
from paceline.sampling import SamplingParams
from paceline.speculative_checks import speculative_options
from paceline.speculative_config import SpeculativeConfig
from paceline.startup import check_max_model_len
from paceline.stream import RequestStream
from paceline.tokenizer import Tokenizer, model_tokenizer
from paceline.weights import BusyError, update_weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class RunningLLM(RunningEngine):
    """Loaded models that generate. `LLM` adds the ways to load them."""

    # ---- generating ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Generates completions of prompts and waits until all are complete.

        The prompts are queued together. If one is refused, none is queued. A Ctrl-C cancels them.

        Reproducibility: with a seed, or at temperature 0, the output depends only on the prompt,
        the parameters and the target. With rejection_sample_method "standard" or "block" this holds
        only at temperature 0, and with "synthetic" never. A request without a seed gets the seed
        `llm_seed * 2**32 + i` modulo 2**64, where i is the number of outputs that this LLM's
        earlier requests have. So all outputs without a seed have different seeds.

        Args:
            prompts: One prompt or a sequence of them. A prompt is a string, a sequence of token
                ids, or a mapping with vLLM's keys: "prompt" (a string) or "prompt_token_ids". If it
                has both, the ids are used and the string is only stored in the output.
            sampling_params: One for all prompts, or a sequence with one for each prompt. None =
                `get_default_sampling_params()`.
            use_tqdm: Show a progress bar on standard error. None = if that is a terminal and there
                is more than one prompt.
            prompt_token_ids: Instead of prompts: token ids, or a sequence of them.

        Returns:
            One `RequestOutput` per prompt, in the order of the prompts; [] for an empty list.

        Raises:
            TypeError: An argument does not exist.
            ValueError: A prompt or a parameter is not allowed. The message says which.
            NotImplementedError: A prompt has a key of vLLM's that is not supported.
            RequestError: The engine failed to complete a request. The error has all outputs.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
        """
        check_unknown("LLM.generate", RunningLLM.generate, unknown)
        if use_tqdm is not None:
            check_bool("use_tqdm", use_tqdm)
        prompts = given_prompts(prompts, prompt_token_ids)
        requests = self._prepare(prompts, sampling_params)
        if not requests:
            return []
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

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Generates the next message of conversations and waits until all are complete.

        The checkpoint's chat template makes a prompt of each conversation: the string that
        transformers' `apply_chat_template` returns. The template writes the special tokens, so none
        are added. It runs in a sandbox with limited time and memory (`docs/python-api.md`).

        Args:
            messages: A conversation, i.e. a list of messages {"role": ..., "content": ...}, or a
                list of conversations. The content is a string, or a list of parts
                {"type": "text", "text": ...}.
            sampling_params: As for `generate`, one for each conversation.
            use_tqdm: As for `generate`.
            chat_template: A Jinja template as text or as the path of a file, or the name of one of
                the checkpoint's templates. None = that of `LLM(chat_template=...)`, or else the
                checkpoint's: "tool_use" if there are tools and it has one of that name, otherwise
                its only one or "default".
            add_generation_prompt: End the prompt with the beginning of the model's message.
            continue_final_message: Let the model continue the last message instead of starting one.
                Requires add_generation_prompt=False.
            tools: Functions that the model may call, as dicts in OpenAI's format.
            chat_template_kwargs: More variables for the template, such as {"enable_thinking":
                False}.
            cache_salt: The prompts share KV only with prompts of the same salt; None = with those
                that have none (`docs/prefix-cache.md`).

        Returns:
            One `RequestOutput` per conversation, in their order; [] for an empty list. Its `prompt`
            is the rendered template.

        Raises:
            TypeError: An argument does not exist.
            ValueError: A message or another argument is not allowed, there is no chat template, or
                the template refuses the messages, fails or exceeds a limit.
            NotImplementedError: A message has an image or another part that is not text.
            Exception: As for `generate`.
        """
        check_unknown("LLM.chat", RunningLLM.chat, unknown)
        if isinstance(messages, list | tuple) and not messages:
            return self.generate([], sampling_params)
        texts = self._chat_templates.render(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompts = encode_chats(texts, self.target, self.max_model_len, cache_salt)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompts,
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

    @overload
    def logits(
        self, prompt: Prompt, *, on_device: Literal[False] = False
    ) -> npt.NDArray[np.float32]: ...
    @overload
    def logits(self, prompt: Prompt, *, on_device: Literal[True]) -> _core.Array: ...
    def logits(
        self, prompt: Prompt, *, on_device: bool = False
    ) -> npt.NDArray[np.float32] | _core.Array:
        """Computes the target's logits at every position of a prompt.

        Args:
            prompt: As for `generate`; at most `max_model_len` tokens.
            on_device: Leave the logits in the memory of the LLM's device.

        Returns:
            float32 array [num_tokens, vocab_size]. Row i has the logits of the token after
            position i. With `on_device` an object with `__dlpack__`, which
            `torch.from_dlpack` and others take over without a copy; it owns its memory.

        Raises:
            ValueError: The prompt is not allowed.
            paceline.OutOfMemoryError: There is no memory for the logits on the device.
            RuntimeError: The LLM is closed, was built before `fork` in the parent process, or
                failed.
        """
        check_bool("on_device", on_device)
        token_ids = self._encode_whole(prompt)
        event = score_prompt(
            self._dispatcher, token_ids, score_prompt=True, keeps_logits_on_device=on_device
        )
        if on_device:
            assert event.device_logits is not None
            return event.device_logits
        assert event.logits is not None
        return event.logits.copy()

    @overload
    def hidden_states(
        self, prompt: Prompt, layers: Sequence[int], *, on_device: Literal[False] = False
    ) -> npt.NDArray[np.float32]: ...
    @overload
    def hidden_states(
        self, prompt: Prompt, layers: Sequence[int], *, on_device: Literal[True]
    ) -> _core.Array: ...
    def hidden_states(
        self, prompt: Prompt, layers: Sequence[int], *, on_device: bool = False
    ) -> npt.NDArray[np.float32] | _core.Array:
        """Computes the target's hidden states at every position of a prompt.

        Args:
            prompt: A string, or a sequence of token ids; at most `max_model_len` tokens.
            layers: Which, with the indices of `output_hidden_states` in transformers: 0 = the
                embeddings, i = the output of the i-th layer, and the number of layers = the output
                of the final norm. Negative indices count from the end. A model with several
                residual streams (DeepSeek-V4) has the last of these only.
            on_device: Leave them in the memory of the LLM's device.

        Returns:
            float32 array [len(layers), num_tokens, hidden_size], whatever the dtype of the weights.
            The values do not depend on how the prompt is divided into chunks. With `on_device` an
            object with `__dlpack__`, which `torch.from_dlpack` and others take over without a
            copy; it owns its memory.

        Raises:
            ValueError: The prompt or a layer is not allowed.
            paceline.OutOfMemoryError: There is no memory for the hidden states.
            RuntimeError: The LLM is closed, was built before `fork` in the parent process, or
                failed.
        """
        check_bool("on_device", on_device)
        checked = check_layers(layers, len(self.target.config["layers"]))
        token_ids = self._encode_whole(prompt)
        states = score_prompt(self._dispatcher, token_ids, hidden_layers=checked).hidden_states
        assert states is not None
        return states if on_device else states.numpy()

    # ---- facts about the model -----------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Returns the target's tokenizer.

        Raises:
            ValueError: The checkpoint has no `tokenizer.json`.
        """
        return model_tokenizer(self.target, self._chat_templates)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of requests that have none.

        Returns:
            `SamplingParams()` with the temperature, top_k, top_p, min_p, repetition_penalty and
            max_new_tokens (as max_tokens) that the checkpoint's `generation_config.json` states.
            `dataclasses.replace(params, max_tokens=64)` makes a copy with other values.

        Raises:
            paceline.ModelFileError: The file states a value that is not allowed.
        """
        return default_params(self.target)

    def update_weights(
        self,
        state_dict: Mapping[str, Any],
        *,
        draft_state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Replaces the weights in place, between requests; for example after a training step.

        Names, shapes and dtypes are checked as for `from_state_dict`, for target and drafter,
        before any weight changes. Values are converted to the dtype of the LLM's weights. From
        tensors on the GPU to an LLM there, they do not pass through the host. Afterwards outputs
        are those of a new LLM with these weights. Requests that other threads add meanwhile wait.

        A drafter without a `draft_state_dict` keeps its weights; the parts that it shares with the
        target change with it.

        Args:
            state_dict: All tensors of the target, by their names in Hugging Face checkpoints.
            draft_state_dict: All tensors of the drafter; None = they do not change.

        Raises:
            paceline.ModelFileError: A tensor is missing, unknown, misshapen or cannot be read;
                names it. No weight has changed.
            paceline.BusyError: Requests run or wait, or an iterator of `stream` is open. No weight
                has changed.
            ValueError: There is no drafter for `draft_state_dict`, or another engine shares the
                models (`from_loaded`). No weight has changed.
            NotImplementedError: The LLM's models were not read from the layout of Hugging Face.
            paceline.DeviceError: The device failed; the LLM is unusable.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
        """
        with self._change("update_weights"):
            self.target, self.draft = update_weights(
                self._executor, self.target, self.draft, state_dict, draft_state_dict
            )

    def set_drafter(
        self,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None,
        *,
        draft: LoadedModel | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        show_progress: bool = True,
    ) -> None:
        """Changes the drafter while requests run (`docs/drafters-at-run-time.md`).

        The new drafter is loaded and made ready beside the running requests, and takes over between
        two iterations. What runs is then computed again from its tokens, and goes on with the new
        drafter: no output changes by a token and no request is lost. The memory of the old drafter
        is freed. If this raises, the old drafter goes on.

        Args:
            speculative_config: As for `LLM`; None or `{"method": None}` = plain decoding. It
                replaces the whole configuration.
            draft: The drafter, if it is loaded already: the result of
                `paceline.loader.load_drafter` or `load_checkpoint`.
            cache_dir: As for `LLM`.
            show_progress: As for `LLM`.

        Raises:
            ValueError: A key is not allowed; the drafter does not fit the target; a request that
                runs or waits would not fit the KV pool; or the engine or the new configuration has
                a rejection_sample_method other than "coupled".
            NotImplementedError: The method "custom", before or after; or a drafter whose KV blocks
                are too large for the pool of a GPU.
            paceline.BusyError: Another change of the drafter or of weights is under way.
            paceline.OutOfMemoryError: There is no memory for the new drafter beside the old one.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
            Exception: As for `LLM`, for a drafter that cannot be found or loaded.
        """
        with self._change("set_drafter"), lifetime.delayed_exit():
            executor = self._executor
            speculative, loaded = load_for(
                self.target,
                self.config,
                speculative_config,
                draft,
                cache_dir=cache_dir,
                progress=show_progress,
            )
            check_max_model_len(self.max_model_len, self.target, loaded)
            executor.set_drafter(
                None if loaded is None else loaded.model,
                {} if speculative is None else speculative_options(speculative),
            )
            self.speculative_config, self.draft = speculative, loaded
            methods = () if speculative is None else speculative.methods
            self._requests.set_drafter(methods, self._num_speculative_tokens or 0)
            log_drafter(speculative, loaded)

    def update_drafter(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the weights of the drafter in place, between two iterations, while requests run.

        For those who train a drafter while it serves. No output changes by a token. Iterations wait
        while the tensors are copied. The drafter's KV of the requests that run then comes from both
        weights, so that fewer of their drafts may be accepted; other requests do not take it over.

        Args:
            state_dict: All tensors of the drafter, by their names in its checkpoint.

        Raises:
            paceline.ModelFileError: A tensor is missing, unknown, misshapen or cannot be read;
                names it. No weight has changed.
            ValueError: There is no drafter with weights of its own, another engine shares it, or
                the rejection_sample_method is not "coupled". No weight has changed.
            NotImplementedError: The drafter was not read from the layout of Hugging Face.
            paceline.BusyError: Another change of the drafter or of weights is under way.
            paceline.DeviceError: The device failed; the LLM is unusable.
            RuntimeError: The LLM is closed, or was built before `fork` in the parent process.
        """
        with self._change("update_drafter"):
            self.draft = update_drafter(self._executor, self.target, self.draft, state_dict)

    # ---- internals -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """Admits one change of the drafter or of weights at a time; `name` is the method."""
        if not self._changes.acquire(blocking=False):
            raise BusyError(
                f"{name}: another change of the drafter or of weights is under way; wait until it "
                "has ended"
            )
        try:
            yield
        finally:
            self._changes.release()

    def _encode_whole(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt to which no output is added."""
        _, token_ids = encode(
            prompt, "prompt", self.target, max_model_len=self.max_model_len, spare=0
        )
        return token_ids

    def _prepare(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Makes the requests of a call, unless the LLM is closed or forked."""
        self._dispatcher.check_running()
        return self._requests.prepare(prompts, sampling_params)

    def _run(self, requests: list[Request]) -> RequestStream:
        """Queues the requests of a call: all or none."""
        return self._requests.queue(
            requests,
            lambda: RequestStream(
                self._dispatcher,
                requests,
                owner=self,
            ),
        )


@dataclass(frozen=True)
class Internals:
    """The parts of an `LLM` that `AsyncLLM` uses.

    Attributes:
        dispatcher: Delivers the events of the engine.
        requests: Makes the requests.
        chat_templates: Render conversations.
    """

    dispatcher: Dispatcher
    requests: RequestFactory
    chat_templates: ChatTemplates


def internals(llm: RunningLLM) -> Internals:
    """Returns the parts of an `LLM` for the package's own use."""
    return Internals(llm._dispatcher, llm._requests, llm._chat_templates)


def _progress_bar(total: int, *, is_shown: bool | None) -> Any:
    """None for `is_shown`: with several requests, on a terminal."""
    return progress_bar(
        total,
        "Generating",
        "request",
        is_shown=total > 1 if is_shown is None else is_shown,
        needs_terminal=is_shown is None,
    )
