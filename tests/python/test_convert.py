# SPDX-License-Identifier: Apache-2.0
"""`paceline convert`: the folder it writes gives the same bytes as loading the checkpoint."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from paceline import _core
from paceline.loader import load_checkpoint
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from tiny_models import TinySpec, describe, make, read_json


def _arena(path: Path, dtype: str) -> bytes:
    return bytes(load_checkpoint(path, dtype=dtype, progress=False).model.arena())


SPECS = [
    TinySpec("llama"),
    TinySpec("llama", dtype="float16", attention_bias=True, mlp_bias=True, shards=3),
    TinySpec("llama", dtype="bfloat16", tied=True, prefix=""),
    TinySpec("qwen3", dtype="bfloat16", rope="linear"),
    TinySpec("gemma3", dtype="bfloat16", shards=2, hidden_size=72),
    TinySpec("gemma3", dtype="float32", tied=False, old_spelling=True),
    TinySpec("gemma4", dtype="bfloat16", hidden_size=72),
    TinySpec("gemma4", k_eq_v=True, shared_layers=2, attention_bias=True, tied=False),
    TinySpec("qwen3", vocab_size=131, hidden_size=70, intermediate_size=33, dtype="float16"),
    TinySpec("gpt_oss", dtype="bfloat16"),
    TinySpec("glm4_moe_lite", dtype="bfloat16", shards=2),
    TinySpec("deepseek_v3", latent=tiny_models.TinyLatent(q_rank=None, groups=4, top_groups=2)),
    TinySpec("qwen3_5", dtype="bfloat16", shards=2),
    TinySpec("qwen3_next"),
    TinySpec("gpt_oss", quantization="mxfp4", dtype="bfloat16", shards=2),
    TinySpec("qwen3_moe", dtype="bfloat16", shards=2, num_layers=3, dense_layers=(1,)),
    TinySpec("gemma4", dtype="bfloat16", has_experts=True),
    # More rows and columns than a block, and parts of q, k and v that are smaller.
    TinySpec("qwen3", quantization="fp8_block", dtype="bfloat16", intermediate_size=288),
    TinySpec("qwen3_moe", quantization="fp8_block", hidden_size=192, expert_size=160),
    TinySpec("llama", quantization="fp8_row"),
    TinySpec("gemma3", quantization="fp8_tensor", exact_scales=True),
]


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(spec, dtype, id=f"{describe(spec)}-{dtype}")
        for spec in SPECS
        for dtype in ("auto", "float32", "bfloat16")
        if (spec.dtype, dtype) != ("float16", "bfloat16")  # refused, see test_loader_tensors.py
    ],
)
def test_arenas_are_byte_equal(spec: TinySpec, dtype: str, tmp_path: Path) -> None:
    path = make(spec)
    out = convert(path, tmp_path / "out", dtype=dtype, progress=False)
    folder = _core.load_model_folder(str(out))
    assert folder.draft is None
    assert folder.num_speculative_tokens == 0
    assert folder.target.weight_dtype == read_json(out / "paceline.json")["target"]["dtype"]
    assert bytes(folder.target.arena()) == _arena(path, dtype)


def test_mixed_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    path = tiny_models.copy_checkpoint(make(TinySpec(dtype="bfloat16")), tmp_path / "model")
    tensors = tiny_models.load_tensors(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half()
    tiny_models.save_tensors(path, tensors)
    out = convert(path, tmp_path / "out", progress=False)
    file = _core.SafetensorsFile(str(out / "target.safetensors"))
    assert file.info("final_norm.weight") == ("F32", (64,), 256)
    assert file.info("embed.weight")[0] == "F16"
    assert file.info("lm_head.weight")[0] == "BF16"
    assert bytes(_core.load_model_folder(str(out)).target.arena()) == _arena(path, "auto")


def test_pair(tmp_path: Path) -> None:
    target = make(TinySpec("gemma3", eos_token_id=0))
    draft = make(TinySpec("llama", seed=1, vocab_size=160, dtype="bfloat16", tied=True))
    out = convert(target, tmp_path / "a" / "out", draft, 3, progress=False)
    assert sorted(entry.name for entry in out.iterdir()) == [
        "draft.safetensors",
        "paceline.json",
        "target.safetensors",
        "tokenizer.json",
    ]
    assert [entry.name for entry in out.parent.iterdir()] == ["out"], "nothing left beside it"
    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    contents = read_json(out / "paceline.json")
    assert contents["format"] == "paceline-folder-1"
    assert contents["num_speculative_tokens"] == 3
    assert contents["stop_token_ids"] == [0]
    assert (contents["target"]["dtype"], contents["draft"]["dtype"]) == ("float32", "bfloat16")
    folder = _core.load_model_folder(str(out))
    assert folder.num_speculative_tokens == 3
    assert list(folder.stop_token_ids) == [0]
    assert folder.draft is not None
    assert bytes(folder.target.arena()) == _arena(target, "auto")
    assert bytes(folder.draft.arena()) == _arena(draft, "auto")


def test_description_is_that_of_the_loader(tmp_path: Path) -> None:
    path = make(TinySpec("gemma3", dtype="bfloat16", hidden_size=72))
    out = convert(path, tmp_path / "out", progress=False)
    written = read_json(out / "paceline.json")["target"]["config"]
    assert written == load_checkpoint(path, progress=False).config
    assert written["embed_scale"] == 8.5, "rounded to bfloat16"


@pytest.mark.parametrize("quantization", [None, "fp8_row", "mxfp4"])
def test_safetensors_package_reads_what_is_written(
    quantization: str | None, tmp_path: Path
) -> None:
    """An independent reader: the header is valid and the values are those of the source."""
    import torch
    from safetensors.torch import load_file

    family = "gpt_oss" if quantization == "mxfp4" else "qwen3"
    path = make(TinySpec(family, dtype="bfloat16", shards=2, quantization=quantization))
    out = convert(path, tmp_path / "out", progress=False)
    written = load_file(out / "target.safetensors")
    source = tiny_models.load_tensors(path)
    specs = open_checkpoint(path).tensors
    assert len(written) == len(source) == len(specs)
    for tensor in specs:
        ours, theirs = written[tensor.spec.name], source[tensor.source]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(make(TinySpec()), tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "paceline.json").exists()


def test_model_without_tokenizer(tmp_path: Path) -> None:
    out = convert(make(TinySpec(tokenizer_size=0)), tmp_path / "out", progress=False)
    assert not (out / "tokenizer.json").exists()
    assert read_json(out / "paceline.json")["stop_token_ids"] == []


def test_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty \(it has 'keep\.txt'\)"):
        convert(make(TinySpec()), tmp_path, progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keep.txt"]
    with pytest.raises(ValueError, match=r"keep\.txt: not a folder"):
        convert(make(TinySpec()), tmp_path / "keep.txt", progress=False)


@pytest.mark.parametrize("k", [0, 17, -1, 10**9, "3", 3.0, True])
def test_bad_num_speculative_tokens(k: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens is .*allowed: an integer from 1 to 16"
    ):
        convert(make(TinySpec()), tmp_path / "out", make(TinySpec()), k, progress=False)
    assert not (tmp_path / "out").exists()


def test_bad_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'float16'; allowed: 'auto', 'float32'"):
        convert(make(TinySpec()), tmp_path / "out", dtype="float16", progress=False)


def test_drafter_with_another_tokenizer(tmp_path: Path) -> None:
    draft = tiny_models.copy_checkpoint(make(TinySpec()), tmp_path / "draft")
    tiny_models.write_tokenizer(draft / "tokenizer.json", rename={5: "##"})
    with pytest.raises(ValueError, match="id 5: target '#', draft '##'"):
        convert(make(TinySpec()), tmp_path / "out", draft, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("limit", [100, 20_000, 180_000])
def test_full_disk_leaves_nothing(limit: int, exists: bool, tmp_path: Path) -> None:
    """A file size limit replaces a full disk: the header, a tensor or the drafter does not fit."""
    target, draft = make(TinySpec()), make(TinySpec(num_layers=3))
    if exists:
        (tmp_path / "out").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            convert(target, tmp_path / "out", draft, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.rglob("*")) == ([tmp_path / "out"] if exists else [])
