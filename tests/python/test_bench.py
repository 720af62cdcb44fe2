# SPDX-License-Identifier: Apache-2.0
"""`paceline bench latency`: its report, its errors and its arithmetic."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import eagle_models
import tiny_models
from bench_work import drafting as fixed_drafting
from paceline import _core, cli
from paceline.bench import drafting, latency, latency_command, models, runs
from paceline.bench.workload import Workload
from paceline.demo import demo_paths
from paceline.speculative_config import SpeculativeConfig

# Of --speculative-config.
NAMED = '{"model": "a", "num_speculative_tokens": 2}'
LOOKED_UP = '{"method": "ngram", "num_speculative_tokens": 2}'
OWN_LAYER = '{"method": "mtp", "num_speculative_tokens": 2}'
STOPPING = json.dumps(
    {
        "method": "draft_model",
        "model": "a",
        "num_speculative_tokens": 2,
        "x": {"draft_driver": "while", "draft_stop_threshold": 0.9},
    }
)

pytestmark = pytest.mark.usefixtures("quick_machine")

QUICK = ["--concurrency", "1,3", "--input-len", "9", "--output-len", "16", "--rounds", "1"]

ROW_KEYS = {
    "configuration", "workload", "draft_driver", "iteration_ms", "iteration_p99_ms",
    "output_tokens_per_s", "time_to_first_token_ms", "tokens_per_iteration", "num_draft_tokens",
    "weight_bytes", "kv_bytes", "iteration_bytes", "flops", "gb_per_s", "floor_ms", "floor_share",
    "additive_floor_ms", "additive_floor_share",
    "idle_us", "idle_share", "host_us", "engine_start_s", "first_token_s",
    "start_to_first_token_s", "target_experts", "draft_experts", "prompts_ms", "prompt_floor_ms",
    "may_stop_early", "is_adaptive", "imposed_acceptance_length", "gpu", "rounds", "at_lengths",
}  # fmt: skip


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def bench(*extra: str) -> int:
    return cli.main(["bench", "latency", *QUICK, *extra])


def test_without_options_it_takes_less_than_half_a_minute_on_two_cores() -> None:
    """Of a CPU with AVX-512. One that has only AVX2 computes a fifth as many products a second."""
    limit_s = 2 * 30 if "avx512" in _core.build_info()["cpu_features"] else 2 * 150
    before = children_cpu_s()
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "bench", "latency", "--device", "cpu", "--quiet",
         "--num-threads", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert children_cpu_s() - before < limit_s
    assert "dummy weights: the times are those of models of these shapes" in result.stdout
    rows = [line.split()[:2] for line in result.stdout.splitlines()]
    assert [row for row in rows if row and row[0] in ("plain", "k=4")][:4] == [
        ["plain", "1"], ["k=4", "1"], ["plain", "4"], ["k=4", "4"],
    ]  # fmt: skip


# ---- reports -----------------------------------------------------------------------------------


def test_report_on_a_configuration(
    config_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speculative = {
        "method": "draft_model", "model": str(config_dir), "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.3,
        "x": {"draft_driver": "replay"},
    }  # fmt: skip
    out = tmp_path / "bench.json"
    argv = ["--config", str(config_dir), "--speculative-config", json.dumps(speculative)]
    assert bench(*argv, "--drivers", "unrolled,replay,while", "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["device"] == "cpu" and report["device_name"] is None
    assert report["weight_dtype"] == "float32" and report["peak_tflops"] is None
    assert report["accept_method"] == "synthetic"
    assert report["synthetic_acceptance_length"] == 2.3
    assert len(report["run_id"]) == 12 and re.search(r", \d+ cores?$", report["machine"])
    assert report["command"].startswith("paceline bench latency --concurrency 1,3 --input-len 9")
    assert report["date"].startswith("20") and report["date"].endswith(" UTC")
    startup = report["startup"]
    assert 0 < startup["model_build_s"] < startup["start_to_first_token_s"]
    rows = report["rows"]
    names = ["plain", "k=3 unrolled", "k=3 replay", "k=3 while"]
    assert [row["configuration"] for row in rows] == names * 2
    assert [row["workload"]["concurrency"] for row in rows] == [1] * 4 + [3] * 4
    assert [row["draft_driver"] for row in rows[:4]] == [None, "unrolled", "replay", "while"]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert row["iteration_ms"] > 0 and row["iteration_p99_ms"] >= row["iteration_ms"]
        assert row["output_tokens_per_s"] > 0
        time_us = row["idle_us"] + row["iteration_ms"] * 1e3
        assert row["idle_share"] == pytest.approx(row["idle_us"] / time_us)
        assert row["iteration_bytes"] == row["weight_bytes"] + row["kv_bytes"]
        assert row["floor_ms"] == pytest.approx(row["iteration_bytes"] / 40e9 * 1e3)
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["iteration_ms"])
        assert row["start_to_first_token_s"] > row["engine_start_s"] + row["first_token_s"]
        is_plain = row["configuration"] == "plain"
        assert row["num_draft_tokens"] == (0 if is_plain else 3)
        assert (row["tokens_per_iteration"] == 1) if is_plain else row["tokens_per_iteration"] > 1.5
    assert [(row["configuration"], row["concurrency"]) for row in report["speedup"]] == [
        (name, c) for c in (1, 3) for name in names[1:]
    ]
    table = capsys.readouterr().out
    assert (
        "floor" in table
        and "floor share: the least time" in table
        and "start to first token" in table
    )
    assert sum(line.split()[:1] == ["k=3"] for line in table.splitlines()) == 6 + 6 + 6


def test_report_alone(config_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--config", str(config_dir), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["configuration"] for row in report["rows"]] == ["plain", "plain"]
    assert report["draft"] is None and report["speedup"] == []


def test_dummy_weights_are_announced(config_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in ([], ["--quiet"]):
        assert bench("--config", str(config_dir), "--concurrency", "1", *quiet) == 0
        err = capsys.readouterr().err
        assert err.startswith("" if quiet else f"making dummy weights of {config_dir} ...\n")
        assert (err == "") == bool(quiet)


def test_checkpoint_with_a_dummy_drafter(
    target_dir: Path, config_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(target_dir), "--draft-config", str(config_dir), "--json"]
    assert bench(*argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert "(dummy)" not in report["target"] and "(dummy)" in report["draft"]
    assert report["rows"][1]["configuration"] == "k=4"
    assert report["synthetic_acceptance_length"] == 2.2
    given = '{"num_speculative_tokens": 2, "x": {"draft_driver": "while"}}'
    assert bench(*argv, "--speculative-config", given) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["accept_method"] == "coupled"
    assert report["rows"][1]["configuration"] == "k=2 while"


def test_demo_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--demo", "--json", "--host-only") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "cpu" and report["accept_method"] == "coupled"


def test_the_named_drafter_runs(capsys: pytest.CaptureFixture[str]) -> None:
    target = demo_paths("draft_model")[0]
    named = json.dumps({"model": str(target), "num_speculative_tokens": 2})
    assert bench("--demo", "--json", "--host-only", "--speculative-config", named) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == target.name


@pytest.mark.parametrize(
    ("source", "default"),
    [
        ([], "gemma3-10m"),
        (["--demo"], str(demo_paths("draft_model")[1])),
        (["--draft-config", "gemma3-270m"], "gemma3-270m"),
        (["--demo", "--draft-config", "gemma3-270m"], "gemma3-270m"),
    ],
)
def test_which_drafter(source: list[str], default: str) -> None:
    def chosen(*extra: str) -> tuple[str | None, str | None, list[SpeculativeConfig]]:
        argv = ["bench", "latency", *source, *extra]
        config, speculations = drafting.speculations(cli.build_parser().parse_args(argv))
        assert config is not None
        return config.model, config.method, speculations

    draft, _, [speculation] = chosen()
    assert draft == default
    is_dummy = source != ["--demo"]
    imposed = {
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.2,
    }  # fmt: skip
    assert speculation == fixed_drafting(4, model=default, **(imposed if is_dummy else {}))
    k2 = {"num_speculative_tokens": 2}
    assert chosen("--speculative-config", json.dumps(k2)) == (
        default, None, [fixed_drafting(2, model=default)]
    )  # fmt: skip
    if "--draft-config" not in source:
        named = json.dumps({"model": "elsewhere", **k2})
        assert chosen("--speculative-config", named)[0] == "elsewhere"
        looked_up = json.dumps({"method": "ngram", **k2})
        assert chosen("--speculative-config", looked_up)[0] is None


def test_a_stop_threshold_goes_with_its_driver(config_dir: Path) -> None:
    x = {"draft_driver": "while", "draft_stop_threshold": 0.9}
    given = {"model": str(config_dir), "num_speculative_tokens": 2, "x": x}
    argv = ["bench", "latency", "--speculative-config", json.dumps(given), "--drivers", "while"]
    _, [speculation] = drafting.speculations(cli.build_parser().parse_args(argv))
    assert (speculation.draft_driver, speculation.draft_stop_threshold) == ("while", 0.9)


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "speculators"])
@pytest.mark.parametrize("source", ["--model", "--config"])
def test_draft_heads(layout: str, source: str, tmp_path: Path) -> None:
    target = tiny_models.make(tiny_models.TinySpec("qwen3", seed=1, vocab_size=128, num_layers=4))
    spec = eagle_models.EagleSpec(layout, aux_layers=(1, 2, 3))
    eagle_models.write(spec, target, tmp_path / "head")
    method = "eagle" if layout == "eagle" else "eagle3"
    speculative = {
        "method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.3,
    }  # fmt: skip
    out = tmp_path / "bench.json"
    argv = [source, str(target), "--speculative-config", json.dumps(speculative)]
    assert bench(*argv, "--json", str(out)) == 0
    row = json.loads(out.read_text())["rows"][1]
    assert row["configuration"] == "k=3" and 1.5 < row["tokens_per_iteration"] < 3.1


def test_prompt_lookup(config_dir: Path, tmp_path: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    out = tmp_path / "bench.json"
    argv = ["--config", str(config_dir), "--speculative-config", json.dumps(speculative)]
    assert bench(*argv, "--json", str(out)) == 0
    plain, drafted = json.loads(out.read_text())["rows"][:2]
    assert drafted["num_draft_tokens"] == 3
    assert drafted["weight_bytes"] == plain["weight_bytes"]


def test_samplings(config_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    argv = ["--config", str(config_dir), "--draft-config", str(config_dir), "--json", str(out)]
    samplings = [{"temperature": 1}, {"temperature": 1, "top_p": 0.9, "frequency_penalty": 0.1}]
    argv += [word for sampling in samplings for word in ("--sampling", json.dumps(sampling))]
    assert bench(*argv, "--concurrency", "2") == 0
    report = json.loads(out.read_text())
    assert [row["configuration"] for row in report["rows"]] == [
        f"{name} {asked}"
        for name in ("plain", "k=4")
        for asked in ("temperature=1", "temperature=1 top_p=0.9 frequency_penalty=0.1")
    ]
    assert [row["workload"]["sampling"] for row in report["rows"]] == samplings * 2
    assert len(report["speedup"]) == 2


def test_samplings_run_as_they_are_checked(
    config_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # top_k 0 and -1 both mean the whole vocabulary; min_tokens may equal output_len.
    given = ["--sampling", '{"top_k": -1}', "--sampling", '{"min_tokens": 20}']
    argv = ["--config", str(config_dir), "--concurrency", "2", "--output-len", "20", "--json"]
    assert bench(*argv, *given) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["workload"]["sampling"] for row in rows] == [
        {"temperature": 0, "top_k": 0}, {"temperature": 0, "min_tokens": 20}
    ]  # fmt: skip


# ---- traces ------------------------------------------------------------------------------------


def test_traces_need_an_engine_that_times_kernels(
    config_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(config_dir), "--trace", str(tmp_path / "trace.json")]
    assert bench(*argv) == 2
    assert "--trace times kernels, but the device is 'cpu'" in capsys.readouterr().err


def test_trace(config_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        {"name": "norm", "count": 6, "total_us": 2.0},
        {"name": "gemm", "count": 21, "total_us": 30.0},
    ]

    def trace_iteration(executor: _core.Executor) -> list[dict[str, Any]]:
        assert executor.stats()["num_running"] > 0
        return kernels

    monkeypatch.setattr(_core.Executor, "trace_iteration", trace_iteration)
    monkeypatch.setattr("paceline.bench.latency_command.can_trace", lambda device: True)
    out = tmp_path / "trace.json"
    assert bench("--config", str(config_dir), "--output-len", "200", "--trace", str(out)) == 0
    table = json.loads(out.read_text())
    assert [row["concurrency"] for row in table["rows"]] == [1, 3]
    assert table["rows"][0]["kernels"] == kernels[::-1]


# ---- requests that fail ------------------------------------------------------------------------


@pytest.fixture
def broken_dir(tmp_path: Path) -> Path:
    """A checkpoint whose logits are NaN."""
    source = tiny_models.make(tiny_models.TinySpec("gemma3", seed=3))
    out = tiny_models.copy_checkpoint(source, tmp_path / "broken")
    tensors = tiny_models.load_tensors(source)
    norm = next(name for name in tensors if name.endswith("model.norm.weight"))
    tensors[norm] = tensors[norm] * float("nan")
    tiny_models.save_tensors(out, tensors)
    return out


def test_a_failed_request_is_no_measurement(broken_dir: Path) -> None:
    model = models.load(str(broken_dir), dummy=False)
    workload = Workload(2, 4, 6)
    steps = (
        lambda executor: runs.first_token_seconds(executor, workload, 128),
        lambda executor: runs.run_once(executor, workload, 128, seed=1),
        lambda executor: runs.trace(executor, workload, 128),
    )
    for step in steps:
        executor = latency.make_executor(model, None, None, workload)
        try:
            with pytest.raises(RuntimeError, match=r"request of the bench ended by error: .*NaN"):
                step(executor)
        finally:
            executor.close()


def test_a_failed_engine_ends_the_command(
    broken_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--model", str(broken_dir)) == cli.EXIT_FAILURE
    captured = capsys.readouterr()
    assert "paceline: error: a request of the bench ended by error" in captured.err
    assert captured.out == ""


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--concurrency", "0"], "concurrency is '0'"),
        (["--sampling", "[1]"], "sampling is '[1]'"),
        (["--sampling", '{"seed": 1}'], "sampling is"),
        (["--sampling", '{"top_p": 2}'], "top_p is 2"),
        (["--sampling", "{}", "--temperature", "1"], "name the temperature in --sampling"),
        (["--concurrency", "a"], "concurrency is 'a'"),
        (["--rounds", "0"], "rounds is 0"),
        (["--input-len", "0"], "--input-len is '0'"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--drivers", "unrolled,magic"], "drivers is 'unrolled,magic'"),
        (["--config", "nonesuch"], "model is 'nonesuch'"),
        (["--config", "gpt-oss-20b-eagle3"], "it is a draft head (eagle3) and no target"),
        (["--model", "qwen3-8b"], "use --config qwen3-8b"),
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", '{"model": "a"}'], "num_speculative_tokens"),
        (
            ["--draft-config", "gemma3-10m", "--speculative-config", NAMED],
            "--draft-config is 'gemma3-10m', but --speculative-config['model'] is 'a'",
        ),
        (
            ["--draft-config", "gemma3-10m", "--speculative-config", LOOKED_UP],
            "--draft-config is 'gemma3-10m', but method is 'ngram'",
        ),
        (
            ["--draft-config", "gemma3-10m", "--speculative-config", OWN_LAYER],
            "--draft-config is 'gemma3-10m', but method is 'mtp'",
        ),
        (
            ["--drivers", "replay", "--speculative-config", STOPPING],
            "--drivers is 'replay': --speculative-config['x']['draft_stop_threshold'] is 0.9",
        ),
        (["--drivers", "while,unrolled", "--speculative-config", STOPPING], "is 'unrolled'"),
        (
            ["--sampling", '{"min_tokens": 17}'],
            "--output-len = 16: min_tokens is 17; allowed: 0 to",
        ),
        (["--output-len", "8", "--sampling", '{"min_tokens": 10}'], "max_tokens = 8"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--json", "no/such/bench.json"], "--json is 'no/such/bench.json'"),
        (["--json", "."], "--json is '.'"),
        (["--trace", "no/such/trace.json"], "--trace is 'no/such/trace.json'"),
    ],
)
def test_refusals(
    extra: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(source: str, **_: Any) -> models.BenchModel:
        # Only the name can be refused here.
        assert source in ("nonesuch", "gpt-oss-20b-eagle3"), (
            "loaded before all arguments were checked"
        )
        return models.load(source, dummy=True)

    monkeypatch.setattr(latency_command, "load", load)
    assert bench(*extra) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_drivers_need_a_drafter(config_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--config", str(config_dir), "--drivers", "while") == 2
    assert "there is no drafter" in capsys.readouterr().err


def test_workloads_take_turns_on_one_engine(
    config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.load(str(config_dir), dummy=True)
    workloads = [Workload(2, 4, 6, {"temperature": t}) for t in (0.0, 1.0)]
    order = []
    run_once = latency.run_once

    def spy(executor: _core.Executor, workload: Workload, *args: Any, **kwargs: Any) -> runs.Run:
        order.append((kwargs["seed"], workload))
        return run_once(executor, workload, *args, **kwargs)

    monkeypatch.setattr(latency, "run_once", spy)
    rows = latency.measure(model, None, None, workloads, rounds=2)
    assert order == [(seed, workload) for seed in (0, 1, 2) for workload in workloads]
    assert [row.workload for row in rows] == workloads
    assert all(row.iteration_ms > 0 and row.host_us > 0 for row in rows)
    assert rows[0].engine_start_s == rows[1].engine_start_s > 0
    for wrong in ([], [workloads[0], Workload(2, 4, 7)]):
        with pytest.raises(ValueError, match="at least one, and all of one concurrency"):
            latency.measure(model, None, None, wrong)
