# SPDX-License-Identifier: Apache-2.0
"""Receipts of the server: on every route, and beside other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.receipts import digests
from paceline.receipts.receipt import read_receipts
from paceline.receipts.replay import verify
from receipt_jobs import PARAMS, PROMPT, target_dir
from running_server import RunningServer
from tiny_models import TinySpec

pytestmark = pytest.mark.usefixtures("digest_cache")


def events_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of all events of a stream, named or not."""
    with server.send(path, body | {"stream": True}) as response:
        assert response.status == 200
        lines = response.read().decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def test_the_server_returns_receipts_on_every_route(receipt_llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    common = {"temperature": 0.7, "seed": 3, "x_receipt": "with_text"}
    with (
        LLM(target_dir(), chat_template=template, max_num_seqs=8, device="cpu") as llm,
        RunningServer(llm) as server,
    ):
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "abc", "max_tokens": 9, "n": 2},
            "/v1/chat/completions": {"messages": messages, "max_tokens": 9, "n": 2},
            "/v1/responses": {"input": "abc", "max_output_tokens": 9},
            "/v1/messages": {"messages": messages, "max_tokens": 9},
        }
        for path, body in bodies.items():
            whole = server.result(path, body | common)
            receipts = [receipt for _, receipt in read_receipts(path, json.dumps(whole))]
            assert len(receipts) == body.get("n", 1)
            named = [(path, receipt) for receipt in receipts]
            assert {one.verdict for one in verify(receipt_llm, named)} == {"equal"}
            # The same in a stream, at the end of each output.
            streamed = []
            for event in events_of(server, path, body | common):
                found = event.get("response", event)
                streamed += [
                    one for one in (found, *found.get("choices", ())) if "x_receipt" in one
                ]
            streamed.sort(key=lambda one: int(one["x_receipt"]["seed"]))
            assert [one["x_receipt"] for one in streamed] == receipts
            bare = server.result(path, body | common | {"x_receipt": True})
            ((_, receipt), *_) = read_receipts(path, json.dumps(bare))
            assert receipts[0] == receipt | {"inputs": receipts[0]["inputs"]}
            assert "x_receipt" not in json.dumps(server.result(path, body))
            status, answer = server.ask(path, body | {"x_receipt": "text"})
            assert status == 400 and "true, false or 'with_text'" in answer["error"]["message"]


def test_digests_are_computed_beside_other_requests(
    copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a large model's files are read, requests without receipts go on."""
    may_end = threading.Event()
    begun = threading.Semaphore(0)
    compute = digests.weights_digest

    def wait(*arguments: Any) -> str:
        begun.release()
        assert may_end.wait(60)
        return compute(*arguments)

    monkeypatch.setattr("paceline.receipts.maker.weights_digest", wait)

    async def run(llm: LLM) -> None:
        async with AsyncLLM.from_llm(llm) as allm:

            async def one(params: SamplingParams) -> Any:
                return [output async for output in allm.generate(PROMPT, params)][-1].outputs[0]

            waiting = [asyncio.create_task(one(PARAMS)) for _ in range(4)]
            await asyncio.to_thread(begun.acquire)
            assert (await one(replace(PARAMS, receipt=False))).receipt is None
            assert not any(task.done() for task in waiting)
            may_end.set()
            assert None not in [one.receipt for one in await asyncio.gather(*waiting)]

    with LLM(copy_of(TinySpec("llama", seed=3)), device="cpu") as llm:
        asyncio.run(run(llm))
