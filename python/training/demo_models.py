# SPDX-License-Identifier: Apache-2.0
"""The two demo models: Gemma 3 configurations, their work per token, dropout, and saving."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

SLIDING, FULL = "sliding_attention", "full_attention"
DRAFTER_WORK_BAR = 0.10


def target_config() -> Gemma3TextConfig:
    """About 5.8 million parameters; every third of six layers attends to the whole context."""
    return _gemma3_config(
        hidden_size=256,
        intermediate_size=768,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


def drafter_config() -> Gemma3TextConfig:
    """Less than a tenth of the target's work per token; half of that is the output projection."""
    return _gemma3_config(
        hidden_size=64,
        intermediate_size=192,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )


def _gemma3_config(*, layer_types: list[str], head_dim: int, **sizes: int) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=64,
        max_position_embeddings=1024,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "default", "rope_theta": 100_000.0},
        },
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        **sizes,
    )


def work_per_token(config: Gemma3TextConfig, context: int = 0) -> int:
    """Multiply-adds for one token: all matrix weights, including the output projection.

    The attention over `context` cached tokens is added.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size = config.num_attention_heads * head_dim
    key_size = config.num_key_value_heads * head_dim
    per_layer = 2 * hidden * (query_size + key_size) + 3 * hidden * config.intermediate_size
    work = len(config.layer_types) * per_layer + hidden * config.vocab_size
    for kind in config.layer_types:
        visible = min(context, config.sliding_window) if kind == SLIDING else context
        work += 2 * query_size * visible
    return work


class _Dropout:
    """A forward hook that drops elements of a module's output while the module trains."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return nn.functional.dropout(output, self.probability, module.training)


def add_dropout(model: Gemma3ForCausalLM, probability: float) -> None:
    """Adds dropout to the embeddings and to the output of each block.

    The architecture has no dropout there; hooks do not change the saved model.
    """
    hook = _Dropout(probability)
    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(hook)
        layer.post_feedforward_layernorm.register_forward_hook(hook)


def rounded_to_bf16(model: Gemma3ForCausalLM) -> Gemma3ForCausalLM:
    """A copy in evaluation mode, with the weights as they are saved in bf16, stored in float32."""
    copy = Gemma3ForCausalLM(model.config)
    copy.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    return copy.to(model.device).eval().requires_grad_(False)


def save_checkpoint(model: Gemma3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a checkpoint in Hugging Face layout, with weights in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Gemma3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.pad_token_id = END_OF_TEXT_ID
    copy.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def load_checkpoint(folder: Path, device: torch.device) -> Gemma3ForCausalLM:
    """Loads saved weights for evaluation, computing in float32."""
    model = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval().requires_grad_(False)
