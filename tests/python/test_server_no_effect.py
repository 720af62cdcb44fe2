# SPDX-License-Identifier: Apache-2.0
"""Fields of OpenAI's API that change nothing, and those that choose how much a model thinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import test_server_tools
from paceline import LLM
from paceline.chat_template import ChatTemplates
from paceline.server.formats import format_of
from paceline.server.thinking import EFFORTS, Thinking, thinking_of, with_effort
from running_server import RunningServer

# Fixtures: a demo with the template of Qwen3, its server, and what makes up its answers.
llm = test_server_tools.llm
server = test_server_tools.server
says = test_server_tools.says

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPLATES = Path(__file__).resolve().parents[1] / "support" / "chat_templates"
NO_EFFECT: dict[str, Any] = {
    "metadata": {"team": "a"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "me",
}
OF_CHATS: dict[str, Any] = NO_EFFECT | {
    "verbosity": "low",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "include_reasoning": True,
    "best_of": 2,
    "n": 2,
}
BODIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "def f(", "n": 2}, NO_EFFECT | {"best_of": 2}),
    (COMPLETIONS, {"prompt": "def f("}, NO_EFFECT | {"best_of": 1, "service_tier": "flex"}),
    (CHATS, {"messages": [{"role": "user", "content": "a"}], "n": 2}, OF_CHATS),
    (
        RESPONSES,
        {"input": "a"},
        NO_EFFECT | {"text": {"verbosity": "high"}, "reasoning": {"summary": "auto"}},
    ),
]


def texts_of(answer: dict[str, Any]) -> list[str]:
    if answer["object"] == "response":
        return [part["text"] for item in answer["output"] for part in item["content"]]
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    ]


@pytest.mark.parametrize(("path", "body", "more"), BODIES)
def test_fields_without_effect_change_nothing(
    path: str, body: dict[str, Any], more: dict[str, Any], server: RunningServer
) -> None:
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = body | {length: 8, "seed": 3}
    answer = server.result(path, body | more)
    texts = texts_of(answer)
    assert all(texts) and texts == texts_of(server.result(path, body))
    streamed = {"stream": True, "stream_options": {"include_obfuscation": False}}
    if path != RESPONSES:
        with server.send(path, body | more | streamed) as response:
            assert response.status == 200 and b"[DONE]" in response.read()
    else:
        assert answer["metadata"] == more["metadata"] and answer["user"] == "me"
    # The server's own list of fields has them.
    listed = server.result("/v1/capabilities")["server"]["fields"][path]
    assert set(more) - {"store", "modalities", "include_reasoning"} <= set(listed)


def thinking_of_template(name: str) -> Thinking:
    text = (TEMPLATES / f"{name}.jinja").read_text()
    variables = ChatTemplates(Path("/nonexistent"), text).find_variables()
    return thinking_of(variables, format_of(text))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("harmony", Thinking(("low", "medium", "high"), None)),
        ("qwen3", Thinking((), "enable_thinking")),
        ("gemma4", Thinking((), "enable_thinking")),
        ("llama3", Thinking((), None)),
    ],
)
def test_templates_tell_how_thinking_is_chosen(name: str, expected: Thinking) -> None:
    assert thinking_of_template(name) == expected


def test_a_template_that_is_none_reads_no_variables() -> None:
    for text in (None, "{% if %}"):
        assert ChatTemplates(Path("/nonexistent"), text).find_variables() == set()


def test_efforts_reach_the_template(server: RunningServer, llm: LLM, says: Any) -> None:
    asked = says("Yes")
    messages = [{"role": "user", "content": "a"}]
    for effort in EFFORTS:
        server.result(CHATS, {"messages": messages, "reasoning_effort": effort})
        response = server.result(RESPONSES, {"input": "a", "reasoning": {"effort": effort}})
        assert response["reasoning"] == {"effort": effort, "summary": None}
        expected = {"enable_thinking": effort != "none"}
        assert [one["chat_template_kwargs"] for one in asked[-2:]] == [expected] * 2
    kwargs = {"date": "today"}
    server.result(
        CHATS, {"messages": messages, "reasoning_effort": "none", "chat_template_kwargs": kwargs}
    )
    assert asked[-1]["chat_template_kwargs"] == {"date": "today", "enable_thinking": False}
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    status, answer = server.ask(CHATS, {"messages": messages} | both)
    assert status == 400 and answer["error"]["param"] == "reasoning_effort"
    assert "enable_thinking in chat_template_kwargs is too" in answer["error"]["message"]


def test_efforts_are_those_of_the_model() -> None:
    harmony = thinking_of_template("harmony")
    assert with_effort(None, "low", harmony) == {"reasoning_effort": "low"}
    with pytest.raises(Exception, match="'none'; allowed with this model: low, medium, high"):
        with_effort(None, "none", harmony)
    # A model that cannot be told how much to think takes every effort, without effect.
    assert with_effort(None, "high", Thinking()) is None
    assert with_effort({"a": 1}, "none", Thinking()) == {"a": 1}
