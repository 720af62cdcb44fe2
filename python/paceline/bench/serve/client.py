# SPDX-License-Identifier: Apache-2.0
"""Sends streamed requests to a server with OpenAI's API and measures their events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from paceline.bench.serve.datasets import Question
from paceline.bench.serving import TimedRequest
from paceline.checks import shorten

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
_MAX_REASON: Final = 300


@dataclass
class Answer(TimedRequest):
    """The result of a request, whose tokens are counted as the server counts them.

    Attributes:
        error: Why it failed; "" if it did not.
        text: The output.
    """

    error: str = ""
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""

    @property
    def ended_s(self) -> float:
        """When the last event with output came."""
        return self.token_times_s[-1]


class Client:
    """Asks one server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        endpoint: str,
        model: str,
        extra: Mapping[str, Any],
    ) -> None:
        """Takes where to ask.

        Args:
            session: Has the headers of all requests.
            base_url: The server.
            endpoint: The route.
            model: The name of the model.
            extra: Further fields of each request.
        """
        self._session = session
        self._url = base_url + endpoint
        self._model = model
        self._extra = extra
        self._is_chat = endpoint.endswith("/chat/completions")

    async def ask(self, question: Question) -> Answer:
        """Sends a request and reads its stream; a failure is in the answer."""
        import aiohttp

        answer = Answer()
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": question.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if self._is_chat:
            fields["messages"] = [{"role": "user", "content": question.prompt}]
        else:
            fields["prompt"] = question.prompt
        body = json.dumps(fields).encode()
        answer.sent_s = time.perf_counter()
        try:
            async with self._session.post(
                self._url, data=body, headers={"content-type": "application/json"}
            ) as response:
                if response.status != 200:
                    answer.error = f"status {response.status}: {_reason(await response.text())}"
                    return answer
                async for line in response.content:
                    if line.startswith(b"data:"):
                        self._read_event(answer, line[5:].strip())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.error and not answer.token_times_s:
            answer.error = "the stream has no output"
        if not answer.num_output_tokens:  # the server sends no usage
            answer.num_output_tokens = len(answer.token_times_s)
        return answer

    def _read_event(self, answer: Answer, data: bytes) -> None:
        if data == b"[DONE]":
            return
        now = time.perf_counter()
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the stream ended with {shorten(event['error'], 300)}")
        if event.get("choices"):
            choice = event["choices"][0]
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
            # An event with no text may have the first bytes of a character, or just the end.
            if text or not choice.get("finish_reason"):
                answer.token_times_s.append(now)
            answer.text += text or ""
        usage = event.get("usage")
        if usage:
            answer.num_prompt_tokens = usage["prompt_tokens"]
            answer.num_output_tokens = usage["completion_tokens"]


def _reason(text: str) -> str:
    """The message of an error of OpenAI's form, or the beginning of another one."""
    try:
        return str(json.loads(text)["error"]["message"])[:_MAX_REASON]
    except (ValueError, LookupError, TypeError):
        return shorten(text, _MAX_REASON)


async def find_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """Asks a server for the name of its first model.

    Raises:
        ValueError: The server cannot be asked.
    """
    import aiohttp

    url = f"{base_url}/v1/models"
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {_reason(await response.text())}")
            return str((await response.json())["data"][0]["id"])
    except (
        aiohttp.ClientError,
        OSError,
        TimeoutError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        raise ValueError(
            f"{url} gives no model: {error}; start a server, or name another --base-url and --model"
        ) from None


async def read_draft_counters(
    session: aiohttp.ClientSession, base_url: str
) -> dict[str, float] | None:
    """Reads a server's counters of drafts from /metrics.

    Returns:
        By name, without prefix: "num_drafts", "num_draft_tokens", "num_accepted_tokens" and
        "num_accepted_tokens_per_pos/POSITION". None if the server has none.
    """
    import aiohttp

    try:
        async with session.get(f"{base_url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    for prefix in ("paceline_spec_decode_", "vllm:spec_decode_"):
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            bare, _, labels = name.partition("{")
            if not bare.startswith(prefix) or not bare.endswith("_total"):
                continue
            key = bare.removeprefix(prefix).removesuffix("_total")
            for label in labels.rstrip("}").split(","):
                if label.startswith("position="):
                    key += "/" + label.removeprefix("position=").strip('"')
            found[key] = found.get(key, 0.0) + float(value)
        if "num_drafts" in found:
            return found
    return None
