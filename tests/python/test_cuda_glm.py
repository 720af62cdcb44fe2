# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash and DeepSeek-V3 on a GPU: latent attention, sigmoid routers, the MTP layer.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mtp_models
import tiny_models
from cuda_engines import (
    DRIVERS,
    PROMPTS,
    bfloat16_transformers,
    check_a_drafter_agrees_with_itself,
    check_bfloat16_checkpoints,
    check_float32_logits,
    check_logits_do_not_depend_on_chunks,
    check_mtp_changes_no_token,
    generate,
    gpu,
    open_mtp,
    params_of,
    plain_tokens,
    scoring_prompt,
    spec,
)
from tiny_configs import DEEPSEEK
from tiny_models import TinyLatent, TinySpec

__all__ = ["bfloat16_transformers", "gpu"]  # fixtures

# The entry that the fast kernels are made for, with the heads of GLM-4.7-Flash; and another.
SHAPES = {
    "published": (20, TinyLatent(q_rank=96, kv_rank=512, nope=192, rope=64, v=256)),
    "other": (4, TinyLatent(groups=4, top_groups=2)),
}


def shape_of(family: str, shape: str, **changes: Any) -> TinySpec:
    heads, latent = SHAPES[shape]
    return replace(spec(family, **changes), heads=heads, latent=latent)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM-4.7-Flash in bfloat16 with its MTP layer."""
    out = tmp_path_factory.mktemp("cuda-glm") / "model"
    return mtp_models.write(shape_of("glm4_moe_lite", request.param), out)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_layer_changes_no_token(model: Path, driver: str, temperature: float) -> None:
    check_mtp_changes_no_token(model, driver, temperature)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 13},
        {"prefill_chunk_size": 16},
        {"block_size": 32},
        {"x": {"draft_feedback": "raw"}},
    ],
    ids=str,
)
def test_nothing_else_changes_a_token(model: Path, changes: dict[str, Any]) -> None:
    with open_mtp(model, 3, **changes) as llm:
        assert generate(llm, 0.8) == plain_tokens(model, 0.8)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_drafter_agrees_with_itself(model: Path, driver: str) -> None:
    check_a_drafter_agrees_with_itself(model, driver)


def test_the_gpu_drafts_what_the_cpu_drafts(model: Path) -> None:
    """In float32 both accept the same drafts, but for near ties."""
    accepted = []
    for device in ("cpu", "cuda"):
        with open_mtp(model, 4, device=device, dtype="float32") as llm:
            outputs = llm.generate(PROMPTS, params_of(0.0))
        counters = [output.metrics.speculative_decoding for output in outputs]
        accepted.append([c["acceptance_histogram"] for c in counters if c is not None])
    same = sum(a == b for a, b in zip(*accepted, strict=True))
    assert same >= len(PROMPTS) - 3


def test_logits_do_not_depend_on_chunks(model: Path) -> None:
    check_logits_do_not_depend_on_chunks(model, scoring_prompt(2))


@pytest.mark.golden
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", DEEPSEEK)
def test_float32_logits_equal_transformers(family: str, shape: str) -> None:
    path = tiny_models.make(shape_of(family, shape, dtype="float32"))
    prompt = scoring_prompt(1)
    check_float32_logits(path, prompt, tiny_models.reference_logits(path, prompt))


@pytest.mark.golden
@pytest.mark.parametrize("family", DEEPSEEK)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(
    family: str, bfloat16_transformers: Any
) -> None:
    """As in `test_cuda`; rows that choose other experts than in float32 have the largest errors."""

    def checkpoint(seed: int) -> Path:
        return tiny_models.make(shape_of(family, "published", seed=seed))

    check_bfloat16_checkpoints(family, checkpoint, bfloat16_transformers)
