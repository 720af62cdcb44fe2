# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers through `LLM`: their options, reports and conversations."""

from __future__ import annotations

from typing import Any

import pytest

from errors import raises
from paceline import LLM, SamplingParams
from tiny_models import TinySpec, make

ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 3, "max_model_len": 512, "kv_cache_bytes": 16 << 20,
    "show_progress": False,
}  # fmt: skip
SPEC = TinySpec("qwen3_5", seed=3)
TURNS, USER, ANSWER = 20, 11, 7


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"state_interval": 24},
            ("state_interval is 24", "allowed: a multiple of block_size, 16"),
        ),
        ({"state_interval": 0}, ("state_interval", "0", "allowed")),
        (
            {"block_size": 2},
            ("block_size, where target layer 1 is recurrent and reads 4 inputs, is 2", "3..256"),
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with raises(ValueError, *parts):
        LLM(make(SPEC), **ENGINE | options)


def test_the_report_counts_states_and_tokens() -> None:
    with LLM(make(SPEC), **ENGINE) as llm:
        report = llm.memory_report()
        capacity = report["kv_capacity"]
        (state,) = [group for group in report["groups"] if group["kind"] == "state"]
        usable = (report["kv_num_slabs"] - 1) * report["kv_slab_bytes"]
        assert capacity["states"] == usable // state["block_bytes"]
        assert 0 < capacity["states"] < capacity["tokens"]
        (record,) = [group for group in report["groups"] if group["kind"] == "record"]
        assert record["num_layers"] == state["num_layers"]
    with LLM(make(TinySpec("qwen3", seed=3)), **ENGINE) as llm:
        assert list(llm.memory_report()["kv_capacity"]) == ["tokens"]


def test_a_conversation_computes_each_turn_once() -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=ANSWER, ignore_eos=True)
    history: list[int] = []
    with LLM(make(SPEC), **ENGINE) as llm:
        for turn in range(TURNS):
            prompt = history + [(turn * 5 + i * 3) % 90 for i in range(USER)]
            (output,) = llm.generate([prompt], params)
            # Hits end at whole blocks; the last token of the answer has no state.
            assert output.num_cached_tokens >= len(history) - 1 - 16
            history = prompt + list(output.outputs[0].token_ids)
