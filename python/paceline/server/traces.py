# SPDX-License-Identifier: Apache-2.0
"""Traces of OpenTelemetry: one span for each request that generates.

A span has the attributes of OpenTelemetry's conventions for generative AI, and those of vLLM where
it has other names. It has no prompt and no output.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline.checks import shorten

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from paceline.outputs import RequestOutput
    from paceline.sampling import SamplingParams

Headers = Iterable[tuple[bytes, bytes]]

#: The key of a request's span in its ASGI scope; absent without traces.
REQUEST_SPAN: Final = "paceline.request_span"
_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
# Sampling parameters by the last part of their attribute.
_PARAMETERS: Final = {
    "choice.count": "n",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def check_endpoint(endpoint: str) -> None:
    """Checks the option --otlp-traces-endpoint.

    Raises:
        ValueError: It is no URL of HTTP, or a package is missing.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"--otlp-traces-endpoint is {shorten(endpoint)}; allowed: a URL of a collector that "
            "takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces (not gRPC)"
        )
    for package in _PACKAGES:
        try:
            is_missing = importlib.util.find_spec(package) is None
        except ModuleNotFoundError:
            is_missing = True
        if is_missing:
            raise ValueError(
                f"--otlp-traces-endpoint needs the package {package}: pip install 'paceline[otel]'"
            )


def open_traces(endpoint: str) -> Traces:
    """Starts to send spans to a collector, in batches and from another thread.

    The environment variables of OpenTelemetry, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS, have their usual meaning.

    Args:
        endpoint: See `check_endpoint`.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "paceline"}
    provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Traces(provider, close=provider.shutdown)


def process_traces() -> Traces | None:
    """Returns traces that go where those of the whole process go, as `opentelemetry-instrument` or
    a program around the server has set up with OpenTelemetry's API; None if nothing has."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:  # nothing in this process has imported it
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else Traces(provider)


class Traces:
    """Begins spans."""

    def __init__(self, provider: TracerProvider, close: Callable[[], None] | None = None) -> None:
        """Takes what makes spans, and what ends it; None = others use it too."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._close = close
        self._tracer = provider.get_tracer("paceline.server")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Headers, route: str) -> RequestSpan:
        """Begins the span of a request, as a child of the one that `traceparent` names.

        Args:
            headers: The request's.
            route: Its path.
        """
        from opentelemetry.trace import SpanKind

        carrier: dict[str, str] = {}
        for key, value in headers:
            if key in (b"traceparent", b"tracestate"):
                # A tracestate may come in several headers.
                name, text = key.decode(), value.decode("latin-1")
                carrier[name] = f"{carrier[name]},{text}" if name in carrier else text
        span = self._tracer.start_span(
            f"POST {route}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": route},
        )
        return RequestSpan(span)

    def close(self) -> None:
        """Sends what has not been sent. Without a collector that takes up to ten seconds."""
        if self._close is not None:
            self._close()


class RequestSpan:
    """The span of a request. For one event loop."""

    def __init__(self, span: Span) -> None:
        """Takes a span that has begun."""
        self._span = span
        self._outputs: list[RequestOutput] = []
        self._is_streamed = False
        self._has_failed = False

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response, which name this span."""
        context = self._span.get_span_context()
        trace = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"
        made = [(b"traceparent", trace.encode())]
        if context.trace_state:
            made.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
        return made

    def note_request(
        self,
        model: str,
        request_id: str,
        params: SamplingParams,
        *,
        is_chat: bool,
        is_streamed: bool,
    ) -> None:
        """Notes what a request asks for, once it has been read.

        Args:
            model: The name of the model in the response.
            request_id: The request's id.
            params: The sampling parameters.
            is_chat: Whether the prompt is a conversation.
            is_streamed: Whether the response is a stream.
        """
        self._is_streamed = is_streamed
        operation = "chat" if is_chat else "text_completion"
        self._span.update_name(f"{operation} {model}")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request_id,
            "gen_ai.request.id": request_id,  # vLLM's
            "gen_ai.request.n": params.n,  # vLLM's
        }
        if is_streamed:
            attributes["gen_ai.request.stream"] = True
        for name, parameter in _PARAMETERS.items():
            value = getattr(params, parameter)
            if value is not None:
                attributes[f"gen_ai.request.{name}"] = value
        self._span.set_attributes(attributes)

    def note_output(self, output: RequestOutput) -> None:
        """Notes the outputs of a prompt, which have ended."""
        self._outputs.append(output)

    def note_error(self, error: BaseException) -> None:
        """Notes what a stream failed with. The message may quote the prompt, so it is left out."""
        from opentelemetry.trace import StatusCode

        self._has_failed = True
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(StatusCode.ERROR)

    def end(self, status: int) -> None:
        """Ends the span.

        Args:
            status: The status of the response; 0 = the client went away before it.
        """
        from opentelemetry.trace import StatusCode

        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 400:
            self._span.set_attribute("error.type", str(status))
        elif not self._outputs and not self._has_failed:
            self._span.set_attribute("error.type", "client_gone")
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        if self._outputs:
            self._span.set_attributes(_result(self._outputs, is_streamed=self._is_streamed))
        self._span.end()


def _result(outputs: Sequence[RequestOutput], *, is_streamed: bool) -> dict[str, Any]:
    """The attributes of the outputs of a request."""
    ended = [one for output in outputs for one in output.outputs]
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(one.token_ids) for one in ended)
    result: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [one.finish_reason or "none" for one in ended],
        "gen_ai.usage.input_tokens": num_input,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.cache_read.input_tokens": sum(o.num_cached_tokens for o in outputs),
        # vLLM's:
        "gen_ai.usage.prompt_tokens": num_input,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.num_sequences": len(ended),
        "gen_ai.latency.e2e": max(output.metrics.total_time_ms for output in outputs) / 1e3,
    }
    first = [output.metrics.time_to_first_token_ms for output in outputs]
    known = [milliseconds for milliseconds in first if milliseconds is not None]
    if known:
        result["gen_ai.latency.time_to_first_token"] = min(known) / 1e3
        if is_streamed:
            result["gen_ai.response.time_to_first_chunk"] = min(known) / 1e3
    counters = [output.metrics.speculative_decoding for output in outputs]
    drafted = _drafting([one for one in counters if one is not None])
    return result | {f"paceline.spec_decode.{name}": value for name, value in drafted.items()}


def _drafting(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of the drafts of a request's prompts, under the names of `RequestMetrics`."""
    if not counters:
        return {}
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    steps, drafted, accepted = (sum(one[name] for one in counters) for name in names)
    histograms = [one["acceptance_histogram"] for one in counters]
    found: dict[str, Any] = {
        **dict(zip(names, (steps, drafted, accepted), strict=True)),
        "num_spec_tokens": counters[0]["num_spec_tokens"],
        "drafter": counters[0]["drafter"],
        "acceptance_histogram": [sum(counts) for counts in zip(*histograms, strict=True)],
    }
    if steps:
        found["mean_acceptance_length"] = 1 + accepted / steps
        found["mean_draft_length"] = drafted / steps
    return found
