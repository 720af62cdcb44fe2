# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3-Next on a GPU: gated delta nets, gated attention, the MTP layer.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qwen3_5_mtp
import tiny_models
from cuda_engines import (
    DRIVERS,
    bfloat16_transformers,
    check_a_drafter_agrees_with_itself,
    check_bfloat16_checkpoints,
    check_float32_logits,
    check_logits_do_not_depend_on_chunks,
    check_mtp_changes_no_token,
    generate,
    gpu,
    open_mtp,
    plain_tokens,
    scoring_prompt,
    spec,
)
from tiny_configs import QWEN3_5
from tiny_models import TinyDelta, TinySpec

__all__ = ["bfloat16_transformers", "gpu"]  # fixtures

# The heads that the kernel of chunks is made for, and others, which go row by row.
SHAPES = {
    "published": TinyDelta(key_heads=2, value_heads=4, key_dim=128, value_dim=128),
    "other": TinyDelta(),
}


def shape_of(family: str, shape: str, **changes: Any) -> TinySpec:
    return replace(spec(family, **changes), delta=SHAPES[shape])


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 in bfloat16 with its MTP layer."""
    out = tmp_path_factory.mktemp("cuda-qwen3-5") / "model"
    return qwen3_5_mtp.write(shape_of("qwen3_5", request.param), out)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_layer_changes_no_token(model: Path, driver: str, temperature: float) -> None:
    check_mtp_changes_no_token(model, driver, temperature)


@pytest.mark.parametrize(
    "changes",
    [{"max_num_seqs": 1}, {"max_num_seqs": 13}, {"prefill_chunk_size": 16}, {"block_size": 32}],
    ids=str,
)
def test_nothing_else_changes_a_token(model: Path, changes: dict[str, Any]) -> None:
    with open_mtp(model, 3, **changes) as llm:
        assert generate(llm, 0.8) == plain_tokens(model, 0.8)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_drafter_agrees_with_itself(model: Path, driver: str) -> None:
    check_a_drafter_agrees_with_itself(model, driver)


def test_logits_do_not_depend_on_chunks(model: Path) -> None:
    check_logits_do_not_depend_on_chunks(model, scoring_prompt(2))


@pytest.mark.golden
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", QWEN3_5)
def test_float32_logits_equal_transformers(family: str, shape: str) -> None:
    path = tiny_models.make(shape_of(family, shape, dtype="float32"))
    prompt = scoring_prompt(1)
    check_float32_logits(path, prompt, tiny_models.reference_logits(path, prompt))


@pytest.mark.golden
@pytest.mark.parametrize("family", QWEN3_5)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(
    family: str, bfloat16_transformers: Any
) -> None:
    """As in `test_cuda`; the published heads, whose products are in TF32."""

    def checkpoint(seed: int) -> Path:
        return tiny_models.make(shape_of(family, "published", seed=seed))

    check_bfloat16_checkpoints(family, checkpoint, bfloat16_transformers)
