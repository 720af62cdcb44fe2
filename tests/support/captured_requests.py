# SPDX-License-Identifier: Apache-2.0
"""Captures of an LLM: making one, and the requests in its shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open

from paceline import LLM
from paceline.capture import FINISH_REASONS, Capture, Step
from running_server import RunningServer
from time_limits import HANG_LIMIT_S

#: Room for a few of the sequences that run at once, so that some are preempted.
SMALL: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 8, "max_model_len": 512, "show_progress": False,
    "kv_cache_bytes": 512 << 10, "block_size": 16,
}  # fmt: skip


class CapturedOutput(NamedTuple):
    """An output, and its iterations."""

    token_ids: list[int]
    finish_reason: str
    steps: list[Step]


class CapturedRequest(NamedTuple):
    """A request that has ended."""

    prompt: list[int]
    temperature: float
    drafter: str
    outputs: list[CapturedOutput]


def shards(folder: Path) -> list[Path]:
    """The shards of a folder, in the order in which they were written."""
    return sorted(folder.glob("capture-*.safetensors"))


def num_bytes(folder: Path) -> int:
    """The size of all of them."""
    return sum(shard.stat().st_size for shard in shards(folder))


def requests_of(folder: Path) -> list[CapturedRequest]:
    """All requests of a folder, in the order in which they ended."""
    return [request for shard in shards(folder) for request in read_shard(shard)]


def read_shard(path: Path) -> list[CapturedRequest]:
    """The requests of a shard; checks that its tensors fit each other."""
    with safe_open(path, framework="pt") as shard:
        facts = shard.metadata()
        tensors: dict[str, Any] = {name: shard.get_tensor(name).tolist() for name in shard.keys()}  # noqa: SIM118
    assert (facts["format"], facts["version"]) == ("paceline.capture", "1")
    assert tuple(facts["finish_reasons"].split(",")) == FINISH_REASONS
    drafters = facts["drafters"].split(",")
    prompts = parts(tensors, "prompt_ids", "prompt_offsets")
    steps = [
        [Step(*counts) for counts in zip(*columns, strict=True)]
        for columns in zip(
            *(parts(tensors, f"step_{name}", "step_offsets") for name in _STEPS),
            strict=True,
        )
    ]
    requests = [
        CapturedRequest(prompt, temperature, drafters[drafter], [])
        for prompt, temperature, drafter in zip(
            prompts, tensors["temperatures"], tensors["drafters"], strict=True
        )
    ]
    outputs = parts(tensors, "output_ids", "output_offsets")
    for owner, ids, reason, of_output in zip(
        tensors["output_requests"], outputs, tensors["finish_reasons"], steps, strict=True
    ):
        requests[owner].outputs.append(CapturedOutput(ids, FINISH_REASONS[reason], of_output))
        assert sum(step.num_tokens for step in of_output) == len(ids) > 0
    return requests


_STEPS = ("tokens", "drafted", "accepted")


def parts(tensors: dict[str, Any], values: str, offsets: str) -> list[list[int]]:
    """The parts of a joined tensor."""
    bounds = tensors[offsets]
    assert bounds[0] == 0 and bounds[-1] == len(tensors[values])
    return [tensors[values][a:b] for a, b in itertools.pairwise(bounds)]


@contextmanager
def capturing(llm: LLM, folder: Path, **options: Any) -> Iterator[Capture]:
    """A capture of an LLM that other tests use too."""
    capture = llm.start_capture(folder, **options)
    try:
        yield capture
    finally:
        capture.close()
        llm._requests.capture = None


def wait_for(capture: Capture, state: str) -> dict[str, Any]:
    """Waits until the capture has ended by itself, and has logged why."""
    capture._thread.join(HANG_LIMIT_S)
    stats = capture.stats()
    assert stats["state"] == state
    return stats


def capture_figures(server: RunningServer) -> dict[str, float]:
    """The figures of the capture, by name and further label."""
    with server.send("/metrics") as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("paceline_capture"):
                labels = [
                    f"{key}={value}" for key, value in sample.labels.items() if key != "model"
                ]
                shown = f"{{{','.join(labels)}}}" if labels else ""
                found[sample.name.removeprefix("paceline_") + shown] = sample.value
    return found
