# SPDX-License-Identifier: Apache-2.0
"""Drafting of a bench, and the work of whole models, summed up from what it counts of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.bench.costs import MatrixCosts, layer_attention_flops, layer_kv_bytes
from paceline.bench.floor import Work, iteration_passes, work_of
from paceline.bench.models import BenchModel
from paceline.bench.workload import Workload
from paceline.speculative_config import SpeculativeConfig


def drafting(k: int, **changes: Any) -> SpeculativeConfig:
    """Drafting of always k tokens, by default with a draft model."""
    return SpeculativeConfig(
        **{"model": "a drafter", "num_speculative_tokens": k, "adaptive": False} | changes
    )


def row_parameters(costs: MatrixCosts) -> int:
    """Parameters that every row of a pass is multiplied with; of a mixture's experts those that a
    row chooses.
    """
    return sum(matrix.parameters for matrix in costs.matrices if not matrix.is_for_logits)


def logit_parameters(costs: MatrixCosts) -> int:
    """Parameters that only rows whose logits are needed are multiplied with."""
    return sum(matrix.parameters for matrix in costs.matrices if matrix.is_for_logits)


def all_parameters(costs: MatrixCosts) -> int:
    """Parameters that a row whose logits are needed is multiplied with."""
    return row_parameters(costs) + logit_parameters(costs)


def pass_bytes(costs: MatrixCosts, experts: float) -> int:
    """Bytes of the matrices that a pass reads if this many experts of each layer have rows."""
    return costs.shared_bytes + int(experts * costs.expert_bytes)


def kv_bytes_read(config: Mapping[str, Any], context: float, item_bytes: int) -> float:
    """Bytes of KV that one pass reads for one sequence with `context` tokens before it."""
    return sum(
        layer_kv_bytes(layer["attention"], context, item_bytes) for layer in config["layers"]
    )


def attention_flops(config: Mapping[str, Any], context: float) -> float:
    """Operations of one row's attention in all layers."""
    return sum(layer_attention_flops(layer["attention"], context) for layer in config["layers"])


def iteration_work(
    target: BenchModel, draft: BenchModel | None, k: int, workload: Workload
) -> Work:
    """The work of an iteration of models without a mixture of experts."""
    return work_of(iteration_passes(target, draft, k, workload))
