# SPDX-License-Identifier: Apache-2.0
"""/metrics: the engine's figures, those of requests, and vLLM's names for them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import LLM
from running_server import RunningServer

COMPLETIONS = "/v1/completions"
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "paceline.json"
BODY = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "seed": 1}


@pytest.fixture
def server(llm: LLM) -> Iterator[RunningServer]:
    with RunningServer(llm) as server:
        yield server


def figures(server: RunningServer) -> dict[str, float]:
    """All samples: the name with its labels except that of the model, and the value."""
    with server.send("/metrics") as response:
        assert response.status == 200
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model", None) or labels.pop("model_name", None) == "served"
            shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


def test_figures_are_those_of_the_engine(server: RunningServer) -> None:
    before = figures(server)
    events = server.events(COMPLETIONS, BODY | {"n": 2})
    server.result(COMPLETIONS, BODY)
    assert server.ask(COMPLETIONS, {"prompt": 7})[0] == 400
    assert server.ask("/nonesuch")[0] == 404
    server.wait_until_idle()
    after = figures(server)

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert rise("paceline_generation_tokens_total") == 120
    assert rise("paceline_outputs_finished_total{finished_reason=length}") == 3
    assert after["paceline_outputs_open"] == after["paceline_outputs_running"] == 0
    assert rise("paceline_time_to_first_token_seconds_count") == 2
    assert rise("paceline_e2e_request_latency_seconds_count") == 2
    # Each output has a time less than it has chunks.
    streamed = sum(bool(event["choices"][0]["text"]) for event in events)
    assert streamed - 2 <= rise("paceline_inter_token_latency_seconds_count") < 120
    assert rise(f"paceline_http_responses_total{{route={COMPLETIONS},status=200}}") == 2
    assert rise(f"paceline_http_responses_total{{route={COMPLETIONS},status=400}}") == 1
    assert rise("paceline_http_responses_total{route=other,status=404}") == 1

    engine: dict[str, Any] = server.llm._executor.stats()
    for name, key in (
        ("num_drafts", "num_verify_windows"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_tokens"),
    ):
        for prefix in ("paceline_", "vllm:"):
            assert after[f"{prefix}spec_decode_{name}_total"] == engine[key] > 0
        of_drafter = f"paceline_spec_decode_{name}_per_drafter_total{{drafter=draft_model}}"
        assert after[of_drafter] == engine[key]
    for position, count in enumerate(engine["accepted_per_position"]):
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={position}}}"
        assert after[name] == count
    for drafts in engine["drafts"]:
        labels = f"{{num_drafts={drafts['num_drafts']}}}"
        ran = after[f"paceline_spec_decode_iterations_total{labels}"]
        seconds = after[f"paceline_spec_decode_device_seconds_total{labels}"]
        assert (ran, seconds) == (drafts["num_iterations"], pytest.approx(drafts["us"] * 1e-6))
        assert (ran > 0) == (seconds > 0)
    assert ran > 0  # with all drafts
    # vLLM's names for the same.
    for vllm, own in (
        ("generation_tokens_total", "generation_tokens_total"),
        ("num_requests_running", "outputs_running"),
        ("kv_cache_usage_perc", "kv_cache_usage_ratio"),
        (
            "request_success_total{finished_reason=length}",
            "outputs_finished_total{finished_reason=length}",
        ),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count"),
    ):
        assert after[f"vllm:{vllm}"] == after[f"paceline_{own}"]
    groups = server.llm.stats()["kv_groups"]
    for i, group in enumerate(groups):
        labels = f"group={i},kind={group['kind']},owner={group['owner']},window={group['window']}"
        assert after[f"paceline_kv_group_max_blocks{{{labels}}}"] == group["max_blocks"]
    (rank,) = server.llm.memory_report()["ranks"]
    for what, size in rank.items():
        if what != "gpu":
            assert after[f"paceline_rank_{what}{{gpu=,rank=0}}"] == size


def test_memory_is_that_of_each_rank(target_dir: Path) -> None:
    with LLM(target_dir, device="cpu", tensor_parallel_size=2, max_model_len=128) as ranked:
        report = ranked.memory_report()["ranks"]
        assert ranked.stats()["ranks"] == report and len(report) == 2
        with RunningServer(ranked) as running:
            found = figures(running)
            assert running.result("/v1/stats")["ranks"] == report
    for i, rank in enumerate(report):
        assert rank.pop("gpu") is None and rank["kv_pool_bytes"] > 0
        for what, size in rank.items():
            assert found[f"paceline_rank_{what}{{gpu=,rank={i}}}"] == size


def test_acceptance_of_requests_is_counted_by_drafter(server: RunningServer) -> None:
    bodies = [BODY | {"seed": seed, "n": 1 + seed % 2} for seed in range(4)]
    counted = [
        server.result(COMPLETIONS, body)["metrics"]["speculative_decoding"] for body in bodies
    ]
    for plain in ({"num_speculative_tokens": 0}, {"enabled": False}):
        answer = server.result(COMPLETIONS, BODY | {"speculative": plain})
        assert answer["metrics"]["speculative_decoding"] is None
    found = figures(server)
    name = "paceline_request_{}{{drafter=draft_model}}".format
    for key in ("mean_acceptance_length", "mean_draft_length"):
        values = [one[key] for one in counted]
        assert found[name(f"{key}_count")] == len(values)
        assert found[name(f"{key}_sum")] == pytest.approx(sum(values))
        for bound in (1.5, 2.0, 3.0):
            bucket = f"paceline_request_{key}_bucket{{drafter=draft_model,le={bound}}}"
            assert found[bucket] == sum(value <= bound for value in values)
    steps = [sum(one["acceptance_histogram"][: i + 1]) for one in counted for i in range(5)]
    for i in range(5):
        bucket = f"paceline_request_accepted_drafts_bucket{{drafter=draft_model,le={i:.1f}}}"
        assert found[bucket] == sum(steps[i::5])
    assert found[name("accepted_drafts_sum")] == sum(
        one["num_accepted_draft_tokens"] for one in counted
    )
    # Labels are few, whatever requests there are.
    drafters = {label for label in found if "drafter=" in label}
    assert {re.search(r"drafter=(\w+)", label)[1] for label in drafters} == {"draft_model"}  # type: ignore[index]


def test_hits_of_the_prefix_cache_are_counted(server: RunningServer) -> None:
    before = figures(server)
    body = {"prompt": [7] * 50, "max_tokens": 1, "seed": 1}
    server.result(COMPLETIONS, body)
    usage = server.result(COMPLETIONS, body)["usage"]
    hit = usage["prompt_tokens_details"]["cached_tokens"]
    after = figures(server)
    for prefix in ("paceline_", "vllm:"):
        names = [f"{prefix}prefix_cache_{what}_total" for what in ("queries", "hits")]
        queries, hits = (after[name] - before[name] for name in names)
        assert hits == hit > 0 and queries == 100
    # vLLM counts prompts whole.
    whole, computed = (
        after[name] - before[name]
        for name in ("vllm:prompt_tokens_total", "paceline_prompt_tokens_total")
    )
    assert (whole, computed) == (100, 100 - hit)
    blocks = [name for name in after if name.startswith("paceline_kv_group_hit_blocks_total")]
    assert len(blocks) == 4 and all(after[name] > before[name] for name in blocks)


def test_ids_and_traces_come_back(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with caplog.at_level(logging.INFO, "paceline.access"), RunningServer(llm) as server:
        headers = {"x-request-id": "mine.1", "traceparent": trace, "tracestate": "a=1"}
        with server.send(COMPLETIONS, BODY, headers=headers) as response:
            assert response.headers["x-request-id"] == "mine.1"
            assert response.headers["traceparent"] == trace
            assert response.headers["tracestate"] == "a=1"
            assert json.loads(response.read())["id"] == "cmpl-mine.1"
        # Ids that would be unsafe in a log or a header are replaced.
        headers = {"x-request-id": "a b", "traceparent": "00-zz"}
        with server.send("/nonesuch", headers=headers) as response:
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
            assert response.headers["traceparent"] is None
    lines = [r.getMessage() for r in caplog.records if r.name == "paceline.access"]
    pattern = rf"POST {COMPLETIONS}: 200 in \d+ ms, request mine.1, trace {trace.split('-')[1]}"
    assert re.fullmatch(pattern, lines[0])
    assert lines[1].startswith("GET other: 404 in ")
    assert BODY["prompt"] not in "".join(lines).replace(COMPLETIONS, "")


def test_the_dashboard_asks_for_figures_that_exist(server: RunningServer) -> None:
    server.result(COMPLETIONS, BODY)
    names = {name.partition("{")[0] for name in figures(server)}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"]]
    found = {name for text in asked for name in re.findall(r"paceline_\w+", text)}
    # test_replicas.py and test_capture.py have these.
    others = "paceline_(replica|outputs_resumed|capture)"
    of_others = {name for name in found if re.match(others, name)}
    assert len(found) > 15 and found - of_others <= names
    assert not re.findall(r"https?://", DASHBOARD.read_text())


def test_figures_of_drafts_are_absent_without_a_drafter(plain_llm: LLM) -> None:
    with RunningServer(plain_llm) as server:
        names = figures(server)
    assert not [name for name in names if "spec_decode" in name]
    assert "paceline_generation_tokens_total" in names
