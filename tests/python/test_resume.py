# SPDX-License-Identifier: Apache-2.0
"""A request that goes on after output of an earlier run: the tokens are those of one run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import _core
from paceline.demo import find_demo
from paceline.llm import LLM

PROMPT = list(range(40, 75))
NUM_TOKENS = 48
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "penalties": {
        "temperature": 1.0,
        "seed": 4,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    # A stop token that comes early where it is allowed.
    "stops": {"temperature": 1.0, "seed": 5, "min_tokens": 30, "stop_token_ids": list(range(8))},
    "logprobs": {"temperature": 0.7, "seed": 6, "logprobs": 2, "bad_words": [[199, 259], [222]]},
}


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def engine(request: pytest.FixtureRequest) -> Iterator[_core.Executor]:
    demo = find_demo(request.param)
    with LLM(
        demo.target,
        speculative_config=demo.speculative_config(),
        max_num_seqs=4,
        max_model_len=256,
        device="cpu",
    ) as llm:
        yield llm._executor


def run(engine: _core.Executor, prompt: list[int], **sampling: Any) -> list[_core.RequestEvent]:
    """All events of a request."""
    assert engine.add_request(prompt, **{"max_tokens": NUM_TOKENS} | sampling) is not None
    events: list[_core.RequestEvent] = []
    while not events or events[-1].finish_reason is None:
        events += engine.poll(timeout_ms=1000)
    return events


def tokens_of(events: list[_core.RequestEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("name", SAMPLING)
def test_the_rest_is_that_of_one_run(engine: _core.Executor, name: str) -> None:
    whole = run(engine, PROMPT, **SAMPLING[name])
    tokens = tokens_of(whole)
    logprobs = [entry for event in whole for entry in event.logprobs]
    assert len(tokens) > 4
    for num_known in (1, 2, *random.Random(name).sample(range(3, len(tokens)), 2), len(tokens) - 1):
        rest = run(
            engine,
            PROMPT + tokens[:num_known],
            num_resumed_tokens=num_known,
            **SAMPLING[name],
        )
        assert tokens_of(rest) == tokens[num_known:]
        assert [entry for event in rest for entry in event.logprobs] == logprobs[num_known:]
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].num_cached_tokens <= len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"num_resumed_tokens": -1}, "0 to 34"),
        ({"num_resumed_tokens": 35}, "0 to 34"),
        ({"num_resumed_tokens": 20, "max_tokens": 20}, "0 to 19"),
        ({"num_resumed_tokens": 1, "num_samples": 2}, "several samples"),
        ({"num_resumed_tokens": 1, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"num_resumed_tokens": 1, "score_prompt": True}, "score_prompt"),
    ],
)
def test_impossible_resumptions_are_refused(
    engine: _core.Executor, sampling: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"num_resumed_tokens is .*{allowed}"):
        engine.add_request(PROMPT, **{"max_tokens": NUM_TOKENS} | sampling)
