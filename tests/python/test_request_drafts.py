# SPDX-License-Identifier: Apache-2.0
"""Requests with drafts of their own number: the tokens stay the same, the counters are theirs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, RequestOutput, SamplingParams

PROMPTS = [[1 + i, 2, 3] * (1 + i % 5) for i in range(12)]
K = 4  # of the fixture `llm`


def params(own: int | None, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=index % 2, seed=index, max_tokens=20, n=2, num_speculative_tokens=own
    )


def counted(output: RequestOutput, own: int | None) -> int:
    """Checks that the counters are those of the request's own drafts; returns their number."""
    counters = output.metrics.speculative_decoding
    if own == 0:
        assert counters is None
        return 0
    k = K if own is None else own
    assert counters is not None and counters["num_spec_tokens"] == k
    assert len(counters["acceptance_per_position"]) == k
    assert len(counters["acceptance_histogram"]) == k + 1
    by_length = counters["acceptance_histogram_by_draft_length"]
    assert all(int(length) <= k for length in by_length)
    num_drafted = sum(int(length) * sum(row) for length, row in by_length.items())
    assert counters["num_draft_tokens"] == num_drafted > 0
    assert sum(counters["acceptance_histogram"]) == counters["num_spec_steps"]
    return int(counters["num_draft_tokens"])


def test_a_mix_in_one_batch_gives_the_tokens_of_plain_decoding(llm: LLM, plain_llm: LLM) -> None:
    owns = list(itertools.islice(itertools.cycle([None, 0, 1, 2, 3, K]), len(PROMPTS)))
    expected = plain_llm.generate(PROMPTS, [params(None, i) for i in range(len(owns))])
    before = llm.stats()["speculative_decoding"]["num_draft_tokens"]
    outputs = llm.generate(PROMPTS, [params(own, i) for i, own in enumerate(owns)])
    for output, same in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in same.outputs]
    num_drafted = sum(counted(output, own) for output, own in zip(outputs, owns, strict=True))
    after = llm.stats()["speculative_decoding"]["num_draft_tokens"]
    assert after - before == num_drafted


def test_an_engine_that_chooses_gives_the_tokens_of_plain_decoding(
    target_dir: Path, plain_llm: LLM, speculative_config: dict[str, Any]
) -> None:
    config = speculative_config | {"x": {"adaptive": True}}
    with LLM(target_dir, speculative_config=config, max_num_seqs=8, device="cpu") as llm:
        prompts, wanted = PROMPTS[:4], [params(None, i) for i in range(4)]
        outputs, expected = llm.generate(prompts, wanted), plain_llm.generate(prompts, wanted)
        choice = llm.stats()["speculative_decoding"]["adaptive"]
    for output, same in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in same.outputs]
    assert choice["num_drafts"] in (0, 1, 2, K) and len(choice["acceptance"]) == K
    assert [of["num_drafts"] for of in choice["by_num_drafts"]] == [0, 1, 2, K]
    assert sum(of["time_share"] for of in choice["by_num_drafts"]) == pytest.approx(1)
    assert {cost["num_drafts"] for cost in choice["costs"]} <= {0, 1, 2, K}
    assert all(cost["ms"] > 0 for cost in choice["costs"])


def test_more_than_the_engine_has_is_refused(llm: LLM, plain_llm: LLM) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is 5; allowed: 0 to 4, the num_"):
        llm.generate(PROMPTS[0], params(5, 0))
    with pytest.raises(ValueError, match="num_speculative_tokens is 1, but there is no drafter"):
        plain_llm.generate(PROMPTS[0], params(1, 0))
    plain_llm.generate(PROMPTS[0], params(0, 0))
    with pytest.raises(ValueError, match="num_speculative_tokens is 17; allowed: an integer from"):
        params(17, 0)
    with pytest.raises(ValueError, match=r"num_speculative_tokens is True \(bool\); allowed"):
        params(True, 0)


@pytest.mark.parametrize("own", [None, 2, 0])
def test_how_each_token_came(own: int | None, llm: LLM) -> None:
    asked = SamplingParams(
        temperature=1.0,
        seed=5,
        max_tokens=60,
        ignore_eos=True,
        num_speculative_tokens=own,
        return_token_sources=True,
    )
    chunks = list(llm.stream(PROMPTS[0], asked))
    output = chunks[-1].output
    assert output is not None
    sources = output.outputs[0].token_sources
    assert sources == [source for chunk in chunks for source in chunk.token_sources]
    assert sources is not None and len(sources) == 60 and sources[0] == "plain"
    if own == 0:
        assert set(sources) == {"plain"}
        return
    counters = output.metrics.speculative_decoding
    assert counters is not None
    assert sources.count("accepted") == counters["num_accepted_draft_tokens"]
    # From the histogram: windows that were accepted whole, and those that were not.
    whole = sum(row[-1] for row in counters["acceptance_histogram_by_draft_length"].values())
    # The last window may end with a draft.
    assert 0 <= whole - sources.count("bonus") <= (sources[-1] == "accepted")
    assert sources.count("corrected") == counters["num_spec_steps"] - whole
    assert sources.count("bonus") > 0 and sources.count("corrected") > 0


def test_sources_end_where_the_tokens_end(llm: LLM, plain_llm: LLM) -> None:
    for one in (llm, plain_llm):
        params = [
            SamplingParams(n=2, max_tokens=5 + i, seed=i, return_token_sources=True)
            for i in range(len(PROMPTS))
        ]
        for output in one.generate(PROMPTS, params):
            for completion in output.outputs:
                assert completion.token_sources is not None
                assert len(completion.token_sources) == len(completion.token_ids)
        (output,) = one.generate(PROMPTS[0], SamplingParams(max_tokens=5))
        assert output.outputs[0].token_sources is None


def test_without_drafts_the_drafter_does_not_run(
    target_dir: Path, speculative_config: dict[str, Any]
) -> None:
    # With "standard", tokens depend on the drafts, and so on the drafter's KV: what it has not
    # followed must not be taken over.
    config = speculative_config | {"rejection_sample_method": "standard"}
    first = SamplingParams(seed=1, max_tokens=60, ignore_eos=True, num_speculative_tokens=0)
    then = SamplingParams(seed=2, max_tokens=40, ignore_eos=True)
    outputs = []
    for is_caching in (True, False):
        with LLM(target_dir, speculative_config=config, enable_prefix_caching=is_caching) as llm:
            (plain,) = llm.generate(list(range(5, 45)), first)
            prompt = plain.prompt_token_ids + plain.outputs[0].token_ids
            (output,) = llm.generate(prompt, then)
            outputs.append(output)
    hit, miss = outputs
    assert hit.num_cached_tokens == 32 and miss.num_cached_tokens == 0
    assert hit.outputs == miss.outputs
    assert hit.metrics.speculative_decoding == miss.metrics.speculative_decoding
