# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup in front of a model: its drafts where it has a match, the model's elsewhere, and
the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StreamChunk
from paceline.speculative_config import SpeculativeConfig
from tiny_models import TinySpec, make, perturbed_copy

ENGINE: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 160, "kv_cache_bytes": 16 << 20, "device": "cpu",
    "show_progress": False,
}  # fmt: skip
K = 4
# Half of them repeat themselves.
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 3, 14, 15], [7, 8] * 6, [11, 12, 13], [21, 22, 23, 24, 25]]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True) for i in range(4)
]
KINDS = ["draft_model", "eagle", "eagle3", "gemma4_mtp", "dflash", "dspark"]


def config_of(drafter: Path, driver: str = "unrolled", **keys: Any) -> dict[str, Any]:
    nested = {"adaptive": False, "draft_driver": driver}
    return {"model": str(drafter), "num_speculative_tokens": K, "x": nested, **keys}


def looked_up(tokens: list[int], low: int, high: int) -> list[int]:
    """What follows the latest earlier occurrence of the longest n-gram at the end."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return tokens[end : end + K]
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_each_window_has_the_drafts_of_the_lookup_or_of_the_model(
    kind: str, pair_of: Callable[[str], tuple[Path, Path]]
) -> None:
    target, drafter = pair_of(kind)
    with LLM(target, **ENGINE) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, PARAMS)]
    num_looked_up = num_of_model = 0
    for driver in ("unrolled", "replay", "while", "eager"):
        config = config_of(drafter, driver, prompt_lookup_min=1, prompt_lookup_max=3)
        with LLM(target, speculative_config=config, **ENGINE) as llm:
            known = [list(prompt) for prompt in PROMPTS]
            drafts: list[list[int] | None] = [None] * len(PROMPTS)
            for chunk in llm.stream(PROMPTS, PARAMS):
                i = chunk.index
                left = len(PROMPTS[i]) + 60 - len(known[i])
                if (proposed := drafts[i]) is not None:
                    if proposed:
                        num_looked_up += 1
                        same = [a == b for a, b in zip(proposed, chunk.token_ids, strict=False)]
                        num_accepted = [*same, False].index(False)
                        assert chunk.num_accepted == min(num_accepted, len(chunk.token_ids))
                    else:
                        num_of_model += 1
                    assert chunk.num_drafted == min(len(proposed) or K, left)
                known[i] += chunk.token_ids
                drafts[i] = looked_up(known[i], 1, 3)
            got = [tokens[len(p) :] for tokens, p in zip(known, PROMPTS, strict=True)]
            assert got == expected
            assert llm._executor.check_integrity() == ""
    assert num_looked_up > 20 and num_of_model > 20


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_match_it_is_the_model_alone(
    kind: str, pair_of: Callable[[str], tuple[Path, Path]]
) -> None:
    target, drafter = pair_of(kind)
    found = []
    for keys in ({}, {"prompt_lookup_min": 200, "prompt_lookup_max": 256}):
        config = config_of(drafter, **keys)
        with LLM(target, speculative_config=config, **ENGINE) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            found.append([output.metrics.speculative_decoding for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_draft_model_follows_the_drafts_of_the_lookup(family: str, tmp_path: Path) -> None:
    """Its drafts are what it writes itself after the known tokens, whoever drafted those."""
    target = make(TinySpec(family, seed=3, num_layers=4))
    drafter = perturbed_copy(target, tmp_path / "draft", noise=0.1)
    prompts = [[*prompt, i, 2 * i] for i, prompt in enumerate(PROMPTS * 3)]
    # Low temperatures repeat themselves.
    params = [
        SamplingParams(temperature=i % 3 * 0.1, seed=i, max_tokens=100, ignore_eos=True)
        for i in range(len(prompts))
    ]
    num_looked_up = 0
    windows: list[tuple[list[int], SamplingParams, StreamChunk]] = []
    for driver in ("unrolled", "while"):
        config = config_of(drafter, driver, prompt_lookup_min=1, prompt_lookup_max=2)
        engine = {**ENGINE, "block_size": 4, "prefill_chunk_size": 7}
        with LLM(target, speculative_config=config, **engine) as llm:
            known = [list(prompt) for prompt in prompts]
            for chunk in llm.stream(prompts, params):
                tokens = known[chunk.index]
                if chunk.num_drafted == K and not looked_up(tokens, 1, 2):
                    windows.append((list(tokens), params[chunk.index], chunk))
                elif chunk.num_drafted:
                    num_looked_up += chunk.num_accepted
                tokens += chunk.token_ids
            assert llm._executor.check_integrity() == ""
    prefixes = [tokens for tokens, _, _ in windows]
    params = [replace(of, max_tokens=K) for _, of, _ in windows]
    with LLM(drafter, **ENGINE) as alone:
        drafts = [output.outputs[0].token_ids for output in alone.generate(prefixes, params)]
    for proposed, (_, _, chunk) in zip(drafts, windows, strict=True):
        same = [a == b for a, b in zip(proposed, chunk.token_ids, strict=False)]
        assert chunk.num_accepted == [*same, False].index(False)
    assert len(windows) > 500 and num_looked_up > 15


def test_refusals() -> None:
    for method in ("standard", "block"):
        with pytest.raises(ValueError, match=r"prompt_lookup_max.* is 3.*do not have.*'coupled'"):
            SpeculativeConfig(
                method="eagle3", model="x", num_speculative_tokens=2, prompt_lookup_max=3,
                rejection_sample_method=method,
            )  # fmt: skip


def test_the_defaults_of_one_key_are_the_other() -> None:
    for low, high in ((None, 3), (3, None), (3, 3)):
        config = SpeculativeConfig(
            method="eagle3", model="x", num_speculative_tokens=2, prompt_lookup_min=low,
            prompt_lookup_max=high,
        )  # fmt: skip
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)
