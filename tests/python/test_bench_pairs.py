# SPDX-License-Identifier: Apache-2.0
"""`paceline bench pairs`: its table, its report, its options and its errors."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import eagle_models
import tiny_models
from paceline import LLM, SamplingParams, _core, cli, loader
from paceline.bench import models
from paceline.bench.pairs import command, known, options
from paceline.demo import demo_paths
from paceline.loader.drafters import Target

pytestmark = pytest.mark.usefixtures("quick_machine")

QUICK = ["--input-len", "9", "--output-len", "16", "--concurrency", "1,4"]
PROMPTS = ["def quicksort(items):", "class Queue:", "import os\n", "x = 1"]

VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "total_token_throughput",
    *(
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_draft_tokens", "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
}  # fmt: skip
OWN_KEYS = {
    "pair", "drafter_id", "has_dummy_weights", "acceptance", "imposed_acceptance_length",
    "imposed_acceptance_source", "speculative_method", "num_speculative_tokens",
    "rejection_sample_method", "temperature", "iteration_ms", "floor_ms", "floor_share",
    "additive_floor_ms", "additive_floor_share",
    "idle_share", "gpu", "target_experts", "draft_experts",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`target` and `head`, with nothing but a `config.json`; and `vast`, which no memory holds."""
    folder = tmp_path_factory.mktemp("pairs")
    target = tiny_models.make(tiny_models.TinySpec("qwen3", seed=1, vocab_size=128, num_layers=4))
    head = folder / "made"
    eagle_models.write(eagle_models.EagleSpec("eagle3", aux_layers=(1, 2, 3)), target, head)
    for name, source in (("target", target), ("head", head), ("vast", target)):
        (folder / name).mkdir()
        shutil.copy(source / "config.json", folder / name)
    config = folder / "vast" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"intermediate_size": 2**24, "hidden_size": 2**16}))
    yield folder


def bench(*extra: str) -> int:
    return cli.main(["bench", "pairs", "--device", "cpu", *QUICK, *extra])


# ---- reports -------------------------------------------------------------------------------------


def test_dummy_pairs(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folders)
    out, image = tmp_path / "pairs.json", tmp_path / "pairs.png"
    argv = ["--config", "qwen3-8b+eagle3=target,head", "--config", "mine=target,target"]
    assert bench(*argv, "--json", str(out), "--plot", str(image)) == 0
    report = json.loads(out.read_text())
    assert set(report) == {
        "bench", "date", "command", "machine", "version", "build", "device",
        "read_bandwidth_gb_per_s", "rows", "not_measured",
    }  # fmt: skip
    assert report["command"].startswith("paceline bench pairs --device cpu --input-len 9")
    assert (report["bench"], report["not_measured"]) == ("pairs", [])
    rows = report["rows"]
    assert [(row["pair"], row["temperature"], row["max_concurrency"]) for row in rows] == [
        (pair, t, c) for pair in ("qwen3-8b+eagle3", "mine") for t in (0, 1) for c in (1, 4)
    ]
    for row in rows:
        assert set(row) == VLLM_KEYS | OWN_KEYS
        # The figures of a row agree with each other.
        assert (row["completed"], row["num_prompts"], row["failed"]) == (8, 8, 0)
        assert (row["total_input_tokens"], row["total_output_tokens"]) == (8 * 9, 8 * 16)
        assert row["output_throughput"] == pytest.approx(128 / row["duration"])
        assert row["total_token_throughput"] == pytest.approx(200 / row["duration"])
        # While a request runs, all of its time is before or after its first token.
        spans = row["mean_ttft_ms"] + 15 * row["mean_tpot_ms"]
        assert spans == pytest.approx(row["mean_e2el_ms"])
        assert 0 < row["median_ttft_ms"] <= row["p99_ttft_ms"]
        busy = row["mean_e2el_ms"] * 8 / row["max_concurrency"] / 1e3
        assert busy <= row["duration"] * 1.001
        accepted, windows = row["spec_decode_accepted_tokens"], row["spec_decode_num_drafts"]
        assert row["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / windows)
        assert sum(row["spec_decode_per_position_acceptance_rates"]) == pytest.approx(
            accepted / windows
        )
        # Every verify window emits its accepted drafts and a token, but the end cuts some off.
        assert 8 * 15 <= accepted + windows <= 8 * 15 + 8 * 3
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["iteration_ms"])
        assert row["has_dummy_weights"] and row["rejection_sample_method"] == "synthetic"
    assert [row["label"] for row in rows[:2]] == [
        "qwen3-8b+eagle3 T=0 c=1",
        "qwen3-8b+eagle3 T=0 c=4",
    ]
    imposed = [(row["imposed_acceptance_length"], row["imposed_acceptance_source"]) for row in rows]
    assert imposed == [
        (2.34, "published for T=0, c=1"), (2.34, "published for T=0, c=1"),
        (2.29, "published for T=1, c=1"), (2.29, "published for T=1, c=1"),
        *[(2.3, "assumed")] * 4,
    ]  # fmt: skip
    assert [row["speculative_method"] for row in rows] == ["eagle3"] * 4 + ["draft_model"] * 4
    table = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in table if line.startswith(("qwen3-8b+eagle3 ", "mine "))]
    assert [(*cells[:3], *cells[18:20]) for cells in shown] == [
        (row["pair"], f"{row['temperature']:g}", str(row["max_concurrency"]),
         f"{row['imposed_acceptance_length']:.2f}", row["acceptance"])
        for row in rows
    ]  # fmt: skip
    assert [float(cells[3]) for cells in shown] == [
        round(row["output_throughput"], 1) for row in rows
    ]
    legend = "\n".join(table)
    assert "published: dummy weights" in legend and "assumed: dummy weights" in legend
    assert "measured: checkpoints" not in legend
    assert image.read_bytes().startswith(b"\x89PNG")


def test_measured_acceptance_is_that_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = demo_paths("eagle3")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    argv = ["--model", f"demo={target},{head}", "--prompts-file", str(file), "--temperatures", "0"]
    assert bench(*argv, "--num-prompts", "4", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    config = {"model": str(head), "num_speculative_tokens": 3, "x": {"adaptive": False}}
    with LLM(str(target), speculative_config=config, device="cpu") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    metrics = [output.metrics.speculative_decoding for output in outputs]
    steps, drafted, accepted = (
        sum(metric[key] for metric in metrics)
        for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    for row in rows:
        assert (row["acceptance"], row["imposed_acceptance_length"]) == ("measured", None)
        assert row["total_input_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
        assert (row["spec_decode_num_drafts"], row["spec_decode_draft_tokens"]) == (steps, drafted)
        assert row["spec_decode_accepted_tokens"] == accepted
        assert row["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / drafted)
        assert row["rejection_sample_method"] == "coupled" and not row["has_dummy_weights"]


def test_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = demo_paths("eagle3")
    copy = tmp_path / "target"
    shutil.copytree(target, copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content * 3 }}")
    (tmp_path / "prompts.txt").write_text("x = 1\n")
    argv = ["--model", f"demo={copy},{head}", "--prompts-file", str(tmp_path / "prompts.txt")]
    argv += ["--temperatures", "1", "--concurrency", "1", "--num-prompts", "1", "--json"]
    counts = []
    for extra in ([], ["--chat", "--rejection-sample-method", "block"]):
        assert bench(*argv, *extra) == 0
        [row] = json.loads(capsys.readouterr().out)["rows"]
        counts.append((row["total_input_tokens"], row["rejection_sample_method"]))
    assert counts[0][1] == "coupled" and counts[1][1] == "block"
    assert counts[1][0] >= 2 * counts[0][0]


def test_a_stored_report_is_drawn(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    rows = [
        {"pair": "a+b", "temperature": t, "max_concurrency": c, "output_throughput": 10.0 * c + t,
         "median_itl_ms": 2.0 * c, "floor_share": None if c == 1 else 0.5,
         "has_dummy_weights": t == 0}
        for t in (0, 1) for c in (4, 1)
    ]  # fmt: skip
    stored = tmp_path / "pairs.json"
    stored.write_text(json.dumps({"bench": "pairs", "machine": "m", "rows": rows}))
    assert cli.main(["bench", "plot", str(stored), "--out", str(tmp_path / "a.svg")]) == 0
    [figure] = figures
    drawn = [
        {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}
        for lines in (axes.get_lines() for axes in figure.axes)
    ]
    assert drawn[0] == {
        "a+b, T=0, imposed length": ([1, 4], [10, 40]),
        "a+b, T=1": ([1, 4], [11, 41]),
    }
    assert drawn[1]["a+b, T=1"] == ([1, 4], [2, 8])
    assert drawn[2]["a+b, T=0, imposed length"] == ([4], [0.5])
    assert len(figure.legends[0].get_texts()) == 2 and figure.get_suptitle() == "m"


# ---- memory --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_listed(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders)
    real = command.measure

    def measure(*args: Any, **kwargs: Any) -> Any:
        if args[3][0].concurrency == 4:
            raise _core.OutOfMemoryError("out of memory: the KV pool")
        return real(*args, **kwargs)

    monkeypatch.setattr(command, "measure", measure)
    argv = ["--config", "big=vast,target", "--config", "small=target,target"]
    argv += ["--temperatures", "0"]
    assert bench(*argv, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["pair"], row["max_concurrency"]) for row in report["rows"]] == [("small", 1)]
    whole, one = report["not_measured"]
    assert whole.pop("reason").startswith("out of memory: ")
    assert whole == {"pair": "big", "temperature": None, "max_concurrency": None}
    assert one == {
        "pair": "small", "temperature": 0, "max_concurrency": 4,
        "reason": "out of memory: the KV pool",
    }  # fmt: skip
    assert bench(*argv) == 0
    out = capsys.readouterr().out
    assert "not measured: out of memory: the KV pool" in out
    assert any(line.split()[:4] == ["big", "-", "-", "not"] for line in out.splitlines())
    # Without a row, the exit code says so.
    assert bench("--config", "big=vast,target") == cli.EXIT_OUT_OF_MEMORY


def test_a_pair_is_freed_before_the_next_one_is_loaded(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    loaded: list[weakref.ref[Any]] = []

    def load(source: str, **kwargs: Any) -> models.BenchModel:
        assert [ref for ref in loaded if ref() is not None] == []
        model = models.load(source, **kwargs)
        loaded.append(weakref.ref(model.loaded))
        return model

    monkeypatch.setattr(command, "load", load)
    argv = ["--config", "a=target,vast", "--config", "b=target,target", "--config", "c=target,head"]
    assert bench(*argv, "--temperatures", "0", "--concurrency", "1") == 0
    assert len(loaded) == 3


# ---- the pairs and their acceptance lengths ------------------------------------------------------


def test_known_pairs() -> None:
    names = models.config_names()
    for name, pair in known.PAIRS.items():
        assert name == pair.name and pair.is_dummy
        assert pair.target in names and pair.drafter in names
    assert set(known._PUBLISHED) < set(known.PAIRS)


@pytest.mark.parametrize("name", known.PAIRS)
def test_the_drafter_of_a_pair_fits_its_target(name: str) -> None:
    pair = known.PAIRS[name]
    described = loader.decoder_config(models.named_config(pair.target), "bfloat16", pair.target)
    if pair.method == "draft_model":
        draft = loader.decoder_config(models.named_config(pair.drafter), "bfloat16", pair.drafter)
        assert draft["vocab_size"] <= described["vocab_size"]
        return
    architecture = models.named_config(pair.target)["architectures"][0]
    target = Target(Path(pair.target), architecture, described, "bfloat16")
    top = models.named_config(pair.drafter)
    draft = loader.drafter_config(top, target, method=pair.method, source=pair.drafter)
    assert draft["drafter"]["kind"] == pair.method


def test_every_model_with_a_drafter_of_its_own_has_a_pair() -> None:
    """Of the shapes whose drafter ships, those that need more than one GPU have none."""
    targets = {pair.target for pair in known.PAIRS.values()}
    for name in models.config_names():
        if name.endswith("-fp8") or name.startswith("deepseek"):
            continue
        config = models.named_config(name)
        text = config.get("text_config", config)
        has_layer = text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers")
        if has_layer:
            assert name in targets, name


@pytest.mark.parametrize(
    ("name", "temperature", "c", "length", "source"),
    [
        ("glm-4.7-flash+mtp", 1, 1, 2.07, "published for T=1, c=1"),
        ("gpt-oss-20b+eagle3", 0, 16, 2.60, "published for T=0, c=16"),
        ("gpt-oss-20b+eagle3", 1, 64, 2.11, "published for T=1, c=64"),
        ("llama-3-8b+eagle", 0, 1, 1.89, "published for T=0, c=1"),
        ("qwen3-8b+eagle3", 0.3, 63, 2.28, "published for T=1, c=16"),
        ("qwen3-8b+eagle3", 0, 1000, 2.31, "published for T=0, c=64"),
        ("gemma3-27b+270m", 0, 16, 2.3, "assumed"),
        ("qwen3.8-27b+mtp", 1, 64, 2.3, "assumed"),
        ("mine", 1, 1, 2.3, "assumed"),
    ],
)
def test_imposed_lengths(name: str, temperature: float, c: int, length: float, source: str) -> None:
    imposed = known.imposed_length(name, temperature, c)
    assert (imposed.tokens, imposed.source) == (length, source)
    assert imposed.acceptance == source.partition(" ")[0]


def test_which_pairs(tmp_path: Path) -> None:
    def chosen(*argv: str) -> list[known.Pair]:
        args = cli.build_parser().parse_args(["bench", "pairs", *argv])
        return options.parse_options(args).pairs

    assert chosen() == list(known.PAIRS.values())
    two = "qwen3-8b+eagle3,gemma4-12b+assistant"
    assert [pair.method for pair in chosen("--pairs", two)] == ["eagle3", "gemma4_mtp"]
    replaced = known.Pair("llama-3-8b+eagle", "a", "b/c", "eagle")
    given = ("--config", "llama-3-8b+eagle=a,b/c")
    assert chosen(*given) == [replaced]
    both = chosen("--pairs", f"{two},llama-3-8b+eagle", *given)
    assert [pair.target for pair in both] == ["qwen3-8b", "gemma4-12b", "a"]
    assert chosen("--config", "new=a,b,eagle") == [known.Pair("new", "a", "b", "eagle")]
    (tmp_path / "p.txt").write_text("hello\n")
    prompts = ("--prompts-file", str(tmp_path / "p.txt"))
    [pair] = chosen("--model", "new=a,b", *prompts)
    assert pair == known.Pair("new", "a", "b", None, is_dummy=False)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["--pairs", "qwen"],
            "--pairs has the pair 'qwen'; allowed: a list of glm-4.7-flash+mtp,",
        ),
        (["--pairs", ""], "--pairs has the pair ''"),
        (
            ["--pairs", "qwen3-8b+eagle3", "--config", "a=b,c"],
            "--pairs is 'qwen3-8b+eagle3', without the pair 'a' of --model or --config",
        ),
        (["--config", "a=b"], "--config is 'a=b'; allowed: NAME=TARGET,DRAFTER or"),
        (["--config", "a,b"], "--config is 'a,b'; allowed: NAME=TARGET,DRAFTER or"),
        (["--config", "=b,c"], "--config is '=b,c'; allowed"),
        (["--config", "a=b,,eagle"], "--config is 'a=b,,eagle'; allowed"),
        (["--config", "a=b,c,ngram"], "METHOD of --config is 'ngram'; allowed: 'draft_model'"),
        (["--config", "a=b,c", "--config", "a=d,e"], "--config names the pair 'a' again"),
        (["--config", "a=b,c", "--model", "a=d,e"], "--model names the pair 'a' again"),
        (["--model", "a=qwen3-8b,c"], "qwen3-8b names a configuration without weights"),
        (["--model", "a=b,c"], "--model needs --prompts-file"),
        (["--prompts-file", "p.txt"], "all pairs have dummy weights, which read no prompts"),
        (["--chat"], "--chat needs --model"),
        (["--rejection-sample-method", "block"], "--rejection-sample-method needs --model"),
        (["--model", "a=b,c", "--prompts-file", "empty.txt"], "which has no prompt"),
        (["--temperatures", "0,x"], "temperatures is '0,x'; allowed: numbers from 0 to"),
        (["--temperatures", "-1"], "temperature is -1"),
        (["--concurrency", "0"], "concurrency is '0'"),
        (
            ["--num-prompts", "3"],
            "--num-prompts is 3, but --concurrency is '1,4'; allowed: at least 4",
        ),
        (["--input-len", "0"], "--input-len is 0"),
        (["--output-len", "0"], "--output-len is 0"),
        (["--num-threads", "-1"], "--num-threads is -1"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--json", "no/such/a.json"], "--json is 'no/such/a.json'"),
        (["--plot", "a.gif"], "--plot is 'a.gif'; allowed: a file that ends with"),
    ],
)
def test_refusals(
    extra: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(command, "load")  # nothing is loaded before all arguments are checked
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n")
    assert bench(*extra) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "extra", "message"),
    [
        (
            "--config",
            ["--output-len", "5000"],
            "--output-len is 5000, so requests have 5009 tokens",
        ),
        ("--config", [], "model is 'nonesuch'"),
        ("--model", ["--output-len", "1020"], "prompt 0 of --prompts-file has"),
    ],
)
def test_refusals_of_models(
    source: str,
    extra: list[str],
    message: str,
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, drafter = demo_paths("eagle3")
    if source == "--config":
        target, drafter = folders / "target", folders / "head" if extra else Path("nonesuch")
    argv = [source, f"a={target},{drafter}", *extra]
    if source == "--model":
        (tmp_path / "p.txt").write_text("def quicksort(items):\n")
        argv += ["--prompts-file", str(tmp_path / "p.txt")]
    assert bench("-q", *argv) != 0
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and captured.err.count("\n") == 1
