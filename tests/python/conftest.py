# SPDX-License-Identifier: Apache-2.0
"""What the Python tests share: tiny random models, alone, with a drafter, and to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from paceline import LLM


@pytest.fixture(autouse=True)
def auto_is_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device "auto" is the CPU, on machines with a GPU too; test_cuda.py is for those."""
    if request.node.path.name != "test_cuda.py":
        monkeypatch.setattr("paceline.device._auto_device", lambda: "cpu")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """Copies a tiny checkpoint to where the test may break it."""

    def copy(spec: tiny_models.TinySpec | None = None) -> Path:
        original = tiny_models.make(spec or tiny_models.TinySpec())
        return tiny_models.copy_checkpoint(original, tmp_path / "model")

    return copy


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """A tiny Gemma 3: sliding and full layers."""
    return tiny_models.make(tiny_models.TinySpec("gemma3", seed=3))


@pytest.fixture(scope="session")
def draft_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: some of its drafts are kept, some are not."""
    out = tmp_path_factory.mktemp("draft") / "draft"
    return tiny_models.perturbed_copy(target_dir, out, noise=0.03, seed=1)


@pytest.fixture(scope="session")
def speculative_config(draft_dir: Path) -> dict[str, Any]:
    """What a user writes."""
    return {"method": "draft_model", "model": str(draft_dir), "num_speculative_tokens": 4}


@pytest.fixture(scope="session")
def llm(target_dir: Path, speculative_config: dict[str, Any]) -> Iterator[LLM]:
    """The target with its drafter."""
    config = speculative_config
    with LLM(target_dir, speculative_config=config, max_num_seqs=8, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="session")
def plain_llm(target_dir: Path) -> Iterator[LLM]:
    """The target alone."""
    with LLM(target_dir, max_num_seqs=8, device="cpu") as llm:
        yield llm
