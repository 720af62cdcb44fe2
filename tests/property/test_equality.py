# SPDX-License-Identifier: Apache-2.0
"""Speculative output == plain output over the whole matrix: tokens, and logprobs bit for bit.

Axes: family x drafter x k x block size x prefill chunk x batch x driver x early stop of drafting x
position of drafts x device lateness x temperature x truncation, penalties and bias x window lists x
size of the KV pool x neighbours that are cancelled at random x samples per request x prefix cache
x number of drafts by iteration.
The prompts are branches of a random tree, and with the prefix cache all jobs run twice. The
reference runs every sample as a separate plain request without that cache. Assistants of Gemma 4
draft for its targets only.

Level 1 (CI) runs a pairwise cover of all axes and 200 random cells; PACELINE_TEST_LEVEL=3 runs
20,000 random cells, of more than a hundred million, which takes an hour or two.
PACELINE_SEED replaces the seed of the random cells; failures print the cell.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

import assistant_models
import block_models
import eagle_models
import tiny_models
from paceline import _core
from paceline.loader import LoadedModel, load_checkpoint, load_drafter

VOCAB = 128
MAX_MODEL_LEN = 192
MAX_NUM_SEQS = 8
MAX_LOGPROBS = 3
AUX_LAYERS = (0, 1)
SEED = int(os.environ.get("PACELINE_SEED", "20261121"))
LEVEL = int(os.environ.get("PACELINE_TEST_LEVEL", "1"))
NUM_RANDOM_CELLS = 200 if LEVEL < 3 else 20_000

TARGETS = {
    **{name: tiny_models.TinySpec(name) for name in ("llama", "qwen3", "gemma3", "gemma4")},
    # The large sizes: keys as values in full layers, a layer's own KV in every layer.
    "gemma4_large": tiny_models.TinySpec(
        "gemma4", k_eq_v=True, shared_layers=0, per_layer_size=0, logit_soft_cap=30.0
    ),
    "gpt_oss": tiny_models.TinySpec("gpt_oss", num_experts=4, top_k=2),
    "gpt_oss_large": tiny_models.TinySpec("gpt_oss", num_layers=4, quantization="mxfp4"),
    # q, k and v are rows of one matrix, and each has scales of its own.
    "qwen3_fp8": tiny_models.TinySpec("qwen3", quantization="fp8_block"),
}
# An lm_head without clusters and with them.
ASSISTANTS = {
    "gemma4_mtp": assistant_models.AssistantSpec(seed=3),
    "gemma4_mtp_clusters": assistant_models.AssistantSpec(seed=3, centroids=(16, 3)),
}
# Blocks for every k; a window that begins with each row or with the block, and all ids or fewer.
BLOCKS = {
    "dflash": block_models.BlockSpec(
        "z-lab", seed=3, block_size=17, window=9, aux_layers=AUX_LAYERS
    ),
    "dspark": block_models.BlockSpec(
        "speculators", seed=3, block_size=16, window=9, aux_layers=AUX_LAYERS, markov_rank=8,
        draft_vocab_size=96,
    ),
}  # fmt: skip

AXES: dict[str, tuple[Any, ...]] = {
    "family": tuple(TARGETS),
    # A noisy copy agrees often, a smaller model of the same family with other weights seldom. EAGLE
    # draft heads and assistants are random too, and prompt lookup is right by accident. "other
    # family" has a dense drafter for mixtures, and a mixture for Llama.
    "drafter": (
        "self",
        "noisy",
        "same_family",
        "other_family",
        "eagle",
        "eagle3",
        "ngram",
        *ASSISTANTS,
        *BLOCKS,
    ),
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
    "use_window_lists": (False, True),
    "is_tight": (False, True),
    "has_neighbours": (False, True),
    "num_samples": (1, 3),
    "enable_prefix_caching": (True, False),
    "num_threads": (1, 2),
    "dtype": ("float32", "bfloat16"),
    # Not 0: each iteration drafts another number of tokens.
    "draft_schedule_seed": (0, 1, 2),
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
    use_window_lists: bool
    is_tight: bool
    has_neighbours: bool
    num_samples: int
    enable_prefix_caching: bool
    num_threads: int
    dtype: str
    draft_schedule_seed: int

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


def is_possible(family: str, drafter: str) -> bool:
    return drafter not in ASSISTANTS or TARGETS[family].family == "gemma4"


def random_cell(rng: random.Random, **fixed: Any) -> Cell:
    while True:
        values = {axis: rng.choice(values) for axis, values in AXES.items()} | fixed
        if is_possible(values["family"], values["drafter"]):
            return Cell(**values)


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


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-equality-"))


@functools.cache
def model(family: str, variant: str, dtype: str) -> LoadedModel:
    """A tiny target ("target"), or a drafter for it that is a model."""
    spec = replace(TARGETS[family], seed=7, vocab_size=VOCAB)
    if variant in ASSISTANTS:
        path = scratch() / f"{family}-{variant}"
        if not path.exists():
            assistant_models.write(ASSISTANTS[variant], tiny_models.make(spec), path)
        return load_drafter(path, model(family, "target", dtype), progress=False)
    if variant in BLOCKS:
        path = scratch() / f"{family}-{variant}"
        if not path.exists():
            block_models.write(BLOCKS[variant], tiny_models.make(spec), path)
        return load_drafter(path, model(family, "target", dtype), progress=False)
    if variant in ("eagle", "eagle3"):
        path = scratch() / f"{family}-{variant}"
        if not path.exists():
            head = eagle_models.EagleSpec(
                variant, seed=3, aux_layers=AUX_LAYERS, num_aux=len(AUX_LAYERS)
            )
            eagle_models.write(head, tiny_models.make(spec), path)
        return load_drafter(path, model(family, "target", dtype), progress=False)
    if variant in ("target", "self"):
        path = tiny_models.make(spec)
    elif variant == "noisy":
        path = scratch() / f"{family}-noisy"
        if not path.exists():
            plain = tiny_models.make(spec)
            if spec.quantization is not None:
                plain = tiny_models.plain_copy(plain)
            tiny_models.perturbed_copy(plain, path, noise=0.03, seed=1)
    elif variant == "same_family":
        small = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "num_experts": 4, "top_k": 2}
        if spec.family == "gpt_oss":
            small["num_layers"] = 2
        path = tiny_models.make(replace(spec, seed=8, **small))
    else:
        others = {
            "llama": "gpt_oss",
            "qwen3": "llama",
            "gemma3": "qwen3",
            "gemma4": "gemma3",
            "gpt_oss": "gemma4",
        }
        other = others[spec.family]
        path = tiny_models.make(tiny_models.TinySpec(other, seed=9, vocab_size=VOCAB))
    return load_checkpoint(path, dtype=dtype, progress=False)


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    stop: tuple[int, ...]
    logprobs: int  # -1: none
    prompt_logprobs: int
    sampling: dict[str, Any]


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Truncation, penalties and bias of a request; for a third of them none."""
    if rng.random() < 1 / 3:
        return {}
    choices: dict[str, tuple[Any, ...]] = {
        "top_k": (1, 5, 40),
        "top_p": (0.3, 0.9),
        "min_p": (0.02, 0.2),
        "repetition_penalty": (0.9, 1.3),
        "presence_penalty": (-0.4, 0.8),
        "frequency_penalty": (-0.2, 0.5),
        "logit_bias": ([(1 + rng.randrange(VOCAB - 1), 2.0), (0, -3.0)],),
    }
    return {name: rng.choice(of) for name, of in choices.items() if rng.random() < 0.4}


@functools.cache
def jobs(batch: int, has_sampling: bool) -> tuple[Job, ...]:
    rng = random.Random(batch)
    asks = random.Random(-batch)
    samples = random.Random(f"sampling {batch}")
    branches = random.Random(f"branches {batch}")
    prompts: list[tuple[int, ...]] = []
    for _ in range(batch):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 50)))
        if prompts and branches.random() < 0.8:
            other = branches.choice(prompts)
            prompt = (*other[: branches.randint(0, len(other))], *prompt)[:50]
        prompts.append(prompt)
    return tuple(
        Job(
            prompt=prompt,
            max_tokens=rng.randint(1, 32),
            seed=rng.randrange(2**40),
            stop=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
            logprobs=asks.choice((-1, -1, 0, MAX_LOGPROBS)),
            prompt_logprobs=asks.choice((-1, -1, 0, MAX_LOGPROBS)),
            sampling=random_sampling(samples) if has_sampling else {},
        )
        for prompt in prompts
    )


def as_separate_requests(work: tuple[Job, ...], num_samples: int) -> tuple[Job, ...]:
    """Returns every sample as a separate request, in the order of `run`.

    The first sample returns the prompt's logprobs for all samples.
    """
    return tuple(
        replace(
            job,
            seed=job.seed + sample,
            prompt_logprobs=job.prompt_logprobs if sample == 0 else -1,
        )
        for job in work
        for sample in range(num_samples)
    )


@dataclass
class Outcome:
    tokens: list[int]
    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0
    logprobs: list[Any] = field(default_factory=list)  # by token
    prompt_logprobs: list[Any] = field(default_factory=list)  # by delivery: one at most


def run(
    executor: _core.Executor, work: tuple[Job, ...], temperature: float, *, neighbours: int = 0,
    num_samples: int = 1,
) -> list[Outcome]:  # fmt: skip
    """Runs all jobs at once; neighbours are queued between them and cancelled at random moments."""
    rng = random.Random(len(work))
    index: dict[int, int] = {}
    cancellable: list[int] = []

    def add(job: Job) -> int:
        request = executor.add_request(
            list(job.prompt), temperature=temperature, seed=job.seed, max_tokens=job.max_tokens,
            stop_token_ids=list(job.stop), logprobs=job.logprobs,
            prompt_logprobs=job.prompt_logprobs, num_samples=num_samples, **job.sampling,
        )  # fmt: skip
        assert request is not None
        return request

    for i, job in enumerate(work):
        if len(cancellable) < neighbours:
            cancellable.append(add(replace(job, seed=job.seed + 1, max_tokens=60)))
        index[add(job)] = i
    outcomes = [Outcome([]) for _ in range(len(work) * num_samples)]
    left = len(outcomes)
    while left:
        if cancellable and rng.random() < 0.3:
            executor.cancel(cancellable.pop(rng.randrange(len(cancellable))))
        for event in executor.poll(2):
            if event.id not in index:
                continue
            outcome = outcomes[index[event.id] * num_samples + event.sample]
            outcome.tokens += event.token_ids
            outcome.logprobs += event.logprobs
            if event.prompt_logprobs is not None:
                outcome.prompt_logprobs.append(event.prompt_logprobs)
            if event.finish_reason is not None:
                outcome.finish_reason = event.finish_reason
                outcome.drafted = event.counters["num_draft_tokens"]
                outcome.accepted = event.counters["num_accepted_tokens"]
                left -= 1
    for request in cancellable:
        executor.cancel(request)
    return outcomes


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
    can_stop = cell.driver == "while" and cell.drafter != "ngram"
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
        "num_speculative_tokens": cell.k,
        "draft_driver": cell.driver,
        "draft_stop_threshold": cell.draft_stop_threshold if can_stop else 0.0,
        "ngram_min": 1 if cell.drafter == "ngram" else 0,
        "ngram_max": 3 if cell.drafter == "ngram" else 0,
        "device_lateness": cell.lateness,
        "use_window_lists": cell.use_window_lists,
        "poison_freed_blocks": True,
        "max_logprobs": MAX_LOGPROBS,
        "draft_schedule_seed": cell.draft_schedule_seed,
        "adaptive": None if cell.batch % 2 == 0 else False,
    }


@functools.cache
def plain_outcomes(
    family: str, dtype: str, batch: int, temperature: float, has_sampling: bool,
    use_window_lists: bool, num_samples: int,
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
            "use_window_lists": use_window_lists,
            "max_logprobs": MAX_LOGPROBS,
            "enable_prefix_caching": False,
        },
    )
    work = as_separate_requests(jobs(batch, has_sampling), num_samples)
    try:
        return tuple(run(executor, work, temperature))
    finally:
        executor.close()


totals = {"drafted": 0, "accepted": 0, "preemptions": 0, "shared": 0, "hits": 0, "evicted": 0}


def check(cell: Cell, **acceptance: Any) -> None:
    """Compares one cell with plain decoding.

    `acceptance` are executor options that choose another acceptance method than coupled."""
    target = model(cell.family, "target", cell.dtype)
    is_model = cell.drafter != "ngram"
    draft = model(cell.family, cell.drafter, cell.dtype).model if is_model else None
    expected = plain_outcomes(
        cell.family, cell.dtype, cell.batch, cell.temperature, cell.has_sampling,
        cell.use_window_lists, cell.num_samples,
    )  # fmt: skip
    kv_cache_bytes = tight_bytes(cell, target, draft) if cell.is_tight else 32 << 20
    executor = _core.Executor(target.model, draft, options(cell, kv_cache_bytes) | acceptance)
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


@pytest.mark.parametrize("cell", pairwise_cover(), ids=str)
def test_pairwise(cell: Cell) -> None:
    check(cell)


def random_cells() -> Iterator[Cell]:
    rng = random.Random(SEED)
    for _ in range(NUM_RANDOM_CELLS):
        yield random_cell(rng)


def test_cells() -> None:
    for number, cell in enumerate(random_cells()):
        try:
            check(cell)
        except AssertionError as error:
            raise AssertionError(f"PACELINE_SEED={SEED}, cell {number}: {error}") from error


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
            accept_method=method,
            samples_drafts=samples_drafts,
            num_draft_proposals=rng.choice([0, 1, 5, 256]) if samples_drafts else 0,
        )


def test_the_cells_had_drafts_preemptions_and_shared_prompts() -> None:
    """Runs last: drafts were accepted and rejected, sequences preempted, and prompts shared."""
    if totals["drafted"] == 0:
        check(random_cell(random.Random(1)))
    assert 0 < totals["accepted"] < totals["drafted"]
    if totals["drafted"] > 100_000:
        assert totals["preemptions"] > 100
        assert totals["shared"] > 10_000
        assert totals["hits"] > 10_000
        assert totals["evicted"] > 1_000
