# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM: accepted where they change nothing, otherwise refused in one error."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from paceline import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutputsParams
from paceline.checks import shorten
from paceline.loader import load_checkpoint
from paceline.sampling_params import RequestOutputKind
from paceline.startup import executor_options
from paceline.vllm_arguments import ADVICE


def refuses(call: Callable[[], Any], *parts: object, kind: type[Exception] = ValueError) -> None:
    with raises(kind, *parts):
        call()


def test_arguments_of_other_engines(target_dir: Path) -> None:
    refuses(
        lambda: LLM(target_dir, tensor_parallel_size=3),
        "tensor_parallel_size is 3",
        "allowed for this model: 1, 2, 4",
        kind=NotImplementedError,
    )
    for number in (0, 9):
        refuses(
            functools.partial(LLM, target_dir, tensor_parallel_size=number),
            f"tensor_parallel_size is {number}; allowed: an integer from 1 to 8",
        )


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
    loaded = load_checkpoint(target_dir)
    with (
        LLM.from_loaded(loaded) as without,
        LLM.from_loaded(loaded, gpu_memory_utilization=0.5) as with_it,
    ):
        pools = [llm.memory_report()["kv_cache_rule"] for llm in (without, with_it)]
        assert pools[0] == pools[1]
    config = EngineConfig(gpu_memory_utilization=0.5)  # test_cuda.py has what the engine does
    assert executor_options(config, None)["gpu_memory_utilization"] == 0.5


class Another:
    """A value that no argument has."""

    def __repr__(self) -> str:
        return "another"


ANOTHER = Another()


def test_each_argument_of_vllm_that_would_change_something_gets_advice(
    llm: LLM, target_dir: Path
) -> None:
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
            if advice.harmless == "all":
                continue
            part = f"{owner} has no parameter {given!r} in this version; it has: "
            call = functools.partial(calls[owner], **{given: ANOTHER})
            end = f"{known}; {advice.text.replace('`', '')}"
            refuses(call, part, end, kind=TypeError)
    for given, advice in ADVICE["speculative_config"].items():
        if advice.harmless == "all":
            continue
        part = f"speculative_config: key {given!r} is not supported yet; this version has: "
        config = {"method": "ngram", given: ANOTHER}
        refuses(
            functools.partial(LLM, target_dir, speculative_config=config),
            part,
            f"'x'; {advice.text.replace('`', '')}",
            kind=NotImplementedError,
        )


def harmless_values(owner: str) -> dict[str, list[Any]]:
    """The values of vLLM's arguments that change nothing; for "all" some."""
    return {
        name: [ANOTHER, True, False, None] if advice.harmless == "all" else list(advice.harmless)
        for name, advice in ADVICE[owner].items()
    }


def test_arguments_that_change_nothing_are_accepted_with_one_note(
    target_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each value of each of them; and the output is that without them."""
    values = harmless_values("LLM")
    drafts = harmless_values("speculative_config")
    greedy = SamplingParams(temperature=0, max_tokens=6)
    lookup: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2}
    with LLM(target_dir, speculative_config=lookup) as plain:
        (expected,) = plain.generate("abcabc", greedy)
    num_calls = max(map(len, [*values.values(), *drafts.values()]))
    for i in range(num_calls):
        given = {name: listed[i % len(listed)] for name, listed in values.items() if listed}
        keys = {name: listed[i % len(listed)] for name, listed in drafts.items() if listed}
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "paceline"),
            LLM(
                target_dir,
                speculative_config=lookup | keys,
                gpu_memory_utilization=0.9,
                device="cpu",
                **given,
            ) as llm,
        ):
            (output,) = llm.generate("abcabc", greedy)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        (note,) = [text for text in caplog.messages if "change nothing" in text]
        listed = [f"{name}={shorten(value)}" for name, value in given.items()]
        listed += [f"speculative_config[{key!r}]={shorten(keys[key])}" for key in keys]
        listed.append("gpu_memory_utilization=0.9")
        assert note == f"arguments that change nothing (docs/from-vllm.md): {', '.join(listed)}"


def test_arguments_of_calls_that_change_nothing_are_accepted(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=3)
    chat: Any = [{"role": "user", "content": "a"}]
    template = "{{ messages[0].content }}"
    for owner, call in (
        ("LLM.generate", functools.partial(llm.generate, "a", greedy)),
        ("LLM.chat", functools.partial(llm.chat, chat, greedy, chat_template=template)),
        ("SamplingParams", SamplingParams),
        ("StructuredOutputsParams", functools.partial(StructuredOutputsParams, regex="a")),
    ):
        for name, values in harmless_values(owner).items():
            for value in values:
                assert repr(call(**{name: value})) and call() is not None  # type: ignore[operator]
    assert SamplingParams(**{"output_kind": RequestOutputKind.CUMULATIVE}) == SamplingParams()  # type: ignore[arg-type]


def test_arguments_that_would_change_something_are_refused_together(target_dir: Path) -> None:
    for kind, name in ((LLM, "LLM"), (AsyncLLM, "AsyncLLM")):
        call: Callable[..., object] = functools.partial(
            kind,
            target_dir,
            quantization="awq",
            trust_remote_code=True,
            kv_cache_dtype="fp8",
            max_num_seq=3,
            dtype="half",
        )
        refuses(
            call,
            f"{name} does not take these arguments in this version:\n  quantization='awq': leave ",
            "\n  kv_cache_dtype='fp8': leave it out: the KV has the dtype",
            "\n  max_num_seq=3: did you mean max_num_seqs?",
            "\n  dtype='half': 'auto' loads a checkpoint in float16 as float32",
            "\nit has: model, ",
            kind=TypeError,
        )
        call = functools.partial(kind, target_dir, quantization="awq", dtype="half")
        refuses(call, "quantization='awq': ", "dtype='half': ", kind=TypeError)
    beams: Any = {"best_of": 2, "use_beam_search": True}
    refuses(
        lambda: SamplingParams(**beams),
        "best_of=2: n gives the number",
        "use_beam_search=True: leave it out: there is no beam search",
        kind=TypeError,
    )


def test_arguments_of_loaded_models_are_those_of_the_engine(target_dir: Path) -> None:
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
