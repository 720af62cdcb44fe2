# SPDX-License-Identifier: Apache-2.0
"""Tiny block drafters of every kind for one target, for the tests of engines and folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import block_models
from block_models import BlockSpec
from paceline import SamplingParams
from paceline.loader import open_checkpoint, open_drafter
from tiny_models import TinySpec, make

TARGET = TinySpec("qwen3", seed=40, num_layers=8)
SPECS = {
    "z-lab": BlockSpec("z-lab", window=6, num_layers=3),
    "deepseek": BlockSpec("deepseek", markov_rank=8),
    "speculators": BlockSpec("speculators", window=6, markov_rank=8, draft_vocab_size=64),
    "gated": BlockSpec("deepseek", markov_rank=8, markov_type="gated", confidence="token"),
    "rnn": BlockSpec(
        "speculators", window=6, markov_rank=8, markov_type="rnn", from_anchor=False,
        confidence="hidden",
    ),
    "dflash2": BlockSpec(
        "z-lab", window=6, is_causal=False, all_slide=True, taps=2, selector_top=9, multiplier=0.5,
    ),
    "dflash2 speculators": BlockSpec("speculators", window=6, taps=3, codebook_suffix=".weight"),
    "assistant": BlockSpec("assistant", window=6, all_slide=True),
}  # fmt: skip


def drafter(layout: str, out: Path, **changes: Any) -> Path:
    return block_models.write(replace(SPECS[layout], **changes), make(TARGET), out / "drafter")


def opened(path: Path) -> Any:
    return open_drafter(path, open_checkpoint(make(TARGET)).as_target())


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=24)
