# SPDX-License-Identifier: Apache-2.0
"""Logits of an engine in float32 beside those of transformers.

The bar is 2e-4 of the largest logit: a few hundred float32 roundings through a handful of layers
are an order of magnitude below it, and any wrong fact about a model (a norm's offset, a window off
by one, a frequency, a head mapped wrongly) is several above.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tiny_models import TinySpec, copy_checkpoint, edit_tensors, make, reference_logits

if TYPE_CHECKING:
    import torch

RELATIVE_TOLERANCE = 2e-4
PROMPT_TOKENS = 45


def check_that_it_shows(
    spec: TinySpec, change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check_that_a_fact_shows` for a tiny checkpoint of a specification."""
    prompt = prompt_of(spec)
    expected = reference_logits(make(spec), prompt)
    check_that_a_fact_shows(make(spec), prompt, expected, change, monkeypatch)


def check_that_a_fact_shows(
    path: Path,
    prompt: list[int],
    expected: np.ndarray,
    change: Callable[[dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that a change of the description moves the logits by ten times the bar."""
    from paceline.loader.family import Family

    original = Family.config_for

    def config_for(family: Family, weight_dtype: str) -> dict[str, Any]:
        config = copy.deepcopy(original(family, weight_dtype))
        change(config)
        return config

    monkeypatch.setattr(Family, "config_for", config_for)
    difference = np.abs(logits_of(path, prompt) - expected).max()
    assert difference > 10 * RELATIVE_TOLERANCE * np.abs(expected).max()


def check_that_a_tensor_shows(
    path: Path,
    prompt: list[int],
    expected: np.ndarray,
    change: Callable[[str, torch.Tensor], torch.Tensor],
    tmp_path: Path,
) -> None:
    """Checks that a change of tensors, by name and values, moves the logits over the bar."""
    wrong = copy_checkpoint(path, tmp_path / "wrong")

    def change_all(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: change(name, t).contiguous() for name, t in tensors.items()}

    edit_tensors(wrong, change_all)
    with pytest.raises(AssertionError, match="transformers has"):
        assert_close(logits_of(wrong, prompt), expected)


def prompt_of(spec: TinySpec, length: int = PROMPT_TOKENS) -> list[int]:
    """Random token ids."""
    generator = np.random.default_rng(spec.seed)
    return [int(token) for token in generator.integers(0, spec.vocab_size, length)]


def logits_of(
    path: Path, prompt: list[int], *, dtype: str = "float32", prefill_chunk_size: int | None = None
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The logits of every position of a prompt, on the CPU."""
    from paceline import LLM

    with LLM(
        path,
        device="cpu",
        dtype=dtype,
        max_num_seqs=2,
        kv_cache_bytes=24 << 20,
        prefill_chunk_size=prefill_chunk_size,
        show_progress=False,
    ) as llm:
        return llm.logits(prompt)


def assert_close(seen: np.ndarray, expected: np.ndarray) -> None:
    """Reports NaN first, then the largest difference with its index."""
    assert seen.shape == expected.shape
    assert seen.dtype == np.float32
    assert np.isfinite(seen).all(), f"not finite at {np.argwhere(~np.isfinite(seen))[:5].tolist()}"
    difference = np.abs(seen - expected)
    row, column = np.unravel_index(int(difference.argmax()), difference.shape)
    bar = RELATIVE_TOLERANCE * float(np.abs(expected).max())
    assert difference[row, column] <= bar, (
        f"logits[{row}, {column}] is {seen[row, column]}, transformers has "
        f"{expected[row, column]}; they may differ by {bar:.3g}"
    )
