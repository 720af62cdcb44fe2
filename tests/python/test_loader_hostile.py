# SPDX-License-Identifier: Apache-2.0
"""Hostile folders: endless files, values out of any range, names that are too long."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from errors import raises
from hf_configs import GEMMA3, GEMMA4, GPT_OSS, LLAMA
from paceline import loader
from paceline._core import ModelFileError, ModelNotFoundError
from paceline.loader.checkpoint import open_checkpoint
from paceline.loader.convert import convert
from paceline.loader.files import read_file
from paceline.loader.tokenizer import TokenizerInfo
from paceline.loader.weight_files import RawShard
from quantized_models import quantization_config
from tiny_models import FULL, SLIDING, TinySpec, edit_config, make, read_json, write_json

MEGABYTE = "x" * 10**6
FP8, ROWS, MXFP4 = map(quantization_config, ("fp8_block", "fp8_row", "mxfp4"))
# No error message is longer, including the paths of a test.
MAX_MESSAGE = 1200


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Ends a test that waits for a FIFO or reads a device."""

    def stop(*_: object) -> None:
        raise TimeoutError("the test still reads")

    for spec in (TinySpec(), TinySpec(shards=2)):
        make(spec)  # imports torch, which may take longer than a test
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- special files ----------------------------------------------------------------------------


def _make_socket(path: Path) -> None:
    # The path of a socket may have only about 100 bytes.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as end:
        end.bind(f"{folder}/s")
        os.rename(f"{folder}/s", path)


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "socket": (_make_socket, "a socket"),
    "folder": (Path.mkdir, "a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link to a fifo": (
        lambda path: (os.mkfifo(path.parent / "pipe"), path.symlink_to("pipe")),
        "a FIFO",
    ),
}
FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(kind: str, name: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    (path / name).unlink(missing_ok=True)
    make_file, seen = KINDS[kind]
    make_file(path / name)
    with raises(ModelFileError, f"{path / name}: {seen}; expected", "a regular file"):
        loader.load_checkpoint(path, progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_that_is_no_regular_file(kind: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "model.safetensors").unlink()
    make_file, seen = KINDS[kind]
    make_file(path / "pytorch_model.bin")
    with raises(ModelFileError, f"{path / 'pytorch_model.bin'}: {seen}; expected weights"):
        convert(path, path.parent / "out", allow_pickle=True, progress=False)


def test_links_to_regular_files_are_read(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).rename(path.parent / name)
        (path / name).symlink_to(path.parent / name)
    assert loader.load_checkpoint(path, progress=False).tokenizer is not None


def test_size_that_is_too_small() -> None:
    """Files of /proc have a size of 0 and contents."""
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert read_file(path, "a status", max_bytes=1 << 20).startswith(b"Name:")
    with raises(ModelFileError, path, "more than 10 bytes", "a status may have at most 10 bytes"):
        read_file(path, "a status", max_bytes=10)


def test_file_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, "digits", max_bytes=5) == b"12345"
    with raises(ModelFileError, path, "5 bytes; digits may have at most 4 bytes"):
        read_file(path, "digits", max_bytes=4)


def test_file_that_may_not_be_read(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")
    with raises(ModelFileError, path / "config.json", "Too many levels of symbolic links"):
        open_checkpoint(path)


def test_weights_that_shrink(copy_of: Callable[..., Path]) -> None:
    path = copy_of() / "model.safetensors"
    name, nbytes = "model.embed_tokens.weight", 128 * 64 * 4
    raw = RawShard(path)
    assert len(b"".join(raw.chunks(name, nbytes))) == nbytes
    with raises(ModelFileError, path, "changed while it was read"):
        list(raw.chunks(name, nbytes - 1))
    os.truncate(path, path.stat().st_size // 8)
    with raises(ModelFileError, path, "changed while it was read"):
        list(raw.chunks("model.norm.weight", 256))
    path.write_bytes(b"\xff" * 64)
    with raises(ModelFileError, path, "changed while it was read"):
        RawShard(path)
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    with raises(ModelFileError, path, "changed while it was read"):
        RawShard(path)


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [256, 5000])
def test_names_that_are_too_long(length: int, copy_of: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("x" * length, tmp_path / ("x" * length)):
        with raises(ModelFileError, "x", ": File name too long") as caught:
            loader.load_checkpoint(name, progress=False)
        assert len(str(caught.value)) < MAX_MESSAGE
    path = copy_of(TinySpec(shards=2))
    index = read_json(path / FILES[2])
    shard = "x" * length + ".safetensors"
    index["weight_map"]["model.norm.weight"] = shard
    write_json(path / FILES[2], index)
    with raises(ModelFileError, FILES[2], "weight_map.model.norm.weight", "plain name") as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < MAX_MESSAGE


def test_name_with_a_null_character() -> None:
    with raises(ModelFileError, "'a\\x00b': embedded null byte"):
        loader.load_checkpoint("a\0b", progress=False)


# ---- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "seen"),
    [
        ("rms_norm_eps", "1e-320", "1e-320 (0 as a float32); expected a finite number above 0"),
        ("rms_norm_eps", "1e-46", "1e-46 (0 as a float32); expected a finite number above 0"),
        ("rms_norm_eps", "1e-999", "1e-999; expected a finite number above 0"),
        ("rms_norm_eps", "1e999", "1e999; expected a finite number above 0"),
        ("rms_norm_eps", "3.5e38", "3.5e+38 (infinite as a float32); expected a finite number"),
        ("rms_norm_eps", "9" * 50, f"{'9' * 50} (infinite as a float32); expected a finite"),
        ("rms_norm_eps", "NaN", "NaN; expected a finite number above 0"),
        ("rms_norm_eps", "-1e999", "-1e999; expected a finite number above 0"),
        ("rope_theta", "1e-400", "1e-400; expected a finite number above 0"),
        ("hidden_size", "1e1", "10.0; expected an integer from 1"),
        ("hidden_size", "1" * 5000, f"{'1' * 20}... (a number of 5000 characters); expected an"),
        ("hidden_size", "1" * 10**6, "(a number of 1000000 characters); expected an integer"),
        ("eos_token_id", "1" * 5000, "(a number of 5000 characters); expected a token id"),
    ],
)
def test_numbers_out_of_any_range(
    key: str, text: str, seen: str, copy_of: Callable[..., Path]
) -> None:
    path = copy_of() / "config.json"
    write_json(path, LLAMA | {key: 12345678})
    path.write_text(path.read_text().replace("12345678", text))
    with raises(ModelFileError, f'{path}: key "{key}" is ', seen):
        open_checkpoint(path.parent)


def test_small_numbers_that_float32_holds(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    edit_config(path, rms_norm_eps=1e-45)
    assert open_checkpoint(path).config["norm_eps"] == 1e-45


def test_numbers_of_keys_that_are_not_read(copy_of: Callable[..., Path]) -> None:
    path = copy_of() / "config.json"
    path.write_text(path.read_text().replace("{", f'{{"unknown": {"7" * 9999},', 1))
    open_checkpoint(path.parent)


# ---- long and deep values ----------------------------------------------------------------------

LONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"architectures": [MEGABYTE]}),
    (LLAMA, {"architectures": [f"{i}" for i in range(100_000)]}),
    (LLAMA, {"architectures": None, "model_type": MEGABYTE}),
    (LLAMA, {"hidden_size": MEGABYTE}),
    (LLAMA, {"hidden_size": list(range(100_000))}),
    (LLAMA, {"hidden_size": {MEGABYTE: MEGABYTE}}),
    (LLAMA, {"hidden_act": MEGABYTE}),
    (LLAMA, {"eos_token_id": [MEGABYTE]}),
    (LLAMA, {"rope_scaling": {"rope_type": MEGABYTE}}),
    (LLAMA, {"rope_parameters": {FULL: {}, MEGABYTE: {}}}),
    (LLAMA, {"quantization_config": {"bits": MEGABYTE}}),
    (LLAMA, {"quantization_config": {"quant_method": MEGABYTE}}),
    (LLAMA, {"quantization_config": FP8 | {"weight_block_size": [128] * 10**5}}),
    (LLAMA, {"quantization_config": FP8 | {"modules_to_not_convert": ["k_proj", MEGABYTE + "|"]}}),
    (LLAMA, {"quantization_config": ROWS | {"config_groups": {MEGABYTE: MEGABYTE}}}),
    (LLAMA, {"quantization_config": ROWS | {"ignore": ["re:" + MEGABYTE]}}),
    (LLAMA, {"quantization_config": ROWS | {"ignore": [f"m.{i}" for i in range(10**5)]}}),
    (GPT_OSS, {"experts_per_token": MEGABYTE}),
    (GPT_OSS, {"quantization_config": MXFP4 | {"modules_to_not_convert": ["mlp"] * 10**5}}),
    (GEMMA3, {"layer_types": [MEGABYTE] * 7}),
    (GEMMA4, {"per_layer_config": {MEGABYTE: {}}}),
    (GEMMA4, {"per_layer_config": {"9" * 10**6: {}}}),
    (GEMMA4, {"per_layer_config": {"1": {MEGABYTE: 1}}}),
    (GEMMA4, {"layer_types": [FULL] * 6 + [SLIDING], "use_bidirectional_attention": MEGABYTE}),
]


@pytest.mark.parametrize(("base", "changes"), LONG)
def test_long_values_are_shortened(
    base: dict[str, Any], changes: dict[str, Any], copy_of: Callable[..., Path]
) -> None:
    path = copy_of()
    write_json(path / "config.json", base | changes)
    with pytest.raises((ModelFileError, NotImplementedError)) as caught:
        open_checkpoint(path)
    assert str(path / "config.json") in str(caught.value)
    assert len(str(caught.value)) < MAX_MESSAGE


def test_long_names_of_tensors_are_shortened(copy_of: Callable[..., Path]) -> None:
    path = copy_of(TinySpec(shards=2))
    index = read_json(path / FILES[2])
    index["weight_map"][MEGABYTE] = "model-00001-of-00002.safetensors"
    write_json(path / FILES[2], index)
    with raises(ModelFileError, "xxx...' is missing", FILES[2]) as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < MAX_MESSAGE
    index["weight_map"][MEGABYTE] = MEGABYTE
    write_json(path / FILES[2], index)
    with raises(ModelFileError, FILES[2], '"weight_map.xxx', '..." is "xxx') as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < MAX_MESSAGE


@pytest.mark.parametrize("levels", [100, 800, 900, 950, 1000, 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", FILES[2]])
def test_deep_values(name: str, levels: int, copy_of: Callable[..., Path]) -> None:
    """Showing a value does not fail either if it is nested as deeply as can be read."""
    path = copy_of(TinySpec(shards=2))
    key = {"config.json": "hidden_size", FILES[2]: "weight_map"}.get(name, "eos_token_id")
    (path / name).write_text(f'{{"{key}": {"[" * levels}{"]" * levels}}}')
    with raises(ModelFileError, path / name, "expected"):
        open_checkpoint(path)


# ---- tokenizers --------------------------------------------------------------------------------

WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
# Faults in the Rust code of the tokenizers package, which raises a PanicException for them.
PANICS: dict[str, dict[str, Any]] = {
    "charsmap": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "model": WORDS,
    },
    "prefix": {
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "##",
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": ["a b"],
        }
    },
}


@pytest.mark.parametrize("case", PANICS)
def test_tokenizers_that_panic(case: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    write_json(path / "tokenizer.json", PANICS[case] | {"version": "1.0"})
    with raises(ModelFileError, path / "tokenizer.json", "not a tokenizer", "package reads: "):
        loader.load_checkpoint(path, progress=False)


def test_tokenizers_that_fail_on_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    single = [{"SpecialToken": {"id": "none", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    write_json(path, {"version": "1.0", "model": WORDS, "post_processor": template})
    with raises(ModelFileError, path, "the tokenizer cannot encode a prompt: no entry"):
        TokenizerInfo(path).encode("a")
    pieces = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"a": 0},
    }
    write_json(path, {"version": "1.0", "model": pieces})
    with raises(ModelFileError, path, "cannot encode a prompt", "Missing [UNK] token"):
        TokenizerInfo(path).encode("b")


def test_interruption_of_a_tokenizer_is_no_file_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tokenizers

    class Interrupted:
        @staticmethod
        def from_buffer(contents: bytes) -> None:
            raise KeyboardInterrupt

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(tokenizers, "Tokenizer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        TokenizerInfo(tmp_path / "tokenizer.json")


def test_huge_tokenizer(copy_of: Callable[..., Path]) -> None:
    path = copy_of() / "tokenizer.json"
    os.truncate(path, (512 << 20) + 1)
    with raises(ModelFileError, path, "the model's tokenizer may have at most"):
        loader.load_checkpoint(path.parent, progress=False)


def test_absent_tokenizer_file(tmp_path: Path) -> None:
    with raises(ModelNotFoundError, tmp_path / "tokenizer.json", "no such file"):
        TokenizerInfo(tmp_path / "tokenizer.json")
