# SPDX-License-Identifier: Apache-2.0
"""200 prompts of code, each with its own sampling parameters: plain and speculative
decoding must agree on them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.demo import find_demo

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
DRAFTERS = ("draft_model", "eagle3", "gemma4_mtp")
NUM_PROMPTS = 200
NUM_TOKENS = 16
BATCHES = (1, 32)

#: Of a prompt, the last ones: most of a test's time goes into prompts.
MAX_CHARACTERS = 160

#: Ids that are common in code, whatever the tokenizer: a bias on them shows.
BIASED_IDS = 400


@functools.cache
def prompts() -> tuple[str, ...]:
    """The ends of the prompts of the demos' evaluation, and of the first half of each."""
    path = Path(__file__).with_name("demo_prompts.json")
    texts = [entry["text"] for entry in json.loads(path.read_text())]
    both = (*texts, *(text[: len(text) // 2] for text in texts))
    assert len(both) == NUM_PROMPTS
    return tuple(text[-MAX_CHARACTERS:] for text in both)


def sampling_params(index: int, temperature: float, seed: int) -> SamplingParams:
    """Of prompt `index`: top-k, top-p, min-p, penalties and bias come and go independently."""
    rng = random.Random(f"{seed} {index} {temperature}")
    values: dict[str, Any] = {}
    choices: Mapping[str, tuple[Any, ...]] = {
        "top_k": (1, 5, 40),
        "top_p": (0.3, 0.8, 0.95),
        "min_p": (0.02, 0.1, 0.4),
        "repetition_penalty": (0.9, 1.2),
        "presence_penalty": (-0.4, 0.8),
        "frequency_penalty": (-0.2, 0.5),
    }
    if rng.random() < 0.8:  # the others: temperature alone
        values = {name: rng.choice(of) for name, of in choices.items() if rng.random() < 0.35}
        if rng.random() < 0.35:
            ids = rng.sample(range(BIASED_IDS), 5)
            values["logit_bias"] = {token: rng.uniform(-6, 4) for token in ids}
    return SamplingParams(
        temperature=temperature,
        seed=rng.randrange(2**64),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        **values,
    )


@dataclass(frozen=True)
class Work:
    """Prompts and how each samples."""

    texts: list[str]
    params: list[SamplingParams]


@functools.cache
def work(seed: int, is_full: bool) -> Work:
    """Every prompt at every temperature, or, if not `is_full`, each at one of them in turn."""
    texts, params = [], []
    for index, text in enumerate(prompts()):
        here = TEMPERATURES if is_full else (TEMPERATURES[index % len(TEMPERATURES)],)
        for temperature in here:
            texts.append(text)
            params.append(sampling_params(index, temperature, seed))
    return Work(texts, params)


@functools.cache
def plain_tokens(target: Path, device: str, seed: int, is_full: bool) -> list[list[int]]:
    """What plain decoding writes."""
    with LLM(target, device=device, max_num_seqs=32) as llm:
        outputs = llm.generate(work(seed, is_full).texts, work(seed, is_full).params)
    return [output.outputs[0].token_ids for output in outputs]


@dataclass
class Seen:
    """Sums over cells."""

    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


def check_cell(
    drafter: str, k: int, batch: int, *, device: str, seed: int, is_full: bool, is_tight: bool
) -> Seen:
    """Speculative decoding writes what plain decoding does, prompt by prompt.

    Args:
        drafter: Name of a demo.
        k: Drafts an iteration.
        batch: Sequences that run at once.
        device: "cpu" or "cuda".
        seed: Of the parameters of all requests.
        is_full: Every prompt at every temperature.
        is_tight: A pool that is too small for the batch, so that sequences are preempted.

    Returns:
        What happened.

    Raises:
        AssertionError: Some output differs; names the prompt and its parameters.
    """
    demo = find_demo(drafter)
    expected = plain_tokens(demo.target, device, seed, is_full)
    jobs = work(seed, is_full)
    with LLM(
        demo.target,
        speculative_config=demo.speculative_config(k),
        device=device,
        max_num_seqs=batch,
        max_model_len=256,
        kv_cache_bytes=(1 << 20 if device == "cuda" else 3 << 18) if is_tight else None,
    ) as llm:
        outputs = llm.generate(jobs.texts, jobs.params)
        seen = Seen(preemptions=llm._executor.stats()["num_preemptions"])
    for index, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        cell = f"{drafter} k={k} batch={batch} seed={seed}: request {index}, {jobs.params[index]}"
        assert output.outputs[0].token_ids == tokens, cell
        metrics = output.metrics.speculative_decoding
        assert metrics is not None
        seen.drafted += metrics["num_draft_tokens"]
        seen.accepted += metrics["num_accepted_draft_tokens"]
    return seen
