# SPDX-License-Identifier: Apache-2.0
"""Writes an EAGLE-3 draft head of a bench configuration with random weights.

    make_draft_head.py gpt-oss-20b-eagle3 FOLDER

The layout is SafeAILab's, which every engine with EAGLE-3 reads: one layer, `midlayer`, an LM head
of the first token ids, and the embeddings of the target. Needs torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from make_checkpoint import Entry, named_config, random_entry, write_file

#: The hidden states of the target that a draft head reads.
NUM_STATES = 3


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the bench in SafeAILab's layout.

    Raises:
        ValueError: It is none of an EAGLE-3 draft head in the layout of `speculators`.
    """
    if config.get("speculators_model_type") != "eagle3":
        raise ValueError("the configuration is none of an EAGLE-3 draft head of speculators")
    layer: dict[str, Any] = config["transformer_layer_config"]
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": config["draft_vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
    }


def head_entries(config: Mapping[str, Any]) -> list[Entry]:
    """The tensors of a draft head with such a configuration."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    num_ids, num_draft_ids = config["vocab_size"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, NUM_STATES * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (width, hidden),
        "midlayer.mlp.up_proj.weight": (width, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, width),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_draft_ids, hidden),
    }
    # Draft ids are the first ids of the target: each is 0 away from its own.
    return [
        *(random_entry(name, "BF16", shape) for name, shape in shapes.items()),
        Entry(
            "d2t", "I64", (num_draft_ids,), partial(torch.zeros, num_draft_ids, dtype=torch.int64)
        ),
        Entry("t2d", "BOOL", (num_ids,), lambda: torch.arange(num_ids) < num_draft_ids),
    ]


def write_head(config: Mapping[str, Any], folder: Path) -> None:
    """Writes config.json and model.safetensors of a draft head into `folder`.

    Args:
        config: A configuration of the bench, in the layout of `speculators`.
        folder: The folder, which need not exist.
    """
    flat = flat_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(flat))
    write_file(folder / "model.safetensors", head_entries(flat))


def main() -> None:
    """Reads the command line and writes the draft head."""
    if len(sys.argv) != 3:
        sys.exit("usage: make_draft_head.py CONFIGURATION FOLDER")
    try:
        write_head(named_config(sys.argv[1]), Path(sys.argv[2]))
    except ValueError as error:
        sys.exit(f"make_draft_head.py: {error}")


if __name__ == "__main__":
    main()
