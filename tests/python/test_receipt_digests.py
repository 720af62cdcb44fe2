# SPDX-License-Identifier: Apache-2.0
"""The digests of weights in receipts: of files with their cache, and of memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from errors import raises
from paceline import LLM, ModelFileError, cli
from paceline.console import EXIT_OK
from paceline.loader import load_dummy
from paceline.loader.weight_files import FileStamp
from paceline.receipts import digests
from receipt_jobs import PARAMS, PROMPT, TARGET, receipt_of, target_dir, verdict_of

pytestmark = pytest.mark.usefixtures("digest_cache")


def test_digests_of_files_are_cached(
    digest_cache: Path, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(TARGET)
    stamp = FileStamp.of(folder / "model.safetensors")
    expected = hashlib.sha256(stamp.path.read_bytes()).hexdigest()
    before = set(digest_cache.glob("*"))
    assert digests.file_digests([stamp]) == [expected]
    (entry,) = set(digest_cache.glob("*")) - before
    text = entry.read_text()
    assert json.loads(text)["sha256"] == expected and json.loads(text)["size"] == stamp.size
    # What the cache has is not computed again.
    other = "0" * 64
    entry.write_text(text.replace(expected, other))
    assert digests.file_digests([stamp]) == [other]
    # An entry that is damaged, of another file, or cannot be written costs time only.
    values = json.loads(text)
    for damaged in ("", "[]", "{", "[" * 100, json.dumps(values | {"size": 1}), '{"sha256": 4}'):
        entry.write_text(damaged)
        assert digests.file_digests([stamp]) == [expected]
        assert entry.read_text() == text
    for folders in ("/proc/none", str(stamp.path)):
        monkeypatch.setenv("XDG_CACHE_HOME", folders)
        assert digests.file_digests([stamp]) == [expected]
    monkeypatch.setenv("XDG_CACHE_HOME", str(digest_cache.parents[1]))
    # A file whose time was set back is another one all the same.
    contents = bytearray(stamp.path.read_bytes())
    contents[-1] ^= 1
    stamp.path.write_bytes(contents)
    os.utime(stamp.path, ns=(stamp.mtime_ns, stamp.mtime_ns))
    now = FileStamp.of(stamp.path)
    assert digests.file_digests([now]) == [hashlib.sha256(contents).hexdigest()]


def test_a_file_that_changed_since_it_was_loaded_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of(TARGET)
    path = folder / "model.safetensors"
    with LLM(folder, device="cpu") as llm:
        contents = path.read_bytes()
        path.unlink()
        with raises(ModelFileError, path, "No such file", "receipt"):
            llm.generate(PROMPT, PARAMS)
        path.write_bytes(contents)
        with raises(ModelFileError, path, "has changed since", "load the model again"):
            llm.generate(PROMPT, PARAMS)


def test_shards_and_converted_folders_have_digests(tmp_path: Path) -> None:
    folder = tiny_models.copy_checkpoint(target_dir(), tmp_path / "shards")
    tiny_models.edit_tensors(folder, lambda tensors: None, shards=2)
    assert cli.main(["convert", str(folder), str(tmp_path / "out"), "-q"]) == EXIT_OK
    with LLM(folder, device="cpu") as sharded, LLM(tmp_path / "out", device="cpu") as converted:
        assert len(sharded.target.weights.files) == 2
        assert [one.path.name for one in converted.target.weights.files] == ["target.safetensors"]
        receipt = receipt_of(sharded)
        assert verdict_of(sharded, receipt).verdict == "equal"
        # The same weights in other files: the tokens are equal, the digests are not.
        verdict = verdict_of(converted, receipt)
        assert verdict.verdict == "refused" and "its digest of the weights is" in str(verdict.error)
        verdict = verdict_of(converted, receipt, any_model=True)
        assert verdict.verdict == "equal" and "the digest of the weights of" in verdict.notes[0]


def test_weights_in_memory_have_digests_and_updates_change_them(receipt_llm: LLM) -> None:
    folder = target_dir()
    tensors = tiny_models.load_tensors(folder)
    config = tiny_models.read_json(folder / "config.json")
    with LLM.from_state_dict(config, tensors, tokenizer=folder, device="cpu") as llm:
        receipt = receipt_of(llm)
        assert receipt["model"]["weights"].startswith("memory:")
        # Its weights are those of the folder, whose files were not read for it.
        assert verdict_of(receipt_llm, receipt).verdict == "equal"
        verdict = verdict_of(llm, receipt_of(receipt_llm))
        assert verdict.verdict == "refused" and "not from files" in str(verdict.error)
        changed = {name: tensor * 1.5 for name, tensor in tensors.items()}
        llm.update_weights(changed)
        other = receipt_of(llm)
        assert other["model"]["weights"] not in (receipt["model"]["weights"], "")
        assert verdict_of(llm, other).verdict == "equal"
        assert verdict_of(llm, receipt).verdict == "refused"
    with LLM(folder, device="cpu") as llm:
        before = receipt_of(llm)
        (prepared,) = llm._requests.prepare([PROMPT], PARAMS)
        llm.update_weights(changed)
        # From files no more.
        assert receipt_of(llm) == other
        assert verdict_of(llm, before).verdict == "refused"
        # A request that was made before the update does not say that it ran on the former weights.
        chunks = list(llm._run([prepared]))
        assert chunks[-1].finished and chunks[-1].receipt is None


def test_weights_elsewhere_are_refused(receipt_llm: LLM) -> None:
    target = load_dummy(target_dir())
    assert digests.weights_digest(target).startswith("memory:")

    class Stub:
        device = "cpu"

    stub: Any = Stub()
    with raises(NotImplementedError, "digest of its weights", "in other processes", "allowed"):
        digests.weights_digest(replace(target, model=stub))
