# SPDX-License-Identifier: Apache-2.0
"""An engine for tiny models, and what it says."""

from __future__ import annotations

from typing import Any

from paceline import LLM, SamplingParams

ENGINE: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_bytes": 16 << 20, "show_progress": False}
PROMPTS = [[5, 17, 90, 3], [44] * 7, list(range(2, 40)), [9]]


def outputs(llm: LLM) -> list[list[int]]:
    """What two temperatures give."""
    tokens = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=7)
        tokens += [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    return tokens
