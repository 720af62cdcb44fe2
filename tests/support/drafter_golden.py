# SPDX-License-Identifier: Apache-2.0
"""Runs of a drafter at temperature 0, compared with a reference; and targets for oracles.

A random drafter never guesses right, so two wrong implementations would agree. The tests therefore
train a drafter for a second on the very sequences that it then drafts, so that it is right about
every other time. The number of drafts accepted in each iteration then depends on every draft step.
Where the two best logits of a draft nearly tie, float32 may choose either; a sequence is compared
up to the first such draft.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import tiny_models
from eagle_reference import GreedyDrafter, TargetReference, emission, simulate
from paceline import LLM, SamplingParams
from tiny_models import TinySpec

NUM_PROMPTS = 4
NUM_TOKENS = 40
ORACLE_VOCAB = 48
# Options of an engine, and its driver, that change no draft of an MTP layer.
MTP_ENGINES: tuple[dict[str, Any], ...] = (
    {"prefill_chunk_size": 1},
    {"prefill_chunk_size": 7, "block_size": 5},
    {"max_num_seqs": 1, "draft_driver": "replay"},
    {"draft_driver": "eager", "num_threads": 1},
)
# The same for block drafters, with a k each.
BLOCK_ENGINES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {"prefill_chunk_size": 1}),
    (3, {"prefill_chunk_size": 7, "block_size": 5}),
    (4, {"max_num_seqs": 1, "draft_driver": "replay"}),
    (4, {"draft_driver": "eager", "num_threads": 1}),
)

# A prompt and the target's greedy continuation.
Sequences = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def greedy_sequences(
    spec: TinySpec, greedy: Callable[[tuple[int, ...], int], Sequence[int]], longest_prompt: int
) -> Sequences:
    """Random prompts with the target's own greedy continuations.

    Args:
        spec: The target.
        greedy: The target's continuation of a prompt by a number of tokens.
        longest_prompt: The length of the longest prompt, in tokens.
    """
    rng = random.Random(spec.seed)
    prompts = [
        tuple(rng.randrange(spec.vocab_size) for _ in range(rng.randint(1, longest_prompt)))
        for _ in range(NUM_PROMPTS)
    ]
    return tuple((prompt, tuple(greedy(prompt, NUM_TOKENS))) for prompt in prompts)


@functools.cache
def target_reference(spec: TinySpec) -> TargetReference:
    """A tiny target in transformers, float64."""
    return TargetReference(tiny_models.make(spec))


@functools.cache
def target_sequences(spec: TinySpec) -> Sequences:
    """Random prompts of at most 30 tokens with its greedy continuations."""
    return greedy_sequences(spec, target_reference(spec).greedy, longest_prompt=30)


def room_in(sequences: Sequences) -> Callable[[Sequence[int]], int]:
    """A function that returns how many tokens a run generates after the given ones."""

    def room(tokens: Sequence[int]) -> int:
        known = tuple(tokens)
        prompt = next(prompt for prompt, _ in sequences if known[: len(prompt)] == prompt)
        return len(prompt) + NUM_TOKENS - len(known)

    return room


def with_fixed_k(config: dict[str, Any]) -> dict[str, Any]:
    """A speculative_config in which every iteration drafts k tokens, as a reference does."""
    return {**config, "x": {"adaptive": False, **config.get("x", {})}}


def run(
    target: TinySpec | Path,
    sequences: Sequences,
    config: dict[str, Any] | None,
    capability: tuple[str, Any] | None = None,
    stats: dict[str, Any] | None = None,
    **engine: Any,
) -> tuple[list[list[int]], list[list[int]]]:
    """Generates all sequences at temperature 0.

    Args:
        target: The target, or its folder.
        sequences: Their prompts are used.
        config: The speculative_config.
        capability: A key that `capabilities()["configured"]` must have, with its value.
        stats: Takes what `LLM.stats` returns at the end.
        **engine: Arguments of `LLM`.

    Returns:
        The tokens of every sequence, and the number of tokens that each verify iteration emitted.
    """
    prompts = [list(prompt) for prompt, _ in sequences]
    tokens: list[list[int]] = [[] for _ in prompts]
    emitted: list[list[int]] = [[] for _ in prompts]
    options = {"max_num_seqs": NUM_PROMPTS, "kv_cache_bytes": 16 << 20} | engine
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(
        target if isinstance(target, Path) else tiny_models.make(target),
        dtype="float32",
        speculative_config=None if config is None else with_fixed_k(config),
        show_progress=False,
        **options,
    ) as llm:
        if capability is not None:
            assert llm.capabilities()["configured"][capability[0]] == capability[1]
        for chunk in llm.stream(prompts, params):
            # The first token comes with the prompt, not from a verify iteration.
            if tokens[chunk.index] and chunk.token_ids:
                emitted[chunk.index].append(len(chunk.token_ids))
            tokens[chunk.index] += chunk.token_ids
        assert llm._executor.check_integrity() == ""
        if stats is not None:
            stats |= llm.stats()
    return tokens, emitted


def compare_iterations(
    reference: GreedyDrafter,
    sequences: Sequences,
    emitted: list[list[int]],
    k: int,
    least_margin: float,
) -> tuple[int, int]:
    """Checks that every iteration emitted what a reference emits, up to the first near tie.

    Args:
        reference: The drafter's reference.
        sequences: The sequences.
        emitted: The number of tokens that each iteration emitted, as `run` returns it.
        k: The number of drafts of an iteration.
        least_margin: The difference of two logits below which they nearly tie, relative to the
            largest logit.

    Returns:
        The number of iterations that were compared, and of drafts that they accepted.
    """
    compared = accepted = 0
    for (prompt, continuation), counts in zip(sequences, emitted, strict=True):
        simulation = simulate(reference, prompt, continuation, k)
        clear = simulation.num_clear(least_margin)
        assert counts[:clear] == simulation.emitted[:clear]
        compared += clear
        accepted += sum(counts[:clear]) - clear
    return compared, accepted


def check_run(
    reference: GreedyDrafter,
    sequences: Sequences,
    tokens: list[list[int]],
    emitted: list[list[int]],
    k: int,
    least_margin: float,
    least_compared: int,
) -> None:
    """Checks a run against the target's continuations and against a reference of the drafter."""
    assert tokens == [list(continuation) for _, continuation in sequences]
    compared, accepted = compare_iterations(reference, sequences, emitted, k, least_margin)
    assert compared >= least_compared, "too many near ties: choose another seed"
    assert accepted >= compared // 5, "the drafter was hardly ever right: choose another seed"


def check_preempted_run(
    reference: GreedyDrafter,
    sequences: Sequences,
    tokens: list[list[int]],
    emitted: list[list[int]],
    num_preemptions: int,
    k: int,
    least_margin: float,
    least_compared: int,
) -> None:
    """Checks a run in which sequences were preempted, as `check_run` does.

    A sequence that is computed again emits one token, as a prompt does, and drafts after it.
    """
    assert tokens == [list(continuation) for _, continuation in sequences]
    recomputed = compared = accepted = 0
    for (prompt, continuation), counts in zip(sequences, emitted, strict=True):
        states = reference.target.states([*prompt, *continuation])
        position = 1
        for count in counts:
            want, margin = emission(reference, states, prompt, continuation, position, k)
            if margin >= least_margin:
                assert count in (want, 1)
                recomputed += count != want
                compared += 1
                accepted += count - 1
            position += count
    assert recomputed <= num_preemptions
    assert num_preemptions > 0
    assert compared >= least_compared, "too many near ties: choose another seed"
    assert accepted >= compared // 5, "the drafter was hardly ever right: choose another seed"


def write_oracle_target(spec: TinySpec, path: Path) -> torch.Tensor:
    """Writes a target whose next token is a function of the current one: a cycle through all ids.

    Its layers add nothing, its embeddings are unit vectors, and row s of its lm_head is the unit
    vector of the token before s.

    Args:
        spec: A target of `ORACLE_VOCAB` ids and a hidden size of 64.
        path: A new folder.

    Returns:
        The token after each token.
    """
    tiny_models.copy_checkpoint(tiny_models.make(spec), path)
    order = torch.randperm(ORACLE_VOCAB, generator=torch.Generator().manual_seed(0))
    following = torch.empty(ORACLE_VOCAB, dtype=torch.long)
    following[order] = order.roll(-1)
    tensors = tiny_models.load_tensors(path)
    silence_layers(tensors)
    unit = torch.eye(ORACLE_VOCAB, 64)
    tensors["model.embed_tokens.weight"] = unit
    tensors["model.norm.weight"] = torch.ones(64)
    tensors["lm_head.weight"] = torch.empty(ORACLE_VOCAB, 64)
    tensors["lm_head.weight"][following] = unit
    tiny_models.save_tensors(path, tensors)
    return following


def silence_layers(tensors: dict[str, torch.Tensor]) -> None:
    """Makes the layers of a model add nothing to the residual stream."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("layer_scalar"):
            tensor.fill_(1.0)


def check_oracle(
    target: Path,
    following: torch.Tensor,
    config: dict[str, Any],
    chunk: int | None,
    num_iterations: Callable[[list[int]], int],
) -> None:
    """Checks that a drafter is right whenever it can be.

    Args:
        target: What `write_oracle_target` wrote.
        following: What it returned.
        config: The speculative_config.
        chunk: The prefill_chunk_size.
        num_iterations: The number of iterations that a sequence of tokens takes then.
    """
    rng = random.Random(1)
    prompts = [[rng.randrange(ORACLE_VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=41)
    with LLM(
        target,
        speculative_config=with_fixed_k(config),
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
            steps = output.metrics.speculative_decoding["num_spec_steps"]
            assert steps == num_iterations(tokens)
