# SPDX-License-Identifier: Apache-2.0
"""A GPT-OSS checkpoint as `LLM` runs it: its stop tokens and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_models
from paceline import LLM, SamplingParams
from tiny_models import TinySpec, edit_config, make, write_json

TEMPLATE = Path(__file__).parents[1] / "support" / "chat_templates" / "harmony.jinja"
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 3, "max_model_len": 1024, "kv_cache_bytes": 8 << 20,
    "show_progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the files of the published one."""
    spec = TinySpec("gpt_oss", vocab_size=300, tokenizer_size=0, max_position=4096)
    path = tiny_models.copy_checkpoint(make(spec), tmp_path_factory.mktemp("gpt_oss") / "model")
    tiny_models.write_tokenizer(path / "tokenizer.json", 270)
    (path / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    return path


def test_a_request_stops_at_each_of_the_three_tokens(path: Path) -> None:
    prompts = [[10, 11, 12], [20, 21], [30]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24)
    with LLM(path, **ENGINE) as llm:
        free = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    # For each prompt the first token from the sixth on that no other output has before it.
    ends: list[int] = []
    for tokens in free:
        ends.append(next(t for t in tokens[5:] if t not in tokens[:5] and t not in ends))
    write_json(path / "generation_config.json", {"eos_token_id": ends})
    edit_config(path, eos_token_id=ends[0])  # generation_config.json names all
    with LLM(path, **ENGINE) as llm:
        stopped = llm.generate(prompts, params)
    seen = set()
    for tokens, output in zip(free, stopped, strict=True):
        length = next(i for i, token in enumerate(tokens) if token in ends)
        assert output.outputs[0].token_ids == tokens[: length + 1]
        assert output.outputs[0].finish_reason == "stop"
        seen.add(tokens[length])
    assert seen == set(ends)


def test_chats_have_the_prompts_of_transformers(path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    messages = [
        {"role": "developer", "content": "Answer briefly."},
        {"role": "user", "content": "2 + 2?"},
    ]
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    options = {"reasoning_effort": "low"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)

    def expected() -> str:
        return tokenizer.apply_chat_template(
            messages, tools=[tool], add_generation_prompt=True, tokenize=False, **options
        )

    with LLM(path, **ENGINE) as llm:
        before = expected()  # the date may change
        (output,) = llm.chat(
            messages,
            SamplingParams(temperature=0.0, max_tokens=3),
            tools=[tool],
            chat_template_kwargs=options,
        )
        assert output.prompt in (before, expected())
        assert "Reasoning: low" in output.prompt and "namespace functions {" in output.prompt
        assert output.prompt_token_ids == tokenizer(output.prompt)["input_ids"]
