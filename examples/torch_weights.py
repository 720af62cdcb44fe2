# SPDX-License-Identifier: Apache-2.0
"""Weights that are in memory: a torch module becomes the target, is trained further, and updated.

pip install 'paceline[torch]' transformers
python examples/torch_weights.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline import LLM, SamplingParams

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def main() -> None:
    torch.manual_seed(0)
    policy: torch.nn.Module = AutoModelForCausalLM.from_config(CONFIG)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = [1, 2, 3]

    with LLM.from_module(policy) as llm:
        print("before:", llm.generate(prompt, params)[0].outputs[0].token_ids)

        with torch.no_grad():  # stands for a step of training
            for weight in policy.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        llm.update_weights(policy.state_dict())
        print("after: ", llm.generate(prompt, params)[0].outputs[0].token_ids)

        # Logits and hidden states come as arrays; on a GPU, on_device=True leaves them there.
        logits = torch.from_numpy(llm.logits(prompt))
        with torch.no_grad():
            expected = policy(torch.tensor([prompt])).logits[0]
        print(f"largest difference from torch: {(logits - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
