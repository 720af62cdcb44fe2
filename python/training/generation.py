# SPDX-License-Identifier: Apache-2.0
"""Batched greedy generation and next-token predictions, in plain transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from corpus import END_OF_TEXT_ID
from torch import Tensor
from transformers import DynamicCache, Gemma3ForCausalLM


@torch.no_grad()
def greedy(model: Gemma3ForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """Continues prompts of one length, `[batch, length]`; returns the new tokens,
    `[batch, new_tokens]`."""
    cache = DynamicCache(config=model.config)
    inputs, generated = prompts, []
    for _ in range(new_tokens):
        logits = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        inputs = logits[:, -1].argmax(-1, keepdim=True)
        generated.append(inputs)
    return torch.cat(generated, dim=1)


@torch.no_grad()
def greedy_each(
    model: Gemma3ForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int = 25
) -> list[list[int]]:
    """Continues prompts of any length; a continuation ends after its first END_OF_TEXT."""
    continuations = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        longest = max(len(prompt) for prompt in part)
        padding = [longest - len(prompt) for prompt in part]
        ids = [[END_OF_TEXT_ID] * pad + [*row] for pad, row in zip(padding, part, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        output = model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        continuations.extend(until_end(row) for row in output[:, longest:].tolist())
    return continuations


def until_end(ids: list[int]) -> list[int]:
    """Token ids up to the first END_OF_TEXT, if there is one."""
    return ids[: ids.index(END_OF_TEXT_ID) + 1] if END_OF_TEXT_ID in ids else ids


@torch.no_grad()
def predictions(
    model: Gemma3ForCausalLM, prompt: Sequence[int], continuation: Sequence[int]
) -> list[int]:
    """The model's most likely token at each position of the continuation."""
    ids = torch.tensor([[*prompt, *continuation]], device=model.device)
    logits = model(ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
