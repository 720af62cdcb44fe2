# SPDX-License-Identifier: Apache-2.0
"""Configurations of Hugging Face models with required keys only, for tests to change."""

from __future__ import annotations

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "rms_norm_eps": 1e-6}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 7,
    "sliding_window": 512,
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
# Published files have every size, though transformers has defaults.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
}
GLM = {"architectures": ["Glm4MoeLiteForCausalLM"], "num_hidden_layers": 3}
DEEPSEEK_V3 = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# As Qwen3 documents it, and as GPT-OSS has it.
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
