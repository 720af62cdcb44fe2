# SPDX-License-Identifier: Apache-2.0
"""Pickles of EAGLE draft heads, and draft heads converted with their target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from drafter_checks import check_both_ways
from eagle_models import PICKLE_NAME
from eagle_pair import SPECS, TARGET, opened
from errors import raises
from paceline._core import ModelFileError
from paceline.cli import main
from paceline.loader import detect_method
from paceline.loader.convert import convert
from tiny_models import edit_config, load_tensors, make, read_json


def test_pickle_is_not_loaded(draft_head: Callable[..., Path]) -> None:
    path = draft_head("eagle", is_pickle=True, dtype="float16")
    for call in (
        lambda: detect_method(path),
        lambda: opened(path),
        lambda: convert(path, path.parent / "out", progress=False),
        lambda: convert(make(TARGET), path.parent / "out", path, progress=False),
    ):
        with raises(ModelFileError, PICKLE_NAME, "paceline convert --allow-pickle", path):
            call()
    assert not (path.parent / "out").exists()


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_pickle_is_converted(layout: str, draft_head: Callable[..., Path], tmp_path: Path) -> None:
    path = draft_head(layout, is_pickle=True, dtype="float16")
    out = tmp_path / "out"
    assert main(["convert", "--allow-pickle", "--quiet", str(path), str(out)]) == 0
    assert sorted(entry.name for entry in out.iterdir()) == ["config.json", "model.safetensors"]
    expected = torch.load(path / PICKLE_NAME, weights_only=True)
    written = load_tensors(out)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    assert opened(out).kind == SPECS[layout].method


def test_pickle_of_no_drafter(tmp_path: Path) -> None:
    path = tiny_models.copy_checkpoint(make(TARGET), tmp_path / "model")
    torch.save(load_tensors(path), path / PICKLE_NAME)
    (path / "model.safetensors").unlink()
    for arguments in ((path, tmp_path / "out"), (make(TARGET), tmp_path / "out", path)):
        with raises(NotImplementedError, path / PICKLE_NAME, "not an EAGLE draft", "model.safete"):
            convert(*arguments, allow_pickle=True, progress=False)
        assert not (tmp_path / "out").exists()


class _Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickle_runs_nothing(draft_head: Callable[..., Path], tmp_path: Path) -> None:
    path = draft_head("eagle", is_pickle=True)
    marker = tmp_path / "marker"
    torch.save({"fc.weight": _Harmful(marker)}, path / PICKLE_NAME)
    with raises(ModelFileError, PICKLE_NAME, "weights-only"):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ([torch.ones(2)], "list"),
        ({}, "dict"),
        ({"fc.weight": 3}, "'fc.weight' is int"),
        ({"fc.weight": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"fc.weight": torch.ones(1).expand(10**9)}, "more than the file's"),
    ],
)
def test_pickle_of_other_things(
    contents: Any, part: str, draft_head: Callable[..., Path], tmp_path: Path
) -> None:
    path = draft_head("eagle", is_pickle=True)
    torch.save(contents, path / PICKLE_NAME)
    with raises(ModelFileError, PICKLE_NAME, part):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)


def test_damaged_pickle(draft_head: Callable[..., Path], tmp_path: Path) -> None:
    path = draft_head("eagle", is_pickle=True)
    file = path / PICKLE_NAME
    contents = file.read_bytes()
    file.write_bytes(contents[: len(contents) // 2])
    with raises(ModelFileError, PICKLE_NAME, "zip"):
        convert(path, tmp_path / "out", allow_pickle=True, progress=False)


def move_an_id(path: Path) -> None:
    tensors = torch.load(path / PICKLE_NAME, weights_only=True)
    tensors["d2t"][3] = -4
    torch.save(tensors, path / PICKLE_NAME)


def drop_a_matrix(path: Path) -> None:
    tensors = torch.load(path / PICKLE_NAME, weights_only=True)
    del tensors["midlayer.mlp.up_proj.weight"]
    torch.save(tensors, path / PICKLE_NAME)


@pytest.mark.parametrize(
    ("edit", "file", "part"),
    [
        (move_an_id, PICKLE_NAME, "'d2t'[3] is -4"),
        (drop_a_matrix, PICKLE_NAME, "midlayer.mlp.up_proj.weight"),
        (lambda path: edit_config(path, draft_vocab_size=95), "config.json", "is 95"),
    ],
    ids=["value", "missing", "configuration"],
)
def test_errors_name_the_file_of_the_user(
    edit: Callable[[Path], None],
    file: str,
    part: str,
    draft_head: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = draft_head("eagle3", is_pickle=True)
    edit(path)
    with raises(ModelFileError, path / file, part) as error:
        convert(make(TARGET), tmp_path / "out", path, allow_pickle=True, progress=False)
    assert ".paceline" not in str(error.value)
    assert not (tmp_path / "out").exists()


def written_header(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


@pytest.mark.parametrize("is_pickle", [False, True])
def test_pair_is_converted(
    is_pickle: bool, draft_head: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    path = draft_head("eagle3", is_pickle=is_pickle, dtype="float16")
    target = make(replace(TARGET, dtype="bfloat16"))
    out = convert(target, tmp_path / "out", path, 3, allow_pickle=is_pickle, progress=False)
    contents = read_json(out / "paceline.json")
    assert contents["draft"]["dtype"] == "bfloat16", "the target's"
    assert contents["draft"]["config"]["drafter"]["draft_vocab_size"] == 96
    source = torch.load(path / PICKLE_NAME, weights_only=True) if is_pickle else load_tensors(path)
    written = load_file(out / "draft.safetensors")
    expected_ids = source["d2t"] + torch.arange(96)
    assert torch.equal(written["draft_to_target"], expected_ids.int())
    assert torch.equal(written["fc.weight"], source["fc.weight"].bfloat16()), "rounded once"
    assert written["final_norm.weight"].dtype == torch.float16
    assert "t2d" not in written
    assert written_header(out / "draft.safetensors")["draft_to_target"]["dtype"] == "I32"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_rounding_of_every_half() -> None:
    from paceline.loader.convert import _half_to_bfloat16

    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    expected = torch.from_numpy(halves.copy()).bfloat16()
    data = bytearray(_half_to_bfloat16(memoryview(halves.tobytes())))
    seen = torch.frombuffer(data, dtype=torch.bfloat16)
    is_number = ~torch.isnan(expected)
    assert torch.equal(seen[is_number], expected[is_number])
    assert torch.isnan(seen[~is_number]).all()


def test_drafter_is_no_target(draft_head: Callable[..., Path], tmp_path: Path) -> None:
    with raises(ModelFileError, "missing", "EAGLE draft head and no target", "--draft"):
        convert(draft_head("eagle"), tmp_path / "out", progress=False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_both_ways_give_the_same_bytes(
    layout: str, target_dtype: str, dtype: str, draft_head: Callable[..., Path], tmp_path: Path
) -> None:
    path = draft_head(layout, dtype=dtype)
    target = make(replace(TARGET, dtype=target_dtype))
    check_both_ways(target, path, tmp_path / "out")
