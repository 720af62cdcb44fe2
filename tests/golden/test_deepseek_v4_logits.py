# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 against transformers, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepseek_v4_models import V4Spec, make, make_saved, reference_logits
from logits_golden import (
    assert_close,
    check_that_a_fact_shows,
    check_that_a_tensor_shows,
    logits_of,
)

pytestmark = pytest.mark.golden

SLIDING = V4Spec(ratios=(0, 0, 0), hash_layers=1)
MIXED = V4Spec()


def prompt_of(spec: V4Spec, length: int) -> list[int]:
    generator = np.random.default_rng(spec.seed)
    return [int(token) for token in generator.integers(0, spec.vocab_size, length)]


# Layers, and the length of the prompt.
CASES: dict[str, tuple[V4Spec, int]] = {
    "windows alone": (SLIDING, 45),
    "windows alone, experts by score": (replace(SLIDING, seed=1, hash_layers=0), 45),
    "entries of 4": (V4Spec(seed=2, ratios=(4, 4), index_top_k=100), 45),
    "the indexer chooses": (V4Spec(seed=3, ratios=(4, 4), index_top_k=2), 45),
    "entries of 8": (V4Spec(seed=4, ratios=(128, 128)), 45),
    "all kinds": (replace(MIXED, seed=5), 150),
    "one iteration of sinkhorn": (replace(MIXED, seed=6, sinkhorn=1), 45),
    # Three entries of 128 tokens, a window of 128, and more entries of 4 than are chosen.
    "published ratios": (
        V4Spec(seed=7, ratios=(0, 4, 128), hca=128, window=128, index_top_k=16),
        3 * 128 + 21,
    ),
    "fp8 and fp4": (replace(MIXED, seed=8, has_scales=True), 45),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    spec, length = CASES[case]
    prompt = prompt_of(spec, length)
    assert_close(logits_of(make(spec), prompt), reference_logits(spec, prompt))


def test_files_of_transformers_have_the_same_logits() -> None:
    spec = replace(MIXED, seed=5)
    prompt = prompt_of(spec, 60)
    np.testing.assert_array_equal(
        logits_of(make_saved(spec), prompt), logits_of(make(spec), prompt)
    )


def test_every_way_to_a_position_gives_its_bits() -> None:
    spec = replace(MIXED, seed=5)
    prompt = prompt_of(spec, 100)
    whole = logits_of(make(spec), prompt)
    for chunk in (1, 3, 50):
        np.testing.assert_array_equal(
            logits_of(make(spec), prompt, prefill_chunk_size=chunk), whole
        )


# ---- one wrong fact at a time ------------------------------------------------------------------


def _set(part: str, inner: str = "", **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            values = layer[part]
            if inner and inner not in values:
                continue
            (values[inner] if inner else values).update(changes)

    return change


def _set_streams(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["streams"].update(changes)


WRONG_FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "rope of the other layers": _set("attention", rope=0),
    "window": _set("attention", window=7),
    "top-k of the indexer": _set("attention", "indexer", top_k=4),
    "limit": _set("mlp", limit=5.0),
    "limit of the shared expert": _set("mlp", "shared", limit=5.0),
    "weight scale": _set("mlp", weight_scale=1.0),
    "weights not normalised": _set("mlp", normalises_weights=False),
    "sinkhorn": _set_streams(sinkhorn_iterations=1),
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(MIXED, seed=5)
    prompt = prompt_of(spec, 60)
    expected = reference_logits(spec, prompt)
    check_that_a_fact_shows(make(spec), prompt, expected, WRONG_FACTS[fact], monkeypatch)


def _swap_streams(name: str, t: torch.Tensor) -> torch.Tensor:
    """The factors of two residual streams of what the MLP reads, exchanged."""
    if not name.endswith("hc_ffn_base"):
        return t
    return torch.cat([t[[1, 0]], t[2:]])


WRONG_TENSORS: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "two streams": _swap_streams,
    "sinks": lambda name, t: t + 1 if name.endswith("attn_sink") else t,
    "position bias": lambda name, t: t.roll(1, 0) if name.endswith("compressor.ape") else t,
    "groups of o": lambda name, t: t.roll(16, 0) if name.endswith("wo_a.weight") else t,
    "weights of the indexer": lambda name, t: -t if "weights_proj" in name else t,
    "correction": lambda name, t: t * 0 if name.endswith("gate.bias") else t,
    "experts by token": lambda name, t: t.roll(1, 0) if name.endswith("tid2eid") else t,
}


@pytest.mark.parametrize("fact", WRONG_TENSORS)
def test_a_wrong_tensor_shows(fact: str, tmp_path: Path) -> None:
    spec = replace(MIXED, seed=5)
    prompt = prompt_of(spec, 60)
    expected = reference_logits(spec, prompt)
    check_that_a_tensor_shows(make(spec), prompt, expected, WRONG_TENSORS[fact], tmp_path)
