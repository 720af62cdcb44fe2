# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: the spans of requests, their parents, and how they reach a collector."""

from __future__ import annotations

import http.server
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paceline import LLM, cli
from paceline.request import Request
from paceline.server.traces import Traces, open_traces, process_traces
from running_server import RunningServer, open_demo
from time_limits import HANG_LIMIT_S

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SECRET = "def secret_name(path):"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "a=1,b=2"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_demo(max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(llm: LLM, exporter: InMemorySpanExporter) -> Iterator[RunningServer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with RunningServer(llm, traces=Traces(provider)) as server:
        yield server


def only_span(server: RunningServer, exporter: InMemorySpanExporter) -> ReadableSpan:
    """The span of the one request since the last call."""
    server.wait_until_idle()
    deadline = time.monotonic() + HANG_LIMIT_S
    while not (spans := exporter.get_finished_spans()):  # it ends after the response
        assert time.monotonic() < deadline
        time.sleep(0.002)
    exporter.clear()
    (span,) = spans
    assert SECRET not in span.to_json()
    return span


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": SECRET, "max_tokens": 12, "temperature": 0, "seed": 3} | fields


@pytest.mark.parametrize("streams", [False, True])
def test_a_span_has_what_the_response_says(
    streams: bool, server: RunningServer, exporter: InMemorySpanExporter
) -> None:
    body = completion(n=2, top_k=5, stream=streams)
    headers = HEADERS | {"x-request-id": "mine"}
    with server.send(COMPLETIONS, body, headers=headers) as response:
        sent = response.headers
        response.read()
    span = only_span(server, exporter)
    # The span is a child of the client's, and the response names it.
    context, parent = span.get_span_context(), span.parent
    assert context is not None and parent is not None
    assert f"{context.trace_id:032x}" == TRACE_ID and f"{parent.span_id:016x}" == PARENT_ID
    assert sent["traceparent"] == f"00-{TRACE_ID}-{context.span_id:016x}-01"
    assert sent["tracestate"] == HEADERS["tracestate"] and sent["x-request-id"] == "mine"
    assert span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
    assert span.name == "text_completion served"

    whole = server.result(COMPLETIONS, body | {"stream": False})
    only_span(server, exporter)
    usage, counted = whole["usage"], whole["metrics"]["speculative_decoding"]
    attributes = dict(span.attributes or {})
    seconds = {key: attributes.pop(key) for key in list(attributes) if "latency" in key}
    first, last = (seconds[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e"))
    assert 0 < first <= last < 60  # type: ignore[operator]
    cached = attributes.pop("gen_ai.usage.cache_read.input_tokens")
    assert cached in (0, usage["prompt_tokens_details"]["cached_tokens"])
    length, first_chunk = 1 + counted["num_accepted_draft_tokens"] / counted["num_spec_steps"], None
    if streams:
        first_chunk = attributes.pop("gen_ai.response.time_to_first_chunk")
        assert attributes.pop("gen_ai.request.stream") is True
    assert first_chunk == (first if streams else None)
    assert attributes == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "served",
        "gen_ai.response.model": "served",
        "gen_ai.response.id": "mine",
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.num_sequences": 2,
        "paceline.spec_decode.num_spec_steps": counted["num_spec_steps"],
        "paceline.spec_decode.num_draft_tokens": counted["num_draft_tokens"],
        "paceline.spec_decode.num_accepted_draft_tokens": counted["num_accepted_draft_tokens"],
        "paceline.spec_decode.mean_acceptance_length": length,
        "paceline.spec_decode.mean_draft_length": counted["mean_draft_length"],
        "paceline.spec_decode.acceptance_histogram": tuple(counted["acceptance_histogram"]),
        "paceline.spec_decode.num_spec_tokens": 4,
        "paceline.spec_decode.drafter": "draft_model",
    }


def test_prompts_of_a_request_are_counted_together(
    server: RunningServer, exporter: InMemorySpanExporter
) -> None:
    server.result(COMPLETIONS, completion(prompt=["def a():", "class B:"]))
    both = only_span(server, exporter).attributes or {}
    found: dict[str, Any] = {}
    for prompt in ("def a():", "class B:"):
        server.result(COMPLETIONS, completion(prompt=prompt))
        one = only_span(server, exporter).attributes or {}
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
            found[name] = found.get(name, 0) + one[f"paceline.spec_decode.{name}"]
        histogram: Any = one["paceline.spec_decode.acceptance_histogram"]
        before = found.get("acceptance_histogram", [0] * 5)
        found["acceptance_histogram"] = [a + b for a, b in zip(before, histogram, strict=True)]
    found["mean_acceptance_length"] = (
        1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    )
    found["acceptance_histogram"] = tuple(found["acceptance_histogram"])
    assert {name: both[f"paceline.spec_decode.{name}"] for name in found} == found


def test_without_drafting_a_span_has_no_drafts(
    server: RunningServer, exporter: InMemorySpanExporter
) -> None:
    server.result(COMPLETIONS, completion(speculative={"enabled": False}))
    attributes = only_span(server, exporter).attributes or {}
    assert not [name for name in attributes if "spec_decode" in name]


def test_a_provider_of_the_process_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_traces() is None  # this process has the API, but no provider of its own
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    traces = process_traces()
    assert traces is not None
    for _ in range(2):  # closing a server leaves the provider to its process
        traces.begin([], COMPLETIONS).end(200)
        traces.close()
    assert [span.name for span in exporter.get_finished_spans()] == [f"POST {COMPLETIONS}"] * 2
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert process_traces() is None
    assert "opentelemetry.trace" not in sys.modules


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        (CHATS, {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}, "completion"),
        (RESPONSES, {"input": SECRET, "max_output_tokens": 5}, "output"),
    ],
    ids=["chat", "responses"],
)
def test_chats_and_responses_have_spans(
    path: str,
    body: dict[str, Any],
    counted: str,
    server: RunningServer,
    exporter: InMemorySpanExporter,
) -> None:
    usage = server.result(path, body)["usage"]
    span = only_span(server, exporter)
    assert span.name == "chat served" and span.parent is None
    num_output = (span.attributes or {})["gen_ai.usage.output_tokens"]
    assert num_output == usage[f"{counted}_tokens"] == 5


def test_the_sampling_of_the_client_is_respected(
    server: RunningServer, exporter: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    with server.send(COMPLETIONS, completion(), headers=headers) as response:
        assert response.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
        assert response.headers["traceparent"].endswith("-00")
    server.wait_until_idle()
    server.result("/v1/models")  # has no span either
    assert server.ask(COMPLETIONS)[0] == 405  # a GET generates nothing
    assert exporter.get_finished_spans() == ()


def test_refused_requests(server: RunningServer, exporter: InMemorySpanExporter) -> None:
    assert server.ask(COMPLETIONS, completion(n=SECRET))[0] == 400
    span = only_span(server, exporter)
    assert (span.attributes or {})["error.type"] == "400"
    assert span.status.status_code is StatusCode.UNSET and span.name == f"POST {COMPLETIONS}"


def test_failed_and_cancelled_requests(
    server: RunningServer, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.send(COMPLETIONS, completion(max_tokens=200, ignore_eos=True, stream=True)) as gone:
        gone.readline()
    span = only_span(server, exporter)
    assert (span.attributes or {})["error.type"] == "client_gone"
    assert span.status.status_code is StatusCode.UNSET

    def fails(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(Request, "push", fails)
    for streams, kind in ((False, "503"), (True, "RuntimeError")):
        with server.send(COMPLETIONS, completion(stream=streams)) as response:
            response.read()
        span = only_span(server, exporter)
        assert (span.attributes or {})["error.type"] == kind
        assert span.status.status_code is StatusCode.ERROR


def test_spans_reach_a_collector(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            traces = open_traces(f"http://127.0.0.1:{collector.server_port}/v1/traces")
            with RunningServer(llm, traces=traces) as server:
                server.result(COMPLETIONS, completion(), headers=HEADERS)
        finally:
            collector.shutdown()
            thread.join()
    ((path, body),) = received  # sent when the server ended
    (group,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {one.key: one.value.string_value for one in group.resource.attributes}
    assert path == "/v1/traces" and names["service.name"] == "paceline"
    (span,) = group.scope_spans[0].spans
    assert span.trace_id.hex() == TRACE_ID and span.parent_span_id.hex() == PARENT_ID
    assert SECRET.encode() not in body and SECRET not in json.dumps(names)


def test_wrong_endpoints_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["serve", "--otlp-traces-endpoint", "grpc://127.0.0.1:4317"]) != 0
    assert "OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces" in capsys.readouterr().err
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name.startswith("opentelemetry") else find_spec(name, *rest),
    )
    assert cli.main(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces"]) != 0
    assert "pip install 'paceline[otel]'" in capsys.readouterr().err
