# SPDX-License-Identifier: Apache-2.0
"""LLM with `standard` and `block` acceptance: the options that reach the engine, and the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams

PROMPTS = [[1, 2, 3], [40] * 33, [7, 8, 9, 10], [5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = [SamplingParams(temperature=1.0, max_tokens=24, seed=i) for i in range(len(PROMPTS))]
PROMPT_LOOKUP = {
    "method": "ngram",
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "num_speculative_tokens": 4,
}

METHODS = pytest.mark.parametrize("method", ["standard", "block"])


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@METHODS
@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ({}, ("probabilistic", 64)),
        ({"x": {"draft_proposals": 3}}, ("probabilistic", 3)),
        ({"draft_sample_method": "greedy"}, ("greedy", 0)),
    ],
)
def test_tokens_at_temperature_0_are_those_of_plain_decoding(
    target_dir: Path,
    plain_llm: LLM,
    speculative_config: dict[str, Any],
    method: str,
    extra: dict[str, Any],
    options: tuple[str, int],
) -> None:
    config = speculative_config | {"rejection_sample_method": method} | extra
    runs = []
    for _ in range(2):
        with LLM(target_dir, speculative_config=config, max_num_seqs=8) as llm:
            seen = llm._executor.options
            assert seen["rejection_sample_method"] == method
            assert (seen["draft_sample_method"], seen["draft_proposals"]) == options
            assert tokens(llm, GREEDY) == tokens(plain_llm, GREEDY)
            runs.append(tokens(llm, SAMPLED))
            (output,) = llm.generate([PROMPTS[0]], SAMPLED[0])
            assert output.metrics is not None
            counters = output.metrics.speculative_decoding
            assert counters is not None
            assert counters["num_draft_tokens"] >= counters["num_accepted_draft_tokens"] >= 0
    assert runs[0] == runs[1]
    assert runs[0] != tokens(plain_llm, SAMPLED)


@METHODS
def test_prompt_lookup_is_greedy(target_dir: Path, plain_llm: LLM, method: str) -> None:
    config = PROMPT_LOOKUP | {"rejection_sample_method": method}
    with LLM(target_dir, speculative_config=config, max_num_seqs=8) as llm:
        assert llm._executor.options["draft_sample_method"] == "greedy"
        assert tokens(llm, GREEDY) == tokens(plain_llm, GREEDY)
        for row in tokens(llm, SAMPLED):
            assert len(row) == 24


def test_coupled_is_the_default(llm: LLM) -> None:
    seen = llm._executor.options
    assert seen["rejection_sample_method"] == "coupled"
    assert (seen["draft_sample_method"], seen["draft_proposals"]) == ("probabilistic", 0)
