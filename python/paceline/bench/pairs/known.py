# SPDX-License-Identifier: Apache-2.0
"""The pairs of the bench, and the acceptance lengths that dummy weights are given.

The lengths were published for vLLM, in a pull request that was merged on 5 May 2026: three draft
tokens, prompts of mt-bench.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: k of every pair.
NUM_SPECULATIVE_TOKENS: Final = 3
#: The published temperatures and concurrencies, which are the default of the bench.
TEMPERATURES: Final = (0, 1)
CONCURRENCIES: Final = (1, 16, 64)
#: For pairs without a published acceptance length.
ASSUMED_LENGTH: Final = 2.3


@dataclass(frozen=True)
class Pair:
    """A target and its drafter.

    Attributes:
        name: Its name in options and tables.
        target: The target: a folder, a model of the hub, or the name of a configuration.
        drafter: The drafter, in the same way; the target itself for its MTP layer.
        method: As in `SpeculativeConfig`; None = that of the drafter's configuration.
        is_dummy: Whether the weights are dummies.
    """

    name: str
    target: str
    drafter: str
    method: str | None = None
    is_dummy: bool = True


@dataclass(frozen=True)
class ImposedLength:
    """An acceptance length that the bench imposes.

    Attributes:
        tokens: Tokens of an iteration, the bonus token included.
        source: Where it is from: "published for T=0, c=16", or "assumed".
    """

    tokens: float
    source: str

    @property
    def acceptance(self) -> str:
        """Returns "published" or "assumed"."""
        return self.source.partition(" ")[0]


#: In the order of the table.
PAIRS: Final = {
    pair.name: pair
    for pair in (
        Pair("glm-4.7-flash+mtp", "glm-4.7-flash", "glm-4.7-flash", "mtp"),
        Pair("gpt-oss-20b+eagle3", "gpt-oss-20b", "gpt-oss-20b-eagle3", "eagle3"),
        Pair("llama-3-8b+eagle", "llama-3-8b", "llama-3-8b-eagle", "eagle"),
        Pair("qwen3-8b+eagle3", "qwen3-8b", "qwen3-8b-eagle3", "eagle3"),
        Pair("gemma3-27b+270m", "gemma3-27b", "gemma3-270m", "draft_model"),
        Pair("gpt-oss-120b+20b", "gpt-oss-120b", "gpt-oss-20b", "draft_model"),
        Pair("gemma4-12b+assistant", "gemma4-12b", "gemma4-12b-assistant", "gemma4_mtp"),
        Pair("qwen3-30b-a3b+eagle3", "qwen3-30b-a3b", "qwen3-30b-a3b-eagle3", "eagle3"),
        Pair(
            "gemma4-26b-a4b+assistant", "gemma4-26b-a4b", "gemma4-26b-a4b-assistant", "gemma4_mtp"
        ),
        Pair("qwen3.5-9b+mtp", "qwen3.5-9b", "qwen3.5-9b", "mtp"),
        Pair("qwen3.8-27b+mtp", "qwen3.8-27b", "qwen3.8-27b", "mtp"),
        Pair("qwen3.6-35b-a3b+mtp", "qwen3.6-35b-a3b", "qwen3.6-35b-a3b", "mtp"),
        Pair("qwen3-8b+dflash2", "qwen3-8b", "qwen3-8b-dflash2", "dflash2"),
    )
}

# Of a pair: for each of TEMPERATURES the lengths at CONCURRENCIES.
_PUBLISHED: Final[Mapping[str, Mapping[int, tuple[float, float, float]]]] = {
    "glm-4.7-flash+mtp": {0: (2.19, 2.17, 2.16), 1: (2.07, 2.02, 2.03)},
    "gpt-oss-20b+eagle3": {0: (2.61, 2.60, 2.61), 1: (2.14, 2.13, 2.11)},
    "llama-3-8b+eagle": {0: (1.89, 2.00, 1.99), 1: (1.91, 1.99, 1.94)},
    "qwen3-8b+eagle3": {0: (2.34, 2.34, 2.31), 1: (2.29, 2.28, 2.27)},
}


def imposed_length(name: str, temperature: float, concurrency: int) -> ImposedLength:
    """Returns the acceptance length to impose on a pair with dummy weights.

    Args:
        name: The pair.
        temperature: Every temperature above 0 gets the length published for 1.
        concurrency: Gets the length published for the largest concurrency that is not above it.
    """
    lengths = _PUBLISHED.get(name)
    if lengths is None:
        return ImposedLength(ASSUMED_LENGTH, "assumed")
    published_temperature = int(temperature > 0)
    rank = max(rank for rank, c in enumerate(CONCURRENCIES) if c <= concurrency)
    return ImposedLength(
        lengths[published_temperature][rank],
        f"published for T={published_temperature}, c={CONCURRENCIES[rank]}",
    )
