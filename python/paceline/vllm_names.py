# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM's modules and classes that Paceline lacks, and what takes their place.

An attempt to use one raises an error that says so. docs/from-vllm.md has a table of them. Code is
in backticks, which errors leave out.
"""

from __future__ import annotations

from typing import Any, Final

_ARGUMENTS: Final = "give its arguments to `LLM` or `AsyncLLM` itself"
_NO_POOLING: Final = (
    "there are no pooling models; `llm.hidden_states(prompt, layers)` returns a model's hidden "
    "states"
)
_NO_BEAMS: Final = (
    "there is no beam search; `SamplingParams(n=..., logprobs=...)` samples several outputs"
)
_NO_WORKERS: Final = "there are no workers; the engine is a thread of this process"
_NO_PROFILE: Final = "`paceline bench latency --trace` times the kernels of an iteration"
_NO_SLEEP: Final = "`close()` frees the memory; build the LLM again to go on"
_OWN_LLM: Final = "`allm.llm` is the `LLM`"

#: By module: names in it.
MODULE_NAMES: Final[dict[str, dict[str, str]]] = {
    "paceline": {
        "AsyncEngineArgs": _ARGUMENTS,
        "AsyncLLMEngine": "`AsyncLLM(model, ...)` takes its place",
        "BeamSearchParams": _NO_BEAMS,
        "EngineArgs": _ARGUMENTS,
        "LLMEngine": "`LLM.stream` and `AsyncLLM.generate` return outputs while they grow",
        "ModelRegistry": "models are described by their `config.json`; see docs/loading.md",
        "PoolingParams": _NO_POOLING,
        "PromptType": "the name is `Prompt`",
        "initialize_ray_cluster": "`paceline.ray` serves with Ray; see docs/replicas.md",
    },
    "paceline.sampling_params": {
        "BeamSearchParams": _NO_BEAMS,
        "GuidedDecodingParams": "the name is `StructuredOutputsParams`, for "
        "`SamplingParams(structured_outputs=...)`",
    },
}
#: By class: attributes of its objects.
ATTRIBUTES: Final[dict[str, dict[str, str]]] = {
    "LLM": {
        "apply_model": _NO_WORKERS,
        "beam_search": _NO_BEAMS,
        "classify": _NO_POOLING,
        "collective_rpc": _NO_WORKERS,
        "embed": _NO_POOLING,
        "encode": f"{_NO_POOLING}, and `llm.get_tokenizer().encode(text)` token ids",
        "enqueue": "`llm.stream` queues requests and returns at once",
        "llm_engine": "`LLM` has its methods itself; see `stats`, `memory_report` and `stream`",
        "preprocess_chat": "`llm.get_tokenizer().apply_chat_template` makes prompts of chats",
        "reset_mm_cache": "models read text only",
        "reward": _NO_POOLING,
        "score": _NO_POOLING,
        "set_tokenizer": "`LLM(tokenizer=...)` names another tokenizer",
        "sleep": _NO_SLEEP,
        "start_profile": _NO_PROFILE,
        "stop_profile": _NO_PROFILE,
        "wake_up": _NO_SLEEP,
    },
    "AsyncLLM": {
        "add_lora": "LoRA adapters are not supported; merge them into the checkpoint",
        "check_health": "`allm.llm.stats()` raises an error if the engine has failed",
        "collective_rpc": _NO_WORKERS,
        "do_log_stats": "the engine logs figures by itself; `allm.llm.stats()` returns them",
        "encode": _NO_POOLING,
        "engine": _OWN_LLM,
        "get_model_config": f"{_OWN_LLM}; its `target.config` describes the model",
        "get_tokenizer": "`allm.llm.get_tokenizer()` returns it",
        "model_config": f"{_OWN_LLM}; its `target.config` describes the model",
        "reset_prefix_cache": "`allm.llm.reset_prefix_cache()` does it",
        "shutdown": "the name is `close`",
        "sleep": _NO_SLEEP,
        "start_profile": _NO_PROFILE,
        "stop_profile": _NO_PROFILE,
        "vllm_config": f"{_OWN_LLM}; its `config` is the `EngineConfig`",
        "wake_up": _NO_SLEEP,
    },
}


def missing_name(module: str, name: str) -> Exception:
    """The error about a name that a module lacks.

    It is an ImportError for names of vLLM: where `from module import name` meets an AttributeError,
    Python raises another error without the advice.
    """
    advice = MODULE_NAMES.get(module, {}).get(name)
    if advice is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module} has no {name}: {_plain(advice)}", name=module)


def missing_attribute(owner: Any, kind: str, name: str) -> AttributeError:
    """The error about an attribute that an object lacks.

    Args:
        owner: The object.
        kind: The name of its class in ATTRIBUTES.
        name: The attribute.
    """
    advice = ATTRIBUTES[kind].get(name)
    message = f"{kind!r} object has no attribute {name!r}"
    if advice is not None:
        message += f": {_plain(advice)}"
    return AttributeError(message, name=name, obj=owner)


def _plain(advice: str) -> str:
    return advice.replace("`", "")
