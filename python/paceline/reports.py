# SPDX-License-Identifier: Apache-2.0
"""What this version supports, and what a running engine reports about itself."""

from __future__ import annotations

from typing import Any

from paceline import _core
from paceline.config import (
    DRAFT_DRIVERS,
    DRAFT_POSITIONS,
    DRAFT_SAMPLE_METHODS,
    DTYPES,
    LATER_METHODS,
    LOAD_FORMATS,
    METHODS,
    REJECTION_SAMPLE_METHODS,
)
from paceline.device import usable_devices
from paceline.limits import (
    MAX_BLOCK_SIZE,
    MAX_DRAFT_PROPOSALS,
    MAX_NUM_SEQS,
    MAX_SAMPLES,
    MAX_SPECULATIVE_TOKENS,
)
from paceline.loader import ARCHITECTURES
from paceline.sampling import SamplingParams


def capabilities() -> dict[str, Any]:
    """Lists what this version supports, without a model; see `LLM.capabilities`."""
    return {
        "methods": list(METHODS),
        "later_methods": list(LATER_METHODS),
        "max_num_speculative_tokens": MAX_SPECULATIVE_TOKENS,
        "rejection_sample_methods": list(REJECTION_SAMPLE_METHODS),
        "draft_sample_methods": list(DRAFT_SAMPLE_METHODS),
        "max_draft_proposals": MAX_DRAFT_PROPOSALS,
        "draft_drivers": list(DRAFT_DRIVERS),
        "draft_positions": list(DRAFT_POSITIONS),
        "architectures": sorted(ARCHITECTURES),
        "devices": usable_devices(),
        "has_cuda": _core.build_info()["has_cuda"],
        "dtypes": list(DTYPES),
        "load_formats": list(LOAD_FORMATS),
        "block_sizes": {"min": 1, "max": MAX_BLOCK_SIZE},
        "max_num_seqs": {"min": 1, "max": MAX_NUM_SEQS},
        "max_n": MAX_SAMPLES,
        "sampling_parameters": list(SamplingParams.__dataclass_fields__),
    }
