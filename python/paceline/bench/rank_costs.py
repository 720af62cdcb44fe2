# SPDX-License-Identifier: Apache-2.0
"""What a rank on a GPU of its own reads and computes, and its exchanges (docs/tensor-parallel.md).

Rows that the ranks do not share evenly count as if they did, so that the costs are those of the
rank that has least.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.bench.costs import Matrix, MatrixCosts
from paceline.bench.models import BenchModel

#: Seconds of an exchange of up to 32 KB between H200 GPUs of one host.
EXCHANGE_SECONDS: Final = 4.8e-6


@dataclass(frozen=True)
class RankPart(BenchModel):
    """The part of a model that one of several ranks reads and computes.

    Attributes:
        num_ranks: The number of ranks.
        is_whole: It is a drafter that every rank has whole, except for an lm_head of the target.
    """

    num_ranks: int
    is_whole: bool

    @property
    def config(self) -> dict[str, Any]:
        """The canonical description, with the heads of the rank."""
        config = self.loaded.config
        if self.is_whole:
            return config
        layers = [
            {**layer, "attention": _rank_attention(layer["attention"], self.num_ranks)}
            for layer in config["layers"]
        ]
        return {**config, "layers": layers}

    @functools.cached_property
    def costs(self) -> MatrixCosts:
        """Returns what the matrices cost, of each of them the rank's rows."""
        whole = BenchModel(self.name, self.loaded).costs
        return MatrixCosts(tuple(map(self._part, whole.matrices)))

    def _part(self, matrix: Matrix) -> Matrix:
        share = self._share(matrix)
        return replace(
            matrix,
            num_bytes=int(matrix.num_bytes * share),
            parameters=int(matrix.parameters * share),
        )

    def _share(self, matrix: Matrix) -> float:
        """The part of a matrix that the rank has."""
        if not matrix.is_shared:
            return 1.0
        if self.is_whole:
            return 1 / self.num_ranks if self._borrows(matrix) else 1.0
        if not matrix.name.endswith(".attn.qkv"):
            return 1 / self.num_ranks
        # Several ranks have the same key and value heads where there are more ranks than these.
        attention = self.loaded.config["layers"][int(matrix.name.split(".")[1])]["attention"]
        num_kv_heads = attention["num_kv_heads"]
        keys = (1 if attention.get("k_eq_v") else 2) * num_kv_heads
        of_keys = keys / (attention["num_qo_heads"] + keys)
        most = max(1 / self.num_ranks, 1 / num_kv_heads)
        return float((1 - of_keys) / self.num_ranks + of_keys * most)

    def _borrows(self, matrix: Matrix) -> bool:
        head = self.loaded.config.get("drafter")
        return matrix.name == "lm_head" and head is not None and not head["owns_lm_head"]

    @property
    def num_exchanges(self) -> int:
        """The exchanges of a pass that needs logits: the inputs of a layer's two last products and
        their outputs, the logits, and what a draft head makes of the target's hidden states.
        """
        matrices = BenchModel(self.name, self.loaded).costs.matrices
        if self.is_whole:
            return sum(map(self._borrows, matrices))
        # Where a dense MLP lies beside a mixture, both have such products.
        layers = self.loaded.config["layers"]
        outer = sum(m.is_shared and not m.name.startswith("layers.") for m in matrices)
        return outer + sum(6 if "mixture" in layer["mlp"] else 4 for layer in layers)


def rank_part(model: BenchModel, num_ranks: int, *, is_whole: bool) -> BenchModel:
    """The part of a model that one of several ranks has; with one rank the model itself."""
    if num_ranks == 1:
        return model
    return RankPart(model.name, model.loaded, num_ranks, is_whole)


def exchange_seconds(model: BenchModel) -> float:
    """The least seconds of a pass's exchanges; 0 for a model that no ranks share."""
    return EXCHANGE_SECONDS * model.num_exchanges if isinstance(model, RankPart) else 0.0


def _rank_attention(attention: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """The attention of a rank: its heads of queries, and of keys and values. Entries of latent and
    compressed attention and states of recurrent layers are whole on every rank.
    """
    found = dict(attention)
    for heads in ("num_qo_heads", "num_kv_heads"):
        if heads in found:
            found[heads] = max(found[heads] / num_ranks, 1)
    return found
