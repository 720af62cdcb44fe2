# SPDX-License-Identifier: Apache-2.0
"""Hidden rows of `block_reference` for Muse-Glimmer's assistant against transformers' own class.

`test_block_drafts.py` compares the runtime with the reference.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
)

import block_models
import tiny_models
from block_golden import QWEN3
from block_models import BlockSpec
from block_reference import BlockReference
from drafter_golden import target_reference

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("window", [3, 5, 8, 40])
@pytest.mark.parametrize("num_known", [1, 4, 21])
def test_rows_are_those_of_transformers(window: int, num_known: int, tmp_path: Path) -> None:
    spec = BlockSpec("assistant", window=window, all_slide=True, block_size=6)
    path = block_models.write(spec, tiny_models.make(QWEN3), tmp_path / "drafter")
    target = target_reference(QWEN3)
    reference = BlockReference(spec, path, target)
    model = MuseGlimmerAssistantModel.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    tokens = [(7 * i + 3) % QWEN3.vocab_size for i in range(num_known)]
    states = target.states(tokens)
    newest, mask = 5, reference.mask_token
    rows = target.embedding.double()[torch.tensor([newest] + [mask] * (spec.block_size - 1))]
    taps = torch.cat([states.streams[i] for i in spec.aux_layers], dim=-1).double()
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(num_known)
    with torch.no_grad():
        expected = model(
            noise_embeds=rows[None], context_hidden_states=taps[None], past_key_values=cache
        ).last_hidden_state[0]
        got = reference.block(reference.context(states), newest, spec.block_size - 1)
    # transformers computes rotary angles in float32.
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
