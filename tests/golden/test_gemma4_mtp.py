# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants against transformers and `gemma4_mtp_reference`, at temperature 0.

Three comparisons lead from transformers to the engine. The reference equals transformers logit by
logit where both are defined alike: at position P, within the window. (Beyond the window, a draft
of transformers sees one key more than the target's window has; transformers has no P-1.) The engine
emits in every iteration what the reference emits, at both positions and beyond the window. Within
the window, at position P, it emits what transformers emits. `drafter_golden` says how runs are
compared.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import assistant_models
import drafter_golden
import tiny_models
from assistant_models import AssistantSpec
from drafter_golden import (
    Sequences,
    check_oracle,
    check_run,
    compare_iterations,
    greedy_sequences,
    silence_layers,
    write_oracle_target,
)
from eagle_reference import GreedyDrafter, simulate
from gemma4_mtp_reference import (
    Gemma4MtpReference,
    Gemma4Target,
    StatesWithKv,
    TransformersAssistant,
    overfit,
)
from tiny_models import FULL, SLIDING, TinySpec

pytestmark = pytest.mark.golden

K = 4
POSITIONS = ("last", "next")
# Relative to the largest logit. transformers computes norms in float32 even of float64 inputs.
RELATIVE_TOLERANCE = 2e-4
# Between two logits, relative to the largest: the engine computes in float32.
LEAST_MARGIN = 5e-4
LEAST_COMPARED = 30  # iterations of all sequences together, of about 50

# Small versions of the published sizes: per-layer embeddings, shared KV and clusters; or keys as
# values and fewer KV heads in full layers.
E2B = TinySpec("gemma4", seed=60, kv_heads=1, logit_soft_cap=30.0)
DENSE = TinySpec(
    "gemma4", seed=61, k_eq_v=True, shared_layers=0, per_layer_size=0, logit_soft_cap=30.0
)
UNIFIED = replace(DENSE, seed=62, unified=True)
# Here the last layer of each type differs from the last one that owns its KV.
MIXED = replace(E2B, seed=63, kv_heads=2, layer_types=(SLIDING, FULL) * 4, shared_layers=4)

CASES: dict[str, tuple[TinySpec, AssistantSpec]] = {
    "31B-like": (DENSE, AssistantSpec()),
    "31B-like, as published": (
        replace(DENSE, old_spelling=True),
        AssistantSpec(seed=1, old_spelling=True),
    ),
    "31B-like with clusters": (DENSE, AssistantSpec(seed=2, centroids=(32, 4))),
    "E2B-like": (E2B, AssistantSpec(seed=3, centroids=(16, 3))),
    "E2B-like, as published": (
        replace(E2B, old_spelling=True),
        AssistantSpec(seed=4, centroids=(16, 3), old_spelling=True),
    ),
    "E2B-like without clusters": (E2B, AssistantSpec(seed=5)),
    "26B-like": (replace(DENSE, seed=65, has_experts=True, top_k=3), AssistantSpec(seed=14)),
    "unified": (UNIFIED, AssistantSpec(seed=6)),
    "unified with clusters, as published": (
        replace(UNIFIED, old_spelling=True),
        AssistantSpec(seed=7, centroids=(8, 8), old_spelling=True),
    ),
    "one full layer": (DENSE, AssistantSpec(seed=8, layer_types=(FULL,))),
    "full layers first": (MIXED, AssistantSpec(seed=9, layer_types=(FULL, SLIDING, FULL))),
    "two and two": (
        MIXED,
        AssistantSpec(seed=10, layer_types=(SLIDING, SLIDING, FULL, FULL), centroids=(4, 1)),
    ),
    "biases": (replace(E2B, attention_bias=True), AssistantSpec(seed=11, attention_bias=True)),
    "other sizes": (
        replace(E2B, seed=64, hidden_size=72, partial_rotary=0.5, vocab_size=132),
        AssistantSpec(seed=12, hidden_size=40, heads=2, centroids=(11, 2)),
    ),
    "wider than the target": (
        DENSE,
        AssistantSpec(seed=13, hidden_size=96, heads=8, intermediate_size=100),
    ),
}
# Both spellings of a configuration give one description, so the engine runs one of them.
RUN_CASES = [case for case in CASES if "as published" not in case]


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-gemma4-mtp-"))


@functools.cache
def target_reference(spec: TinySpec) -> Gemma4Target:
    return Gemma4Target(tiny_models.make(spec))


@functools.cache
def sequences(spec: TinySpec) -> Sequences:
    return greedy_sequences(spec, target_reference(spec).greedy, longest_prompt=20)


def written(target: TinySpec, spec: AssistantSpec) -> Path:
    """A random assistant."""
    path = scratch() / f"{zlib.crc32(repr((target, spec)).encode()):08x}"
    if not path.exists():
        assistant_models.write(spec, tiny_models.make(target), path)
    return path


@functools.cache
def trained(
    target: TinySpec, spec: AssistantSpec, position: str
) -> tuple[Path, Gemma4MtpReference]:
    """An assistant that is right about every other time at a position."""
    source = written(target, spec)
    path = tiny_models.copy_checkpoint(source, Path(f"{source}-{position}"))
    reference = Gemma4MtpReference(path, target_reference(target), position)
    whole = [[*prompt, *continuation] for prompt, continuation in sequences(target)]
    new = overfit(reference, whole, steps=30, rate=0.01)
    tiny_models.save_tensors(path, tiny_models.load_tensors(path) | new)
    return path, Gemma4MtpReference(path, target_reference(target), position)


def run(
    target: TinySpec, model: Path, position: str, k: int = K, **engine: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every sequence, and the number that each verify iteration emitted."""
    nested = {"draft_driver": engine.pop("draft_driver", "unrolled"), "draft_position": position}
    config = {"model": str(model), "num_speculative_tokens": k, "x": nested}
    configured = ("draft_position", position)
    return drafter_golden.run(target, sequences(target), config, configured, **engine)


# ---- the reference and transformers ------------------------------------------------------------


def known_sequence(spec: TinySpec, length: int) -> tuple[list[int], StatesWithKv]:
    """Random tokens with the target's next one, and its states before that."""
    rng = random.Random(length)
    ids = [rng.randrange(spec.vocab_size) for _ in range(length)]
    states = target_reference(spec).states(ids)
    return [*ids, int(states.logits[-1].argmax())], states


def largest_difference(reference: Gemma4MtpReference, path: Path, target: TinySpec) -> float:
    """Returns the largest difference from transformers, relative to the largest logit.

    It covers three chained draft steps, after sequences that fill the window and after shorter
    ones. It is infinite if the two give logits to different tokens.
    """
    theirs = TransformersAssistant(path, reference.target)
    worst = 0.0
    for length in (1, 2, target.window - 1, target.window):
        tokens, states = known_sequence(target, length)
        token, hidden, our_hidden = tokens[-1], states.output[-1:], states.output[-1:]
        for _ in range(3):
            expected, hidden = theirs.step(token, hidden, length, states.kv)
            output, our_hidden = reference.run(
                torch.tensor([token]), our_hidden, torch.tensor([length]), states.kv
            )
            logits = reference.logits(output)[0]
            is_scored = logits.isfinite()
            # Tokens without logits have one value, below all others.
            rest = expected[~is_scored]
            if len(rest) and not rest.max() == rest.min() < expected[is_scored].min():
                return math.inf
            scale = expected[is_scored].abs().max()
            worst = max(worst, float((logits - expected)[is_scored].abs().max() / scale))
            token = int(expected.argmax())
    return worst


@pytest.mark.parametrize("case", CASES)
def test_reference_equals_transformers(case: str) -> None:
    target, spec = CASES[case]
    target = replace(target, window=24)
    path = written(target, spec)
    reference = Gemma4MtpReference(path, target_reference(target), "next")
    assert largest_difference(reference, path, target) <= RELATIVE_TOLERANCE


WRONG_FACTS: dict[str, dict[str, Any]] = {
    "position": {"position": "last"},
    "embed scale": {"embed_scale": 1.0},
    "eps": {"eps": 1e-2},
    "smaller window": {"extra_window": -1},
    "clusters": {"num_scored": 4},
}


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str) -> None:
    """A reference that is wrong in one fact differs by more than ten times the tolerance."""
    target, spec = CASES["E2B-like"]
    target = replace(target, window=24)
    path = written(target, spec)
    wrong = Gemma4MtpReference(path, target_reference(target), "next")
    for name, value in WRONG_FACTS[fact].items():
        setattr(wrong, name, value)
    assert largest_difference(wrong, path, target) > 10 * RELATIVE_TOLERANCE


# ---- the engine --------------------------------------------------------------------------------


def check_iterations(
    reference: GreedyDrafter, target: TinySpec, tokens: list[list[int]], emitted: list[list[int]]
) -> None:
    """Compares a run with a reference of its drafter."""
    check_run(reference, sequences(target), tokens, emitted, K, LEAST_MARGIN, LEAST_COMPARED)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("case", RUN_CASES)
def test_every_iteration_equals_the_reference(case: str, position: str) -> None:
    """The sequences are much longer than the window of 8."""
    target, spec = CASES[case]
    path, reference = trained(target, spec, position)
    check_iterations(reference, target, *run(target, path, position))


@pytest.mark.parametrize("case", ["31B-like", "E2B-like", "unified", "full layers first"])
def test_every_iteration_equals_transformers(case: str) -> None:
    """The sequences fit the window; the position is that of transformers."""
    target, spec = CASES[case]
    target = replace(target, window=64)
    path, _ = trained(target, spec, "next")
    theirs = TransformersAssistant(path, target_reference(target))
    check_iterations(theirs, target, *run(target, path, "next"))


@pytest.mark.parametrize("case", ["31B-like", "E2B-like"])
def test_the_other_position(case: str) -> None:
    """At the other position an assistant is right less often, exactly as often as its reference."""
    target, spec = CASES[case]
    path, reference = trained(target, spec, "next")
    tokens, emitted = run(target, path, "last")
    wrong = Gemma4MtpReference(path, reference.target, "last")
    compare_iterations(wrong, sequences(target), emitted, K, LEAST_MARGIN)
    right_tokens, right = run(target, path, "next")
    assert tokens == right_tokens
    assert sum(map(len, right)) < sum(map(len, emitted))


@pytest.mark.parametrize("case", ["31B-like", "E2B-like"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_other_numbers_of_drafts(case: str, k: int) -> None:
    target, spec = CASES[case]
    path, reference = trained(target, spec, "last")
    _, emitted = run(target, path, "last", k)
    compare_iterations(reference, sequences(target), emitted, k, LEAST_MARGIN)


@pytest.mark.parametrize(
    "engine",
    [
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 7, "block_size": 5},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "draft_driver": "replay"},
        {"draft_driver": "while", "num_threads": 2},
        {"draft_driver": "eager", "num_threads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["31B-like", "E2B-like"])
def test_neither_chunks_nor_batches_change_a_draft(case: str, engine: dict[str, Any]) -> None:
    target, spec = CASES[case]
    for position in POSITIONS:
        path, _ = trained(target, spec, position)
        assert run(target, path, position, **engine) == run(target, path, position)


def test_a_wrong_reference_is_noticed() -> None:
    """References that are wrong in one point emit something else."""
    target, spec = CASES["E2B-like"]
    path, right = trained(target, spec, "last")

    def emitted(reference: Gemma4MtpReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in sequences(target)]

    expected = emitted(right)
    for change in (
        {"position": "next"},
        {"extra_window": 1},
        {"extra_window": -1},
        {"embed_scale": 1.0},
        {"num_scored": 1},
        {"layer_types": [SLIDING, SLIDING, SLIDING]},
    ):
        wrong = Gemma4MtpReference(path, right.target, "last")
        for name, value in change.items():
            setattr(wrong, name, value)
        assert emitted(wrong) != expected, change


# ---- an oracle ---------------------------------------------------------------------------------

ORACLE = replace(DENSE, seed=50, vocab_size=48, tokenizer_size=0, tied=False, logit_soft_cap=0.0)


@functools.cache
def oracle_target() -> tuple[Path, torch.Tensor]:
    path = scratch() / "oracle-target"
    return path, write_oracle_target(ORACLE, path)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("centroids", [None, (6, 1)])
@pytest.mark.parametrize("chunk", [None, 1, 6])
def test_an_oracle_is_always_right(
    chunk: int | None, centroids: tuple[int, int] | None, position: str, tmp_path: Path
) -> None:
    """An assistant that computes the next token from the hidden state alone, not from the token.

    It maps the unit vector of t_{P-1} to that of t_P, which it feeds back and for which its
    lm_head gives the successor t_{P+1}. With a hidden state of an earlier iteration or of another
    position it drafts another token. With clusters, only the right token's cluster has logits.
    """
    target, following = oracle_target()
    spec = AssistantSpec(hidden_size=64, centroids=centroids)
    path = assistant_models.write(spec, target, tmp_path / "assistant")
    tensors = tiny_models.load_tensors(path)
    silence_layers(tensors)
    step = torch.zeros(64, 64)
    step[following, torch.arange(48)] = 1.0
    # The embedding comes first.
    tensors["pre_projection.weight"] = torch.cat([torch.zeros(64, 64), step], dim=1)
    tensors["post_projection.weight"] = torch.eye(64)
    tensors["model.norm.weight"] = torch.ones(64)
    table = torch.zeros(48, 64)
    table[following] = torch.eye(48, 64)
    tensors["model.embed_tokens.weight"] = table
    if centroids is not None:
        clusters = tensors["masked_embedding.token_ordering"].view(centroids[0], -1)
        tensors["masked_embedding.centroids.weight"] = torch.stack(
            [table[ids].sum(0) for ids in clusters]
        )
    tiny_models.save_tensors(path, tensors)
    config = {
        "model": str(path),
        "num_speculative_tokens": 3,
        "x": {"draft_position": position},
    }
    # One token with the prompt, then four in each iteration.
    check_oracle(target, following, config, chunk, lambda tokens: (len(tokens) - 1) // 4)
