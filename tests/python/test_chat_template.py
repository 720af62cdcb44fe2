# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the strings of transformers, reading from a folder, errors, and limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import ModelFileError, chat_process
from paceline.chat_template import ChatTemplates, read_given_template

TEMPLATES = Path(__file__).parents[1] / "support" / "chat_templates"

HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": " Be brief; say <b>\"hé\" & 'ok'</b>. "},
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure? 日本語 🙂"},
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> in a city & its surroundings.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C", "nullable": True},
                "days": {"type": "integer", "default": 3},
                "ratio": {"type": ["number", "null"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "points": {"type": "array", "items": {"type": "array"}},
                "place": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
                    "required": ["lat"],
                },
                "when": {
                    "oneOf": [
                        {"type": "string", "default": "now"},
                        {"type": "integer", "description": "seconds"},
                    ],
                    "default": "now",
                },
            },
            "required": ["city"],
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "stop", "description": "Stops."}}
CALL = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "all": True}},
}
TOOL_TALK = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "reasoning_content": "I need a tool.", "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "content": "12 degrees"},
    {"role": "assistant", "content": "It has 12 degrees."},
    {"role": "user", "content": "And tomorrow?"},
    {"role": "assistant", "content": "", "thinking": "Again.", "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "content": '{"degrees": 13}'},
]
THOUGHTS = [
    *TALK[:2],
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\nIt is 4."},
    *TALK[3:],
    {"role": "assistant", "content": "<think>\nyes\n</think>\n\nSure. "},
]
STRING_ARGUMENTS = {"function": {"name": "f", "arguments": '{"a": 1}'}}


@dataclass(frozen=True)
class Case:
    """One call of a template."""

    template: str
    messages: list[Any]
    tools: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    prompt: bool = True
    is_continued: bool = False


CASES = [
    Case("llama3", HELLO),
    Case("llama3", TALK, kwargs={"date_string": "1 Jan 2025"}),
    Case("llama3", TOOL_TALK[:4], tools=[WEATHER, NOTHING], prompt=False),
    Case("llama3", TOOL_TALK, tools=[WEATHER], kwargs={"tools_in_user_message": False}),
    Case("llama3", TALK, kwargs={"builtin_tools": ["brave_search", "code_interpreter"]}),
    Case(
        "llama3",
        [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {
            "query": "x"}}}]}, {"role": "tool", "content": {"a": ["é", 1.5, None]}}],
        kwargs={"builtin_tools": ["f"]},
    ),
    Case("llama3", TALK[:3], prompt=False, is_continued=True),
    Case("qwen3", HELLO),
    Case("qwen3", TALK, kwargs={"enable_thinking": False}),
    Case("qwen3", THOUGHTS, prompt=False),
    Case("qwen3", TOOL_TALK, tools=[WEATHER, NOTHING]),
    Case("qwen3", TOOL_TALK[1:5], tools=[WEATHER], prompt=False),
    Case("qwen3", [*HELLO, {"role": "assistant", "content": "x", "tool_calls": [CALL["function"],
                                                                 STRING_ARGUMENTS]}]),
    Case("qwen3", THOUGHTS, prompt=False, is_continued=True),
    Case("qwen3_5", HELLO),
    Case("qwen3_5", TALK, kwargs={"enable_thinking": False}),
    Case("qwen3_5", THOUGHTS, prompt=False),
    Case("qwen3_5", TOOL_TALK, tools=[WEATHER, NOTHING]),
    Case("qwen3_5", TOOL_TALK[1:5], tools=[WEATHER], prompt=False),
    Case("qwen3_5", PARTS),
    Case("gemma3", TALK),
    Case("gemma3", PARTS),
    Case("gemma3", PARTS[1:], prompt=False, is_continued=True),
    Case("gemma4", TALK),
    Case("gemma4", PARTS[1:], kwargs={"enable_thinking": True}),
    Case("gemma4", [{"role": "user", "content": []}]),
    Case("gemma4", TOOL_TALK, tools=[WEATHER, NOTHING]),
    Case("gemma4", [*HELLO, {"role": "assistant", "content": "a<|channel>x<channel|> b"}, *HELLO]),
    Case("harmony", HELLO, kwargs={"reasoning_effort": "high", "builtin_tools": ["python"]}),
    Case("harmony", TALK, tools=[WEATHER, NOTHING], kwargs={"builtin_tools": ["browser", "x"]}),
    Case("harmony", TOOL_TALK, tools=[WEATHER]),
    Case("harmony", [{"role": "developer", "content": "Short."}, *TOOL_TALK[1:5]], prompt=False),
    Case("harmony", [*HELLO, {"role": "assistant", "content": "I call it.", "tool_calls": [CALL]},
                     TOOL_TALK[3]], kwargs={"model_identity": "You are brief."}),
    Case(
        "harmony",
        [*HELLO, {"role": "assistant", "reasoning": "hm", "content": "Hi"}],
        prompt=False,
        is_continued=True,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def apply_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """transformers' tokenizer, with the special tokens of `settings`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    write_settings(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def apply(case: Case, template: str) -> str:
        return tokenizer.apply_chat_template(
            case.messages,
            tools=case.tools,
            chat_template=template,
            add_generation_prompt=case.prompt,
            continue_final_message=case.is_continued,
            tokenize=False,
            **(case.kwargs or {}),
        )

    return apply


def write_settings(folder: Path, **changes: Any) -> Path:
    settings = {
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
        "pad_token": None,
        "image_token": "<image>",
        "extra_special_tokens": {"boi_token": "<boi>"},
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def render(case: Case, folder: Path, template: str) -> str:
    (text,) = ChatTemplates(folder).render(
        case.messages,
        chat_template=template,
        tools=case.tools,
        add_generation_prompt=case.prompt,
        continue_final_message=case.is_continued,
        chat_template_kwargs=case.kwargs,
    )
    return text


def apply(text: str, messages: Any = HELLO, **kwargs: Any) -> str:
    """Renders a template that needs no files."""
    (rendered,) = ChatTemplates(Path("/nonexistent")).render(
        messages, chat_template="{##}" + text, **kwargs
    )
    return rendered


# ---- the strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CASES)))
def test_strings_are_those_of_transformers(
    number: int, apply_of_transformers: Callable[..., str], tmp_path: Path
) -> None:
    case = CASES[number]
    template = (TEMPLATES / f"{case.template}.jinja").read_text()
    write_settings(tmp_path)
    before = render(case, tmp_path, template)
    expected = apply_of_transformers(case, template)
    assert expected in (before, render(case, tmp_path, template))  # the date may have changed


def test_operations_of_templates_are_those_of_transformers(
    apply_of_transformers: Callable[..., str], tmp_path: Path
) -> None:
    template = (TEMPLATES / "operations.jinja").read_text()
    case = Case("", TALK, prompt=False)
    write_settings(tmp_path)
    assert render(case, tmp_path, template) == apply_of_transformers(case, template)


def test_a_batch_gives_a_prompt_for_each_conversation() -> None:
    templates = ChatTemplates(Path("/nonexistent"))
    text = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert templates.render([TALK[1:3], HELLO], chat_template=text) == [
        "  What is 2 + 2?\n;4;",
        "Hello;",
    ]


def test_the_messages_of_the_caller_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    copy = json.loads(json.dumps(messages))
    text = "{{ messages[0].content[0].text }}{{ messages[0].thinking }}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert apply(text, messages, **options) == "a"
    assert messages == copy


# ---- content in parts ----------------------------------------------------------------------------

SPLIT_TALKS: list[tuple[list[Any], list[Any] | None]] = [
    (HELLO, None),
    ([TALK[0] | {"content": "Be brief and kind."}, *TALK[1:]], None),
    (TOOL_TALK[:4], [WEATHER]),
]


def in_parts(messages: list[Any], at: int) -> list[Any]:
    """The same messages with their text in two parts."""
    return [
        message
        | {"content": [{"type": "text", "text": text} for text in (content[:at], content[at:])]}
        if (content := message.get("content"))
        else message
        for message in messages
    ]


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "harmony", "llama3", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("number", range(len(SPLIT_TALKS)))
def test_text_in_parts_gives_the_prompt_of_a_string(name: str, number: int) -> None:
    """Some of these templates read parts, some fail with them, and some skip them."""
    messages, tools = SPLIT_TALKS[number]
    if name == "gemma3" and tools:  # it has no calls
        messages, tools = [*messages[:2], {"role": "assistant", "content": "Sunny."}], None
    template = (TEMPLATES / f"{name}.jinja").read_text()
    options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": {"date_string": "today"}}
    expected = apply(template, messages, **options)
    for message in messages:
        assert (message.get("content") or "").strip() in expected
    assert apply(template, in_parts(messages, 4), **options) == expected
    assert apply(template, in_parts(messages, 0), **options) == expected
    if messages[-1]["role"] != "user":
        continued = {"add_generation_prompt": False, "continue_final_message": True}
        expected = apply(template, messages, **options, **continued)
        assert apply(template, in_parts(messages, 4), **options, **continued) == expected


@pytest.mark.parametrize("use", ["{{ x }}", "{{ x | trim }}", "{{ 'a' ~ x }}", "{{ '%s' % x }}"])
def test_parts_are_not_written_as_python(use: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "b"}]}
    template = "{% set x = messages[0].content %}"
    assert apply(template + use, [message]).removeprefix("a") == "b"
    assert apply(template + "{{ x | tojson }}", [message]) == '"b"'


def test_a_template_that_reads_parts_in_some_places_gets_strings() -> None:
    """As that of a model with images, whose tools come with the first message as a string."""
    first = "{% if tools %}{{ messages[0].content | trim }};{% endif %}"
    loop = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    part = {"type": "text", "text": "ab"}
    messages = [{"role": "user", "content": [part, part]}]
    both = (
        first + "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
        f"{loop}{{% endif %}}"
    )
    assert apply(both, messages) == "abab"
    assert apply(both, messages, tools=[WEATHER]) == "abab;abab"
    with pytest.raises(ValueError, match="as a string in one place and reads only parts in ano"):
        apply(first + loop, messages, tools=[WEATHER])


def test_a_template_that_reads_parts_alone_gets_strings_as_parts() -> None:
    template = (
        "{% for m in messages %}{% for part in m.content if part.type == 'text' %}"
        "{{ part.text }}{% endfor %};{% endfor %}"
    )
    assert apply(template, TALK[1:3]) == "  What is 2 + 2?\n;4;"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert apply(template, TALK[1:3], **options) == "  What is 2 + 2?\n;4"


def test_results_of_tools_that_are_no_text_stay_as_they_are() -> None:
    talk = [*TOOL_TALK[1:3], TOOL_TALK[3] | {"content": [{"degrees": 12}, "text"]}]
    text = apply((TEMPLATES / "llama3.jinja").read_text(), talk, tools=[WEATHER])
    assert '[{"degrees": 12}, "text"]' in text


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    render = chat_process.render

    def counted(template: str, variables: Any, *limits: float) -> str:
        rendered.append(variables)
        return render(template, variables, *limits)

    monkeypatch.setattr(chat_process, "render", counted)
    text = "{% for m in messages %}{{ m.content }}{% endfor %}{# probed once #}"
    for _ in range(3):
        assert apply(text, in_parts(HELLO * 9, 2)) == "Hello" * 9
    assert len(rendered) == 2 + 3


# ---- reading -------------------------------------------------------------------------------------


def test_templates_are_found_as_transformers_finds_them(tmp_path: Path) -> None:
    def chosen(**kwargs: Any) -> str:
        return ChatTemplates(tmp_path).render(HELLO, **kwargs)[0]

    (tmp_path / "chat_template.json").write_text('{"chat_template": "{#-#}from json"}')
    assert chosen() == "from json"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write_settings(tmp_path, chat_template=named)
    assert (chosen(), chosen(tools=[WEATHER]), chosen(chat_template="tool_use")) == (
        "one",
        "two",
        "two",
    )
    write_settings(tmp_path, chat_template=named[1:])
    with pytest.raises(ValueError, match=r"several chat templates.*'tool_use'"):
        chosen()
    write_settings(tmp_path, chat_template="{{ bos_token }}x")
    assert chosen() == "<bos>x"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert chosen(tools=[WEATHER]) == "from jinja"
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    (tmp_path / "mine.txt").write_text("{{ bos_token }}mine")
    for path in (tmp_path / "mine.txt", str(tmp_path / "mine.txt")):
        assert chosen(chat_template=path) == "<s>mine"
    assert ChatTemplates(tmp_path, "{{ eos_token }}").render(HELLO) == ["<eos>"]


def test_files_that_are_no_templates_are_refused(tmp_path: Path) -> None:
    for contents, match in (
        ('{"chat_template": 3}', "expected a string or a list"),
        ('{"chat_template": [{"name": "a"}]}', "expected a string or a list"),
        ("[1]", "not a JSON object"),
        ("{", "not valid JSON"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(contents)
        with pytest.raises(ModelFileError, match=match):
            ChatTemplates(tmp_path).render(HELLO)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="not a chat template"):
        ChatTemplates(tmp_path).render(HELLO)
    (tmp_path / "chat_template.jinja").write_bytes(b"a" * (256 * 1024 + 1))
    with pytest.raises(ModelFileError, match="262144"):
        ChatTemplates(tmp_path).render(HELLO)
    with pytest.raises(ValueError, match="262145 bytes; allowed: at most 262144"):
        read_given_template("{" + "a" * (256 * 1024))
    with pytest.raises(ValueError, match="neither a file nor a template"):
        read_given_template("chatml")


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("Hello", "messages is 'Hello'.*allowed: a conversation"),
        (HELLO[0], "put the message into a list"),
        ([], "messages is empty"),
        (["Hello"], r"messages\[0\] is 'Hello' \(str\)"),
        ([HELLO, []], r"messages\[1\] is \[\]"),
        ([HELLO, [{"content": "x"}]], r"messages\[1\]\[0\] is .*no 'role'"),
        ([{"role": "user"}], r"messages\[0\] is .*no 'content'"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\['role'\] is 3"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] is 3"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\['content'\]\[0\] is 'x'"),
        ([{"role": "user", "content": [{"type": "odd"}]}], "allowed: .*text"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_malformed_messages_are_named(messages: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        apply("x", messages)
    assert "\n" not in str(caught.value)


def test_images_are_refused_by_name() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(NotImplementedError, match=r"\[1\] has type 'image_url'.*parts of type"):
        apply("x", [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


def get_time() -> str:
    return "now"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tools": [get_time]}, "the function 'get_time'.*get_json_schema"),
        ({"tools": WEATHER}, "tools is .*allowed: a list of dicts"),
        ({"tools": ["f"]}, r"tools\[0\] is 'f'"),
        ({"continue_final_message": True}, "both True"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has 'tools'"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]"),
    ],
)
def test_arguments_are_checked(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        apply("x", **options)


def test_a_message_that_is_not_continued_unchanged_is_refused() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for text, match in (
        ("{{ messages[0].content | upper }}", "does not appear unchanged"),
        ("nothing", "does not read 'content'"),
    ):
        with pytest.raises(ValueError, match=match):
            apply(text, **options)
    with pytest.raises(ValueError, match="one with text"):
        apply("{{ messages[0].content }}", [{"role": "user", "content": None}], **options)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('No\n system  turn') }}", "refuses the messages: No system turn"),
        ("a\n{% if %}", "not a valid template: line 2: Expected an expression"),
        ("{% for i in x %}" * 40 + "{% endfor %}" * 40, "not a valid template: too many"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "not a valid template: maximum recursion"),
        ("a\nb{{ 'x' + 1 }}", "fails in line 2: TypeError"),
        ("{{ missing.key }}", "fails in line 1: UndefinedError: 'missing' is undefined"),
        ("{{ 'a'|urlize }}", "line 1: No filter named 'urlize'"),
        ("{{ 'a'.encode() }}", "SecurityError: a chat template may not call str.encode"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ namespace(_a=1) }}", "SecurityError"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% include 'a' %}", "fails in line 1"),
    ],
)
def test_templates_fail_in_one_line(template: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        apply(template)
    assert "\n" not in str(caught.value)


def test_a_missing_template_names_the_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*tokenizer_config\.json") as caught:
        ChatTemplates(tmp_path).render(HELLO)
    assert str(tmp_path) in str(caught.value) and "chat_template=" in str(caught.value)
