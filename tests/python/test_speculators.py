# SPDX-License-Identifier: Apache-2.0
"""A folder of the `speculators` package as the model: its verifier is loaded as the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafter_checks import ENGINE, outputs
from eagle_pair import TARGET
from errors import raises
from hub_server import HubServer
from paceline import LLM, ModelFileError, ModelNotFoundError
from paceline.cli import main
from tiny_models import TinySpec, copy_checkpoint, edit_config, make, read_json


@pytest.fixture
def speculators(draft_head: Callable[..., Path]) -> Callable[..., Path]:
    """Writes such a folder with changes to "speculators_config"; `...` removes a key."""

    def write(target: Any = None, **changes: Any) -> Path:
        path = draft_head("speculators")
        values = read_json(path / "config.json")["speculators_config"]
        values["verifier"]["name_or_path"] = str(make(TARGET)) if target is None else target
        values = {key: value for key, value in (values | changes).items() if value is not ...}
        edit_config(path, speculators_config=values)
        return path

    return write


def generated(model: Any, config: Any = None, **arguments: Any) -> tuple[list[list[int]], Any]:
    with LLM(model, speculative_config=config, **ENGINE, **arguments) as llm:
        return outputs(llm), llm.speculative_config


def test_it_is_the_pair_of_its_verifier_and_itself(speculators: Callable[..., Path]) -> None:
    path = speculators()
    pair = generated(make(TARGET), {"model": str(path), "num_speculative_tokens": 3})
    assert pair[1].method == "eagle3"
    assert generated(path) == pair
    assert generated(str(path), load_format="dummy")[1] == pair[1]
    # The configuration says otherwise.
    outputs, config = generated(path, {"num_speculative_tokens": 5})
    assert (outputs, config.model, config.num_speculative_tokens) == (pair[0], str(path), 5)
    _, config = generated(path, {"rejection_sample_method": "block"})
    assert (config.num_speculative_tokens, config.draft_proposals) == (3, 64)
    assert generated(path, '{"method": null}') == (pair[0], None)
    other = str(make(TinySpec(seed=9)))
    _, config = generated(path, {"model": other, "num_speculative_tokens": 2})
    assert (config.model, config.method) == (other, "draft_model")
    _, config = generated(path, {"method": "ngram", "num_speculative_tokens": 2})
    assert config.method == "ngram"


@pytest.mark.parametrize("verifier", ["../target", "target", "org/target"])
def test_where_the_verifier_is(
    verifier: str,
    speculators: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Relative to the folder, whatever the working directory is; else on the hub."""
    path = speculators(verifier)
    monkeypatch.chdir(tmp_path)
    copy_checkpoint(make(TinySpec(seed=1, num_layers=8)), tmp_path / "org" / "target")
    with HubServer({"org/target": make(TARGET), "org/head": path}) as hub, hub.used():
        if verifier == "org/target":
            with LLM("org/head", **ENGINE) as llm:
                assert llm.draft is not None
                assert llm.target.path.is_relative_to(hub.cache / "models--org--target")
                assert llm.draft.path.is_relative_to(hub.cache / "models--org--head")
        else:
            copy_checkpoint(make(TARGET), path / verifier)
            with LLM(path, **ENGINE) as llm:
                assert llm.target.path.samefile(path / verifier)
            assert not hub.requests


@pytest.mark.parametrize(
    ("verifier", "kind", "parts"),
    [
        ("/no/such/folder", ModelNotFoundError, ('"/no/such/folder"', "no such folder")),
        ("a/b/c", ModelNotFoundError, ("'a/b/c'", "relative to", "or a model on the hub")),
        ("org/none", ModelNotFoundError, ("'org/none'", "has no such model")),
        ("", ModelFileError, ("name_or_path", '""')),
        (3, ModelFileError, ("name_or_path", "3", "a string")),
        (".", NotImplementedError, ("a draft head", "no target")),
    ],
)
def test_verifier_that_is_not_found(
    verifier: Any, kind: type[Exception], parts: tuple[str, ...], speculators: Callable[..., Path]
) -> None:
    path = speculators(verifier)
    with HubServer({}) as hub, hub.used(), raises(kind, str(path), *parts[1:]) as caught:
        LLM(path)
    assert parts[0].strip("'\"") in str(caught.value)
    if kind is ModelNotFoundError:
        assert "speculative_config['model']" in str(caught.value), "the cure"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"verifier": ...}, ("speculators_config.verifier", "missing")),
        ({"verifier": {}}, ("verifier.name_or_path", "missing", "speculative_config['model']")),
        ({"proposal_methods": ...}, ("speculators_config.proposal_methods", "missing")),
        ({"proposal_methods": []}, ("speculators_config.proposal_methods", "[]")),
        ({"proposal_methods": [3]}, ("speculators_config.proposal_methods", "[3]")),
        ({"default_proposal_method": "tree"}, ("default_proposal_method", '"tree"')),
        (
            {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 17}]},
            ("proposal_methods[0].speculative_tokens", "17", "1 to 16"),
        ),
    ],
)
def test_incomplete_configurations(
    changes: dict[str, Any], parts: tuple[str, ...], speculators: Callable[..., Path]
) -> None:
    path = speculators(**changes)
    with raises(ModelFileError, str(path), *parts):
        LLM(path)
    if "verifier" not in changes:
        with LLM(path, speculative_config={"num_speculative_tokens": 2}, **ENGINE) as llm:
            assert llm.speculative_config is not None
            assert llm.speculative_config.num_speculative_tokens == 2


@pytest.mark.parametrize(("default", "k"), [("greedy", 2), ("tree", 9), (None, 9)])
def test_default_proposal_method(
    default: str | None, k: int, speculators: Callable[..., Path]
) -> None:
    methods = [
        {"proposal_type": "tree", "speculative_tokens": 9},
        {"proposal_type": "greedy", "speculative_tokens": 2},
    ]
    path = speculators(proposal_methods=methods, default_proposal_method=default)
    assert generated(path, load_format="dummy")[1].num_speculative_tokens == k


def test_other_kinds_are_refused_before_the_target_is_looked_up(
    speculators: Callable[..., Path],
) -> None:
    path = speculators("org/target")
    edit_config(path, speculators_model_type="peagle")
    with HubServer({}) as hub, hub.used():
        with raises(NotImplementedError, "speculators_model_type", '"peagle"'):
            LLM(path)
        assert not hub.requests


def test_other_models_bring_no_drafter() -> None:
    with raises(ValueError, "neither 'method' nor 'model'", "brings no drafter", "'eagle3'"):
        LLM(make(TARGET), speculative_config={"num_speculative_tokens": 2})
    assert generated(make(TARGET), {"method": None})[1] is None


def test_command_line(speculators: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", "abc", "--model", str(speculators()), "--json", "--max-tokens", "4"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_other_commands_take_it_as_a_drafter_only(
    speculators: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(speculators()), tmp_path / "out"
    for command, option in (
        (["convert", path, str(out)], "speculative_config"),  # it has no such option
        (["bench", "latency", "--model", path], "--speculative-config"),
    ):
        assert main(command) == 2
        message = capsys.readouterr().err
        assert f"it is a draft head (eagle3) and no target: name it in {option}" in message
        assert "or after --draft of `paceline convert`" in message
    assert main(["convert", str(make(TARGET)), str(out), "--draft", path, "-q"]) == 0
