# SPDX-License-Identifier: Apache-2.0
"""What families write about reasoning and tools is read the same however it is divided."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from paceline.server.formats import FORMATS, Part, format_of

TEMPLATES = Path(__file__).resolve().parents[1] / "support" / "chat_templates"
WEATHER = '{"city": "Paris", "days": 3}'

# By format: a text, the content, the reasoning, and the calls.
CASES: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text < > <tool", "Just text < > <tool", "", []),
    (
        "hermes",
        f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>',
        "Let me look.",
        "",
        [("weather", WEATHER)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {"x": "</s> é"}}</tool_call>',
        "",
        "",
        [("a", "{}"), ("b", '{"x": "</s> é"}')],
    ),
    (
        "hermes",
        "<tool_call>{broken</tool_call> more",
        "<tool_call>{broken</tool_call> more",
        "",
        [],
    ),
    # The end-of-sequence token has come before the tag; or the limit, inside the JSON.
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}', "", "", [("a", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "argu', '<tool_call>{"name": "a", "argu', "", []),
    ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", "", []),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {WEATHER}}}',
        "",
        "",
        [("weather", WEATHER)],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
        "",
        "",
        [("a", "{}"), ("b", '{"x": 1}')],
    ),
    ("llama3_json", "The answer is {4}.", "The answer is {4}.", "", []),
    ("llama3_json", '{"no": "call"}', '{"no": "call"}', "", []),
    ("llama3_json", '{"name": "a", "par', '{"name": "a", "par', "", []),
    ("llama3_json", "  \n", "  \n", "", []),
    (
        "gemma4",
        '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:weather{city:<|"|>Paris<|"|>,'
        "days:3}<tool_call|>",
        "I look.",
        "thought\nHm.",
        [("weather", WEATHER)],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:[1,<|"|>x,}]<|"|>,true],o:{<|"|>k<|"|>:null},e:[],n:-1.5}<tool_call|>',
        "",
        "",
        [("f", '{"a": [1, "x,}]", true], "o": {"k": null}, "e": [], "n": -1.5}')],
    ),
    ("gemma4", "<|tool_call>call:f{a:<tool_call|>", "<|tool_call>call:f{a:<tool_call|>", "", []),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>", "", "", [("f", "{}")]),
    ("gemma4", "<|channel>thought\nNo en", "", "thought\nNo en", []),
    (
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello <b>",
        "Hello <b>",
        "Think.",
        [],
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{WEATHER}<|call|>",
        "",
        "Think.",
        [("weather", WEATHER)],
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather"
        f"<|channel|>commentary json<|message|>{WEATHER}",
        "I look.",
        "",
        [("weather", WEATHER)],
    ),
    ("openai", "<|channel|>final<|message|>a <| b", "a <| b", "", []),
    ("openai", "no channels at all", "no channels at all", "", []),
    ("openai", "<|channel|>analysis", "analysis", "", []),
]


def read(name: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parser = FORMATS[name].make()
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    text = {"content": "", "reasoning": ""}
    calls = []
    for part in parts:
        if part.kind == "call":
            calls.append((part.name, part.text))
        else:
            text[part.kind] += part.text
    return text["content"], text["reasoning"], calls


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), CASES)
def test_parts_do_not_depend_on_the_pieces(
    name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    whole = read(name, [text])
    assert (whole[0].strip(), whole[1]) == (content.strip(), reasoning)
    assert [(n, json.loads(a)) for n, a in whole[2]] == [(n, json.loads(a)) for n, a in calls]
    assert read(name, list(text)) == whole
    for cut in range(len(text)):
        assert read(name, [text[:cut], text[cut:]]) == whole
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        assert (
            read(name, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole
        )


def test_hostile_outputs_are_content() -> None:
    deep = "<|tool_call>call:f{a:" + "[" * 100_000 + "<tool_call|>"
    assert read("gemma4", [deep])[0] == deep
    deep = "<tool_call>" + '{"name": "a", "arguments": ' + "[" * 100_000 + "</tool_call>"
    assert read("hermes", [deep])[0] == deep
    assert read("llama3_json", ["{" * 100_000])[0] == "{" * 100_000
    assert read("openai", ["<|start|>" * 10_000]) == ("", "", [])


def test_content_is_not_held_back() -> None:
    parser = FORMATS["hermes"].make()
    assert parser.push("Hello") == [Part("content", "Hello")]
    assert parser.push(" wor<") == [Part("content", " wor")]
    assert parser.push("x") == [Part("content", "<x")]
    parser = FORMATS["openai"].make()
    parser.push("<|channel|>analysis<|message|>")
    assert parser.push("Hm") == [Part("reasoning", "Hm")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("harmony", "openai"),
        ("gemma4", "gemma4"),
        ("qwen3", "hermes"),
        ("llama3", "llama3_json"),
        ("gemma3", None),
    ],
)
def test_a_template_tells_the_format(template: str, name: str | None) -> None:
    found = format_of((TEMPLATES / f"{template}.jinja").read_text())
    assert (None if found is None else found.name) == name
    assert format_of("<tool_call><function=") is None  # a notation of its own
