# SPDX-License-Identifier: Apache-2.0
"""`paceline bench latency` with lists: of k, of prompt lengths, of acceptance lengths."""

from __future__ import annotations

import ctypes
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench_work import drafting, logit_parameters, row_parameters
from paceline import _core, cli
from paceline.bench import floor, gpu_state, latency_command, models
from paceline.bench.costs import matrix_costs
from paceline.bench.drafting import speculations
from paceline.bench.latency_options import parse_latency_options
from paceline.bench.latency_report import Setup, with_cells
from paceline.bench.lengths import at_lengths
from paceline.bench.pairs import report as pairs_report
from paceline.bench.pairs.known import Pair
from paceline.bench.report import GrowingTable, columns, gpu_cells
from paceline.bench.workload import Workload
from paceline.loader import decoder_config

ROOT = Path(__file__).parents[2]
LENGTH = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.7}


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "measure_read_bandwidth", lambda num_threads=0, num_bytes=0: 40e9)
    monkeypatch.setattr(_core, "measure_arithmetic", lambda num_threads, is_bfloat16: 1e12)


def bench(config: Path, *extra: str) -> int:
    argv = ["--config", str(config), "--output-len", "16", "--rounds", "2", "--quiet", *extra]
    return cli.main(["bench", "latency", *argv])


def test_one_command_sweeps_k_and_prompts(
    config_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    argv = ["--draft-config", str(config_dir), "--speculative-config", json.dumps(LENGTH)]
    argv += ["--num-speculative-tokens", "1,3", "--input-len", "9,40", "--concurrency", "2"]
    assert bench(config_dir, *argv, "--acceptance-lengths", "1.7,2.34", "--json", str(out)) == 0
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert [(row["configuration"], row["num_draft_tokens"]) for row in rows] == [
        (f"{name} input_len={n}", k)
        for n in (9, 40)
        for name, k in (("plain", 0), ("k=1", 1), ("k=3", 3))
    ]  # fmt: skip
    assert [row["workload"]["input_len"] for row in rows] == [9] * 3 + [40] * 3
    assert [speedup["input_len"] for speedup in report["speedup"]] == [9, 9, 40, 40]
    for plain, *drafted in (rows[:3], rows[3:]):
        assert plain["at_lengths"] == [] and plain["imposed_acceptance_length"] is None
        for row in drafted:
            # k = 1 emits two tokens at most.
            expected = [(1.7, "imposed"), (2.34, "computed")][: 1 + (row["num_draft_tokens"] == 3)]
            at = row["at_lengths"]
            assert [(entry["acceptance_length"], entry["source"]) for entry in at] == expected
            seconds = row["iteration_ms"] / 1e3 + row["idle_us"] / 1e6
            for entry, (length, _) in zip(at, expected, strict=True):
                assert entry["tokens_per_s"] == pytest.approx(2 * length / seconds)
    for row in rows:
        assert len(row["rounds"]) == 2
        assert row["prompts_ms"] >= row["time_to_first_token_ms"] > 0
        assert {len(values) for values in row["rounds"]} == {4}
        prompts = sorted(values["prompts_ms"] for values in row["rounds"])
        assert prompts[0] <= row["prompts_ms"] <= prompts[1]
        assert row["gpu"] is None  # on the CPU
    assert rows[0]["prompt_floor_ms"] < rows[1]["prompt_floor_ms"] < rows[4]["prompt_floor_ms"]
    printed = capsys.readouterr().out
    table = [
        line.split() for line in printed.split("tokens/s at acceptance length")[1].splitlines()
    ]
    assert table[0] == ["sequences", "1.7", "2.34"]
    assert [line[:3] for line in table[1:5:2]] == [["k=1", f"input_len={n}", "2"] for n in (9, 40)]
    assert [line[3].endswith("*") for line in table[1:5]] == [True] * 4
    assert [line[4] == "-" for line in table[1:5]] == [True, False] * 2
    first = [line.split() for line in printed.split("time to the first token")[1].splitlines()]
    assert [line[3] for line in first[1:7]] == ["9"] * 3 + ["40"] * 3
    assert "* = the length that was imposed" in printed


def test_the_floor_of_prompts_is_arithmetic() -> None:
    """Qwen3-8B at 790 TFLOP/s: 8,000 and 32,000 tokens with EAGLE-3, as computed by hand."""
    config = decoder_config(models.named_config("qwen3-8b"), "bfloat16")
    costs = matrix_costs(config, "bfloat16")

    class Described:
        pass

    model = Described()
    model.config, model.costs, model.item_bytes = config, costs, 2  # type: ignore[attr-defined]
    for num, expected_ms in ((8000, 165.4), (32000, 950.0)):
        row: Any = Described()
        row.workload, row.num_draft_tokens = Workload(1, num, 1), 0
        [ops] = floor._prompt_passes(model, None, row)  # type: ignore[arg-type]
        # Every row takes the layers' products, one the lm_head; row i attends to i keys.
        exact = 2 * row_parameters(costs) * num + 2 * logit_parameters(costs)
        exact += 36 * 4 * 32 * 128 * num * num / 2
        assert sum(op.flops for op in ops) == pytest.approx(exact, rel=1e-6)
        assert exact / 790e9 == pytest.approx(expected_ms, rel=0.01)


def test_a_cell_that_does_not_fit_is_left_out(
    config_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = latency_command.measure

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if args[3][0].input_len == 40:
            raise MemoryError("no room")
        return measure(*args, **kwargs)

    monkeypatch.setattr(latency_command, "measure", refuse)
    out = tmp_path / "bench.json"
    lists = ["--input-len", "9,40", "--concurrency", "1"]
    assert bench(config_dir, *lists, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert [row["workload"]["input_len"] for row in report["rows"]] == [9]
    left = {"configuration": "plain", "concurrency": 1, "input_len": 40, "reason": "no room"}
    assert report["not_measured"] == [left]
    captured = capsys.readouterr()
    assert "not measured: plain at 1 sequence, 40 prompt tokens: no room" in captured.err
    # Nothing at all, and a single cell, are errors.
    for lists in (["--input-len", "40", "--concurrency", "1,2"], ["--input-len", "40"]):
        assert bench(config_dir, *lists) == cli.EXIT_OUT_OF_MEMORY
        assert "no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--input-len", "9,0"], "--input-len is '9,0'; allowed: integers of 1 or more"),
        (["--num-speculative-tokens", "0"], "allowed: integers from 1 to 16, for example 1,3,5,7"),
        (["--num-speculative-tokens", "2"], "there is no drafter"),
        (
            ["--input-len", "9,99999"],
            "--input-len is 99999 and --output-len 16, so requests have 100015 tokens, but ",
        ),
        (["--acceptance-lengths", "0.5"], "allowed: numbers from 1 to 17"),
        (["--acceptance-lengths", "x"], "--acceptance-lengths is 'x'"),
        (
            ["--draft-config", "gemma3-10m", "--num-speculative-tokens", "1,3",
             "--speculative-config", json.dumps(LENGTH | {"synthetic_acceptance_length": 2.34})],
            "--num-speculative-tokens has 1, which --speculative-config excludes: "
            "--speculative-config['synthetic_acceptance_length'] is 2.34",
        ),
    ],
)  # fmt: skip
def test_refusals(
    extra: list[str], message: str, config_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(config_dir, *extra) == 2
    assert message in capsys.readouterr().err


def test_the_evidence_of_gpus_names_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "cuda"))
    evidence = importlib.import_module("evidence")
    for name, options in evidence.BENCHES.items():
        args = cli.build_parser().parse_args([*evidence.BENCH[2:], *options])
        parsed = parse_latency_options(args)
        config, found = speculations(args)
        assert config is not None and found, name
        assert (parsed.arrivals is None) == (name != "arrivals")
        assert name in evidence.UNTRACED or parsed.arrivals is None


def test_an_engine_that_chooses_has_a_row(
    config_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    argv = ["--draft-config", str(config_dir), "--num-speculative-tokens", "1,3", "--adaptive"]
    assert bench(config_dir, *argv, "--concurrency", "2", "--json", str(out)) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["configuration"], row["is_adaptive"]) for row in rows] == [
        ("plain", False), ("k=1", False), ("k=3", False), ("adaptive to k=3", True)
    ]  # fmt: skip
    assert rows[-1]["at_lengths"] == []
    assert bench(config_dir, *argv, "--host-only") == 2
    assert "--adaptive does not go with --host-only" in capsys.readouterr().err
    assert bench(config_dir, "--adaptive") == 2
    assert "adaptive is True, but there is no drafter" in capsys.readouterr().err


def test_drafting_that_may_stop_has_no_computed_rate() -> None:
    model = models.load("gemma3-10m", dummy=True, show_progress=False)
    lookup = drafting(2, model=None, method="ngram", prompt_lookup_min=1, prompt_lookup_max=2)
    [row] = latency_command.measure(model, None, lookup, [Workload(1, 4, 8)], rounds=1)
    assert row.may_stop_early and at_lengths(row, [2.0]) == []


class FakeNvml:
    """NVML with one GPU, chosen by index, that gets warmer and is held back by its power."""

    def __init__(self) -> None:
        self.chosen: list[Any] = []
        self.num_asked = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        self.chosen.append(index.value)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: Any, device: Any) -> int:
        self.chosen.append(name.value)
        return 0

    def _give(self, pointer: Any, value: int) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint))[0] = value
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, pointer: Any) -> int:
        self.num_asked += 1
        return self._give(pointer, 600_000 + 20_000 * (self.num_asked % 2))

    def nvmlDeviceGetClockInfo(self, device: Any, kind: Any, pointer: Any) -> int:
        return self._give(pointer, 1980 if kind.value == 1 else 3201)

    def nvmlDeviceGetTemperature(self, device: Any, sensor: Any, pointer: Any) -> int:
        return 3  # "not supported"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ulonglong))[0] = 4 if self.num_asked > 1 else 1
        return 0


def test_the_state_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(gpu_state.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(gpu_state, "_PERIOD_S", 0.001)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    sampler = gpu_state.GpuSampler("cuda")
    with sampler.sampling():
        while nvml.num_asked < 2:
            pass
    samples = sampler.take()
    assert len(samples) == nvml.num_asked and sampler.take() == []
    state = gpu_state.gpu_state(samples[:2])
    assert state is not None and state.as_dict() == {
        "sm_clock_mhz": 1980, "min_sm_clock_mhz": 1980, "memory_clock_mhz": 3201,
        "power_w": 610.0, "temperature_c": None, "is_throttled": True, "num_samples": 2,
    }  # fmt: skip
    assert gpu_cells(state.as_dict()) == {"clock": "1980!", "power": "610"}
    first = gpu_state.gpu_state(samples[:1])
    assert first is not None and first.is_throttled is False  # idle is no reason
    assert gpu_cells(None) == {"clock": "-", "power": "-"} and gpu_state.gpu_state([]) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a-b")
    gpu_state.GpuSampler("cuda")
    assert nvml.chosen == [3, b"GPU-a-b"]


def test_without_a_gpu_there_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(gpu_state.ctypes, "CDLL", refuse)
    for device in ("cuda", "cpu"):
        sampler = gpu_state.GpuSampler(device)
        with sampler.sampling():
            pass
        assert sampler.take() == []


def test_rows_of_a_gpu_have_its_clock_and_power() -> None:
    model = models.load("gemma3-10m", dummy=True, show_progress=False)
    work = Workload(1, 4, 8, {"temperature": 0})
    [row] = latency_command.measure(model, None, None, [work], rounds=1)
    shown = with_cells({"configuration": "plain", **row.as_dict()})
    setups = (Setup(model, None, [], device, 0.0, 0.0) for device in ("cuda", "cpu"))
    gpu, cpu = (GrowingTable(columns(*setup.parts), 13).row(shown).split() for setup in setups)
    assert gpu == [*cpu, "-", "-"]
    # The table of pairs has them, too.
    pair_row = pairs_report.pair_row(Pair("p", "t", "d"), drafting(3), None, row)
    on_gpu, on_cpu = (pairs_report.table_of(device, 13) for device in ("cuda", "cpu"))
    names, units = on_gpu.heading()
    assert names.endswith("clock power") and units.endswith("MHz     W")
    gpu_line, cpu_line = (pairs_report.line_of(table, pair_row) for table in (on_gpu, on_cpu))
    assert gpu_line == cpu_line + "     -     -"
    assert "clock, power" in pairs_report.legend("cuda", []) != pairs_report.legend("cpu", [])
