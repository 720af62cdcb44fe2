# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS on a GPU: mixtures of experts in bfloat16 and mxfp4, sinks, alternating windows.

Skipped where there is no usable GPU; failed there when PACELINE_REQUIRE_GPU=1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from cuda_engines import (
    DRIVERS,
    Logits,
    bfloat16_transformers,
    check_a_drafter_agrees_with_itself,
    check_all_accepted,
    check_bfloat16_logits,
    check_float32_logits,
    check_logits_do_not_depend_on_chunks,
    generate,
    gpu,
    logits_of,
    open_llm,
    plain_tokens,
    scoring_prompt,
    spec,
)
from paceline import LLM, SamplingParams
from paceline.bench import models as bench_models
from paceline.loader import load_dummy

__all__ = ["bfloat16_transformers", "gpu"]  # fixtures
FORMATS = (None, "mxfp4")


def mixture(quantization: str | None = None, **changes: Any) -> Path:
    """A tiny GPT-OSS: two layers, the best 4 of 8 experts, groups of eight heads."""
    shape = replace(
        spec("gpt_oss"), heads=8, kv_heads=1, num_layers=4, quantization=quantization, **changes
    )
    return tiny_models.make(shape)


# ---- generating --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_speculation_changes_no_token(driver: str, k: int, temperature: float) -> None:
    """The drafter is a mixture too: the target before its experts were quantised."""
    target, draft = mixture("mxfp4"), mixture()
    with open_llm(target, draft, k, x={"draft_driver": driver}) as llm:
        assert generate(llm, temperature) == plain_tokens(target, temperature)
        stats = llm._executor.stats()
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 13},
        {"prefill_chunk_size": 16},
        {"block_size": 32},
        {"kv_cache_bytes": 3 << 20},
    ],
    ids=str,
)
def test_nothing_else_changes_a_token(quantization: str | None, changes: dict[str, Any]) -> None:
    """A dense drafter."""
    target, draft = mixture(quantization), tiny_models.make(spec("qwen3"))
    with open_llm(target, draft, **changes) as llm:
        assert generate(llm, 0.8) == plain_tokens(target, 0.8)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_drafter_agrees_with_itself(
    quantization: str | None, driver: str, temperature: float
) -> None:
    check_a_drafter_agrees_with_itself(mixture(quantization), driver, temperature)


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_a_drafter_of_the_shape_of_20b_agrees_with_itself(
    num_sequences: int, tmp_path: Path
) -> None:
    """Dummy weights in mxfp4, cut to four layers and a small vocabulary."""
    config = json.loads(
        (Path(bench_models.__file__).parent / "configs/gpt-oss-20b.json").read_text()
    )
    config |= {
        "num_hidden_layers": 4, "layer_types": config["layer_types"][:4], "vocab_size": 4096,
        "eos_token_id": 4095,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_dummy(tmp_path, device="cuda")
    rng = np.random.default_rng(num_sequences)
    prompts = [rng.integers(0, 4095, 200).tolist() for _ in range(num_sequences)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    engine: dict[str, Any] = {
        "max_num_seqs": 16, "max_model_len": 512, "kv_cache_bytes": 256 << 20,
        "show_progress": False,
    }  # fmt: skip
    with LLM.from_loaded(model, **engine) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    config = {"model": "itself", "num_speculative_tokens": 3, "x": {"adaptive": False}}
    with LLM.from_loaded(model, model, speculative_config=config, **engine) as llm:
        outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    check_all_accepted(outputs)


def test_all_rows_may_choose_the_same_experts(tmp_path: Path) -> None:
    """A chunk of 2,048 rows goes to four experts of each layer."""
    path = tiny_models.copy_checkpoint(mixture(max_position=4096), tmp_path / "one-sided")

    def choose(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("router.bias"):
                tensor[[1, 3, 4, 7]] += 100.0

    tiny_models.edit_tensors(path, choose)
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 256, 2050).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=30)
    tokens = []
    for chunk in (2048, 100):
        limits = {"max_model_len": 2100, "max_num_batched_tokens": 2200}
        with open_llm(path, path, prefill_chunk_size=chunk, **limits) as llm:
            tokens.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
            stats = llm._executor.stats()
        assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 0
    assert tokens[0] == tokens[1]


# ---- logits ------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("quantization", FORMATS)
def test_float32_logits_equal_transformers(quantization: str | None) -> None:
    path = mixture(quantization, dtype="float32")
    prompt = scoring_prompt(1)
    # Float32 itself is off by more here than the tolerance of other models: transformers' logits by
    # 1.5e-4 to 2.6e-4 of the largest one, as the machine sums.
    exact = tiny_models.reference_logits(path, prompt, dtype="float64")
    theirs = tiny_models.reference_logits(path, prompt)
    check_float32_logits(path, prompt, exact, least_tolerance=1.25 * np.abs(theirs - exact).max())


@pytest.mark.golden
@pytest.mark.parametrize("quantization", FORMATS)
def test_bfloat16_logits_are_as_good_as_those_of_transformers(
    quantization: str | None, bfloat16_transformers: Any
) -> None:
    """Both are compared with float32 arithmetic on the same weights, over several checkpoints."""

    def case(seed: int) -> tuple[Logits, Logits, Logits]:
        path = mixture(quantization, seed=seed)
        plain = path if quantization is None else tiny_models.plain_copy(path, "bfloat16")
        prompt = scoring_prompt(seed)
        exact = tiny_models.reference_logits(path, prompt)
        return logits_of(path, prompt), bfloat16_transformers(plain, prompt), exact

    check_bfloat16_logits(f"gpt_oss {quantization}", map(case, range(3, 7)))


def test_mxfp4_has_the_bits_of_the_values_in_bfloat16() -> None:
    path = mixture("mxfp4")
    prompt = scoring_prompt(2)
    plain = logits_of(tiny_models.plain_copy(path, "bfloat16"), prompt)
    np.testing.assert_array_equal(logits_of(path, prompt), plain)


@pytest.mark.parametrize("quantization", FORMATS)
def test_logits_do_not_depend_on_chunks(quantization: str | None) -> None:
    check_logits_do_not_depend_on_chunks(mixture(quantization), scoring_prompt(2))
