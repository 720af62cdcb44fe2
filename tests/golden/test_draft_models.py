# SPDX-License-Identifier: Apache-2.0
"""Draft models of GPT-OSS against transformers: every iteration of a run, at temperature 0.

`drafter_golden` says how runs are compared. A draft model drafts its own greedy continuation.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_golden
import tiny_models
from drafter_golden import Sequences, check_run, greedy_sequences
from eagle_reference import Draft, TargetReference
from quantized_models import quantize
from tiny_models import TinySpec

pytestmark = pytest.mark.golden

K = 3
LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40

TARGET = TinySpec("gpt_oss", seed=21, num_experts=16, num_layers=4, quantization="mxfp4")
DRAFTERS = {
    # As 20B drafts for 120B: fewer layers and experts, the same width.
    "a mixture": TinySpec("gpt_oss", seed=22, num_experts=8, quantization="mxfp4"),
    "a dense model": TinySpec("llama", seed=23, kv_heads=4),
}


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-draft-models-"))


@functools.cache
def target_reference() -> TargetReference:
    return TargetReference(tiny_models.make(TARGET))


@functools.cache
def sequences() -> Sequences:
    return greedy_sequences(TARGET, target_reference().greedy, longest_prompt=30)


class DraftModelReference:
    """A draft model in transformers, float64, without a cache."""

    def __init__(self, directory: Path) -> None:
        self.target = target_reference()
        self.model = TargetReference(directory)

    def draft(self, tokens: Sequence[int], k: int, states: Any) -> list[Draft]:
        """Drafts k tokens greedily; the target's states are not used."""
        known, drafts = list(tokens), []
        for _ in range(k):
            last = self.model.states(known).logits[-1]
            top = last.topk(2).values
            margin = float((top[0] - top[1]) / last.abs().max())
            drafts.append(Draft(int(last.argmax()), last, margin))
            known.append(drafts[-1].token)
        return drafts


@functools.cache
def trained(name: str) -> Path:
    """A drafter that is right about every other time, after a second on the target's text."""
    from transformers import AutoModelForCausalLM

    spec = DRAFTERS[name]
    original = tiny_models.make(replace(spec, quantization=None))
    model: Any = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(3):
        for prompt, continuation in sequences():
            ids = torch.tensor([[*prompt, *continuation]])
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    path = tiny_models.copy_checkpoint(tiny_models.make(spec), scratch() / name.replace(" ", "-"))
    tensors = {key: value.detach() for key, value in model.state_dict().items()}
    if spec.quantization is not None:
        tensors = quantize(tensors, spec.quantization)
    tiny_models.save_tensors(path, tensors)
    return path


def run(path: Path, **engine: Any) -> tuple[list[list[int]], list[list[int]]]:
    config = {"model": str(path), "num_speculative_tokens": K}
    return drafter_golden.run(TARGET, sequences(), config, **engine)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_iteration_equals_the_reference(name: str) -> None:
    path = trained(name)
    tokens, emitted = run(path)
    reference = DraftModelReference(path)
    check_run(reference, sequences(), tokens, emitted, K, LEAST_MARGIN, LEAST_COMPARED)
    # Neither chunks nor batches change a draft.
    assert run(path, prefill_chunk_size=7, block_size=5, max_num_seqs=2) == (tokens, emitted)


def test_a_mixture_that_drafts_for_itself_is_always_right() -> None:
    tokens, emitted = run(tiny_models.make(TARGET))
    assert tokens == [list(continuation) for _, continuation in sequences()]
    for count in emitted:
        assert set(count[:-1]) == {K + 1}
