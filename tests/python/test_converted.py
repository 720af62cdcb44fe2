# SPDX-License-Identifier: Apache-2.0
"""A folder that `paceline convert` wrote, as the model of an `LLM`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import assistant_pair
from drafter_checks import ENGINE, outputs
from eagle_pair import TARGET
from errors import raises
from hub_server import HubServer
from paceline import LLM, ModelFileError, ModelNotFoundError, _core
from paceline.cli import main
from paceline.loader import load_checkpoint
from paceline.loader.convert import convert
from tiny_models import (
    TinySpec,
    copy_checkpoint,
    edit_config,
    make,
    read_json,
    write_json,
)

SETTINGS = {
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "chat_template.jinja": "{{ bos_token }}{{ messages[0].content }}",
    "generation_config.json": '{"eos_token_id": 0, "temperature": 0.5}',
    "special_tokens_map.json": "{}",
    "tokenizer_config.json": '{"bos_token": "<eos>"}',
}


def _draft_model(folder: Path, *_: Any) -> tuple[Path, Path]:
    """The vocabularies have different sizes, so the tokenizer decides whether they fit."""
    target = copy_checkpoint(make(TinySpec("gemma3", dtype="bfloat16")), folder / "target")
    edit_config(target, bos_token_id=2)
    for name, text in SETTINGS.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    return target, make(TinySpec(seed=1, vocab_size=160, tied=True))


def _eagle3(_: Path, draft_head: Callable[..., Path], *__: Any) -> tuple[Path, Path]:
    """The head brings token ids and is rounded."""
    spec = replace(TARGET, dtype="bfloat16")
    return make(spec), draft_head("speculators", dtype="float16", target=spec)


def _assistant(_: Path, __: Any, assistant: Callable[..., Path]) -> tuple[Path, Path]:
    return make(assistant_pair.TARGET), assistant(assistant_pair.CLUSTERS)


def result(model: Any, config: Any = None) -> tuple[list[list[int]], Any]:
    with LLM(model, speculative_config=config, **ENGINE) as llm:
        assert (llm.draft is None) == (
            llm.speculative_config is None or llm.speculative_config.method == "ngram"
        )
        return outputs(llm), llm.speculative_config


@pytest.mark.parametrize("pair", [_draft_model, _eagle3, _assistant])
def test_it_is_the_pair_that_was_converted(
    pair: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    draft_head: Callable[..., Path],
    assistant: Callable[..., Path],
) -> None:
    target, draft = pair(tmp_path, draft_head, assistant)
    out = convert(target, tmp_path / "out", draft, 3, progress=False)
    config = {"model": str(draft), "num_speculative_tokens": 3}
    with LLM(target, speculative_config=config, **ENGINE) as original, LLM(out, **ENGINE) as llm:
        assert outputs(llm) == outputs(original)
        assert llm.speculative_config == replace(original.speculative_config, model=str(out))
        assert llm.target.tokenizer is not None
        assert original.target.tokenizer is not None
        assert llm.target.tokenizer.digest == original.target.tokenizer.digest
        for ours, theirs in ((llm.target, original.target), (llm.draft, original.draft)):
            assert ours is not None
            assert theirs is not None
            assert bytes(ours.model.arena()) == bytes(theirs.model.arena())
            for name in ("architecture", "config", "family", "method", "weight_dtype"):
                assert getattr(ours, name) == getattr(theirs, name)
        assert llm.get_default_sampling_params() == original.get_default_sampling_params()
        for name in ("bos_token_id", "eos_token_ids", "stored_dtypes"):
            assert getattr(llm.target, name) == getattr(original.target, name)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A converted pair with every kind of settings."""
    target, draft = _draft_model(tmp_path)
    return convert(target, tmp_path / "out", draft, 3, progress=False)


def test_settings_are_copied(out: Path) -> None:
    with LLM(out, **ENGINE) as llm:
        message = {"role": "user", "content": "abc"}
        prompt = llm.get_tokenizer().apply_chat_template([message], tokenize=False)
        assert prompt == "<eos>abc"
        assert llm.get_default_sampling_params().temperature == 0.5
    for name, text in SETTINGS.items():
        assert (out / name).read_text() == text
    contents = read_json(out / "paceline.json")
    assert (contents["bos_token_id"], contents["stop_token_ids"]) == (2, [0])
    assert _core.load_model_folder(str(out)).num_speculative_tokens == 3


def test_the_configuration_says_otherwise(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, config = result(out)
    assert (config.model, config.num_speculative_tokens) == (str(out), 3)
    assert result(out, {"method": None}) == (tokens, None)
    longer, config = result(out, {"num_speculative_tokens": 6})
    assert (longer, config.num_speculative_tokens) == (tokens, 6)
    assert result(out, {"method": "ngram", "num_speculative_tokens": 2})[0] == tokens
    other = str(make(TinySpec(seed=5)))
    same, config = result(out, {"model": other, "num_speculative_tokens": 2})
    assert (same, config.model) == (tokens, other)
    # As a drafter it is what drafts in it; without a drafter it is a draft model itself.
    target = tmp_path / "target"
    for drafter in (out, convert(target, tmp_path / "alone", progress=False)):
        same, config = result(target, {"model": str(drafter), "num_speculative_tokens": 2})
        assert (same, config.method) == (tokens, "draft_model")
    with raises(ValueError, "'eagle3'", str(out), "'draft_model'"):
        LLM(
            target,
            speculative_config={"method": "eagle3", "model": out} | {"num_speculative_tokens": 1},
        )
    arguments = ["generate", "abc", "--model", str(out), "--json", "--max-tokens", "4"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3


def test_dtype_and_dummy_weights(out: Path) -> None:
    with raises(ValueError, "dtype is 'float32'", "converted for 'bfloat16' (target)", "--dtype"):
        LLM(out, dtype="float32")
    with raises(ValueError, "dtype is 'bfloat16'", "converted for 'float32' (draft)"):
        LLM(out, dtype="bfloat16")
    assert load_checkpoint(out, dtype="bfloat16", progress=False).weight_dtype == "bfloat16"
    for name in ("target.safetensors", "draft.safetensors"):
        (out / name).unlink()
    with LLM(out, load_format="dummy", **ENGINE) as llm:
        assert llm.draft is not None
        assert (llm.target.is_dummy, llm.target.family, llm.draft.family) == (
            True,
            "gemma3",
            "llama",
        )


def test_from_the_hub(out: Path) -> None:
    (out / "README.md").write_text("no")
    expected = result(out)[0]
    with HubServer({"org/pair": out}) as hub, hub.used():
        assert result("org/pair")[0] == expected
        fetched = {name for _, name in hub.fetched}
        assert fetched == {
            path.relative_to(out).as_posix() for path in out.rglob("*.*") if path.is_file()
        } - {"README.md"}
        hub.stop()
        with hub.used(offline=True):
            assert result("org/pair")[0] == expected
            next(hub.cache.rglob("draft.safetensors")).unlink()
            with raises(ModelNotFoundError, "org/pair", "'draft.safetensors'", "HF_HUB_OFFLINE"):
                LLM("org/pair")


# ---- damaged folders ---------------------------------------------------------------------------


def test_other_commands_need_the_checkpoint(out: Path, tmp_path: Path) -> None:
    with raises(ModelFileError, str(out), "written by `paceline convert`", "config.json"):
        convert(out, tmp_path / "again", progress=False)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"format": "paceline-folder-2"}, ('"format" is "paceline-folder-2"', "paceline-folder-1")),
        ({"note": 1}, ('unknown key "note"',)),
        ({"target": ...}, ('"target" is missing',)),
        ({"target": {"color": 1}}, ('unknown key "target.color"',)),
        ({"target": {"weights": "../target.safetensors"}}, ("target.weights", "plain name")),
        ({"target": {"weights": "/etc/passwd"}}, ("target.weights", "plain name")),
        ({"target": {"weights": 3}}, ("target.weights", "3")),
        ({"target": {"dtype": "float16"}}, ("target.dtype", '"float16"', "bfloat16")),
        ({"target": {"config": {}}}, ("target.config", "missing")),
        ({"target": {"architecture": 3}}, ("target.architecture", "3")),
        ({"draft": ...}, ("num_speculative_tokens", "no such key")),
        ({"num_speculative_tokens": ...}, ("num_speculative_tokens", "missing")),
        ({"num_speculative_tokens": 17}, ("num_speculative_tokens", "17", "1 to 16")),
        ({"stop_token_ids": [128]}, ("stop_token_ids", "[128]", "0 to 127")),
        ({"stop_token_ids": 3}, ("stop_token_ids", "3")),
        ({"bos_token_id": 128}, ("bos_token_id", "128", "127")),
    ],
)
def test_damaged_descriptions(change: dict[str, Any], parts: tuple[str, ...], out: Path) -> None:
    values = read_json(out / "paceline.json")
    for key, value in change.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    write_json(out / "paceline.json", {k: v for k, v in values.items() if v is not ...})
    with raises(ModelFileError, str(out / "paceline.json"), *parts):
        LLM(out)
    with pytest.raises(ModelFileError):  # the library reads it as strictly
        _core.load_model_folder(str(out))


def test_a_key_that_occurs_twice(out: Path) -> None:
    path = out / "paceline.json"
    path.write_text(path.read_text().replace("{", '{"format": "x", ', 1))
    with raises(ModelFileError, str(path), "'format' occurs twice"):
        LLM(out)


def test_damaged_weights(out: Path) -> None:
    tensors = load_tensors_of(out / "target.safetensors")
    norm = tensors.pop("final_norm.weight")
    for changed, part in (
        ({}, "final_norm.weight"),
        ({"final_norm.weight": norm[:-1]}, "final_norm.weight"),
        ({"final_norm.weight": norm, "extra": norm.clone()}, "extra"),
    ):
        save_tensors_to(out / "target.safetensors", tensors | changed)
        with raises(ModelFileError, str(out / "target.safetensors"), part):
            LLM(out, speculative_config={"method": None})
    (out / "draft.safetensors").unlink()
    with raises(ModelNotFoundError, str(out / "draft.safetensors"), "paceline.json names it"):
        LLM(out)


def load_tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def save_tensors_to(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
