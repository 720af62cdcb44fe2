# SPDX-License-Identifier: Apache-2.0
"""MTP layers against their equations in float64: every iteration of a run, at temperature 0.

`drafter_golden` says how runs are compared; the equations are `mtp_models.MtpReference`, whose
first step is compared with the layer of transformers.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_golden
import mtp_models
import tiny_models
from drafter_golden import MTP_ENGINES, Sequences, check_run, compare_iterations, greedy_sequences
from eagle_reference import TargetReference, overfit, simulate
from mtp_models import MtpReference
from tiny_configs import DEEPSEEK
from tiny_models import TinySpec

pytestmark = pytest.mark.golden

K = 4
LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40

# Target, tables of the layer, feedback.
CASES = {
    "glm": ("glm4_moe_lite", "copies", "normed"),
    "glm, raw": ("glm4_moe_lite", "copies", "raw"),
    "deepseek, own tables": ("deepseek_v3", "own", "normed"),
    "deepseek, no tables": ("deepseek_v3", "none", "normed"),
}


def spec_of(family: str) -> TinySpec:
    return TinySpec(family, seed=3)


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-mtp-"))


@functools.cache
def target_reference(family: str) -> TargetReference:
    return TargetReference(tiny_models.make(spec_of(family)))


@functools.cache
def sequences(family: str) -> Sequences:
    return greedy_sequences(spec_of(family), target_reference(family).greedy, longest_prompt=30)


@functools.cache
def trained(case: str) -> tuple[Path, MtpReference]:
    """A layer that is right about every other time."""
    family, tables, feedback = CASES[case]
    path = mtp_models.write(
        spec_of(family), scratch() / case.replace(" ", "-").replace(",", ""), tables=tables
    )
    reference = MtpReference(path, target_reference(family), feedback)
    whole = [[*prompt, *continuation] for prompt, continuation in sequences(family)]
    new = overfit(reference, whole, steps=40, rate=0.005)
    kept = mtp_models.TABLES.values() if tables == "copies" else ()
    layer = mtp_models.layer_name(path)
    tiny_models.edit_tensors(
        path,
        lambda tensors: tensors.update(
            {layer + name: tensor for name, tensor in new.items() if name not in kept}
        ),
    )
    return path, MtpReference(path, target_reference(family), feedback)


def run(case: str, k: int = K, **engine: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every sequence, and the number that each verify iteration emitted."""
    family, _, feedback = CASES[case]
    nested = {"draft_driver": engine.pop("draft_driver", "unrolled")}
    if feedback != "normed":
        nested["draft_feedback"] = feedback
    config = {"method": "mtp", "num_speculative_tokens": k, "x": nested}
    return drafter_golden.run(trained(case)[0], sequences(family), config, **engine)


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_equals_the_reference(case: str) -> None:
    tokens, emitted = run(case)
    _, reference = trained(case)
    family = CASES[case][0]
    check_run(reference, sequences(family), tokens, emitted, K, LEAST_MARGIN, LEAST_COMPARED)


def test_a_layer_drafts_best_with_the_feedback_that_it_was_trained_with() -> None:
    """The figures of docs/glm.md: drafts accepted in an iteration, of K."""
    accepted: dict[tuple[str, str], float] = {}
    for case in ("glm", "glm, raw"):
        family, _, own = CASES[case]
        for feedback in ("normed", "raw"):
            config = {
                "method": "mtp",
                "num_speculative_tokens": K,
                "x": {"draft_feedback": feedback},
            }
            _, emitted = drafter_golden.run(trained(case)[0], sequences(family), config)
            counts = [count - 1 for sequence in emitted for count in sequence]
            accepted[own, feedback] = sum(counts) / len(counts)
    print(accepted)
    assert accepted["normed", "normed"] > accepted["normed", "raw"]
    assert accepted["raw", "raw"] > accepted["raw", "normed"]


@pytest.mark.parametrize("k", [1, 2, 16])
def test_other_numbers_of_drafts(k: int) -> None:
    _, emitted = run("glm", k)
    compare_iterations(trained("glm")[1], sequences("glm4_moe_lite"), emitted, k, LEAST_MARGIN)


@pytest.mark.parametrize("engine", MTP_ENGINES, ids=str)
def test_neither_chunks_nor_batches_change_a_draft(engine: dict[str, Any]) -> None:
    assert run("glm", **engine) == run("glm")


def test_a_wrong_reference_is_noticed() -> None:
    """References that are wrong in one point emit something else."""
    path, right = trained("glm")

    def emitted(reference: MtpReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in sequences("glm4_moe_lite")]

    def swap_norms(reference: MtpReference) -> None:
        w = reference.weights
        w["enorm.weight"], w["hnorm.weight"] = w["hnorm.weight"], w["enorm.weight"]

    def swap_halves(reference: MtpReference) -> None:
        reference.weights["eh_proj.weight"] = reference.weights["eh_proj.weight"].roll(64, 1)

    def feed_back_raw(reference: MtpReference) -> None:
        reference.feedback = "raw"

    def drop_correction(reference: MtpReference) -> None:
        reference.weights["mlp.gate.e_score_correction_bias"].zero_()

    expected = emitted(right)
    for change in (swap_norms, swap_halves, feed_back_raw, drop_correction):
        wrong = MtpReference(path, right.target)
        change(wrong)
        assert emitted(wrong) != expected, change.__name__


@pytest.mark.parametrize("family", DEEPSEEK)
def test_the_reference_equals_the_layer_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers.modeling_layers import MtpLayer

    path = mtp_models.write(spec_of(family), tmp_path / "model")
    target = target_reference(family)
    reference = MtpReference(path, target)
    model = target.model.get_decoder()
    layer: Any = MtpLayer(
        target.model.config,
        type(model.layers[-1]),
        type(model.norm),
        target.model.config.num_hidden_layers - 1,
    ).double()
    names = {"shared_head.norm.weight": "post_norm.weight"}
    own = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    state = {
        names.get(name, name if name in own else f"mtp_block.{name}"): tensor
        for name, tensor in reference.weights.items()
        if name not in mtp_models.TABLES.values() and ".experts." not in name
    }
    for which, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        state[f"mtp_block.mlp.experts.{which}"] = torch.stack(
            [
                torch.cat([reference.weights[f"mlp.experts.{i}.{part}.weight"] for part in parts])
                for i in range(8)
            ]
        )
    layer.load_state_dict(state)
    tokens = torch.tensor(sequences(family)[0][1][:20])
    states = target.states(tokens.tolist())
    positions = torch.arange(19).unsqueeze(0)
    hidden = states.output[:-1].unsqueeze(0)
    mask = torch.full((19, 19), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        seen = layer(
            target.embedding[tokens[1:]].unsqueeze(0),
            hidden,
            model.rotary_emb(hidden, positions),
            mask,
            positions,
            None,
        )
        logits, feedback = reference.run(tokens[1:], states.output[:-1])
    # The rotary embedding of transformers is made of float32 frequencies.
    torch.testing.assert_close(seen[0], feedback, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[0] @ target.lm_head.T, logits, rtol=0, atol=1e-4)
