# SPDX-License-Identifier: Apache-2.0
"""Bodies of a million entries, and templates that would never end: refused, and no other request
is held up."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from running_server import RunningServer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": "a", **fields}


def chat(**fields: Any) -> tuple[str, Any]:
    return CHATS, {"messages": [{"role": "user", "content": "a"}], **fields}


# Of the default --max-body-bytes, by the field that the error names.
MILLION = 10**6
LARGE: dict[str, tuple[str, tuple[str, Any]]] = {
    "stop strings": ("stop", completion(stop=["x"] * MILLION)),
    "stop tokens": ("stop_token_ids", completion(stop_token_ids=[5] * MILLION)),
    "bad words": ("bad_words", completion(bad_words=["x"] * MILLION)),
    "biases": ("logit_bias", completion(logit_bias={str(i): 1 for i in range(MILLION // 2)})),
    "prompts": ("prompt", completion(prompt=["a"] * MILLION)),
    "lists": ("prompt", completion(prompt=[[1]] * MILLION)),
    "nested lists": ("prompt", completion(prompt=[[[[[]]]]] * (MILLION // 4))),
    "messages": ("messages", chat(messages=[{"role": "user", "content": "a"}] * (MILLION // 7))),
    "text": ("prompt", completion(prompt="a" * (8 * MILLION))),
}


def test_a_million_entries_are_refused_soon(plain_llm: LLM) -> None:
    """What a body may hold by its bytes is refused before anything is made for each entry."""
    with RunningServer(plain_llm) as server:
        for name, (param, (path, body)) in LARGE.items():
            data = json.dumps(body).encode()
            seconds = []
            for _ in range(3):
                started = time.monotonic()
                status, answer = server.ask(path, data)
                seconds.append(time.monotonic() - started)
                if seconds[-1] < 0.5:
                    break
            assert status == 400 and answer["error"]["param"] == param, (name, answer)
            assert min(seconds) < 1, (name, seconds)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages[0].content * 1000000000000 }}",
    ],
)
def test_a_hostile_template_holds_up_no_other_request(template: str, target_dir: Path) -> None:
    with (
        LLM(target_dir, device="cpu", max_num_seqs=2, chat_template=template) as llm,
        RunningServer(llm) as server,
        server.send(COMPLETIONS, {"prompt": [1], "max_tokens": 1}) as before,
    ):
        assert before.status == 200
        with ThreadPoolExecutor(1) as pool:
            path, body = chat(max_tokens=1)
            hostile = pool.submit(server.ask, path, body)
            seconds = []
            while not hostile.done() or not seconds:
                started = time.monotonic()
                assert server.ask("/health")[0] == 200
                seconds.append(time.monotonic() - started)
        status, answer = hostile.result()
        assert status == 400 and "chat_template exceeds a limit" in answer["error"]["message"], (
            answer
        )
        # The template is rendered in another thread, which shares Python's lock.
        assert sorted(seconds)[len(seconds) // 2] < 0.25
