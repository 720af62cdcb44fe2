# SPDX-License-Identifier: Apache-2.0
"""Where a block drafter is found, how many drafts its folder states, and what is said of both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import block_models
from block_checks import SPECS, TARGET, drafter, greedy
from block_models import BlockSpec
from drafter_checks import DSPARK_CHOICES, ENGINE, PROMPTS, plain_outputs
from errors import raises
from paceline import LLM, ModelNotFoundError
from paceline.cli import main
from paceline.loader.convert import convert
from tiny_models import copy_checkpoint, edit_section, load_tensors, make, read_json


@pytest.fixture
def target_with(tmp_path: Path) -> Any:
    """Writes a copy of the target with drafters in subfolders."""

    def write(**layouts: str) -> Path:
        path = copy_checkpoint(make(TARGET), tmp_path / "target")
        for name, layout in layouts.items():
            block_models.write(SPECS[layout], make(TARGET), path / name)
        return path

    return write


@pytest.mark.parametrize(("config", "method", "k"), DSPARK_CHOICES)
def test_a_subfolder_of_the_target_drafts(
    config: Any, method: str | None, k: int | None, target_with: Any
) -> None:
    with LLM(target_with(dspark="deepseek"), speculative_config=config, **ENGINE) as llm:
        chosen = llm.speculative_config
        assert (chosen and chosen.method, chosen and chosen.num_speculative_tokens) == (method, k)
        [output] = llm.generate([PROMPTS[0]], greedy())
    assert output.outputs[0].token_ids == plain_outputs(TARGET)[0]


def test_subfolders_that_do_not_say_which(target_with: Any) -> None:
    path = target_with(dspark="deepseek", dflash="z-lab")
    with raises(ValueError, path, "'dflash' and 'dspark'", "{'method': None} (in JSON null)"):
        LLM(path, **ENGINE)
    with LLM(path, speculative_config={"method": "dflash"}, **ENGINE) as llm:
        assert llm.speculative_config is not None
        assert llm.speculative_config.num_speculative_tokens == 4
    with raises(ValueError, "'dspark'", "no subfolder", "'model'"):
        LLM(make(TARGET), speculative_config={"method": "dspark"}, **ENGINE)


@pytest.mark.parametrize("config", [None, {"method": "dspark"}, {"num_speculative_tokens": 2}])
def test_a_subfolder_without_the_drafter_of_its_name(config: Any, target_with: Any) -> None:
    path = target_with(dspark="z-lab")
    role = ("a subfolder 'dspark' of a target is its drafter", "{'method': None}")
    seen = (path / "dspark", "a drafter for 'dflash'", "expected one for 'dspark'", *role)
    with raises(ValueError, *seen):
        LLM(path, speculative_config=config, **ENGINE)
    shutil.rmtree(path / "dspark")
    copy_checkpoint(make(TARGET), path / "dspark")
    with raises(ValueError, path / "dspark", "no block drafter", *role):
        LLM(path, speculative_config=config, **ENGINE)
    (path / "dspark" / "config.json").unlink()
    with raises(ModelNotFoundError, path / "dspark" / "config.json", "no such file", *role):
        LLM(path, speculative_config=config, **ENGINE)
    with LLM(path, speculative_config={"method": None}, **ENGINE) as llm:
        assert llm.speculative_config is None


def test_the_drafter_and_notes_on_it_are_logged(
    target_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that is left out has a default, and a note names it."""
    last = read_json(make(TARGET) / "config.json")["num_hidden_layers"] - 2
    path, own = target_with(), BlockSpec("z-lab", aux_layers=(2, last))
    block_models.write(own, make(TARGET), path / "dflash")
    edit_section(path / "dflash", "dflash_config", target_layer_ids=...)
    with caplog.at_level("INFO", logger="paceline"), LLM(path, **ENGINE):
        lines = [record.getMessage() for record in caplog.records]
    assert f"the drafter is {path / 'dflash'}, method 'dflash'" in lines
    note = f"the drafter reads the residual streams that enter layers {[2, last]}"
    assert f"{path / 'dflash'}: {note}" in lines


@pytest.mark.parametrize(
    ("layout", "k"), [("z-lab", 4), ("deepseek", 5), ("speculators", 5), ("gated", 5), ("rnn", 4)]
)
def test_k_of_the_folder(layout: str, k: int, tmp_path: Path) -> None:
    config = {"method": SPECS[layout].method, "model": str(drafter(layout, tmp_path))}
    with LLM(make(TARGET), speculative_config=config, load_format="dummy", **ENGINE) as llm:
        assert llm.speculative_config is not None
        assert llm.speculative_config.num_speculative_tokens == k


@pytest.mark.parametrize("layout", ["z-lab", "deepseek"])
def test_k_of_tensors_in_memory(layout: str, tmp_path: Path) -> None:
    paths = (make(TARGET), drafter(layout, tmp_path))
    pairs = [(read_json(path / "config.json"), load_tensors(path)) for path in paths]
    (target, tensors), (config, draft_tensors) = pairs
    method = SPECS[layout].method
    with LLM.from_state_dict(
        target,
        tensors,
        draft_config=config,
        draft_state_dict=draft_tensors,
        speculative_config={"method": method},
        **ENGINE,
    ) as llm:
        chosen = llm.speculative_config
        assert chosen is not None and (chosen.method, chosen.k) == (
            method,
            SPECS[layout].max_drafts,
        )


def test_converting_the_drafter_of_a_subfolder(
    target_with: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = target_with(dspark="deepseek"), tmp_path / "out"
    assert main(["convert", str(path), str(out), "--method", "dspark"]) == 0
    assert "without the drafter" not in capsys.readouterr().out
    with LLM(out, **ENGINE) as llm:
        chosen = llm.speculative_config
        assert chosen is not None and (chosen.method, chosen.k) == ("dspark", 5)
    assert main(["convert", str(path), str(tmp_path / "alone")]) == 0
    said = f"without the drafter in {path / 'dspark'}; --method dspark writes it too"
    assert said in capsys.readouterr().out
    with LLM(tmp_path / "alone", **ENGINE) as llm:
        assert llm.speculative_config is None
    with raises(ValueError, "method is 'dflash'", "a subfolder of that name"):
        convert(path, tmp_path / "other", method="dflash", progress=False)
