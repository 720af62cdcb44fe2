# SPDX-License-Identifier: Apache-2.0
"""The training form of the EAGLE-3 draft head equals the reference that drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_reference import EagleReference, TargetReference
from paceline.demo import find_demo

NUM_TOKENS, NUM_STEPS = 24, 3


def test_training_drafts_as_inference_does(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    eagle3_model = pytest.importorskip("eagle3_model")
    target_dir = find_demo("draft_model").target
    reference_target = TargetReference(target_dir)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(4096, generator=generator)[:100].sort().values
    config = eagle3_model.DraftHeadConfig(
        target_hidden=256, hidden=256, intermediate=96, head_dim=32, draft_vocab=100
    )
    torch.manual_seed(0)
    draft_head = eagle3_model.DraftHead(config, ids)
    with torch.no_grad():
        for parameter in draft_head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            rounded = (parameter + 0.05 * noise).bfloat16()
            parameter.copy_(rounded)
    eagle3_model.save_head(draft_head, tmp_path / "head")
    reference = EagleReference(tmp_path / "head", reference_target)

    tokens = torch.randint(4096, (NUM_TOKENS,), generator=generator)
    states = reference_target.states(tokens.tolist())
    streams = torch.cat([states.streams[k] for k in eagle3_model.AUX_LAYERS], -1)
    length = NUM_TOKENS - NUM_STEPS
    draft_head = draft_head.double()
    hidden = draft_head.first_hidden(streams[None, :length])
    keys = eagle3_model.DraftKeys()
    trained = []
    with torch.no_grad():
        for step in range(NUM_STEPS):
            embedding = reference_target.embedding[tokens[1 + step : 1 + step + length]]
            hidden = draft_head(embedding[None], hidden, step, keys)
            trained.append(draft_head.logits(hidden)[0])

    first = reference.first_inputs(reference.hidden_of(states))
    for position in (0, 7, length - 1):
        inputs = first[: position + 1]
        for step in range(NUM_STEPS):
            logits, feedback = reference.run(tokens[1 : position + 2 + step], inputs)
            torch.testing.assert_close(
                trained[step][position], logits[-1], rtol=1e-4, atol=1e-4, check_dtype=False
            )
            inputs = torch.cat([inputs, feedback[-1:]])
