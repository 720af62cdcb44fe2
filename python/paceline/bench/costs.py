# SPDX-License-Identifier: Apache-2.0
"""What a pass over a model reads and computes, by its canonical description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline import _core

_RECURRENT: Final = "gated_delta"


@dataclass(frozen=True)
class Matrix:
    """One matrix of a model, whose product is an operation of a pass.

    Attributes:
        name: For example "layers.0.attn.qkv".
        num_bytes: Bytes of the matrix; of one expert in a mixture.
        parameters: Parameters that a row is multiplied with; in a mixture those of the experts that
            it chooses.
        is_for_logits: Whether only rows whose logits are needed are multiplied with it.
        num_experts: Experts of a mixture layer; 0 outside of a mixture.
        is_shared: Whether ranks share its rows, and each does not have all of it.
    """

    name: str
    num_bytes: int
    parameters: int
    is_for_logits: bool = False
    num_experts: int = 0
    is_shared: bool = False


@dataclass(frozen=True)
class MatrixCosts:
    """The matrices of a model. Embedding lookups, norms and biases are left out.

    Attributes:
        matrices: Every matrix whose product a pass computes, in the order of the description.
    """

    matrices: tuple[Matrix, ...]

    @property
    def shared_bytes(self) -> int:
        """Bytes of the matrices that every pass reads: all but those of experts. The lm_head is one
        of them.
        """
        return sum(matrix.num_bytes for matrix in self.matrices if not matrix.num_experts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of every mixture layer, added up; 0 without a mixture."""
        return sum(matrix.num_bytes for matrix in self.matrices if matrix.num_experts)

    @property
    def num_experts(self) -> int:
        """Experts of a mixture layer; 0 without a mixture. All mixture layers of the supported
        families have the same number of them.
        """
        return max((matrix.num_experts for matrix in self.matrices), default=0)

    @property
    def all_bytes(self) -> int:
        """Bytes of all matrices, those of all experts included."""
        return self.shared_bytes + self.num_experts * self.expert_bytes


def matrix_costs(config: Mapping[str, Any], weight_dtype: str, device: str = "cpu") -> MatrixCosts:
    """Lists the matrices of a model.

    Args:
        config: A canonical description (docs/model-format.md).
        weight_dtype: The dtype of plain matrices: "float32" or "bfloat16".
        device: "cpu" or "cuda", which holds the weights.

    Raises:
        ValueError: The description is not allowed.
    """
    return MatrixCosts(
        tuple(
            Matrix(
                name=entry["name"],
                num_bytes=entry["bytes"],
                parameters=(entry["top_k"] if entry["num_experts"] else 1)
                * entry["rows"]
                * entry["cols"],
                is_for_logits=entry["is_for_logits"],
                num_experts=entry["num_experts"],
                is_shared=entry["shard_axis"] == "rows",
            )
            for entry in _core.linear_costs(json.dumps(config), weight_dtype, device)
        )
    )


def layer_kv_bytes(attention: Mapping[str, Any], context: float, item_bytes: int) -> float:
    """Computes the bytes of KV that one pass reads in a layer for one sequence.

    Args:
        attention: Of the layer, in a canonical description.
        context: Tokens before those that are computed.
        item_bytes: Bytes per element of the cache.

    Returns:
        The bytes of what min(context, window) tokens store, and of compressed entries: those that
        are attended to, and the keys of the indexer for all of them. Of a recurrent layer those of
        its state, which is float32, whatever the context.
    """
    if attention["kind"] == _RECURRENT:
        return 4.0 * _state_elements(attention)
    elements = _visible(attention, context) * kv_elements(attention)
    elements += _attended_entries(attention, context) * attention.get("head_dim", 0)
    elements += _entries(attention, context) * attention.get("indexer", {}).get("head_dim", 0)
    return float(elements * item_bytes)


def kv_elements(attention: Mapping[str, Any]) -> int:
    """Counts the elements that one token stores in a layer: keys and values, or an entry that is
    both. Tails and compressed entries are not counted.
    """
    if attention["kind"] == "compressed":
        return int(attention["head_dim"])
    if attention["kind"] == "latent":
        return int(attention["kv_lora_rank"] + attention["qk_rope_head_dim"])
    return int(2 * attention["num_kv_heads"] * attention["head_dim"])


def layer_attention_flops(attention: Mapping[str, Any], context: float) -> float:
    """Counts the operations of one row's attention scores and their sums over values in a layer.

    Args:
        attention: Of the layer, in a canonical description.
        context: Tokens that the row sees without windows.

    Returns:
        Multiply-adds times two.
    """
    if attention["kind"] == _RECURRENT:
        # The decay; a product with the key, an outer product and one with the query.
        return 7.0 * _state_elements(attention)
    total = 0.0
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
    return float(total + 2 * tokens * attention["num_qo_heads"] * widths)


def _state_elements(attention: Mapping[str, Any]) -> int:
    """The elements of a recurrent layer's state."""
    dims = attention["key_head_dim"] * attention["value_head_dim"]
    return int(attention["num_value_heads"] * dims)


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
