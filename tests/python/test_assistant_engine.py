# SPDX-License-Identifier: Apache-2.0
"""Assistants converted with their target, and in the engine: the output does not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_models
import tiny_models
from assistant_pair import CENTROIDS, ORDERING, TARGET, opened
from drafter_checks import ENGINE, check_both_ways, outputs, plain_outputs
from eagle_models import EagleSpec
from errors import raises
from paceline import LLM
from paceline.loader import load_checkpoint, load_drafter
from paceline.loader.convert import convert
from tiny_models import FULL, TinySpec, load_tensors, make, read_json


@pytest.mark.parametrize("centroids", [None, (16, 3)])
def test_pair_is_converted(
    centroids: tuple[int, int] | None, assistant: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    path = assistant(centroids=centroids, dtype="bfloat16")
    out = convert(make(TARGET), tmp_path / "out", path, 3, progress=False)
    contents = read_json(out / "paceline.json")
    assert contents["num_speculative_tokens"] == 3
    assert contents["draft"]["dtype"] == "float32", "the target's"
    assert contents["draft"]["config"] == opened(path).config
    source = load_tensors(path)
    written = load_file(out / "draft.safetensors")
    assert torch.equal(written["fc.weight"], source["pre_projection.weight"])
    assert torch.equal(written["feedback.weight"], source["post_projection.weight"])
    assert torch.equal(written["lm_head.weight"], source["model.embed_tokens.weight"])
    assert ("token_ordering" in written) == (centroids is not None)
    if centroids is not None:
        assert torch.equal(written["token_ordering"], source[ORDERING].int())
        assert torch.equal(written["centroids.weight"], source[CENTROIDS])
    assert len(written) == len(source)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target_dtype", ["float32", "bfloat16"])
def test_both_ways_give_the_same_bytes(
    target_dtype: str, dtype: str, assistant: Callable[..., Path], tmp_path: Path
) -> None:
    path = assistant(dtype=dtype)
    target = make(replace(TARGET, dtype=target_dtype))
    check_both_ways(target, path, tmp_path / "out")


# ---- in the engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("position", [None, "last", "next"])
@pytest.mark.parametrize("centroids", [None, (16, 3)])
def test_output_is_that_of_plain_decoding(
    centroids: tuple[int, int] | None,
    position: str | None,
    is_named: bool,
    assistant: Callable[..., Path],
) -> None:
    path = assistant(centroids=centroids)
    config: dict[str, Any] = {"model": str(path), "num_speculative_tokens": 3}
    if is_named:
        config["method"] = "gemma4_mtp"
    if position is not None:
        config["x"] = {"draft_position": position}
    with LLM(make(TARGET), speculative_config=config, **ENGINE) as llm:
        configured = llm.capabilities()["configured"]
        assert configured["method"] == "gemma4_mtp"
        assert configured["draft_position"] == (position or "last")
        assert configured["draft_architecture"] == "Gemma4AssistantForCausalLM"
        assert outputs(llm) == plain_outputs(TARGET)
        assert llm._executor.check_integrity() == ""


def test_an_assistant_has_no_kv_cache(assistant: Callable[..., Path]) -> None:
    config = {"model": str(assistant()), "num_speculative_tokens": 3}
    engine = {key: value for key, value in ENGINE.items() if key != "kv_cache_bytes"}
    with LLM(make(TARGET), **engine) as llm:
        expected = llm.memory_report()
    with LLM(make(TARGET), speculative_config=config, **engine) as llm:
        report = llm.memory_report()
    assert [group["owner"] for group in report["groups"]] == ["target", "target"]
    assert report["groups"] == expected["groups"]
    assert report["draft_weight_bytes"] > 0


def test_loaded_drafter_of_another_target(assistant: Callable[..., Path]) -> None:
    target = load_checkpoint(make(TARGET), progress=False)
    draft = load_drafter(assistant(), target, progress=False)
    assert (draft.method, draft.family) == ("gemma4_mtp", "gemma4_mtp")
    config = {"model": "assistant", "num_speculative_tokens": 2}
    for change, parts in (
        ({"dtype": "bfloat16"}, ("weight dtype", "'float32'", "'bfloat16'")),
        ({"window": 16}, ("layer 0 of the drafter", "a window of 8", "has 16")),
        ({"layer_types": (FULL,) * 4}, ("layer 0 of the drafter", "no layer to read")),
    ):
        other = load_checkpoint(make(replace(TARGET, **change)), progress=False)
        with raises(ValueError, *parts):
            LLM.from_loaded(other, draft, speculative_config=config)
    llama = load_checkpoint(make(TinySpec("llama")), progress=False)
    with raises(ValueError, "multiplies its embeddings by 8.0", "by 1.0"):
        LLM.from_loaded(llama, draft, speculative_config=config)
    with raises(ValueError, "is 'eagle'", "'gemma4_mtp'"):
        LLM.from_loaded(target, draft, speculative_config=config | {"method": "eagle"})


def test_position_of_another_drafter(tmp_path: Path) -> None:
    """The method is only known after loading."""
    spec = EagleSpec("eagle3", aux_layers=(1, 3, 5), owns_embedding=False)
    draft_head = eagle_models.write(spec, make(TARGET), tmp_path / "head")
    config = {
        "model": str(draft_head), "num_speculative_tokens": 2, "x": {"draft_position": "next"},
    }  # fmt: skip
    with raises(ValueError, "draft_position'] is 'next'", "'eagle3'", "'gemma4_mtp'"):
        LLM(make(TARGET), speculative_config=config, **ENGINE)


@pytest.mark.parametrize("centroids", [None, (16, 3)])
def test_dummy_weights(
    centroids: tuple[int, int] | None, assistant: Callable[..., Path], tmp_path: Path
) -> None:
    path = assistant(centroids=centroids)
    (path / "model.safetensors").unlink()
    target = tiny_models.copy_checkpoint(make(TARGET), tmp_path / "target")
    (target / "model.safetensors").unlink()
    config = {"model": str(path), "num_speculative_tokens": 3}
    with LLM(target, load_format="dummy", speculative_config=config, **ENGINE) as llm:
        assert llm.draft is not None
        assert (llm.draft.is_dummy, llm.draft.method) == (True, "gemma4_mtp")
        drafted = outputs(llm)
    with LLM(target, load_format="dummy", **ENGINE) as llm:
        assert outputs(llm) == drafted


def test_bench(assistant: Callable[..., Path], tmp_path: Path) -> None:
    from paceline.cli import main

    speculative = {
        "method": "gemma4_mtp", "model": str(assistant()), "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.3,
        "x": {"draft_position": "next"},
    }  # fmt: skip
    out = tmp_path / "bench.json"
    argv = ["bench", "latency", "--config", str(make(TARGET)), "--json", str(out)]
    argv += ["--concurrency", "2", "--input-len", "8", "--output-len", "8", "--rounds", "1"]
    assert main([*argv, "--speculative-config", json.dumps(speculative)]) == 0
    row = json.loads(out.read_text())["rows"][1]
    assert row["configuration"] == "k=3" and 1.5 < row["tokens_per_iteration"] < 3.1
