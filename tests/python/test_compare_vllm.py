# SPDX-License-Identifier: Apache-2.0
"""The checkpoint pair and the measurement of the comparison with vLLM. vLLM is stood in for."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors import safe_open

import chart
import compare_vllm
import generate_tables
import make_checkpoint
import make_draft_head
import paceline
from markdown_pages import ROOT, blocks
from time_limits import HANG_LIMIT_S
from tiny_models import TinySpec, load_tensors, make, read_json

# Notes its arguments, then drafts as vLLM would: with an engine that has vLLM's names.
STAND_IN = """
import json, os
import paceline
from paceline import SamplingParams

__version__ = "0.26.0"


class LLM:
    def __init__(self, **arguments):
        with open(os.environ["STAND_IN_LOG"], "w") as log:
            json.dump(arguments, log)
        own = ("skip_tokenizer_init", "moe_backend")
        theirs = {key: value for key, value in arguments.items() if key not in own}
        self._llm = paceline.LLM(device="cpu", **theirs)

    def __getattr__(self, name):
        return getattr(self._llm, name)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "pair"
    compare_vllm.make(folder, is_tiny=True)
    return folder


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    """The arguments of `run`, as `main` completes them."""
    found = ["run", str(folder), "--json", str(folder / "out.json"), "--device", "cpu", *words]
    args = compare_vllm.build_parser().parse_args(found)
    args.short_output_len = args.short_output_len or args.output_len // 2
    return args


def start(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line of the documentation in the repository."""
    assert words[0] == "python"
    paths = [str(Path(paceline.__file__).parents[1]), variables.pop("PYTHONPATH", "")]
    env = os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip


# ---- the checkpoints -----------------------------------------------------------------------------


def test_the_target_is_laid_out_as_published(pair: Path) -> None:
    """The names, dtypes and dimensions are those that transformers' model has, with mxfp4."""
    spec = TinySpec("gpt_oss", quantization="mxfp4", num_layers=8, dtype="bfloat16")
    expected = load_tensors(make(spec))
    found = load_tensors(pair / "target")
    assert {name: (t.dtype, t.ndim) for name, t in found.items()} == {
        name: (t.dtype, t.ndim) for name, t in expected.items()
    }
    blocks_of = found["model.layers.7.mlp.experts.gate_up_proj_blocks"]
    assert (blocks_of.dtype, tuple(blocks_of.shape)) == (torch.uint8, (8, 128, 2, 16))
    config = read_json(pair / "target" / "config.json")
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    index = read_json(pair / "target" / "model.safetensors.index.json")
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in found.values())


def test_the_full_sizes_are_those_of_the_published_models() -> None:
    name = compare_vllm.TARGET
    target = make_checkpoint.published_entries(make_checkpoint.named_config(name), name)
    assert sum(entry.nbytes for entry in target) == 13_761_264_768
    config = make_draft_head.flat_config(make_checkpoint.named_config(compare_vllm.DRAFT))
    head = {entry.name: entry for entry in make_draft_head.head_entries(config)}
    assert len(head) == 15 and head["fc.weight"].shape == (2880, 8640)
    assert head["midlayer.self_attn.q_proj.weight"].shape == (4096, 5760)
    weights = [entry for entry in head.values() if entry.dtype == "BF16"]
    # 855 M parameters less the embeddings, which it shares with the target.
    assert sum(math.prod(entry.shape) for entry in weights) == 275_385_600


def test_the_draft_head_has_the_first_ids(pair: Path) -> None:
    head = load_tensors(pair / "draft")
    assert head["t2d"].dtype == torch.bool and int(head["t2d"].sum()) == 128
    assert bool(head["t2d"][:128].all()) and head["t2d"].numel() == 512
    assert head["d2t"].dtype == torch.int64 and not head["d2t"].any()
    config = read_json(pair / "draft" / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (128, 512)


def test_files_are_aligned_and_name_their_format(pair: Path) -> None:
    for path in sorted(pair.glob("*/*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        assert length % 8 == 0
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_norms_keep_the_size_of_states() -> None:
    """A router then sees states of ordinary size, and tokens spread over the experts."""
    torch.manual_seed(0)
    norm = make_checkpoint.random_entry("model.layers.0.input_layernorm.weight", "BF16", (4096,))
    matrix = make_checkpoint.random_entry("model.layers.0.mlp.router.weight", "BF16", (32, 4096))
    assert float(norm.make().float().mean()) == pytest.approx(1, abs=0.01)
    assert float(matrix.make().float().mean()) == pytest.approx(0, abs=0.01)
    for entry in (norm, matrix):
        assert float(entry.make().float().std()) == pytest.approx(0.02, abs=0.002)


def test_a_shard_is_full_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_checkpoint, "SHARD_BYTES", 300_000)
    compare_vllm.make(tmp_path, is_tiny=True)
    shards = sorted((tmp_path / "target").glob("*.safetensors"))
    assert len(shards) == 3
    assert all(path.stat().st_size < 300_000 + 8192 for path in shards)  # the header comes on top
    assert shards[0].name == "model-00001-of-00003.safetensors"


def test_a_dtype_that_is_not_written_is_refused() -> None:
    name = "qwen3-8b-int4"
    with pytest.raises(NotImplementedError, match="qwen3-8b-int4 has tensors in I32"):
        make_checkpoint.published_entries(make_checkpoint.named_config(name), name)
    with pytest.raises(ValueError, match="EAGLE-3"):
        make_draft_head.flat_config(make_checkpoint.named_config("llama-3-8b-eagle"))


# ---- the engines ---------------------------------------------------------------------------------


def test_both_engines_get_the_same_settings(pair: Path) -> None:
    args = arguments(pair, "--vllm-options", '{"moe_backend": "triton"}', "--concurrency", "1", "8")
    ours = compare_vllm.engine_arguments("paceline", args)
    theirs = compare_vllm.engine_arguments("vllm", args)
    assert ours.pop("device") == "cpu"
    assert theirs.pop("skip_tokenizer_init") is True
    assert theirs.pop("moe_backend") == "triton"
    assert ours == theirs == {
        "model": str(pair / "target"),
        "speculative_config": {
            "method": "eagle3",
            "model": str(pair / "draft"),
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.61,
        },
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }  # fmt: skip
    assert compare_vllm.sampling_arguments(64) == {
        "temperature": 0.0, "max_tokens": 64, "ignore_eos": True, "detokenize": False,
    }  # fmt: skip


@dataclass
class Metric:
    name: str
    value: int = 0


@dataclass
class Clocked:
    """An engine with a clock of its own: 0.1 s for prompts, 5 ms for an iteration of 2 tokens."""

    now: float = 0.0
    prompts: list[list[list[int]]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    drafts: Metric = field(default_factory=lambda: Metric("vllm:spec_decode_num_drafts"))
    accepted: Metric = field(default_factory=lambda: Metric("vllm:spec_decode_num_accepted_tokens"))

    def get_metrics(self) -> list[Metric]:
        return [self.drafts, self.accepted, Metric("vllm:prompt_tokens", 7)]

    def generate(self, requests: Any, params: dict[str, Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm and params["ignore_eos"]
        num_windows = params["max_tokens"] // 2
        self.now += 0.1 + 0.005 * num_windows
        self.drafts.value += num_windows * len(requests)
        self.accepted.value += num_windows * len(requests)
        self.prompts.append([request["prompt_token_ids"] for request in requests])
        self.lengths.append(params["max_tokens"])
        completion = argparse.Namespace(token_ids=[0] * params["max_tokens"])
        return [argparse.Namespace(outputs=[completion]) for _ in requests]


def test_prompts_cancel_in_the_time_of_an_iteration(pair: Path) -> None:
    args = arguments(pair, "--output-len", "100", "--input-len", "5", "--rounds", "2")
    engines = [Clocked(), Clocked()]
    rows = [
        compare_vllm.measure(engine, dict, 4, args, lambda engine=engine: engine.now)
        for engine in engines
    ]
    expected = {"ms": 5.0, "tokens_per_s": 1143, "acceptance_length": 2.0, "ms_of_rounds": [5, 5]}
    assert rows[0] == expected  # 400 tokens in 0.1 + 50 * 0.005 s
    # A warm-up at full length, then rounds; every engine gets the same prompts, no run the same.
    assert engines[0].lengths == [100, 50, 100, 50, 100]
    assert engines[0].prompts == engines[1].prompts
    runs = [json.dumps(prompts) for prompts in engines[0].prompts]
    assert len(set(runs)) == 5 and [len(p) for p in engines[0].prompts[0]] == [5] * 4


def test_runs_without_more_windows_have_no_slope() -> None:
    run = compare_vllm.Run(seconds=1.0, num_tokens=8, num_windows=4, num_accepted=4)
    with pytest.raises(RuntimeError, match="4 verify windows in the long run and 4 in the short"):
        compare_vllm.figures(run, run, 1)


def test_an_engine_with_other_settings_does_not_join(pair: Path, tmp_path: Path) -> None:
    args = arguments(pair, "--concurrency", "1")
    file = tmp_path / "out.json"
    now = compare_vllm.heading(args)
    assert compare_vllm.read_earlier(file, now) == {"commands": [], "rows": []}
    file.write_text(json.dumps({"pairs": [now | {"commands": ["a"], "rows": []}]}))
    assert compare_vllm.read_earlier(file, now)["commands"] == ["a"]
    args.k = 4
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 4, but .* have 3"):
        compare_vllm.read_earlier(file, compare_vllm.heading(args))


def test_an_engine_takes_the_place_of_its_earlier_figures() -> None:
    ours = {"commands": ["a"], "paceline": "1", "rows": [{"concurrency": 4, "paceline_ms": 2.0}]}
    theirs = {
        "commands": ["a", "b"],
        "vllm": "2",
        "rows": [{"concurrency": 1, "vllm_ms": 1.0}, {"concurrency": 4, "vllm_ms": 3.0}],
    }
    both = compare_vllm.merge(ours, theirs)
    assert both == {
        "paceline": "1",
        "vllm": "2",
        "commands": ["a", "b"],
        "rows": [
            {"concurrency": 1, "vllm_ms": 1.0},
            {"concurrency": 4, "paceline_ms": 2.0, "vllm_ms": 3.0},
        ],
    }
    again = compare_vllm.merge(both, ours | {"rows": [{"concurrency": 4, "paceline_ms": 1.5}]})
    assert again["rows"][1] == {"concurrency": 4, "paceline_ms": 1.5, "vllm_ms": 3.0}


# ---- the commands of docs/performance.md ---------------------------------------------------------


def test_the_commands_of_the_page_run_and_name_that_of_vllm(tmp_path: Path) -> None:
    # With this folder on its path, a process cannot import vLLM even where it is installed.
    (tmp_path / "without").mkdir()
    hiding = 'import sys\n\nsys.modules["vllm"] = None\n'
    (tmp_path / "without" / "sitecustomize.py").write_text(hiding)
    hidden = {"PYTHONPATH": str(tmp_path / "without")}
    (block,) = (b for b in blocks(Path("docs/performance.md")) if "tiny-pair" in b.code)
    folder, file = tmp_path / "tiny-pair", tmp_path / "tiny.json"
    maker, runner = block.code.replace("tiny-pair", str(folder)).splitlines()
    runner = runner.replace("tiny.json", str(file))
    made = start(shlex.split(maker))
    assert made.returncode == 0, made.stderr
    ran = start(shlex.split(runner), **hidden)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["paceline c=1", "paceline c=4"]
    message = f"vLLM is not installed for {sys.executable}, so it was not measured."
    assert message in ran.stdout
    (ours,) = read_json(file)["pairs"]
    assert ours["paceline"] == paceline.__version__ and "vllm" not in ours
    assert (ours["device"], ours["target"], ours["drafter"]) == ("CPU", "a tiny GPT-OSS", "EAGLE-3")
    for row in ours["rows"]:
        assert row["paceline_acceptance_length"] == pytest.approx(2.61, abs=0.35)
        assert row["paceline_tokens_per_s"] > 0
    with pytest.raises(ValueError, match="no figures of vLLM at c = 1"):
        chart.draw({"pairs": [ours]})

    # The command that it printed, where vLLM is installed.
    command = shlex.split(lines[-1])
    without = start(command, **hidden)
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr == f"vllm is not installed for {sys.executable}\n"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    log = tmp_path / "arguments.json"
    options = ["--vllm-options", '{"moe_backend": "triton"}']
    added = start([*command, *options], PYTHONPATH=str(tmp_path), STAND_IN_LOG=str(log))
    assert added.returncode == 0, added.stderr
    given = read_json(log)
    assert given["skip_tokenizer_init"] is True and given["moe_backend"] == "triton"
    assert given["speculative_config"]["synthetic_acceptance_length"] == 2.61
    assert given["max_num_seqs"] == 4 and "device" not in given
    (both,) = read_json(file)["pairs"]
    assert (both["vllm"], both["vllm_settings"]) == ("0.26.0", '{"moe_backend": "triton"}')
    assert [row["concurrency"] for row in both["rows"]] == [1, 4]
    assert [row["vllm_tokens_per_s"] > 0 for row in both["rows"]] == [True, True]
    assert [row["paceline_ms"] for row in both["rows"]] == [
        row["paceline_ms"] for row in ours["rows"]
    ]
    assert [shlex.split(c)[-1] for c in both["commands"]] == ["paceline", options[1]]

    # The chart and the tables of the pages take the file. The times of so few iterations are noise.
    for row in both["rows"]:
        row |= {"paceline_ms": 1.5, "vllm_ms": 3.0}
    file.write_text(json.dumps({"pairs": [both]}))
    c, *cells = generate_tables.vllm_speed(both).splitlines()[-1].strip("| ").split(" | ")
    assert (c, cells[:3]) == ("4", ["1.5", "3.0", "2.00"])
    assert cells[4] == f"{both['rows'][1]['vllm_tokens_per_s']:,}"
    drawn = start(["python", "docs/scripts/chart.py", str(file)])
    assert drawn.returncode == 0, drawn.stderr
    text = file.with_suffix(".svg").read_text()
    assert "a tiny GPT-OSS with an EAGLE-3 drafter, k = 3, one CPU" in text
    assert f">{both['rows'][1]['vllm_tokens_per_s']:,}</text>" in text
    other = [*shlex.split(runner), "--engine", "paceline", "--k", "2"]
    refused = start(other)
    assert refused.returncode == 2
    assert "num_speculative_tokens is 2, but the figures in" in refused.stderr


def test_one_command_measures_both_where_vllm_is_installed(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    file = tmp_path / "both.json"
    command = ["python", "tests/cuda/compare_vllm.py", "run", str(pair), "--json", str(file)]
    command += ["--device", "cpu", "--concurrency", "2", "--input-len", "4", "--output-len", "32"]
    command += ["--rounds", "1", "--vllm-python", sys.executable]
    variables = {"PYTHONPATH": str(tmp_path), "STAND_IN_LOG": str(tmp_path / "arguments.json")}
    ran = start(command, **variables)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines() if " c=2:" in line] == [
        "paceline",
        "vllm",
    ]
    (both,) = read_json(file)["pairs"]
    assert both["vllm_settings"] == "defaults" and len(both["commands"]) == 2
    # The stand-in drafts with the same engine and the same prompts.
    (row,) = both["rows"]
    assert row["vllm_acceptance_length"] == row["paceline_acceptance_length"]
    assert start([*command, "--short-output-len", "32"]).returncode == 2
    missing = [word if word != str(pair) else str(tmp_path) for word in command]
    assert "has no pair.json; write the folder with: make FOLDER" in start(missing).stderr
