# SPDX-License-Identifier: Apache-2.0
"""What editors and type checkers see of the public API: names, defaults and types."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Never

import pytest

from paceline import (
    LLM,
    AsyncLLM,
    EngineConfig,
    RequestStream,
    SamplingParams,
    Tokenizer,
)
from paceline.engine_options import EngineArguments


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword parameters of a function with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_sampling_params_show_names_defaults_and_types() -> None:
    signature = inspect.signature(SamplingParams, eval_str=True)
    *named, unknown = signature.parameters.values()
    assert [p.name for p in named] == list(SamplingParams.__dataclass_fields__)
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in named)
    assert (unknown.kind, unknown.annotation) == (unknown.VAR_KEYWORD, Never)
    assert signature.parameters["temperature"].annotation is float
    assert defaults(SamplingParams)["max_tokens"] == 16
    # A default means the same as leaving the parameter out.
    assert SamplingParams(**defaults(SamplingParams)) == SamplingParams()


def test_llm_shows_names_defaults_and_types() -> None:
    shown = defaults(LLM)
    config = EngineConfig()
    for name, kind in typing.get_type_hints(EngineConfig).items():
        assert shown[name] == getattr(config, name)
        assert typing.get_type_hints(LLM.__init__)[name] == kind
        assert typing.get_type_hints(EngineArguments)[name] == kind
    assert set(EngineArguments.__annotations__) == set(EngineConfig.__dataclass_fields__)
    assert shown["tensor_parallel_size"] == 1 and shown["speculative_config"] is None
    expected = ["prompts", "sampling_params", "use_tqdm", "prompt_token_ids"]
    assert list(defaults(LLM.generate)) == expected


def test_async_llm_shows_names_and_defaults() -> None:
    assert list(defaults(AsyncLLM.generate)) == ["sampling_params", "request_id"]
    with pytest.raises(
        TypeError, match=r"AsyncLLM has no parameter 'quantization'.*; leave it out"
    ):
        AsyncLLM("none", quantization="awq")  # type: ignore[arg-type]
    for call in (AsyncLLM.generate, AsyncLLM.chat):
        with pytest.raises(TypeError, match=r"has no parameter 'lora_request'.*; leave it out"):
            call(None, "a", lora_request="b")  # type: ignore[arg-type, call-overload]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, SamplingParams, RequestStream, Tokenizer])
def test_every_parameter_has_a_name_and_a_type(kind: type[Any]) -> None:
    functions = {kind.__name__: kind}
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and inspect.isroutine(member):
            functions[name] = member
    for name, function in functions.items():
        for parameter in list(inspect.signature(function).parameters.values()):
            if parameter.name == "self":
                continue
            assert parameter.annotation is not parameter.empty, (name, parameter)
            assert parameter.kind is not parameter.VAR_POSITIONAL, (name, parameter)
            if parameter.kind is parameter.VAR_KEYWORD:
                known = {"unknown": "Never", "engine": "Unpack[EngineArguments]"}
                known["variables"] = "Any"  # of chat templates
                assert parameter.annotation == known[parameter.name], (name, parameter)


def test_unknown_keywords_are_listed() -> None:
    with pytest.raises(TypeError, match=r"'bestof' .*; it has: n, .*token_sources$"):
        SamplingParams(bestof=2)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"'modle' .*; it has: model, .*show_progress; did you mean model\?$"
    ):
        LLM("none", modle=1)  # type: ignore[arg-type]
