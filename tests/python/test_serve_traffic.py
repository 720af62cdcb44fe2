# SPDX-License-Identifier: Apache-2.0
"""Example traffic: its prompts are of the training files alone, and its capture has all of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from captured_requests import requests_of
from paceline import LLM, SamplingParams
from paceline.demo import find_demo

captured = pytest.importorskip("captured")
corpus = pytest.importorskip("corpus")
serve_traffic = pytest.importorskip("serve_traffic")

# So few lengths that 24 prompts have all of them: one that is missing or too long is seen.
PLAN: dict[str, Any] = {
    "seed": 3, "requests": 24, "shortest_prompt": 20, "longest_prompt": 23, "new_tokens": 12,
    "concurrency": 8,
}  # fmt: skip
TRAINED = "\n".join(f"def seen_{i}(items):\n    return items[{i}:]\n" for i in range(200))
HELD_OUT = "\n".join(f"class Unseen{i}:\n    value = {i}\n" for i in range(200))


def options(**values: Any) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        words += ["--" + name.replace("_", "-"), *map(str, parts)]
    return words


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_traffic.py", *words])
    serve_traffic.main()


def test_the_capture_has_requests_for_the_training_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = find_demo("eagle3")
    files = corpus.Corpus(train={"seen.py": TRAINED}, held_out={"unseen.py": HELD_OUT})
    monkeypatch.setattr(serve_traffic, "corpus_from", lambda _arguments: files)
    monkeypatch.setattr(serve_traffic, "_QUEUED", 10)
    drafting = f'{{"method": "eagle3", "model": "{demo.draft}", "num_speculative_tokens": 3}}'
    words = options(
        **PLAN, device="cpu", capture=tmp_path / "capture", temperature=[0, 1.5],
        speculative_config=drafting,
    )  # fmt: skip
    run(monkeypatch, *words)
    said = capsys.readouterr().out
    assert "24 requests with " in said and "acceptance length " in said
    assert "the capture has 24 of them" in said

    served = requests_of(tmp_path / "capture")
    tokenizer = corpus.Tokenizer.from_file(str(demo.target / "tokenizer.json"))
    stream = corpus.token_stream(tokenizer, files.train)
    windows = {tuple(stream[i : i + 19]) for i in range(len(stream))}
    for request in served:
        # The first token may be END_OF_TEXT instead.
        assert tuple(request.prompt[1:20]) in windows
    assert {len(request.prompt) for request in served} == {20, 21, 22, 23}
    assert len({tuple(request.prompt) for request in served}) == 24
    assert {request.drafter for request in served} == {"eagle3"}
    assert sorted(request.temperature for request in served) == [0.0] * 12 + [1.5] * 12
    greedy = [request for request in served if request.temperature == 0]
    with LLM(demo.target, device="cpu", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        plain = llm.generate([request.prompt for request in greedy], params)
    assert [one.outputs[0].token_ids for one in plain] == [
        request.outputs[0].token_ids for request in greedy
    ]
    # And they are texts to train on.
    texts = captured.Capture.load(tmp_path / "capture", corpus.VOCAB_SIZE).texts(23, 12)
    assert len(texts.ids) == 24


def test_no_group_of_requests_begins_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_traffic, "_QUEUED", 10)
    windows = serve_traffic.Windows(list(range(1, 90)), torch.device("cpu"), 0)
    plan = serve_traffic.Plan(**PLAN | {"new_tokens": 1})
    with LLM(find_demo("eagle3").target, device="cpu", max_model_len=64) as llm:
        assert serve_traffic.serve(llm, windows, plan, [0.0]).requests == 24
        ended = serve_traffic.serve(llm, windows, plan, [0.0], until=time.monotonic() - 1)
        assert ended.requests == 0
        begun = serve_traffic.serve(llm, windows, plan, [0.0], until=time.monotonic() + 600)
        assert begun.requests == 24


def test_traffic_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = options(stdlib=tmp_path, device="cpu", capture=tmp_path / "capture")
    with pytest.raises(SystemExit, match="has 0 Python sources"):
        run(monkeypatch, *words)
    assert not (tmp_path / "capture").exists()

    files = corpus.Corpus(train={"seen.py": TRAINED}, held_out={})
    monkeypatch.setattr(serve_traffic, "corpus_from", lambda _arguments: files)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the capture folder .*file cannot be written"):
        run(monkeypatch, *options(**PLAN, device="cpu", capture=tmp_path / "file"))


def test_a_capture_that_ended_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = corpus.Corpus(train={"seen.py": TRAINED}, held_out={})
    monkeypatch.setattr(serve_traffic, "corpus_from", lambda _arguments: files)
    monkeypatch.setattr(
        "paceline.capture.write_safetensors", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(SystemExit, match=r"capture ended early: failed"):
        run(monkeypatch, *options(**PLAN, device="cpu", capture=tmp_path / "capture"))
