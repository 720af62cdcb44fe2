# SPDX-License-Identifier: Apache-2.0
"""EAGLE draft heads against `eagle_reference`: every iteration of a run, at temperature 0.

`drafter_golden` says how runs are compared. The oracles are draft heads whose every draft is right
by construction, so that no draft may be rejected.
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
import eagle_models
import tiny_models
from drafter_golden import (
    check_oracle,
    check_run,
    compare_iterations,
    silence_layers,
    target_reference,
    target_sequences,
    write_oracle_target,
)
from eagle_models import EagleSpec
from eagle_reference import EagleReference, overfit, simulate
from tiny_models import TinySpec

pytestmark = pytest.mark.golden

K = 4
# Relative to the largest logit; the error of float32 is at most a tenth of it.
LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40  # iterations of all sequences together

LLAMA = TinySpec("llama", seed=3, num_layers=8)
QWEN3 = TinySpec("qwen3", seed=3, num_layers=8)
GEMMA3 = TinySpec("gemma3", seed=3, num_layers=6)
GPT_OSS = TinySpec("gpt_oss", seed=3, num_layers=8, quantization="mxfp4")
QWEN3_MOE = TinySpec("qwen3_moe", seed=3, num_layers=8)

CASES: dict[str, tuple[TinySpec, EagleSpec]] = {
    "eagle": (LLAMA, EagleSpec("eagle")),
    "eagle on qwen3 with its rope": (QWEN3, EagleSpec("eagle", rope_theta=None)),
    "eagle with fc bias, borrowed embeddings": (
        LLAMA,
        EagleSpec("eagle", seed=1, fc_bias=True, owns_embedding=False),
    ),
    "eagle on gemma3, borrowed embeddings": (
        GEMMA3,
        EagleSpec("eagle", seed=2, owns_embedding=False, rope_theta=None),
    ),
    "eagle3": (LLAMA, EagleSpec("eagle3")),
    "eagle3 with biases": (LLAMA, EagleSpec("eagle3", attention_bias=True, fc_bias=True)),
    "eagle3 on gemma3": (GEMMA3, EagleSpec("eagle3", aux_layers=(1, 3, 5), rope_theta=None)),
    "eagle3 on gemma3, borrowed embeddings": (
        GEMMA3,
        EagleSpec("eagle3", aux_layers=(1, 3, 5), owns_embedding=False),
    ),
    "eagle3 with all ids": (LLAMA, EagleSpec("eagle3", draft_vocab_size=None)),
    "speculators": (LLAMA, EagleSpec("speculators", norm_before_residual=True)),
    "speculators, qwen3 layer": (
        QWEN3,
        EagleSpec("speculators", layer_type="qwen3", owns_embedding=False),
    ),
    "speculators, one norm before fc": (
        LLAMA,
        EagleSpec("speculators", norm_before_fc=True, aux_layers=(0, 3, 7)),
    ),
    "speculators, norms before fc": (
        LLAMA,
        EagleSpec("speculators", fc_norm=True, norm_before_residual=False),
    ),
    "speculators, normed output": (LLAMA, EagleSpec("speculators", norm_output=True)),
    "speculators, narrow, two states": (
        LLAMA,
        EagleSpec("speculators", hidden_size=48, aux_layers=(1, 6), num_aux=2),
    ),
    # The two published layouts of draft heads for GPT-OSS-20B.
    "speculators on gpt-oss, one norm before fc": (
        GPT_OSS,
        EagleSpec(
            "speculators",
            norm_before_residual=True,
            norm_before_fc=True,
            rope_theta=10_000.0,
            draft_vocab_size=64,
        ),
    ),
    "speculators on gpt-oss, fewer draft ids": (
        GPT_OSS,
        EagleSpec(
            "speculators", norm_before_residual=True, rope_theta=500_000.0, draft_vocab_size=32
        ),
    ),
    # Those for Qwen3-30B-A3B: of SpecForge, of `speculators`, and EAGLE-3.1.
    "eagle3 on qwen3-moe": (QWEN3_MOE, EagleSpec("eagle3", owns_embedding=False)),
    "speculators on qwen3-moe": (QWEN3_MOE, EagleSpec("speculators", norm_before_residual=True)),
    "speculators on qwen3-moe, norms before fc, normed output": (
        QWEN3_MOE,
        EagleSpec("speculators", fc_norm=True, norm_output=True, norm_before_residual=True),
    ),
}


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-eagle-"))


@functools.cache
def trained(case: str) -> tuple[Path, EagleReference]:
    """A draft head that is right about every other time."""
    target, spec = CASES[case]
    path = scratch() / case.replace(" ", "-")
    eagle_models.write(spec, tiny_models.make(target), path)
    reference = EagleReference(path, target_reference(target))
    whole = [[*prompt, *continuation] for prompt, continuation in target_sequences(target)]
    tensors = tiny_models.load_tensors(path)
    plan = {"steps": 40, "rate": 0.01} if spec.is_eagle3 else {"steps": 60, "rate": 0.003}
    for name, tensor in overfit(reference, whole, **plan).items():
        tensors[name.replace("layers.0.", spec.first_layer)] = tensor
    tiny_models.save_tensors(path, tensors)
    return path, EagleReference(path, target_reference(target))


def run(
    target: TinySpec, model: Path, k: int = K, **engine: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every sequence, and the number that each verify iteration emitted."""
    driver = engine.pop("draft_driver", "unrolled")
    config = {
        "model": str(model),
        "num_speculative_tokens": k,
        "x": {"draft_driver": driver},
    }
    return drafter_golden.run(target, target_sequences(target), config, **engine)


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_equals_the_reference(case: str) -> None:
    target, _ = CASES[case]
    path, reference = trained(case)
    tokens, emitted = run(target, path)
    check_run(reference, target_sequences(target), tokens, emitted, K, LEAST_MARGIN, LEAST_COMPARED)


@pytest.mark.parametrize("case", ["eagle", "eagle3", "speculators, normed output"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_other_numbers_of_drafts(case: str, k: int) -> None:
    target, _ = CASES[case]
    path, reference = trained(case)
    _, emitted = run(target, path, k)
    compare_iterations(reference, target_sequences(target), emitted, k, LEAST_MARGIN)


@pytest.mark.parametrize(
    "engine",
    [
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 7, "block_size": 5},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "draft_driver": "replay"},
        {"draft_driver": "eager", "num_threads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["eagle", "eagle3", "eagle3 on gemma3"])
def test_neither_chunks_nor_batches_change_a_draft(case: str, engine: dict[str, Any]) -> None:
    target, _ = CASES[case]
    path, _ = trained(case)
    assert run(target, path, **engine) == run(target, path)


def test_a_wrong_reference_is_noticed() -> None:
    """References that are wrong in one point emit something else."""
    case = "speculators"
    target, _ = CASES[case]
    _, right = trained(case)

    def emitted(reference: EagleReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in target_sequences(target)]

    expected = emitted(right)
    for change in (
        {"norm_before_residual": False},
        {"norm_output": True},
        {"theta": right.theta * 2},
        {"aux_layers": [1, 4, 5]},
    ):
        wrong = EagleReference(trained(case)[0], right.target)
        for name, value in change.items():
            setattr(wrong, name, value)
        assert emitted(wrong) != expected, change


# ---- oracles -----------------------------------------------------------------------------------

ORACLE = replace(LLAMA, seed=50, vocab_size=48, tokenizer_size=0, num_layers=8)


@functools.cache
def oracle_target() -> tuple[Path, torch.Tensor]:
    path = scratch() / "oracle-target"
    return path, write_oracle_target(ORACLE, path)


def oracle_head(layout: str, path: Path) -> None:
    """A draft head that computes the next token from the hidden state alone, not from the token.

    It maps the unit vector of t_i to that of t_{i+1}, which it feeds back and for which its
    lm_head gives the successor t_{i+2}. With a hidden state of another position, of another layer
    after the norm, or of an earlier iteration it drafts another token.
    """
    target, following = oracle_target()
    spec = EagleSpec(layout, intermediate_size=64, draft_vocab_size=40)
    eagle_models.write(spec, target, path)
    tensors = tiny_models.load_tensors(path)
    silence_layers(tensors)
    tensors["fc.weight"].zero_()
    for name, tensor in tensors.items():
        if tensor.ndim == 1 and name.endswith("norm.weight"):
            tensor.fill_(1.0)
    step = torch.zeros(64, 64)
    step[following, torch.arange(48)] = 1.0
    if layout == "eagle":
        # The embedding comes first.
        tensors["fc.weight"][:, 64:] = step
    else:
        tensors["fc.weight"][:, 64:128] = torch.eye(64)
        # The norm scales a unit vector of any length to sqrt(64); the gate is silu of that.
        tensors["midlayer.mlp.gate_proj.weight"] = torch.eye(64)
        tensors["midlayer.mlp.up_proj.weight"] = torch.eye(64)
        peak = 8.0 * torch.nn.functional.silu(torch.tensor(8.0))
        tensors["midlayer.mlp.down_proj.weight"] = (step - torch.eye(64)) / peak
        lm_head = tiny_models.load_tensors(target)["lm_head.weight"]
        ids = tensors["d2t"] + torch.arange(40)
        tensors["lm_head.weight"] = lm_head[ids].clone()
    tiny_models.save_tensors(path, tensors)


@pytest.mark.parametrize("chunk", [None, 1, 6])
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_oracles_are_always_right(layout: str, chunk: int | None, tmp_path: Path) -> None:
    target, following = oracle_target()
    oracle_head(layout, tmp_path / "head")
    known = torch.ones(48, dtype=torch.bool)
    if layout == "eagle3":
        known = tiny_models.load_tensors(tmp_path / "head")["t2d"]
    config = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    check_oracle(
        target, following, config, chunk, lambda tokens: _iterations_needed(tokens, known, 3)
    )


def _iterations_needed(tokens: list[int], known: torch.Tensor, k: int) -> int:
    """Iterations of a drafter that is right whenever the token is in its vocabulary."""
    position, iterations = 1, 0
    while position < len(tokens):
        accepted = 0
        while (
            accepted < k
            and position + accepted < len(tokens)
            and known[tokens[position + accepted]]
        ):
            accepted += 1
        position += accepted + 1
        iterations += 1
    return iterations
