# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import from vLLM's module `sampling_params`."""

from __future__ import annotations

import enum
from typing import Any

from paceline.sampling import SamplingParams
from paceline.structured_outputs import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


class RequestOutputKind(enum.Enum):
    """vLLM's kinds of outputs. `SamplingParams(output_kind=...)` accepts CUMULATIVE alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def __getattr__(name: str) -> Any:
    from paceline.vllm_names import missing_name

    raise missing_name(__name__, name)
