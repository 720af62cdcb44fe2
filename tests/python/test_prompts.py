# SPDX-License-Identifier: Apache-2.0
"""The forms of a prompt, and what an output says about its request."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import raises
from paceline import LLM, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from paceline.request import request_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def facts(output: RequestOutput) -> tuple[Any, ...]:
    return output.prompt, output.prompt_token_ids, output.outputs


def test_each_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.generate("abc", GREEDY)[0].prompt_token_ids
    as_text = facts(llm.generate("abc", GREEDY)[0])
    as_ids = (None, *as_text[1:])
    assert as_text[0] == "abc"
    for prompt in ({"prompt": "abc"}, TextPrompt(prompt="abc")):
        assert facts(llm.generate(prompt, GREEDY)[0]) == as_text
    for prompt in (ids, tuple(ids), np.array(ids), {"prompt_token_ids": np.array(ids)}):
        assert facts(llm.generate(prompt, GREEDY)[0]) == as_ids
    assert facts(llm.generate(TokensPrompt(prompt_token_ids=ids), GREEDY)[0]) == as_ids
    # With both, the ids count and the text is kept, even if it has other tokens.
    both = llm.generate({"prompt": "other", "prompt_token_ids": ids}, GREEDY)[0]
    assert facts(both) == ("other", *as_text[1:])
    assert np.array_equal(llm.logits({"prompt": "abc"}), llm.logits(ids))


def test_a_list_may_mix_the_forms(llm: LLM) -> None:
    ids = llm.generate("abc", GREEDY)[0].prompt_token_ids
    mixed = ["abc", ids, {"prompt": "abc"}, {"prompt_token_ids": ids}]
    for prompts in (mixed, tuple(mixed), mixed[::-1]):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.prompt_token_ids for output in outputs] == [ids] * 4
        assert [output.outputs for output in outputs] == [outputs[0].outputs] * 4
        texts = ["abc", None, "abc", None]
        assert [o.prompt for o in outputs] == (texts if prompts[0] == "abc" else texts[::-1])


@pytest.mark.parametrize(
    ("prompt", "kind", "parts"),
    [
        ({}, ValueError, ("prompt is empty",)),
        ({"promt": "a"}, ValueError, ("prompt has the key 'promt'", "'prompt', 'prompt_token")),
        ({3: "a"}, ValueError, ("prompt has the key 3",)),
        ({"prompt": [1]}, ValueError, ("prompt['prompt'] is [1] (list)", "'prompt_token_ids'")),
        ({"prompt": None}, ValueError, ("prompt['prompt'] is None",)),
        ({"prompt": b"a"}, ValueError, ("decode the bytes first",)),
        ({"prompt": ""}, ValueError, ("prompt['prompt'] is empty",)),
        ({"prompt_token_ids": []}, ValueError, ("prompt['prompt_token_ids'] is empty",)),
        ({"prompt_token_ids": "abc"}, ValueError, ("is 'abc' (str)", "a string is 'prompt'")),
        ({"prompt_token_ids": {"a": 1}}, ValueError, ("(dict)", "a sequence of token ids")),
        ({"prompt_token_ids": None}, ValueError, ("prompt['prompt_token_ids'] is None",)),
        ({"prompt_token_ids": [1, -1]}, ValueError, ("prompt['prompt_token_ids'][1] is",)),
        ({"role": "user", "content": "a"}, ValueError, ("'role'", "chat(messages) takes messages")),
        ({"prompt_token_ids": [1], "prompt": 3}, ValueError, ("prompt['prompt'] is 3",)),
        ({"cache_salt": "a"}, ValueError, ("prompt has no text and no token ids",)),
        ({"prompt": "a", "cache_salt": 3}, ValueError, ("prompt['cache_salt'] is 3 (int)",)),
        ({"prompt": "a", "cache_salt": None}, ValueError, ("prompt['cache_salt'] is None",)),
        ({"prompt": "a", "cache_salt": ""}, ValueError, ("['cache_salt'] is empty", "leave it")),
        ({"prompt": "a", "cache_salt": "\ud800"}, ValueError, ("['cache_salt'] has", "surrogate")),
        (
            {"prompt": "a", "cache_salt": "ä" * 257},
            ValueError,
            ("['cache_salt'] has 514 bytes", "1 to 512", "a hash of it"),
        ),
        (
            {"prompt": "a", "cache_salt": "ab\0"},
            ValueError,
            ("['cache_salt'] has a NUL character at position 2",),
        ),
        (
            {"prompt": "a", "multi_modal_data": None},
            NotImplementedError,
            ("prompt has the key 'multi_modal_data'", "not supported yet", "'prompt'"),
        ),
    ],
)
def test_mappings_that_are_refused(
    llm: LLM, prompt: Any, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with raises(kind, *parts):
        llm.generate(prompt, GREEDY)
    with raises(kind, "prompts[1]"):
        llm.generate(["a", prompt], GREEDY)
    with raises(kind, *parts):
        llm.logits(prompt)


def test_outputs_name_their_request(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], GREEDY) + llm.generate("c", GREEDY)
    assert len({output.request_id for output in outputs}) == 3
    assert all(isinstance(output.request_id, str) and output.finished for output in outputs)
    assert all(output.outputs[0].finished() for output in outputs)


def test_cached_tokens_are_the_engines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def spy(samples: Any) -> RequestOutput:
        events.extend(sample.last_event for sample in samples)
        return request_output(samples)

    monkeypatch.setattr("paceline.request.request_output", spy)
    # No other test of the engine begins a prompt like this one, so nothing of it is cached.
    (output,) = llm.generate([[11, 7] * 10], SamplingParams(n=2, max_tokens=2))
    first, second = (event.num_cached_tokens for event in events)
    # The second completion takes over all but the last token; the first computes its own.
    assert (output.num_cached_tokens, first, second) == (first, 0, 19)


def test_no_max_tokens_means_the_models_end(target_dir: Path) -> None:
    with LLM(target_dir, max_model_len=40) as llm:
        (output,) = llm.generate([5] * 10, SamplingParams(max_tokens=None, min_tokens=3))
        assert len(output.outputs[0].token_ids) == 30
        assert output.outputs[0].finish_reason == "length"


def test_a_bar_is_shown_on_a_terminal_for_several_prompts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stderr: io.StringIO, call: Callable[[], Any]) -> bool:
        monkeypatch.setattr(sys, "stderr", stderr)
        call()
        return "Generating" in stderr.getvalue()

    assert shown(Terminal(), lambda: llm.generate(["a", "b"], GREEDY))
    assert not shown(Terminal(), lambda: llm.generate("a", GREEDY))
    assert not shown(io.StringIO(), lambda: llm.generate(["a", "b"], GREEDY))
    assert not shown(Terminal(), lambda: llm.generate(["a", "b"], GREEDY, use_tqdm=False))
    assert shown(io.StringIO(), lambda: llm.generate("a", GREEDY, use_tqdm=True))
    with raises(ValueError, "use_tqdm is 3; allowed: True or False"):
        llm.generate("a", GREEDY, use_tqdm=3)  # type: ignore[arg-type]
