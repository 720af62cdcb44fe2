# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 with its MTP layer: the output of plain decoding, conversion, tensors in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from errors import raises
from paceline import LLM
from paceline.loader.convert import convert


def mtp(k: int, **nested: Any) -> dict[str, Any]:
    return drafting("mtp", k, nested)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_drafts_change_no_token(k: int, temperature: float) -> None:
    assert outputs(make(SPEC), mtp(k), temperature) == plain(SPEC, temperature)


@pytest.mark.parametrize("spec", [SPEC, SCALED], ids=["plain", "scales"])
@pytest.mark.parametrize("engine", SETTINGS, ids=str)
def test_nothing_else_changes_a_token(engine: dict[str, Any], spec: V4Spec) -> None:
    assert outputs(make(spec), mtp(5), **engine) == plain(spec)


@pytest.mark.parametrize("driver", ["replay", "while", "eager"])
def test_drivers_change_no_token(driver: str) -> None:
    assert outputs(make(SPEC), mtp(4, draft_driver=driver)) == plain(SPEC)


def test_prompt_lookup_changes_no_token() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
    assert outputs(make(SPEC), config | {"prompt_lookup_max": 3}, 0.0) == plain(SPEC, 0.0)


def test_a_model_agrees_with_itself() -> None:
    # With a fixed k: an iteration may otherwise choose no drafts.
    config = {"model": str(make(SPEC)), "num_speculative_tokens": 7, "x": {"adaptive": False}}
    with LLM(make(SPEC), speculative_config=config, **ENGINE) as llm:
        found = llm.generate(PROMPTS, sampling())
    assert [output.outputs[0].token_ids for output in found] == plain(SPEC)
    for output in found:
        counters = output.metrics.speculative_decoding
        assert counters is not None
        assert counters["num_accepted_draft_tokens"] == counters["num_draft_tokens"] > 0


def test_ranks_change_nothing() -> None:
    check_ranks_change_nothing(make(SPEC), mtp(5))


def test_preempted_sequences_keep_their_tokens() -> None:
    check_preempted_sequences_keep_their_tokens(make(SPEC), mtp(5), 280 << 10)


def test_samples_share_the_prompt() -> None:
    found = []
    for config in (None, mtp(4)):
        with LLM(make(SPEC), speculative_config=config, **ENGINE) as llm:
            found.append(generate(llm, sampling(max_tokens=20, n=3)))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_thousand_iterations_of_more_than_two_drafts() -> None:
    """Where the metadata of draft steps once was that of the step before, vLLM crashed here."""
    spec = replace(SPEC, ratios=(4, 128))
    params = sampling(seed=3, max_tokens=1100)
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
    check_tensors_in_memory(make(SPEC), make(OTHER), mtp(3))


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
    check_bench(path, mtp(3), 2, tmp_path)


def test_cached_prefixes_and_samples_change_no_token() -> None:
    check_cached_prefixes_change_no_token(make(SPEC), mtp(5))
