# SPDX-License-Identifier: Apache-2.0
"""What the routes share: the model, its names and the limits of the server."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from paceline.checks import shorten
from paceline.replicas.remote import RemoteExecutor
from paceline.reports import stats_and_memory
from paceline.running_llm import internals
from paceline.server.admission import Admission, BodyBytes
from paceline.server.bodies import BODY, Body, parse_object
from paceline.server.connection import until_gone
from paceline.server.errors import ApiError
from paceline.server.fields import ServedModel
from paceline.server.formats import FORMATS, format_of
from paceline.server.garbage import without_collections
from paceline.server.metrics import RequestFigures, exposition
from paceline.server.thinking import thinking_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from paceline.async_llm import AsyncLLM
    from paceline.server.traces import Traces

_T = TypeVar("_T")

DEFAULT_MAX_BODY_BYTES: Final = 8 * 2**20
DEFAULT_READ_TIMEOUT_S: Final = 30.0
DEFAULT_MAX_CONNECTIONS: Final = 4096
#: --max-queue is this many times --max-num-seqs unless it is given.
QUEUE_FACTOR: Final = 4
# The bodies of all requests have at most this many times --max-body-bytes.
_BODIES_FACTOR: Final = 8


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of the server.

    Attributes:
        max_queue: Outputs that may wait while `max_num_seqs` run; None = QUEUE_FACTOR times that.
        max_body_bytes: Largest body of a request.
        read_timeout_s: Longest time for the headers, and for the body, of a request.
        max_connections: Connections that may be open.
    """

    max_queue: int | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    read_timeout_s: float = DEFAULT_READ_TIMEOUT_S
    max_connections: int = DEFAULT_MAX_CONNECTIONS


class Service:
    """A model that is served.

    Attributes:
        allm: Runs requests.
        names: The names of the model; responses have the first.
        limits: The limits of the server.
        api_keys: What clients must send, one of these; empty = nothing.
        cors_origins: The origins of other hosts whose pages may use the server.
        admission: Counts the outputs.
        body_bytes: Counts the bytes of long bodies.
        completion_params: The sampling parameters of completions that have none.
        chat_params: Those of chats.
        replicas: The replicas that run requests; None for an engine in this process.
        num_replicas: How many there are; 1 without replicas.
        figures: What the server measures of its requests.
        chat_templates: Render conversations.
        text_format: How the model writes reasoning and calls; None = unknown.
        thinking: How requests choose whether the model thinks, and how much.
        has_access_log: Whether each request is logged.
        shows_cached_tokens: Whether the usage says how many prompt tokens came from the prefix
            cache.
        allows_drafter_changes: Whether clients may change the drafter.
        traces: Begins the spans of requests; None = there are none.
        created: When the server started, in seconds since 1970.
        is_draining: Whether the server ends once all requests have ended.
    """

    def __init__(
        self,
        allm: AsyncLLM,
        names: Sequence[str],
        *,
        limits: Limits | None = None,
        api_keys: Sequence[str] = (),
        cors_origins: Sequence[str] = (),
        salts_by_key: bool = False,
        shows_cached_tokens: bool = True,
        allows_drafter_changes: bool = False,
        has_vllm_metrics: bool = False,
        tool_call_parser: str = "auto",
        has_access_log: bool = False,
        traces: Traces | None = None,
    ) -> None:
        """Takes a model that is loaded.

        Args:
            allm: The model.
            names: See the class.
            limits: See the class; None = the defaults.
            api_keys: See the class.
            cors_origins: See the class.
            salts_by_key: Whether requests of different API keys share no KV.
            shows_cached_tokens: See the class.
            allows_drafter_changes: See the class.
            has_vllm_metrics: Whether /metrics has vLLM's names too.
            tool_call_parser: A name of `FORMATS`, "none", or "auto": as the chat template tells.
            has_access_log: See the class.
            traces: See the class. `close` closes it.

        Raises:
            paceline.ModelFileError: The checkpoint states sampling parameters that are not allowed.
        """
        llm = allm.llm
        self.allm = allm
        self.names = tuple(names)
        self.limits = limits or Limits()
        self.api_keys = tuple(api_keys)
        self.cors_origins = tuple(cors_origins)
        self.shows_cached_tokens = shows_cached_tokens
        self.allows_drafter_changes = allows_drafter_changes
        self._salts_by_key = salts_by_key
        executor: object = internals(llm).dispatcher.executor
        self.replicas = executor if isinstance(executor, RemoteExecutor) else None
        self.num_replicas = 1 if self.replicas is None else self.replicas.num_replicas
        running = llm.config.max_num_seqs * self.num_replicas
        waiting = self.limits.max_queue
        self.admission = Admission(
            running + (QUEUE_FACTOR * running if waiting is None else waiting)
        )
        self.body_bytes = BodyBytes(_BODIES_FACTOR * self.limits.max_body_bytes)
        self.completion_params = llm.get_default_sampling_params()
        generation = llm.target.generation_config
        self.chat_params = self.completion_params
        if generation is None or not generation.has("max_new_tokens"):
            self.chat_params = dataclasses.replace(self.completion_params, max_tokens=None)
        self.created = int(time.time())
        self.is_draining = False
        self.chat_templates = internals(llm).chat_templates
        self.text_format = FORMATS.get(tool_call_parser)
        if tool_call_parser == "auto":
            self.text_format = format_of(self.chat_templates.find_text(has_tools=True) or "")
        self.thinking = thinking_of(
            self.chat_templates.find_variables(has_tools=True),
            self.text_format,
            self._render_question,
        )
        self.has_access_log = has_access_log
        self.traces = traces
        self.figures = RequestFigures()
        self._has_vllm_metrics = has_vllm_metrics
        self._dispatcher = internals(llm).dispatcher
        self._requests = internals(llm).requests
        # One thread each: Python runs no more at a time, and each delays the event loop.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="paceline-bodies")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="paceline-responses")
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="paceline-tokens")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="paceline-replicas")

    def _render_question(self, variables: dict[str, Any]) -> str:
        """Renders a prompt with the values of some variables of the chat template."""
        question = [{"role": "user", "content": "?"}]
        return self.chat_templates.render(question, chat_template_kwargs=variables)[0]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 if a request names another model; None = it names none."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model is {shorten(name)}; allowed: {', '.join(map(repr, self.names))}, or none",
                param="model",
                code="model_not_found",
            )

    @property
    def served(self) -> ServedModel:
        """The model as requests for chats find it."""
        return ServedModel(self.chat_params, self.check_model, self.text_format, self.thinking)

    def cache_salt(self, api_key: str | None, given: str | None) -> str | None:
        """Returns the salt of a request; None = it has none.

        Args:
            api_key: Its key; None = it has none.
            given: The field cache_salt.
        """
        if not self._salts_by_key or api_key is None:
            return given
        # No client can give a salt that is another key's, and the engine does not see the key.
        return hmac.new(api_key.encode(), (given or "").encode(), hashlib.sha256).hexdigest()

    def check_running(self) -> None:
        """Raises RuntimeError, or the engine's error, if no request can run."""
        self._dispatcher.check_running()
        if self.replicas is not None:
            self.replicas.check_running()

    def health(self) -> dict[str, Any] | None:
        """Describes the replicas; None without any. Its "status" is "ok", "degraded" if some of
        them are not up, or "starting" if none can take a request until it has started."""
        if self.replicas is None:
            return None
        states = self.replicas.replica_states()
        are_up = [one["state"] == "up" for one in states]
        status = "ok" if all(are_up) else "degraded" if any(are_up) else "starting"
        return {"status": status, "replicas": states}

    def decode(self, token_ids: list[int]) -> str:
        """Converts token ids to text; ValueError without a tokenizer."""
        return self.allm.llm.get_tokenizer().decode(token_ids)

    def metrics(self) -> bytes:
        """Returns all figures in the text format of Prometheus; see `check_running`."""
        replicas = self.replicas
        engines: list[tuple[str | None, dict[str, Any]]]
        if replicas is None:
            stats, memory = self._dispatcher.call(stats_and_memory)
            engines = [(None, stats)]
        else:
            engines, memory = list(replicas.replica_stats().items()), replicas.memory_report()
        return exposition(
            self.names[0],
            engines,
            memory,
            self.figures,
            replicas=replicas,
            num_open=self.admission.num_open,
            is_speculative=self.allm.llm.speculative_config is not None,
            has_vllm_names=self._has_vllm_metrics,
            capture=None if self._requests.capture is None else self._requests.capture.stats(),
        )

    def stats(self) -> dict[str, Any]:
        """Returns the figures of the engine, as `LLM.stats` describes them; see `check_running`."""
        return self.allm.llm.stats()

    async def read(self, request: Request, reader: Callable[[dict[str, Any]], _T]) -> _T:
        """Parses the body of a request, and reads it: at once if it is short, otherwise in another
        thread, as both may take a second.

        Args:
            request: The request.
            reader: Reads the object that the body is. Thread-safe.

        Returns:
            What `reader` returns.

        Raises:
            ClientGone: The client has gone away.
            Exception: As for `parse_object`, and what `reader` raises.
        """
        body: Body = request.scope[BODY]
        if body.is_short:
            return reader(parse_object(body.take()))

        def read() -> _T:
            with without_collections():
                return reader(parse_object(body.take()))

        return await until_gone(request.receive, self._in(self._reader, read))

    async def tokenize(self, request: Request, call: Callable[[], _T]) -> _T:
        """Makes a call that tokenizes, in another thread. It does not start if the client goes away
        before; `read` describes the errors."""
        return await until_gone(request.receive, self._in(self._tokenizers, call))

    async def write(self, call: Callable[[], bytes]) -> bytes:
        """Makes a call that makes a long response, in another thread."""

        def write() -> bytes:
            with without_collections():
                return call()

        return await self._in(self._writer, write)

    async def ask(self, call: Callable[[], _T]) -> _T:
        """Makes a call that asks the engine: with replicas, of which one may be slow to answer, in
        another thread."""
        return call() if self.replicas is None else await self._in(self._worker, call)

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    def close(self) -> None:
        """Ends the threads and the traces. The model stays open."""
        for pool in (self._reader, self._writer, self._tokenizers, self._worker):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()
