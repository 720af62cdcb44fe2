# SPDX-License-Identifier: Apache-2.0
"""Loading whole checkpoints: layouts of files, end-of-sequence ids, tokenizers, imports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models
from drafter_checks import ENGINE
from errors import raises
from paceline import LLM, loader
from paceline._core import ModelFileError
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.tokenizer import TokenizerInfo, compare_vocabularies
from time_limits import HANG_LIMIT_S
from tiny_configs import DEEPSEEK, QWEN3_5
from tiny_models import TinySpec, edit_config, edit_tensors, make, read_json, write_json


@pytest.mark.parametrize("family", (*tiny_models.FAMILIES, *DEEPSEEK, *QWEN3_5))
def test_load_checkpoint(family: str) -> None:
    path = make(TinySpec(family, eos_token_id=0, max_position=640))
    loaded = loader.load_checkpoint(path, progress=False)
    assert loaded.path == path
    assert loaded.family == family
    assert loaded.weight_dtype == loaded.model.weight_dtype == "float32"
    assert loaded.vocab_size == loaded.model.vocab_size == 128
    assert loaded.max_position == loaded.model.max_position == 640
    assert loaded.eos_token_ids == (0,)
    assert loaded.bos_token_id is None
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a b\n")) == "a b\n"
    assert json.loads(loaded.config_json) == loaded.config
    assert loaded.notes == ()


def test_stored_dtype_does_not_change_the_values(tmp_path: Path) -> None:
    """bfloat16 widened by the loader and by torch are the same weights."""
    path = make(TinySpec(dtype="bfloat16"))
    wide = tiny_models.copy_checkpoint(path, tmp_path / "wide")
    edit_tensors(wide, lambda t: t.update({name: t[name].float() for name in t}))
    narrow = loader.load_checkpoint(path, dtype="float32", progress=False)
    assert bytes(narrow.model.arena()) == bytes(
        loader.load_checkpoint(wide, progress=False).model.arena()
    )
    # Rounding the widened values gives the same bits again.
    assert bytes(loader.load_checkpoint(path, progress=False).model.arena()) == bytes(
        loader.load_checkpoint(wide, dtype="bfloat16", progress=False).model.arena()
    )


def test_shards_do_not_change_the_values() -> None:
    whole = loader.load_checkpoint(make(TinySpec(seed=3)), progress=False)
    spread = loader.load_checkpoint(make(TinySpec(seed=3, shards=3)), progress=False)
    assert bytes(whole.model.arena()) == bytes(spread.model.arena())


def test_generation_config_wins(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(eos_token_id=0))
    write_json(path / "generation_config.json", {"eos_token_id": [5, 7, 5], "bos_token_id": 2})
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids == (5, 7)
    assert checkpoint.hf.bos_token_id == 2
    write_json(path / "generation_config.json", {"eos_token_id": "x"})
    with raises(ModelFileError, "generation_config.json", '"eos_token_id" is "x"'):
        open_checkpoint(path)
    (path / "generation_config.json").write_text("nope")
    with raises(ModelFileError, "generation_config.json", "not valid JSON"):
        open_checkpoint(path)


def test_end_ids_outside_of_the_vocabulary_are_reported(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    edit_config(path, eos_token_id=[3, 128_009])
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids == (3,)
    assert "[128009]" in checkpoint.notes[0]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_more_end_ids_than_a_request_can_stop_at(
    name: str, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    path = copy_of()
    original = read_json(path / name) if name == "config.json" else {}
    write_json(path / name, original | {"eos_token_id": [*range(8), 5, 10**6]})
    loaded = loader.load_checkpoint(path, progress=False)
    assert loaded.eos_token_ids == tuple(range(8))
    with LLM.from_loaded(loaded, **ENGINE) as llm:
        assert len(llm.generate([9])[0].outputs) == 1
    write_json(path / name, original | {"eos_token_id": list(range(9))})
    for load in (
        lambda: loader.load_checkpoint(path, progress=False),
        lambda: loader.load_dummy(path),
        lambda: convert(path, tmp_path / "out", progress=False),
        lambda: LLM(path, **ENGINE),
    ):
        with raises(
            NotImplementedError, path / name, '"eos_token_id" has 9 ids', "supported: at most 8"
        ):
            load()
    # The ids of a drafter are not used.
    target = loader.load_checkpoint(make(TinySpec()), progress=False)
    assert loader.load_drafter(path, target, progress=False).vocab_size == 128
    assert loader.load_dummy_drafter(path, target).vocab_size == 128


@pytest.mark.serial
def test_very_many_end_ids(copy_of: Callable[..., Path]) -> None:
    """The time is linear and the message short: 200,000 ids once took minutes."""
    path = copy_of()
    edit_config(path, eos_token_id=list(range(200_000)))
    begin = time.monotonic()
    with raises(NotImplementedError, '"eos_token_id" has 128 ids'):
        open_checkpoint(path)
    edit_config(path, eos_token_id=list(range(128, 200_000)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids == ()
    assert "[128, 129, 130" in checkpoint.notes[0]
    assert len(checkpoint.notes[0]) < 400
    assert time.monotonic() - begin < 10


# ---- tokenizers --------------------------------------------------------------------------------


def _tokenizer(path: Path, size: int = 128, rename: dict[int, str] | None = None) -> TokenizerInfo:
    tiny_models.write_tokenizer(path, size, rename=rename)
    return TokenizerInfo(path)


def test_equal_tokenizers(tmp_path: Path) -> None:
    left, right = _tokenizer(tmp_path / "a.json"), _tokenizer(tmp_path / "b.json")
    compare_vocabularies(left, right, 128, 128)


def test_padding_rows_do_not_count(tmp_path: Path) -> None:
    """Gemma 3 27B has 262,208 rows and 270M has 262,144: the others are not compared."""
    left, right = _tokenizer(tmp_path / "a.json"), _tokenizer(tmp_path / "b.json")
    compare_vocabularies(left, right, 192, 128)
    compare_vocabularies(left, right, 128, 192)
    longer = _tokenizer(tmp_path / "c.json", 150)
    compare_vocabularies(longer, right, 192, 128)


def test_differing_entries_are_named(tmp_path: Path) -> None:
    left = _tokenizer(tmp_path / "a.json")
    renamed = {index: f"other{index}" for index in range(100, 110)}
    right = _tokenizer(tmp_path / "b.json", rename=renamed)
    with raises(
        ValueError,
        tmp_path / "b.json",
        tmp_path / "a.json",
        "in 10 of the 128 ids",
        "id 100: target '<extra_1>', draft 'other100'",
        "id 104: target '<extra_5>', draft 'other104'",
        "and 5 more",
    ):
        compare_vocabularies(left, right, 128, 128)
    # Only ids that both tables have are compared.
    compare_vocabularies(left, right, 128, 100)


def test_a_token_only_one_side_has(tmp_path: Path) -> None:
    left, right = _tokenizer(tmp_path / "a.json", 120), _tokenizer(tmp_path / "b.json", 121)
    with raises(ValueError, "in 1 of the 128", "id 120: target has none, draft '<extra_21>'"):
        compare_vocabularies(left, right, 128, 128)


def test_added_tokens_are_compared(tmp_path: Path) -> None:
    left, right = _tokenizer(tmp_path / "a.json", 120), _tokenizer(tmp_path / "b.json", 120)
    left.tokenizer.add_special_tokens(["<think>"])
    right.tokenizer.add_special_tokens(["<plan>"])
    with raises(ValueError, "id 120: target '<think>', draft '<plan>'"):
        compare_vocabularies(left, right, 128, 128)


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path / "a.json")
    values = read_json(tmp_path / "a.json")
    values["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    write_json(tmp_path / "a.json", values)
    assert len(TokenizerInfo(tmp_path / "a.json").encode("abcdef")) == 6


def test_byte_level_tokenizer_knows_every_text(tmp_path: Path) -> None:
    info = _tokenizer(tmp_path / "a.json", 300)
    text = "naïve 漢字 \N{SNOWMAN}\n"
    assert info.decode(info.encode(text)) == text


def test_broken_tokenizer(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "tokenizer.json").write_text('{"model": 1}')
    with raises(ModelFileError, path / "tokenizer.json", "not a tokenizer"):
        loader.load_checkpoint(path, progress=False)


def test_check_compatible(tmp_path: Path) -> None:
    target = loader.load_checkpoint(make(TinySpec()), progress=False)
    loader.check_compatible(target, target)
    other_family = loader.load_checkpoint(make(TinySpec("gemma3", vocab_size=160)), progress=False)
    loader.check_compatible(target, other_family)
    path = tiny_models.copy_checkpoint(target.path, tmp_path / "draft")
    tiny_models.write_tokenizer(path / "tokenizer.json", rename={2: "!!"})
    with raises(ValueError, path / "tokenizer.json", "id 2: target ' ', draft '!!'"):
        loader.check_compatible(target, loader.load_checkpoint(path, progress=False))


def test_tokenizers_are_compared_before_weights_are_read(
    copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    path = copy_of()
    tiny_models.write_tokenizer(path / "tokenizer.json", rename={2: "!!"})
    monkeypatch.setattr("paceline.loader.load.load_weights", load_weights)
    config = {"model": str(path), "num_speculative_tokens": 2}
    with raises(ValueError, path / "tokenizer.json", "id 2: target ' ', draft '!!'"):
        LLM(make(TinySpec()), speculative_config=config, **ENGINE)


def test_models_without_tokenizers() -> None:
    bare = loader.load_checkpoint(make(TinySpec(tokenizer_size=0)), progress=False)
    larger = loader.load_checkpoint(
        make(TinySpec(tokenizer_size=0, vocab_size=160)), progress=False
    )
    full = loader.load_checkpoint(make(TinySpec()), progress=False)
    assert bare.tokenizer is None
    with warnings.catch_warnings(action="error"):
        loader.check_compatible(bare, bare)
    with pytest.warns(UserWarning, match=r"tokenizer\.json: no such file, so only the sizes"):
        loader.check_compatible(full, bare)
    for target, draft in ((bare, larger), (larger, full), (full, larger)):
        with raises(
            ValueError,
            "tokenizer.json: no such file",
            f"target {target.vocab_size}, draft {draft.vocab_size}",
            "a tokenizer.json beside both",
        ):
            loader.check_compatible(target, draft)


# ---- imports -----------------------------------------------------------------------------------


def test_loading_imports_neither_torch_nor_safetensors() -> None:
    path = make(TinySpec())
    code = (
        "import sys; from paceline.loader import load_checkpoint\n"
        "assert not {'numpy', 'tokenizers', 'tqdm'} & set(sys.modules), 'imported too early'\n"
        f"load_checkpoint({str(path)!r})\n"
        "assert not {'torch', 'safetensors', 'transformers'} & set(sys.modules), 'not needed'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_LIMIT_S)
