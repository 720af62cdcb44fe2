# SPDX-License-Identifier: Apache-2.0
"""Block drafters on a GPU: output, drivers, and the CPU's acceptance.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import block_models
from block_golden import CASES, check
from block_models import BlockSpec
from cuda_engines import DRIVERS, MAX_MODEL_LEN, generate, gpu, open_llm, plain_tokens, spec
from paceline import LLM
from tiny_models import make

__all__ = ["gpu"]  # a fixture

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 8,
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_bytes": 64 << 20,
    "show_progress": False,
}
SPECS = {
    "z-lab": BlockSpec("z-lab", window=6, num_layers=3),
    "deepseek": BlockSpec("deepseek", markov_rank=16),
    "speculators": BlockSpec("speculators", window=6, markov_rank=16, draft_vocab_size=64),
}


@pytest.fixture(scope="session")
def target() -> Path:
    """A tiny Qwen3 in bfloat16."""
    return make(replace(spec("qwen3"), num_layers=8))


@pytest.fixture(scope="session")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of each layout."""
    out = tmp_path_factory.mktemp("cuda-blocks")
    return {name: block_models.write(head, target, out / name) for name, head in SPECS.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("layout", SPECS)
def test_output_is_that_of_plain_decoding(
    layout: str, driver: str, temperature: float, target: Path, drafters: dict[str, Path]
) -> None:
    for k in (1, SPECS[layout].max_drafts):
        with open_llm(target, drafters[layout], k, x={"draft_driver": driver}) as llm:
            assert generate(llm, temperature) == plain_tokens(target, temperature)


@pytest.mark.parametrize("layout", SPECS)
def test_k_may_change_every_iteration(layout: str, target: Path, drafters: dict[str, Path]) -> None:
    k = SPECS[layout].max_drafts
    with open_llm(target, drafters[layout], k, x={"adaptive": True}) as llm:
        for _ in range(2):
            assert generate(llm, 1.0) == plain_tokens(target, 1.0)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("layout", ["z-lab", "deepseek"])
def test_rejection_at_temperature_0(
    layout: str, method: str, target: Path, drafters: dict[str, Path]
) -> None:
    config = {
        "model": str(drafters[layout]),
        "num_speculative_tokens": 3,
        "rejection_sample_method": method,
    }
    with LLM(target, speculative_config=config, **SETTINGS) as llm:
        assert generate(llm, 0.0) == plain_tokens(target, 0.0)
        assert all(generate(llm, 1.0))


@pytest.mark.parametrize(
    "case", ["z-lab, causal windows", "speculators dspark, fewer ids", "gemma4"]
)
def test_drafts_are_those_of_the_equations(case: str) -> None:
    check(case, CASES[case][1].max_drafts, device="cuda")
