# SPDX-License-Identifier: Apache-2.0
"""Models of the hub, from a stand-in that serves folders on this machine."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drafter_checks import ENGINE, PROMPTS
from errors import raises
from hub_server import HubServer, commit_of
from paceline import LLM, ModelFileError, ModelNotFoundError, SamplingParams
from paceline.checks import check_revision
from paceline.cli import exit_code_of, main
from paceline.hub import find_folder, is_hub_id
from paceline.loader.messages import model_name
from time_limits import HANG_LIMIT_S
from tiny_models import TinySpec, copy_checkpoint, make, read_json, write_json

K = {"num_speculative_tokens": 3}


def tokens(model: Any, draft: str | None = None, **arguments: Any) -> list[list[int]]:
    """What a model generates, with a drafter or without."""
    config = None if draft is None else {"model": draft, **K}
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(model, **{"speculative_config": config, **ENGINE, **arguments}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A hub with "org/target", which has shards, "draft", and two revisions of "org/revised"."""
    models = {
        "org/target": make(TinySpec(shards=2)),
        "draft": make(TinySpec(seed=1)),
        "org/revised": {"main": make(TinySpec(seed=2)), "v2": make(TinySpec(seed=3))},
    }
    with HubServer(models) as server, server.used():
        yield server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., HubServer]]:
    """Serves a copy of a tiny model, which the test may break, as "org/model"."""
    servers: list[Any] = []

    def serve(**attributes: Any) -> HubServer:
        folder = copy_checkpoint(make(TinySpec(shards=2)), tmp_path / "model")
        server = HubServer({"org/model": folder}, **attributes).__enter__()
        used = server.used()
        used.__enter__()
        servers.extend((server, used))
        return server

    yield serve
    for context in reversed(servers):
        context.__exit__(None, None, None)


# ---- loading -----------------------------------------------------------------------------------


def test_a_pair_from_the_hub_is_the_pair_of_the_folders(
    hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(make(TinySpec(shards=2)), str(make(TinySpec(seed=1))))
    with caplog.at_level(logging.INFO, logger="paceline"):
        assert tokens("org/target", "draft") == expected
    commit = commit_of("org/target", make(TinySpec(shards=2)))
    assert f"org/target: 5 files, 0.3 MB, of commit {commit[:12]}" in caplog.text
    folder = hub.cache / "models--org--target" / "snapshots" / commit
    assert all(path.is_symlink() for path in folder.iterdir()), "links to ../../blobs"
    assert model_name(folder) == "org/target"
    assert model_name(make(TinySpec())) == make(TinySpec()).name
    # Nothing is fetched again, and the newest commit is looked up by two requests for each model.
    fetched, num_requests = list(hub.fetched), len(hub.requests)
    assert tokens("org/target", "draft") == expected
    assert hub.fetched == fetched
    assert len(hub.requests) - num_requests == 4

    hub.stop()
    with hub.used(offline=True):
        assert tokens("org/target", "draft") == expected
    with hub.used():  # the network is down, but HF_HUB_OFFLINE is not set
        assert tokens("org/target", "draft") == expected
    assert "draft: from the cache" in caplog.text
    assert "failed: ConnectError" in caplog.text


def test_only_files_that_are_read_are_fetched(served: Callable[..., HubServer]) -> None:
    hub = served(extra_names=("../evil.safetensors", "/etc/config.json", "sub/../config.json"))
    folder = hub.models["org/model"]
    assert isinstance(folder, Path)
    (folder / "original").mkdir()
    for name in (
        "README.md",
        "consolidated.safetensors",
        "model.gguf",
        "modeling_tiny.py",
        "original/params.json",
        "preprocessor_config.json",
        "pytorch_model.bin",
        "training.pth",
    ):
        (folder / name).write_bytes(b"no")
    settings = {
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
    }
    for name in settings:
        write_json(folder / name, {"about": name})  # the cache stores equal contents once
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    settings |= {"config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja"}
    find_folder("org/model", needs_weights=False)
    assert {name for _, name in hub.fetched} == settings
    tokens("org/model")
    shards = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    wanted = sorted({*settings, *shards, "model.safetensors.index.json"})
    assert sorted(name for _, name in hub.fetched) == wanted, "each once"
    stored = {path.name for path in hub.cache.rglob("*") if path.is_symlink()}
    assert stored == {Path(name).name for name in wanted}
    assert not (hub.cache.parent / "evil.safetensors").exists()


def test_revisions(hub: HubServer) -> None:
    first, second = tokens(make(TinySpec(seed=2))), tokens(make(TinySpec(seed=3)))
    assert first != second
    assert tokens("org/revised") == first
    assert tokens("org/revised", revision="v2") == second
    commit = commit_of("org/revised", make(TinySpec(seed=3)))
    assert tokens("org/revised", revision=commit) == second
    config = {"model": "org/revised", "revision": "v2", **K}
    with LLM(make(TinySpec()), speculative_config=config, **ENGINE) as llm:
        assert llm.draft is not None
        assert llm.draft.path.name == commit
    with hub.used(offline=True):
        assert tokens("org/revised", revision="v2") == second


def test_cache_dir(hub: HubServer, tmp_path: Path) -> None:
    tokens("org/target", "draft", cache_dir=tmp_path / "cache")
    assert not any(hub.cache.iterdir())
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert {"models--org--target", "models--draft"} <= names
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        LLM("draft", cache_dir=tmp_path / "file")
    assert caught.value.filename is not None
    assert exit_code_of(caught.value) == 3


def test_progress_bars_are_hidden_on_request(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    seen = []

    def watch(_: Path) -> list[dict[str, Any]]:
        seen.append(are_progress_bars_disabled("huggingface_hub.http_get"))
        return []

    monkeypatch.setattr(hub, "listing", watch)
    for progress in (False, True):
        with raises(ModelNotFoundError, "has no config.json", "it is empty"):
            find_folder("draft", progress=progress)
        assert not are_progress_bars_disabled("huggingface_hub.http_get")
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("https://huggingface.co/org/model", "without an address, such as organization/name"),
        ("hf://org/model", "without an address"),
        ("~/models/model", "~ means the home folder in a shell only; give the whole path"),
    ],
)
def test_mistaken_names(name: str, advice: str) -> None:
    with raises(ModelNotFoundError, f"'{name}': no such folder; ", advice):
        LLM(name)
    with raises(ModelNotFoundError, f"'{name}': no such folder; ", advice):
        LLM(make(TinySpec()), speculative_config={"model": name, **K}, **ENGINE)


def test_a_folder_needs_no_hub() -> None:
    code = (
        f"import sys; from paceline import LLM; LLM({str(make(TinySpec()))!r}, **{ENGINE!r})\n"
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_LIMIT_S)


def test_command_line(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps({"model": "draft", **K})
    options = ["--json", "--max-tokens", "4", "--device", "cpu"]
    arguments = ["generate", "ab", "--model", "org/target", "--speculative-config", config]
    assert main([*arguments, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"].startswith(str(hub.cache / "models--org--target"))
    assert report["draft_model"].startswith(str(hub.cache / "models--draft"))
    hub.status = 500
    assert main(["generate", "ab", "--model", "org/revised", *options]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"paceline: error: org/revised: .* failed: .*\n", captured.err)


def test_convert_and_bench_on_the_command_line(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["convert", "org/revised", str(out), "--draft", "draft", "--revision", "v2", "-q"]
    assert main([*arguments, "--num-speculative-tokens", "17"]) == 2
    assert hub.fetched == []  # what is wrong is refused before a download
    assert main(arguments) == 0
    assert {name for name, _ in hub.fetched} == {"org/revised", "draft"}
    with LLM(out, **ENGINE) as llm, LLM("org/revised", revision="v2", **ENGINE) as expected:
        assert llm.draft is not None
        prompt = ("ab", SamplingParams(temperature=0.0, max_tokens=8))
        tokens = [one.generate(*prompt)[0].outputs[0].token_ids for one in (llm, expected)]
        assert tokens[0] == tokens[1]
    assert main(["convert", "org/none", str(tmp_path / "none")]) == 3
    assert "org/none: no such folder, and " in capsys.readouterr().err
    assert not (tmp_path / "none").exists()

    bench = ["bench", "latency", "--device", "cpu", "--host-only", "--concurrency", "1"]
    bench += ["--input-len", "4", "--output-len", "4", "--rounds", "1", "--json", "-", "-q"]
    config = json.dumps({"model": "draft", **K})
    hub.fetched.clear()
    cache = ["--cache-dir", str(tmp_path / "cache")]
    assert main([*bench, "--config", "org/target", *cache]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "target (dummy)"
    assert [name for _, name in hub.fetched if name.endswith(".safetensors")] == []
    assert main([*bench, "--model", "org/target", "--speculative-config", config]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["target"], report["draft"]) == ("target", "draft")
    assert main([*bench, "--model", "nothing"]) == 3
    assert "nothing: no such folder, and " in capsys.readouterr().err
    refused = {
        "--config nothing": "model is 'nothing'; allowed: a folder, a model of the Hugging Face",
        "--config qwen3-8b --revision x": "the revision is 'x', but qwen3-8b is a configuration",
        "--demo --revision x": "--revision needs --model or --config",
        "--config org/target --revision ../x": "--revision is '../x'; allowed: a branch, a tag",
    }
    convert = ["convert", "org/target", str(tmp_path / "x"), "-q", "--draft-revision"]
    assert main([*convert, "v1"]) == 2
    assert "--draft-revision needs --draft" in capsys.readouterr().err
    assert main([*convert, "..", "--draft", "draft"]) == 2
    assert "--draft-revision is '..'; allowed: a branch" in capsys.readouterr().err
    for options, message in refused.items():
        assert main([*bench, *options.split()]) == 2
        assert message in capsys.readouterr().err


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "org/model", "Org-1/model_2.5-it"])
def test_names_of_models(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    ["./a", "/a", "a/", "a/b/c", "../a", "~/a", "a--b", "a b", "a..b", ".", "a/b.git", "a\\b"],
)
def test_names_that_are_never_looked_up(name: str, hub: HubServer) -> None:
    assert not is_hub_id(name)
    with raises(ModelNotFoundError, "no such folder"):
        LLM(name + "/x" if name == "." else name)
    assert not hub.requests


def test_a_folder_wins(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(ModelNotFoundError, "draft", "no such folder"):
        LLM(Path("draft"))
    config = {"model": Path("draft"), **K}
    with raises(ModelNotFoundError, "draft", "no such folder"):
        LLM(make(TinySpec()), speculative_config=config)
    copy_checkpoint(make(TinySpec()), tmp_path / "org" / "target")
    assert tokens("org/target") == tokens(make(TinySpec()))
    assert not hub.requests
    with raises(ValueError, "revision of model is 'v2'", "'org/target' is a folder"):
        LLM("org/target", revision="v2")


@pytest.mark.parametrize("revision", ["main", "refs/pr/1", "v1.0", "0123abc"])
def test_revision_names(revision: str) -> None:
    check_revision("revision", revision)


@pytest.mark.parametrize("revision", ["", 3, "../x", "a..b", "/a", "a b", "-x", "a" * 300, "a\n"])
def test_no_revision_names(revision: Any) -> None:
    with raises(ValueError, "revision is", "a branch, a tag or a commit"):
        LLM("draft", revision=revision)
    with raises(ValueError, "speculative_config['revision'] is", "a branch, a tag or a commit"):
        LLM("draft", speculative_config={"model": "draft", "revision": revision, **K})


# ---- failures of the hub -----------------------------------------------------------------------


def refused(
    hub: HubServer, kind: type[Exception], *parts: str, name: str = "org/target", **arguments: Any
) -> None:
    with raises(kind, name, *parts) as caught:
        LLM(name, **arguments)
    assert exit_code_of(caught.value) == 3, "a model or file error"
    assert len(str(caught.value)) < 600
    assert not hub.fetched


def test_missing_model_and_revision(hub: HubServer) -> None:
    refused(hub, ModelNotFoundError, hub.url, "no such model", "HF_TOKEN", name="org/none")
    with hub.used(token=hub.token):
        refused(hub, ModelNotFoundError, "no such model", name="org/none")
    refused(hub, ModelNotFoundError, "no revision 'v9'", "a branch, a tag", revision="v9")


def test_gated_model(hub: HubServer) -> None:
    hub.gated = frozenset({"org/target"})
    refused(hub, ModelNotFoundError, "restricted", f"{hub.url}/org/target", "HF_TOKEN")
    with hub.used(token="hf_wrong"):
        refused(hub, ModelNotFoundError, "restricted", "HF_TOKEN")
    with hub.used(token=hub.token):
        assert find_folder("org/target").is_dir()


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access(status: int, hub: HubServer) -> None:
    hub.status = status
    refused(hub, ModelNotFoundError, "HF_TOKEN")


@pytest.mark.parametrize(
    ("status", "parts"),
    [(500, ("failed: HfHubHTTPError", "500")), (200, ("does not answer like a hub",))],
)
def test_broken_hub(status: int, parts: tuple[str, ...], hub: HubServer) -> None:
    hub.status = status
    refused(hub, ConnectionError, hub.url, *parts, "name a folder")
    hub.status = None
    find_folder("org/target")
    hub.status = status
    assert find_folder("org/target").is_dir(), "from the cache"


def test_no_network_and_no_copy(hub: HubServer) -> None:
    with hub.used(offline=True):
        refused(hub, ModelNotFoundError, "not in the hub's cache", str(hub.cache), "HF_HUB_OFFLINE")
    hub.stop()
    refused(hub, ConnectionError, hub.url, "failed: ConnectError", "name a folder")
    refused(
        hub,
        ConnectionError,
        "cache_dir",
        "`hf download org/target --revision v1 --local-dir DIR`",
        revision="v1",
    )


def test_no_network_is_a_traceback_of_few_lines(hub: HubServer, tmp_path: Path) -> None:
    """The frames of the HTTP client, and those of the search for a model, would hide the cure."""
    hub.stop()
    script = tmp_path / "script.py"
    script.write_text("from paceline import LLM\nLLM('org/target')\n")
    for arguments, most in (
        ([str(script)], 6),
        (["-m", "paceline", "generate", "--model", "org/target", "a"], 1),
    ):
        result = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **hub.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = result.stderr.splitlines()
        assert len(lines) <= most and "`hf download org/target --local-dir DIR`" in lines[-1]


@pytest.mark.serial
def test_silent_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.hangs = True
    started = time.monotonic()
    refused(hub, ConnectionError, hub.url, "Timeout")
    assert time.monotonic() - started < 5


def test_interrupted_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    shard = "model-00002-of-00002.safetensors"
    hub.shrunk = {shard}
    with raises(ConnectionError, "org/target", "Consistency check failed"):
        LLM("org/target")
    with hub.used(offline=True), raises(ModelNotFoundError, shard, "HF_HUB_OFFLINE is set"):
        LLM("org/target")
    hub.shrunk = set()
    hub.cut = {shard}  # tried again
    assert tokens("org/target") == tokens(make(TinySpec(shards=2)))
    assert hub.fetched.count(("org/target", shard)) == 3


# ---- hostile repositories ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_sizes_are_checked_before_downloading(name: str, served: Callable[..., HubServer]) -> None:
    hub = served(sizes={name: 3 << 30})
    refused(hub, ModelFileError, f"{name} has {3 << 30} bytes", "at most", name="org/model")


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/evil.safetensors", "evil.py"])
def test_index_that_names_files_elsewhere(shard: str, served: Callable[..., HubServer]) -> None:
    hub = served(extra_names=(shard,))
    folder = hub.models["org/model"]
    assert isinstance(folder, Path)
    index = read_json(folder / "model.safetensors.index.json")
    index["weight_map"]["model.norm.weight"] = shard
    write_json(folder / "model.safetensors.index.json", index)
    with raises(ModelFileError, "model.safetensors.index.json", shard, "plain name"):
        LLM("org/model")
    assert not any("evil" in path for _, path in hub.requests)


def test_index_that_names_a_missing_file(served: Callable[..., HubServer]) -> None:
    hub = served()
    folder = hub.models["org/model"]
    assert isinstance(folder, Path)
    os.remove(folder / "model-00001-of-00002.safetensors")
    with raises(ModelNotFoundError, "org/model", "'model-00001-of-00002.safetensors'", "no such"):
        LLM("org/model")


@pytest.mark.parametrize(
    ("weights", "kind", "parts"),
    [
        ("pytorch_model.bin", ModelFileError, ("pickle", "hf download", "--allow-pickle")),
        (
            "mask_embedding.pt",
            ModelFileError,
            ("pickle", "hf download", "--allow-pickle TARGET OUT --draft DIR"),
        ),
        ("model.gguf", ModelNotFoundError, ("neither model.safetensors", "'model.gguf'")),
    ],
)
def test_other_weights(
    weights: str,
    kind: type[Exception],
    parts: tuple[str, ...],
    served: Callable[..., HubServer],
) -> None:
    hub = served()
    folder = hub.models["org/model"]
    assert isinstance(folder, Path)
    for path in folder.glob("model*"):
        path.unlink()
    (folder / weights).write_bytes(b"x")
    refused(hub, kind, *parts, name="org/model")
    with LLM("org/model", load_format="dummy", **ENGINE) as llm:
        assert llm.target.is_dummy
    (folder / "config.json").unlink()
    hub.fetched.clear()
    refused(hub, ModelNotFoundError, "has no config.json", repr(weights), name="org/model")


def test_repository_that_never_rests(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files must be of the commit that was listed."""
    folders = itertools.cycle([make(TinySpec(seed=2)), make(TinySpec(seed=3))])

    def newest(model: str, _: str) -> tuple[str, Path]:
        folder = next(folders)
        return commit_of(model, folder), folder

    monkeypatch.setattr(hub, "folder_of", newest)
    with raises(ConnectionError, "org/revised", "changes faster"):
        LLM("org/revised")
