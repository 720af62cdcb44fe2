# SPDX-License-Identifier: Apache-2.0
"""What a pass over a model reads and computes, by its canonical description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import _core


@dataclass(frozen=True)
class MatrixCosts:
    """The matrices of a model. Embedding lookups, norms and biases are left out.

    Attributes:
        shared_bytes: Bytes of the matrices that every pass reads: all but those of experts. The
            lm_head is one of them.
        row_parameters: Parameters that every row of a pass is multiplied with; of a mixture's
            experts those that a row chooses.
        logit_parameters: Parameters that rows whose logits are needed are multiplied with as well:
            those of the lm_head, own or shared.
        expert_bytes: Bytes of one expert of every mixture layer, added up; 0 without a mixture.
        num_experts: Experts of a mixture layer; 0 without a mixture.
    """

    shared_bytes: int
    row_parameters: int
    logit_parameters: int
    expert_bytes: int = 0
    num_experts: int = 0

    @property
    def parameters(self) -> int:
        """Parameters that a row whose logits are needed is multiplied with."""
        return self.row_parameters + self.logit_parameters

    @property
    def all_bytes(self) -> int:
        """Bytes of all matrices, those of all experts included."""
        return self.shared_bytes + self.num_experts * self.expert_bytes

    def pass_bytes(self, experts: float | None) -> int:
        """Bytes of the matrices that a pass reads.

        Args:
            experts: Experts of a mixture layer that have rows, on average; None without a mixture.
        """
        return self.shared_bytes + int((experts or 0.0) * self.expert_bytes)


def matrix_costs(config: Mapping[str, Any], weight_dtype: str, device: str = "cpu") -> MatrixCosts:
    """Adds up the matrices of a model.

    Args:
        config: A canonical description (docs/model-format.md).
        weight_dtype: The dtype of plain matrices: "float32" or "bfloat16".
        device: "cpu" or "cuda", which holds the weights.

    Raises:
        ValueError: The description is not allowed.
    """
    parameters = {False: 0, True: 0}
    shared_bytes = expert_bytes = num_experts = 0
    for matrix in _core.linear_costs(json.dumps(config), weight_dtype, device):
        uses = matrix["top_k"] if matrix["num_experts"] else 1
        parameters[matrix["is_for_logits"]] += uses * matrix["rows"] * matrix["cols"]
        if matrix["num_experts"]:
            # All mixture layers of the supported families have the same number of experts.
            num_experts = matrix["num_experts"]
            expert_bytes += matrix["bytes"]
        else:
            shared_bytes += matrix["bytes"]
    return MatrixCosts(shared_bytes, parameters[False], parameters[True], expert_bytes, num_experts)


def kv_bytes_read(config: Mapping[str, Any], context: float, item_bytes: int) -> float:
    """Computes the bytes of KV that one pass reads for one sequence.

    Args:
        config: A canonical description.
        context: Tokens before those that are computed.
        item_bytes: Bytes per element of the cache.

    Returns:
        The sum over layers of what min(context, window) tokens store, and of compressed entries:
        those that are attended to, and the keys of the indexer for all of them.
    """
    total = 0.0
    for layer in config["layers"]:
        attention = layer["attention"]
        elements = _visible(attention, context) * kv_elements(attention)
        entries = _entries(attention, context)
        elements += _attended_entries(attention, context) * attention.get("head_dim", 0)
        elements += entries * attention.get("indexer", {}).get("head_dim", 0)
        total += elements * item_bytes
    return total


def kv_elements(attention: Mapping[str, Any]) -> int:
    """Counts the elements that one token stores in a layer: keys and values, or an entry that is
    both. Tails and compressed entries are not counted.
    """
    if attention["kind"] == "compressed":
        return int(attention["head_dim"])
    if attention["kind"] == "latent":
        return int(attention["kv_lora_rank"] + attention["qk_rope_head_dim"])
    return int(2 * attention["num_kv_heads"] * attention["head_dim"])


def attention_flops(config: Mapping[str, Any], context: float) -> float:
    """Counts the operations of one row's attention scores and their sums over values.

    Args:
        config: A canonical description.
        context: Tokens that the row sees without windows.

    Returns:
        Multiply-adds times two, summed over layers.
    """
    total = 0.0
    for layer in config["layers"]:
        attention = layer["attention"]
        tokens = _visible(attention, context)
        tokens += _attended_entries(attention, context)
        indexer = attention.get("indexer")
        if indexer is not None:
            entries = _entries(attention, context)
            total += 2 * entries * indexer["num_heads"] * indexer["head_dim"]
        if attention["kind"] == "latent":  # an entry is a key, and its latent is the value
            widths = 2 * attention["kv_lora_rank"] + attention["qk_rope_head_dim"]
        else:
            widths = 2 * attention["head_dim"]
        total += 2 * tokens * attention["num_qo_heads"] * widths
    return total


def _entries(attention: Mapping[str, Any], context: float) -> float:
    """The compressed entries that a row can see."""
    compressor = attention.get("compressor")
    return 0.0 if compressor is None else context // compressor["tokens_per_entry"]


def _attended_entries(attention: Mapping[str, Any], context: float) -> float:
    """Those that it attends to."""
    entries = _entries(attention, context)
    indexer = attention.get("indexer")
    return entries if indexer is None else min(entries, indexer["top_k"])


def _visible(attention: Mapping[str, Any], context: float) -> float:
    window = float(attention.get("window", 0))  # latent attention sees all entries
    return min(context, window) if window > 0 else context
