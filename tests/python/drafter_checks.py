# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of every kind of drafter: the outputs of an engine for tiny models, and both
ways to load a pair."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams, _core
from paceline.loader import load_checkpoint, load_drafter
from paceline.loader.convert import convert
from tiny_models import TinySpec, make

ENGINE: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_bytes": 16 << 20, "show_progress": False}
PROMPTS = [[5, 17, 90, 3], [44] * 7, list(range(2, 40)), [9]]


def outputs(llm: LLM) -> list[list[int]]:
    """The outputs at two temperatures."""
    tokens = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=7)
        tokens += [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    return tokens


@functools.cache
def plain_outputs(target: TinySpec) -> list[list[int]]:
    """The outputs without a drafter."""
    with LLM(make(target), **ENGINE) as llm:
        return outputs(llm)


def check_both_ways(target: Path, drafter: Path, out: Path) -> None:
    """Checks that a drafter has the same bytes from its checkpoint and from a converted pair."""
    folder = _core.load_model_folder(str(convert(target, out, drafter, progress=False)))
    assert folder.draft is not None
    loaded = load_drafter(drafter, load_checkpoint(target, progress=False), progress=False)
    assert bytes(folder.draft.arena()) == bytes(loaded.model.arena())
