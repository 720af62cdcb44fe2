# SPDX-License-Identifier: Apache-2.0
"""Speculative output == plain output over the whole matrix: tokens, and logprobs bit for bit.

Axes: family x drafter x k x block size x prefill chunk x batch x driver x early stop of drafting x
position of drafts x device lateness x temperature x truncation, penalties and bias x
size of the KV pool x neighbours that are cancelled at random x samples per request x prefix cache
x number of drafts by iteration x ranks that share the target.
The prompts are branches of a random tree, and with the prefix cache all jobs run twice. The
reference runs every sample as a separate plain request without that cache. Some drafters are for
some targets only (`equality_models.is_possible`).

Level 1 (CI) runs a pairwise cover of all axes. `make test-nightly` (PACELINE_TEST_LEVEL=2) adds 200
random cells, of more than a hundred million, with a seed of that day; level 3 runs 20,000, which
takes an hour or two. PACELINE_SEED is the seed of the random cells; failures print the cell and it.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from equality_jobs import MAX_LOGPROBS, Outcome, as_separate_requests, jobs, run
from equality_models import (
    ASSISTANTS,
    BLOCKS,
    DRAFTERS,
    HEADS,
    STAGES,
    TARGETS,
    is_possible,
    model,
    most_ranks,
)
from paceline import _core
from paceline.loader import LoadedModel

MAX_MODEL_LEN = 192
MAX_NUM_SEQS = 8
SEED = int(os.environ.get("PACELINE_SEED", "20261121"))
LEVEL = int(os.environ.get("PACELINE_TEST_LEVEL", "1"))
NUM_RANDOM_CELLS = {1: 0, 2: 200}.get(LEVEL, 20_000)

AXES: dict[str, tuple[Any, ...]] = {
    "family": tuple(TARGETS),
    "drafter": DRAFTERS,
    "k": tuple(range(1, 17)),
    "block_size": (8, 16, 32),
    "chunk": (16, 0),
    "batch": (1, 7, 32),
    "driver": ("unrolled", "replay", "while", "eager"),
    # For the one driver that can stop early; 0: off.
    "draft_stop_threshold": (0.0, 0.2, 0.9),
    # For assistants.
    "draft_position": ("last", "next"),
    "lateness": (0, 1, 2),
    "temperature": (0.0, 0.7, 1.0),
    "has_sampling": (False, True),
    "is_tight": (False, True),
    "has_neighbours": (False, True),
    "num_samples": (1, 3),
    "enable_prefix_caching": (True, False),
    "num_threads": (1, 2),
    "dtype": ("float32", "bfloat16"),
    # Not 0: each iteration drafts another number of tokens.
    "draft_schedule_seed": (0, 1, 2),
    # A model that cannot be shared by 4 or by 2 ranks has the largest number that can.
    "ranks": (1, 2, 4),
}


@dataclass(frozen=True)
class Cell:
    """One combination; see AXES."""

    family: str
    drafter: str
    k: int
    block_size: int
    chunk: int
    batch: int
    driver: str
    draft_stop_threshold: float
    draft_position: str
    lateness: int
    temperature: float
    has_sampling: bool
    is_tight: bool
    has_neighbours: bool
    num_samples: int
    enable_prefix_caching: bool
    num_threads: int
    dtype: str
    draft_schedule_seed: int
    ranks: int

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


def random_cell(rng: random.Random, **fixed: Any) -> Cell:
    while True:
        values = {axis: rng.choice(values) for axis, values in AXES.items()} | fixed
        if is_possible(values["family"], values["drafter"]):
            return Cell(**values)


@functools.cache
def pairwise_cover() -> list[Cell]:
    """Few cells in which every pair of values of every two axes occurs (greedy)."""
    rng = random.Random(0)
    axes = list(AXES)
    missing = {
        (a, va, b, vb)
        for a, b in itertools.combinations(axes, 2)
        for va in AXES[a]
        for vb in AXES[b]
        if (a, b) != ("family", "drafter") or is_possible(va, vb)
    }

    def covered(cell: Cell) -> set[tuple[str, Any, str, Any]]:
        return {
            (a, getattr(cell, a), b, getattr(cell, b)) for a, b in itertools.combinations(axes, 2)
        }

    cells = []
    while missing:
        a, va, b, vb = next(iter(sorted(missing, key=repr)))
        candidates = [random_cell(rng, **{a: va, b: vb}) for _ in range(30)]
        best = max(candidates, key=lambda cell: len(covered(cell) & missing))
        cells.append(best)
        missing -= covered(best)
    return cells


def tight_bytes(cell: Cell, target: LoadedModel, draft: _core.Model | None) -> int:
    """Returns the bytes of a pool that holds the longest job and hardly another one."""
    low, high = 1 << 15, 1 << 26
    longest = max(
        jobs(cell.batch, cell.has_sampling), key=lambda job: len(job.prompt) + job.max_tokens
    )
    extra = 60 if cell.has_neighbours else 0
    while high - low > low // 16:
        middle = (low + high) // 2
        try:
            executor = _core.Executor(target.model, draft, options(cell, middle))
        except ValueError:
            low = middle
            continue
        try:
            most = max(longest.max_tokens, extra)
            executor.cancel(executor.add_request([0] * 50, max_tokens=most) or 0)
            high = middle
        except ValueError:
            low = middle
        finally:
            executor.close()
    return high


def options(cell: Cell, kv_cache_bytes: int) -> dict[str, Any]:
    has_blocks = cell.drafter in BLOCKS or cell.drafter in STAGES
    can_stop = has_blocks or (cell.driver == "while" and cell.drafter != "ngram")
    position = {"draft_position": cell.draft_position} if cell.drafter in ASSISTANTS else {}
    return position | {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 256,
        "prefill_chunk_size": cell.chunk,
        "kv_cache_bytes": kv_cache_bytes,
        "block_size": cell.block_size,
        "enable_prefix_caching": cell.enable_prefix_caching,
        "num_threads": cell.num_threads,
        "tensor_parallel_size": min(cell.ranks, most_ranks(cell.family, cell.drafter)),
        "num_speculative_tokens": cell.k,
        "draft_driver": cell.driver,
        "draft_stop_threshold": cell.draft_stop_threshold if can_stop else 0.0,
        "prompt_lookup_min": 1 if cell.drafter == "ngram" else 0,
        "prompt_lookup_max": 3 if cell.drafter == "ngram" else 0,
        "device_lateness": cell.lateness,
        "poison_freed_blocks": True,
        "max_logprobs": MAX_LOGPROBS,
        "draft_schedule_seed": cell.draft_schedule_seed,
        "adaptive": None if cell.batch % 2 == 0 else False,
    }


@functools.cache
def plain_outcomes(
    family: str, dtype: str, batch: int, temperature: float, has_sampling: bool,
    num_samples: int,
) -> tuple[Outcome, ...]:  # fmt: skip
    """The reference: no drafter, one thread, a pool for all jobs, one sample per request."""
    executor = _core.Executor(
        model(family, "target", dtype).model,
        None,
        {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "kv_cache_bytes": 32 << 20,
            "num_threads": 1,
            "max_logprobs": MAX_LOGPROBS,
            "enable_prefix_caching": False,
        },
    )
    work = as_separate_requests(jobs(batch, has_sampling), num_samples)
    try:
        return tuple(run(executor, work, temperature))
    finally:
        executor.close()


def check(cell: Cell, **changes: Any) -> Counter[str]:
    """Compares one cell with plain decoding; returns how much there was to get wrong.

    `changes` are executor options in place of those of the cell."""
    target = model(cell.family, "target", cell.dtype)
    is_model = cell.drafter != "ngram"
    draft = model(cell.family, cell.drafter, cell.dtype).model if is_model else None
    expected = plain_outcomes(
        cell.family, cell.dtype, cell.batch, cell.temperature, cell.has_sampling,
        cell.num_samples,
    )  # fmt: skip
    kv_cache_bytes = tight_bytes(cell, target, draft) if cell.is_tight else 32 << 20
    executor = _core.Executor(target.model, draft, options(cell, kv_cache_bytes) | changes)
    totals: Counter[str] = Counter()
    actual: list[Outcome] = []
    num_runs = 2 if cell.enable_prefix_caching else 1
    try:
        for _ in range(num_runs):
            actual += run(
                executor, jobs(cell.batch, cell.has_sampling), cell.temperature,
                neighbours=5 if cell.has_neighbours else 0, num_samples=cell.num_samples,
            )  # fmt: skip
            assert executor.check_integrity() == ""
        stats = executor.stats()
        totals["preemptions"] += stats["num_preemptions"]
        totals["shared"] += stats["num_shared_tokens"]
        totals["hits"] += stats["num_prefix_hit_tokens"]
        totals["evicted"] += sum(group["evicted_blocks"] for group in stats["kv_groups"])
    finally:
        executor.close()
    for i, (got, want) in enumerate(zip(actual, expected * num_runs, strict=True)):
        assert got.tokens == want.tokens, f"job {i} of {cell}"
        assert got.finish_reason == want.finish_reason, f"job {i} of {cell}"
        assert got.logprobs == want.logprobs, f"job {i} of {cell}"
        assert got.prompt_logprobs == want.prompt_logprobs, f"job {i} of {cell}"
        totals["drafted"] += got.drafted
        totals["accepted"] += got.accepted
        # The drafter's draws see no penalties and no bias.
        if cell.drafter == "self" and not cell.has_sampling:
            assert got.accepted == got.drafted, (
                f"job {i} of {cell}: a draft of the target itself was rejected"
            )
    return totals


@pytest.mark.parametrize("cell", pairwise_cover(), ids=str)
def test_pairwise(cell: Cell) -> None:
    check(cell)


def check_random_cells() -> None:
    rng = random.Random(SEED)
    for number in range(NUM_RANDOM_CELLS):
        try:
            check(random_cell(rng))
        except AssertionError as error:
            raise AssertionError(f"PACELINE_SEED={SEED}, cell {number}: {error}") from error


if NUM_RANDOM_CELLS:
    test_cells = check_random_cells


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("samples_drafts", [True, False])
def test_other_acceptance_at_temperature_zero(method: str, samples_drafts: bool) -> None:
    """At temperature 0 the distribution has one token, so these methods are exact too."""
    rng = random.Random(f"{SEED}-{method}-{samples_drafts}")
    for drafter in AXES["drafter"]:
        cell = random_cell(rng, drafter=drafter, temperature=0.0)
        if drafter == "ngram" and samples_drafts:
            continue
        check(
            cell,
            rejection_sample_method=method,
            draft_sample_method="probabilistic" if samples_drafts else "greedy",
            draft_proposals=rng.choice([0, 1, 5, 256]) if samples_drafts else 0,
        )


def test_prompt_lookup_in_front_of_a_model() -> None:
    rng = random.Random(f"{SEED}-lookup")
    for drafter in ("mtp", *HEADS, *ASSISTANTS, *BLOCKS, *STAGES):
        for _ in range(2):
            cell = random_cell(rng, drafter=drafter)
            check(cell, prompt_lookup_min=1, prompt_lookup_max=rng.choice([1, 2, 4]))


@pytest.mark.parametrize("family", TARGETS)
def test_drafters_change_while_jobs_run(family: str) -> None:
    """Every drafter of a family takes its turn, while the jobs run over and over."""
    rng = random.Random(f"{SEED}-{family}")
    drafters = [drafter for drafter in DRAFTERS if is_possible(family, drafter)]
    first = random_cell(rng, family=family, drafter="ngram", ranks=1, is_tight=False)
    target = model(family, "target", first.dtype)

    def parts(drafter: str) -> tuple[_core.Model | None, dict[str, Any]]:
        cell = random_cell(rng, family=family, drafter=drafter)
        draft = None if drafter == "ngram" else model(family, drafter, first.dtype).model
        return draft, options(cell, 0)

    expected = plain_outcomes(
        family, first.dtype, first.batch, first.temperature, first.has_sampling, first.num_samples
    )
    executor = _core.Executor(target.model, None, options(first, 32 << 20))
    turns = [
        (None, {"num_speculative_tokens": 0}),
        *map(parts, rng.sample(drafters, len(drafters))),
    ]
    is_over = threading.Event()

    def change() -> None:
        try:
            for draft, given in turns:
                executor.set_drafter(draft, given)
        finally:
            is_over.set()

    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(change)
        try:
            num_runs = 0
            while num_runs == 0 or not is_over.is_set():
                actual = run(
                    executor, jobs(first.batch, first.has_sampling), first.temperature,
                    num_samples=first.num_samples,
                )  # fmt: skip
                num_runs += 1
                for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
                    assert got.tokens == want.tokens, f"job {i}, PACELINE_SEED={SEED}"
                    assert got.finish_reason == want.finish_reason, f"job {i}"
                    assert got.logprobs == want.logprobs, f"job {i}"
            changes.result()
            assert executor.check_integrity() == ""
        finally:
            executor.close()


def test_tight_cells_reject_drafts_preempt_share_and_evict() -> None:
    """The cells with little memory have what they are there for.

    Their number of drafts is fixed, so that the counts do not depend on times."""
    totals: Counter[str] = Counter()
    tight = [cell for cell in pairwise_cover() if cell.is_tight and cell.enable_prefix_caching]
    for cell in [cell for cell in tight if cell.batch == 32 and cell.num_samples == 3][:6]:
        totals += check(replace(cell, lateness=0), adaptive=False)
    print(dict(totals))
    assert 0 < totals["accepted"] < totals["drafted"]
    assert all(totals[name] > 0 for name in ("preemptions", "shared", "hits", "evicted"))
