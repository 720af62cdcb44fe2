# SPDX-License-Identifier: Apache-2.0
"""LLM.chat, and Tokenizer.apply_chat_template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.demo import find_demo
from paceline.loader import TokenizerInfo
from paceline.loader.convert import convert
from paceline.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
TALK = [*HELLO, {"role": "assistant", "content": "Hi "}, {"role": "user", "content": "How?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def chatty(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose tokenizer adds a BOS token, and with a chat template that writes one."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    folder.mkdir()
    for path in target_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = 5
    bos_token = TokenizerInfo(folder / "tokenizer.json").id_to_token[bos]
    tokenizer["added_tokens"].append(
        {"id": bos, "content": bos_token, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos_token, "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {bos_token: {"id": bos_token, "ids": [bos], "tokens": [bos_token]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"bos_token": bos_token, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(folder, max_model_len=256, max_num_seqs=4, device="cpu", show_progress=False) as llm:
        yield llm


def test_chat_is_generate_with_the_rendered_prompt(chatty: LLM) -> None:
    tokenizer = chatty.get_tokenizer()
    options = {"tools": TOOLS, "chat_template_kwargs": {"mood": "glad"}}
    one = chatty.chat(TALK, GREEDY, **options)
    both = chatty.chat([HELLO, TALK], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)])
    text = tokenizer.apply_chat_template(
        TALK, TOOLS, tokenize=False, add_generation_prompt=True, mood="glad"
    )
    assert text.endswith('How?\n[{"type": "function", "function": {"name": "f"}}]gladassistant:')
    assert [output.prompt for output in one] == [text]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = chatty.generate({"prompt_token_ids": ids}, GREEDY)
    assert one[0].prompt_token_ids == ids
    assert one[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert [len(output.outputs[0].token_ids) for output in both] == [6, 3]
    assert both[0].prompt.endswith("user: Hello\nassistant:")


def test_a_prompt_that_begins_with_bos_gets_no_second_one(chatty: LLM) -> None:
    (output,) = chatty.chat(HELLO, GREEDY)
    bos = 5
    assert output.prompt_token_ids.count(bos) == 1 and output.prompt_token_ids[0] == bos
    (raw,) = chatty.generate(output.prompt, GREEDY)
    assert raw.prompt_token_ids[:2] == [bos, bos]  # the tokenizer would add one


def test_the_last_message_can_be_continued(chatty: LLM) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = chatty.chat(TALK[:2], GREEDY, **options)
    assert output.prompt.endswith("assistant: Hi ")


def test_the_template_of_a_call_or_of_the_llm_takes_precedence(chatty: LLM, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("from a file")
    with LLM(
        chatty.target.path,
        chat_template=path,
        max_model_len=64,
        max_num_seqs=1,
        device="cpu",
        show_progress=False,
    ) as llm:
        assert llm.chat(HELLO, GREEDY)[0].prompt == "from a file"
        assert llm.chat(HELLO, GREEDY, chat_template="{# #}of a call")[0].prompt == "of a call"
        rendered = llm.get_tokenizer().apply_chat_template(HELLO, tokenize=False)
        assert rendered == "from a file"


def test_errors_name_the_argument(chatty: LLM, plain_llm: LLM) -> None:
    with pytest.raises(ValueError, match="neither a file nor a template"):
        LLM("nowhere", chat_template="chatml")
    with pytest.raises(ValueError, match="has no chat template"):
        plain_llm.chat(HELLO)
    long = [{"role": "user", "content": "word " * 300}]
    with pytest.raises(ValueError, match=r"^the prompt of messages\[1\] has .*at most 255"):
        chatty.chat([HELLO, long])
    with pytest.raises(ValueError, match=r"^the prompt of messages has .*at most 255"):
        chatty.chat(long * 100)  # refused by its length
    with pytest.raises(ValueError, match="messages is empty, because the chat template"):
        chatty.chat(HELLO, chat_template="{# #}")
    with pytest.raises(TypeError, match=r"'temperature'.*it has: messages, sampling_params"):
        chatty.chat(HELLO, temperature=0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 1 prompts"):
        chatty.chat(HELLO, [GREEDY, GREEDY])


def test_the_demos_have_a_template() -> None:
    for name in ("draft_model", "gemma4_mtp"):
        tokenizer = Tokenizer(TokenizerInfo(find_demo(name).target / "tokenizer.json"))
        assert tokenizer.apply_chat_template(TALK, tokenize=False).endswith("Hi \n\nHow?")


def test_apply_chat_template_is_that_of_transformers(chatty: LLM) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs: Any = PreTrainedTokenizerFast.from_pretrained(chatty.target.path)
    ours = chatty.get_tokenizer()
    for conversation in (TALK, [HELLO, TALK]):
        for options in (
            {},
            {"add_generation_prompt": True, "return_dict": False},
            {"tokenize": False, "mood": "x"},
        ):
            expected = theirs.apply_chat_template(conversation, **options)
            result = ours.apply_chat_template(conversation, **options)
            if not options:
                assert result.input_ids == expected["input_ids"]
                assert result["attention_mask"] == expected["attention_mask"]
            else:
                assert result == expected


def test_convert_copies_the_templates(copy_of: Callable[..., Path], tmp_path: Path) -> None:
    source = copy_of()
    (source / "additional_chat_templates").mkdir()
    names = [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "tokenizer_config.json",
    ]
    for name in names:
        (source / name).write_text("{}")
    (source / "additional_chat_templates" / "other.txt").write_text("{}")
    out = convert(source, tmp_path / "out", progress=False)
    copied = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert set(names) <= copied and not any("other" in name for name in copied)
