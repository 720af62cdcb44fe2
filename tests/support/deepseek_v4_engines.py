# SPDX-License-Identifier: Apache-2.0
"""Engines for tiny DeepSeek-V4 models on the CPU, and checks that each drafter in their own files
must pass: the MTP layer and the block drafter.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepseek_v4_models import V4Spec, make
from paceline import LLM, SamplingParams
from paceline.cli import main
from tiny_models import load_tensors, read_json

SPEC = V4Spec(seed=5)
OTHER = replace(SPEC, seed=6)
SCALED = replace(SPEC, has_scales=True, dtype="bfloat16")
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "kv_cache_bytes": 8 << 20,
    "show_progress": False,
}  # fmt: skip
# Changes of ENGINE that change no token.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"prefill_chunk_size": 1},
    {"prefill_chunk_size": 3, "max_num_seqs": 1},
    {"prefill_chunk_size": 7, "block_size": 5},
    {"block_size": 1, "num_threads": 1},
)
# Lengths on both sides of the windows (8 tokens) and of entries of 4 and 8 tokens.
PROMPTS = [[(7 * i + j) % 128 for j in range(length)] for i, length in enumerate((1, 3, 8, 15, 40))]


def sampling(
    temperature: float = 1.0, seed: int = 7, max_tokens: int = 40, n: int = 1
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, n=n, ignore_eos=True
    )


def drafting(method: str, k: int | None, nested: dict[str, Any]) -> dict[str, Any]:
    """A speculative_config with a fixed k, so that all of the drafter runs; `nested` is its `x`."""
    return {"method": method, "num_speculative_tokens": k, "x": {"adaptive": False} | nested}


def generate(
    llm: LLM, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    """The tokens of every sample, those of a prompt one after the other."""
    found = llm.generate(list(prompts), params)
    return [sample.token_ids for output in found for sample in output.outputs]


def outputs(
    source: Any, config: dict[str, Any] | None, temperature: float = 1.0, **engine: Any
) -> list[list[int]]:
    with LLM(source, speculative_config=config, **ENGINE | engine) as llm:
        tokens = generate(llm, sampling(temperature))
        assert llm._executor.check_integrity() == ""
    return tokens


@functools.cache
def plain(spec: V4Spec, temperature: float = 1.0) -> list[list[int]]:
    """The outputs without a drafter."""
    return outputs(make(spec), None, temperature)


# ---- checks ------------------------------------------------------------------------------------


def check_preempted_sequences_keep_their_tokens(
    path: Path, config: dict[str, Any], kv_cache_bytes: int
) -> None:
    """`path` has the target SPEC; its KV cache is too small for eight sequences."""
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    params = sampling(max_tokens=60)
    engine = ENGINE | {"max_num_seqs": 8, "max_model_len": 96}
    with LLM(make(SPEC), **engine) as llm:
        expected = generate(llm, params, prompts)
    engine |= {"kv_cache_bytes": kv_cache_bytes, "block_size": 4}
    with LLM(path, speculative_config=config, **engine) as llm:
        assert generate(llm, params, prompts) == expected
        assert llm.stats()["num_preemptions"] > 3
        assert llm._executor.check_integrity() == ""


def check_cached_prefixes_change_no_token(path: Path, config: dict[str, Any]) -> None:
    """`path` has the target SPEC; each prompt has two samples."""
    prefix = [(7 * j) % 128 for j in range(120)]
    prompts = [prefix + [i] * (i + 1) for i in range(6)]
    params = sampling(max_tokens=30, n=2)
    found = []
    for source, drafter in ((make(SPEC), None), (path, config)):
        with LLM(source, speculative_config=drafter, block_size=4, **ENGINE) as llm:
            found += [generate(llm, params, prompts) for _ in range(2)]
            assert llm.stats()["prefix_cache"]["num_hit_tokens"] > 500
    assert found[1:] == found[:1] * 3


def check_ranks_change_nothing(path: Path, config: dict[str, Any]) -> None:
    """Ranks that share the drafter, or each compute all of it, draft what one rank drafts."""
    found = []
    for ranks, draft_ranks in ((1, None), (2, 1), (2, 2)):
        shared = config | {"draft_tensor_parallel_size": draft_ranks}
        engine = ENGINE | {"tensor_parallel_size": ranks}
        with LLM(path, speculative_config=shared, **engine) as llm:
            found.append((generate(llm, sampling()), llm.stats()["speculative_decoding"]))
            assert llm._executor.check_integrity() == ""
    assert found[1:] == found[:1] * 2


def check_tensors_in_memory(path: Path, other: Path, config: dict[str, Any]) -> None:
    """`path` has the target SPEC, `other` has OTHER."""
    tensors, target = load_tensors(path), read_json(path / "config.json")
    with LLM.from_state_dict(target, tensors, speculative_config=config, **ENGINE) as llm:
        assert generate(llm, sampling()) == plain(SPEC)
        tensors = load_tensors(other)
        llm.update_weights(tensors, draft_state_dict=tensors)
        assert generate(llm, sampling()) == plain(OTHER)


def check_bench(path: Path, config: dict[str, Any], num_layers: int, tmp_path: Path) -> None:
    """`config` has three drafts; of the target, the bench has only its first layers."""
    argv = ["bench", "latency", "--config", str(path), "--device", "cpu", "--quiet"]
    argv += ["--concurrency", "2", "--input-len", "20", "--output-len", "8", "--rounds", "1"]
    argv += ["--json", str(tmp_path / "rows.json"), "--num-layers", str(num_layers)]
    assert main([*argv, "--speculative-config", json.dumps(config)]) == 0
    rows = read_json(tmp_path / "rows.json")["rows"]
    assert [row["configuration"] for row in rows] == ["plain", "k=3"]
