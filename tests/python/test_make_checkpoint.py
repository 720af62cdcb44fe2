# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with random weights that have the target's own drafter beside it.

`tests/cuda/make_checkpoint.py` writes them for GPU machines; here they are tiny. Names, dtypes and
shapes are those of the tiny models, whose names the tests translate once more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import make_checkpoint
from deepseek_v4_dspark import StagesSpec, make_with_stages
from deepseek_v4_models import V4Spec, make
from paceline import LLM, SamplingParams


def written(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every tensor in a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                piece = opened.get_slice(name)
                found[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    return found


@pytest.mark.parametrize("method", ["mtp", "dspark"])
def test_the_files_of_a_target_have_its_own_drafter(method: str, tmp_path: Path) -> None:
    spec = V4Spec(seed=3)
    model = make(spec) if method == "mtp" else make_with_stages(spec, StagesSpec())
    config = json.loads((model / "config.json").read_text())
    make_checkpoint.write_target(config, "tiny", tmp_path)

    expected, found = written(model), written(tmp_path)
    assert {n: shape for n, (_, shape) in found.items()} == {
        n: shape for n, (_, shape) in expected.items()
    }
    assert any(name.startswith("mtp.0.") for name in found)
    # Each format of weights and scales, and the table of experts, as published.
    for dtype in ("F8_E4M3", "F8_E8M0", "I64"):
        assert {n for n, (d, _) in found.items() if d == dtype} == {
            n for n, (d, _) in expected.items() if d == dtype
        }

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(5, 40))]
    outputs = []
    drafter = {"method": method, "num_speculative_tokens": 3}
    for speculative in (None, drafter):
        with LLM(tmp_path, speculative_config=speculative, max_model_len=128) as llm:
            outputs.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]


def test_no_row_has_an_expert_twice() -> None:
    torch.manual_seed(0)
    entry = make_checkpoint.random_entry(
        "layers.0.ffn.gate.tid2eid", "I64", (200, 6), num_experts=8
    )
    rows = entry.make().tolist()
    assert all(len(set(row)) == 6 and set(row) <= set(range(8)) for row in rows)


def test_scales_give_elements_of_each_format_the_same_spread() -> None:
    """A weight of four bits and one of eight bits have a standard deviation of about 0.02."""
    torch.manual_seed(0)
    for elements, deviation in (("I8", 3.0), ("F8_E4M3", 100.0)):
        entry = make_checkpoint.random_entry("w.scale", "F8_E8M0", (4096,), elements)
        scales = torch.exp2(entry.make().float() - 127)
        assert 0.01 < deviation * float(scales.mean()) < 0.04


@pytest.mark.parametrize(
    ("name", "num_bytes", "has_drafter"),
    [
        ("deepseek-v4-flash", 159_537_149_860, True),
        ("deepseek-v4-flash-dspark", 166_803_053_180, True),
        ("glm-4.7-flash", 61_174_200_192, True),
        ("gpt-oss-20b", 13_761_264_768, False),
    ],
)
def test_the_full_sizes(name: str, num_bytes: int, has_drafter: bool) -> None:
    config = make_checkpoint.named_config(name)
    entries = make_checkpoint.published_entries(config, name)
    own = [e for e in entries if e.name.startswith(("mtp.", "model.layers.47."))]
    assert bool(own) == has_drafter
    assert sum(entry.nbytes for entry in entries) == num_bytes
    assert len({entry.name for entry in entries}) == len(entries)
