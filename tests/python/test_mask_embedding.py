# SPDX-License-Identifier: Apache-2.0
"""A block drafter's own embedding for mask tokens, a pickle: converted with the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import block_models
import eagle_models
from block_models import MASK_NAME, BlockSpec
from drafter_checks import ENGINE, outputs, plain_outputs
from eagle_models import EagleSpec
from errors import raises
from paceline import LLM
from paceline._core import ModelFileError
from paceline.loader import detect_method, open_checkpoint, open_drafter
from paceline.loader.binding import BoundTensor
from paceline.loader.convert import convert
from paceline.loader.family import TensorSpec
from paceline.loader.pickles import _with_row
from tiny_models import TinySpec, edit_config, edit_tensors, load_tensors, make

TARGET = TinySpec("qwen3", seed=50, num_layers=8, vocab_size=96, tokenizer_size=0)
SPEC = BlockSpec("z-lab", has_mask_embedding=True)
MASK = TARGET.vocab_size - 1


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return block_models.write(SPEC, make(TARGET), tmp_path / "drafter")


def converted(drafter: Path, target: TinySpec = TARGET) -> Path:
    out = drafter.parent / "out"
    return convert(make(target), out, drafter, 4, allow_pickle=True, progress=False)


def test_it_is_not_loaded(drafter: Path) -> None:
    config = {"model": str(drafter), "num_speculative_tokens": 2}
    target = open_checkpoint(make(TARGET)).as_target()
    out = drafter.parent / "out"
    calls: tuple[Callable[[], Any], ...] = (
        lambda: detect_method(drafter),
        lambda: open_drafter(drafter, target),
        lambda: LLM(make(TARGET), speculative_config=config, **ENGINE),
        lambda: convert(make(TARGET), out, drafter, progress=False),
    )
    cure = f"paceline convert --allow-pickle TARGET OUT --draft {drafter}"
    for call in calls:
        with raises(ModelFileError, drafter / MASK_NAME, "pickle", cure):
            call()
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_it_takes_the_place_of_a_row(dtype: str, shards: int, drafter: Path) -> None:
    target = TinySpec("qwen3", seed=50, num_layers=8, vocab_size=96, tokenizer_size=0, dtype=dtype)
    edit_tensors(drafter, lambda tensors: None, shards)
    row = torch.load(drafter / MASK_NAME, weights_only=True)["embedding"]
    out = converted(drafter, target)
    written = load_file(out / "draft.safetensors")["embed.weight"]
    expected = load_tensors(make(target))["model.embed_tokens.weight"].clone()
    expected[MASK] = row.to(expected.dtype)
    assert written.dtype == expected.dtype
    assert torch.equal(written, expected)
    assert sorted(entry.name for entry in drafter.parent.iterdir()) == ["drafter", "out"]


@pytest.mark.parametrize("size", [1, 3, 8, 12, 100])
def test_a_row_in_several_pieces(size: int) -> None:
    data = bytes(range(64))  # rows of 4 float16

    class Pieces:
        def chunks(self, name: str) -> Any:
            return (data[i : i + size] for i in range(0, len(data), size))

    spec = TensorSpec("embed.weight", "E", (8, 4), "")
    table = BoundTensor(spec, Pieces(), "E", "F16", len(data))  # type: ignore[arg-type]
    row = np.array([1.0, -2.0, 0.5, 65504.0], np.float32)
    expected = data[:40] + row.astype("<f2").tobytes() + data[48:]
    assert b"".join(_with_row(table, 5, row)) == expected


def test_output_is_that_of_plain_decoding(drafter: Path) -> None:
    with LLM(converted(drafter), **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == "dflash"
        assert outputs(llm) == plain_outputs(TARGET)


@pytest.mark.parametrize(
    ("contents", "seen"),
    [
        (torch.ones(64), ("Tensor", "'mask_token_id' and 'embedding'")),
        ([1], ("list", "'mask_token_id' and 'embedding'")),
        ({"embedding": torch.ones(64)}, ("dict", "['embedding']")),
        ({"mask_token_id": 1.5, "embedding": torch.ones(64)}, ("'mask_token_id' is 1.5",)),
        ({"mask_token_id": MASK, "embedding": torch.ones(2, 32)}, ("'embedding'", "[2, 32]")),
        ({"mask_token_id": MASK, "embedding": torch.ones(64).int()}, ("'embedding'", "floating")),
        ({"mask_token_id": MASK, "embedding": torch.ones(1).expand(10**9)}, ("[1000000000]",)),
        (
            {"mask_token_id": 7, "embedding": torch.ones(64)},
            ("'mask_token_id' is 7", "config.json says 95"),
        ),
    ],
)
def test_other_contents(contents: Any, seen: tuple[str, ...], drafter: Path) -> None:
    torch.save(contents, drafter / MASK_NAME)
    with raises(ModelFileError, drafter / MASK_NAME, *seen):
        converted(drafter)
    assert sorted(entry.name for entry in drafter.parent.iterdir()) == ["drafter"]


def test_another_width(drafter: Path) -> None:
    torch.save({"mask_token_id": MASK, "embedding": torch.ones(63)}, drafter / MASK_NAME)
    with raises(ValueError, "made for another target", MASK_NAME, "63 elements", "have 64"):
        converted(drafter)


class _Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_it_runs_nothing(drafter: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"mask_token_id": MASK, "embedding": _Harmful(marker)}, drafter / MASK_NAME)
    with raises(ModelFileError, MASK_NAME, "weights-only"):
        converted(drafter)
    assert not marker.exists()


def test_a_drafter_with_embeddings_of_its_own(drafter: Path) -> None:
    table = load_tensors(make(TARGET))["model.embed_tokens.weight"]
    edit_tensors(drafter, lambda tensors: tensors.update({"embed_tokens.weight": table.clone()}))
    with raises(NotImplementedError, MASK_NAME, "'embed_tokens.weight'", "one of the two"):
        converted(drafter)


def test_errors_name_the_files_of_the_user(drafter: Path) -> None:
    out = drafter.parent / "out"
    with raises(ValueError, "num_speculative_tokens is 5", f"drafter {drafter} was", "1 to 4"):
        convert(make(TARGET), out, drafter, 5, allow_pickle=True, progress=False)
    edit_tensors(drafter, lambda tensors: tensors.pop("hidden_norm.weight"))
    with raises(ModelFileError, drafter / "model.safetensors", "hidden_norm.weight") as error:
        converted(drafter)
    edit_config(drafter, hidden_act="gelu")
    with raises(NotImplementedError, drafter / "config.json", "hidden_act"):
        converted(drafter)
    assert ".paceline" not in str(error.value)


def test_a_drafter_without_masks(tmp_path: Path) -> None:
    path = eagle_models.write(EagleSpec("eagle"), make(TARGET), tmp_path / "drafter")
    torch.save({"mask_token_id": MASK, "embedding": torch.ones(64)}, path / MASK_NAME)
    with raises(NotImplementedError, MASK_NAME, "'dflash2' and 'dspark'", "config.json"):
        converted(path)


def test_pickled_weights_too(drafter: Path) -> None:
    expected = load_tensors(drafter)
    torch.save(expected, drafter / "pytorch_model.bin")
    (drafter / "model.safetensors").unlink()
    written = load_file(converted(drafter) / "draft.safetensors")
    assert torch.equal(written["fc.weight"], expected["fc.weight"])
    row = torch.load(drafter / MASK_NAME, weights_only=True)["embedding"]
    assert torch.equal(written["embed.weight"][MASK], row)


def test_a_mask_token_that_the_target_does_not_have(drafter: Path) -> None:
    edit_config(drafter, dflash_config={"mask_token_id": 96, "target_layer_ids": [0, 2, 4]})
    with raises(ModelFileError, "dflash_config.mask_token_id", "is 96", "0 to 95"):
        converted(drafter)
