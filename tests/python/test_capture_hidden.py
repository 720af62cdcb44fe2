# SPDX-License-Identifier: Apache-2.0
"""Captures with hidden states of the target."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import deepseek_v4_models
from captured_requests import SMALL, capturing, num_bytes, read_shard, shards, wait_for
from deepseek_v4_models import V4Spec
from paceline import LLM, SamplingParams, cli
from paceline.capture import MIN_MAX_BYTES
from paceline.prompt_values import score_prompt


def hidden_states(folder: Path) -> list[tuple[list[int], Any]]:
    """Prompt and output of each output of a folder, and its hidden states [n, layers, size]."""
    found = []
    for path in shards(folder):
        with safe_open(path, framework="pt") as shard:
            states, offsets = shard.get_tensor("hidden_states"), shard.get_tensor("hidden_offsets")
        texts = [r.prompt + one.token_ids for r in read_shard(path) for one in r.outputs]
        assert len(offsets) == len(texts) + 1 and offsets[-1] == len(states)
        for text, begin, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
            found.append((text, states[begin:end]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_are_those_of_the_target(
    target_dir: Path, speculative_config: dict[str, Any], tmp_path: Path, dtype: str
) -> None:
    """Computed beside other requests, and after them: closing the engine comes last."""
    with LLM(
        target_dir, speculative_config=speculative_config, dtype=dtype,
        **SMALL | {"kv_cache_bytes": 4 << 20, "max_model_len": 128},
    ) as llm:  # fmt: skip
        capture = llm.start_capture(tmp_path / "capture", hidden_layers=[1, -1, 0])
        capture._shard_bytes = 700_000
        for seed in range(3):
            prompts = [[seed, i, 7] * (1 + 5 * i) for i in range(4)]
            llm.generate(prompts, SamplingParams(n=2, seed=seed, max_tokens=100, ignore_eos=True))
    stats = capture.stats()
    assert (stats["state"], stats["num_requests"], stats["num_dropped_requests"]) == (
        "closed",
        12,
        0,
    )
    with safe_open(shards(tmp_path / "capture")[0], framework="pt") as shard:
        assert shard.metadata()["hidden_layers"] == f"1,{num_layers(llm)},0"
    found = hidden_states(tmp_path / "capture")
    assert len(found) == 24 and {len(text) for text, _ in found} >= {103, 118}
    with LLM(target_dir, dtype=dtype, device="cpu", max_model_len=128) as plain:
        for text, states in found:
            expected = torch.from_numpy(plain.hidden_states(text, [1, -1, 0])).transpose(0, 1)
            assert states.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
            assert torch.equal(states, expected.to(states.dtype))


def num_layers(llm: LLM) -> int:
    return len(llm.target.config["layers"])


def test_hidden_states_count_towards_the_limit(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    with capturing(
        llm, tmp_path / "capture", max_bytes=MIN_MAX_BYTES, hidden_layers=[0, 1, 2, 3]
    ) as capture:
        capture._shard_bytes = 300_000
        while capture.stats()["state"] == "on":
            llm.generate([[5] * 200] * 4, params)
        stats = wait_for(capture, "full")
    assert (
        MIN_MAX_BYTES // 2 < num_bytes(tmp_path / "capture") == stats["num_bytes"] <= MIN_MAX_BYTES
    )
    assert len(hidden_states(tmp_path / "capture")) == stats["num_outputs"] > 0


def test_a_full_queue_only_delays_hidden_states(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*args: Any, **request: Any) -> Any:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            raise RuntimeError("the queue of waiting requests is full; try again later")
        return score_prompt(*args, **request)

    num_refused = 3
    monkeypatch.setattr("paceline.prompt_values.score_prompt", score)
    with capturing(llm, tmp_path / "capture", hidden_layers=[1]) as capture:
        num_refused = 0
        llm.generate([[1, 2]], SamplingParams(max_tokens=4, seed=1))
    assert num_refused == 3 and capture.stats()["num_requests"] == 1
    assert len(hidden_states(tmp_path / "capture")) == 1


def test_engines_without_such_hidden_states(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(deepseek_v4_models.make(V4Spec()), device="cpu", max_model_len=64) as streams:
        last = num_layers(streams)
        with pytest.raises(ValueError, match=rf"hidden_layers\[0\] is 1, .*; allowed: {last}"):
            streams.start_capture(tmp_path / "capture", hidden_layers=[1])
        with streams.start_capture(tmp_path / "last", hidden_layers=[last]):
            streams.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1))
    assert len(hidden_states(tmp_path / "last")) == 1
    asked = []

    def refuse(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise NotImplementedError("replicas generate only")

    monkeypatch.setattr("paceline.prompt_values.score_prompt", refuse)
    with pytest.raises(NotImplementedError, match="replicas generate only"):
        llm.start_capture(tmp_path / "capture", hidden_layers=[1])
    assert asked == [1] and not (tmp_path / "capture").exists()


def test_layers_that_do_not_exist(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = num_layers(llm)
    for layers, message in (
        ([last + 1], rf"hidden_layers\[0\] is {last + 1}; allowed: an integer from -{last + 1} to"),
        ([0, 1.5], r"hidden_layers\[1\] is 1.5"),
        ([], r"hidden_layers is \[\]; allowed: a list of indices"),
        ("1", r"hidden_layers is '1'"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.start_capture(tmp_path / "capture", hidden_layers=layers)  # type: ignore[arg-type]
    assert not (tmp_path / "capture").exists() and llm._requests.capture is None
    folder = ["--capture", str(tmp_path / "capture")]
    for argv, error in (
        ([*folder, "--capture-hidden-layers", "7"], "--capture-hidden-layers[0] is 7; allowed: an"),
        ([*folder, "--capture-hidden-layers", "a"], "'a' is not a list of layers"),
        (["--capture-hidden-layers", "1"], "is given without --capture"),
        (
            [*folder, "--capture-hidden-layers", "1", "--replicas", "2"],
            "hidden states of one engine",
        ),
    ):
        with contextlib.suppress(SystemExit):
            assert cli.main(["serve", "--port", "0", "--quiet", *argv]) != 0
        assert error in capsys.readouterr().err
