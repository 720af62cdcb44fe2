# SPDX-License-Identifier: Apache-2.0
"""What families write about reasoning and tools is read the same however it is divided."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        "qwen3",
        "<think>\nHm, <tool_call> and </thin\n</think>\n\nLet me look.\n"
        f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>',
        "Let me look.",
        "Hm, <tool_call> and </thin",
        [("weather", WEATHER)],
    ),
    (
        "qwen3_coder",
        "Let me look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Let me look.",
        "",
        [("weather", '{"city": "Paris", "days": "3"}')],
    ),
    (
        "qwen3_coder",
        "<think>\nHm, < and </thin\n</think>\n\n<tool_call>\n<function=a>\n</function>\n"
        "</tool_call>\n<tool_call><function=b><parameter=x>\nline </tool\n\n  two\n</parameter>"
        "</function></tool_call>",
        "",
        "Hm, < and </thin",
        [("a", "{}"), ("b", '{"x": "line </tool\\n\\n  two"}')],
    ),
    ("qwen3_coder", "<think>\n\n</think>\n\nAn\n\nanswer.", "An\n\nanswer.", "", []),
    ("qwen3_coder", "<think>\nNo end\n", "", "No end", []),
    # No function, text after a value, and no end of a key.
    *(
        ("qwen3_coder", text, text, "", [])
        for text in (
            "<tool_call>{}</tool_call>",
            "<tool_call><function=a><parameter=b>1</parameter> 2</function></tool_call>",
            "<tool_call><function=a><parameter=b</function></tool_call>",
            "<tool_call><function=a>1</function></tool_call>",
        )
    ),
    # The output has ended before the tags.
    (
        "qwen3_coder",
        "<tool_call>\n<function=a>\n<parameter=b>\n1\n</parameter>",
        "",
        "",
        [("a", '{"b": "1"}')],
    ),
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


SOME_TOOL = [{"type": "function", "function": {"name": "unused"}}]


def read(
    name: str, pieces: list[str], tools: Sequence[Any] = SOME_TOOL
) -> tuple[str, str, list[tuple[str, str]]]:
    parser = FORMATS[name].make(tools)
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
    deep = "<tool_call><function=f>" + "<parameter=a>" * 20_000 + "</function></tool_call>"
    assert read("qwen3_coder", [deep])[2] == [("f", '{"a": ""}')]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999"])
def test_calls_have_numbers_that_json_can_hold(number: str) -> None:
    call = f'{{"name": "f", "arguments": {{"x": [1.5, {number}]}}}}'
    for name, text in (("hermes", f"<tool_call>{call}</tool_call>"), ("llama3_json", call)):
        assert read(name, [text]) == (text, "", [])
    calls = {
        "qwen3_coder": (
            f"<tool_call><function=f><parameter=x>{number}</parameter></function></tool_call>"
        ),
        "gemma4": f"<|tool_call>call:f{{x:{number}}}<tool_call|>",
    }
    for name, text in calls.items():
        ((_, arguments),) = read(name, [text])[2]
        # A text that is no value stays one.
        assert json.loads(arguments) == {"x": number}


def test_thoughts_of_qwen3_are_read_without_tools_too() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert read("qwen3", ["<think>\nHm\n</think>\n\n", call], []) == (call, "Hm", [])


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
        ("qwen3", "qwen3"),
        ("qwen3_5", "qwen3_coder"),
        ("llama3", "llama3_json"),
        ("gemma3", None),
    ],
)
def test_a_template_tells_the_format(template: str, name: str | None) -> None:
    found = format_of((TEMPLATES / f"{template}.jinja").read_text())
    assert (None if found is None else found.name) == name


def test_a_template_without_thoughts() -> None:
    assert format_of("{{ '<tool_call>' }}") is FORMATS["hermes"]


def test_schemas_that_refer_to_each_other_end() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/Many"}] * 1000}
    odd = {"type": [{}, ["string"], 3]}
    parameters = {"properties": {"a": many, "b": odd}, "$defs": {"Many": many}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<function=f><parameter=a>1</parameter><parameter=b>2</parameter></function>"
    begin = time.process_time()
    assert read("qwen3_coder", [f"<tool_call>{text}</tool_call>"], tools)[2] == [
        ("f", '{"a": 1, "b": 2}')
    ]
    assert time.process_time() - begin < 1


def test_values_have_the_types_of_the_schema() -> None:
    types = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "n": {"type": ["string", "null"]},
        "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "bad": {"type": "number"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "chosen": {"enum": ["1", "2"]},
        "ref": {"$ref": "#/$defs/Zip"},
        "loop": {"$ref": "#/$defs/Loop"},
        "big": {"type": "number"},
    }
    definitions = {"Zip": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    parameters = {"properties": types, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    values = {
        "s": "3",
        "i": "3",
        "b": "True",
        "l": '["x", 1]',
        "n": "null",
        "o": '{"a": null}',
        "bad": "three",
        "optional": "10001",
        "none": "null",
        "chosen": "1",
        "ref": "10001",
        "loop": "3",
        "big": "1e999",
        "unknown": "3",
    }
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    (call,) = FORMATS["qwen3_coder"].make(tools).take(text, is_last=True)
    assert json.loads(call.text) == {
        "s": "3",
        "i": 3,
        "b": True,
        "l": ["x", 1],
        "n": None,
        "o": {"a": None},
        "bad": "three",
        "optional": "10001",
        "none": None,
        "chosen": "1",
        "ref": "10001",
        "loop": 3,
        "big": "1e999",
        "unknown": "3",
    }


def test_an_output_may_begin_within_reasoning() -> None:
    parser = FORMATS["qwen3_coder"].make(is_thinking=True)
    assert parser.take("\nFirst", is_last=False) == [Part("reasoning", "First")]
    assert parser.take(" think.\n", is_last=False) == [Part("reasoning", " think.")]
    assert parser.take("</think>\n\nThen", is_last=False) == [Part("content", "Then")]
    assert parser.take("\n\nsay.", is_last=True) == [Part("content", "\n\nsay.")]
