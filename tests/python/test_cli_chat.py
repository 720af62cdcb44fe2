# SPDX-License-Identifier: Apache-2.0
"""`paceline chat` and `paceline generate --chat`."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams, cli
from paceline.console import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def model(target_dir: Path, speculative_config: dict[str, Any], template: Path) -> list[str]:
    config = ["--speculative-config", json.dumps(speculative_config)]
    limits = ["--max-tokens", "12", "--temperature", "0"]
    return ["--model", str(target_dir), *config, *limits, "--chat-template", str(template)]


@pytest.fixture
def chatting(target_dir: Path, speculative_config: dict[str, Any], template: Path) -> Iterator[LLM]:
    with LLM(
        target_dir, speculative_config=speculative_config, chat_template=template, device="cpu",
        max_num_seqs=2,
    ) as llm:  # fmt: skip
        yield llm


def answer(llm: LLM, *messages: str, system: str | None = None) -> str:
    """What the model answers to messages of user and assistant by turns."""
    roles = ("user", "assistant")
    conversation = [
        {"role": roles[index % 2], "content": text} for index, text in enumerate(messages)
    ]
    if system is not None:
        conversation.insert(0, {"role": "system", "content": system})
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return llm.chat(conversation, params)[0].outputs[0].text


def give_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


# ---- chat --------------------------------------------------------------------------------------


def test_a_conversation_from_a_pipe(
    model: list[str],
    chatting: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = answer(chatting, "é?", system="short")
    second = answer(chatting, "é?", first, "and /exit?", system="short")
    assert first != answer(chatting, "é?")  # the system message matters
    fresh = answer(chatting, "again", system="short")
    lines = "é?\r\n\nand /exit?\n/new\nagain\n/exit\nnever read"
    give_input(monkeypatch, lines.encode())
    assert cli.main(["chat", *model, "--system", "short"]) == EXIT_OK
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{fresh}\n"
    reports = captured.err.splitlines()
    assert len(reports) == 3
    assert all(line.startswith("paceline: 12 tokens, ") for line in reports)
    assert all("acceptance length" in line and "--max-tokens" in line for line in reports)
    give_input(monkeypatch, b"x")  # the end of the input ends the conversation
    assert cli.main(["chat", *model, "-q", "--color", "always"]) == EXIT_OK
    captured = capsys.readouterr()
    assert captured.err == "" and "\x1b[" in captured.out


def test_a_conversation_that_is_too_long(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, b"x" * 40)
    assert cli.main(["chat", *model, "-q", "--max-model-len", "16"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("paceline: error: the prompt of messages has ")
    assert "tokens; allowed: at most 15 (--max-model-len is 16" in error


def test_options_win_over_the_checkpoint(
    target_dir: Path, tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in target_dir.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    seen: list[SamplingParams] = []
    stream = LLM.stream

    def spy(self: LLM, prompts: Any, params: SamplingParams) -> Any:
        seen.append(params)
        return stream(self, prompts, params)

    monkeypatch.setattr(LLM, "stream", spy)
    argv = ["chat", "--model", str(folder), "--chat-template", str(template), "--max-tokens", "2"]
    for extra in ([], ["--temperature", "0", "--seed", "5"]):
        give_input(monkeypatch, b"x")
        assert cli.main([*argv, *extra]) == EXIT_OK
    assert [(p.temperature, p.top_k, p.max_tokens, p.seed) for p in seen] == [
        (0.25, 7, 2, 0), (0, 7, 2, 5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "content", "message"),
    [
        (["--max-tokens", "0"], b"", "--max-tokens is 0"),
        (["--system", "\udcff"], b"", "--system has"),
        (["--revision", "main"], b"", "--revision needs --model"),
        (["--chat-template", "no/such.jinja"], b"x", "--chat-template is 'no/such.jinja'"),
        ([], b"x\xff\n", "line 1 of standard input is not UTF-8"),
        (["--max-model-len", "9", "--max-tokens", "1"], b"a long message\n" * 9, "allowed: at mos"),
    ],
)
def test_refusals(
    argv: list[str],
    content: bytes,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    give_input(monkeypatch, content)
    assert cli.main(["chat", "-q", *argv]) == EXIT_USAGE
    assert message in capsys.readouterr().err


class Terminal:
    """`paceline chat` on a terminal."""

    def __init__(self, *argv: str) -> None:
        self.end, other = pty.openpty()
        command = [sys.executable, "-m", "paceline", "chat", *argv]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def wait_for(self, text: str, *, more: int = 0) -> None:
        """Reads until a text has come, and as many characters after it."""
        deadline = time.monotonic() + 30
        while text not in self.seen or len(self.seen.split(text, 1)[1]) < more:
            if not select.select([self.end], [], [], max(0, deadline - time.monotonic()))[0]:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"no {text!r} in {self.seen!r}")
            try:
                self.seen += os.read(self.end, 4096).decode(errors="replace")
            except OSError:  # the program has ended
                raise AssertionError(self.seen) from None
        self.seen = self.seen.split(text, 1)[1]

    def interrupt(self) -> None:
        """Sends a Ctrl-C to a program that waits for input."""
        self.wait_for("> ")
        time.sleep(0.5)  # readline may miss a signal while it begins to wait
        self.process.send_signal(signal.SIGINT)

    def code(self) -> int:
        result = self.process.wait(60)
        os.close(self.end)
        return result


def test_ctrl_c_ends_the_answer_and_not_the_program() -> None:
    terminal = Terminal("--max-tokens", "3000", "--ignore-eos", "--temperature", "0")
    terminal.wait_for("leaves, Ctrl-C ends an answer")
    terminal.wait_for("> ")
    terminal.type("/help\n")
    terminal.wait_for("there is no command '/help'")
    terminal.wait_for("> ")
    terminal.type("def f(\n")
    terminal.wait_for("def f(", more=30)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("the answer was cancelled")
    terminal.interrupt()
    terminal.wait_for("Ctrl-C again or /exit leaves")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.code() == EXIT_OK


def test_a_second_ctrl_c_ends_the_program() -> None:
    terminal = Terminal()
    terminal.interrupt()
    terminal.wait_for("Ctrl-C again")
    terminal.interrupt()
    terminal.wait_for("paceline: interrupted")
    assert terminal.code() == EXIT_INTERRUPTED


def test_a_terminated_chat_ends() -> None:
    terminal = Terminal("--max-tokens", "3000", "--ignore-eos", "--temperature", "0")
    terminal.wait_for("> ")
    terminal.type("def f(\n")
    terminal.wait_for("def f(", more=30)
    terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for("paceline: terminated")
    assert terminal.code() == EXIT_TERMINATED


# ---- generate --chat ---------------------------------------------------------------------------


def test_generate_with_a_chat_template(
    model: list[str], chatting: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = answer(chatting, "é?", system="short")
    argv = ["generate", "--chat", *model, "--system", "short"]
    assert cli.main([*argv, "é?", "--compare"]) == EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith(f"é?\n{text}\n----") and "the same output" in out
    assert cli.main([*argv, "é?", "--json"]) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == text
    assert report["prompt"] == "system: short\nuser: é?\nassistant:"
    # Conversations from a file; the system message stands before each.
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "c"})
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps("é?"))
    assert cli.main([*argv, "--prompts-file", str(path), "-q"]) == EXIT_OK
    expected = [answer(chatting, "a", "b", "c", system="short"), text]
    assert capsys.readouterr().out == "".join(f"{each}\n" for each in expected)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--system", "x", "a"], "--system needs --chat"),
        (["--chat-template", "x", "a"], "--chat-template needs --chat"),
        (["--revision", "x", "a"], "--revision needs --model"),
        (["--cache-dir", "x", "a"], "--cache-dir needs --model"),
        (["--prompts-file", "MESSAGES"], "has messages; allowed: with --chat"),
        (["--chat", "--prompts-file", "IDS"], "has prompt_token_ids; allowed: without --chat"),
        (["--chat", "--prompts-file", "WRONG"], "messages is 3; allowed: a list of objects"),
    ],
)
def test_refusals_of_generate(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contents = {"MESSAGES": '{"messages": []}', "IDS": '{"prompt_token_ids": [1]}'}
    contents["WRONG"] = '{"messages": 3}'
    for name, content in contents.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    argv = [f"{tmp_path / word}.jsonl" if word in contents else word for word in argv]
    monkeypatch.delattr("paceline.llm.load_pair")
    assert cli.main(["generate", *argv]) == EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_a_model_of_the_hub(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def find(model: str, **options: Any) -> Any:
        asked.append({"model": model, **options})
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr("paceline.hub.fetch", find)
    give_input(monkeypatch, b"x")
    argv = [*command, "--model", "org/name", "--revision", "v1", "--cache-dir", "/tmp/cache"]
    assert cli.main(argv) == cli.EXIT_MODEL
    assert capsys.readouterr().err == "paceline: error: the hub cannot be reached\n"
    [options] = asked
    assert (options["model"], options["revision"]) == ("org/name", "v1")
    assert str(options["cache_dir"]) == "/tmp/cache"
