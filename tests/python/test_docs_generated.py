# SPDX-License-Identifier: Apache-2.0
"""The generated parts of the pages and the chart are what the code and docs/data say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import paceline
from paceline.loader import ARCHITECTURES
from paceline.loader.gemma4_assistant import ASSISTANT_ARCHITECTURES
from paceline.vllm_arguments import ADVICE

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "scripts"


def load(name: str) -> Any:
    """Imports a program of docs/scripts."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load("generate_tables")


def test_chart_is_that_of_the_data() -> None:
    chart = load("chart")
    data = json.loads(chart.DATA.read_text())
    drawn = chart.draw(data)
    assert drawn == chart.CHART.read_text(), "run: python docs/scripts/chart.py"
    # Every figure is written out, and the place where the engines are level.
    for row in (row for pair in data["pairs"] for row in pair["rows"]):
        for key in ("paceline_ms", "vllm_ms", "paceline_tokens_per_s", "vllm_tokens_per_s"):
            assert f">{row[key]:,}</text>" in drawn
    assert drawn.count("At c = 256 an iteration takes the same time in both engines.") == 1
    assert drawn.count("At c = 16 vLLM's time looks like a fault of that release.") == 1


def test_chart_has_the_pairs_below_one_another() -> None:
    chart = load("chart")
    data = json.loads(chart.DATA.read_text())
    whole = ElementTree.fromstring(chart.draw(data))
    parts = [ElementTree.fromstring(chart.draw({"pairs": [pair]})) for pair in data["pairs"]]
    assert float(whole.attrib["height"]) == sum(float(part.attrib["height"]) for part in parts)
    texts = [e for e in whole.iter() if e.tag.endswith("}text")]
    heights = [float(e.attrib["y"]) for e in texts if e.attrib["font-size"] == "17"]
    titles = [e.text or "" for e in texts if e.attrib["font-size"] == "17"]
    assert [title.split()[0] for title in titles] == ["GPT-OSS-20B", "Qwen3-8B"]
    assert heights[1] - heights[0] == float(parts[0].attrib["height"])
    # A letter of this size is at most 7 units wide.
    for element in (e for e in texts if e.attrib["font-size"] == "13"):
        assert float(element.attrib["x"]) + 7 * len(element.text or "") < chart.WIDTH


def test_chart_refuses_a_comparison_without_one_engine() -> None:
    chart = load("chart")
    data = json.loads(chart.DATA.read_text())
    del data["pairs"][0]["rows"][2]["vllm_ms"]
    with pytest.raises(ValueError, match="GPT-OSS-20B has no figures of vLLM at c = 64"):
        chart.draw(data)


def test_picture_of_receipts_is_that_of_the_data() -> None:
    picture = load("verify_picture")
    data = json.loads(picture.DATA.read_text())
    drawn = picture.draw(data)
    assert drawn == picture.PICTURE.read_text(), "run: python docs/scripts/verify_picture.py"
    root = ElementTree.fromstring(drawn)
    for text in (e for e in root.iter() if e.tag.endswith("}text")):
        right = picture.MARGIN + picture.CHARACTER * len(text.text or "")
        assert right <= float(root.attrib["width"]) - picture.MARGIN
    # The commands still print this; tokens and margins are those of one kind of processor.
    recorded = picture.record()
    assert re.sub(r"[\d.-]+", "#", json.dumps(recorded)) == re.sub(
        r"[\d.-]+", "#", json.dumps(data)
    )
    assert [step.get("exit_code") for step in recorded["steps"]] == [0, 0, None, 7]


def test_generated_parts_are_up_to_date(tables: Any) -> None:
    stale = [str(page.relative_to(ROOT)) for page in tables.outdated()]
    assert not stale, f"{stale}; run: PYTHONPATH=python python docs/scripts/generate_tables.py"


def test_every_part_is_used_and_closed(tables: Any) -> None:
    used = set()
    for page in tables.pages():
        text = page.read_text()
        names = [part[2] for part in tables.PART.finditer(text)]
        assert len(names) == text.count("<!-- generated: ") == text.count("<!-- end of gen"), page
        used |= set(names)
    assert used == set(tables.PARTS)


def test_a_stale_part_is_found(tables: Any) -> None:
    page = "<!-- generated: demo-acceptance -->\n| old |\n<!-- end of generated -->\n"
    renewed = tables.renew(page)
    assert "`eagle3`" in renewed and "old" not in renewed
    assert tables.renew(renewed) == renewed


def test_a_name_without_words_is_refused(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "METHODS", (*tables.METHODS, "new_method"))
    with pytest.raises(SystemExit, match="new_method"):
        tables.drafters()


def test_figures_in_running_text_are_those_of_the_data(tables: Any) -> None:
    data = tables.comparison("Qwen3-8B")
    first, last = data["rows"][0], data["rows"][-1]
    share = f"{last['paceline_tokens_per_s'] / last['paceline_plain_tokens_per_s']:.2f}"
    by_k = {row["k"]: row for row in tables.load("draft_lengths.json")["rows"]}
    texts = {
        page: " ".join((ROOT / page).read_text().split())
        for page in ("README.md", "docs/performance.md", "docs/choosing-a-drafter.md")
    }
    for target, words in (("GPT-OSS-20B", "takes "), ("Qwen3-8B", "and ")):
        rows = tables.comparison(target)["rows"]
        ratios = [f"{row['vllm_ms'] / row['paceline_ms']:.2f}" for row in rows]
        assert f"{ratios[0]} times as fast as in vLLM with one request" in texts["README.md"]
        listed = f"{words}{', '.join(ratios[:-1])} and {ratios[-1]} times as long with the {target}"
        assert listed in texts["docs/performance.md"]
        if target == "GPT-OSS-20B":
            assert f"and {ratios[-1]} times with 256" in texts["README.md"]
    assert f"speculation reaches {share} of its tokens/s" in texts["docs/performance.md"]
    assert f"reaches {share} of plain decoding" in texts["docs/choosing-a-drafter.md"]
    for k in (1, 3):
        assert f"{by_k[k]['tokens_per_s']['64']:,}" in texts["docs/choosing-a-drafter.md"]
    # The same run has one figure, wherever it is shown.
    of_64 = next(row for row in data["rows"] if row["concurrency"] == 64)
    assert by_k[3]["ms"] == {"1": first["paceline_ms"], "64": of_64["paceline_ms"]}
    assert by_k[3]["tokens_per_s"]["64"] == of_64["paceline_tokens_per_s"]


@pytest.mark.parametrize(
    "image", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda p: p.stem
)
def test_images_are_complete_in_themselves(image: Path) -> None:
    text = image.read_text()
    names = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()]
    assert names[0] == "svg" and {"title", "desc"} <= set(names)  # for those who cannot see them
    assert not {"image", "script", "style", "foreignObject"} & set(names)
    assert "#ffffff" in text  # a background, so that dark pages do not hide the text


def test_loading_lists_every_architecture() -> None:
    text = (ROOT / "docs/loading.md").read_text()
    for architecture in (*ARCHITECTURES, *ASSISTANT_ARCHITECTURES):
        assert f"`{architecture}`" in text


def test_vllm_names_that_are_missing_are_refused(tables: Any) -> None:
    """Unless no value of theirs changes anything."""
    for what in ("LLM", "SamplingParams"):
        ours = tables._named(getattr(paceline, what))
        for name in tables.load("vllm_names.json")[what]:
            if name not in ours and ADVICE[what][name].harmless != "all":
                arguments = {"model": "none", name: "x"} if what == "LLM" else {name: "x"}
                with pytest.raises(TypeError, match=name):
                    getattr(paceline, what)(**arguments)
    keys = [field.name for field in dataclasses.fields(paceline.SpeculativeConfig)]
    for name in tables.load("vllm_names.json")["speculative_config"]:
        if name not in keys:
            with pytest.raises(NotImplementedError, match=name):
                paceline.SpeculativeConfig.parse({"method": "ngram", name: "x"})


def test_evidence_into_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, ROOT / "tests/cuda/evidence.py", "check"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert result.returncode < 0 and result.stderr == b""


def test_figures_of_the_diagram_are_those_of_the_models() -> None:
    drawn = (ROOT / "docs/images/kv_groups.svg").read_text()
    for name, title in (("gemma3-27b", "target"), ("gemma3-270m", "drafter")):
        config = json.loads((ROOT / f"python/paceline/bench/configs/{name}.json").read_text())
        text = config.get("text_config", config)
        full = text["layer_types"].count("full_attention")
        sliding = text["layer_types"].count("sliding_attention")
        assert f"{title}, {full + sliding} layers" in drawn
        assert f"{sliding} layers, window {text['sliding_window']:,}" in drawn
        heads = text["num_key_value_heads"]
        plural = "s" if heads > 1 else ""
        assert f"{full} layers, {heads} KV head{plural} of size {text['head_dim']}" in drawn
