# SPDX-License-Identifier: Apache-2.0
"""Folders, safetensors files and shards that are damaged, contradictory or missing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import raises
from paceline import loader
from paceline._core import ModelFileError, ModelNotFoundError
from paceline.loader.checkpoint import open_checkpoint
from tiny_models import TinySpec, edit_tensors, read_json, write_json

NORM = "model.norm.weight"


def test_wrong_folders(tmp_path: Path) -> None:
    with raises(ModelNotFoundError, "org/model", "no such folder", "config.json"):
        open_checkpoint("org/model")
    assert issubclass(ModelNotFoundError, FileNotFoundError)
    file = tmp_path / "file"
    file.touch()
    with raises(ModelFileError, file, "not a folder"):
        open_checkpoint(file)
    (tmp_path / "paceline.json").touch()
    with raises(ModelFileError, tmp_path, "paceline convert", "config.json"):
        open_checkpoint(tmp_path)


def test_missing_weights(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with raises(
        ModelNotFoundError,
        path,
        "neither model.safetensors nor model.safetensors.index.json",
        "pytorch_model.bin is there, but only safetensors are read; save the model as safetensors",
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_weights(keep: int, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with raises(ModelFileError, "model.safetensors"):
        open_checkpoint(path)


def _rewrite_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    ("what", "entry"),
    [
        ("overlap", {"data_offsets": [0, 256]}),
        ("beyond the end", {"data_offsets": [10**9, 10**9 + 256]}),
        ("backwards", {"data_offsets": [256, 0]}),
        ("negative", {"data_offsets": [-256, 0]}),
        ("overflow", {"data_offsets": [2**64 - 256, 2**64]}),
        ("wrong size", {"shape": [65]}),
        ("shape overflow", {"shape": [2**63, 2**63]}),
        ("negative shape", {"shape": [-64]}),
        ("unknown dtype", {"dtype": "F33"}),
        ("no offsets", {"data_offsets": None}),
    ],
)
def test_wrong_header(what: str, entry: dict[str, Any], copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    file = path / "model.safetensors"
    _rewrite_header(file, lambda header: header[NORM].update(entry))
    with raises(ModelFileError, "model.safetensors"):
        open_checkpoint(path)


@pytest.mark.parametrize("size", [100_000_001, 2**40, 2**63, 2**64 - 1, 3])
def test_wrong_header_length(size: int, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", size) + file.read_bytes()[8:])
    with raises(ModelFileError, "model.safetensors"):
        open_checkpoint(path)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_random_damage_is_an_error_or_nothing(
    name: str, seed: int, copy_of: Callable[..., Path]
) -> None:
    """A file with damaged first bytes loads, or gives an error of ours, and never crashes."""
    path = copy_of(TinySpec(num_layers=1))
    intact = (path / name).read_bytes()
    random = np.random.default_rng(seed)
    for _ in range(25):
        damaged = bytearray(intact)
        for _ in range(int(random.integers(1, 4))):
            at = int(random.integers(0, min(len(damaged), 2_000)))
            match random.integers(0, 3):
                case 0:
                    damaged[at] = random.integers(0, 256)
                case 1:
                    del damaged[at : at + int(random.integers(1, 9))]
                case _:
                    damaged[at:at] = b'0123456789-.e[]{}:,"'[(digit := at % 19) : digit + 2]
        (path / name).write_bytes(damaged)
        try:
            loader.load_checkpoint(path, progress=False)
        except (ValueError, NotImplementedError) as error:
            assert str(path) in str(error)


# ---- shards ----------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


def _edit_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = read_json(path / INDEX)
    change(index)
    write_json(path / INDEX, index)


def test_shards(copy_of: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(copy_of(TinySpec(shards=3)))
    assert len({tensor.shard.path.name for tensor in checkpoint.tensors}) == 3


def test_single_file_wins_over_an_index(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / INDEX).write_text("{")
    open_checkpoint(path)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "..",
        "",
        "model.bin",
        "model\n.safetensors",
        ".hidden.safetensors",
        7,
        None,
    ],
)
def test_shard_names_stay_in_the_folder(name: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    _edit_index(path, lambda index: index["weight_map"].update({NORM: name}))
    with raises(ModelFileError, path / INDEX, f'"weight_map.{NORM}"', "plain name"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [None, {}, [], "x"])
def test_bad_weight_map(value: Any, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    _edit_index(path, lambda index: index.update(weight_map=value))
    with raises(ModelFileError, path / INDEX, '"weight_map" is', "expected an object"):
        open_checkpoint(path)


def test_missing_shard(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    shard = path / "model-00002-of-00002.safetensors"
    shard.unlink()
    with raises(ModelNotFoundError, shard, "no such file", INDEX):
        open_checkpoint(path)


def test_tensor_in_two_shards(copy_of: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file

    path = copy_of(TinySpec(shards=2))
    first, second = sorted(path.glob("model-*.safetensors"))
    twice = next(iter(load_file(first)))
    save_file(load_file(second) | {twice: load_file(first)[twice]}, second)
    with raises(ModelFileError, second, f"tensor '{twice}' is also in {first.name}"):
        open_checkpoint(path)


def test_index_names_the_wrong_shard(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    listing = read_json(path / INDEX)["weight_map"]
    wrong = next(name for name in sorted(set(listing.values())) if name != listing[NORM])
    _edit_index(path, lambda index: index["weight_map"].update({NORM: wrong}))
    with raises(ModelFileError, path / wrong, f"'{NORM}' is missing", INDEX, listing[NORM]):
        open_checkpoint(path)


def test_index_lists_a_tensor_that_no_shard_holds(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    shard = "model-00001-of-00002.safetensors"
    _edit_index(path, lambda index: index["weight_map"].update(extra=shard))
    with raises(ModelFileError, path / shard, "'extra' is missing", "no shard holds it"):
        open_checkpoint(path)


def test_tensor_missing_from_all_shards(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    edit_tensors(path, lambda tensors: tensors.pop(NORM), shards=2)
    with raises(ModelFileError, path / INDEX, f"1 tensor is missing: '{NORM}'"):
        open_checkpoint(path)
