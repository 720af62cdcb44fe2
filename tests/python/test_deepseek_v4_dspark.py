# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 with the block drafter in its own files: output of plain decoding; bad folders."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_v4_dspark import StagesSpec, make_with_stages
from deepseek_v4_engines import (
    ENGINE,
    OTHER,
    PROMPTS,
    SCALED,
    SETTINGS,
    SPEC,
    check_bench,
    check_cached_prefixes_change_no_token,
    check_preempted_sequences_keep_their_tokens,
    check_ranks_change_nothing,
    check_tensors_in_memory,
    drafting,
    generate,
    outputs,
    plain,
    sampling,
)
from deepseek_v4_models import V4Spec, make
from drafter_checks import DSPARK_CHOICES
from errors import raises
from paceline import LLM
from paceline._core import ModelFileError
from paceline.bench.models import first_layers, named_config
from paceline.loader import decoder_config, drafter_config, open_checkpoint, open_drafter
from paceline.loader.convert import convert
from paceline.loader.deepseek_v4_dspark import translate_stages
from paceline.loader.drafters import Target
from paceline.loader.section import Section
from tiny_models import copy_checkpoint, edit_config, edit_tensors

STAGES = StagesSpec(seed=5)


def dspark(k: int | None = None, **nested: Any) -> dict[str, Any]:
    return drafting("dspark", k, nested)


def path_of(spec: V4Spec = SPEC) -> Path:
    return make_with_stages(spec, STAGES)


# ---- the output --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_drafts_change_no_token(k: int, temperature: float) -> None:
    assert outputs(path_of(), dspark(k), temperature) == plain(SPEC, temperature)


@pytest.mark.parametrize("spec", [SPEC, SCALED], ids=["plain", "scales"])
@pytest.mark.parametrize("engine", SETTINGS, ids=str)
def test_nothing_else_changes_a_token(engine: dict[str, Any], spec: V4Spec) -> None:
    assert outputs(path_of(spec), dspark(5), **engine) == plain(spec)


@pytest.mark.parametrize(
    "nested",
    [
        {"draft_driver": "replay"},
        {"draft_driver": "while", "draft_stop_threshold": 0.02},
        {"draft_driver": "replay", "draft_stop_threshold": 0.5, "adaptive": True},
        {"draft_stop_threshold": 0.7},
        {"draft_driver": "eager"},
        {"adaptive": True},
    ],
    ids=str,
)
def test_drivers_change_no_token(nested: dict[str, Any]) -> None:
    assert outputs(path_of(), dspark(4, **nested)) == plain(SPEC)


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_rejection_at_temperature_0(method: str, threshold: float) -> None:
    config = dspark(4, draft_stop_threshold=threshold) | {"rejection_sample_method": method}
    assert outputs(path_of(), config, 0.0) == plain(SPEC, 0.0)


def test_ranks_change_nothing() -> None:
    check_ranks_change_nothing(path_of(), dspark(5))


def test_preempted_sequences_keep_their_tokens() -> None:
    check_preempted_sequences_keep_their_tokens(path_of(), dspark(5), 340 << 10)


def test_cached_prefixes_and_samples_change_no_token() -> None:
    check_cached_prefixes_change_no_token(path_of(), dspark(5))


# ---- the confidence head ------------------------------------------------------------------------

CONFIDENCE = "mtp.2.confidence_head.proj.weight"


def num_drafts(source: Path, threshold: float, method: str | None = "dspark") -> list[int]:
    """The drafts of each prompt, whose output is that of plain decoding."""
    config = dspark(5, draft_stop_threshold=threshold) | {"method": method}
    with LLM(source, speculative_config=config, **ENGINE) as llm:
        found = llm.generate(PROMPTS, sampling(0.0))
        assert llm._executor.check_integrity() == ""
    assert [output.outputs[0].token_ids for output in found] == plain(SPEC, 0.0)
    return [output.metrics.speculative_decoding["num_draft_tokens"] for output in found]


def with_confidence(tmp_path: Path, weight: torch.Tensor | None) -> Path:
    """The drafter with another confidence head, or with none."""
    path = copy_checkpoint(path_of(), tmp_path / "model")
    if weight is None:
        edit_tensors(path, lambda tensors: tensors.pop(CONFIDENCE))
    else:
        edit_tensors(path, lambda tensors: tensors[CONFIDENCE].copy_(weight))
    return path


def test_its_confidence_head_ends_drafts(tmp_path: Path) -> None:
    """`tests/golden/test_deepseek_v4_stages.py` compares each draft with the equations."""
    without = num_drafts(path_of(), 0.0)
    some = num_drafts(path_of(), 0.5)
    assert 0 < sum(some) < sum(without)
    assert sum(num_drafts(path_of(), 0.9)) < sum(some)
    # Without a bias, an estimate of nothing is a half.
    zeros = with_confidence(tmp_path, torch.zeros(()))
    assert num_drafts(zeros, 0.49) == without
    assert sum(num_drafts(zeros, 0.51)) == 0
    folder = convert(path_of(), tmp_path / "out", method="dspark", progress=False)
    assert num_drafts(folder, 0.5, method=None) == some


def test_without_a_confidence_head_the_probability_of_a_draft_decides(tmp_path: Path) -> None:
    path = with_confidence(tmp_path, None)
    without = num_drafts(path, 0.0)
    assert without == num_drafts(path_of(), 0.0)
    found = num_drafts(path, 0.999)
    # The draft that is unlikely is still verified.
    assert sum(found) < sum(without) and min(found) > 0
    assert num_drafts(path, 0.5) != num_drafts(path_of(), 0.5)


# ---- where it is found -------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "method", "k"), DSPARK_CHOICES)
def test_a_target_with_stages_drafts_with_them(
    config: Any, method: str | None, k: int | None
) -> None:
    with LLM(path_of(), speculative_config=config, **ENGINE) as llm:
        chosen = llm.speculative_config
        assert (chosen and chosen.method, chosen and chosen.num_speculative_tokens) == (method, k)
        assert generate(llm, sampling(0.0), PROMPTS[:1]) == plain(SPEC, 0.0)[:1]


def without_stages(tmp_path: Path) -> Path:
    """As transformers saves such a model: the keys stay, the tensors do not."""
    path = copy_checkpoint(path_of(), tmp_path / "model")
    edit_tensors(path, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    return path


def test_a_target_without_its_stages_is_plain(tmp_path: Path) -> None:
    path = without_stages(tmp_path)
    assert outputs(path, None) == plain(SPEC)
    with raises(ModelFileError, path, "no tensors 'mtp.*'", "mtp.0 to mtp.2", "{'method': None}"):
        outputs(path, dspark(3))


def test_a_target_of_an_older_release_has_no_stages() -> None:
    with raises(ValueError, "'dspark'", "no such drafter in its own files", "'model'"):
        outputs(make(SPEC), dspark(3))


def test_the_stages_are_no_mtp_layer() -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    with raises(ValueError, "'mtp'", "'dspark'", "config.json says so", "allowed: 'dspark'"):
        outputs(path_of(), config)


def test_more_drafts_than_the_block() -> None:
    with raises(ValueError, "num_speculative_tokens is 6", "blocks of 5", "allowed: 1 to 5"):
        outputs(path_of(), dspark(6))


def test_a_converted_folder_has_the_stages_as_its_drafter(tmp_path: Path) -> None:
    folder = convert(path_of(SCALED), tmp_path / "out", num_speculative_tokens=3, method="dspark",
                     progress=False)  # fmt: skip
    assert outputs(folder, None) == plain(SCALED)
    with LLM(folder, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == "dspark"
    with raises(ValueError, "method is 'dspark'", "draft_dir", "in its own files"):
        convert(make(SPEC), tmp_path / "other", method="dspark", progress=False)


def test_tensors_in_memory() -> None:
    check_tensors_in_memory(path_of(), path_of(OTHER), dspark(3))


# ---- dummy weights and the bench ---------------------------------------------------------------


def test_dummy_weights_and_the_bench(tmp_path: Path) -> None:
    dummy = {"load_format": "dummy"}
    assert outputs(path_of(), dspark(3), **dummy) == outputs(make(SPEC), None, **dummy)
    with LLM(without_stages(tmp_path), **ENGINE | dummy) as llm:
        assert llm.speculative_config is not None
        assert llm.speculative_config.method == "dspark"
    check_bench(path_of(), dspark(3), 3, tmp_path)


def flash_target(config: dict[str, Any]) -> Target:
    return Target(Path("x"), "DeepseekV4ForCausalLM", decoder_config(config), "bfloat16")


def test_the_published_shape() -> None:
    config = named_config("deepseek-v4-flash-dspark")
    target = flash_target(config)
    family, _ = translate_stages(Section(config, "x"), target, None)
    drafter = family.config["drafter"]
    assert drafter["aux_layers"] == [41, 42, 43]
    assert drafter["block"]["size"] == 5
    assert drafter["block"]["mask_token"] == 128_799
    # All rows see the 128 entries before the first row, which is one more.
    assert [layer["attention"]["window"] for layer in family.config["layers"]] == [129] * 3
    stages = Counter(spec.source.split(".")[1] for spec in family.tensors)
    assert stages == {"0": 1568, "1": 1565, "2": 1572}
    shapes = {spec.source: spec.shape for spec in family.tensors}
    assert shapes["mtp.0.main_proj.weight"] == (4096, 12_288)
    assert shapes["mtp.0.main_proj.scale"] == (32, 96)
    assert shapes["mtp.2.hc_head_fn"] == (4, 16_384)
    assert shapes["mtp.2.markov_head.markov_w2.weight"] == (129_280, 256)
    assert shapes[CONFIDENCE] == (1, 4352)
    assert drafter["block"]["confidence"] == {
        "reads_token": True, "before_norm": True, "lacks_bias": True
    }  # fmt: skip


def test_the_first_layers_of_the_shape_keep_the_stages() -> None:
    whole = named_config("deepseek-v4-flash-dspark")
    cut = first_layers(whole, 6, "cut")
    kept = drafter_config(cut, flash_target(cut), method="dspark")
    expected = drafter_config(whole, flash_target(whole), method="dspark")
    assert kept["drafter"].pop("aux_layers") == [4, 5, 6]
    assert expected["drafter"].pop("aux_layers") == [41, 42, 43]
    assert kept == expected
    with raises(ValueError, "--num-layers is 2", "reads 3 layers", "allowed: 3 to 43"):
        first_layers(whole, 2, "cut")


# ---- bad folders -------------------------------------------------------------------------------


def pop_stage(stage: int) -> Any:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith(f"mtp.{stage}."):
                tensors.pop(name)

    return edit


def cut_to_hidden_size(name: str) -> Any:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:, :64].contiguous()

    return edit


@pytest.mark.parametrize(
    ("edit", "error", "seen"),
    [
        (
            lambda path: edit_tensors(path, pop_stage(1)),
            ModelFileError,
            ("the files have mtp.0, mtp.2;", "mtp.0 to mtp.2", "dspark_target_layer_ids"),
        ),
        (
            lambda path: edit_tensors(
                path, lambda t: t.update({"mtp.3.norm.weight": t["norm.weight"].clone()})
            ),
            ModelFileError,
            ("mtp.3;", "mtp.0 to mtp.2"),
        ),
        (
            lambda path: edit_tensors(path, lambda t: t.pop("mtp.0.main_norm.weight")),
            ModelFileError,
            ("1 tensor is missing", "mtp.0.main_norm.weight"),
        ),
        (
            lambda path: edit_tensors(path, cut_to_hidden_size("mtp.0.main_proj.weight")),
            ModelFileError,
            ("mtp.0.main_proj.weight", "[64, 64]", "[64, 192]", "3 * hidden_size"),
        ),
        (
            lambda path: edit_tensors(path, cut_to_hidden_size(CONFIDENCE)),
            ModelFileError,
            (CONFIDENCE, "[1, 64]", "[1, 70]", "hidden_size + dspark_markov_rank"),
        ),
        (
            lambda path: edit_tensors(
                path, lambda t: t.update({"mtp.2.confidence_head.proj.bias": torch.ones(1)})
            ),
            ModelFileError,
            ("1 tensor is not part of", "mtp.2.confidence_head.proj.bias"),
        ),
        (
            lambda path: edit_tensors(
                path, lambda t: t.update({CONFIDENCE.replace("2", "1"): t.pop(CONFIDENCE)})
            ),
            ModelFileError,
            ("1 tensor is not part of", "mtp.1.confidence_head.proj.weight"),
        ),
        (
            lambda path: edit_tensors(
                path, lambda t: t.update({"mtp.0.e_proj.weight": torch.ones(64, 64)})
            ),
            ModelFileError,
            ("1 tensor is not part of", "mtp.0.e_proj.weight"),
        ),
        (
            lambda path: edit_config(path, dspark_block_size=0),
            ModelFileError,
            ("dspark_block_size", "is 0"),
        ),
        (
            lambda path: edit_config(path, dspark_noise_token_id=128),
            ModelFileError,
            ("dspark_noise_token_id", "is 128", "127"),
        ),
        (
            lambda path: edit_config(path, dspark_markov_rank=4),
            ModelFileError,
            ("markov_w1.weight", "[128, 6]", "dspark_markov_rank"),
        ),
        (
            lambda path: edit_config(path, dspark_target_layer_ids=[1, 2, 4]),
            ValueError,
            ("dspark_target_layer_ids", "[1, 2, 4]", "4 layers", "allowed: 0 to 3"),
        ),
        (
            lambda path: edit_config(path, dspark_target_layer_ids=[3, 2, 1]),
            ValueError,
            ("dspark_target_layer_ids", "[3, 2, 1]", "ascending"),
        ),
        (
            lambda path: edit_config(path, dspark_target_layer_ids="last"),
            ModelFileError,
            ("dspark_target_layer_ids", 'is "last"', "a list of layers"),
        ),
        (
            lambda path: edit_config(path, compress_ratios=[0, 4, 128, 4, 0]),
            ModelFileError,
            ("compress_ratios", "5 entries", "7 with those of", "dspark_target_layer_ids"),
        ),
        (
            lambda path: edit_config(path, compress_ratios=[0, 4, 128, 4, 0, 4, 0]),
            NotImplementedError,
            ("compress_ratios", "0 for the layers of mtp.*"),
        ),
        (
            lambda path: edit_config(
                path, architectures=["DeepseekV41ForCausalLM"], model_type="deepseek_v41"
            ),
            NotImplementedError,
            ("DeepseekV41ForCausalLM",),
        ),
    ],
)
def test_refusals(edit: Any, error: type[Exception], seen: tuple[str, ...], tmp_path: Path) -> None:
    path = copy_checkpoint(path_of(), tmp_path / "model")
    edit(path)
    with raises(error, *seen):
        open_drafter(path, open_checkpoint(path).as_target(), "dspark")


def test_the_stages_of_another_target() -> None:
    other = open_checkpoint(make(replace(SPEC, ratios=(0, 4, 128)))).as_target()
    with raises(ValueError, "made for another target", '"num_hidden_layers" is 4', "is 3"):
        open_drafter(path_of(), other, "dspark")
