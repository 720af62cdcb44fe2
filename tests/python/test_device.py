# SPDX-License-Identifier: Apache-2.0
"""The choice of a device, the search for cuBLASLt and the memory report, without a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import _core, doctor, reports
from paceline.device import (
    CUBLASLT_NAME,
    CUBLASLT_VARIABLE,
    _auto_device,
    capture_progress,
    find_cublaslt,
    resolve_device,
    usable_devices,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The status of a pretended GPU, which tests may change."""
    status: dict[str, Any] = dict(_core.cuda_status()) | {
        "is_built": True, "is_usable": True, "reason": "",
    }  # fmt: skip
    monkeypatch.setattr(_core, "cuda_status", lambda: status)
    return status


def test_the_status_is_plain_data_and_never_raises() -> None:
    status = _core.cuda_status()
    assert status["is_built"] == _core.build_info()["has_cuda"]
    assert status["is_built"] or not status["is_usable"]
    assert bool(status["reason"]) == (not status["is_usable"])
    if not status["is_built"]:
        assert "-DPACELINE_CUDA=ON" in status["reason"]


def test_auto_is_the_gpu_if_it_is_usable(gpu: dict[str, Any]) -> None:
    assert _auto_device() == "cuda"
    assert usable_devices() == ["auto", "cpu", "cuda"]
    gpu["is_usable"] = False
    assert _auto_device() == "cpu"
    assert usable_devices() == ["auto", "cpu"]


def test_the_doctor_reports_a_gpu_without_free_memory(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise _core.DeviceError("cudaMemGetInfo: out of memory")

    monkeypatch.setattr(_core, "cuda_free_bytes", refuse)
    monkeypatch.setattr(doctor, "check_self_draft", dict)
    cuda = doctor.examine()["cuda"]
    assert (cuda["is_usable"], cuda["free_bytes"]) == (False, 0)
    assert cuda["reason"] == "GPU 0 cannot be used: cudaMemGetInfo: out of memory"


def test_the_path_of_cublaslt_is_set_before_cuda_is_used(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    monkeypatch.setattr(_core, "set_cublaslt_path", named.append)
    monkeypatch.setenv(CUBLASLT_VARIABLE, "/some/where")
    assert resolve_device("cpu") == "cpu" and named == []
    assert resolve_device("cuda") == "cuda" and named == ["/some/where"]


def test_where_cublaslt_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLASLT_VARIABLE, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert find_cublaslt() is None
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    importlib.invalidate_caches()
    assert find_cublaslt() is None
    (folder / CUBLASLT_NAME).touch()
    assert find_cublaslt() == str(folder)
    monkeypatch.setenv(CUBLASLT_VARIABLE, "/some/where")
    assert find_cublaslt() == "/some/where"


def test_the_progress_bar_of_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    with capture_progress(is_shown=True) as report:
        for done in range(4):
            report(done, 3)
    with capture_progress(is_shown=True):
        pass
    assert capsys.readouterr().err == ""  # not a terminal


# ---- memory ------------------------------------------------------------------------------------


def test_the_memory_plan_as_text() -> None:
    group = {
        "owner": "target", "kind": "full", "window": 0, "num_layers": 3, "block_size": 16,
        "block_bytes": 1 << 16, "tokens_per_entry": 1,
    }  # fmt: skip
    size = reports.group_max_bytes(group, max_num_seqs=2, max_model_len=33)
    assert size == 2 * 3 * (1 << 16)
    sliding = group | {"kind": "sliding", "window": 8}
    assert reports.group_max_bytes(sliding, max_num_seqs=1, max_model_len=4096) == 2 << 16
    entries = group | {"kind": "compressed", "tokens_per_entry": 4}
    assert reports.group_max_bytes(entries, max_num_seqs=1, max_model_len=67) == 1 << 16
    assert reports.group_max_bytes(entries, max_num_seqs=1, max_model_len=68) == 2 << 16
    report = {
        "device": "cuda", "target_weight_bytes": 3 << 20, "draft_weight_bytes": 1 << 19,
        "kv_pool_bytes": 64 << 20, "workspace_bytes": 5 << 20, "graph_bytes": 7 << 20,
        "workspace": {"draws": 1 << 20, "logits": 4 << 20, "step state": 512},
        "groups": [group | {"max_bytes": size}],
    }  # fmt: skip
    assert reports.memory_plan(report) == (
        "cuda memory in MiB: weights 3.0 + 0.5 (drafter); KV pool 64.0 (target full x 3: up "
        "to 0.4); workspace 5.0 (logits 4.0, draws 1.0); graphs 7.0"
    )
