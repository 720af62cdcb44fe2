# SPDX-License-Identifier: Apache-2.0
"""Logprobs against transformers, in float32, on tiny random checkpoints, with a drafter.

A logprob is a difference of two numbers of the size of logits, so the tolerance is twice that of
test_logits.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.outputs import TokenLogprobs
from tiny_models import TinySpec, describe, make, perturbed_copy, reference_logits

RELATIVE_TOLERANCE = 4e-4
NUM_BEST = 5

pytestmark = pytest.mark.golden

SPECS = [
    TinySpec("llama", seed=1),
    TinySpec("qwen3", seed=1),
    TinySpec("gemma3", seed=1),
    TinySpec("gemma4", seed=1, logit_soft_cap=30.0),
]


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_prompts_and_outputs(spec: TinySpec, tmp_path: Path) -> None:
    target = make(spec)
    draft = perturbed_copy(target, tmp_path / "draft", noise=0.03, seed=1)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    prompts = [[3, 7, 11, 7, 3], [(5 * i) % 100 + 1 for i in range(80)]]
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        repetition_penalty=1.2,
        max_tokens=40,
        seed=3,
        ignore_eos=True,
        logprobs=NUM_BEST,
        prompt_logprobs=NUM_BEST,
    )
    with LLM(
        target, speculative_config=config, device="cpu", max_num_seqs=2, show_progress=False
    ) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None and output.prompt_logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == 40
        assert output.prompt_logprobs[0] is None
        ids = [*prompt, *completion.token_ids]
        logits = torch.from_numpy(reference_logits(target, ids)).double()
        positions = [*output.prompt_logprobs[1:], *completion.logprobs]
        tolerance = RELATIVE_TOLERANCE * float(logits.abs().max())
        reference = torch.log_softmax(logits, dim=-1)
        for row, (token, position) in enumerate(zip(ids[1:], positions, strict=True)):
            assert position is not None
            check_position(position, token, reference[row], tolerance)


def check_position(
    position: TokenLogprobs, token: int, reference: torch.Tensor, tolerance: float
) -> None:
    """Compares one position; logprobs that differ by less than the tolerance may swap ranks."""
    assert next(iter(position)) == token
    for other, entry in position.items():
        assert entry.logprob == pytest.approx(reference[other].item(), abs=tolerance)
        least = 1 + int((reference > reference[other] + 2 * tolerance).sum())
        most = 1 + int((reference > reference[other] - 2 * tolerance).sum())
        assert least <= entry.rank <= most
    best = [entry for entry in position.values() if entry.rank <= NUM_BEST]
    assert sorted(entry.rank for entry in best) == list(range(1, NUM_BEST + 1))
    assert len(position) == NUM_BEST + (position[token].rank > NUM_BEST)
    ordered = sorted(best, key=lambda entry: entry.rank)
    assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(ordered))
