# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash and DeepSeek-V3 on a GPU: latent attention, sigmoid routers, the MTP layer.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mtp_models
import tiny_models
from paceline import LLM
from test_cuda import (
    DRIVERS,
    MAX_MODEL_LEN,
    PROMPTS,
    bfloat16_transformers,
    generate,
    gpu,
    open_llm,
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


def open_mtp(path: Path, k: int, *, x: dict[str, Any] | None = None, **changes: Any) -> LLM:
    """An LLM on the GPU that drafts with its MTP layer."""
    config = {"method": "mtp", "num_speculative_tokens": k, "x": x or {}}
    settings = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 64 << 20}
    settings |= {"device": "cuda", "show_progress": False} | changes
    return LLM(path, speculative_config=config, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_layer_changes_no_token(model: Path, driver: str, temperature: float) -> None:
    for k in (3, 16):
        with open_mtp(model, k, x={"draft_driver": driver}) as llm:
            assert generate(llm, temperature) == plain_tokens(model, temperature)


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
    with open_llm(model, model, x={"draft_driver": driver}) as llm:
        outputs = llm.generate(PROMPTS, params_of(1.0))
    for output in outputs:
        counters = output.metrics.speculative_decoding
        assert counters is not None
        assert counters["num_accepted_draft_tokens"] == counters["num_draft_tokens"] > 0


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
    prompt = scoring_prompt(2)
    with open_llm(model) as llm:
        whole = llm.logits(prompt)
    for chunk in (1, 16, 63):
        with open_llm(model, prefill_chunk_size=chunk) as llm:
            np.testing.assert_array_equal(llm.logits(prompt), whole)


@pytest.mark.golden
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", DEEPSEEK)
def test_float32_logits_equal_transformers(family: str, shape: str) -> None:
    path = tiny_models.make(shape_of(family, shape, dtype="float32"))
    prompt = scoring_prompt(1)
    expected = tiny_models.reference_logits(path, prompt)
    with open_llm(path, dtype="float32") as llm:
        seen = llm.logits(prompt)
    assert np.isfinite(seen).all()
    assert np.abs(seen - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.mark.golden
@pytest.mark.parametrize("family", DEEPSEEK)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(
    family: str, bfloat16_transformers: Any
) -> None:
    """As in `test_cuda`; rows that choose other experts than in float32 have the largest errors."""
    ours, theirs = [], []
    for seed in range(3, 7):
        path = tiny_models.make(shape_of(family, "published", seed=seed))
        prompt = scoring_prompt(seed)
        with open_llm(path, device="cpu", dtype="float32") as llm:
            expected = llm.logits(prompt)
        with open_llm(path) as llm:
            seen = llm.logits(prompt)
        assert np.isfinite(seen).all()
        ours.append(seen - expected)
        theirs.append(bfloat16_transformers(path, prompt) - expected)
    our_rms, their_rms = (float(np.sqrt(np.mean(np.square(x)))) for x in (ours, theirs))
    print(f"{family}: RMS error {our_rms:.4g}, of transformers {their_rms:.4g}")
    assert our_rms <= 1.25 * their_rms
