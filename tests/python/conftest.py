# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the Python tests: tiny random models, pairs with a drafter, and copies to break."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import assistant_models
import assistant_pair
import block_models
import eagle_models
import eagle_pair
import receipt_jobs
import tiny_models
from assistant_models import AssistantSpec
from block_models import BlockSpec
from eagle_models import EagleSpec
from paceline import LLM, AsyncLLM, _core
from tiny_models import TinySpec, make


@pytest.fixture(autouse=True, scope="session")
def signals_are_not_ignored() -> None:
    """Undoes what `nohup` and `&` of a shell do to the tests, and to the programs they start."""
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.fixture(autouse=True)
def auto_is_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes "auto" the CPU even on machines with a GPU, which the files test_cuda*.py test."""
    if not request.node.path.name.startswith("test_cuda"):
        monkeypatch.setattr("paceline.device._auto_device", lambda: "cpu")


@pytest.fixture
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips what a bench measures of the machine, which takes half a second: 40 GB/s are read."""
    monkeypatch.setattr(_core, "measure_read_bandwidth", lambda num_threads=0, num_bytes=0: 40e9)
    monkeypatch.setattr(_core, "measure_arithmetic", lambda num_threads, is_bfloat16: 1e15)


@pytest.fixture(scope="session")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the `config.json` of a tiny Gemma 3."""
    folder = tmp_path_factory.mktemp("config")
    shutil.copy(make(TinySpec("gemma3", seed=3)) / "config.json", folder)
    return folder


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """Copies a tiny checkpoint into a folder in which the test may break it."""

    def copy(spec: tiny_models.TinySpec | None = None) -> Path:
        original = tiny_models.make(spec or tiny_models.TinySpec())
        return tiny_models.copy_checkpoint(original, tmp_path / "model")

    return copy


@pytest.fixture
def draft_head(tmp_path: Path) -> Callable[..., Path]:
    """Writes a draft head for the target of `eagle_pair`, or for another one, into a folder."""

    def write(
        spec: EagleSpec | str = "eagle3", target: TinySpec = eagle_pair.TARGET, **changes: Any
    ) -> Path:
        chosen = eagle_pair.SPECS[spec] if isinstance(spec, str) else spec
        chosen = replace(chosen, **changes)
        return eagle_models.write(chosen, make(target), tmp_path / "head")

    return write


@pytest.fixture
def assistant(tmp_path: Path) -> Callable[..., Path]:
    """Writes an assistant for the target of `assistant_pair`, or for another one, into a folder."""

    def write(
        spec: AssistantSpec = assistant_pair.CLUSTERS,
        target: TinySpec = assistant_pair.TARGET,
        **changes: Any,
    ) -> Path:
        return assistant_models.write(
            replace(spec, **changes), make(target), tmp_path / "assistant"
        )

    return write


#: Rows that predict the token at their own position, or the next one; full and sliding layers.
BLOCKS = {
    "dflash": BlockSpec("z-lab", window=9, num_layers=3),
    "dspark": BlockSpec("speculators", window=6, markov_rank=8),
}


@pytest.fixture
def pair_of(
    tmp_path: Path, draft_head: Callable[..., Path], assistant: Callable[..., Path]
) -> Callable[[str], tuple[Path, Path]]:
    """Writes a target and a drafter of a kind: "draft_model", "gemma4_mtp", a draft head's, or one
    of `BLOCKS`."""

    def write(kind: str) -> tuple[Path, Path]:
        if kind in BLOCKS:
            target = make(eagle_pair.TARGET)
            return target, block_models.write(BLOCKS[kind], target, tmp_path / kind)
        target = make(assistant_pair.TARGET if kind == "gemma4_mtp" else eagle_pair.TARGET)
        if kind == "draft_model":
            return target, tiny_models.perturbed_copy(target, tmp_path / "draft", noise=0.02)
        return target, assistant() if kind == "gemma4_mtp" else draft_head(kind)

    return write


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """A tiny Gemma 3: sliding and full layers."""
    return tiny_models.make(tiny_models.TinySpec("gemma3", seed=3))


@pytest.fixture(scope="session")
def draft_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: some of its drafts are accepted, some are not."""
    out = tmp_path_factory.mktemp("draft") / "draft"
    return tiny_models.perturbed_copy(target_dir, out, noise=0.03, seed=1)


@pytest.fixture(scope="session")
def speculative_config(draft_dir: Path) -> dict[str, Any]:
    """The configuration as a user writes it. k is fixed, so that counts do not depend on times."""
    return {
        "method": "draft_model",
        "model": str(draft_dir),
        "num_speculative_tokens": 4,
        "x": {"adaptive": False},
    }


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


@pytest.fixture
def allm(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM with a drafter, on an LLM that other tests use too."""
    made = AsyncLLM.from_llm(llm)
    yield made
    assert not made._session._by_name and not made._session._by_engine_id
    made.close()


@pytest.fixture(scope="module")
def digest_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps the digests of receipts in a folder of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "paceline" / "digests"


@pytest.fixture(scope="module")
def receipt_llm(digest_cache: Path) -> Iterator[LLM]:
    """The target of `receipt_jobs`."""
    with LLM(receipt_jobs.target_dir(), max_num_seqs=8, device="cpu") as llm:
        yield llm
