# SPDX-License-Identifier: Apache-2.0
"""The block drafter in the files of DeepSeek-V4-Flash-0731 against its equations in float64."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_golden
from block_reference import overfit
from deepseek_v4_dspark import StagesReference, StagesSpec, stage_values, write_stages
from deepseek_v4_models import V4Spec, stored_tensors
from deepseek_v4_reference import V4TargetReference
from drafter_golden import (
    BLOCK_ENGINES,
    NUM_TOKENS,
    Sequences,
    check_preempted_run,
    check_run,
    room_in,
)
from eagle_reference import Draft, TargetStates, simulate

pytestmark = pytest.mark.golden

LEAST_MARGIN = 2e-4
LEAST_COMPARED = 40
LEAST_CONFIDENCE = 0.4
STAGES = StagesSpec(seed=3)
SPECS = {
    "plain": V4Spec(seed=3),
    "scales": V4Spec(seed=3, has_scales=True, dtype="bfloat16"),
}


@functools.cache
def target_reference(case: str) -> V4TargetReference:
    return V4TargetReference(SPECS[case])


@functools.cache
def sequences(case: str) -> Sequences:
    """Prompts on both sides of the window, 11 tokens and more among them."""
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(128) for _ in range(length)) for length in (2, 7, 11, 30)]
    greedy = target_reference(case).greedy
    return tuple((prompt, tuple(greedy(prompt, NUM_TOKENS))) for prompt in prompts)


@functools.cache
def trained(case: str) -> tuple[Path, StagesReference]:
    """A drafter that is right about every other time."""
    spec = SPECS[case]
    reference = StagesReference(spec, STAGES, target_reference(case))
    texts = [[*prompt, *continuation] for prompt, continuation in sequences(case)]
    values = stage_values(spec, STAGES)
    values |= overfit(reference, texts, steps=60, rate=0.01, seed=1)
    stored = stored_tensors(spec, values)
    path = Path(tempfile.mkdtemp(prefix="paceline-v4-dspark-")) / "model"
    path.mkdir()
    write_stages(path, spec, STAGES, stored)
    reference = StagesReference(spec, STAGES, target_reference(case), stored)
    reference.room = room_in(sequences(case))
    return path, reference


def run(
    case: str, k: int, *, stops: bool = False, **engine: Any
) -> tuple[list[list[int]], list[list[int]]]:
    path, reference = trained(case)
    reference.least_confidence = LEAST_CONFIDENCE if stops else 0.0
    nested = {
        "draft_driver": engine.pop("draft_driver", "unrolled"),
        "draft_stop_threshold": reference.least_confidence,
    }
    config = {"method": "dspark", "num_speculative_tokens": k, "x": nested}
    return drafter_golden.run(path, sequences(case), config, ("method", "dspark"), **engine)


def check(case: str, k: int, *, stops: bool = False, **engine: Any) -> None:
    found = run(case, k, stops=stops, **engine)
    check_run(trained(case)[1], sequences(case), *found, k, LEAST_MARGIN, LEAST_COMPARED)


@pytest.mark.parametrize("case", SPECS)
def test_every_iteration_equals_the_reference(case: str) -> None:
    check(case, STAGES.block_size)


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"prefill_chunk_size": 7, "block_size": 5, "draft_driver": "replay"},
        {"max_num_seqs": 2, "num_threads": 1, "draft_driver": "while"},
        {"draft_driver": "eager"},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", SPECS)
def test_drafts_end_before_one_with_a_low_confidence(case: str, engine: dict[str, Any]) -> None:
    check(case, STAGES.block_size, stops=True, **engine)


@pytest.mark.parametrize(("k", "engine"), [*BLOCK_ENGINES, (5, {"block_size": 1})], ids=str)
def test_drafts_do_not_depend_on_the_engine(k: int, engine: dict[str, Any]) -> None:
    check("plain", k, **engine)


def test_drafts_after_a_preemption() -> None:
    k = STAGES.block_size
    stats: dict[str, Any] = {}
    found = run("plain", k, stats=stats, kv_cache_bytes=230 << 10, block_size=4, max_model_len=80)
    check_preempted_run(
        trained("plain")[1], sequences("plain"), *found, stats["num_preemptions"], k, LEAST_MARGIN,
        LEAST_COMPARED,
    )  # fmt: skip


def check_wrong_references(
    name: str,
    emitted: Callable[[StagesReference], list[list[int]]],
    changes: Sequence[Callable[[StagesReference], None]],
) -> None:
    """References of a trained model that are wrong in one point emit something else."""
    _, right = trained(name)
    expected = emitted(right)
    for change in changes:
        wrong = StagesReference(SPECS[name], STAGES, right.target)
        wrong.weights = dict(right.weights)
        wrong.room = right.room
        change(wrong)
        assert emitted(wrong) != expected, change.__name__


def test_a_wrong_reference_is_noticed() -> None:
    def emitted(reference: StagesReference) -> list[list[int]]:
        return [simulate(reference, p, c, STAGES.block_size).emitted for p, c in sequences("plain")]

    def move_the_window(wrong: StagesReference) -> None:
        wrong.config["sliding_window"] += 1

    def read_one_stream(wrong: StagesReference) -> None:
        wrong.streams_of = lambda streams: streams[:, 0]  # type: ignore[method-assign]

    def swap_stages(wrong: StagesReference) -> None:
        for name in [name for name in wrong.weights if name.startswith("mtp.0.")]:
            other = name.replace("mtp.0.", "mtp.1.")
            if other in wrong.weights:
                w = wrong.weights
                w[name], w[other] = w[other], w[name]

    def take_another_token(wrong: StagesReference) -> None:
        wrong.mask_token -= 1

    def read_earlier_layers(wrong: StagesReference) -> None:
        wrong.spec = replace(wrong.spec, layers=(0, 1, 2))

    def drop_the_last_token(wrong: StagesReference) -> None:
        context = wrong.context

        def shorter(states: TargetStates) -> torch.Tensor:
            whole = context(states)
            return torch.cat([whole[:-1], whole[-2:-1]])

        wrong.context = shorter  # type: ignore[method-assign]

    changes = (
        move_the_window,
        read_one_stream,
        swap_stages,
        take_another_token,
        read_earlier_layers,
        drop_the_last_token,
    )
    check_wrong_references("plain", emitted, changes)


def test_a_wrong_confidence_is_noticed() -> None:
    name = "mtp.2.confidence_head.proj"

    # What a wrong confidence changes depends on the training, which rounds as the machine does. So
    # several limits are tried.
    def emitted(reference: StagesReference) -> list[list[int]]:
        lists = []
        for least_confidence in (LEAST_CONFIDENCE, 0.6, 0.7, 0.8):
            reference.least_confidence = least_confidence
            lists += [
                simulate(reference, p, c, STAGES.block_size).emitted for p, c in sequences("scales")
            ]
        return lists

    def read_behind_the_norm(wrong: StagesReference) -> None:
        last = wrong.stages[-1]
        wrong.confidence_input = lambda row: last.rms(  # type: ignore[method-assign]
            last.summed(row.unsqueeze(0)), "norm"
        )[0]

    def read_the_mean(wrong: StagesReference) -> None:
        wrong.confidence_input = lambda row: row.mean(0)  # type: ignore[method-assign]

    def read_the_first_row(wrong: StagesReference) -> None:
        draft, own = wrong.draft, wrong.confidence_input

        def draft_by_one_row(*arguments: Any) -> list[Draft]:
            rows: list[torch.Tensor] = []

            def first_input(row: torch.Tensor) -> torch.Tensor:
                rows.append(row)
                return own(rows[0])

            wrong.confidence_input = first_input  # type: ignore[method-assign]
            return draft(*arguments)

        wrong.draft = draft_by_one_row  # type: ignore[method-assign]

    def read_no_token(wrong: StagesReference) -> None:
        wrong.weights[f"{name}.weight"] = wrong.weights[f"{name}.weight"].clone()
        wrong.weights[f"{name}.weight"][:, -STAGES.markov_rank :] = 0

    def have_a_bias(wrong: StagesReference) -> None:
        wrong.weights[f"{name}.bias"] = torch.ones(1).double()

    changes = (
        read_behind_the_norm,
        read_the_mean,
        read_the_first_row,
        read_no_token,
        have_a_bias,
    )
    check_wrong_references("scales", emitted, changes)
