# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash and DeepSeek-V3 against transformers, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logits_golden import (
    assert_close,
    check_that_a_tensor_shows,
    check_that_it_shows,
    logits_of,
    prompt_of,
)
from tiny_configs import DEEPSEEK
from tiny_models import (
    TinyLatent,
    TinySpec,
    copy_checkpoint,
    describe,
    edit_config,
    edit_tensors,
    make,
    reference_logits,
)

pytestmark = pytest.mark.golden

GLM, V3 = (TinySpec(family) for family in DEEPSEEK)
GROUPS = TinyLatent(groups=4, top_groups=2, dense_layers=2)

SPECS = [
    *(replace(spec, seed=seed) for spec in (GLM, V3) for seed in range(2)),
    # Groups of experts; weights that are not normalised; other widths of the shared expert.
    replace(V3, seed=2, latent=GROUPS, num_experts=16, num_layers=4),
    replace(GLM, seed=3, latent=replace(GROUPS, normalises=False, scale=2.5, dense_layers=0)),
    replace(V3, seed=4, latent=replace(GROUPS, top_groups=4, shared=2), top_k=6),
    replace(GLM, seed=5, top_k=1, num_experts=11, latent=TinyLatent(expert_size=24)),
    # Without a rank of q, other sizes of latents and heads, pairs that are halves.
    replace(V3, seed=6, latent=TinyLatent(q_rank=None)),
    replace(GLM, seed=7, heads=5, latent=TinyLatent(q_rank=40, kv_rank=48, nope=10, rope=6, v=28)),
    replace(V3, seed=8, latent=TinyLatent(interleaved=False)),
    # YaRN, whose factor also scales the scores; other spellings and dtypes.
    *(replace(spec, seed=9, rope="yarn") for spec in (GLM, V3)),
    replace(V3, seed=10, rope="yarn", old_spelling=True, shards=3, vocab_size=131),
    *(replace(GLM, seed=11, dtype=dtype) for dtype in ("float16", "bfloat16")),
    replace(GLM, seed=12, tied=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_logits_equal_transformers(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec)
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))


@pytest.mark.parametrize("spec", [GLM, replace(V3, latent=GROUPS)], ids=describe)
def test_every_way_to_a_position_gives_its_bits(spec: TinySpec) -> None:
    path, prompt = make(spec), prompt_of(spec, 150)
    whole = logits_of(path, prompt)
    for chunk in (1, 50):
        np.testing.assert_array_equal(logits_of(path, prompt, prefill_chunk_size=chunk), whole)


@pytest.mark.parametrize("family", DEEPSEEK)
def test_small_latents_show_the_epsilon_of_their_norms(family: str, tmp_path: Path) -> None:
    """transformers has 1e-6 there, whatever "rms_norm_eps" says."""
    spec = TinySpec(family, seed=13)
    path, prompt = copy_checkpoint(make(spec), tmp_path / "small"), prompt_of(spec)

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "q_a_proj" in name or "kv_a_proj" in name:
                tensor.mul_(1e-3)

    edit_tensors(path, shrink)
    expected = reference_logits(path, prompt)
    assert_close(logits_of(path, prompt), expected)
    edit_config(path, latent_norm_eps=1e-5)
    with pytest.raises(AssertionError, match="transformers has"):
        assert_close(logits_of(path, prompt), expected)


# ---- one wrong fact at a time ------------------------------------------------------------------


def _set_mixtures(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            if "num_experts" in layer["mlp"]:
                layer["mlp"] = layer["mlp"] | changes

    return change


def _set_attention(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            layer["attention"] = layer["attention"] | changes

    return change


def _rotate_halves(config: dict[str, Any]) -> None:
    del config["ropes"][0]["interleaved"]


WRONG_FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "one expert less": _set_mixtures(top_k=3),
    "weights not normalised": _set_mixtures(normalises_weights=False),
    "weight scale": _set_mixtures(weight_scale=1.0),
    "no groups": _set_mixtures(num_groups=1, top_groups=1),
    "one group more": _set_mixtures(top_groups=3),
    "rope by halves": _rotate_halves,
    "scores without yarn": _set_attention(scale=32**-0.5),
    "epsilon of latents": _set_attention(latent_norm_eps=1e-2),
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(V3, seed=1, rope="yarn", latent=GROUPS)
    check_that_it_shows(spec, WRONG_FACTS[fact], monkeypatch)


WRONG_TENSORS: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "correction": lambda name, t: t * 0 if name.endswith("correction_bias") else t,
    "shared expert": lambda name, t: t * 0 if "shared_experts.down" in name else t,
    "gate of an expert": lambda name, t: -t if "experts.3.gate_proj" in name else t,
}


@pytest.mark.parametrize("fact", WRONG_TENSORS)
def test_a_wrong_tensor_shows(fact: str, tmp_path: Path) -> None:
    spec = replace(GLM, seed=1)
    path, prompt = make(spec), prompt_of(spec)
    check_that_a_tensor_shows(
        path, prompt, reference_logits(path, prompt), WRONG_TENSORS[fact], tmp_path
    )
