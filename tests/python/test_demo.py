# SPDX-License-Identifier: Apache-2.0
"""The demo pair reaches its bars in the engine, on prompts from held-out files."""

from __future__ import annotations

import json
from pathlib import Path

import evaluate_demo
import pytest
from measures import acceptance

from paceline.demo import demo_paths

PROMPTS = Path(__file__).parents[1] / "support" / "demo_prompts.json"
MAX_BYTES = 16 * 10**6


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [row["text"] for row in json.loads(PROMPTS.read_text())]


def test_bars(texts: list[str]) -> None:
    assert len(texts) == 100
    target, draft = demo_paths("draft_model")
    run = evaluate_demo.run_engine(target, draft, texts)
    report = acceptance(run.continuations, run.emitted)
    assert report.counted_share >= evaluate_demo.COUNTED_BAR
    assert report.mean_acceptance_length >= evaluate_demo.ACCEPTANCE_BAR
    assert evaluate_demo.readable(texts, run.texts) >= evaluate_demo.TOKENIZES_BAR * len(texts)


def test_size() -> None:
    folders = demo_paths("draft_model")
    assert sum(f.stat().st_size for folder in folders for f in folder.iterdir()) <= MAX_BYTES
    first, second = ((folder / "tokenizer.json").read_bytes() for folder in folders)
    assert first == second
