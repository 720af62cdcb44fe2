# SPDX-License-Identifier: Apache-2.0
"""Arguments that people know from vLLM: refused where they would have no effect or another one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import LLM, EngineConfig, SamplingParams, StructuredOutputsParams
from paceline.loader import load_checkpoint
from paceline.startup import executor_options
from paceline.vllm_arguments import ADVICE


def refuses(call: Callable[[], Any], *parts: object, kind: type[Exception] = ValueError) -> None:
    with raises(kind, *parts):
        call()


def test_arguments_of_other_engines(target_dir: Path) -> None:
    allowed = "allowed: 1, because a model runs on one GPU"
    refuses(
        lambda: LLM(target_dir, tensor_parallel_size=2),
        "tensor_parallel_size is 2",
        allowed,
        kind=NotImplementedError,
    )
    refuses(lambda: LLM(target_dir, tensor_parallel_size=0), "tensor_parallel_size is 0")


@pytest.mark.parametrize("value", [0, -0.1, 1.01, 90, float("nan"), "0.9", True, b"1", 10**400])
def test_gpu_memory_utilization(target_dir: Path, value: Any) -> None:
    part = "allowed: a number above 0, at most 1, or None"
    refuses(
        lambda: LLM(target_dir, gpu_memory_utilization=value), "gpu_memory_utilization is ", part
    )


def test_gpu_memory_utilization_where_it_has_no_meaning(target_dir: Path) -> None:
    refuses(
        lambda: LLM(target_dir, gpu_memory_utilization=0.9, kv_cache_bytes=1 << 20),
        "gpu_memory_utilization is 0.9 and kv_cache_bytes is 1048576; allowed: one of them",
    )
    part = "is 0.5, but device is 'cpu'; allowed: only with 'cuda'; kv_cache_bytes sets"
    refuses(lambda: LLM(target_dir, gpu_memory_utilization=0.5), part)
    loaded = load_checkpoint(target_dir)
    refuses(lambda: LLM.from_loaded(loaded, gpu_memory_utilization=0.5), part)
    config = EngineConfig(gpu_memory_utilization=0.5)  # test_cuda.py has what the engine does
    assert executor_options(config, None)["gpu_memory_utilization"] == 0.5


def test_each_unknown_argument_of_vllm_gets_advice(llm: LLM, target_dir: Path) -> None:
    calls: dict[str, Callable[..., object]] = {
        "LLM": lambda **given: LLM(target_dir, **given),
        "LLM.chat": lambda **given: llm.chat([{"role": "user", "content": "a"}], **given),
        "LLM.generate": lambda **given: llm.generate("a", **given),
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
    }
    functions: dict[str, Callable[..., object]] = {
        "LLM": LLM,
        "LLM.chat": LLM.chat,
        "LLM.generate": LLM.generate,
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
    }
    assert ADVICE.keys() == {*calls, "speculative_config"}
    for owner, given, meant in (
        ("LLM", "max_num_seq", "max_num_seqs"),
        ("SamplingParams", "temprature", "temperature"),
    ):
        call = functools.partial(calls[owner], **{given: 1})
        refuses(call, f"has no parameter {given!r}", f"did you mean {meant}?", kind=TypeError)
    for owner in calls:
        known = ", ".join(list(inspect.signature(functions[owner]).parameters)[-3:-1])
        for given, advice in ADVICE[owner].items():
            part = f"{owner} has no parameter {given!r} in this version; it has: "
            call = functools.partial(calls[owner], **{given: False})
            refuses(call, part, f"{known}; {advice.replace('`', '')}", kind=TypeError)
    for given, advice in ADVICE["speculative_config"].items():
        part = f"speculative_config: key {given!r} is not supported yet; this version has: "
        refuses(
            functools.partial(LLM, target_dir, speculative_config={"method": "ngram", given: 1}),
            part,
            f"'x'; {advice.replace('`', '')}",
            kind=NotImplementedError,
        )
    loaded = load_checkpoint(target_dir)
    part = "EngineConfig has no parameter 'enforce_eager' in this version; it has: device, "
    refuses(
        lambda: LLM.from_loaded(loaded, enforce_eager=True),  # type: ignore[call-arg]
        part,
        "leave it out, or use speculative_config=",
        kind=TypeError,
    )
    for name in ("half", "float16"):
        kind = NotImplementedError
        refuses(
            lambda name=name: LLM(target_dir, dtype=name),  # type: ignore[misc]
            f"dtype '{name}' is not supported yet",
            "'auto', 'float32', 'bfloat16'",
            "float16 is loaded as float32",
            kind=kind,
        )
