# SPDX-License-Identifier: Apache-2.0
"""`tensor_parallel_size`: any number of ranks has the output of one, from every front door."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mtp_models
import qwen3_5_mtp
from cuda_engines import check_all_accepted
from drafter_checks import PROMPTS
from errors import refuses
from paceline import LLM, AsyncLLM, EngineConfig, SamplingParams
from paceline.demo import find_demo
from paceline.device import chosen_gpus
from paceline.loader import load_checkpoint
from tiny_configs import DEEPSEEK, QWEN3_5
from tiny_models import TinySpec, load_tensors, make

FAMILIES = ("llama", "qwen3", "gemma3", "gemma4", "qwen3_moe", "glm4_moe_lite", "qwen3_5")
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "kv_cache_bytes": 8 << 20,
    "show_progress": False,
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, prompt_logprobs=2),
]


def generated(llm: LLM) -> list[Any]:
    """All that outputs have of each prompt, greedy and sampled."""
    found = []
    for params in PARAMS:
        for output in llm.generate(PROMPTS, params):
            (sample,) = output.outputs
            found.append((sample.token_ids, sample.logprobs, output.prompt_logprobs))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_one_rank(family: str) -> None:
    target = make(TinySpec(family, seed=3))
    draft = make(TinySpec("llama", seed=4, hidden_size=32, heads=2, kv_heads=1))
    config = {"model": str(draft), "num_speculative_tokens": 3}
    expected = None
    for ranks in (1, 2, 4):
        for speculative in (None, config):
            with LLM(
                target, speculative_config=speculative, tensor_parallel_size=ranks, **ENGINE
            ) as llm:
                found = generated(llm)
            expected = found if expected is None else expected
            assert found == expected, (ranks, speculative)


def test_ranks_share_a_drafter_as_asked() -> None:
    target = make(TinySpec("llama", seed=3))
    draft = make(TinySpec("llama", seed=4, hidden_size=32, heads=2, kv_heads=1))

    def llm(ranks: int, draft_ranks: int | None) -> LLM:
        config = {
            "model": str(draft),
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": draft_ranks,
            "x": {"adaptive": False},
        }
        return LLM(target, speculative_config=config, tensor_parallel_size=ranks, **ENGINE)

    expected = None
    for ranks, draft_ranks in ((1, None), (1, 1), (2, None), (2, 1), (2, 2)):
        with llm(ranks, draft_ranks) as engine:
            found = generated(engine), engine.stats()["speculative_decoding"]
        expected = found if expected is None else expected
        assert found == expected, (ranks, draft_ranks)
    parts = ("2 query heads and 1 KV heads", "allowed with tensor_parallel_size 4: 1")
    named = "draft_tensor_parallel_size is 4"
    refuses(lambda: llm(4, 4), named, *parts, kind=NotImplementedError)
    refuses(lambda: llm(4, 2), "draft_tensor_parallel_size is 2", "allowed: 1")


def test_a_model_drafts_for_itself() -> None:
    target = load_checkpoint(make(TinySpec("llama", seed=3)), progress=False)
    options = {name: value for name, value in ENGINE.items() if name != "device"}
    with LLM.from_loaded(target, **options) as llm:
        expected = generated(llm)
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=20)
    for ranks, draft_ranks in ((1, None), (2, None), (2, 1), (2, 2), (4, 4)):
        config = {
            "model": "itself",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": draft_ranks,
            "x": {"adaptive": False},
        }
        with LLM.from_loaded(
            target, target, speculative_config=config, tensor_parallel_size=ranks, **options
        ) as llm:
            check_all_accepted(llm.generate(PROMPTS, params))
            assert generated(llm) == expected, (ranks, draft_ranks)


def test_structured_outputs_are_those_of_one_rank() -> None:
    demo = find_demo("draft_model")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammars: list[dict[str, Any]] = [{"json": schema}, {"regex": r"[a-f]{3}-\d{2,4}"}]
    params = [
        SamplingParams(temperature=heat, seed=5, max_tokens=40, structured_outputs=grammar)
        for heat in (0.0, 0.9)
        for grammar in grammars
    ]
    expected = None
    for ranks in (1, 2):
        for speculative in (None, demo.speculative_config(5)):
            with LLM(
                str(demo.target),
                speculative_config=speculative,
                tensor_parallel_size=ranks,
                **{**ENGINE, "max_model_len": 256},
            ) as llm:
                outputs = llm.generate(["x = "] * len(params), params)
            found = [(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]
            assert re.fullmatch(r"[a-f]{3}-\d{2,4}", found[1][1])
            expected = found if expected is None else expected
            assert found == expected, (ranks, speculative)


@pytest.mark.parametrize("family", [*DEEPSEEK, *QWEN3_5])
def test_ranks_share_an_mtp_layer(family: str, tmp_path: Path) -> None:
    write = mtp_models.write if family in DEEPSEEK else qwen3_5_mtp.write
    path = write(TinySpec(family, seed=5), tmp_path / "model")
    found = []
    for ranks, draft_ranks in ((1, None), (2, 1), (2, 2)):
        config = {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": draft_ranks,
            "x": {"adaptive": False},
        }
        with LLM(path, speculative_config=config, tensor_parallel_size=ranks, **ENGINE) as llm:
            found.append((generated(llm), llm.stats()["speculative_decoding"]))
    assert found[1:] == found[:1] * 2


def test_logits_and_hidden_states_are_those_of_one_rank() -> None:
    target = make(TinySpec("gemma3", seed=3))
    values = []
    for ranks in (1, 2):
        with LLM(target, tensor_parallel_size=ranks, **ENGINE) as llm:
            prompt = list(range(3, 60))
            hidden = llm.hidden_states(prompt, layers=[0, 2])
            values.append((np.asarray(llm.logits(prompt)), np.asarray(hidden)))
    for one, two in zip(*values, strict=True):
        assert one.size > 0 and np.array_equal(one, two)


def test_async_engine_and_weight_updates() -> None:
    target, other = (make(TinySpec("qwen3", seed=seed)) for seed in (3, 5))
    with LLM(other, **ENGINE) as llm:
        expected = generated(llm)
    with LLM(target, tensor_parallel_size=2, **ENGINE) as llm:
        assert generated(llm) != expected
        # The ranks read the weights where they lie.
        llm.update_weights(load_tensors(other))
        assert generated(llm) == expected

    async def first() -> list[int]:
        async with AsyncLLM(other, tensor_parallel_size=4, **ENGINE) as llm:
            async for output in llm.generate(PROMPTS[0], PARAMS[0]):
                tokens = output.outputs[0].token_ids
            return list(tokens)

    assert asyncio.run(first()) == expected[0][0]


def test_drafters_change_on_every_rank() -> None:
    target = make(TinySpec("qwen3", seed=3))
    draft, other = (
        make(TinySpec("llama", seed=seed, hidden_size=32, heads=2, kv_heads=1)) for seed in (4, 6)
    )
    config = {"model": str(draft), "num_speculative_tokens": 3}
    itself = {"model": str(target), "num_speculative_tokens": 2}
    with LLM(target, **ENGINE) as llm:
        expected = generated(llm)
    for ranks in (2, 4):
        with LLM(target, tensor_parallel_size=ranks, **ENGINE) as llm:
            for speculative in (config, itself, None, config):
                llm.set_drafter(speculative, show_progress=False)
                assert generated(llm) == expected
            llm.update_drafter(load_tensors(other))
            assert generated(llm) == expected
            report = llm.memory_report()["ranks"]
            assert len(report) == ranks and all(one["draft_weight_bytes"] > 0 for one in report)


def num_tasks() -> int:
    """The threads of this process, those of C++ among them."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_ranks_divide_threads_and_leave_none() -> None:
    before = threading.active_count(), num_tasks()
    target = make(TinySpec("llama", seed=3))
    for ranks, threads in ((1, 4), (2, 4), (4, 4), (4, 1)):
        with LLM(target, tensor_parallel_size=ranks, num_threads=threads, **ENGINE) as llm:
            report = llm.memory_report()
            assert report["groups"][0]["num_kv_heads"] == max(2 // ranks, 1)
            assert report["kv_pool_bytes"] % ranks == 0
            llm.generate(PROMPTS[:1], PARAMS[0])
    # Threads of earlier tests may have ended since.
    assert threading.active_count() <= before[0]
    assert num_tasks() <= before[1]


def test_refusals_name_the_numbers_that_work() -> None:
    target = make(TinySpec("llama", seed=3))
    for ranks in (3, 8):
        with pytest.raises(NotImplementedError) as error:
            LLM(target, tensor_parallel_size=ranks, **ENGINE)
        assert f"tensor_parallel_size is {ranks}, but layer 0 has 4 query heads" in str(error.value)
        assert "allowed for this model: 1, 2, 4" in str(error.value)
    for wrong in (0, 9, 2.0, "2", True):
        value: Any = wrong
        call = functools.partial(EngineConfig, tensor_parallel_size=value)
        refuses(call, "tensor_parallel_size is ")


def test_devices_are_one_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline._core.cuda_status", lambda: {"num_gpus": 4})
    assert chosen_gpus("cuda", 1, None) == ()
    assert chosen_gpus("cuda", 2, None) == (0, 1)
    assert chosen_gpus("cuda", 2, [3, 1]) == (3, 1)
    assert chosen_gpus("cuda", 1, [2]) == (2,)
    assert chosen_gpus("cpu", 2, None) == ()
    refuses(lambda: chosen_gpus("cpu", 2, [0, 1]), "devices is [0, 1]", "only with device 'cuda'")
    refuses(lambda: chosen_gpus("cuda", 2, [0]), "devices is [0]", "tensor_parallel_size is 2")
    with pytest.raises(NotImplementedError, match=r"is 8, on the GPUs .*, but the process sees 4"):
        chosen_gpus("cuda", 8, None)
    wrong: list[Any] = [[], [0, 0], [-1], [16], [0.5], "0,1", 1]
    for devices in wrong:
        refuses(functools.partial(EngineConfig, devices=devices), "devices")


def test_weights_go_to_different_gpus() -> None:
    target = make(TinySpec("llama", seed=3))
    refuses(
        lambda: load_checkpoint(target, device="cuda", gpus=[1, 1], progress=False),
        "gpus has 1 twice",
    )
    refuses(
        lambda: load_checkpoint(target, device="cpu", gpus=[0], progress=False),
        "gpus is given and device is 'cpu'",
    )
    assert load_checkpoint(target, progress=False).model.gpus == ()


def test_command_line() -> None:
    target = make(TinySpec("llama", seed=3))
    outputs = []
    for flags in ([], ["--tensor-parallel-size", "2"], ["-tp", "4"]):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "paceline", "generate", "--model", str(target)),
                *("--device", "cpu", "--max-tokens", "8", "--temperature", "0", "--json"),
                *flags,
                "hello",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(json.loads(done.stdout.splitlines()[0]))
    assert [output["configured"]["tensor_parallel_size"] for output in outputs] == [1, 2, 4]
    assert all(output["token_ids"] == outputs[0]["token_ids"] for output in outputs)
