# SPDX-License-Identifier: Apache-2.0
"""Block drafters of Gemma targets and z-lab's own keys: output, acceptance, reading, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import block_models
from bench_work import all_parameters
from block_golden import GEMMA3, GEMMA4, GEMMA4_SMALL
from block_models import BlockSpec
from drafter_checks import (
    ENGINE,
    check_always_right,
    check_both_ways,
    context_free_pair,
    outputs,
    plain_outputs,
)
from errors import raises
from paceline import LLM
from paceline._core import ModelFileError
from paceline.bench.costs import matrix_costs
from paceline.loader import drafter_config, open_checkpoint, open_drafter
from paceline.loader.drafters import Target
from tiny_models import TinySpec, edit_config, edit_section, edit_tensors, make

SPECS = {
    "gemma4": BlockSpec("gemma4", markov_rank=8, soft_cap=3.0),
    "z-lab": BlockSpec("z-lab", window=6, num_layers=3, soft_cap=30.0),
    "speculators": BlockSpec("speculators", window=6, markov_rank=8, draft_vocab_size=64),
}


def drafter(layout: str, out: Path, target: TinySpec = GEMMA4, **changes: Any) -> Path:
    return block_models.write(replace(SPECS[layout], **changes), make(target), out / "drafter")


def opened(path: Path, target: TinySpec = GEMMA4, dtype: str = "auto") -> Any:
    return open_drafter(path, open_checkpoint(make(target), dtype).as_target())


@pytest.mark.parametrize(
    ("target", "x"),
    [
        (GEMMA4, {}),
        (GEMMA4_SMALL, {"draft_driver": "replay", "adaptive": True}),
        (GEMMA3, {"draft_driver": "while", "draft_stop_threshold": 0.02}),
    ],
    ids=["large", "small", "gemma3"],
)
@pytest.mark.parametrize("layout", SPECS)
def test_output_is_that_of_plain_decoding(
    layout: str, target: TinySpec, x: dict[str, Any], tmp_path: Path
) -> None:
    spec = SPECS[layout]
    config: dict[str, Any] = {
        "method": spec.method,
        "model": str(drafter(layout, tmp_path, target)),
        "num_speculative_tokens": spec.max_drafts,
        "x": x,
    }
    with LLM(make(target), speculative_config=config, **ENGINE) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert outputs(llm) == plain_outputs(target)
        assert llm._executor.check_integrity() == ""


@pytest.mark.parametrize("layout", ["gemma4", "z-lab"])
def test_a_drafter_of_the_same_law_is_always_right(layout: str, tmp_path: Path) -> None:
    # With a cap this low, a second cap would give another distribution.
    spec = replace(SPECS[layout], soft_cap=1.0)
    plain = make(replace(GEMMA4, tied=False, logit_soft_cap=1.0))
    target, path = context_free_pair(plain, spec, tmp_path)
    if spec.markov_rank:
        edit_tensors(path, lambda tensors: tensors["markov_head.markov_w2.weight"].zero_())
    check_always_right(target, path, spec)


@pytest.mark.parametrize("layout", SPECS)
def test_converted_pair(layout: str, tmp_path: Path) -> None:
    path = drafter(layout, tmp_path)
    if layout == "gemma4":  # whose tables are then no copies of the target's
        for name in ("embed_tokens.weight", "lm_head.weight"):
            edit_tensors(path, lambda tensors, name=name: tensors[name].add_(1.0))
    check_both_ways(make(GEMMA4), path, tmp_path / "converted")


def test_copies_of_a_tied_table_are_shared(tmp_path: Path) -> None:
    path = drafter("gemma4", tmp_path)
    head = opened(path).config["drafter"]
    assert (head["owns_embedding"], head["owns_lm_head"]) == (False, False)
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].mul_(-1.0))
    head = opened(path).config["drafter"]
    assert (head["owns_embedding"], head["owns_lm_head"]) == (False, True)


@pytest.mark.parametrize(("layout", "k"), [("gemma4", 5), ("z-lab", 4), ("speculators", 5)])
def test_dummy_weights(layout: str, k: int, tmp_path: Path) -> None:
    config = {"method": SPECS[layout].method, "model": str(drafter(layout, tmp_path))}
    with LLM(make(GEMMA4), speculative_config=config, load_format="dummy", **ENGINE) as llm:
        assert llm.speculative_config is not None
        assert llm.speculative_config.num_speculative_tokens == k
        assert all(len(tokens) == 24 for tokens in outputs(llm))


# ---- factors on embeddings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "target", "stated", "expected", "is_noted"),
    [
        ("gemma4", GEMMA4, None, 8.0, False),
        ("z-lab", GEMMA4, None, 8.0, True),
        ("z-lab", GEMMA3, None, 8.0, True),
        ("z-lab", GEMMA4, 2.5, 2.5, False),
        ("speculators", GEMMA4, None, 1.0, False),
        ("speculators", GEMMA3, None, 1.0, False),
        ("z-lab", TinySpec("qwen3", seed=40, num_layers=8), None, 1.0, False),
        ("z-lab", TinySpec("qwen3", seed=40, num_layers=8), 2.5, 2.5, False),
    ],
)
def test_factor_on_embeddings(
    layout: str,
    target: TinySpec,
    stated: float | None,
    expected: float,
    is_noted: bool,
    tmp_path: Path,
) -> None:
    found = opened(drafter(layout, tmp_path, target, embed_scale=stated), target)
    assert found.config["embed_scale"] == expected
    assert any("embeddings are multiplied" in note for note in found.notes) == is_noted


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 7.3), ("bfloat16", 7.3125)])
def test_factor_has_the_dtype_of_the_table(dtype: str, expected: float, tmp_path: Path) -> None:
    path = drafter("z-lab", tmp_path, embed_scale=7.3)
    assert opened(path, dtype=dtype).config["embed_scale"] == expected


def test_published_drafter_of_gemma4_31b() -> None:
    """z-lab's: four sliding layers and a full one, without a factor in its configuration."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 10_752,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "rope_theta": 1_000_000,
        "max_position_embeddings": 262_144,
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": 4,
            "target_layer_ids": [1, 12, 23, 35, 46, 57],
            "final_logit_softcapping": 30.0,
            "use_swa": True,
            "swa_window_size": 2048,
            "attention_sink_bias": False,
            "attention_value_scale": 1.0,
        },
    }
    facts = {"vocab_size": 262_144, "hidden_size": 5376, "max_position": 262_144}
    facts |= {"embed_scale": 73.5, "layers": [{}] * 60}
    target = Target(Path("31b"), "Gemma4ForConditionalGeneration", facts, "bfloat16")
    described = drafter_config(config, target)
    assert (described["embed_scale"], described["logit_soft_cap"]) == (73.5, 30.0)
    assert described["drafter"]["aux_layers"] == [2, 13, 24, 36, 47, 58]
    windows = [layer["attention"]["window"] for layer in described["layers"]]
    assert windows == [2048] * 4 + [0]
    costs = matrix_costs(described, "bfloat16")
    lm_head = next(matrix.parameters for matrix in costs.matrices if matrix.name == "lm_head")
    assert (all_parameters(costs) - lm_head) / 1e6 == pytest.approx(1536.0, abs=0.1)
    del config["dflash_config"]["final_logit_softcapping"]  # type: ignore[attr-defined]
    assert drafter_config(config, target)["logit_soft_cap"] == 0.0
    config["dflash_config"]["input_embedding_scale"] = 73.32  # type: ignore[index]
    assert drafter_config(config, target)["embed_scale"] == 73.5


# ---- windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "kinds", "window"),
    [
        ({"use_swa": True, "swa_window_size": 7, "causal": False}, ["sliding"] * 3, 7),
        ({"use_swa": True, "swa_window_size": 7, "causal": True}, ["sliding"] * 3, 7),
        ({"use_swa": False, "swa_window_size": 7}, ["full"] * 3, 0),
        ({"swa_window_size": 7}, ["full"] * 3, 0),
    ],
)
def test_keys_of_windows(
    keys: dict[str, Any], kinds: list[str], window: int, tmp_path: Path
) -> None:
    path = drafter("z-lab", tmp_path, window=0)
    edit_section(path, "dflash_config", **keys)
    found = opened(path).config
    assert [layer["attention"]["kind"] for layer in found["layers"]] == kinds
    assert {layer["attention"]["window"] for layer in found["layers"]} == {window}
    assert found["drafter"]["block"]["sliding"]["is_causal"] == keys.get("causal", True)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "seen"),
    [
        (
            {"model_type": "qwen3"},
            NotImplementedError,
            ("model_type", "qwen3", "gemma4_text, gemma4_unified_text"),
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            NotImplementedError,
            ("layer_types", "sliding_attention", "full_attention for every layer"),
        ),
        ({"enable_moe_block": True}, NotImplementedError, ("enable_moe_block", "true", "false")),
        (
            {"hidden_size_per_layer_input": 8},
            NotImplementedError,
            ("hidden_size_per_layer_input", "is 8", "supported: 0"),
        ),
        (
            {"input_embedding_scale": 8.0},
            NotImplementedError,
            ("input_embedding_scale", "8.0", "no such key in this layout"),
        ),
        ({"rope_theta": 10_000.0}, NotImplementedError, ("rope_theta", "rope_parameters")),
        (
            {"final_logit_softcapping": -1.0},
            ModelFileError,
            ("final_logit_softcapping", "-1.0", "a finite number from 0"),
        ),
        (
            {"attention_k_eq_v": False},
            ModelFileError,
            ("k_proj.weight", "[32, 64]", "expected [64, 64]"),
        ),
    ],
)
def test_refusals_of_gemma4_layers(
    changes: dict[str, Any], error: type[Exception], seen: tuple[str, ...], tmp_path: Path
) -> None:
    path = drafter("gemma4", tmp_path)
    edit_config(path, **changes)
    with raises(error, path, *seen):
        opened(path)


def test_a_missing_factor_of_a_layer(tmp_path: Path) -> None:
    path = drafter("gemma4", tmp_path)
    edit_tensors(path, lambda tensors: tensors.pop("layers.1.layer_scalar"))
    with raises(ModelFileError, path, "1 tensor is missing", "layers.1.layer_scalar") as error:
        opened(path)
    assert "which Gemma4DSparkModel needs; expected a whole checkpoint" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "error", "seen"),
    [
        ({"attention_sink_bias": True}, NotImplementedError, ("attention_sink_bias", "false")),
        ({"attention_value_scale": 0.7}, NotImplementedError, ("attention_value_scale", "1.0")),
        (
            {"input_embedding_scale": 0.0},
            ModelFileError,
            ("input_embedding_scale", "0.0", "above 0"),
        ),
        (
            {"use_swa": False},
            ModelFileError,
            ("use_swa", "is false", 'true, as "layer_types" says'),
        ),
        (
            {"swa_window_size": 9},
            ModelFileError,
            ("swa_window_size", "is 9", 'expected 6, as "sliding_window" says'),
        ),
    ],
)
def test_refusals_of_keys_of_z_lab(
    changes: dict[str, Any], error: type[Exception], seen: tuple[str, ...], tmp_path: Path
) -> None:
    path = drafter("z-lab", tmp_path)
    edit_section(path, "dflash_config", **changes)
    with raises(error, path, "dflash_config.", *seen):
        opened(path)


def test_windows_whose_causality_is_unknown(tmp_path: Path) -> None:
    path = drafter("z-lab", tmp_path, window=0)
    edit_section(path, "dflash_config", use_swa=True, swa_window_size=7)
    with raises(NotImplementedError, path, "dflash_config.use_swa", "true only with", "causal"):
        opened(path)


def test_a_factor_in_a_file_of_speculators(tmp_path: Path) -> None:
    path = drafter("speculators", tmp_path)
    edit_config(path, input_embedding_scale=8.0)
    with raises(NotImplementedError, path, "input_embedding_scale", "8.0", "no such key"):
        opened(path)


def test_a_factor_that_nothing_says(tmp_path: Path) -> None:
    spec = BlockSpec("nested", markov_rank=8)
    path = block_models.write(spec, make(GEMMA4), tmp_path / "drafter")
    key = "dflash_config.input_embedding_scale"
    with raises(ModelFileError, path, key, "is missing", "expected a number", "by 8"):
        opened(path)
    edit_section(path, "dflash_config", input_embedding_scale=1.0)
    assert opened(path).config["embed_scale"] == 1.0
