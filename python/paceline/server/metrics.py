# SPDX-License-Identifier: Apache-2.0
"""Figures for Prometheus: those of the engine, read when asked for, and those of requests."""

from __future__ import annotations

import bisect
import collections
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import paceline
from paceline.capture import STATES
from paceline.limits import MAX_SPECULATIVE_TOKENS
from paceline.metrics import FIGURES, used_share, value_of
from paceline.outputs import RequestOutput, StreamChunk
from paceline.reports import kv_groups

if TYPE_CHECKING:
    from paceline.replicas.remote import RemoteExecutor

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "paceline_"
_VLLM_PREFIX: Final = "vllm:"
_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0),
)
# Tokens of an iteration, and drafts; k is at most 16.
_LENGTHS: Final = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 17.0)
_DRAFTS: Final = tuple(map(float, range(MAX_SPECULATIVE_TOKENS + 1)))
_Family = CounterMetricFamily | GaugeMetricFamily


class Histogram:
    """A histogram, by default of seconds. For one thread."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        """Starts empty; takes the upper bounds of its buckets."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value, which has occurred `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._total += value * count

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Returns the cumulative counts by upper bound, and the sum."""
        bounds = [*map(str, self._bounds), "+Inf"]
        counts = itertools.accumulate(map(float, self._counts))
        return list(zip(bounds, counts, strict=True)), self._total


class RequestFigures:
    """The figures that the server measures of its requests. For one event loop.

    Attributes:
        first_token: Time to the first token.
        inter_token: Time between two chunks of an output.
        per_token: A request's mean time per token after the first chunk.
        whole: Time of a whole request.
        num_finished: Outputs by finish reason.
        num_responses: Responses by route and status.
        acceptance: What became of drafts, by the method that drafted. The methods are those of this
            version, so there are few.
    """

    def __init__(self) -> None:
        """Starts at zero."""
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.per_token = Histogram()
        self.whole = Histogram()
        self.num_finished: collections.Counter[str] = collections.Counter()
        self.num_responses: collections.Counter[tuple[str, int]] = collections.Counter()
        self.acceptance: dict[str, Acceptance] = {}

    def clock(self) -> ChunkClock:
        """Returns what measures the chunks of one prompt."""
        return ChunkClock(self.inter_token)

    def count(self, output: RequestOutput) -> None:
        """Adds a prompt whose outputs have ended."""
        metrics = output.metrics
        for times, milliseconds in (
            (self.first_token, metrics.time_to_first_token_ms),
            (self.per_token, metrics.mean_itl_ms),
            (self.whole, metrics.total_time_ms),
        ):
            if milliseconds is not None:
                times.observe(milliseconds / 1e3)
        for one in output.outputs:
            self.num_finished[one.finish_reason or "none"] += 1
        counted = metrics.speculative_decoding
        if counted is not None and counted["num_spec_steps"]:
            self.acceptance.setdefault(counted["drafter"], Acceptance()).count(counted)


class Acceptance:
    """What became of the drafts of requests. For one event loop.

    Attributes:
        length: Mean acceptance lengths of requests.
        draft_length: Mean numbers of verified drafts of requests.
        accepted: Accepted drafts of iterations with drafts.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.length = Histogram(_LENGTHS)
        self.draft_length = Histogram(_LENGTHS)
        self.accepted = Histogram(_DRAFTS)

    def count(self, counted: Mapping[str, Any]) -> None:
        """Adds a request's `RequestMetrics.speculative_decoding`, which has iterations."""
        self.length.observe(counted["mean_acceptance_length"])
        self.draft_length.observe(counted["mean_draft_length"])
        for num_accepted, count in enumerate(counted["acceptance_histogram"]):
            self.accepted.observe(num_accepted, count)


class ChunkClock:
    """Measures the times between the chunks of each output of one prompt."""

    def __init__(self, times: Histogram) -> None:
        """Takes the histogram to which it adds."""
        self._times = times
        self._last: dict[int, float] = {}  # by sample

    def note(self, chunk: StreamChunk) -> None:
        """Notes that a chunk has come."""
        if not chunk.token_ids:
            return
        now = time.monotonic()
        before = self._last.get(chunk.sample)
        if before is not None:
            self._times.observe(now - before)
        self._last[chunk.sample] = now


class _Families:
    """Collects metrics under Paceline's names and, if wanted, those of vLLM.

    Attributes:
        made: By full name.
        labels: What the values that are added now have as further labels.
    """

    def __init__(self, model: str, *, has_vllm_names: bool) -> None:
        self.made: dict[str, Metric] = {}
        self.labels: dict[str, str] = {}
        self._model = model
        self._has_vllm_names = has_vllm_names

    def add(
        self,
        kind: type[_Family],
        name: str,
        text: str,
        values: float | Iterable[tuple[Mapping[str, str], float]],
        vllm: str | None = None,
    ) -> None:
        """Adds counters or gauges: one value, or one for each set of labels."""
        listed = [({}, values)] if isinstance(values, int | float) else list(values)
        for full_name, label in self._names(name, vllm):
            labels = [label, *self.labels, *(listed[0][0] if listed else {})]
            family = self.made.setdefault(full_name, kind(full_name, text, labels=labels))
            assert isinstance(family, kind)
            for further, value in listed:
                family.add_metric([self._model, *self.labels.values(), *further.values()], value)

    def add_histogram(
        self, name: str, text: str, values: Histogram, vllm: str | None = None, **further: str
    ) -> None:
        """Adds a histogram, or that of one set of further labels."""
        buckets, total = values.buckets()
        for full_name, label in self._names(name, vllm):
            family = self.made.setdefault(
                full_name, HistogramMetricFamily(full_name, text, labels=[label, *further])
            )
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric([self._model, *further.values()], buckets, total)

    def _names(self, name: str, vllm: str | None) -> Iterator[tuple[str, str]]:
        """The full names of a metric, each with its label for the model."""
        yield _PREFIX + name, "model"
        if self._has_vllm_names and vllm is not None:
            yield _VLLM_PREFIX + vllm, "model_name"


def exposition(
    model: str,
    engines: Sequence[tuple[str | None, Mapping[str, Any]]],
    memory: Mapping[str, Any],
    figures: RequestFigures,
    *,
    replicas: RemoteExecutor | None,
    num_open: int,
    is_speculative: bool,
    has_vllm_names: bool,
    capture: Mapping[str, Any] | None = None,
) -> bytes:
    """Writes all figures in the text format of Prometheus.

    Args:
        model: The name of the model.
        engines: The results of `_core.Executor.stats`, each with the name of its replica; None for
            the only engine of a server without replicas.
        memory: The result of `_core.Executor.memory_report`, of one replica.
        figures: Those of requests.
        replicas: The replicas; None for a server without any.
        num_open: Outputs that the server holds.
        is_speculative: Whether there is a drafter; without one its figures are absent.
        has_vllm_names: Also write those that vLLM has under vLLM's names.
        capture: The result of `Capture.stats`; None without a capture.
    """
    families = _Families(model, has_vllm_names=has_vllm_names)
    groups = kv_groups(memory)
    for replica, engine in engines:
        families.labels = {} if replica is None else {"replica": replica}
        _add_engine(families, engine, groups)
        if is_speculative:
            _add_drafts(families, engine)
    families.labels = {}
    _add_ranks(families, memory["ranks"])
    if replicas is not None:
        _add_replicas(families, replicas)
    _add_requests(families, figures, num_open)
    if capture is not None:
        _add_capture(families, capture)
    registry = CollectorRegistry()
    registry.register(_Made(list(families.made.values())))
    return generate_latest(registry)


class _Made(Collector):
    def __init__(self, made: list[Metric]) -> None:
        self._made = made

    def collect(self) -> Iterable[Metric]:
        return self._made


_COUNTER: Final = CounterMetricFamily
_GAUGE: Final = GaugeMetricFamily
_KINDS: Final[dict[str, type[_Family]]] = {"counter": _COUNTER, "gauge": _GAUGE}


def _add_engine(
    families: _Families, engine: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    for name, (kind, key, text, *vllm) in FIGURES["engine"].items():
        families.add(_KINDS[kind], name, text, value_of(engine, key), *vllm)
    used, text = used_share(engine), "Share of the KV pool in use."
    families.add(_GAUGE, "kv_cache_usage_ratio", text, used, "kv_cache_usage_perc")
    for what, (kind, text) in FIGURES["groups"].items():
        counts = [
            (
                {"group": str(i), **{key: str(name[key]) for key in ("owner", "kind", "window")}},
                group[f"{what}_blocks"],
            )
            for i, (name, group) in enumerate(zip(groups, engine["kv_groups"], strict=True))
        ]
        families.add(_KINDS[kind], f"kv_group_{what}_blocks", text, counts)
    families.add(_GAUGE, "info", "The version.", [({"version": paceline.__version__}, 1)])


def _add_drafts(families: _Families, engine: Mapping[str, Any]) -> None:
    for name, (key, text) in FIGURES["drafts"].items():
        values = engine[key]
        if not isinstance(values, int):
            values = [({"position": str(i)}, count) for i, count in enumerate(values)]
        full = f"spec_decode_{name}"
        families.add(_COUNTER, full, text, values, full)
    for name, text in FIGURES["drafters"].items():
        counts = [({"drafter": method}, of[name]) for method, of in engine["methods"].items()]
        families.add(_COUNTER, f"spec_decode_{name}_per_drafter", text, counts)
    for name, text, key, scale in (
        ("iterations", "Iterations, by the number of drafts.", "num_iterations", 1),
        ("device_seconds", "Time of the device for them.", "us", 1e-6),
    ):
        full = f"spec_decode_{name}"
        counts = [
            ({"num_drafts": str(of["num_drafts"])}, of[key] * scale) for of in engine["drafts"]
        ]
        families.add(_COUNTER, full, text, counts)


def _add_ranks(families: _Families, ranks: Sequence[Mapping[str, Any]]) -> None:
    for what in ("target_weight", "draft_weight", "kv_pool", "workspace", "graph"):
        sizes = [
            (
                # A rank on the CPU has no GPU.
                {"rank": str(i), "gpu": "" if rank["gpu"] is None else str(rank["gpu"])},
                rank[f"{what}_bytes"],
            )
            for i, rank in enumerate(ranks)
        ]
        text = f"Memory of a rank ({what.replace('_', ' ')})."
        families.add(_GAUGE, f"rank_{what}_bytes", text, sizes)


def _add_replicas(families: _Families, replicas: RemoteExecutor) -> None:
    states = replicas.replica_states()
    for kind, name, text, value in (
        (_GAUGE, "replica_up", "Whether a replica takes requests.", _is_up),
        (_GAUGE, "replica_outputs", "Outputs that a replica holds.", "num_outputs"),
        (_COUNTER, "replica_restarts", "Starts after the first.", "num_restarts"),
    ):
        counts = [
            ({"replica": one["replica"]}, value(one) if callable(value) else one[value])
            for one in states
        ]
        families.add(kind, name, text, counts)
    for name, text, count in (
        ("outputs_resumed", "Outputs that went on, on another replica.", "num_resumed"),
        ("outputs_retried", "Outputs that began again, on another replica.", "num_retried"),
    ):
        families.add(_COUNTER, name, text, getattr(replicas.ledger, count))


def _is_up(state: Mapping[str, Any]) -> int:
    return int(state["state"] == "up")


def _add_requests(families: _Families, figures: RequestFigures, num_open: int) -> None:
    families.add(_GAUGE, "outputs_open", "Outputs that the server holds.", num_open)
    families.add(
        _COUNTER,
        "outputs_finished",
        "Outputs of requests to the server that have ended, by reason.",
        [({"finished_reason": key}, count) for key, count in figures.num_finished.items()],
        "request_success",
    )
    families.add(
        _COUNTER,
        "http_responses",
        "Responses, by route and status.",
        [
            ({"route": route, "status": str(status)}, count)
            for (route, status), count in figures.num_responses.items()
        ],
    )
    for name, times, text in (
        ("time_to_first_token", figures.first_token, "From queueing to the first token."),
        ("inter_token_latency", figures.inter_token, "Between two chunks of an output."),
        ("time_per_output_token", figures.per_token, "Mean of a request, after its first chunk."),
        ("e2e_request_latency", figures.whole, "From queueing to the end."),
    ):
        of_request = "request_" if times is figures.per_token else ""
        families.add_histogram(f"{name}_seconds", text, times, f"{of_request}{name}_seconds")
    for drafter, acceptance in sorted(figures.acceptance.items()):
        for name, values, text in (
            ("mean_acceptance_length", acceptance.length, "Of a request, bonus tokens included."),
            ("mean_draft_length", acceptance.draft_length, "Drafts verified, of a request."),
            ("accepted_drafts", acceptance.accepted, "Of an iteration with drafts."),
        ):
            families.add_histogram(f"request_{name}", text, values, drafter=drafter)


def _add_capture(families: _Families, capture: Mapping[str, Any]) -> None:
    for kind, name, text in (
        (_GAUGE, "num_bytes", "Bytes of all shards in the folder of the capture."),
        (_GAUGE, "max_bytes", "Bytes that they have at most."),
        (_COUNTER, "num_requests", "Requests written."),
        (_COUNTER, "num_outputs", "Outputs written."),
        (_COUNTER, "num_tokens", "Tokens of outputs written."),
        (_COUNTER, "num_dropped_requests", "Requests that ended too late for the capture."),
    ):
        families.add(kind, f"capture_{name.removeprefix('num_')}", text, capture[name])
    states = [({"state": state}, int(state == capture["state"])) for state in STATES]
    families.add(_GAUGE, "capture_state", "1 for the state of the capture.", states)
