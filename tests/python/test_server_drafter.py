# SPDX-License-Identifier: Apache-2.0
"""/v1/drafter: the operator's route that changes the drafter while requests run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, cli
from paceline.console import EXIT_USAGE
from paceline.demo import find_demo
from paceline.loader import load_drafter
from running_server import RunningServer, open_demo
from time_limits import HANG_LIMIT_S

KEY = {"authorization": "Bearer secret"}
BODY = {"prompt": "def read_lines(path):", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_demo() as llm:
        yield llm


@pytest.fixture
def server(llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(llm, api_keys=["secret"], allows_drafter_changes=True) as server:
        yield server


def change(server: RunningServer, config: Any, **options: Any) -> tuple[int, Any]:
    headers = {"headers": KEY} | options
    return server.ask("/v1/drafter", {"speculative_config": config}, **headers)


def message(answer: tuple[int, Any], status: int) -> str:
    assert answer[0] == status, answer
    return str(answer[1]["error"]["message"])


def test_texts_do_not_change_and_figures_go_on(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    draft = server.llm.draft
    assert draft is not None
    expected = server.result("/v1/completions", BODY, headers=KEY)["choices"][0]["text"]
    texts: list[str] = []
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set() or not texts:
            found = server.result("/v1/completions", BODY, headers=KEY)
            texts.append(found["choices"][0]["text"])

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    model = {"method": "draft_model", "model": str(draft.path), "num_speculative_tokens": 4}
    for config in (NGRAM, None, model) * 3:
        status, answer = change(server, config)
        assert status == 200
        told = config or dict.fromkeys(("method", "num_speculative_tokens"))
        assert answer == {"object": "drafter", "model": None, **told}
        configured = server.result("/v1/capabilities", headers=KEY)["configured"]
        assert configured["method"] == told["method"]
        stats = server.result("/v1/stats", headers=KEY)
        assert (stats["speculative_decoding"] is None) == (config is None)
        with server.send("/metrics", headers=KEY) as response:
            has_draft_group = b'owner="draft"' in response.read()
        assert response.status == 200 and has_draft_group == (config is model)
    is_over.set()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert len(texts) >= 3 and set(texts) == {expected}
    # The log says each time what drafts.
    lines = [record.message for record in caplog.records if record.module == "drafter_changes"]
    told = ["the drafter is the method 'ngram'", "no drafter: decoding is plain"]
    assert lines == [*told, f"the drafter is {draft.path}, method 'draft_model'"] * 3


def test_refusals(server: RunningServer, llm: LLM, tmp_path: Path) -> None:
    before = llm.speculative_config
    assert message(server.ask("/v1/drafter", {"speculative_config": None}), 401)
    for body, text in (
        ({}, "speculative_config is missing"),
        ({"speculative_config": 3}, "allowed: an object"),
        ({"speculative_config": {"methd": "ngram"}}, "did you mean method"),
        ({"speculative_config": {"method": "suffix"}}, "suffix"),
        ({"speculative_config": NGRAM, "model": "served"}, "unknown field"),
        ({"speculative_config": NGRAM | {"rejection_sample_method": "block"}}, "coupled"),
        (
            {"speculative_config": {"model": str(tmp_path / "no"), "num_speculative_tokens": 2}},
            "no such folder",
        ),
    ):
        assert text in message(server.ask("/v1/drafter", body, headers=KEY), 400)
    # A drafter that is a model of its own, but for another target.
    other = find_demo("gemma4_mtp").speculative_config()
    status, answer = server.ask("/v1/drafter", {"speculative_config": other}, headers=KEY)
    assert status == 400 and "made for another target" in answer["error"]["message"]
    assert answer["error"]["param"] == "speculative_config"
    status, _ = server.ask("/v1/drafter", method="GET", headers=KEY)
    assert status == 405
    assert llm.speculative_config is before


def test_two_at_once(server: RunningServer, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, goes_on = threading.Event(), threading.Event()
    draft = llm.draft
    assert draft is not None

    def slow(*arguments: Any, **options: Any) -> Any:
        loading.set()
        assert goes_on.wait(HANG_LIMIT_S)
        return load_drafter(*arguments, **options)

    monkeypatch.setattr("paceline.drafter_changes.load_drafter", slow)
    answers: list[tuple[int, Any]] = []
    model = {"model": str(draft.path), "num_speculative_tokens": 4}
    first = threading.Thread(target=lambda: answers.append(change(server, model)))
    first.start()
    assert loading.wait(HANG_LIMIT_S)
    assert "another change" in message(change(server, NGRAM), 409)
    assert server.result("/v1/completions", BODY, headers=KEY)["choices"]
    goes_on.set()
    first.join(HANG_LIMIT_S)
    assert answers[0][0] == 200 and answers[0][1]["method"] == "draft_model"


def test_it_is_off_by_default(llm: LLM) -> None:
    before = llm.speculative_config
    with RunningServer(llm) as server:
        answer = change(server, NGRAM, headers={})
        assert "--allow-drafter-changes" in message(answer, 403)
    assert llm.speculative_config is before


def test_replicas_are_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "--port", "0", "--replicas", "2", "--allow-drafter-changes"]
    assert cli.main(argv) == EXIT_USAGE
    assert "--allow-drafter-changes is given with --replicas 2" in capsys.readouterr().err
