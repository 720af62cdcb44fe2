# SPDX-License-Identifier: Apache-2.0
"""Receipts of random requests all verify, and edited ones are all refused at the right position.

The receipts come from engines with drafters of several kinds, pools so small that sequences are
preempted, prefix hits, several threads and two replicas; the replay is a plain engine with another
number of threads. Temperatures, truncation, penalties, grammars, stop strings and n are random.
There are at least 1,000 receipts and 1,000 edits, and 150 models with a flipped bit;
PACELINE_TEST_LEVEL=3 has 1,000 of these, too. PACELINE_SEED replaces the seed; failures print it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from paceline import LLM
from paceline.receipts.replay import Inputs, Verdict, verify
from paceline.replicas.replicated_llm import start_replicas
from receipt_jobs import Asked, first_difference, flip_weight, hostile, random_edit, run, target_dir

SEED = int(os.environ.get("PACELINE_SEED", "20261128"))
LEVEL = int(os.environ.get("PACELINE_TEST_LEVEL", "1"))
NUM_RECEIPTS = 1000
NUM_EDITS = 1000
NUM_WEIGHTS = 1000 if LEVEL >= 3 else 150

#: Kinds of engines: how each drafts, and its options.
ENGINES: dict[str, dict[str, Any]] = {
    "draft_model": {"num_threads": 1, "max_num_seqs": 4},
    "preempted": {"num_threads": 2, "max_num_seqs": 16, "kv_cache_bytes": 160 << 10},
    "ngram": {"num_threads": 1, "max_num_seqs": 32},
    "plain": {"num_threads": 2, "max_num_seqs": 16, "prefill_chunk_size": 16},
    "replicas": {"num_threads": 1, "max_num_seqs": 8},
}
MAX_MODEL_LEN = 96


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps digests in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft") / "draft"
    return tiny_models.perturbed_copy(target_dir(), out, noise=0.03, seed=1)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    """Replays, with another number of threads than most engines."""
    with LLM(target_dir(), max_num_seqs=64, num_threads=2, device="cpu") as llm:
        yield llm


def start(kind: str, draft: Path) -> LLM:
    config: dict[str, Any] | None = {"model": str(draft), "num_speculative_tokens": 4}
    if kind == "ngram":
        config = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 3}
    elif kind == "plain":
        config = None
    arguments = ENGINES[kind] | {
        "model": str(target_dir()),
        "speculative_config": config,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 8,
        "seed": SEED % 1000,
        "device": "cpu",
        "show_progress": False,
    }
    if kind == "replicas":
        return start_replicas(2, arguments, log_level="WARNING")
    return LLM(**arguments)


@pytest.fixture(scope="module")
def asked(draft_dir: Path) -> list[Asked]:
    """Receipts of all engines."""
    found: list[Asked] = []
    for kind in ENGINES:
        with start(kind, draft_dir) as llm:
            of_kind: list[Asked] = []
            rng = random.Random(f"{SEED} {kind}")
            while len(of_kind) < NUM_RECEIPTS // len(ENGINES):
                of_kind += run(llm, rng, 40)
            stats = llm.stats()
        if kind == "preempted":
            assert stats["num_preemptions"] > 0
        if kind != "plain":
            assert stats["speculative_decoding"]["num_accepted_draft_tokens"] > 0
        assert stats["prefix_cache"]["num_hit_tokens"] > 0, kind
        found += of_kind
    return found


def verdicts_of(llm: LLM, receipts: list[Any], beside: list[Any], **options: Any) -> list[Verdict]:
    named = [(str(index), receipt) for index, receipt in enumerate(receipts)]
    return verify(llm, named, inputs=Inputs(beside), **options)


def test_receipts_of_all_engines_verify(plain: LLM, asked: list[Asked]) -> None:
    beside = [one.inputs for one in asked]
    verdicts = verdicts_of(plain, [one.receipt for one in asked], beside)
    wrong = [str(verdict) for verdict in verdicts if verdict.verdict != "equal" or verdict.notes]
    assert not wrong, f"seed {SEED}: {wrong[:3]}"
    assert len(verdicts) >= NUM_RECEIPTS
    reasons = Counter(one.receipt["finish_reason"] for one in asked)
    assert min(reasons["stop"], reasons["length"]) > len(asked) / 20
    assert sum(one.params.structured_outputs is not None for one in asked) > len(asked) / 20


def test_edited_receipts_are_found_at_the_right_position(plain: LLM, asked: list[Asked]) -> None:
    rng = random.Random(f"{SEED} edits")
    chosen = [rng.choice(asked) for _ in range(NUM_EDITS)]
    edits = [random_edit(rng, one) for one in chosen]
    beside = [one.inputs for one in chosen]
    verdicts = verdicts_of(plain, [edit.receipt for edit in edits], beside)
    # What the requests with the edited seeds and parameters generate.
    outputs = plain.generate([edit.prompt for edit in edits], [edit.params for edit in edits])
    seen: Counter[str] = Counter()
    for edit, verdict, output in zip(edits, verdicts, outputs, strict=True):
        name = f"seed {SEED}: {edit.kind} of {edit.receipt}: {verdict}"
        (one,) = output.outputs
        tokens = one.token_ids
        expected = first_difference(edit, tokens, one.finish_reason)
        assert verdict.position == expected, name
        assert verdict.edited == edit.edited, name
        if expected is not None:
            assert verdict.verdict == "different", name
            ours = edit.receipt["tokens"]
            assert verdict.receipt_token == (ours[expected] if expected < len(ours) else None)
            assert verdict.replay_token == (tokens[expected] if expected < len(tokens) else None)
            has_margin = None not in (verdict.receipt_token, verdict.replay_token)
            assert (verdict.margin is not None) == has_margin, name
        else:
            # Someone has made the receipt that the edited request would have had.
            assert verdict.verdict == ("equal" if edit.edited is None else "edited"), name
            assert edit.kind not in ("token", "cut", "added"), name
        seen[edit.kind] += 1
    assert set(seen) == {"token", "cut", "added", "seed", "temperature", "penalty"}


def test_hostile_receipts_have_one_verdict_each(plain: LLM, asked: list[Asked]) -> None:
    """Nothing that a receipt says ends the verification of the others."""
    rng = random.Random(f"{SEED} hostile")
    whole = [one.receipt for one in asked if "inputs" in one.receipt]
    seen: Counter[str] = Counter()
    for _ in range(NUM_EDITS // 50):
        receipts = [hostile(rng, rng.choice(whole)) for _ in range(49)]
        verdicts = verdicts_of(plain, [*receipts, whole[0]], [])
        assert verdicts[-1].verdict == "equal", f"seed {SEED}: {verdicts[-1]}"
        for receipt, verdict in zip(receipts, verdicts, strict=False):
            seen[verdict.verdict] += 1
            error = verdict.error or ""
            assert (verdict.verdict == "refused") == (len(error) > 10), f"{verdict}: {receipt}"
            assert "\n" not in str(verdict)
    assert seen["refused"] > NUM_EDITS / 2
    assert min(seen["equal"], seen["different"], seen["edited"]) > 0


def test_one_bit_of_the_weights_is_another_model(asked: list[Asked], tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} weights")
    folder = tiny_models.copy_checkpoint(target_dir(), tmp_path / "model")
    original = (folder / "model.safetensors").read_bytes()
    num_different = 0
    for _ in range(NUM_WEIGHTS):
        one = rng.choice(asked)
        (folder / "model.safetensors").write_bytes(original)
        flip_weight(folder, rng)
        with LLM(folder, max_num_seqs=2, device="cpu", show_progress=False) as llm:
            (verdict,) = verdicts_of(llm, [one.receipt], [one.inputs])
            assert verdict.verdict == "refused", f"seed {SEED}: {verdict}"
            assert "another model: its digest of the weights" in str(verdict.error)
            (verdict,) = verdicts_of(llm, [one.receipt], [one.inputs], any_model=True)
            params = one.alone(max_tokens=len(one.tokens))
            tokens = llm.generate([one.prompt], params)[0].outputs[0].token_ids
        pairs = enumerate(zip(one.tokens, tokens, strict=False))
        differing = next((i for i, (a, b) in pairs if a != b), None)
        if differing is None and verdict.position is not None:
            differing = min(len(one.tokens), len(tokens))
        assert verdict.position == differing, f"seed {SEED}: {verdict}"
        assert any(note.startswith("the digest of the weights of") for note in verdict.notes)
        num_different += differing is not None
    assert num_different > 0
