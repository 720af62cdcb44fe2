# SPDX-License-Identifier: Apache-2.0
"""`paceline generate` with several prompts, from arguments, files and standard input."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StreamChunk, cli
from paceline.commands import generate
from paceline.console import EXIT_FAILURE, EXIT_MODEL, EXIT_USAGE

PROMPTS = ["x = ", "def f(", "import "]


@pytest.fixture
def model(target_dir: Path, speculative_config: dict[str, Any]) -> list[str]:
    config = json.dumps(speculative_config)
    return ["--model", str(target_dir), "--speculative-config", config, "--max-tokens", "12"]


@pytest.fixture
def texts(llm: LLM) -> list[str]:
    """What the model makes of the prompts."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))
    return [output.outputs[0].text for output in outputs]


def json_texts(out: str) -> list[str]:
    return [json.loads(line)["text"] for line in out.splitlines()]


def test_several_prompts(
    model: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *PROMPTS, *model, "--compare"]) == 0
    captured = capsys.readouterr()
    rule = "-" * 50
    shown = "".join(
        f"{rule} prompt {index}\n{prompt}{text}\n"
        for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
    )
    assert captured.out.startswith(f"{shown}{rule}\n3 prompts, 36 tokens in ")
    assert "acceptance length" in captured.out and "the same outputs" in captured.out
    assert "Generating" not in captured.err  # the bar is for terminals
    assert cli.main(["generate", *PROMPTS, *model, "-q"]) == 0
    assert capsys.readouterr() == ("".join(f"{text}\n" for text in texts), "")
    assert cli.main(["generate", *PROMPTS, *model, "--json", "--compare"]) == 0
    captured = capsys.readouterr()
    assert json_texts(captured.out) == texts and captured.err == ""
    assert [json.loads(line)["prompt"] for line in captured.out.splitlines()] == PROMPTS


def test_the_bar_is_shown_on_a_terminal(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(["generate", *PROMPTS, *model]) == 0
    bars = capsys.readouterr().err
    assert "Generating: 100%" in bars and "3/3" in bars and "Loading" in bars
    assert cli.main(["generate", *PROMPTS, *model, "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", "".join(f"{prompt}\n" for prompt in PROMPTS)),
        ("prompts.txt", "\r\n\r\n".join(PROMPTS)),
        ("prompts.jsonl", "\n".join(json.dumps(prompt) for prompt in PROMPTS)),
        ("prompts.jsonl", "\n\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS)),
    ],
)
def test_prompts_file(
    name: str,
    content: str,
    model: list[str],
    texts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert cli.main(["generate", "--prompts-file", str(tmp_path / name), *model, "--json"]) == 0
    assert json_texts(capsys.readouterr().out) == texts


def test_prompts_as_token_ids(
    model: list[str], llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [9]}\n')
    assert cli.main(["generate", "--prompts-file", str(path), *model, "-q"]) == 0
    expected = llm.generate([[5, 6, 7], [9]], SamplingParams(temperature=0.0, max_tokens=12))
    assert capsys.readouterr().out == "".join(f"{o.outputs[0].text}\n" for o in expected)


def give_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def test_standard_input(
    model: list[str],
    texts: list[str],
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # One prompt, with its newline, whatever the locale.
    give_input(monkeypatch, "é = 1\ny = ".encode())
    assert cli.main(["generate", "-", *model, "-q"]) == 0
    params = SamplingParams(temperature=0.0, max_tokens=12)
    expected = llm.generate("é = 1\ny = ", params)[0].outputs[0].text
    assert capsys.readouterr().out == f"{expected}\n"
    give_input(monkeypatch, "\n".join(PROMPTS).encode())
    assert cli.main(["generate", "--prompts-file", "-", *model, "-q"]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x\n\xff\n", "a.txt is not UTF-8 at byte 2"),
        ("a.txt", b"\n \n", "which has no prompt"),
        ("a.jsonl", b'"x"\n{', "a.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1 is '[1]'; allowed: a string, or an object"),
        ("a.jsonl", b'{"text": "x"}', "allowed: a string, or an object with one of the keys"),
        ("a.jsonl", b'{"prompt": "x", "prompt_token_ids": [1]}', "one of the keys"),
        ("a.jsonl", b'{"prompt_token_ids": ["x"]}', "line 1: prompt_token_ids is"),
        ("a.jsonl", b'""', "a.jsonl, line 1 is empty"),
    ],
)
def test_files_that_are_refused_before_a_model_is_loaded(
    name: str,
    content: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("paceline.llm.load_pair")
    (tmp_path / name).write_bytes(content)
    assert cli.main(["generate", "--prompts-file", str(tmp_path / name)]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_other_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "a", "--prompts-file", "b"]) == EXIT_USAGE
    assert "--prompts-file is 'b' and there is a PROMPT too" in capsys.readouterr().err
    assert cli.main(["generate", "--prompts-file", "no/such"]) == EXIT_MODEL
    assert "no/such: No such file" in capsys.readouterr().err
    assert cli.main(["generate", "a", "b", ""]) == EXIT_USAGE
    assert "prompt 2 is empty" in capsys.readouterr().err


def test_outputs_are_printed_although_one_fails(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = LLM.stream

    @contextlib.contextmanager
    def failing(self: LLM, *args: Any) -> Iterator[Iterator[StreamChunk]]:
        def chunks() -> Iterator[StreamChunk]:
            for chunk in stream:
                output = chunk.output
                if output is not None and chunk.index == 1:
                    output = replace(output, error="the logits are NaN")
                yield replace(chunk, output=output)

        with real(self, *args) as stream:
            yield chunks()

    monkeypatch.setattr(generate, "_RULE", "-")
    monkeypatch.setattr(LLM, "stream", failing)
    assert cli.main(["generate", *PROMPTS, *model]) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert all(f"- prompt {index}\n" in captured.out for index in range(3))
    assert captured.err.endswith("paceline: error: prompt 1: the logits are NaN\n")
