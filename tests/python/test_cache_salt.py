# SPDX-License-Identifier: Apache-2.0
"""The prefix cache between the tenants of a server: what one may learn of another's prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from running_server import RunningServer, open_demo

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ROUTES = (COMPLETIONS, CHATS, RESPONSES, MESSAGES)
PREFIX = [3 + i for i in range(23)]
DIGITS = [20 + i for i in range(10)]  # tokens
PIN = [4, 8, 2]
# Different from their first token on.
TEXTS = {route: f"{first} = 1\n" * 12 for route, first in zip(ROUTES, "abcd", strict=True)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with open_demo(block_size=4, chat_template=template) as llm:
        yield llm


def tenant(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def find_pin(server: RunningServer, case: int, more: dict[str, Any]) -> list[int] | None:
    """The attack: extends the prompt by the digit with which most of it is cached.

    A block has four tokens, so each digit is four of them.
    """
    found: list[int] = []
    for _ in PIN:
        cached = []
        for digit in range(10):
            usage = complete(server, "attacker", case, [*found, digit], more)
            if "prompt_tokens_details" not in usage:
                return None
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        if cached.count(max(cached)) > 1:
            return None
        found.append(cached.index(max(cached)))
    return found


def complete(
    server: RunningServer, name: str, case: int, digits: list[int], more: dict[str, Any]
) -> dict[str, Any]:
    """Sends a prompt with digits as a tenant; returns the usage."""
    # Tests share an engine, but no prompts.
    tokens = [case, *PREFIX, *(DIGITS[digit] for digit in digits for _ in range(4)), 1]
    body = {"prompt": tokens, "max_tokens": 1} | more
    usage: dict[str, Any] = server.result(COMPLETIONS, body, headers=tenant(name))["usage"]
    return usage


@pytest.mark.parametrize(
    ("case", "options", "of_victim", "of_attacker", "expected"),
    [
        # The attack works where nothing is done against it, so it is a test of the rest.
        (0, {}, {}, {}, PIN),
        (1, {}, {"cache_salt": "shared"}, {"cache_salt": "shared"}, PIN),
        (2, {}, {"cache_salt": "only mine"}, {}, None),
        (3, {}, {"cache_salt": "only mine"}, {"cache_salt": "another"}, None),
        (4, {"salts_by_key": True}, {}, {}, None),
        # Who knows another's salt needs the key, too.
        (5, {"salts_by_key": True}, {"cache_salt": "known"}, {"cache_salt": "known"}, None),
        (6, {"shows_cached_tokens": False}, {}, {}, None),
    ],
)
def test_a_pin_in_a_prompt_is_found_only_without_salts(
    llm: LLM,
    case: int,
    options: dict[str, Any],
    of_victim: dict[str, Any],
    of_attacker: dict[str, Any],
    expected: list[int] | None,
) -> None:
    with RunningServer(llm, api_keys=["victim", "attacker"], **options) as server:
        complete(server, "victim", case, PIN, of_victim)
        assert find_pin(server, case, of_attacker) == expected


def cached_of(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    return int(details["cached_tokens"])


def body_of(path: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        COMPLETIONS: {"prompt": text, "max_tokens": 2, "temperature": 0},
        CHATS: {"messages": messages, "max_tokens": 2, "temperature": 0},
        RESPONSES: {"input": text, "max_output_tokens": 2, "temperature": 0},
        MESSAGES: {"model": "served", "messages": messages, "max_tokens": 2, "temperature": 0},
    }[path]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_has_salts(llm: LLM, path: str) -> None:
    body = body_of(path, TEXTS[path])
    with RunningServer(llm, api_keys=["a", "b"], salts_by_key=True) as server:
        cached = []
        for name, salt in (("a", None), ("a", None), ("b", None), ("a", "s"), ("b", "s")) * 2:
            more = {} if salt is None else {"cache_salt": salt}
            cached.append(cached_of(server.result(path, body | more, headers=tenant(name))))
    assert cached[0] == cached[2] == cached[3] == cached[4] == 0
    assert min(cached[1], *cached[5:]) >= 16


@pytest.mark.parametrize("path", ROUTES)
def test_a_salt_that_is_none_is_refused(llm: LLM, path: str) -> None:
    body = body_of(path, "a")
    with RunningServer(llm) as server:
        for salt, message in (
            (3, "cache_salt is 3 (int)"),
            (["a"], "cache_salt is ['a'] (list)"),
            ("", "cache_salt is empty"),
            ("a" * 513, "cache_salt has 513 bytes; allowed: a string of 1 to 512 bytes"),
            ("a\0", "cache_salt has a NUL character at position 1"),
        ):
            status, answer = server.ask(path, body | {"cache_salt": salt})
            assert status == 400 and message in answer["error"]["message"]
            if path != MESSAGES:  # whose errors have no such key
                assert answer["error"]["param"] == "cache_salt"
        assert server.ask(path, body | {"cache_salt": None})[0] == 200


@pytest.mark.parametrize("path", ROUTES)
def test_cached_tokens_can_be_hidden(llm: LLM, path: str) -> None:
    body = body_of(path, TEXTS[path].upper())
    with RunningServer(llm, shows_cached_tokens=False) as server:
        usages = [server.result(path, body)["usage"] for _ in range(2)]
        assert usages[0] == usages[1] and not any("details" in key for key in usages[0])
        if path in (COMPLETIONS, CHATS):
            more = {"stream_options": {"include_usage": True}}
            *_, last = server.events(path, body | more)
            assert last["usage"] == usages[0]
        assert server.llm.stats()["prefix_cache"]["num_hit_tokens"] > 0


def test_a_chat_of_python_has_a_salt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "e = 4\n" * 12}]
    params = SamplingParams(temperature=0, max_tokens=2)
    cached = [
        llm.chat(messages, params, cache_salt=salt)[0].num_cached_tokens
        for salt in (None, "a", "b", "a", None)
    ]
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) >= 16
    with pytest.raises(ValueError, match="cache_salt is empty"):
        llm.chat(messages, params, cache_salt="")


def test_all_keys_of_a_server_are_accepted(llm: LLM) -> None:
    with RunningServer(llm, api_keys=["a", "b"]) as server:
        found = [server.ask("/version", headers=tenant(name))[0] for name in ("a", "b", "c", "")]
        assert found == [200, 200, 401, 401]
