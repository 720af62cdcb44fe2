# SPDX-License-Identifier: Apache-2.0
"""The JSON of completions and chats, whole and in chunks."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    StreamChunk,
    TokenLogprobs,
)
from paceline.receipts.receipt import RESPONSE_KEY
from paceline.server.fields import Wishes
from paceline.server.formats import Parser, Part


class Shape(ABC):
    """The JSON of one route.

    Attributes:
        id_prefix: Begins the id of a response.
        name: The "object" of a whole response.
        chunk_name: The "object" of a chunk.
    """

    id_prefix: str
    name: str
    chunk_name: str

    def __init__(self, wishes: Wishes) -> None:
        """Takes what the request asks for."""
        self.wishes = wishes

    @abstractmethod
    def whole(
        self, output: CompletionOutput, request: RequestOutput, offsets: list[int]
    ) -> dict[str, Any]:
        """Makes a choice of a whole response, without its index.

        Args:
            output: The output.
            request: All outputs of its prompt.
            offsets: With logprobs or sources, the `text_offsets` of the output's tokens.
        """

    @abstractmethod
    def chunk(
        self, chunk: StreamChunk, prompt_token_ids: list[int], *, is_first: bool
    ) -> dict[str, Any] | None:
        """Makes a choice of a chunk, without its index; None if there is nothing to send."""

    def finish(
        self, choice: dict[str, Any], part: CompletionOutput | StreamChunk, offsets: list[int]
    ) -> dict[str, Any]:
        """Adds what all choices have.

        Args:
            choice: The choice so far.
            part: The output, or a chunk of it.
            offsets: See `whole`.
        """
        choice["finish_reason"] = part.finish_reason
        choice["stop_reason"] = part.stop_reason
        if self.wishes.returns_token_ids:
            choice["token_ids"] = part.token_ids
        if self.wishes.params.return_token_sources:
            choice["token_sources"] = part.token_sources
            choice["text_offsets"] = offsets
        return choice | receipt_of(part)

    def text_of(self, token: int, logprob: Logprob) -> str:
        """The name of a token in logprobs."""
        if self.wishes.shows_ids or logprob.decoded_token is None:
            return f"token_id:{token}"
        return logprob.decoded_token


class CompletionShape(Shape):
    """/v1/completions."""

    id_prefix = "cmpl-"
    name = chunk_name = "text_completion"

    def __init__(self, wishes: Wishes, decode: Callable[[list[int]], str]) -> None:
        """Takes what the request asks for.

        Args:
            wishes: See `Shape`.
            decode: Converts a prompt of token ids to text.
        """
        super().__init__(wishes)
        self._decode = decode

    def whole(
        self, output: CompletionOutput, request: RequestOutput, offsets: list[int]
    ) -> dict[str, Any]:
        """See `Shape`."""
        choice: dict[str, Any] = {
            "text": output.text,
            "logprobs": self._logprobs(output.logprobs, offsets),
        }
        if self.wishes.echoes:
            self._add_prompt(choice, request)
        if self.wishes.params.prompt_logprobs is not None and not self.wishes.echoes:
            choice["prompt_logprobs"] = prompt_logprobs_of(request)
        if self.wishes.returns_token_ids:
            choice["prompt_token_ids"] = request.prompt_token_ids
        return self.finish(choice, output, offsets)

    def _add_prompt(self, choice: dict[str, Any], request: RequestOutput) -> None:
        """Puts the prompt before the output."""
        ids = request.prompt_token_ids
        text = self._decode(ids) if request.prompt is None else request.prompt
        choice["text"] = text + choice["text"]
        known = request.prompt_logprobs
        own = choice["logprobs"]
        if own is None or known is None:
            return
        # No token precedes the first one, so it has no logprob.
        first = f"token_id:{ids[0]}" if self.wishes.shows_ids else self._decode(ids[:1])
        rest = self._logprobs([one for one in known if one is not None], [])
        assert rest is not None
        tokens = [first, *rest["tokens"]]
        starts = itertools.accumulate(map(len, tokens[:-1]), initial=0)
        choice["logprobs"] = {
            "tokens": tokens + own["tokens"],
            "token_logprobs": [None, *rest["token_logprobs"], *own["token_logprobs"]],
            "top_logprobs": None
            if own["top_logprobs"] is None
            else [None, *rest["top_logprobs"], *own["top_logprobs"]],
            "text_offset": [*starts, *(len(text) + offset for offset in own["text_offset"])],
        }

    def chunk(
        self, chunk: StreamChunk, prompt_token_ids: list[int], *, is_first: bool
    ) -> dict[str, Any]:
        """See `Shape`."""
        choice: dict[str, Any] = {
            "text": chunk.text,
            "logprobs": self._logprobs(chunk.logprobs, chunk.text_offsets),
        }
        if self.wishes.returns_token_ids and is_first:
            choice["prompt_token_ids"] = prompt_token_ids
        return self.finish(choice, chunk, chunk.text_offsets)

    def _logprobs(
        self, positions: list[TokenLogprobs] | None, offsets: list[int]
    ) -> dict[str, Any] | None:
        if positions is None:
            return None
        own = [next(iter(position.items())) for position in positions]
        best = None
        if self.wishes.params.logprobs:
            best = [
                {self.text_of(token, one): one.logprob for token, one in position.items()}
                for position in positions
            ]
        return {
            "tokens": [self.text_of(token, one) for token, one in own],
            "token_logprobs": [one.logprob for _, one in own],
            "top_logprobs": best,
            "text_offset": offsets,
        }


class ChatShape(Shape):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, wishes: Wishes, make_parser: Callable[[], Parser]) -> None:
        """Takes what the request asks for.

        Args:
            wishes: See `Shape`.
            make_parser: See `ChatCall`.
        """
        super().__init__(wishes)
        self._make_parser = make_parser
        # Of a stream, by sample.
        self._parsers: collections.defaultdict[int, Parser] = collections.defaultdict(make_parser)
        self._num_calls: collections.Counter[int] = collections.Counter()

    def whole(
        self, output: CompletionOutput, request: RequestOutput, offsets: list[int]
    ) -> dict[str, Any]:
        """See `Shape`."""
        parts = self._make_parser().take(output.text, is_last=True)
        text, reasoning, calls = _divide(parts)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        message |= {"reasoning": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"message": message, "logprobs": self._logprobs(output.logprobs)}
        choice = self.finish(choice, output, offsets)
        return _with_calls(choice, has_calls=bool(calls))

    def chunk(
        self, chunk: StreamChunk, prompt_token_ids: list[int], *, is_first: bool
    ) -> dict[str, Any] | None:
        """See `Shape`."""
        delta = self._read(chunk)
        if is_first:
            delta = {"role": "assistant"} | (delta or {"content": ""})
        choice = {"delta": delta, "logprobs": self._logprobs(chunk.logprobs)}
        choice = self.finish(choice, chunk, chunk.text_offsets)
        if not delta and not chunk.finished and not self._describes_tokens():
            return None  # the parser holds the text back, which may be a call
        return _with_calls(choice, has_calls=self._num_calls[chunk.sample] > 0)

    def _describes_tokens(self) -> bool:
        """Returns whether chunks say more of tokens than their text."""
        wishes = self.wishes
        params = wishes.params
        return (
            wishes.returns_token_ids or params.return_token_sources or params.logprobs is not None
        )

    def _read(self, chunk: StreamChunk) -> dict[str, Any]:
        """Returns what a chunk adds to a message."""
        parts = self._parsers[chunk.sample].take(chunk.text, is_last=chunk.finished)
        text, reasoning, calls = _divide(parts)
        delta: dict[str, Any] = {"reasoning": reasoning} if reasoning else {}
        if calls:
            first = self._num_calls[chunk.sample]
            delta["tool_calls"] = [
                {"index": index} | call for index, call in enumerate(calls, first)
            ]
            self._num_calls[chunk.sample] += len(calls)
        if text:
            delta["content"] = text
        return delta

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        num_best = self.wishes.params.logprobs or 0
        content = []
        for position in positions:
            (token, own), *_ = position.items()
            # By rank; the token itself, which comes first, may be among the best or not.
            best = sorted(position.items(), key=lambda item: item[1].rank)[:num_best]
            content.append(
                self._entry(token, own)
                | {"top_logprobs": [self._entry(other, one) for other, one in best]}
            )
        return {"content": content}

    def _entry(self, token: int, logprob: Logprob) -> dict[str, Any]:
        text = self.text_of(token, logprob)
        return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}


def prompt_logprobs_of(request: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Makes the logprobs of a prompt as vLLM does: by token id, None for the first token."""
    if request.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {str(token): dataclasses.asdict(one) for token, one in position.items()}
        for position in request.prompt_logprobs
    ]


def _divide(parts: Iterable[Part]) -> tuple[str, str, list[dict[str, Any]]]:
    """The content, the reasoning, and the calls in OpenAI's form."""
    text = {"content": "", "reasoning": ""}
    calls = []
    for part in parts:
        if part.kind == "call":
            function = {"name": part.name, "arguments": part.text}
            calls.append(
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            )
        else:
            text[part.kind] += part.text
    return text["content"], text["reasoning"], calls


def _with_calls(choice: dict[str, Any], *, has_calls: bool) -> dict[str, Any]:
    if has_calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"
    return choice


def receipt_of(part: CompletionOutput | StreamChunk) -> dict[str, Any]:
    """Makes the field with the receipt of an output; empty if there is none."""
    return {} if part.receipt is None else {RESPONSE_KEY: part.receipt}


def usage(num_prompt: int, num_output: int) -> dict[str, Any]:
    """Makes the usage of a request while it runs."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def usage_of(outputs: Sequence[RequestOutput], *, shows_cached: bool = True) -> dict[str, Any]:
    """Sums the usage of the prompts of a request, with the cached tokens or without."""
    so_far = usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(one.token_ids) for output in outputs for one in output.outputs),
    )
    if not shows_cached:
        return so_far
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return so_far | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def metrics_of(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Makes the metrics of a request; None if it has several prompts."""
    if len(outputs) != 1:
        return None
    metrics = outputs[0].metrics.to_dict()
    shown = {key: value for key, value in metrics.items() if not key.startswith("num_")}
    return {**shown, "speculative_decoding": outputs[0].metrics.speculative_decoding}
