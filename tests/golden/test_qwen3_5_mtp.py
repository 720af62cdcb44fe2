# SPDX-License-Identifier: Apache-2.0
"""The MTP layer of Qwen3.5 against its equations in float64, and those against transformers.

`drafter_golden` says how runs are compared. The models of transformers do not read `mtp.*`, but it
has a general class of such layers, which gives the reference's logits.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_golden
import qwen3_5_mtp
import tiny_models
from drafter_golden import MTP_ENGINES, Sequences, check_run, compare_iterations
from eagle_reference import overfit, simulate
from qwen3_5_mtp import MtpReference
from tiny_models import FULL, QWEN3_5, TinySpec

pytestmark = pytest.mark.golden

K = 4
LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40

DENSE, MOE, NEXT = (TinySpec(family, seed=3, head_dim=32, top_k=3) for family in QWEN3_5)
CASES = {
    "dense, full layers": replace(DENSE, layer_types=(FULL,) * 2),
    "experts, full layers": replace(MOE, layer_types=(FULL,) * 2),
    "dense": DENSE,
    "experts": MOE,
    "next": NEXT,
}


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-qwen3-5-mtp-"))


def sequences(case: str) -> Sequences:
    return drafter_golden.target_sequences(CASES[case])


@functools.cache
def trained(case: str) -> tuple[Path, MtpReference]:
    """A layer that is right about every other time."""
    spec = CASES[case]
    target = drafter_golden.target_reference(spec)
    path = qwen3_5_mtp.write(spec, scratch() / case.replace(" ", "-").replace(",", ""))
    reference = MtpReference(path, target)
    whole = [[*prompt, *continuation] for prompt, continuation in sequences(case)]
    new = overfit(reference, whole, steps=40, rate=0.005)
    tiny_models.edit_tensors(
        path,
        lambda tensors: tensors.update(
            {qwen3_5_mtp.PART + name: tensor for name, tensor in new.items()}
        ),
    )
    return path, MtpReference(path, target)


def run(case: str, k: int = K, **engine: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every sequence, and the number that each verify iteration emitted."""
    nested = {"draft_driver": engine.pop("draft_driver", "unrolled")}
    config = {"method": "mtp", "num_speculative_tokens": k, "x": nested}
    return drafter_golden.run(trained(case)[0], sequences(case), config, **engine)


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_equals_the_reference(case: str) -> None:
    tokens, emitted = run(case)
    _, reference = trained(case)
    check_run(reference, sequences(case), tokens, emitted, K, LEAST_MARGIN, LEAST_COMPARED)


@pytest.mark.parametrize("k", [1, 2, 16])
@pytest.mark.parametrize("case", ["dense, full layers", "dense"])
def test_other_numbers_of_drafts(case: str, k: int) -> None:
    _, emitted = run(case, k)
    compare_iterations(trained(case)[1], sequences(case), emitted, k, LEAST_MARGIN)


@pytest.mark.parametrize("engine", MTP_ENGINES, ids=str)
@pytest.mark.parametrize("case", ["experts, full layers", "experts"])
def test_neither_chunks_nor_batches_change_a_draft(case: str, engine: dict[str, Any]) -> None:
    assert run(case, **engine) == run(case)


def test_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    case = "experts, full layers"
    path = tiny_models.copy_checkpoint(trained(case)[0], tmp_path / "split")
    tiny_models.edit_tensors(path, qwen3_5_mtp.split_experts)
    config = {"method": "mtp", "num_speculative_tokens": K, "x": {"draft_driver": "unrolled"}}
    assert drafter_golden.run(path, sequences(case), config) == run(case)


def test_a_wrong_reference_is_noticed() -> None:
    """References that are wrong in one point emit something else."""
    case = "dense, full layers"
    path, right = trained(case)

    def emitted(reference: MtpReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in sequences(case)]

    for bug in ("hidden first", "feedback before the norm"):
        assert emitted(MtpReference(path, right.target, bug)) != emitted(right), bug


@pytest.mark.parametrize("case", ["dense", "experts"])
def test_the_reference_equals_the_general_class_of_transformers(case: str) -> None:
    from transformers.modeling_layers import MtpModel

    _, reference = trained(case)
    model = reference.target.model
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    general = MtpModel(model, 1).double().eval()
    names = {
        "fc.": "eh_proj.",
        "pre_fc_norm_embedding.": "enorm.",
        "pre_fc_norm_hidden.": "hnorm.",
        "norm.": "post_norm.",
        "layers.0.": "mtp_block.",
    }
    theirs = {}
    for name, tensor in reference.weights.items():
        ours = next(ours for ours in names if name.startswith(ours))
        theirs[name.replace(ours, names[ours], 1)] = tensor
    general.layers[0].load_state_dict(theirs)
    tokens = torch.tensor([*sequences(case)[0][0], *sequences(case)[0][1]])
    with torch.no_grad():
        hidden = reference.target.states(tokens.tolist()).output[:-1]
        rows = general.forward_layer(
            0,
            hidden[None],
            torch.arange(1, len(tokens))[None],
            None,
            input_ids=tokens[None, 1:],
        )
        want = general._project_to_logits(rows)[0]
        seen, feedback = reference.run(tokens[1:], hidden)
    assert float((seen - want).abs().max()) < 1e-4 * float(want.abs().max())
    assert float((feedback - rows[0]).abs().max()) < 1e-4 * float(rows.abs().max())
