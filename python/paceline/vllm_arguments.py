# SPDX-License-Identifier: Apache-2.0
"""What to do instead of giving an argument of vLLM that Paceline lacks.

The errors for such arguments end with this advice, and the tables of docs/from-vllm.md show it.
Code is in backticks, which errors leave out.
"""

from __future__ import annotations

from typing import Final

#: The beginning of advice that is a reason; the tables, which say "refused", leave it out.
LEAVE_OUT: Final = "leave it out: "

_GRAPHS: Final = f"{LEAVE_OUT}CUDA graphs need no setting, and they never change the output"
_ONE_GPU: Final = f"{LEAVE_OUT}a model runs on one GPU"
_LORA: Final = f"{LEAVE_OUT}LoRA adapters are not supported; merge them into the checkpoint"
_MULTI_MODAL: Final = f"{LEAVE_OUT}models read text only"
_LLGUIDANCE: Final = f"{LEAVE_OUT}llguidance reads all grammars"
_BEAMS: Final = f"{LEAVE_OUT}there is no beam search"
_GENERATES: Final = f"{LEAVE_OUT}every model generates"
_TOKENIZER: Final = f"{LEAVE_OUT}the tokenizer is `tokenizer.json` in the model's folder"
_FORMAT: Final = f"{LEAVE_OUT}the checkpoint's `config.json` says how its weights are stored"
_KV_DTYPE: Final = f"{LEAVE_OUT}the KV has the dtype in which the model computes"
_CORS: Final = "`--cors-origin` names the origins whose pages may use the server"
_NO_TLS: Final = f"{LEAVE_OUT}the server speaks plain HTTP; put a proxy with TLS before it"

#: By owner and argument.
ADVICE: Final[dict[str, dict[str, str]]] = {
    "LLM": {
        "async_scheduling": f"{LEAVE_OUT}scheduling always overlaps with the device",
        "compilation_config": _GRAPHS,
        "cpu_offload_gb": f"{LEAVE_OUT}weights and KV stay on the device",
        "disable_custom_all_reduce": _ONE_GPU,
        "data_parallel_size": f"{LEAVE_OUT}`paceline serve --replicas` runs an engine on each GPU",
        "distributed_executor_backend": _ONE_GPU,
        "download_dir": "`cache_dir` names the folder for files from the hub",
        "enable_chunked_prefill": f"{LEAVE_OUT}prefill is always chunked; `prefill_chunk_size` "
        "limits a chunk",
        "enable_expert_parallel": _ONE_GPU,
        "enable_lora": _LORA,
        "enforce_eager": "leave it out, or use "
        "`speculative_config={'x': {'draft_driver': 'eager'}}` to look for errors",
        "generation_config": f"{LEAVE_OUT}`llm.get_default_sampling_params()` reads the file, and "
        "`SamplingParams()` does not",
        "guided_decoding_backend": _LLGUIDANCE,
        "hf_overrides": "change `config.json` in a copy of the checkpoint",
        "hf_token": "set the environment variable `HF_TOKEN`",
        "kv_cache_dtype": _KV_DTYPE,
        "kv_cache_memory_bytes": "`kv_cache_bytes` sets the size of the KV pool",
        "limit_mm_per_prompt": _MULTI_MODAL,
        "max_lora_rank": _LORA,
        "max_seq_len_to_capture": _GRAPHS,
        "mm_processor_kwargs": _MULTI_MODAL,
        "num_gpu_blocks_override": "`kv_cache_bytes` sets the size of the KV pool",
        "num_speculative_tokens": "`speculative_config={'num_speculative_tokens': ...}` sets it",
        "pipeline_parallel_size": _ONE_GPU,
        "quantization": _FORMAT,
        "runner": _GENERATES,
        "skip_tokenizer_init": "leave it out, or set `SamplingParams(detokenize=False)`",
        "speculative_model": "`speculative_config={'model': ...}` names the drafter",
        "structured_outputs_config": _LLGUIDANCE,
        "swap_space": f"{LEAVE_OUT}a preempted sequence is recomputed, not swapped out",
        "task": _GENERATES,
        "tokenizer": _TOKENIZER,
        "tokenizer_mode": _TOKENIZER,
        "tokenizer_revision": f"{LEAVE_OUT}the tokenizer has the model's revision",
        "trust_remote_code": f"{LEAVE_OUT}no code of a checkpoint is ever run",
    },
    "LLM.chat": {
        "chat_template_content_format": f"{LEAVE_OUT}a template gets strings and text parts as "
        "they are given",
        "lora_request": _LORA,
        "mm_processor_kwargs": _MULTI_MODAL,
    },
    "LLM.generate": {
        "lora_request": _LORA,
        "priority": f"{LEAVE_OUT}requests run in the order in which they arrive",
        "prompt_token_ids": "give a prompt `{'prompt_token_ids': ...}`",
        "tokenization_kwargs": "tokenize the prompt and give a prompt `{'prompt_token_ids': ...}`",
    },
    "SamplingParams": {
        "beam_width": _BEAMS,
        "best_of": "`n` gives the number of outputs; choose by `cumulative_logprob`",
        "extra_args": f"{LEAVE_OUT}there are no plug-ins that could read it",
        "flat_logprobs": f"{LEAVE_OUT}logprobs are lists of dicts",
        "guided_decoding": "the name is `structured_outputs`",
        "length_penalty": _BEAMS,
        "logits_processors": "`logit_bias`, `bad_words` and `allowed_token_ids` change logits",
        "max_new_tokens": "the name is `max_tokens`",
        "output_kind": f"{LEAVE_OUT}`generate` returns complete outputs, `stream` returns pieces",
        "truncate_prompt_tokens": "shorten the prompt itself",
        "use_beam_search": _BEAMS,
    },
    "StructuredOutputsParams": {
        "backend": _LLGUIDANCE,
        "disable_additional_properties": "write `additionalProperties: false` into the schema",
        "disable_fallback": f"{LEAVE_OUT}there is no other backend",
        "structural_tag": f"{LEAVE_OUT}write a `grammar`",
    },
    "speculative_config": {
        "attention_backend": f"{LEAVE_OUT}there is one backend per device",
        "draft_tensor_parallel_size": _ONE_GPU,
        "enable_adaptive_verification": "k adapts; `'x': {'adaptive': False}` fixes it",
        "enforce_eager": "`'x': {'draft_driver': 'eager'}` captures no graphs",
        "kv_cache_dtype": _KV_DTYPE,
        "max_model_len": f"{LEAVE_OUT}the drafter uses the target's length",
        "num_speculative_tokens_per_batch_size": f"{LEAVE_OUT}each iteration chooses, up to k",
        "parallel_drafting": f"{LEAVE_OUT}DFlash and DSpark draft whole blocks anyway",
        "quantization": _FORMAT,
        "synthetic_acceptance_rates": "`synthetic_acceptance_length` sets the mean",
        "use_heterogeneous_vocab": f"{LEAVE_OUT}the drafter must have the target's token ids",
    },
}
#: By flag of `vllm serve`; those that are arguments of its `LLM` are above.
_FLAG_ADVICE: Final[dict[str, str]] = {
    "allow_credentials": _CORS,
    "allowed_headers": _CORS,
    "allowed_methods": _CORS,
    "allowed_origins": _CORS,
    "chat_template_content_format": f"{LEAVE_OUT}text gets the form that the template reads",
    "disable_log_requests": f"{LEAVE_OUT}requests are not logged; `--access-log` logs them",
    "disable_uvicorn_access_log": f"{LEAVE_OUT}requests are not logged; `--access-log` logs them",
    "enable_auto_tool_choice": f"{LEAVE_OUT}tool calls are read in any case",
    "enable_log_requests": "`--access-log` logs requests, without prompts",
    "enable_per_request_metrics": f"{LEAVE_OUT}responses have `metrics` in any case",
    "enable_request_id_headers": f"{LEAVE_OUT}responses have the header X-Request-Id in any case",
    "lora_modules": _LORA,
    "middleware": f"{LEAVE_OUT}put a proxy before the server",
    "per_request_spec_decode_metrics": f"{LEAVE_OUT}responses have "
    "`metrics.speculative_decoding` in any case",
    "reasoning_parser": f"{LEAVE_OUT}`--tool-call-parser` names the format of reasoning too",
    "return_tokens_as_token_ids": "requests have the field `return_tokens_as_token_ids`",
    "root_path": f"{LEAVE_OUT}put a proxy before the server",
    "ssl_ca_certs": _NO_TLS,
    "ssl_certfile": _NO_TLS,
    "ssl_keyfile": _NO_TLS,
    "uvicorn_log_level": "`--log-level` sets it",
}
_SAME: Final = {
    "AsyncLLM": "LLM",
    "AsyncLLM.chat": "LLM.chat",
    "AsyncLLM.generate": "LLM.generate",
    "AsyncLLM.stream_chat": "LLM.chat",
    "EngineConfig": "LLM",
}


def advice_end(owner: str, argument: str) -> str:
    """The end of an error about an argument that does not exist.

    Args:
        owner: What has no such argument, as in the error.
        argument: The argument.

    Returns:
        "; " and the advice; "" if there is none.
    """
    advice = ADVICE.get(_SAME.get(owner, owner), {}).get(argument)
    return "" if advice is None else f"; {advice.replace('`', '')}"


def flag_advice(flag: str) -> str:
    """The end of an error about a flag of `vllm serve` that `paceline serve` lacks.

    Args:
        flag: The flag, such as --enforce-eager or --no-enable-chunked-prefill.

    Returns:
        As for `advice_end`.
    """
    name = flag.lstrip("-").replace("-", "_").removeprefix("no_")
    advice = _FLAG_ADVICE.get(name)
    return advice_end("LLM", name) if advice is None else f"; {advice.replace('`', '')}"
