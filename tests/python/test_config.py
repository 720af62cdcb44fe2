# SPDX-License-Identifier: Apache-2.0
"""speculative_config and the engine's options: which values are read and which are refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from paceline import EngineConfig, SpeculativeConfig, _core

GOOD: dict[str, Any] = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}


def refuses(config: Any, kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as error:
        SpeculativeConfig.parse(config)
    assert type(error.value) is kind
    for part in parts:
        assert part in str(error.value)


def test_mapping_and_json_and_object_are_the_same() -> None:
    config = SpeculativeConfig.parse(GOOD)
    assert SpeculativeConfig.parse(json.dumps(GOOD)) == config
    assert SpeculativeConfig.parse(config) is config
    assert config.method == "draft_model"
    assert config.model == "draft"
    assert config.num_speculative_tokens == 4
    assert config.rejection_sample_method == "coupled"
    assert config.draft_sample_method == "probabilistic"
    assert config.draft_driver == "unrolled"


def test_method_may_be_left_out_when_a_model_is_named() -> None:
    config = SpeculativeConfig.parse({"model": Path("draft"), "num_speculative_tokens": 1})
    assert (config.method, config.model) == (None, "./draft"), "the checkpoint will tell"
    assert config.resolved("eagle3").method == "eagle3"
    with pytest.raises(ValueError, match=r"'draft_model'.*'eagle'.*allowed: 'eagle'"):
        SpeculativeConfig.parse(GOOD).resolved("eagle")


def test_a_drafter_that_the_model_brings() -> None:
    config = SpeculativeConfig.parse({"num_speculative_tokens": 3})
    with pytest.raises(ValueError, match=r"neither 'method' nor 'model', and X .*'draft_model'"):
        config.completed("X")
    with pytest.raises(ValueError, match=r"neither 'method' nor 'model'; .*'draft_model'"):
        _ = config.k
    complete = config.completed("X", "X", 5)
    assert complete is not None
    assert (complete.model, complete.k) == ("X", 3)
    complete = SpeculativeConfig.parse({"rejection_sample_method": "block"}).completed("X", "X", 5)
    assert complete is not None
    assert (complete.k, complete.draft_proposals) == (5, 64)
    assert SpeculativeConfig.parse({"method": None}).completed("X", "X", 5) is None
    refuses({}, ValueError, "lacks 'num_speculative_tokens'")
    refuses({"revision": "main"}, ValueError, "['revision'] is 'main'", "'model'")
    refuses(NGRAM | {"revision": "main"}, ValueError, "['revision'] is 'main'", "no 'revision'")


def test_is_frozen_and_picklable() -> None:
    config = SpeculativeConfig.parse(GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("k", [1, 2, 15, 16])
def test_k_in_range(k: int) -> None:
    assert SpeculativeConfig.parse(GOOD | {"num_speculative_tokens": k}).num_speculative_tokens == k


@pytest.mark.parametrize("k", [0, -1, 17, 10**9, 2**70, "3", True, 2.0, None, [4]])
def test_k_out_of_range(k: Any) -> None:
    config = GOOD | {"num_speculative_tokens": k}
    refuses(config, ValueError, "num_speculative_tokens", str(k), "an integer from 1 to 16")


def test_k_is_required() -> None:
    config = {"method": "draft_model", "model": "draft"}
    refuses(config, ValueError, "lacks 'num_speculative_tokens'", "1 to 16")
    refuses(
        {"model": "draft"}, ValueError, "1 to 16, or 'method': 'dflash' or 'dflash2' or 'dspark'"
    )


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "gemma4_mtp"])
def test_methods_with_a_model(method: str) -> None:
    assert SpeculativeConfig.parse(GOOD | {"method": method}).method == method
    refuses({"method": method, "num_speculative_tokens": 1}, ValueError, "'model'", repr(method))


MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 256}, (1, 256)),
    ],
)
def test_ngram(given: dict[str, int], expected: tuple[int, int]) -> None:
    config = SpeculativeConfig.parse(NGRAM | given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected
    assert config.model is None
    assert dataclasses.replace(config, num_speculative_tokens=2).prompt_lookup_max == expected[1]


@pytest.mark.parametrize("value", [0, -1, 257, "3", 2.0, True])
@pytest.mark.parametrize("key", ["prompt_lookup_min", "prompt_lookup_max"])
def test_ngram_length_out_of_range(key: str, value: Any) -> None:
    refuses(NGRAM | {key: value}, ValueError, key, str(value), "an integer from 1 to 256")


def test_ngram_refusals() -> None:
    config = NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4}
    refuses(config, ValueError, "['prompt_lookup_min'] is 5", "1 to prompt_lookup_max = 4")
    refuses(NGRAM | {"model": "draft"}, ValueError, "['model'] is 'draft'", "no 'model'")
    custom = {"method": "custom", "drafter": len, "num_speculative_tokens": 2}
    refuses(custom | {"prompt_lookup_max": 4}, ValueError, "is 4", "'custom'", "'ngram'")
    refuses({"method": "ngram"}, ValueError, "lacks 'num_speculative_tokens'")


@pytest.mark.parametrize("has_k", [True, False])
def test_methods_that_are_not_supported_yet(has_k: bool) -> None:
    config = {"method": "suffix"} | ({"num_speculative_tokens": 2} if has_k else {})
    there = ("'draft_model'", "'eagle'", "'eagle3'", "'mtp'", "'gemma4_mtp'", "'ngram'")
    refuses(config, NotImplementedError, "'suffix'", *there)


def test_an_mtp_layer_needs_no_model() -> None:
    config = SpeculativeConfig.parse(MTP)
    assert (config.model, config.k, config.is_incomplete) == (None, 3, False)
    refuses(MTP | {"revision": "main"}, ValueError, "['revision'] is 'main'", "no 'revision'")
    refuses({"method": "mtp"}, ValueError, "lacks 'num_speculative_tokens'")
    stacked = SpeculativeConfig.parse(MTP | {"prompt_lookup_max": 4})
    assert (stacked.prompt_lookup_min, stacked.prompt_lookup_max) == (4, 4)


def test_draft_feedback() -> None:
    assert SpeculativeConfig.parse(MTP).draft_feedback is None
    for feedback in ("normed", "raw"):
        nested = {"x": {"draft_feedback": feedback}}
        assert SpeculativeConfig.parse(MTP | nested).draft_feedback == feedback
        parts = (f"['draft_feedback'] is '{feedback}'", "'draft_model'", "'mtp'", "leave it out")
        refuses(GOOD | nested, ValueError, *parts)
    for wrong in ("before", "", 0, True):
        parts = ("['draft_feedback']", repr(wrong), "'normed', 'raw'")
        refuses(MTP | {"x": {"draft_feedback": wrong}}, ValueError, *parts)
    unnamed = {key: value for key, value in GOOD.items() if key != "method"}
    config = SpeculativeConfig.parse(unnamed | {"x": {"draft_feedback": "raw"}})
    assert config.resolved("mtp").draft_feedback == "raw"
    with pytest.raises(ValueError, match=r"draft_feedback.*'raw'.*'eagle3'.*'mtp'"):
        config.resolved("eagle3")


@pytest.mark.parametrize("method", ["Draft_Model", "", "dflash3", 3])
def test_unknown_method(method: Any) -> None:
    refuses(GOOD | {"method": method}, ValueError, "method", repr(method), "'draft_model'")


@pytest.mark.parametrize("model", [None, "", 7])
def test_model_is_required(model: Any) -> None:
    refuses(GOOD | {"model": model}, ValueError, "'model'", repr(model))


def test_unknown_key_lists_the_allowed_ones() -> None:
    refuses(
        GOOD | {"num_speculativ_tokens": 3},
        ValueError,
        "unknown key 'num_speculativ_tokens'; did you mean num_speculative_tokens?",
        "'num_speculative_tokens'",
        "'x'",
    )


def test_tensor_parallel_size_names_the_right_key() -> None:
    refuses(GOOD | {"tensor_parallel_size": 2}, ValueError, "draft_tensor_parallel_size")
    keys = {"draft_tensor_parallel_size": 9}
    refuses(GOOD | keys, ValueError, "['draft_tensor_parallel_size'] is 9", "1 to 8")
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    refuses(lookup, ValueError, "draft_tensor_parallel_size", "'ngram'", "which has no model")


@pytest.mark.parametrize("key", ["max_model_len", "parallel_drafting"])
def test_keys_of_other_engines_are_not_supported_yet(key: str) -> None:
    refuses(GOOD | {key: 2}, NotImplementedError, repr(key), "'num_speculative_tokens'")


def test_keys_of_other_engines_are_refused_together() -> None:
    keys = {"max_model_len": 2, "quantization": "fp8", "enforce_eager": False}
    refuses(
        GOOD | keys,
        NotImplementedError,
        "'max_model_len': 2: leave it out: the drafter uses the target's length",
        "'quantization': 'fp8': leave it out: the checkpoint's config.json says",
    )
    harmless = {"max_model_len": None, "quantization": None, "enforce_eager": False}
    assert SpeculativeConfig.parse(GOOD | harmless) == SpeculativeConfig.parse(GOOD)


def test_vllms_model_of_prompt_lookup() -> None:
    lookup = {"num_speculative_tokens": 3, "prompt_lookup_max": 4}
    expected = SpeculativeConfig.parse(lookup | {"method": "ngram"})
    models: list[dict[str, Any]] = [{"model": "[ngram]"}, {"model": "ngram"}]
    for given in (*models, {"model": "[ngram]", "method": "ngram"}):
        assert SpeculativeConfig.parse(lookup | given) == expected
    refuses(lookup | {"model": "[ngram]", "method": "eagle3"}, ValueError, "'ngram'")


METHODS_WITH_LAWS = pytest.mark.parametrize("method", ["standard", "block"])


@METHODS_WITH_LAWS
def test_draft_options_of_standard_and_block(method: str) -> None:
    config = GOOD | {"rejection_sample_method": method}
    parsed = SpeculativeConfig.parse(config)
    assert (parsed.draft_sample_method, parsed.draft_proposals) == ("probabilistic", 64)
    assert SpeculativeConfig.parse(config | {"x": {"draft_proposals": 256}}).draft_proposals == 256
    greedy = SpeculativeConfig.parse(config | {"draft_sample_method": "greedy"})
    assert (greedy.draft_sample_method, greedy.draft_proposals) == ("greedy", None)
    refuses(config | {"draft_sample_method": "beam"}, ValueError, "'beam'", "'greedy'")


@METHODS_WITH_LAWS
@pytest.mark.parametrize("count", [0, 257, -1, 1.5, "64", True])
def test_draft_proposals_out_of_range(method: str, count: Any) -> None:
    config = GOOD | {"rejection_sample_method": method, "x": {"draft_proposals": count}}
    refuses(config, ValueError, "['draft_proposals']", repr(count), "1 to 256")


@METHODS_WITH_LAWS
def test_draft_proposals_without_sampled_drafts(method: str) -> None:
    proposals = {"x": {"draft_proposals": 64}}
    refuses(GOOD | proposals, ValueError, "['draft_proposals'] is 64", "'coupled'", "'block'")
    config = GOOD | proposals | {"rejection_sample_method": method, "draft_sample_method": "greedy"}
    refuses(config, ValueError, "['draft_proposals'] is 64", "'greedy'", "'probabilistic'")
    refuses(
        GOOD | {"draft_proposals": 64}, ValueError, "unknown key 'draft_proposals'", "under 'x'"
    )


@METHODS_WITH_LAWS
def test_looked_up_drafts_are_greedy(method: str) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": method}
    assert SpeculativeConfig.parse(config).draft_sample_method == "greedy"
    assert SpeculativeConfig.parse(config | {"draft_sample_method": "greedy"})
    refuses(
        config | {"draft_sample_method": "probabilistic"},
        ValueError,
        "'ngram'",
        "no distribution",
        method,
    )
    coupled = config | {"rejection_sample_method": "coupled"}
    assert SpeculativeConfig.parse(coupled).draft_sample_method == "probabilistic"
    refuses(coupled | {"draft_sample_method": "greedy"}, ValueError, "noise", "'probabilistic'")


def test_a_method_found_later_keeps_the_drafts_distribution() -> None:
    config = {"model": "drafter", "num_speculative_tokens": 2, "rejection_sample_method": "block"}
    resolved = SpeculativeConfig.parse(config).resolved("eagle3")
    assert (resolved.method, resolved.draft_proposals) == ("eagle3", 64)


def test_unknown_acceptance_method() -> None:
    config = GOOD | {"rejection_sample_method": "lossy"}
    refuses(config, ValueError, "'lossy'", "'coupled', 'standard', 'block', 'synthetic'")


@pytest.mark.parametrize("length", [1, 2.2, 5, 5.0])
def test_synthetic_length(length: float) -> None:
    config = GOOD | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
    }
    assert SpeculativeConfig.parse(config).synthetic_acceptance_length == length


@pytest.mark.parametrize("length", [None, 0.99, 5.01, float("nan"), float("inf"), "2", True])
def test_synthetic_length_out_of_range(length: Any) -> None:
    config = GOOD | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": length,
    }
    allowed = "a number from 1 to num_speculative_tokens + 1"
    refuses(config, ValueError, f"['synthetic_acceptance_length'] is {length!r}; ", allowed)
    if length in (None, 5.01):
        refuses(config, ValueError, f"{allowed} = 5")


def test_synthetic_length_without_synthetic() -> None:
    refuses(GOOD | {"synthetic_acceptance_length": 2.0}, ValueError, "'coupled'", "'synthetic'")


def test_greedy_drafts_are_explained() -> None:
    assert SpeculativeConfig.parse(GOOD | {"draft_sample_method": "probabilistic"})
    refuses(GOOD | {"draft_sample_method": "greedy"}, ValueError, "noise", "'probabilistic'")
    refuses(GOOD | {"draft_sample_method": "beam"}, ValueError, "'beam'", "'probabilistic'")


@pytest.mark.parametrize("driver", ["unrolled", "replay", "while", "eager"])
def test_draft_driver(driver: str) -> None:
    assert SpeculativeConfig.parse(GOOD | {"x": {"draft_driver": driver}}).draft_driver == driver


def test_nested_options_are_checked() -> None:
    refuses(GOOD | {"x": {"tree": {}}}, ValueError, "['x']", "'tree'", "'draft_driver'")
    refuses(GOOD | {"x": 3}, ValueError, "['x']", "3", "mapping")
    refuses(GOOD | {"x": {"draft_driver": "magic"}}, ValueError, "'magic'", "'unrolled'")
    refuses(GOOD | {"draft_stop_threshold": 0.5}, ValueError, "unknown key 'draft_stop_threshold'")
    refuses(GOOD | {"draft_driver": "eager"}, ValueError, "unknown key 'draft_driver'")
    refuses(GOOD | {"draft_position": "last"}, ValueError, "'draft_position'", "under 'x'", "...")


def test_adaptive() -> None:
    assert SpeculativeConfig.parse(GOOD).adaptive is None
    for value in (True, False):
        assert SpeculativeConfig.parse(GOOD | {"x": {"adaptive": value}}).adaptive is value
    refuses(GOOD | {"x": {"adaptive": 1}}, ValueError, "['adaptive'] is 1; allowed: True or False")
    custom = {"method": "custom", "drafter": len, "num_speculative_tokens": 2}
    refuses(
        custom | {"x": {"adaptive": True}},
        ValueError,
        "['adaptive'] is True, but method is 'custom'",
        "allowed: False",
    )


@pytest.mark.parametrize("threshold", [0, 0.0, 0.25, 0.999])
def test_draft_stop_threshold(threshold: float) -> None:
    nested = {"draft_driver": "while", "draft_stop_threshold": threshold}
    assert SpeculativeConfig.parse(GOOD | {"x": nested}).draft_stop_threshold == threshold
    assert SpeculativeConfig.parse(GOOD).draft_stop_threshold == 0


@pytest.mark.parametrize("threshold", [-0.1, 1, 1.5, float("nan"), "0.5", True, None])
def test_draft_stop_threshold_out_of_range(threshold: Any) -> None:
    nested = {"draft_driver": "while", "draft_stop_threshold": threshold}
    refuses(GOOD | {"x": nested}, ValueError, "draft_stop_threshold", "from 0 (off) to below 1")


@pytest.mark.parametrize("driver", ["unrolled", "replay", "eager"])
def test_draft_stop_threshold_needs_a_driver_that_can_stop(driver: str) -> None:
    nested = {"draft_driver": driver, "draft_stop_threshold": 0.5}
    refuses(GOOD | {"x": nested}, ValueError, "draft_stop_threshold", f"'{driver}'", "'while'")
    off = SpeculativeConfig.parse(GOOD | {"x": nested | {"draft_stop_threshold": 0}})
    assert off.draft_stop_threshold == 0
    # Without a method, that of the checkpoint decides.
    open_method = SpeculativeConfig.parse({k: v for k, v in GOOD.items() if k != "method"}
                                          | {"x": nested})  # fmt: skip
    with pytest.raises(ValueError, match=f"{driver!r}; allowed: with method 'eagle3' only 'while'"):
        open_method.resolved("eagle3")
    assert open_method.resolved("dflash").draft_stop_threshold == 0.5


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("driver", ["unrolled", "replay", "while", "eager"])
def test_drafts_of_a_block_stop_with_every_driver(driver: str, method: str) -> None:
    nested = {"draft_driver": driver, "draft_stop_threshold": 0.5}
    config = SpeculativeConfig.parse(GOOD | {"method": method, "x": nested})
    assert (config.draft_driver, config.draft_stop_threshold) == (driver, 0.5)


@pytest.mark.parametrize("driver", ["unrolled", "while"])
def test_looked_up_drafts_have_no_probability(driver: str) -> None:
    nested = {"draft_driver": driver, "draft_stop_threshold": 0.5}
    config = NGRAM | {"x": nested}
    refuses(config, ValueError, "draft_stop_threshold", "0.5", "'ngram'", "0 (off)")
    assert SpeculativeConfig.parse(NGRAM | {"x": {"draft_driver": driver}}).method == "ngram"


GEMMA4_MTP = GOOD | {"method": "gemma4_mtp"}


def test_draft_position() -> None:
    assert SpeculativeConfig.parse(GOOD).draft_position is None
    assert SpeculativeConfig.parse(GEMMA4_MTP).draft_position == "last"
    for position in ("last", "next"):
        config = SpeculativeConfig.parse(GEMMA4_MTP | {"x": {"draft_position": position}})
        assert config.draft_position == position
        assert dataclasses.replace(config, num_speculative_tokens=2).draft_position == position


def test_draft_position_before_the_method_is_known() -> None:
    unnamed = {key: value for key, value in GOOD.items() if key != "method"}
    assert SpeculativeConfig.parse(unnamed).resolved("gemma4_mtp").draft_position == "last"
    assert SpeculativeConfig.parse(unnamed).resolved("eagle").draft_position is None
    config = SpeculativeConfig.parse(unnamed | {"x": {"draft_position": "next"}})
    assert config.resolved("gemma4_mtp").draft_position == "next"
    with pytest.raises(ValueError, match=r"draft_position.*'next'.*'eagle3'.*'gemma4_mtp'"):
        config.resolved("eagle3")


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "ngram"])
def test_draft_position_of_another_method(method: str) -> None:
    base = NGRAM if method == "ngram" else GOOD | {"method": method}
    config = base | {"x": {"draft_position": "last"}}
    parts = ("['draft_position'] is 'last'", f"'{method}'", "'gemma4_mtp'", "leave it out")
    refuses(config, ValueError, *parts)


@pytest.mark.parametrize("position", ["P", "", 0, True, ["last"]])
def test_unknown_draft_position(position: Any) -> None:
    config = GEMMA4_MTP | {"x": {"draft_position": position}}
    refuses(config, ValueError, "['draft_position']", repr(position), "'last', 'next'")


@pytest.mark.parametrize("value", ["{", "[1]", "3", '"draft_model"'])
def test_bad_json(value: str) -> None:
    refuses(value, ValueError, "speculative_config")


@pytest.mark.parametrize("value", [3, ["draft_model"], True])
def test_not_a_mapping(value: Any) -> None:
    refuses(value, ValueError, "speculative_config", repr(value), "a mapping or a JSON object")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("max_num_seqs", 0, "1 to 1024"),
        ("max_num_seqs", 1025, "1 to 1024"),
        ("max_num_seqs", "8", "1 to 1024"),
        ("max_num_seqs", True, "1 to 1024"),
        ("block_size", 0, "1 to 256"),
        ("block_size", 257, "1 to 256"),
        ("block_size", None, "1 to 256"),
        ("max_model_len", 0, "from 1"),
        ("max_model_len", 2.5, "from 1"),
        ("kv_cache_bytes", -1, "from 1"),
        ("num_threads", 0, "1 to 1024"),
        ("prefill_chunk_size", 0, "from 1"),
        ("seed", -1, "from 0"),
        ("seed", 2**64, "from 0"),
        ("device", "gpu", "'auto', 'cpu', 'cuda'"),
        ("device", None, "'auto', 'cpu', 'cuda'"),
        ("dtype", "fp8", "'auto', 'float32', 'bfloat16'"),
    ],
)
def test_engine_options_out_of_range(key: str, value: Any, allowed: str) -> None:
    pattern = f"{key} .*{re.escape(str(value))}.*{re.escape(allowed)}"
    with pytest.raises(ValueError, match=pattern):
        EngineConfig(**{key: value})


def test_cuda_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _core.build_info()["has_cuda"]:
        with pytest.raises(NotImplementedError, match=r"'cuda': this build has no CUDA.*'cpu'"):
            EngineConfig(device="cuda")
    status = _core.cuda_status() | {"is_built": True, "is_usable": False, "reason": "no driver"}
    monkeypatch.setattr(_core, "cuda_status", lambda: status)
    with pytest.raises(NotImplementedError, match="device is 'cuda': no driver"):
        EngineConfig(device="cuda")
    assert EngineConfig(device="auto").device == "auto"


def test_cuda_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cuda_status", lambda: {"is_usable": True})
    assert EngineConfig(device="cuda").device == "cuda"


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_gpus_have_no_numbers(device: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{device}.*'cuda'.*CUDA_VISIBLE_DEVICES"):
        EngineConfig(device=device)


def test_defaults_are_those_of_the_documentation() -> None:
    config = EngineConfig()
    assert (config.device, config.dtype, config.max_num_seqs) == ("auto", "auto", 64)
    assert (config.block_size, config.seed, config.max_model_len) == (16, 0, None)
