# SPDX-License-Identifier: Apache-2.0
"""An offline script as people write it for vLLM; test_vllm_script.py runs it with Paceline.

Usage: python vllm_script.py TARGET DRAFTER
"""

import sys

from vllm import LLM, SamplingParams, TokensPrompt

PROMPTS = ["def quicksort(items):", "class Stack:", "for name in sorted("]


def main() -> None:
    target, drafter = sys.argv[1:]
    llm = LLM(
        model=target,
        tensor_parallel_size=1,
        dtype="auto",
        seed=0,
        max_model_len=256,
        max_num_seqs=8,
        max_logprobs=5,
        speculative_config={
            "method": "draft_model",
            "model": drafter,
            "num_speculative_tokens": 3,
        },
    )
    tokenizer = llm.get_tokenizer()
    print("vocabulary", len(tokenizer), tokenizer.eos_token_id)

    # Greedy, several prompts.
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    for output in outputs:
        completion = output.outputs[0]
        print("greedy", repr(output.prompt), repr(completion.text), completion.finish_reason)
        assert output.finished and completion.finished()

    # Sampling, with one set of parameters for each prompt.
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, seed=i, max_tokens=8)
        for i in range(len(PROMPTS))
    ]
    for output in llm.generate(PROMPTS, sampling):
        print("sampled", output.request_id, output.outputs[0].token_ids)

    # Several completions of a prompt.
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, presence_penalty=0.5)
    for completion in llm.generate(PROMPTS[0], params)[0].outputs:
        print("choice", completion.index, repr(completion.text))

    # Logprobs of the completion and of the prompt.
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[1], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        chosen = position[token_id]
        print("logprob", repr(chosen.decoded_token), round(chosen.logprob, 3), chosen.rank)
    print("cumulative", round(completion.cumulative_logprob or 0.0, 3))
    print("prompt logprobs", output.prompt_logprobs[0], len(output.prompt_logprobs))

    # Stop strings, stop tokens and special tokens.
    params = SamplingParams(
        temperature=0,
        max_tokens=None,
        stop=["\n"],
        stop_token_ids=[tokenizer.eos_token_id],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )
    completion = llm.generate(PROMPTS[1], params)[0].outputs[0]
    print("stopped", repr(completion.text), completion.finish_reason, repr(completion.stop_reason))

    # Prompts as mappings and as token ids.
    ids = tokenizer.encode(PROMPTS[2])
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=True, ignore_eos=True)
    prompts = [
        PROMPTS[2],
        {"prompt": PROMPTS[2]},
        {"prompt_token_ids": ids},
        TokensPrompt(prompt_token_ids=ids, prompt=PROMPTS[2]),
    ]
    for output in llm.generate(prompts, params):
        print("prompt", output.prompt, output.prompt_token_ids == ids, output.outputs[0].token_ids)

    # Chats.
    conversation = [
        {"role": "user", "content": "def add(a, b):"},
    ]
    params = SamplingParams(temperature=0, max_tokens=4)
    (answer,) = llm.chat(conversation, params, use_tqdm=False)
    both = llm.chat([conversation, conversation], sampling_params=params, use_tqdm=False)
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    print(
        "chat", answer.prompt == text, [o.outputs[0].text == answer.outputs[0].text for o in both]
    )

    # The parameters that the checkpoint recommends.
    defaults = llm.get_default_sampling_params()
    print("defaults", defaults.temperature, defaults.max_tokens, defaults.stop)
    print("cached", output.num_cached_tokens)


if __name__ == "__main__":
    main()
