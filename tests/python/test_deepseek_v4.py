# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 with its MTP layer: the output of plain decoding, conversion, tensors in memory."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepseek_v4_models import V4Spec, make
from errors import raises
from paceline import LLM, SamplingParams
from paceline.cli import main
from paceline.loader.convert import convert
from tiny_models import load_tensors, read_json

SPEC = V4Spec(seed=5)
SCALED = replace(SPEC, has_scales=True, dtype="bfloat16")
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "kv_cache_bytes": 8 << 20,
    "show_progress": False,
}  # fmt: skip
# Lengths on both sides of the windows (8 tokens) and of entries of 4 and 8 tokens.
PROMPTS = [[(7 * i + j) % 128 for j in range(length)] for i, length in enumerate((1, 3, 8, 15, 40))]
NUM_TOKENS = 40


def mtp(k: int, **nested: Any) -> dict[str, Any]:
    # Fixed, so that all of the drafter runs.
    return {"method": "mtp", "num_speculative_tokens": k, "x": {"adaptive": False} | nested}


def outputs(
    source: Any, config: dict[str, Any] | None, temperature: float = 1.0, **engine: Any
) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(source, speculative_config=config, **ENGINE | engine) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert llm._executor.check_integrity() == ""
    return tokens


@functools.cache
def plain(spec: V4Spec, temperature: float = 1.0) -> list[list[int]]:
    return outputs(make(spec), None, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_drafts_change_no_token(k: int, temperature: float) -> None:
    assert outputs(make(SPEC), mtp(k), temperature) == plain(SPEC, temperature)


@pytest.mark.parametrize("spec", [SPEC, SCALED], ids=["plain", "scales"])
@pytest.mark.parametrize(
    "engine",
    [
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 3, "max_num_seqs": 1},
        {"prefill_chunk_size": 7, "block_size": 5},
        {"block_size": 1, "num_threads": 1},
    ],
    ids=str,
)
def test_nothing_else_changes_a_token(engine: dict[str, Any], spec: V4Spec) -> None:
    assert outputs(make(spec), mtp(5), **engine) == plain(spec)


@pytest.mark.parametrize("driver", ["replay", "while", "eager"])
def test_drivers_change_no_token(driver: str) -> None:
    assert outputs(make(SPEC), mtp(4, draft_driver=driver)) == plain(SPEC)


def test_prompt_lookup_changes_no_token() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
    assert outputs(make(SPEC), config | {"prompt_lookup_max": 3}, 0.0) == plain(SPEC, 0.0)


def test_a_model_agrees_with_itself() -> None:
    config = {"model": str(make(SPEC)), "num_speculative_tokens": 7}
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(make(SPEC), speculative_config=config, **ENGINE) as llm:
        found = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in found] == plain(SPEC)
    for output in found:
        counters = output.metrics.speculative_decoding
        assert counters is not None
        assert counters["num_accepted_draft_tokens"] == counters["num_draft_tokens"] > 0


def test_preempted_sequences_keep_their_tokens() -> None:
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True)
    engine = ENGINE | {"max_num_seqs": 8, "max_model_len": 96}
    with LLM(make(SPEC), **engine) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    small = {"kv_cache_bytes": 280 << 10, "block_size": 4}
    with LLM(make(SPEC), speculative_config=mtp(5), **engine | small) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert found == expected
        assert llm.stats()["num_preemptions"] > 3
        assert llm._executor.check_integrity() == ""


def test_samples_share_the_prompt() -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, n=3, ignore_eos=True)
    found = []
    for config in (None, mtp(4)):
        with LLM(make(SPEC), speculative_config=config, **ENGINE) as llm:
            found.append(
                [[o.token_ids for o in out.outputs] for out in llm.generate(PROMPTS, params)]
            )
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][1]


def test_a_thousand_iterations_of_more_than_two_drafts() -> None:
    """Where the metadata of draft steps once was that of the step before, vLLM crashed here."""
    spec = replace(SPEC, ratios=(4, 128))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=1100, ignore_eos=True)
    engine = ENGINE | {"max_model_len": 1200, "max_num_seqs": 1}
    found = []
    for config in (None, mtp(5)):
        with LLM(make(spec), speculative_config=config, **engine) as llm:
            (output,) = llm.generate([[1, 2, 3]], params)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
    counters = output.metrics.speculative_decoding
    assert counters is not None
    assert counters["num_spec_steps"] > 1000


def test_a_converted_folder_has_the_layer_as_its_drafter(tmp_path: Path) -> None:
    folder = convert(make(SCALED), tmp_path / "out", num_speculative_tokens=3, method="mtp",
                     progress=False)  # fmt: skip
    assert outputs(folder, None) == plain(SCALED)
    with LLM(folder, **ENGINE) as llm:
        assert llm.capabilities()["configured"]["method"] == "mtp"


def test_tensors_in_memory() -> None:
    path = make(SPEC)
    tensors, config = load_tensors(path), read_json(path / "config.json")
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM.from_state_dict(config, tensors, speculative_config=mtp(3), **ENGINE) as llm:

        def generate() -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]

        assert generate() == plain(SPEC)
        other = load_tensors(make(replace(SPEC, seed=6)))
        llm.update_weights(other, draft_state_dict=other)
        assert generate() == plain(replace(SPEC, seed=6))


def test_hidden_states_are_those_after_the_final_norm() -> None:
    import torch

    from deepseek_v4_models import model

    expected = model(SPEC).model(torch.tensor([PROMPTS[-1]])).last_hidden_state[0].numpy()
    with LLM(make(SPEC), **ENGINE) as llm:
        states = llm.hidden_states(PROMPTS[-1], layers=[len(SPEC.ratios)])
        assert abs(states[0] - expected).max() <= 2e-4 * abs(expected).max()
        with raises(ValueError, "hidden_layers[0] is 1", "4 residual streams; allowed: 4"):
            llm.hidden_states(PROMPTS[-1], layers=[1])


def test_dummy_weights_and_the_bench(tmp_path: Path) -> None:
    path = make(SPEC)
    dummy = {"load_format": "dummy"}
    assert outputs(path, mtp(3), **dummy) == outputs(path, None, **dummy)
    argv = ["bench", "latency", "--config", str(path), "--device", "cpu", "--quiet"]
    argv += ["--concurrency", "2", "--input-len", "20", "--output-len", "8", "--rounds", "1"]
    argv += ["--json", str(tmp_path / "rows.json"), "--num-layers", "2"]
    assert main([*argv, "--speculative-config", json.dumps(mtp(3))]) == 0
    rows = read_json(tmp_path / "rows.json")["rows"]
    assert [row["configuration"] for row in rows] == ["plain", "k=3"]


def test_cached_prefixes_change_no_token() -> None:
    prefix = [(7 * j) % 128 for j in range(120)]
    prompts = [prefix + [i] * (i + 1) for i in range(6)]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    found = []
    for config in (None, mtp(5)):
        with LLM(make(SPEC), speculative_config=config, block_size=4, **ENGINE) as llm:
            for _ in range(2):
                found.append(
                    [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
                )
            assert llm.stats()["prefix_cache"]["num_hit_tokens"] > 500
    assert found[1:] == found[:1] * 3
