# SPDX-License-Identifier: Apache-2.0
"""What users write, for `mypy --strict`: it must accept all of it but the marked lines.

Strict mode also reports a mark that is not needed. Nothing here is run.
"""

from collections.abc import Iterator
from typing import Any, assert_type

from paceline import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    EngineConfig,
    Logprob,
    Prompt,
    RequestError,
    RequestMetrics,
    RequestOutput,
    RequestStream,
    SamplingParams,
    SpeculativeConfig,
    StreamChunk,
    TextPrompt,
    Tokenizer,
    TokensPrompt,
)


def build(folder: str) -> LLM:
    config = SpeculativeConfig(model="drafter", num_speculative_tokens=3)
    with LLM(folder, speculative_config=config) as llm:
        assert_type(llm, LLM)
    LLM(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 2}, seed=1)
    LLM(folder, gpu_layers=1)  # type: ignore[call-arg]
    LLM(folder, max_num_seqs="64")  # type: ignore[arg-type]
    LLM.from_loaded(llm.target, max_num_seqs=2, device="cpu")
    LLM.from_loaded(llm.target, enforce_eager=True)  # type: ignore[call-arg]
    LLM.from_loaded(llm.target, seed="1")  # type: ignore[arg-type]
    return LLM(model=folder, dtype="bfloat16", tensor_parallel_size=1, show_progress=False)


def parameters() -> list[SamplingParams]:
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        stop=["a"],
        stop_token_ids=(1, 2),
        logit_bias={3: 1.5},
        bad_words=["b", [4, 5]],
        max_tokens=None,
    )
    assert_type(params.stop, tuple[str, ...])
    assert_type(params.logit_bias, tuple[tuple[int, float], ...])
    assert_type(params.max_tokens, int | None)
    params.seed = 3  # type: ignore[misc]
    SamplingParams(max_new_tokens=3)  # type: ignore[arg-type]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    SamplingParams(7)  # type: ignore[call-arg]
    return [params, SamplingParams(stop="x", n=2)]


def generate(llm: LLM, params: SamplingParams) -> str:
    texts = ["a", "b"]
    dicts = [{"prompt": text} for text in texts]
    llm.generate("a")
    llm.generate(texts, params, use_tqdm=False)
    llm.generate([[1, 2], [3]], [params, params])
    llm.generate({"prompt": "a"})
    llm.generate(dicts)
    llm.generate(["a", [1, 2], {"prompt": "a"}, {"prompt_token_ids": [1]}])
    mixed: list[Prompt] = ["a", [1, 2]]
    llm.generate(mixed)
    llm.generate(TokensPrompt(prompt_token_ids=[1], prompt="a"))
    llm.generate([TextPrompt(prompt="a")])
    llm.generate(prompt_token_ids=[[1, 2], [3]], sampling_params=params)
    llm.generate(3)  # type: ignore[arg-type]
    llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
    llm.generate("a", lora_request=None)  # type: ignore[arg-type]
    try:
        outputs = llm.generate(texts, params)
    except RequestError as error:
        outputs = error.outputs
    assert_type(outputs, list[RequestOutput])
    return "".join(completion.text for output in outputs for completion in output.outputs)


def read(output: RequestOutput) -> dict[str, Any]:
    assert_type(output.request_id, str)
    assert_type(output.prompt, str | None)
    assert_type(output.prompt_token_ids, list[int])
    assert_type(output.finished, bool)
    assert_type(output.error, str | None)
    assert_type(output.num_cached_tokens, int)
    assert_type(output.prompt_logprobs, list[dict[int, Logprob] | None] | None)
    assert_type(output.metrics, RequestMetrics)
    completion: CompletionOutput = output.outputs[0]
    assert_type(completion.token_ids, list[int])
    assert_type(completion.finish_reason, str | None)
    assert_type(completion.stop_reason, str | int | None)
    assert_type(completion.cumulative_logprob, float | None)
    assert_type(completion.finished(), bool)
    for position in completion.logprobs or []:
        for token_id, entry in position.items():
            print(token_id + 1, entry.logprob, entry.rank + 1, entry.decoded_token)
    metrics = output.metrics
    assert_type(metrics.total_time_ms, float)
    assert_type(metrics.tokens_per_second, float | None)
    return metrics.to_dict()


def stream(llm: LLM) -> Iterator[str]:
    with llm.stream("a", SamplingParams(seed=1)) as chunks:
        assert_type(chunks, RequestStream)
        for chunk in chunks:
            assert_type(chunk, StreamChunk)
            if chunk.output is not None:
                assert_type(chunk.output, RequestOutput)
            yield chunk.text


def chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "a"}]
    assert_type(llm.chat(conversation, SamplingParams(seed=1)), list[RequestOutput])
    llm.chat([conversation, conversation], chat_template_kwargs={"enable_thinking": False})
    llm.chat("a")  # type: ignore[arg-type]


async def serve(folder: str) -> None:
    async with AsyncLLM(folder, max_num_seqs=4) as llm:
        assert_type(llm, AsyncLLM)
        async for output in llm.generate("a", SamplingParams(seed=1), request_id="first"):
            assert_type(output, RequestOutput)
        async for chunk in llm.stream({"prompt_token_ids": [1, 2]}):
            assert_type(chunk, StreamChunk)
        async for output in llm.chat([{"role": "user", "content": "a"}]):
            print(output.outputs[0].text, output.finished)
        await llm.abort("first")
    AsyncLLM(folder, enforce_eager=True)  # type: ignore[call-arg]
    AsyncLLM.from_llm(LLM(folder)).close()


def weights(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    llm = LLM.from_state_dict(config, tensors, max_num_seqs=2, seed=1)
    assert_type(llm, LLM)
    llm.update_weights(tensors)
    print(
        llm.hidden_states([1, 2], layers=[0]), llm.logits([1], on_device=True).__dlpack_device__()
    )
    LLM.from_state_dict(config, tensors, enforce_eager=True)  # type: ignore[call-arg]


def facts(llm: LLM) -> None:
    assert_type(llm.reset_prefix_cache(), bool)
    print([metric.name for metric in llm.get_metrics()])
    llm.beam_search  # type: ignore[attr-defined]  # noqa: B018
    tokenizer: Tokenizer = llm.get_tokenizer()
    assert_type(tokenizer.encode("a", add_special_tokens=False), list[int])
    assert_type(tokenizer.decode([1]), str)
    assert_type(tokenizer.convert_tokens_to_ids("a"), int | None)
    assert_type(tokenizer.convert_ids_to_tokens([1]), list[str | None])
    assert_type(tokenizer("a")["input_ids"], Any)
    assert_type(llm.get_default_sampling_params(), SamplingParams)
    assert_type(llm.config, EngineConfig)
    assert_type(llm.speculative_config, SpeculativeConfig | None)
    assert_type(llm.max_model_len, int)
    assert_type(llm.memory_report(), dict[str, Any])
    assert_type(llm.capabilities(), dict[str, Any])
    assert_type(llm.stats(), dict[str, Any])
    print(llm.logits([1, 2]).shape, llm.logits({"prompt": "a"}).mean())
    llm.close()
