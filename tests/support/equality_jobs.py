# SPDX-License-Identifier: Apache-2.0
"""The requests of tests/property/test_equality.py, and what an engine makes of them."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace
from typing import Any

from equality_models import VOCAB
from paceline import _core

MAX_LOGPROBS = 3


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
