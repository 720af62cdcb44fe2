# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM that Paceline lacks: which values change nothing, and what to do instead.

A value that would change nothing is accepted. Others are refused, all of a call in one error that
ends with this advice. The tables of docs/from-vllm.md show it. Code is in backticks, which errors
leave out.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

#: The beginning of advice that is a reason; what accepts a value leaves it out.
LEAVE_OUT: Final = "leave it out: "


@dataclass(frozen=True)
class Advice:
    """An argument of vLLM that Paceline lacks.

    Attributes:
        text: What to do instead of giving it.
        harmless: The values that change nothing; "all" of them, as far as outputs go.
        is_switch: Whether vLLM's flag of that name has no value.
    """

    text: str
    harmless: tuple[object, ...] | Literal["all"] = ()
    is_switch: bool = False

    def accepts(self, value: object) -> bool:
        """Returns whether a value changes nothing; True is not 1, and enum members go by name."""
        if isinstance(value, enum.Enum):
            value = value.name
        return self.harmless == "all" or any(
            type(value) is type(one) and value == one for one in self.harmless
        )

    @property
    def plain(self) -> str:
        """The advice for an error."""
        return self.text.replace("`", "")


def _none(text: str, *harmless: object) -> Advice:
    return Advice(text, (None, *harmless))


def _off(text: str) -> Advice:
    return Advice(text, (None, False), is_switch=True)


def _any(reason: str, *, is_switch: bool = False) -> Advice:
    return Advice(f"{LEAVE_OUT}{reason}", "all", is_switch)


_GRAPHS: Final = "CUDA graphs need no setting, and they never change the output"
_ONE_GPU: Final = f"{LEAVE_OUT}a model runs on one GPU"
_LORA: Final = f"{LEAVE_OUT}LoRA adapters are not supported; merge them into the checkpoint"
_TEXT_ONLY: Final = "models read text only"
_LLGUIDANCE: Final = f"{LEAVE_OUT}llguidance reads all grammars"
_BEAMS: Final = f"{LEAVE_OUT}there is no beam search"
_GENERATES: Final = f"{LEAVE_OUT}every model generates"
_FORMAT: Final = f"{LEAVE_OUT}the checkpoint's `config.json` says how its weights are stored"
_KV_DTYPE: Final = f"{LEAVE_OUT}the KV has the dtype in which the model computes"
_NO_CODE: Final = "no code of a checkpoint is ever run"
_CORS: Final = "`--cors-origin` names the origins whose pages may use the server"
_NO_LOG: Final = "requests are not logged; `--access-log` logs them"
_NO_TLS: Final = f"{LEAVE_OUT}the server speaks plain HTTP; put a proxy with TLS before it"
_PARTS: Final = f"{LEAVE_OUT}text gets the form that the template reads"
_POOL: Final = "`kv_cache_bytes` sets the size of the KV pool"
_PROXY: Final = f"{LEAVE_OUT}put a proxy before the server"
_SHARED: Final = f"{LEAVE_OUT}requests run in the order in which they arrive"
_TOKEN_IDS: Final = "tokenize the prompt and give a prompt `{'prompt_token_ids': ...}`"

#: By owner and argument.
ADVICE: Final[dict[str, dict[str, Advice]]] = {
    "LLM": {
        "allowed_local_media_path": _any(_TEXT_ONLY),
        "async_scheduling": _any("scheduling always overlaps with the device", is_switch=True),
        "attention_backend": _none(f"{LEAVE_OUT}there is one backend per device", "auto"),
        "code_revision": _any(_NO_CODE),
        "compilation_config": _any(_GRAPHS),
        "config_format": _none(_FORMAT, "auto", "hf"),
        "convert": _none(_GENERATES, "auto", "none"),
        "cpu_offload_gb": _none(f"{LEAVE_OUT}weights and KV stay on the device", 0, 0.0),
        "data_parallel_size": _none(
            f"{LEAVE_OUT}`paceline serve --replicas` runs an engine on each GPU", 1
        ),
        "disable_cascade_attn": _any("it never changes the output", is_switch=True),
        "disable_chunked_mm_input": _any(_TEXT_ONLY, is_switch=True),
        "disable_custom_all_reduce": _any("a model runs on one GPU", is_switch=True),
        "distributed_executor_backend": _none(_ONE_GPU, "uni", "mp"),
        "download_dir": _none("`cache_dir` names the folder for files from the hub"),
        "enable_chunked_prefill": _any(
            "prefill is always chunked; `prefill_chunk_size` limits a chunk", is_switch=True
        ),
        "enable_expert_parallel": _off(_ONE_GPU),
        "enable_lora": _off(_LORA),
        "enable_sleep_mode": _off(f"{LEAVE_OUT}`close()` frees the memory of an `LLM`"),
        "enforce_eager": Advice(
            "leave it out, or use `speculative_config={'x': {'draft_driver': 'eager'}}` to look "
            "for errors",
            "all",
            is_switch=True,
        ),
        "generation_config": _none(
            f"{LEAVE_OUT}requests without parameters have those of the file; `SamplingParams()` "
            "does not read it",
            "auto",
        ),
        "guided_decoding_backend": _none(_LLGUIDANCE, "auto", "guidance"),
        "hf_overrides": Advice("change `config.json` in a copy of the checkpoint", (None, {})),
        "hf_token": _none("set the environment variable `HF_TOKEN`"),
        "kv_cache_dtype": _none(_KV_DTYPE, "auto"),
        "kv_cache_memory_bytes": _none(_POOL),
        "kv_transfer_config": _none(f"{LEAVE_OUT}KV stays in its engine"),
        "limit_mm_per_prompt": _any(_TEXT_ONLY),
        "logits_processors": Advice(
            "`logit_bias`, `bad_words` and `allowed_token_ids` of a request change logits",
            (None, []),
        ),
        "logprobs_mode": _none(f"{LEAVE_OUT}logprobs are those of the raw logits", "raw_logprobs"),
        "max_lora_rank": _any("it says nothing without `enable_lora`"),
        "max_loras": _any("it says nothing without `enable_lora`"),
        "max_parallel_loading_workers": _any("a checkpoint is read by one process"),
        "max_seq_len_to_capture": _any(_GRAPHS),
        "mm_processor_kwargs": _any(_TEXT_ONLY),
        "model_impl": _none(f"{LEAVE_OUT}a model has one implementation", "auto", "vllm"),
        "num_gpu_blocks_override": _none(_POOL),
        "num_speculative_tokens": _none(
            "`speculative_config={'num_speculative_tokens': ...}` sets it"
        ),
        "override_generation_config": Advice(
            "give the requests `SamplingParams` with these values", (None, {})
        ),
        "pipeline_parallel_size": _none(_ONE_GPU, 1),
        "quantization": _none(_FORMAT),
        "runner": _none(_GENERATES, "auto", "generate"),
        "scheduling_policy": _none(_SHARED, "fcfs"),
        "skip_tokenizer_init": _off("leave it out, or set `SamplingParams(detokenize=False)`"),
        "speculative_model": _none("`speculative_config={'model': ...}` names the drafter"),
        "structured_outputs_config": Advice(_LLGUIDANCE, (None, {}, {"backend": "auto"})),
        "swap_space": _any("a preempted sequence is recomputed, not swapped out"),
        "task": _none(_GENERATES, "auto", "generate"),
        "tokenizer_mode": _none(
            f"{LEAVE_OUT}a tokenizer is a `tokenizer.json`; `tokenizer` names its folder",
            "auto",
            "hf",
        ),
        "tokenizer_revision": _none(
            f"{LEAVE_OUT}`tokenizer` may be a folder, which has the files of one revision"
        ),
        "trust_remote_code": _any(_NO_CODE, is_switch=True),
    },
    "LLM.chat": {
        "chat_template_content_format": _none(_PARTS, "auto"),
        "lora_request": _none(_LORA),
        "mm_processor_kwargs": _any(_TEXT_ONLY),
    },
    "LLM.generate": {
        "lora_request": _none(_LORA),
        "priority": _none(_SHARED, 0),
        "tokenization_kwargs": _none(_TOKEN_IDS),
        "trace_headers": _none(f"{LEAVE_OUT}`paceline serve` writes traces of its requests"),
    },
    "SamplingParams": {
        "beam_width": _none(_BEAMS),
        "best_of": _none("`n` gives the number of outputs; choose by `cumulative_logprob`"),
        "extra_args": _none(f"{LEAVE_OUT}there are no plug-ins that could read it"),
        "flat_logprobs": _off(f"{LEAVE_OUT}logprobs are lists of dicts"),
        "guided_decoding": _none("the name is `structured_outputs`"),
        "length_penalty": _none(_BEAMS, 1.0),
        "logits_processors": Advice(
            "`logit_bias`, `bad_words` and `allowed_token_ids` change logits", (None, [])
        ),
        "max_new_tokens": _none("the name is `max_tokens`"),
        "output_kind": Advice(
            f"{LEAVE_OUT}`LLM.generate` returns complete outputs, `AsyncLLM.generate` outputs so "
            "far, of which the last is complete, and `stream` of both new pieces",
            (None, "CUMULATIVE"),
        ),
        "truncate_prompt_tokens": _none("shorten the prompt itself"),
        "use_beam_search": _off(_BEAMS),
    },
    "StructuredOutputsParams": {
        "backend": _none(_LLGUIDANCE, "auto", "guidance"),
        "disable_additional_properties": _off(
            "write `additionalProperties: false` into the schema"
        ),
        "disable_fallback": _any("there is no other backend"),
        "structural_tag": _none(f"{LEAVE_OUT}write a `grammar`"),
    },
    "speculative_config": {
        "attention_backend": _none(f"{LEAVE_OUT}there is one backend per device", "auto"),
        "disable_padded_drafter_batch": _any("it never changes the output"),
        "draft_tensor_parallel_size": _none(_ONE_GPU, 1),
        "enable_adaptive_verification": _none("k adapts; `'x': {'adaptive': False}` fixes it"),
        "enforce_eager": _none("`'x': {'draft_driver': 'eager'}` captures no graphs", False),
        "kv_cache_dtype": _none(_KV_DTYPE, "auto"),
        "max_model_len": _none(f"{LEAVE_OUT}the drafter uses the target's length"),
        "num_speculative_tokens_per_batch_size": _none(
            f"{LEAVE_OUT}each iteration chooses, up to k"
        ),
        "parallel_drafting": _none(
            f"{LEAVE_OUT}DFlash and DSpark draft whole blocks anyway", False
        ),
        "quantization": _none(_FORMAT),
        "synthetic_acceptance_rates": _none("`synthetic_acceptance_length` sets the mean"),
        "use_heterogeneous_vocab": _none(
            f"{LEAVE_OUT}the drafter must have the target's token ids", False
        ),
    },
}
#: Arguments that both have, with fewer values here: refused with others of the same call.
_FEWER_VALUES: Final[dict[str, dict[str, Advice]]] = {
    "LLM": {
        "dtype": Advice(
            "'auto' loads a checkpoint in float16 as float32, which is lossless",
            ("auto", "float32", "bfloat16"),
        ),
        "tensor_parallel_size": Advice(_ONE_GPU, (1,)),
    },
}
#: By flag of `vllm serve`; those that are arguments of its `LLM` are above.
FLAGS: Final[dict[str, Advice]] = {
    "allow_credentials": Advice(_CORS, is_switch=True),
    "allowed_headers": Advice(_CORS),
    "allowed_methods": Advice(_CORS),
    "allowed_origins": Advice(_CORS),
    "chat_template_content_format": Advice(_PARTS, ("auto",)),
    "disable_frontend_multiprocessing": _any("the server is one process", is_switch=True),
    "disable_log_requests": _any(_NO_LOG, is_switch=True),
    "disable_uvicorn_access_log": _any(_NO_LOG, is_switch=True),
    "enable_auto_tool_choice": _any("tool calls are read in any case", is_switch=True),
    "enable_log_requests": Advice(
        "`--access-log` logs requests, without prompts", (False,), is_switch=True
    ),
    "enable_per_request_metrics": _any("responses have `metrics` in any case", is_switch=True),
    "enable_request_id_headers": _any(
        "responses have the header X-Request-Id in any case", is_switch=True
    ),
    "lora_modules": Advice(_LORA),
    "middleware": Advice(_PROXY),
    "per_request_spec_decode_metrics": _any(
        "responses have `metrics.speculative_decoding` in any case"
    ),
    "reasoning_parser": Advice(
        f"{LEAVE_OUT}`--tool-call-parser` names the format of reasoning too"
    ),
    "return_tokens_as_token_ids": Advice(
        "requests have the field `return_tokens_as_token_ids`", (False,), is_switch=True
    ),
    "root_path": Advice(_PROXY),
    "ssl_ca_certs": Advice(_NO_TLS),
    "ssl_certfile": Advice(_NO_TLS),
    "ssl_keyfile": Advice(_NO_TLS),
    "uvicorn_log_level": Advice("`--log-level` sets it"),
}
_SAME: Final = {
    "AsyncLLM": "LLM",
    "AsyncLLM.chat": "LLM.chat",
    "AsyncLLM.generate": "LLM.generate",
    "AsyncLLM.stream_chat": "LLM.chat",
    "EngineConfig": "LLM",
}


def advice_for(owner: str, argument: str) -> Advice | None:
    """The advice for an argument of vLLM; None if there is none.

    Args:
        owner: What has no such argument, as in errors.
        argument: The argument.
    """
    return ADVICE.get(_SAME.get(owner, owner), {}).get(argument)


def is_harmless(owner: str, argument: str, value: object) -> bool:
    """Returns whether a value of an argument of vLLM changes nothing."""
    advice = advice_for(owner, argument)
    return advice is not None and advice.accepts(value)


def advice_end(owner: str, argument: str) -> str:
    """The end of an error about an argument that does not exist; "" without advice."""
    advice = advice_for(owner, argument)
    return "" if advice is None else f"; {advice.plain}"


def refused_too(owner: str, given: Mapping[str, object]) -> dict[str, str]:
    """Which arguments that exist here have a value that vLLM alone takes, and the advice.

    Args:
        owner: As for `advice_for`.
        given: Arguments and their values.
    """
    fewer = _FEWER_VALUES.get(_SAME.get(owner, owner), {})
    return {
        name: fewer[name].plain
        for name, value in given.items()
        if name in fewer and not fewer[name].accepts(value)
    }


def flag_advice(name: str) -> Advice | None:
    """The advice for a flag of `vllm serve`, such as "enforce_eager"; None if there is none."""
    return FLAGS.get(name) or ADVICE["LLM"].get(name)


def flag_value(text: str) -> Any:
    """The value that vLLM reads from the text of a flag."""
    if text in ("None", "none"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
