# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM`: an `LLM` for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, Unpack

from paceline.async_feeds import FeedSession
from paceline.async_stream import ChunkStream, OutputStream, Plan
from paceline.chat_messages import Conversation
from paceline.checks import check_text, check_unknown, shorten, wrong_type
from paceline.engine_options import EngineArguments
from paceline.grammar import CompiledGrammar
from paceline.llm import LLM
from paceline.loader import LoadedModel
from paceline.option_schema import lists_options, split_unknown
from paceline.prompts import Prompt, check_prompt_type, encode_chats
from paceline.request import Request
from paceline.running_llm import internals
from paceline.sampling import SamplingParams
from paceline.speculative_config import SpeculativeConfig
from paceline.token_bound import min_num_tokens
from paceline.vllm_names import missing_attribute


class AsyncLLM:
    """An `LLM` whose methods are for asyncio. Nothing blocks the event loop.

    Any number of tasks, in any number of event loops and threads, run in the same batch. Prompts
    are rendered and tokenized in worker threads. An iteration of the engine wakes each event loop
    at most once.

    A request starts when its first output is awaited. It is cancelled, and its memory freed, when
    the task that waits for it is cancelled, when its iterator is closed or deleted (as leaving an
    `async for` does), and when its event loop is closed. A task that is slow delays no other one.

    Example:
        >>> async with AsyncLLM("path/to/model") as llm:
        ...     async for output in llm.generate("def quicksort(", SamplingParams(max_tokens=64)):
        ...         print(output.outputs[0].text)

    Attributes:
        llm: The `LLM` that runs the requests; its methods may be used at the same time.
    """

    llm: LLM

    @lists_options
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        load_format: str = "auto",
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        show_progress: bool = True,
        **engine: Unpack[EngineArguments],
    ) -> None:
        """Loads the models and starts the engine, as `LLM` does, whose arguments it takes.

        This takes long. In a running event loop, call it in a thread:
        `await asyncio.to_thread(AsyncLLM, ...)`.

        Args:
            model: As for `LLM`, as all arguments that are not listed here.
            **engine: options.toml describes each.

        Raises:
            Exception: As for `LLM`.
        """
        options, unknown = split_unknown(engine)
        check_unknown("AsyncLLM", AsyncLLM.__init__, unknown, options)
        llm = LLM(
            model,
            speculative_config=speculative_config,
            tokenizer=tokenizer,
            load_format=load_format,
            revision=revision,
            cache_dir=cache_dir,
            show_progress=show_progress,
            **engine,
        )
        self._attach(llm, is_owner=True)

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Makes an `AsyncLLM` of an `LLM` that is loaded already.

        Args:
            llm: The LLM. It stays open when the `AsyncLLM` is closed, and several may share it.

        Returns:
            The AsyncLLM.

        Raises:
            ValueError: It is not an LLM.
        """
        if not isinstance(llm, LLM):
            raise wrong_type("llm", llm, "an LLM")
        made = cls.__new__(cls)
        made._attach(llm, is_owner=False)
        return made

    def _attach(self, llm: LLM, *, is_owner: bool) -> None:
        self.llm = llm
        self._is_owner = is_owner
        if llm.target.tokenizer is not None:
            min_num_tokens(llm.target.tokenizer, "")  # reads the vocabulary, which blocks for long
        shared = internals(llm)
        shared.requests.grammars.read_tokenizer()  # likewise
        self._requests = shared.requests
        self._chat_templates = shared.chat_templates
        self._session = FeedSession(shared.dispatcher, shared.requests.grammars)

    # ---- generating ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **unknown: Never,
    ) -> OutputStream:
        """Generates completions of a prompt and returns them while they grow.

        Requests without a seed get the same seeds as those of `LLM.generate`, in the order in which
        their first outputs are awaited.

        Args:
            prompt: One prompt, as for `LLM.generate`.
            sampling_params: None = `LLM.get_default_sampling_params()`.
            request_id: A name for `abort` and the outputs, which no other running request has. None
                = the request gets one.

        Returns:
            An asynchronous iterator over `RequestOutput`. Each has the whole output so far; the
            last one, whose `finished` is True, is what `LLM.generate` returns. There is at most one
            for each iteration, and fewer if the task is slow.

        Raises:
            ValueError: request_id is not a string, or is empty. Everything else is checked when the
                first output is awaited; see `AsyncStream`.
            TypeError: An argument does not exist.
        """
        check_unknown("AsyncLLM.generate", AsyncLLM.generate, unknown)
        return OutputStream(
            self, self._session, *self._plan(lambda: prompt, sampling_params, request_id)
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> ChunkStream:
        """Generates completions of a prompt and returns each piece as soon as it is accepted.

        Args:
            prompt: As for `generate`.
            sampling_params: As for `generate`.
            request_id: As for `generate`.

        Returns:
            An asynchronous iterator over `StreamChunk`, one for each iteration and completion, as
            `LLM.stream` returns. A failure of the engine is the `error` of the last one's output.

        Raises:
            ValueError: As for `generate`.
        """
        return ChunkStream(
            self, self._session, *self._plan(lambda: prompt, sampling_params, request_id)
        )

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        **unknown: Never,
    ) -> OutputStream:
        """Generates the next message of a conversation and returns it while it grows.

        Args:
            messages: One conversation, as for `LLM.chat`.
            sampling_params: As for `generate`.
            request_id: As for `generate`.
            chat_template: As for `LLM.chat`, as all below.
            add_generation_prompt: See above.
            continue_final_message: See above.
            tools: See above.
            chat_template_kwargs: See above.
            cache_salt: See above.

        Returns:
            As for `generate`.

        Raises:
            ValueError: As for `generate`.
            TypeError: An argument does not exist.
        """
        check_unknown("AsyncLLM.chat", AsyncLLM.chat, unknown)
        render = self._renderer(
            messages,
            cache_salt,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return OutputStream(self, self._session, *self._plan(render, sampling_params, request_id))

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        **unknown: Never,
    ) -> ChunkStream:
        """Generates the next message of a conversation and returns each piece as soon as it is
        accepted.

        Args:
            messages: As for `chat`, as all below.
            sampling_params: See above.
            request_id: See above.
            chat_template: See above.
            add_generation_prompt: See above.
            continue_final_message: See above.
            tools: See above.
            chat_template_kwargs: See above.
            cache_salt: See above.

        Returns:
            As for `stream`.

        Raises:
            ValueError: As for `generate`.
            TypeError: An argument does not exist.
        """
        check_unknown("AsyncLLM.stream_chat", AsyncLLM.stream_chat, unknown)
        render = self._renderer(
            messages,
            cache_salt,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return ChunkStream(self, self._session, *self._plan(render, sampling_params, request_id))

    def _renderer(
        self, messages: Conversation, cache_salt: str | None, **rendering: Any
    ) -> Callable[[], Prompt]:
        """A call that makes a prompt of a conversation, for a worker thread."""
        llm, templates = self.llm, self._chat_templates

        def render() -> Prompt:
            texts = templates.render(messages, **rendering)
            if len(texts) != 1 or isinstance(messages[0], list | tuple):
                raise ValueError(
                    "messages is a list of conversations; allowed: one conversation. Start a task "
                    "for each"
                )
            return encode_chats(texts, llm.target, llm.max_model_len, cache_salt)[0]

        return render

    async def set_drafter(
        self,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None,
        *,
        draft: LoadedModel | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        show_progress: bool = True,
    ) -> None:
        """Changes the drafter while requests run, as `LLM.set_drafter`; loads it in a thread."""
        await asyncio.to_thread(
            self.llm.set_drafter,
            speculative_config,
            draft=draft,
            cache_dir=cache_dir,
            show_progress=show_progress,
        )

    async def update_drafter(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces the weights of the drafter while requests run, as `LLM.update_drafter`; in a
        thread."""
        await asyncio.to_thread(self.llm.update_drafter, state_dict)

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its iterator ends with the output so far and the finish_reason "abort".

        Args:
            request_id: The request's id. If no running request has it, nothing happens.

        Raises:
            ValueError: It is not a string.
            RuntimeError: The LLM was built before `fork` in the parent process.
        """
        self._session.abort(check_text("request_id", request_id))

    def close_requests(self, name: str = "this AsyncLLM") -> None:
        """Cancels all requests, whose tasks get RuntimeError, and takes no new ones. The LLM stays
        open.

        Args:
            name: Who is closed, for the errors.
        """
        self._session.close(name)

    def stop_compiling(self, reason: str) -> None:
        """Ends requests whose grammar is being compiled, and takes no further grammars.

        Args:
            reason: The message of the RuntimeError that their tasks get.
        """
        self._session.grammars.close(reason)

    def close(self) -> None:
        """Cancels all requests, whose tasks get RuntimeError, and closes the LLM unless it came
        from `from_llm`. Closing twice is fine."""
        self._session.close()
        if self._is_owner:
            self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def __del__(self) -> None:
        if hasattr(self, "_session"):
            self._session.close()

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Never:
            raise missing_attribute(self, "AsyncLLM", name)

    def __repr__(self) -> str:
        return f"<Async{repr(self.llm)[1:]}"

    def __reduce__(self) -> Any:
        return self.llm.__reduce__()

    def _plan(
        self,
        make_prompt: Callable[[], Prompt],
        sampling_params: SamplingParams | None,
        request_id: str | None,
    ) -> tuple[Callable[[], Plan], str | None]:
        """How to make the samples of a request: a call in the event loop, which takes numbers; and
        the request's name."""
        if request_id is not None and not check_text("request_id", request_id):
            raise ValueError("request_id is empty; allowed: a name, or None")
        llm, factory = self.llm, self._requests

        def number() -> Plan:
            if not isinstance(sampling_params, SamplingParams | None):
                raise wrong_type("sampling_params", sampling_params, "SamplingParams")
            params = sampling_params or llm.get_default_sampling_params()
            first = factory.reserve_numbers(params.n)

            def prepare(grammar: CompiledGrammar | None) -> list[Request]:
                prompt = make_prompt()
                _check_is_one(prompt)
                requests = factory.prepare([prompt], params, grammar)
                factory.set_seeds(requests, first)
                return requests

            compute = factory.receipts.facts if params.receipt else None
            return Plan(prepare, params.structured_outputs, compute)

        return number, request_id


def _check_is_one(prompt: object) -> None:
    """Refuses a list of prompts, and what is no prompt."""
    check_prompt_type("prompt", prompt)
    if isinstance(prompt, list | tuple) and any(
        isinstance(one, str | list | tuple | Mapping) for one in prompt[:1]
    ):
        raise ValueError(
            f"prompt is {shorten(prompt)}, a list of prompts; allowed: one prompt. Start a task "
            "for each; chat(messages) takes messages"
        )
