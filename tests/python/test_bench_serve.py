# SPDX-License-Identifier: Apache-2.0
"""`paceline bench serve`: its load, its figures and its files, against a server in a thread."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, cli
from paceline.bench.serve.client import Answer
from paceline.bench.serve.datasets import Lengths, Question, make_questions, read_questions
from paceline.bench.serve.figures import draft_figures, result_of, table
from paceline.bench.serve.load import Load, run_load
from paceline.console import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from running_server import RunningServer

PLAIN = Load(math.inf, 1.0, None)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(llm) as server:
        yield server


def bench(server: RunningServer, *arguments: str) -> int:
    return cli.main(
        [
            "bench", "serve", "--base-url", f"http://127.0.0.1:{server.port}", "--quiet",
            "--token-ids", "5,100", "--ignore-eos", *arguments,
        ]
    )  # fmt: skip


def test_results_have_the_keys_of_vllm(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    before = server.llm._executor.stats()
    code = bench(
        server, "--num-prompts", "12", "--input-len", "20", "--output-len", "15",
        "--max-concurrency", "4", "--num-warmups", "0", "--json", str(out), "--save-detailed",
        "--goodput", "ttft:60000", "tpot:0.000001",
    )  # fmt: skip
    assert code == EXIT_OK
    after = server.llm._executor.stats()
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["num_prompts"]) == (12, 0, 12)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 20, 12 * 15)
    assert result["model_id"] == "served" and result["backend"] == "openai"
    assert result["request_rate"] == "inf" and result["max_concurrency"] == 4
    assert result["output_throughput"] == pytest.approx(180 / result["duration"])
    assert result["request_throughput"] == pytest.approx(12 / result["duration"])
    assert result["request_goodput"] == 0
    assert 1 <= result["max_concurrent_requests"] <= 12
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p99"):
            assert result[f"{statistic}_{name}_ms"] >= 0
    assert result["mean_ttft_ms"] < result["mean_e2el_ms"]
    # The server's counters of this run.
    drafts = after["num_verify_windows"] - before["num_verify_windows"]
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    assert result["spec_decode_num_drafts"] == drafts > 0
    assert result["spec_decode_draft_tokens"] == drafted
    assert result["spec_decode_accepted_tokens"] == accepted
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / drafted)
    assert len(result["spec_decode_per_position_acceptance_rates"]) == 4
    # Each request.
    assert result["input_lens"] == [20] * 12 and result["output_lens"] == [15] * 12
    assert result["errors"] == [""] * 12 and all(result["generated_texts"])
    for ttft, itls in zip(result["ttfts"], result["itls"], strict=True):
        assert ttft > 0 and len(itls) <= 14
    shown = capsys.readouterr().out
    assert " Serving Benchmark Result ".center(50, "=") in shown
    assert re.search(r"^Successful requests: {20} 12 ", shown, re.MULTILINE)
    assert re.search(r"^Acceptance length: +\d\.\d\d ", shown, re.MULTILINE)
    assert "Time per Output Token (excl. 1st token)" in shown
    assert set(shown.splitlines()[-1]) == {"="}


def test_several_loads_are_a_list_and_a_figure(server: RunningServer, tmp_path: Path) -> None:
    out, figure = tmp_path / "results.json", tmp_path / "load.png"
    code = bench(
        server, "--num-prompts", "4", "--input-len", "8", "--output-len", "6", "--request-rate",
        "200,inf", "--max-concurrency", "1,2", "--endpoint", "/v1/completions", "--json", str(out),
        "--plot", str(figure),
    )  # fmt: skip
    assert code == EXIT_OK
    results = json.loads(out.read_text())
    loads = [(result["request_rate"], result["max_concurrency"]) for result in results]
    assert loads == [(200.0, 1), (200.0, 2), ("inf", 1), ("inf", 2)]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_server_without_a_drafter_has_no_figures_of_drafts(
    plain_llm: LLM, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    with RunningServer(plain_llm) as server:
        assert bench(server, "--num-prompts", "2", "--output-len", "4", "--json", str(out)) == 0
    assert not [key for key in json.loads(out.read_text()) if "spec_decode" in key]


def test_failed_requests_are_counted(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "abc", "output_tokens": 5}, {"prompt": "a" * 5000, "output_tokens": 5}]
    path, out = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    path.write_text("\n".join(map(json.dumps, lines)))
    files = ("--dataset-name", "custom", "--dataset-path", str(path), "--num-warmups", "0")
    assert bench(server, *files, "--num-prompts", "4", "--json", str(out)) == EXIT_OK
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["total_output_tokens"] == 10
    assert "2 requests failed; the first: status 400" in capsys.readouterr().err
    path.write_text(json.dumps(lines[1]))
    assert bench(server, *files, "--num-prompts", "2") == EXIT_FAILURE


def test_a_server_that_refuses_the_warm_up_ends_the_bench(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--extra-body", '{"nonesuch": 1}') == EXIT_USAGE
    assert "unknown field 'nonesuch'" in capsys.readouterr().err
    code = cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9"])
    assert code == EXIT_USAGE
    assert "start a server, or name another --base-url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--request-rate", "0"), "--request-rate is '0'"),
        (("--request-rate", "1,nan"), "--request-rate is 'nan'"),
        (("--max-concurrency", "0"), "--max-concurrency is '0'"),
        (("--max-concurrency", "a"), "--max-concurrency is 'a'"),
        (("--burstiness", "0"), "--burstiness is 0"),
        (("--goodput", "itl:3"), "--goodput has 'itl:3'"),
        (("--dataset-name", "custom"), "without --dataset-path"),
        (("--dataset-path", "x"), "with --dataset-path"),
        (("--dataset-name", "prefix_repetition"), "needs --prefix-len"),
        (("--token-ids", "5"), "--token-ids is '5'"),
        (("--range-ratio", "1"), "--range-ratio is 1"),
        (("--num-prompts", "0"), "--num-prompts is 0"),
        (("--base-url", "localhost"), "--base-url is 'localhost'"),
        (("--extra-body", "[]"), "--extra-body is []"),
        (("--save-detailed",), "--save-detailed needs --json"),
        (("--plot", "x.txt"), "--plot is 'x.txt'"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *arguments]) == EXIT_USAGE
    assert message in capsys.readouterr().err


# ---- the parts -----------------------------------------------------------------------------------


def test_made_prompts_share_prefixes_and_vary_in_length() -> None:
    lengths = Lengths(6, 2, 10, 20, 0.5, (5, 9))
    made = make_questions(40, lengths, np.random.default_rng(0), is_text=False)
    assert {tuple(question.prompt[:6]) for question in made} == {
        tuple(made[0].prompt[:6]),
        tuple(made[1].prompt[:6]),
    }
    assert {len(question.prompt) - 6 for question in made} == set(range(5, 16))
    assert {question.output_len for question in made} <= set(range(10, 31))
    assert {token for question in made for token in question.prompt} == set(range(5, 10))
    again = make_questions(40, lengths, np.random.default_rng(0), is_text=False)
    assert again == made
    (text,) = make_questions(1, lengths, np.random.default_rng(0), is_text=True)
    assert str(text.prompt).startswith("w")


def test_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    rng = np.random.default_rng(0)
    assert read_questions("sharegpt", path, 3, 7, rng) == [Question("hi", 7)] * 3
    for kind, content, message in (
        ("sharegpt", "{}", "allowed: a list of conversations"),
        ("sharegpt", "[1]", '{"conversations":'),
        ("sharegpt", "[]", "has no prompt"),
        ("sharegpt", "[", "is not valid JSON"),
        ("custom", "{", "line 1 of"),
        ("custom", '{"prompt": 7, "output_tokens": 1}', "prompt is 7"),
        ("custom", '{"prompt": "a"}', "--output-len"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_questions(kind, path, 1, 7 if kind == "sharegpt" else None, rng)


def answer(start: float, *times: float, tokens: int | None = None) -> Answer:
    return Answer("", start, list(times), 3, len(times) if tokens is None else tokens, "x")


def test_figures_by_hand() -> None:
    answers = [answer(0, 0.1, 0.3, 0.4), answer(0, 0.2, 1.2, tokens=6), Answer(error="no")]
    goals = {"ttft": 150.0, "tpot": 160.0}
    result = result_of(answers, 2.0, Load(5.0, 1.0, None), goals, {"model_id": "m"})
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["total_output_tokens"] == 9 and result["output_throughput"] == 4.5
    assert result["total_token_throughput"] == 7.5 and result["request_rate"] == 5.0
    assert result["mean_ttft_ms"] == pytest.approx(150)
    # (0.4 - 0.1) / 2 and (1.2 - 0.2) / 5.
    assert result["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)
    assert result["median_itl_ms"] == pytest.approx(200)
    assert result["mean_e2el_ms"] == pytest.approx(800)
    assert result["request_goodput"] == 0.5
    assert result["max_output_tokens_per_s"] == 6 and result["max_concurrent_requests"] == 2
    assert "Request rate configured (RPS):           5.00 " in table(result)
    assert "Request goodput (req/s):                 0.50 " in table(result)
    nothing = result_of([Answer(error="no")], 1.0, PLAIN, {}, {})
    assert nothing["completed"] == 0 and nothing["mean_ttft_ms"] == 0


def test_figures_of_drafts_by_hand() -> None:
    before = {"num_drafts": 10.0, "num_draft_tokens": 30.0, "num_accepted_tokens": 5.0}
    after = {
        "num_drafts": 20.0, "num_draft_tokens": 60.0, "num_accepted_tokens": 20.0,
        "num_accepted_tokens_per_pos/1": 5.0, "num_accepted_tokens_per_pos/0": 10.0,
    }  # fmt: skip
    figures = draft_figures(before, after)
    assert figures["spec_decode_acceptance_length"] == 2.5
    assert figures["spec_decode_acceptance_rate"] == 50.0
    assert figures["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
    assert draft_figures(None, after) == draft_figures(after, after) == {}


class SlowClient:
    """Counts how many requests are open."""

    def __init__(self) -> None:
        self.num_open = self.most = 0
        self.arrivals: list[float] = []

    async def ask(self, question: Question) -> Answer:
        self.arrivals.append(time.perf_counter())
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        await asyncio.sleep(0.001)
        self.num_open -= 1
        return Answer()


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (5, 5), (None, 30)])
def test_the_concurrency_is_limited(limit: int | None, most: int) -> None:
    client: Any = SlowClient()
    load = Load(math.inf, 1.0, limit)
    questions = [Question("a", 1)] * 30
    done: list[int] = []
    asyncio.run(run_load(client, questions, load, np.random.default_rng(0), lambda: done.append(1)))
    assert client.most == most and len(done) == 30


@pytest.mark.serial
def test_requests_arrive_at_their_rate() -> None:
    client: Any = SlowClient()
    questions = [Question("a", 1)] * 200
    started = time.perf_counter()
    asyncio.run(run_load(client, questions, Load(500.0, 1.0, None), np.random.default_rng(1), int))
    gaps = np.random.default_rng(1).gamma(1.0, 1 / 500.0, 200)
    expected = np.cumsum(gaps)[:-1]
    late = np.asarray(client.arrivals[1:]) - started - expected
    # A busy machine delays some arrivals, and none comes early.
    assert late.min() > 0 and np.median(late) < 0.2
    assert np.std(gaps) == pytest.approx(1 / 500.0, rel=0.2)
