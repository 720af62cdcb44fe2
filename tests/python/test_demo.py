# SPDX-License-Identifier: Apache-2.0
"""The demos reach their acceptance lengths in the engine, on prompts from held-out files."""

from __future__ import annotations

import json
from pathlib import Path

import evaluate_demo
import evaluate_eagle3
import evaluate_gemma4
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


def test_eagle3_reaches_its_bar(texts: list[str]) -> None:
    target, draft_head = demo_paths("eagle3")
    run = evaluate_demo.run_engine(target, draft_head, texts, num_drafts=evaluate_eagle3.NUM_DRAFTS)
    length = acceptance(run.continuations, run.emitted).mean_acceptance_length
    assert length >= evaluate_eagle3.ACCEPTANCE_BAR


@pytest.mark.parametrize("position", ["last", "next"])
def test_gemma4_mtp_reaches_its_bar(texts: list[str], position: str) -> None:
    target, assistant = demo_paths("gemma4_mtp")
    run = evaluate_demo.run_engine(
        target,
        assistant,
        texts,
        num_drafts=evaluate_eagle3.NUM_DRAFTS,
        method="gemma4_mtp",
        x={"draft_position": position, "adaptive": False},
    )
    report = acceptance(run.continuations, run.emitted)
    assert report.mean_acceptance_length >= evaluate_gemma4.ACCEPTANCE_BAR
    assert report.counted_share >= evaluate_demo.COUNTED_BAR
    assert evaluate_demo.readable(texts, run.texts) >= evaluate_demo.TOKENIZES_BAR * len(texts)


def test_size() -> None:
    pair = demo_paths("draft_model")
    drafters = [demo_paths("eagle3")[1], *demo_paths("gemma4_mtp")]
    for folders in (pair, drafters):
        assert sum(f.stat().st_size for folder in folders for f in folder.iterdir()) <= MAX_BYTES
    first, second = ((folder / "tokenizer.json").read_bytes() for folder in pair)
    assert first == second == (drafters[1] / "tokenizer.json").read_bytes()


def test_tokenizer_is_stored_once() -> None:
    # In the sources; a wheel, which has no links, has a copy for each folder.
    demos = Path(__file__).parents[2] / "python" / "paceline" / "demo"
    files = list(demos.glob("*/tokenizer.json"))
    assert len(files) == 3
    assert [file for file in files if not file.is_symlink()] == [
        demos / "gemma3_code" / "tokenizer.json"
    ]
