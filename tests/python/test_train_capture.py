# SPDX-License-Identifier: Apache-2.0
"""Training from a capture: its texts are those that the training generates itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.capture import Capture
from paceline.demo import find_demo
from paceline.outputs import CompletionOutput, RequestOutput

captured = pytest.importorskip("captured")
drafters = pytest.importorskip("drafters")
train_eagle3 = pytest.importorskip("train_eagle3")

PLAN: dict[str, Any] = {
    "shortest_prompt": 24, "longest_prompt": 24, "new_tokens": 16, "rounds": 1, "prompts": 12,
    "batch": 4, "windows": 0, "steps": 6, "draft_vocab": 64, "intermediate": 32,
}  # fmt: skip


def write(folder: Path, pairs: Sequence[tuple[list[int], list[int]]], model: str = "m") -> Path:
    """A capture of outputs that no engine has made."""
    with Capture(folder) as capture:
        capture.describe(model=model)
        for prompt, ids in pairs:
            output = RequestOutput(None, prompt, [CompletionOutput("", ids, None, "stop")], None)  # type: ignore[arg-type]
            capture.add(output, [[]], temperature=0.0, drafter=None)
    return folder


@pytest.mark.parametrize("seed", [1, 2])
def test_every_token_of_an_output_is_learned(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    pairs = [
        ([rng.randrange(90) for _ in range(rng.randrange(1, 40))],
         [rng.randrange(90) for _ in range(rng.choice([1, 7, 8, 9, 16, 61]))])
        for _ in range(40)
    ]  # fmt: skip
    capture = captured.Capture.load(write(tmp_path / "capture", pairs), 90)
    found = [(prompt.tolist(), output.tolist()) for prompt, output in capture.pairs]
    assert found == pairs
    texts = capture.texts(20, 8)
    assert texts.count == 8 and texts.ids.shape[1] == 28
    rows = iter(zip(texts.ids.tolist(), texts.first.tolist(), strict=True))
    for prompt, output in pairs:
        ids = prompt + output
        if len(ids) <= 8:
            continue
        learned: set[int] = set()
        while not learned or len(learned) < len(output) - 3:  # half of a stretch may be left
            row, first = next(rows)
            assert 0 < first <= 20
            stretch, before = row[first : first + 8], row[:first]
            (end,) = [
                end
                for end in range(8, len(ids) + 1)
                if ids[end - 8 : end] == stretch
                and ids[max(0, end - 8 - first) : end - 8] == before
            ][-1:]
            learned |= {i for i in range(end - 8, end) if i >= len(prompt)}
            assert row[first + 8 :] == [0] * (20 - first) and first == min(20, end - 8)
            if end == len(ids):
                break
    assert next(rows, None) is None, f"seed {seed}"


def test_the_texts_of_served_prompts_are_those_of_the_training(tmp_path: Path) -> None:
    target = find_demo("eagle3").target
    plan = train_eagle3.Plan(**PLAN)
    stream = torch.randint(1, 4096, (4000,), generator=torch.Generator().manual_seed(3)).tolist()
    own = drafters.Material.make(plan, target, stream, "cpu", train_eagle3.Clock.start(None))
    prompts = own.own.ids[:, : plan.longest_prompt].tolist()
    config = find_demo("eagle3").speculative_config()
    params = SamplingParams(temperature=0, max_tokens=plan.new_tokens, ignore_eos=True)
    with LLM(target, speculative_config=config, device="cpu", max_model_len=64) as llm:
        llm.start_capture(tmp_path / "capture")
        outputs = llm.generate(prompts, params)
    capture = captured.Capture.load(tmp_path / "capture", 4096)
    assert capture.model == str(target) and capture.num_steps > 0
    drafts = [output.metrics.speculative_decoding or {} for output in outputs]
    assert capture.num_steps == sum(one["num_spec_steps"] for one in drafts)
    assert capture.num_accepted == sum(one["num_accepted_draft_tokens"] for one in drafts)
    served = drafters.Material.from_capture(plan, target, capture, "cpu")
    # Requests are written as they end.
    assert sorted(served.own.ids.tolist()) == sorted(own.own.ids.tolist())
    assert served.own.first.tolist() == own.own.first.tolist()
    assert served.own.count == own.own.count and served.own.ids.shape == own.own.ids.shape

    # And they train.
    ids = train_eagle3.choose_vocabulary(served.own, served.windows.stream, plan.draft_vocab)
    counts = torch.bincount(served.own.learned().flatten(), minlength=4096)
    assert counts[ids].sum() == counts.topk(plan.draft_vocab).values.sum()
    hidden = served.target.config.hidden_size
    settings = train_eagle3.DraftHeadConfig(
        target_hidden=hidden, hidden=hidden, intermediate=plan.intermediate,
        draft_vocab=plan.draft_vocab,
        max_position=served.target.config.max_position_embeddings,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = train_eagle3.Trainer(plan, served.target, train_eagle3.DraftHead(settings, ids))
    before = trainer.loss(served.own).item()
    trainer.fit(served, None)
    assert trainer.loss(served.own).item() < before


def test_captures_that_cannot_be_trained_on(tmp_path: Path) -> None:
    def refuses(folder: Path, *parts: str) -> None:
        with pytest.raises(captured.CaptureError) as caught:
            captured.Capture.load(folder, 90).texts(20, 8)
        assert [part for part in parts if part not in str(caught.value)] == []

    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "no shard; allowed: one")
    refuses(write(tmp_path / "short", [([1, 2], [3, 4, 5, 6, 7])]), "smaller --new-tokens")
    refuses(write(tmp_path / "ids", [([1, 90], [3])]), "the token id 90; the target's are below 90")
    for model in ("a", "b"):
        write(tmp_path / "two", [([1], [2] * 20)], model)
    refuses(tmp_path / "two", "shards of 2 targets: a, b")
    other = tmp_path / "ids" / "capture-000007.safetensors"
    other.write_bytes((find_demo("eagle3").target / "model.safetensors").read_bytes())
    refuses(tmp_path / "ids", "token id 90")  # the first shard in order
    other.rename(tmp_path / "empty" / "capture-000000.safetensors")
    refuses(tmp_path / "empty", "is no shard of paceline.capture, version 1")
