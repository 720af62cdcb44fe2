# SPDX-License-Identifier: Apache-2.0
"""The MTP layer of DeepSeek-V4 against its equations in float64, as in test_mtp_drafts.py."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_golden
import tiny_models
from deepseek_v4_models import V4Spec, hf_config, make, whole_state
from deepseek_v4_reference import V4MtpReference, V4TargetReference
from drafter_golden import MTP_ENGINES, NUM_TOKENS, Sequences, check_run, compare_iterations
from eagle_reference import overfit, simulate

pytestmark = pytest.mark.golden

K = 4
LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40
SPEC = V4Spec(seed=3)


@functools.cache
def target_reference() -> V4TargetReference:
    return V4TargetReference(SPEC)


@functools.cache
def sequences() -> Sequences:
    rng = random.Random(SPEC.seed)
    prompts = [tuple(rng.randrange(128) for _ in range(rng.randint(1, 30))) for _ in range(4)]
    return tuple((p, tuple(target_reference().greedy(p, NUM_TOKENS))) for p in prompts)


@functools.cache
def trained() -> tuple[Path, V4MtpReference]:
    """A layer that is right about every other time."""
    path = Path(tempfile.mkdtemp(prefix="paceline-v4-mtp-")) / "model"
    tiny_models.copy_checkpoint(make(SPEC), path)
    reference = V4MtpReference(SPEC, target_reference())
    whole = [[*prompt, *continuation] for prompt, continuation in sequences()]
    new = overfit(reference, whole, steps=40, rate=0.005)
    tiny_models.edit_tensors(
        path, lambda tensors: tensors.update({f"mtp.0.{name}": t for name, t in new.items()})
    )
    return path, reference


def run(k: int = K, **engine: Any) -> tuple[list[list[int]], list[list[int]]]:
    nested = {"draft_driver": engine.pop("draft_driver", "unrolled")}
    config = {"method": "mtp", "num_speculative_tokens": k, "x": nested}
    return drafter_golden.run(trained()[0], sequences(), config, **engine)


def test_every_iteration_equals_the_reference() -> None:
    tokens, emitted = run()
    check_run(trained()[1], sequences(), tokens, emitted, K, LEAST_MARGIN, LEAST_COMPARED)


@pytest.mark.parametrize("k", [1, 2, 16])
def test_other_numbers_of_drafts(k: int) -> None:
    _, emitted = run(k)
    compare_iterations(trained()[1], sequences(), emitted, k, LEAST_MARGIN)


@pytest.mark.parametrize("engine", MTP_ENGINES, ids=str)
def test_neither_chunks_nor_batches_change_a_draft(engine: dict[str, Any]) -> None:
    assert run(**engine) == run()


def test_a_wrong_reference_is_noticed() -> None:
    """References that are wrong in one point emit something else."""
    right = trained()[1]

    def emitted(reference: V4MtpReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in sequences()]

    def swap_norms(wrong: V4MtpReference) -> None:
        w = wrong.weights
        w["enorm.weight"], w["hnorm.weight"] = w["hnorm.weight"], w["enorm.weight"]

    def swap_streams(wrong: V4MtpReference) -> None:
        hidden_of = wrong.hidden_of
        wrong.hidden_of = (  # type: ignore[method-assign]
            lambda states: hidden_of(states)[:, [1, 0, 2, 3]]
        )

    def drop_sinks(wrong: V4MtpReference) -> None:
        wrong.weights["attn.attn_sink"] = wrong.weights["attn.attn_sink"] - 100

    expected = emitted(right)
    for change in (swap_norms, swap_streams, drop_sinks):
        wrong = V4MtpReference(SPEC, right.target)
        wrong.weights = dict(right.weights)
        change(wrong)
        assert emitted(wrong) != expected, change.__name__


def test_the_reference_equals_a_layer_of_transformers() -> None:
    """The recipe of models.md 5: one layer more, without a compressor, on the layer's own input."""
    from transformers import DeepseekV4ForCausalLM

    config = hf_config(SPEC, with_mtp=True)
    config._attn_implementation = "eager"
    model: Any = DeepseekV4ForCausalLM(config).eval().requires_grad_(False)
    state = whole_state(SPEC)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    target = target_reference()
    reference = V4MtpReference(SPEC, target)
    tokens = torch.tensor([*sequences()[0][0], *sequences()[0][1]][:25])
    states = target.states(tokens.tolist())
    x = {}

    def keep(name: str) -> Any:
        original = reference.branch

        def branch(streams: torch.Tensor, which: str, sub: Any) -> torch.Tensor:
            x.setdefault(which, streams)
            return original(streams, which, sub)

        return branch

    reference.branch = keep("attn")  # type: ignore[method-assign]
    _, feedback = reference.run(tokens[1:], states.output[:-1])
    length = len(tokens) - 1
    positions = torch.arange(length).unsqueeze(0)
    streams = x["attn"].float().unsqueeze(0)
    rotary = model.model.rotary_emb
    distance = positions.T - positions
    mask = torch.zeros(length, length).masked_fill(
        (distance < 0) | (distance >= SPEC.window), float("-inf")
    )
    seen = model.model.layers[-1](
        streams,
        attention_mask=mask[None, None],
        position_ids=positions,
        position_embeddings={
            kind: rotary(streams, positions, layer_type=kind) for kind in ("main", "compress")
        },
        input_ids=tokens[1:].unsqueeze(0),
    )
    seen = seen[0] if isinstance(seen, tuple) else seen
    torch.testing.assert_close(
        seen.reshape(feedback.shape).double(), feedback, rtol=1e-4, atol=1e-4
    )
