# SPDX-License-Identifier: Apache-2.0
"""Paceline: speculative decoding of large language models on a C++ runtime.

    from paceline import LLM, SamplingParams

    llm = LLM("path/to/model", speculative_config={"method": "draft_model",
              "model": "path/to/draft", "num_speculative_tokens": 4})
    outputs = llm.generate("def quicksort(", SamplingParams(temperature=0.0, max_tokens=64))
    print(outputs[0].outputs[0].text)

Importing this package is cheap: each name is imported from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline._core import (
        DeviceError,
        InternalError,
        ModelFileError,
        ModelNotFoundError,
        OutOfMemoryError,
    )
    from paceline.async_llm import AsyncLLM
    from paceline.config import EngineConfig
    from paceline.llm import LLM
    from paceline.outputs import (
        CompletionOutput,
        Logprob,
        RequestError,
        RequestMetrics,
        RequestOutput,
        StreamChunk,
    )
    from paceline.prompts import Prompt, TextPrompt, TokensPrompt
    from paceline.sampling import SamplingParams
    from paceline.speculative_config import SpeculativeConfig
    from paceline.stream import RequestStream
    from paceline.structured_outputs import StructuredOutputsParams
    from paceline.tokenizer import Tokenizer
    from paceline.weights import BusyError

    # The version of the package, such as "0.1.0".
    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BusyError",
    "CompletionOutput",
    "DeviceError",
    "EngineConfig",
    "InternalError",
    "Logprob",
    "ModelFileError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "Prompt",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "SpeculativeConfig",
    "StreamChunk",
    "StructuredOutputsParams",
    "TextPrompt",
    "Tokenizer",
    "TokensPrompt",
    "__version__",
]

_MODULE_OF = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "BusyError": "paceline.weights",
    "RequestStream": "paceline.stream",
    "SamplingParams": "paceline.sampling",
    "StructuredOutputsParams": "paceline.structured_outputs",
    "SpeculativeConfig": "paceline.speculative_config",
    "EngineConfig": "paceline.config",
    "CompletionOutput": "paceline.outputs",
    "Logprob": "paceline.outputs",
    "RequestError": "paceline.outputs",
    "RequestMetrics": "paceline.outputs",
    "RequestOutput": "paceline.outputs",
    "StreamChunk": "paceline.outputs",
    "Prompt": "paceline.prompts",
    "TextPrompt": "paceline.prompts",
    "Tokenizer": "paceline.tokenizer",
    "TokensPrompt": "paceline.prompts",
    "DeviceError": "paceline._core",
    "InternalError": "paceline._core",
    "ModelFileError": "paceline._core",
    "ModelNotFoundError": "paceline._core",
    "OutOfMemoryError": "paceline._core",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        value: Any = importlib.import_module("paceline._core").version()
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        from paceline.vllm_names import missing_name

        raise missing_name("paceline", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
