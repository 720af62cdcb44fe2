# SPDX-License-Identifier: Apache-2.0
"""Block drafters, DFlash and DSpark: the output is that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from block_checks import SPECS, TARGET, drafter, greedy, opened
from drafter_checks import (
    ENGINE,
    PROMPTS,
    check_always_right,
    check_both_ways,
    context_free_pair,
    outputs,
    plain_outputs,
)
from errors import raises
from paceline import LLM, SamplingParams
from paceline._core import ModelFileError
from tiny_models import edit_tensors, load_tensors, make


@pytest.mark.parametrize(
    "x",
    [
        {},
        {"draft_driver": "replay", "adaptive": True},
        {"draft_driver": "while", "draft_stop_threshold": 0.02},
        {"draft_driver": "while", "draft_stop_threshold": 0.5, "adaptive": True},
    ],
)
@pytest.mark.parametrize("layout", SPECS)
def test_output_is_that_of_plain_decoding(layout: str, x: dict[str, Any], tmp_path: Path) -> None:
    spec = SPECS[layout]
    config: dict[str, Any] = {
        "method": spec.method,
        "model": str(drafter(layout, tmp_path)),
        "num_speculative_tokens": spec.max_drafts,
        "x": x,
    }
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == spec.method
        for _ in range(2):  # the second time from the prefix cache
            assert outputs(llm) == plain_outputs(TARGET)
        assert llm._executor.check_integrity() == ""


@pytest.mark.parametrize("layout", [layout for layout in SPECS if not SPECS[layout].taps])
def test_a_drafter_of_the_same_law_is_always_right(layout: str, tmp_path: Path) -> None:
    """A draft is right if, and only if, it was drawn with the noise of its own position.

    A selector draws from a few candidates only, so none has the target's law.
    """
    spec = SPECS[layout]
    spec = replace(spec, draft_vocab_size=None)
    target, path = context_free_pair(make(TARGET), spec, tmp_path)
    if spec.markov_rank:
        edit_tensors(path, lambda tensors: tensors["markov_head.markov_w2.weight"].zero_())
    check_always_right(target, path, spec)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(
    ("layout", "threshold"),
    [
        ("deepseek", 0.0),
        ("speculators", 0.0),
        ("gated", 0.0),
        ("gated", 0.5),
        ("rnn", 0.0),
        ("rnn", 0.5),
        ("dflash2", 0.0),
    ],
)
def test_rejection_gives_the_distribution_of_the_target(
    layout: str, threshold: float, method: str, tmp_path: Path
) -> None:
    """Each token of the output has the target's one distribution, by a chi-squared test.

    The drafter's distribution differs, and with the Markov head it depends on the token before.
    With a threshold so does the number of drafts: after half of the tokens no draft follows.
    """
    # With few candidates, few drafts would be accepted.
    spec = replace(SPECS[layout], confidence="token" if threshold else "", selector_top=32)
    target, path = context_free_pair(make(TARGET), spec, tmp_path)
    if threshold:
        edit_tensors(path, read_tokens_alone)
    config = {
        "model": str(path),
        "num_speculative_tokens": spec.max_drafts,
        "rejection_sample_method": method,
        "x": {"draft_driver": "while", "draft_stop_threshold": threshold},
    }
    params = [SamplingParams(temperature=1.0, max_tokens=250, seed=seed) for seed in range(24)]
    with LLM(target, speculative_config=config, **(ENGINE | {"max_num_seqs": 8})) as llm:
        outputs = llm.generate([[5, 17]] * len(params), params)
        distribution = torch.tensor(llm.logits([5, 17])[-1]).double().softmax(0)
        acceptance = llm.stats()["speculative_decoding"]["draft_acceptance_rate"]
    tokens = torch.tensor([token for output in outputs for token in output.outputs[0].token_ids])
    expected = distribution * len(tokens)
    seen = torch.bincount(tokens, minlength=len(distribution)).double()
    assert expected.min() > 5  # as the test of chi squared needs
    excess = float((((seen - expected) ** 2) / expected).sum()) - (len(expected) - 1)
    # The standard deviation of chi squared is the root of twice its degrees of freedom.
    assert abs(excess) < 4 * (2 * (len(expected) - 1)) ** 0.5
    assert 0.05 < acceptance < 0.95


def read_tokens_alone(tensors: dict[str, torch.Tensor]) -> None:
    """Makes a confidence head read the token before a draft and nothing else."""
    rank = tensors["markov_head.markov_w1.weight"].shape[1]
    weight = tensors["confidence_head.proj.weight"]
    weight[:, :-rank] = 0.0
    weight[:, -rank:] *= 10.0
    tensors["confidence_head.proj.bias"].zero_()


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("layout", ["z-lab", "deepseek", "gated", "rnn", "dflash2"])
def test_rejection_at_temperature_0(layout: str, method: str, tmp_path: Path) -> None:
    config = {
        "model": str(drafter(layout, tmp_path)),
        "num_speculative_tokens": 3,
        "rejection_sample_method": method,
    }
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy())]
        sampled = llm.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=8, seed=1))
        assert llm._executor.check_integrity() == ""
    assert got == plain_outputs(TARGET)[: len(PROMPTS)]
    assert all(len(output.outputs[0].token_ids) == 8 for output in sampled)


@pytest.mark.parametrize("layout", SPECS)
def test_a_request_with_fewer_drafts_beside_others(layout: str, tmp_path: Path) -> None:
    # Blocks of the cache are reserved for a request's own number of drafts, and its drafts do not
    # depend on the others.
    most = SPECS[layout].max_drafts
    config = {
        "model": str(drafter(layout, tmp_path)),
        "num_speculative_tokens": most,
        "rejection_sample_method": "standard",
    }
    params = [
        SamplingParams(temperature=1.0, max_tokens=40, seed=k, num_speculative_tokens=k)
        for k in (1, 0, most)
    ]
    engine = ENGINE | {"block_size": 1, "enable_prefix_caching": False}
    with LLM(make(TARGET), speculative_config=config, **engine) as llm:
        alone = [llm.generate([p], s)[0] for p, s in zip(PROMPTS, params, strict=False)]
        beside = llm.generate(PROMPTS[: len(params)], params)
        assert llm._executor.check_integrity() == ""
    assert [o.outputs[0].token_ids for o in beside] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        ("speculators", {}),
        ("rnn", {}),
        ("speculators", {"markov_type": "gated", "confidence": "token"}),
        ("rnn", {"markov_type": "gated", "confidence": "token"}),
        ("dflash2", {}),
        ("dflash2 speculators", {}),
        ("assistant", {}),
    ],
)
def test_converted_pair(layout: str, heads: dict[str, str], tmp_path: Path) -> None:
    check_both_ways(make(TARGET), drafter(layout, tmp_path, **heads), tmp_path / "converted")


# ---- copies of the target's tables -------------------------------------------------------------


def test_copies_are_shared_and_other_tables_are_used(tmp_path: Path) -> None:
    path = drafter("deepseek", tmp_path)
    shared = opened(path)
    owns = ("owns_embedding", "owns_lm_head")
    assert [shared.config["drafter"][key] for key in owns] == [False, False]
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].mul_(-1.0))
    own = opened(path)
    assert [own.config["drafter"][key] for key in owns] == [False, True]
    assert {t.spec.name for t in own.tensors} - {t.spec.name for t in shared.tensors} == {
        "lm_head.weight"
    }
    edit_tensors(path, lambda tensors: tensors["embed_tokens.weight"].add_(1.0))
    assert [opened(path).config["drafter"][key] for key in owns] == [True, True]
    check_both_ways(make(TARGET), path, tmp_path / "converted")


def test_weight_updates_with_copies(tmp_path: Path) -> None:
    path = drafter("deepseek", tmp_path)
    tensors = load_tensors(path)
    config = {"model": str(path), "num_speculative_tokens": 3}
    target = load_tensors(make(TARGET))
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        llm.update_weights(target, draft_state_dict=tensors)
        assert outputs(llm) == plain_outputs(TARGET)
        tensors["lm_head.weight"] = -tensors["lm_head.weight"]
        with raises(ModelFileError, "draft_state_dict", "drafter"):
            llm.update_weights(target, draft_state_dict=tensors)
