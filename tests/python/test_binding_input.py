# SPDX-License-Identifier: Apache-2.0
"""Wrong input to the binding `_core` itself: options, requests, arrays and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from errors import refuses
from paceline import (
    ModelFileError,
    ModelNotFoundError,
    _core,
)
from paceline.loader import load_checkpoint

OPTIONS = {"max_model_len": 64, "kv_cache_bytes": 8 << 20, "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"nonesuch": 1}, ["unknown executor option 'nonesuch'", "max_model_len"]),
        ({"max_num_seqs": "8"}, ["'max_num_seqs' is '8'", "an integer of 32 bits"]),
        ({"max_num_seqs": True}, ["'max_num_seqs' is True", "an integer of 32 bits"]),
        ({"max_num_seqs": 2**40}, ["'max_num_seqs'", "an integer of 32 bits"]),
        ({"kv_cache_bytes": 2**70}, ["'kv_cache_bytes'", "an integer of 64 bits"]),
        ({"kv_cache_bytes": 1.5}, ["'kv_cache_bytes' is 1.5", "an integer of 64 bits"]),
        ({"block_size": 10**5000}, ["'block_size' is <int>", "an integer of 32 bits"]),
        ({"block_size": "x" * 10**6}, ["'block_size' is 'xxx", "x...; allowed: an integer"]),
        ({"poison_freed_blocks": 1}, ["'poison_freed_blocks' is 1", "True or False"]),
        (
            {"rejection_sample_method": "lossy"},
            ["'lossy'", "'coupled', 'standard', 'block', 'synthetic'"],
        ),
        ({"draft_sample_method": 1}, ["'draft_sample_method' is 1", "'probabilistic', 'greedy'"]),
        ({"draft_sample_method": "greedy"}, ["is 'greedy'", "noise", "'standard' or 'block'"]),
        ({"draft_proposals": 257}, ["draft_proposals is 257", "0 to 256"]),
        ({"draft_proposals": 64}, ["draft_proposals is 64 but there is no drafter"]),
        ({"draft_driver": None}, ["None", "'unrolled', 'replay', 'while', 'eager'"]),
        ({"draft_stop_threshold": 1.0}, ["draft_stop_threshold is 1", "below 1"]),
        ({"draft_stop_threshold": 0.5}, ["0.5 but there is no drafter"]),
        (
            {"synthetic_acceptance_length": 2.5},
            ["synthetic_acceptance_length is 2.5", "'coupled'", "only with 'synthetic'"],
        ),
        ({"host_delay_max_us": -1}, ["host_delay_max_us is -1", "0 to"]),
        ({"max_num_seqs": 0}, ["max_num_seqs is 0", "1 to 1024"]),
        ({"block_size": 0}, ["block_size is 0", "1 to 256"]),
        ({"num_speculative_tokens": 4}, ["num_speculative_tokens", "drafter"]),
    ],
)
def test_executor_options(target_dir: Path, options: dict[str, Any], parts: list[str]) -> None:
    model = load_checkpoint(target_dir).model
    refuses(lambda: _core.Executor(model, None, OPTIONS | options), *parts)


def test_executor_reads_its_options_back(target_dir: Path) -> None:
    model = load_checkpoint(target_dir).model
    given = OPTIONS | {
        "num_speculative_tokens": 3,
        "draft_driver": "while",
        "draft_stop_threshold": 0.25,
        "device_lateness": 1,
        "poison_freed_blocks": True,
        "host_delay_max_us": 3,
    }
    executor = _core.Executor(model, model, given)
    assert given.items() <= executor.options.items()
    assert executor.options["max_num_batched_tokens"] == 2048
    executor.close()


def test_progress_is_a_callable(target_dir: Path) -> None:
    model = load_checkpoint(target_dir).model
    refuses(lambda: _core.Executor(model, None, OPTIONS, 3), "progress is 3", "callable")
    calls: list[tuple[int, int]] = []
    executor = _core.Executor(model, None, OPTIONS, progress=lambda *seen: calls.append(seen))
    executor.close()
    assert all(done <= total for done, total in calls)


def test_devices_of_the_binding(target_dir: Path) -> None:
    loaded = load_checkpoint(target_dir)
    assert loaded.model.device == "cpu" and ", cpu, " in repr(loaded.model)
    refuses(lambda: _core.ModelBuilder(loaded.config_json, "float32", "gpu"), "'gpu'", "'cuda'")
    refuses(lambda: _core.load_model_folder("nonesuch", device="tpu"), "'tpu'", "'cpu', 'cuda'")
    if not _core.cuda_status()["is_usable"]:
        with pytest.raises(NotImplementedError, match=r"cpu|GPU"):
            _core.ModelBuilder(loaded.config_json, "float32", device="cuda")
        with pytest.raises(NotImplementedError, match=r"cpu|GPU"):
            _core.measure_cuda_read_bandwidth()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [128]}, "128"),
        ({"prompt": [1] * 64}, "64"),
        ({"prompt": [1], "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": [1], "temperature": -1.0}, "temperature is -1"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": [1], "stop_token_ids": list(range(9))}, "stop_token_ids"),
    ],
)
def test_requests_that_can_never_run(
    target_dir: Path, arguments: dict[str, Any], part: str
) -> None:
    executor = _core.Executor(load_checkpoint(target_dir).model, None, OPTIONS)
    refuses(lambda: executor.add_request(**arguments), part)
    assert executor.check_integrity() == ""
    executor.close()


def test_unknown_request_is_not_cancelled(target_dir: Path) -> None:
    executor = _core.Executor(load_checkpoint(target_dir).model, None, OPTIONS)
    assert executor.cancel(12345) is False
    executor.close()


def test_a_full_queue_is_no_error(target_dir: Path) -> None:
    model = load_checkpoint(target_dir).model
    executor = _core.Executor(model, None, OPTIONS | {"max_waiting_requests": 1})
    ids = [executor.add_request([1], max_tokens=60) for _ in range(200)]
    assert None in ids and ids[0] is not None
    executor.close()


def test_arrays_for_weights(target_dir: Path) -> None:
    config = load_checkpoint(target_dir).config_json
    builder = _core.ModelBuilder(config, "float32")
    shape = (128, 64)
    name = "embed.weight"
    refuses(lambda: builder.put_array("nonesuch", np.zeros(shape, np.float32)), "nonesuch")
    refuses(lambda: builder.put_array(name, np.zeros((2, 2), np.float32)), name, "128")
    refuses(lambda: builder.put_array(name, np.zeros(shape)), name, "float64", "float32, float16")
    swapped = np.zeros(shape, np.float32).astype(">f4")
    refuses(lambda: builder.put_array(name, swapped), name, ">f4")
    odd = np.zeros(128 * 64 * 4 + 4, np.uint8)[1:-3].view(np.float32).reshape(shape)
    refuses(lambda: builder.put_array(name, odd), name, "not aligned")
    records = np.zeros(shape, np.dtype([("a", np.float32), ("b", np.uint8)]))["a"]
    refuses(lambda: builder.put_array(name, records), name)
    assert name in builder.missing()
    refuses(builder.finish, name)
    refuses(lambda: _core.ModelBuilder(config, "int8"), "int8")
    refuses(lambda: _core.ModelBuilder("{}", "float32"))


def test_strides_do_not_matter(target_dir: Path) -> None:
    config = load_checkpoint(target_dir).config_json
    values = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    arenas = []
    for array in (
        values,
        values.T.copy().T,
        values[::-1].copy()[::-1],
        values.repeat(2, 1)[:, ::2],
    ):
        builder = _core.ModelBuilder(config, "bfloat16")
        builder.put_array("embed.weight", array)
        refuses(lambda b=builder: b.put_array("embed.weight", values), "embed.weight")
        builder.fill_dummy(1)
        assert builder.missing() == []
        arenas.append(bytes(builder.finish().arena()))
        with pytest.raises(RuntimeError, match="finished"):
            builder.missing()
    assert len(set(arenas)) == 1


def test_files_for_weights(target_dir: Path) -> None:
    path = target_dir / "model.safetensors"
    file = _core.SafetensorsFile(str(path))
    names = file.names()
    assert names == sorted(names) and len(file) == len(names) and names[0] in file
    dtype, shape, num_bytes = file.info(names[0])
    assert dtype == "F32" and num_bytes == 4 * int(np.prod(shape))
    assert file.path == str(path)
    assert str(len(names)) in repr(file)
    assert "nonesuch" not in file
    refuses(lambda: file.info("nonesuch"), path, "nonesuch", kind=ModelFileError)
    refuses(lambda: _core.SafetensorsFile("no/such.file"), "no/such.file", kind=ModelNotFoundError)
    refuses(lambda: _core.load_model_folder("no/such"), "no/such", kind=ModelNotFoundError)
