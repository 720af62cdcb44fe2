# SPDX-License-Identifier: Apache-2.0
"""Each file of a target and a drafter is opened once, however many checks look at it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import assistant_pair
import eagle_pair
import tiny_models
from drafter_checks import ENGINE
from paceline import LLM, _core
from paceline.loader.convert import convert
from tiny_models import TinySpec, make, write_json

_opened: Counter[str] | None = None


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | os.PathLike):
        _opened[os.fspath(arguments[0])] += 1


sys.addaudithook(_count)  # cannot be removed again


@contextmanager
def opened_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Counts how often Python opens a path, and how often the library maps a weight file."""
    global _opened
    mapped: Counter[str] = Counter()

    def map_file(path: str) -> _core.SafetensorsFile:
        mapped[path] += 1
        return original(path)

    original = _core.SafetensorsFile
    monkeypatch.setattr(_core, "SafetensorsFile", map_file)
    _opened = Counter()
    try:
        yield _opened, mapped
    finally:
        _opened = None
        monkeypatch.undo()


def _with_settings(spec: TinySpec, folder: Path) -> Path:
    path = tiny_models.copy_checkpoint(make(spec), folder)
    write_json(path / "generation_config.json", {"eos_token_id": 0})
    return path


def _draft_model(folder: Path, *_: Any) -> tuple[Path, Path]:
    target = _with_settings(TinySpec(dtype="bfloat16"), folder / "target")
    return target, _with_settings(TinySpec(seed=1, shards=2), folder / "draft")


def _tied_draft_model(folder: Path, *_: Any) -> tuple[Path, Path]:
    """A copy of the embeddings has to be compared with them."""
    target = _with_settings(TinySpec(tied=True), folder / "target")

    def add(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tiny_models.edit_tensors(target, add)
    return target, _with_settings(TinySpec(tied=True, seed=1), folder / "draft")


def _eagle3(folder: Path, draft_head: Callable[..., Path], *_: Any) -> tuple[Path, Path]:
    """It brings token ids, F16 weights that are rounded here, and a tokenizer."""
    spec = replace(eagle_pair.TARGET, dtype="bfloat16")
    target = _with_settings(spec, folder / "target")
    draft = draft_head("eagle3", dtype="float16", target=spec)
    (draft / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return target, draft


def _assistant(folder: Path, _: Any, assistant: Callable[..., Path]) -> tuple[Path, Path]:
    return _with_settings(assistant_pair.TARGET, folder / "target"), assistant(
        assistant_pair.CLUSTERS
    )


@pytest.mark.parametrize("pair", [_draft_model, _tied_draft_model, _eagle3, _assistant])
@pytest.mark.parametrize("how", ["auto", "dummy", "convert"])
def test_every_file_is_opened_once(
    pair: Callable[..., tuple[Path, Path]],
    how: str,
    tmp_path: Path,
    draft_head: Callable[..., Path],
    assistant: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = pair(tmp_path, draft_head, assistant)
    with opened_files(monkeypatch) as (opened, mapped):
        if how == "convert":
            convert(target, tmp_path / "out", draft, progress=False)
        else:
            config = {"model": str(draft), "num_speculative_tokens": 2}
            LLM(target, speculative_config=config, load_format=how, **ENGINE).close()
    for folder in (target, draft):
        names = {path.name for path in folder.iterdir()}
        counts = {name: opened[str(folder / name)] for name in names}
        assert max(counts.values()) == 1, counts
        times = {name: mapped[str(folder / name)] for name in names if name.endswith("tensors")}
        assert set(times.values()) == {0 if how == "dummy" else 1}, times
    assert opened[str(target / "config.json")] == opened[str(draft / "config.json")] == 1
    assert opened[str(target / "tokenizer.json")] == 1


def test_a_converted_folder_is_opened_once(
    tmp_path: Path, draft_head: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = _eagle3(tmp_path, draft_head)
    out = convert(target, tmp_path / "out", draft, progress=False)
    with opened_files(monkeypatch) as (opened, mapped):
        LLM(out, **ENGINE).close()
    weights = {str(out / f"{role}.safetensors"): 1 for role in ("target", "draft")}
    assert mapped == weights
    names = {path.name for path in out.iterdir()}
    assert {name: opened[str(out / name)] for name in names if name.endswith("json")} == {
        "generation_config.json": 1,
        "paceline.json": 1,
        "tokenizer.json": 1,
    }
    assert all(opened[name] <= 1 for name in weights)


def test_a_model_that_drafts_for_itself_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _with_settings(TinySpec(), tmp_path / "model")
    (tmp_path / "link").symlink_to(path)
    config = {"model": str(tmp_path / "link"), "num_speculative_tokens": 2}
    with opened_files(monkeypatch) as (opened, mapped):
        LLM(path, speculative_config=config, **ENGINE).close()
    assert opened[str(path / "config.json")] == opened[str(path / "tokenizer.json")] == 1
    assert mapped == {str(path / "model.safetensors"): 1}
    assert not any(name.startswith(str(tmp_path / "link")) for name in opened)
