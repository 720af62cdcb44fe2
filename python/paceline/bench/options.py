# SPDX-License-Identifier: Apache-2.0
"""What the texts of `paceline bench` and its parts share: the names that options may have."""

from __future__ import annotations

from typing import Final

from paceline.bench.arrivals import DEFAULT_NUM_PROMPTS
from paceline.bench.compare.reading import FACTS
from paceline.bench.lengths import DEFAULT_LENGTHS
from paceline.bench.models import config_names
from paceline.bench.pairs.known import ASSUMED_LENGTH, NUM_SPECULATIVE_TOKENS, PAIRS
from paceline.bench.plot import PLOT_NEEDS
from paceline.bench.serve.client import CHATS, COMPLETIONS
from paceline.bench.serve.datasets import DATASETS
from paceline.bench.serving import GOODPUT_NAMES
from paceline.speculative_fields import (
    DRAFT_DRIVERS,
    METHODS,
    MODEL_FREE_METHODS,
    REJECTION_SAMPLE_METHODS,
)

#: Keys of --sampling: the parameters that cost time.
SAMPLING_KEYS: Final = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip
#: Methods whose drafter is a model of its own.
PAIR_METHODS: Final = tuple(method for method in METHODS if method not in MODEL_FREE_METHODS)


def texts() -> dict[str, object]:
    """The values of the names in the texts of flags.toml that only benches have."""
    return {
        # Acceptance methods that measure acceptance.
        "ACCEPT_METHODS": [m for m in REJECTION_SAMPLE_METHODS if m != "synthetic"],
        "ASSUMED_LENGTH": str(ASSUMED_LENGTH),
        "CHATS": CHATS,
        "COMPLETIONS": COMPLETIONS,
        "CONFIG_NAMES": config_names(),
        "DATASETS": DATASETS,
        "DEFAULT_LENGTHS": DEFAULT_LENGTHS,
        "DEFAULT_NUM_PROMPTS": DEFAULT_NUM_PROMPTS,
        "DRAFT_DRIVERS": DRAFT_DRIVERS,
        "ENDPOINTS": (COMPLETIONS, CHATS),
        "FACTS": FACTS,
        "GOODPUT_NAMES": GOODPUT_NAMES,
        "PAIRS": PAIRS,
        "PAIRS_K": NUM_SPECULATIVE_TOKENS,
        "PAIR_METHODS": PAIR_METHODS,
        "PLOT_NEEDS": PLOT_NEEDS,
        "SAMPLING_KEYS": SAMPLING_KEYS,
    }
