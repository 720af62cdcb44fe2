# SPDX-License-Identifier: Apache-2.0
"""The tensors of a block drafter: canonical names, names in checkpoints, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .block_facts import BlockFacts
from .block_heads import head_tensors
from .block_layers import BlockLayers
from .block_selector import convolution_tensors, selector_tensors
from .decoder_tensors import PRE_NORMS, SANDWICH_NORMS, layer_tensors, tensor_spec
from .family import TensorSpec


def block_tensors(
    stack: BlockLayers, facts: BlockFacts, config: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Lists every tensor but `d2t`, in the order in which the model is filled."""
    sizes, drafter = stack.sizes, config["drafter"]
    hidden = (sizes.hidden, "hidden_size")
    vocab = (sizes.vocab, "vocab_size")
    num_aux = len(drafter["aux_layers"])
    rows = (drafter["draft_vocab_size"], "rows")
    columns = (num_aux * drafter["target_hidden_size"], f"{num_aux} * hidden size of the target")
    specs: list[TensorSpec] = []
    if facts.has_embedding:
        specs.append(tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden))
    fc, hidden_norm = facts.context
    specs.append(tensor_spec("fc.weight", fc, hidden, columns))
    specs.append(tensor_spec("hidden_norm.weight", hidden_norm, hidden))
    norms = SANDWICH_NORMS if stack.is_gemma4 else PRE_NORMS
    for i, (layer, entry) in enumerate(zip(stack.layers, config["layers"], strict=True)):
        name = f"layers.{i}."
        specs += layer_tensors(name, name, sizes, layer, entry, norms)
        if stack.is_gemma4:
            specs.append(tensor_spec(f"{name}scale", f"{name}layer_scalar", (1, "1")))
        specs += convolution_tensors(i, sizes, drafter)
    specs.append(tensor_spec("final_norm.weight", "norm.weight", hidden))
    if facts.draft_vocab_size is not None:
        specs.append(tensor_spec("lm_head.weight", "lm_head.weight", rows, hidden))
    specs += head_tensors(sizes, drafter, rows)
    specs += selector_tensors(sizes, facts, drafter)
    return tuple(specs)
