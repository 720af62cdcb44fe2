# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants against transformers and `gemma4_mtp_reference`, at temperature 0.

Three steps lead from transformers to the engine. The reference equals transformers logit by logit
where the two mean the same: at position P, within the window (beyond, transformers shows a draft
one key more than the target has in its window; at P-1 it has no choice). The engine emits in every
iteration what the reference says, at both positions and beyond the window. And within the window,
at position P, it emits what transformers says.

As in `test_eagle.py` assistants are first trained on the texts that they then draft, for a second
and not to the end, so that how many drafts of each iteration are kept is a fingerprint of all the
steps. A text counts up to the first draft whose two best logits nearly tie.
"""

from __future__ import annotations

import functools
import itertools
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
import tiny_models
from assistant_models import AssistantSpec
from eagle_reference import GreedyDrafter, simulate
from gemma4_mtp_reference import (
    Gemma4MtpReference,
    Gemma4Target,
    StatesWithKv,
    TransformersAssistant,
    overfit,
)
from paceline import LLM, SamplingParams
from tiny_models import FULL, SLIDING, TinySpec

pytestmark = pytest.mark.golden

K = 4
NUM_TEXTS = 4
NUM_TOKENS = 40
POSITIONS = ("last", "next")
# Of the largest logit. transformers takes norms in float32 even of float64 inputs.
RELATIVE_TOLERANCE = 2e-4
# The same, from one logit to the next: the engine computes in float32.
LEAST_MARGIN = 5e-4
LEAST_COMPARED = 30  # iterations of all texts together, of about 50

# The sizes as they are published, in small: per-layer embeddings, shared KV and clusters; or keys
# as values and fewer KV heads in full layers.
E2B = TinySpec("gemma4", seed=60, kv_heads=1, logit_soft_cap=30.0)
DENSE = TinySpec(
    "gemma4", seed=61, k_eq_v=True, shared_layers=0, per_layer_size=0, logit_soft_cap=30.0
)
UNIFIED = replace(DENSE, seed=62, unified=True)
# The last layer of each type, counted without and with those that share, is another one here.
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
# Those of the engine's own switches: the spellings of one configuration are one engine.
RUN_CASES = [case for case in CASES if "as published" not in case]


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-gemma4-mtp-"))


@functools.cache
def target_reference(spec: TinySpec) -> Gemma4Target:
    return Gemma4Target(tiny_models.make(spec))


@functools.cache
def texts(spec: TinySpec) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Prompts with the target's own greedy continuations."""
    rng = random.Random(spec.seed)
    prompts = [
        tuple(rng.randrange(spec.vocab_size) for _ in range(rng.randint(1, 20)))
        for _ in range(NUM_TEXTS)
    ]
    reference = target_reference(spec)
    return tuple((p, tuple(reference.greedy(p, NUM_TOKENS))) for p in prompts)


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
    whole = [[*prompt, *continuation] for prompt, continuation in texts(target)]
    new = overfit(reference, whole, steps=30, rate=0.01)
    tiny_models.save_tensors(path, tiny_models.load_tensors(path) | new)
    return path, Gemma4MtpReference(path, target_reference(target), position)


def run(
    target: TinySpec, model: Path, position: str, k: int = K, **engine: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every text, and how many of them each verify iteration emitted."""
    nested = {"draft_driver": engine.pop("draft_driver", "unrolled"), "draft_position": position}
    config = {"model": str(model), "num_speculative_tokens": k, "x": nested}
    prompts = [list(prompt) for prompt, _ in texts(target)]
    tokens: list[list[int]] = [[] for _ in prompts]
    emitted: list[list[int]] = [[] for _ in prompts]
    options = {"max_num_seqs": NUM_TEXTS, "kv_cache_bytes": 16 << 20} | engine
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(
        tiny_models.make(target),
        dtype="float32",
        speculative_config=config,
        show_progress=False,
        **options,
    ) as llm:
        assert llm.capabilities()["configured"]["draft_position"] == position
        for chunk in llm.stream(prompts, params):
            # The first token comes with the prompt, not from a verify iteration.
            if tokens[chunk.index] and chunk.token_ids:
                emitted[chunk.index].append(len(chunk.token_ids))
            tokens[chunk.index] += chunk.token_ids
        assert llm._executor.check_integrity() == ""
    return tokens, emitted


# ---- the reference and transformers ------------------------------------------------------------


def known_text(spec: TinySpec, length: int) -> tuple[list[int], StatesWithKv]:
    """Random tokens with the target's next one, and its states before that."""
    rng = random.Random(length)
    ids = [rng.randrange(spec.vocab_size) for _ in range(length)]
    states = target_reference(spec).states(ids)
    return [*ids, int(states.logits[-1].argmax())], states


def largest_difference(reference: Gemma4MtpReference, path: Path, target: TinySpec) -> float:
    """From transformers, in three chained steps behind texts that fill the window and shorter
    ones; over the largest logit. Infinite where other tokens are scored."""
    theirs = TransformersAssistant(path, reference.target)
    worst = 0.0
    for length in (1, 2, target.window - 1, target.window):
        tokens, states = known_text(target, length)
        token, hidden, our_hidden = tokens[-1], states.output[-1:], states.output[-1:]
        for _ in range(3):
            expected, hidden = theirs.step(token, hidden, length, states.kv)
            output, our_hidden = reference.run(
                torch.tensor([token]), our_hidden, torch.tensor([length]), states.kv
            )
            logits = reference.logits(output)[0]
            is_scored = logits.isfinite()
            # What is left out has one value, below all others.
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
    """The bar has teeth: each of these is at least ten times above it."""
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
    """Compares a run with what a drafter must make of it."""
    assert tokens == [list(continuation) for _, continuation in texts(target)]
    compared = kept = 0
    for (prompt, continuation), counts in zip(texts(target), emitted, strict=True):
        simulation = simulate(reference, prompt, continuation, K)
        clear = simulation.num_clear(LEAST_MARGIN)
        assert counts[:clear] == simulation.emitted[:clear]
        compared += clear
        kept += sum(counts[:clear]) - clear
    assert compared >= LEAST_COMPARED, "too many near ties: choose another seed"
    assert kept >= compared // 5, "the drafter was hardly ever right: choose another seed"


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("case", RUN_CASES)
def test_every_iteration_equals_the_reference(case: str, position: str) -> None:
    """Far beyond the window of 8."""
    target, spec = CASES[case]
    path, reference = trained(target, spec, position)
    check_iterations(reference, target, *run(target, path, position))


@pytest.mark.parametrize("case", ["31B-like", "E2B-like", "unified", "full layers first"])
def test_every_iteration_equals_transformers(case: str) -> None:
    """Within the window, at the position that transformers has."""
    target, spec = CASES[case]
    target = replace(target, window=64)
    path, _ = trained(target, spec, "next")
    theirs = TransformersAssistant(path, target_reference(target))
    check_iterations(theirs, target, *run(target, path, "next"))


@pytest.mark.parametrize("case", ["31B-like", "E2B-like"])
def test_the_other_position(case: str) -> None:
    """An assistant of one position at the other is less often right, and as the reference says."""
    target, spec = CASES[case]
    path, reference = trained(target, spec, "next")
    tokens, emitted = run(target, path, "last")
    wrong = Gemma4MtpReference(path, reference.target, "last")
    for (prompt, continuation), counts in zip(texts(target), emitted, strict=True):
        simulation = simulate(wrong, prompt, continuation, K)
        clear = simulation.num_clear(LEAST_MARGIN)
        assert counts[:clear] == simulation.emitted[:clear]
    right_tokens, right = run(target, path, "next")
    assert tokens == right_tokens
    assert sum(map(len, right)) < sum(map(len, emitted))


@pytest.mark.parametrize("case", ["31B-like", "E2B-like"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_other_numbers_of_drafts(case: str, k: int) -> None:
    target, spec = CASES[case]
    path, reference = trained(target, spec, "last")
    _, emitted = run(target, path, "last", k)
    for (prompt, continuation), counts in zip(texts(target), emitted, strict=True):
        simulation = simulate(reference, prompt, continuation, k)
        clear = simulation.num_clear(LEAST_MARGIN)
        assert counts[:clear] == simulation.emitted[:clear]


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


def test_the_comparison_has_teeth() -> None:
    """References that are wrong in one point emit something else."""
    target, spec = CASES["E2B-like"]
    path, right = trained(target, spec, "last")

    def emitted(reference: Gemma4MtpReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in texts(target)]

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
    """A target whose next token is a function of the current one: one cycle through all ids.

    Its layers add nothing, its embeddings are unit vectors, and its lm_head looks one up one step
    further.
    """
    path = tiny_models.copy_checkpoint(tiny_models.make(ORACLE), scratch() / "oracle-target")
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    following = torch.empty(48, dtype=torch.long)
    following[order] = order.roll(-1)
    tensors = tiny_models.load_tensors(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("layer_scalar"):
            tensor.fill_(1.0)
    unit = torch.eye(48, 64)
    tensors["model.embed_tokens.weight"] = unit
    tensors["model.norm.weight"] = torch.ones(64)
    # Row s is the unit vector of the token before s.
    tensors["lm_head.weight"] = torch.empty(48, 64)
    tensors["lm_head.weight"][following] = unit
    tiny_models.save_tensors(path, tensors)
    return path, following


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("centroids", [None, (6, 1)])
@pytest.mark.parametrize("chunk", [None, 1, 6])
def test_an_oracle_is_always_right(
    chunk: int | None, centroids: tuple[int, int] | None, position: str, tmp_path: Path
) -> None:
    """It knows the next token from the hidden state alone, never from the token.

    From the unit vector of t_{P-1} it makes that of t_P, which is what it feeds back, and whose
    successor t_{P+1} its table gives. A stale state, or one of another position, makes it draft
    another token. With clusters, only the one that holds the right token is scored.
    """
    target, following = oracle_target()
    spec = AssistantSpec(hidden_size=64, centroids=centroids)
    path = assistant_models.write(spec, target, tmp_path / "assistant")
    tensors = tiny_models.load_tensors(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("layer_scalar"):
            tensor.fill_(1.0)
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
    rng = random.Random(1)
    prompts = [[rng.randrange(48) for _ in range(rng.randint(1, 20))] for _ in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=41)
    with LLM(
        target,
        speculative_config=config,
        max_num_seqs=3,
        kv_cache_bytes=16 << 20,
        prefill_chunk_size=chunk,
        show_progress=False,
    ) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            tokens = output.outputs[0].token_ids
            assert tokens[0] == following[prompt[-1]]
            assert all(b == following[a] for a, b in itertools.pairwise(tokens))
            assert output.metrics.speculative_decoding is not None
            # One token with the prompt, then four an iteration.
            assert output.metrics.speculative_decoding["num_spec_steps"] == 10
