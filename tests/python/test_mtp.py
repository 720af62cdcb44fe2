# SPDX-License-Identifier: Apache-2.0
"""MTP layers: where they are found, what they share, conversion, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mtp_models
from errors import raises
from paceline import LLM, ModelFileError, SamplingParams, _core
from paceline.cli import main
from paceline.loader import load_checkpoint, load_pair
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.drafter_checkpoint import open_drafter
from tiny_configs import DEEPSEEK
from tiny_models import (
    TinyLatent,
    TinySpec,
    edit_config,
    edit_tensors,
    load_tensors,
    make,
    read_json,
)

K = 3
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": K}
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 3, "kv_cache_bytes": 8 << 20, "show_progress": False,
}  # fmt: skip
SPEC = TinySpec("glm4_moe_lite", seed=5)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
LAYER = "model.layers.3."


@pytest.fixture
def with_layer(tmp_path: Path) -> Callable[..., Path]:
    """Writes a target with an MTP layer."""

    def write(spec: TinySpec = SPEC, **options: Any) -> Path:
        return mtp_models.write(spec, tmp_path / "model", **options)

    return write


def outputs(source: Any, config: dict[str, Any] | None, **engine: Any) -> list[list[int]]:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    with LLM(source, speculative_config=config, **ENGINE, **engine) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert llm._executor.check_integrity() == ""
    return tokens


@pytest.mark.parametrize("family", DEEPSEEK)
@pytest.mark.parametrize("tables", ["copies", "own", "none"])
def test_the_output_is_that_of_plain_decoding(
    family: str, tables: str, with_layer: Callable[..., Path]
) -> None:
    latent = TinyLatent(groups=4, top_groups=2, dense_layers=2)
    path = with_layer(TinySpec(family, seed=5, latent=latent), tables=tables)
    plain = outputs(path, None)
    for feedback in ("normed", "raw"):
        assert outputs(path, MTP | {"x": {"draft_feedback": feedback}}) == plain
    assert outputs(path, MTP | {"num_speculative_tokens": 16}, prefill_chunk_size=2) == plain


def test_preempted_sequences_keep_their_tokens(with_layer: Callable[..., Path]) -> None:
    path = with_layer()
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=60)
    engine: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 96}
    with LLM(path, show_progress=False, kv_cache_bytes=8 << 20, **engine) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    small = {"kv_cache_bytes": 100 << 10, "block_size": 4}
    config = MTP | {"num_speculative_tokens": 5}
    with LLM(path, show_progress=False, speculative_config=config, **small, **engine) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == plain
        assert llm.stats()["num_preemptions"] > 5
        assert llm._executor.check_integrity() == ""


@pytest.mark.parametrize(("tables", "owns"), [("copies", False), ("own", True), ("none", False)])
def test_copies_of_tables_are_shared(
    tables: str, owns: bool, with_layer: Callable[..., Path]
) -> None:
    path = with_layer(tables=tables)
    target = open_checkpoint(path)
    drafter = open_drafter(path, target.as_target(), "mtp")
    names = {tensor.spec.name for tensor in drafter.tensors}
    assert {"embed.weight", "lm_head.weight"} & names == (
        {"embed.weight", "lm_head.weight"} if owns else set()
    )
    sources = {tensor.spec.name: tensor.source for tensor in drafter.tensors}
    assert sources["fc.weight"] == f"{LAYER}eh_proj.weight"
    assert sources["fc_norm.0.weight"] == f"{LAYER}enorm.weight"
    assert sources["final_norm.weight"] == f"{LAYER}shared_head.norm.weight"
    assert sources["layers.0.mlp.experts.up.7.weight"] == f"{LAYER}mlp.experts.7.up_proj.weight"
    config = drafter.config
    assert config["layers"] == target.config["layers"][-1:]
    assert (config["drafter"]["owns_embedding"], config["drafter"]["owns_lm_head"]) == (owns, owns)
    assert config["drafter"]["norm_output"]


def test_one_copy_that_differs_is_owned(with_layer: Callable[..., Path]) -> None:
    path = with_layer()
    edit_tensors(path, lambda t: t[f"{LAYER}shared_head.head.weight"][5, 7].add_(1))
    drafter = open_drafter(path, open_checkpoint(path).as_target(), "mtp")
    assert not drafter.config["drafter"]["owns_embedding"]
    assert drafter.config["drafter"]["owns_lm_head"]


def test_without_the_method_the_layer_is_not_used(with_layer: Callable[..., Path]) -> None:
    path = with_layer()
    with LLM(path, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] is None
    own = {"model": str(path), "num_speculative_tokens": K}
    with LLM(path, speculative_config=own, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == "draft_model"
    with LLM(path, speculative_config=MTP | {"model": str(path)}, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == "mtp"


def test_a_converted_folder_has_the_layer_as_its_drafter(
    with_layer: Callable[..., Path], tmp_path: Path
) -> None:
    path = with_layer()
    plain = outputs(path, None)
    folder = convert(path, tmp_path / "out", num_speculative_tokens=2, method="mtp", progress=False)
    assert read_json(folder / "paceline.json")["draft"]["config"]["drafter"]["kind"] == "mtp"
    for config in (None, MTP, MTP | {"x": {"draft_feedback": "raw"}}):
        assert outputs(folder, config) == plain
    # The library reads the same weights without Python.
    _, draft = load_pair(path, path, method="mtp", progress=False)
    read = _core.load_model_folder(str(folder))
    assert draft is not None and read.draft is not None
    assert bytes(read.draft.arena()) == bytes(draft.model.arena())
    assert read.num_speculative_tokens == 2
    with LLM(folder, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == "mtp"
        assert llm.capabilities()["configured"]["num_speculative_tokens"] == 2
    with raises(ValueError, "method is 'mtp'", "draft_dir", "without a draft_dir"):
        convert(path, tmp_path / "two", path, method="mtp", progress=False)
    with raises(ValueError, "method is 'eagle'", "draft_dir 'None'"):
        convert(path, tmp_path / "two", method="eagle", progress=False)


def test_dummy_weights(tmp_path: Path) -> None:
    path = make(SPEC)  # without the layer: no weights are read
    target, draft = load_pair(path, path, method="mtp", load_format="dummy", draft_feedback="raw")
    assert draft is not None
    assert (draft.method, draft.is_dummy, target.is_dummy) == ("mtp", True, True)
    assert not draft.config["drafter"]["norm_output"]
    assert outputs(path, MTP, load_format="dummy") == outputs(path, None, load_format="dummy")


def test_tensors_in_memory_and_updates(with_layer: Callable[..., Path], tmp_path: Path) -> None:
    path = with_layer()
    tensors, config = load_tensors(path), read_json(path / "config.json")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    raw = MTP | {"x": {"draft_feedback": "raw", "adaptive": False}}
    other = load_tensors(
        mtp_models.write(TinySpec("glm4_moe_lite", seed=6), tmp_path / "other", seed=1)
    )

    def generate(llm: LLM) -> list[tuple[list[int], Any]]:
        found = []
        for output in llm.generate(PROMPTS, params):
            metrics = output.metrics.speculative_decoding
            assert metrics is not None
            found.append((output.outputs[0].token_ids, metrics["acceptance_histogram"]))
        return found

    with LLM(path, speculative_config=raw, **ENGINE) as llm:
        expected = generate(llm)
    with LLM.from_state_dict(config, tensors, speculative_config=raw, **ENGINE) as llm:
        assert generate(llm) == expected
        llm.update_weights(other, draft_state_dict=other)
        updated = generate(llm)
        assert updated != expected
        llm.update_weights(tensors, draft_state_dict=tensors)
        assert generate(llm) == expected
    with LLM(tmp_path / "other", speculative_config=raw, **ENGINE) as llm:
        assert generate(llm) == updated


def test_the_bench_drafts_with_the_layer(tmp_path: Path) -> None:
    argv = ["bench", "latency", "--config", str(make(SPEC)), "--device", "cpu", "--quiet"]
    argv += ["--concurrency", "2", "--input-len", "8", "--output-len", "8", "--rounds", "1"]
    argv += ["--json", str(tmp_path / "rows.json"), "--speculative-config"]
    for config in (MTP, MTP | {"x": {"draft_feedback": "raw"}}):
        (tmp_path / "rows.json").unlink(missing_ok=True)
        assert main([*argv, json.dumps(config)]) == 0
        rows = read_json(tmp_path / "rows.json")["rows"]
        assert [row["configuration"] for row in rows] == ["plain", f"k={K}"]


# ---- refusals -----------------------------------------------------------------------------------


def test_a_checkpoint_without_the_layer() -> None:
    path = make(SPEC)
    with raises(ModelFileError, path, f"there are no tensors '{LAYER}*'", "'mtp'", "as published"):
        outputs(path, MTP)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_layers(count: int, with_layer: Callable[..., Path]) -> None:
    path = with_layer()
    edit_config(path, num_nextn_predict_layers=count)
    with raises(NotImplementedError, f'"num_nextn_predict_layers" is {count}', "supported: 1"):
        open_drafter(path, load_checkpoint(make(SPEC), progress=False).as_target(), "mtp")


def test_a_layer_that_is_there_twice(with_layer: Callable[..., Path]) -> None:
    path = with_layer()
    edit_tensors(
        path,
        lambda tensors: tensors.update(
            {
                name.replace(LAYER, "model.layers.4.", 1): tensor.clone()
                for name, tensor in tensors.items()
                if name.startswith(LAYER)
            }
        ),
    )
    with raises(ModelFileError, "tensors are not part of", "'model.layers.4."):
        outputs(path, MTP)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (
            lambda tensors: tensors.pop(f"{LAYER}hnorm.weight"),
            ("1 tensor is missing", f"'{LAYER}hnorm.weight'"),
        ),
        (
            lambda tensors: tensors.update(
                {f"{LAYER}eh_proj.weight": tensors[f"{LAYER}eh_proj.weight"][:, :64].clone()}
            ),
            ("eh_proj.weight' has shape [64, 64]; expected [64, 128]", "2 * hidden_size of"),
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}extra.weight": tensors["model.norm.weight"]}),
            ("1 tensor is not part of", f"'{LAYER}extra.weight'"),
        ),
        (
            lambda tensors: tensors.update(
                {
                    f"{LAYER}shared_head.head.weight": tensors[f"{LAYER}shared_head.head.weight"][
                        :100
                    ].clone()
                }
            ),
            ("shared_head.head.weight' has shape [100, 64]; expected [128, 64]", "vocab_size"),
        ),
    ],
)
def test_refused_tensors(edit: Any, parts: Any, with_layer: Callable[..., Path]) -> None:
    import torch

    path = with_layer()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        edit(tensors)
        tensors |= {name: tensor.clone() for name, tensor in tensors.items()}

    edit_tensors(path, change)
    with raises(ModelFileError, f"{path / 'model.safetensors'}: ", *parts):
        outputs(path, MTP)


def test_targets_of_other_families_have_no_layer() -> None:
    path = make(TinySpec("llama"))
    supported = "supported: Glm4MoeLiteForCausalLM, DeepseekV3ForCausalLM"
    with raises(NotImplementedError, path, "'mtp'", "'LlamaForCausalLM'", supported):
        outputs(path, MTP)


def test_the_layer_of_another_target(with_layer: Callable[..., Path], tmp_path: Path) -> None:
    path = with_layer()
    other = mtp_models.write(
        TinySpec("glm4_moe_lite", hidden_size=72), tmp_path / "wide", tables="none"
    )
    config = MTP | {"model": str(other)}
    with raises(ValueError, "['model'] is", "the target's own files", str(path), "no 'model'"):
        outputs(path, config)
    target = open_checkpoint(path).as_target()
    with raises(ValueError, '"hidden_size" is 72', "64"):
        open_drafter(other, target, "mtp")
    v3 = open_checkpoint(make(TinySpec("deepseek_v3"))).as_target()
    with raises(ValueError, "'Glm4MoeLiteForCausalLM'", "'DeepseekV3ForCausalLM'"):
        open_drafter(path, v3, "mtp")


def test_feedback_is_refused_for_other_drafters() -> None:
    path = make(SPEC)
    config = {"model": str(path), "num_speculative_tokens": K, "x": {"draft_feedback": "raw"}}
    with raises(ValueError, "['draft_feedback'] is 'raw'", "is 'draft_model'", "only with 'mtp'"):
        outputs(path, config)
