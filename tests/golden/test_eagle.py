# SPDX-License-Identifier: Apache-2.0
"""EAGLE drafters against `eagle_reference`: what every iteration of a run emits, at temperature 0.

Random heads never guess right, so that any two wrong engines would agree. The heads here are first
trained on the very texts that they then draft, for a second and not to the end: how many of the
drafts of each iteration are kept is then a fingerprint of the drafter's first and later steps.
Drafts whose two best logits nearly tie may fall the other way in float32; a text counts up to the
first of them.

The oracles are heads whose every draft is right by construction, so nothing may be rejected.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_models
import tiny_models
from eagle_models import EagleSpec
from eagle_reference import EagleReference, TargetReference, overfit, simulate
from paceline import LLM, SamplingParams
from tiny_models import TinySpec

pytestmark = pytest.mark.golden

K = 4
NUM_TEXTS = 4
NUM_TOKENS = 40
# Relative to the largest logit; float32 errs by a tenth of it at most.
LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40  # iterations of all texts together

LLAMA = TinySpec("llama", seed=3, num_layers=8)
QWEN3 = TinySpec("qwen3", seed=3, num_layers=8)
GEMMA3 = TinySpec("gemma3", seed=3, num_layers=6)

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
}


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-eagle-"))


@functools.cache
def target_reference(spec: TinySpec) -> TargetReference:
    return TargetReference(tiny_models.make(spec))


@functools.cache
def texts(spec: TinySpec) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Prompts with the target's own greedy continuations."""
    rng = random.Random(spec.seed)
    prompts = [
        tuple(rng.randrange(spec.vocab_size) for _ in range(rng.randint(1, 30)))
        for _ in range(NUM_TEXTS)
    ]
    reference = target_reference(spec)
    return tuple((p, tuple(reference.greedy(p, NUM_TOKENS))) for p in prompts)


@functools.cache
def trained(case: str) -> tuple[Path, EagleReference]:
    """A drafter that is right about every other time."""
    target, spec = CASES[case]
    path = scratch() / case.replace(" ", "-")
    eagle_models.write(spec, tiny_models.make(target), path)
    reference = EagleReference(path, target_reference(target))
    whole = [[*prompt, *continuation] for prompt, continuation in texts(target)]
    tensors = tiny_models.load_tensors(path)
    plan = {"steps": 40, "rate": 0.01} if spec.is_eagle3 else {"steps": 60, "rate": 0.003}
    for name, tensor in overfit(reference, whole, **plan).items():
        tensors[name.replace("layers.0.", spec.first_layer)] = tensor
    tiny_models.save_tensors(path, tensors)
    return path, EagleReference(path, target_reference(target))


def run(
    target: TinySpec, model: Path | None, k: int = K, **engine: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every text, and how many of them each verify iteration emitted."""
    config = None
    if model is not None:
        config = {"model": str(model), "num_speculative_tokens": k}
        config["x"] = {"draft_driver": engine.pop("draft_driver", "unrolled")}
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
        for chunk in llm.stream(prompts, params):
            # The first token comes with the prompt, not from a verify iteration.
            if tokens[chunk.index] and chunk.token_ids:
                emitted[chunk.index].append(len(chunk.token_ids))
            tokens[chunk.index] += chunk.token_ids
        assert llm._executor.check_integrity() == ""
    return tokens, emitted


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_equals_the_reference(case: str) -> None:
    target, _ = CASES[case]
    path, reference = trained(case)
    tokens, emitted = run(target, path)
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


@pytest.mark.parametrize("case", ["eagle", "eagle3", "speculators, normed output"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_other_numbers_of_drafts(case: str, k: int) -> None:
    target, _ = CASES[case]
    path, reference = trained(case)
    _, emitted = run(target, path, k)
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
        {"draft_driver": "eager", "num_threads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["eagle", "eagle3", "eagle3 on gemma3"])
def test_neither_chunks_nor_batches_change_a_draft(case: str, engine: dict[str, Any]) -> None:
    target, _ = CASES[case]
    path, _ = trained(case)
    assert run(target, path, **engine) == run(target, path)


def test_the_comparison_has_teeth() -> None:
    """References that are wrong in one point emit something else."""
    case = "speculators"
    target, _ = CASES[case]
    _, right = trained(case)

    def emitted(reference: EagleReference) -> list[list[int]]:
        return [simulate(reference, p, c, K).emitted for p, c in texts(target)]

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
    unit = torch.eye(48, 64)
    tensors["model.embed_tokens.weight"] = unit
    tensors["model.norm.weight"] = torch.ones(64)
    # Row s is the unit vector of the token before s.
    tensors["lm_head.weight"] = torch.empty(48, 64)
    tensors["lm_head.weight"][following] = unit
    tiny_models.save_tensors(path, tensors)
    return path, following


def oracle_head(layout: str, path: Path) -> None:
    """A head that knows the next token from the hidden state alone, never from the token.

    From the unit vector of t_i it makes that of t_{i+1}, which is what it feeds back, and whose
    successor t_{i+2} its lm_head gives. A hidden state of another position, or of another layer
    after the norm, or a stale one, makes it draft another token.
    """
    target, following = oracle_target()
    spec = EagleSpec(layout, intermediate_size=64, draft_vocab_size=40)
    eagle_models.write(spec, target, path)
    tensors = tiny_models.load_tensors(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor.zero_()
        elif tensor.ndim == 1 and name.endswith("norm.weight"):
            tensor.fill_(1.0)
    step = torch.zeros(64, 64)
    step[following, torch.arange(48)] = 1.0
    if layout == "eagle":
        # The embedding comes first.
        tensors["fc.weight"][:, 64:] = step
    else:
        tensors["fc.weight"][:, 64:128] = torch.eye(64)
        # On the unit vector of length c the norm gives sqrt(64), the gate silu of that.
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
            steps = output.metrics.speculative_decoding["num_spec_steps"]
            assert steps == _steps_needed(tokens, known, 3)


def _steps_needed(tokens: list[int], known: torch.Tensor, k: int) -> int:
    """Iterations of a drafter that is right whenever the token is in its vocabulary."""
    position, steps = 1, 0
    while position < len(tokens):
        accepted = 0
        while (
            accepted < k
            and position + accepted < len(tokens)
            and known[tokens[position + accepted]]
        ):
            accepted += 1
        position += accepted + 1
        steps += 1
    return steps
