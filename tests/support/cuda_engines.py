# SPDX-License-Identifier: Apache-2.0
"""Engines on a GPU: models and requests that the files test_cuda*.py share, and checks that every
kind of model must pass.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from paceline import LLM, SamplingParams, _core

Logits = np.ndarray[Any, Any]

DRIVERS = ("unrolled", "replay", "while", "eager")
VOCAB = 256
# Longer than the windows, so that old blocks are released.
MAX_MODEL_LEN = 256
WINDOW = 24


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Any:
    """The status of the GPU, as the runtime reports it."""
    status = _core.cuda_status()
    if not status["is_usable"]:
        if os.environ.get("PACELINE_REQUIRE_GPU") == "1":
            pytest.fail(f"PACELINE_REQUIRE_GPU=1, but: {status['reason']}")
        pytest.skip(status["reason"])
    return status


@pytest.fixture
def bfloat16_transformers() -> Callable[[Path, list[int]], Logits]:
    """Computes logits with transformers in bfloat16, on the GPU where torch has it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def logits(path: Path, prompt: list[int]) -> Logits:
        # Never .to(bfloat16), which would round the rotary frequencies too.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="eager"
        )
        with torch.no_grad():
            seen = model.eval().to(device)(torch.tensor([prompt], device=device)).logits[0]
        values: Logits = seen.float().cpu().numpy()
        return values

    return logits


def spec(family: str = "gemma3", *, dtype: str = "bfloat16", seed: int = 3) -> tiny_models.TinySpec:
    """A checkpoint whose heads fit the kernels; the root of its width is a bfloat16."""
    return tiny_models.TinySpec(
        family, seed=seed, dtype=dtype, vocab_size=VOCAB, hidden_size=256, intermediate_size=512,
        head_dim=64, window=WINDOW, tokenizer_size=128,
    )  # fmt: skip


def open_llm(path: Path, draft: Path | None = None, k: int = 4, **changes: Any) -> LLM:
    """An LLM on the GPU; `x` among the changes goes into speculative_config."""
    config = None if draft is None else {"model": str(draft)}
    return _open(path, config, k, changes)


def open_mtp(path: Path, k: int, **changes: Any) -> LLM:
    """An LLM on the GPU that drafts with its MTP layer; as `open_llm`."""
    return _open(path, {"method": "mtp"}, k, changes)


def _open(path: Path, config: dict[str, Any] | None, k: int, changes: dict[str, Any]) -> LLM:
    nested = changes.pop("x", {})
    if config is not None:
        # Fixed, so that counts do not depend on times.
        config |= {"num_speculative_tokens": k, "x": {"adaptive": False} | nested}
    settings = {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 64 << 20}
    settings |= {"device": "cuda", "show_progress": False} | changes
    return LLM(path, speculative_config=config, **settings)


def random_prompts(num: int) -> list[list[int]]:
    rng = random.Random(num)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))] for _ in range(num)]


PROMPTS = random_prompts(13)


def scoring_prompt(seed: int, length: int = 120) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def params_of(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=100 + i, max_tokens=20 + 5 * (i % 5))
        for i in range(len(PROMPTS))
    ]


def generate(llm: LLM, temperature: float) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params_of(temperature))
    assert llm._executor.check_integrity() == ""
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def plain_tokens(path: Path, temperature: float) -> list[list[int]]:
    """The reference: no drafter."""
    with open_llm(path) as llm:
        return generate(llm, temperature)


def logits_of(path: Path, prompt: list[int], **changes: Any) -> Logits:
    """The logits of a prompt, all of them finite."""
    with open_llm(path, **changes) as llm:
        seen: Logits = llm.logits(prompt)
    assert np.isfinite(seen).all()
    return seen


# ---- checks ------------------------------------------------------------------------------------


def check_mtp_changes_no_token(path: Path, driver: str, temperature: float) -> None:
    """An MTP layer with few drafts and with the most."""
    for k in (3, 16):
        with open_mtp(path, k, x={"draft_driver": driver}) as llm:
            assert generate(llm, temperature) == plain_tokens(path, temperature)


def check_a_drafter_agrees_with_itself(path: Path, driver: str, temperature: float = 1.0) -> None:
    """A model that drafts for itself accepts everything."""
    with open_llm(path, path, x={"draft_driver": driver}) as llm:
        check_all_accepted(llm.generate(PROMPTS, params_of(temperature)))


def check_all_accepted(outputs: Iterable[Any]) -> None:
    """Every draft of every output was accepted."""
    for output in outputs:
        counters = output.metrics.speculative_decoding
        assert counters is not None
        assert counters["num_accepted_draft_tokens"] == counters["num_draft_tokens"] > 0


def check_logits_do_not_depend_on_chunks(path: Path, prompt: list[int]) -> None:
    """A prompt in chunks of several sizes has the bits of the whole prompt."""
    whole = logits_of(path, prompt)
    for chunk in (1, 16, 63):
        np.testing.assert_array_equal(logits_of(path, prompt, prefill_chunk_size=chunk), whole)


def check_float32_logits(
    path: Path, prompt: list[int], expected: Logits, least_tolerance: float = 0
) -> None:
    """The logits in float32 are those of a reference, within 2e-4 of the largest one.

    Args:
        path: The checkpoint.
        prompt: Its token ids.
        expected: The reference.
        least_tolerance: An absolute error that is allowed in any case.
    """
    error = np.abs(logits_of(path, prompt, dtype="float32") - expected).max()
    tolerance = max(2e-4 * np.abs(expected).max(), least_tolerance)
    assert error <= tolerance, f"error {error:.3g}, allowed {tolerance:.3g}"


def check_bfloat16_logits(name: str, cases: Iterable[tuple[Logits, Logits, Logits]]) -> None:
    """In bfloat16, errors over several checkpoints are at most 1.25 times those of transformers.

    Args:
        name: The model, for the report.
        cases: By checkpoint, the logits of the GPU, those of transformers and the exact ones.
    """
    ours, theirs = [], []
    for seen, other, exact in cases:
        ours.append(seen - exact)
        theirs.append(other - exact)
    our_rms, their_rms = (float(np.sqrt(np.mean(np.square(x)))) for x in (ours, theirs))
    print(f"{name}: RMS error {our_rms:.4g}, of transformers {their_rms:.4g}")
    assert our_rms <= 1.25 * their_rms


def check_bfloat16_checkpoints(
    name: str,
    checkpoint: Callable[[int], Path],
    of_transformers: Callable[[Path, list[int]], Logits],
) -> None:
    """`check_bfloat16_logits` of checkpoints by seed; float32 arithmetic on the CPU is exact."""

    def case(seed: int) -> tuple[Logits, Logits, Logits]:
        path, prompt = checkpoint(seed), scoring_prompt(seed)
        exact = logits_of(path, prompt, device="cpu", dtype="float32")
        return logits_of(path, prompt), of_transformers(path, prompt), exact

    check_bfloat16_logits(name, map(case, range(3, 7)))
