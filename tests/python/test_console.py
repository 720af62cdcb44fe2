# SPDX-License-Identifier: Apache-2.0
"""The command line with streams that are closed, full, not UTF-8 or no longer read, and with huge
arguments: each gives one line of error and the right exit code."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import _core, cli, console
from paceline.checks import shorten
from time_limits import HANG_LIMIT_S

GENERATE = ["generate", "x = ", "--max-tokens", "3"]
FULL = Path("/dev/full")


def run(
    *argv: str, before: Callable[[], object] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in its own process, by default with pipes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-m", "paceline", *argv]
    return subprocess.run(command, text=True, preexec_fn=before, timeout=HANG_LIMIT_S, **options)


def is_one_error(stderr: str, *parts: str) -> bool:
    """Whether standard error ends in one error with these parts, and has no traceback."""
    last = stderr.splitlines()[-1]
    return (
        "Traceback" not in stderr
        and "Exception ignored" not in stderr
        and stderr.count("error: ") == 1
        and last.startswith("paceline: error: ")
        and all(part in last for part in parts)
        and len(last) < 800
    )


# ---- standard output and standard error --------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [GENERATE, [*GENERATE, "--json"], ["doctor"], ["bench", "latency"], ["convert", "a", "b"]],
    ids=["generate", "json", "doctor", "bench", "convert"],
)
def test_closed_output_is_refused_before_anything_runs(argv: list[str]) -> None:
    done = run(*argv, before=lambda: os.close(1))
    assert done.returncode == cli.EXIT_FAILURE
    assert is_one_error(done.stderr, "standard output is closed")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "argv", [GENERATE, [*GENERATE, "--no-stream"], ["--help"], ["--version"], ["generate", "-h"]]
)
def test_full_output(argv: list[str]) -> None:
    with FULL.open("w") as full:
        done = run(*argv, stdout=full)
    assert done.returncode == cli.EXIT_FAILURE
    assert is_one_error(done.stderr, "standard output: No space left on device")


def test_closed_standard_error() -> None:
    done = run(*GENERATE, "--quiet", before=lambda: os.close(2))
    assert done.returncode == 0 and done.stdout == run(*GENERATE, "--quiet").stdout
    done = run(*GENERATE, before=lambda: os.close(2))
    assert done.returncode == 0 and "memory in MiB" not in done.stdout
    done = run("generate", "", before=lambda: os.close(2))
    assert done.returncode == cli.EXIT_USAGE and done.stdout == ""


def test_a_closed_stream_does_not_become_a_file(target_dir: Path, tmp_path: Path) -> None:
    # With all three closed, the weights would be written to descriptor 0, 1 or 2.
    out = tmp_path / "folder"
    done = run("convert", str(target_dir), str(out), "--quiet", before=lambda: os.closerange(0, 3))
    assert done.returncode == 0
    assert (out / "paceline.json").is_file()


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_full_standard_error() -> None:
    with FULL.open("w") as full:
        done = run(*GENERATE, stderr=full)
        assert done.returncode == 0 and "tokens/s" in done.stdout
        assert run("generate", "", stderr=full).returncode == cli.EXIT_USAGE
        assert run("generate", stderr=full).returncode == cli.EXIT_USAGE


def test_output_that_is_not_utf8() -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run("generate", "é = ", env=ascii_only)
    assert done.returncode == cli.EXIT_FAILURE and done.stdout == ""
    assert is_one_error(done.stderr, "encoding 'ascii'", "'\\xe9'", "PYTHONIOENCODING", "--json")
    assert done.stderr.count("\n") == 1  # nothing was loaded
    done = run("generate", "é = ", "--json", "--max-tokens", "3", env=ascii_only)
    assert done.returncode == 0 and json.loads(done.stdout)["prompt"] == "é = "
    assert run(*GENERATE, env=ascii_only).returncode == 0


def test_text_that_the_output_cannot_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr("paceline.doctor.report_text", lambda _: "µ")
        assert cli.main(["doctor"]) == cli.EXIT_FAILURE
    assert "standard output has the encoding 'ascii'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[*GENERATE, "--max-tokens", "400"], ["--help"], ["doctor"]])
def test_a_reader_that_never_reads(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*argv, stdout=writer)
    os.close(writer)
    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert "rror" not in done.stderr and "Traceback" not in done.stderr


def test_the_reader_of_standard_error_may_leave() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*GENERATE, stderr=writer)
    os.close(writer)
    assert done.returncode == 0 and "tokens/s" in done.stdout


def test_a_full_disk_leaves_no_folder(target_dir: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    for created in (False, True):
        out = tmp_path / f"out{created}"
        if created:
            out.mkdir()
        done = run("convert", str(target_dir), str(out), before=limit)
        assert done.returncode == cli.EXIT_MODEL
        assert is_one_error(done.stderr, str(out), "File too large")
        assert list(out.iterdir()) == [] if created else not out.exists()


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_under_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--concurrency", "1", "--input-len", "4", "--output-len", "4", "--rounds", "1"]
    assert cli.main(["bench", "latency", "--demo", *sizes, "--json", str(FULL)]) == cli.EXIT_MODEL
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "paceline: error: --json /dev/full: No space left on device"


# ---- signals and exit codes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, console.EXIT_INTERRUPTED, "paceline: interrupted\n"),
        (signal.SIGTERM, console.EXIT_TERMINATED, "paceline: terminated\n"),
        (signal.SIGHUP, console.EXIT_HUNG_UP, "paceline: terminated\n"),
    ],
)
def test_a_signal_ends_a_request(number: signal.Signals, code: int, message: str) -> None:
    command = [sys.executable, "-m", "paceline", "generate", "x = ", "--max-tokens", "1500", "-q"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--ignore-eos"], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)  # the request runs
        process.send_signal(number)
        errors = process.stderr.read().decode()
    # 128 + the number, as a shell reports a command that a signal ends.
    assert process.returncode == code == 128 + number
    assert errors == message


def test_a_terminated_convert_leaves_no_folder(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate(*_: Any, **__: Any) -> None:
        raise console.Terminated(signal.SIGTERM)

    monkeypatch.setattr("paceline.loader.convert._write_weights", terminate)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["convert", str(target_dir), str(tmp_path / "out"), "-q"]) == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_ignored_signal_stays_ignored() -> None:
    command = "trap '' HUP; exec \"$@\""
    argv = [sys.executable, "-c", NOHUP]
    done = subprocess.run(["bash", "-c", command, "-", *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


NOHUP = """
import os, signal
from paceline.console import signals_as_errors
with signals_as_errors():
    os.kill(os.getpid(), signal.SIGHUP)
    print("still here")
"""


NO_STDERR = """
import sys
sys.stderr = None
from paceline import LLM, SamplingParams, cli
from paceline.demo import find_demo
demo = find_demo("draft_model")
with LLM(str(demo.target), speculative_config=demo.speculative_config()) as llm:
    llm.generate(["def a", "class B"], SamplingParams(max_tokens=4), use_tqdm=True)
assert cli.main(["generate", "a", "--max-tokens", "2"]) == 0
"""


def test_a_process_without_standard_error_shows_no_bars() -> None:
    """As under pythonw, or in a daemon that has closed it."""
    done = subprocess.run(
        [sys.executable, "-c", NO_STDERR], capture_output=True, text=True, timeout=HANG_LIMIT_S
    )
    assert done.returncode == 0 and "tokens/s" in done.stdout


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    for name, code in vars(console).items():
        if name.startswith("EXIT_") and isinstance(code, int):
            assert f"\n  {code} " in out, name


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (console.OutputError("full"), console.EXIT_FAILURE),
        (_core.InternalError("bug"), console.EXIT_FAILURE),
        (RuntimeError("ended"), console.EXIT_FAILURE),
        (ValueError("k is 0"), console.EXIT_USAGE),
        (NotImplementedError("suffix"), console.EXIT_USAGE),
        (_core.ModelFileError("config.json"), console.EXIT_MODEL),
        (FileNotFoundError(2, "no such file", "x"), console.EXIT_MODEL),
        (_core.DeviceError("no GPU"), console.EXIT_DEVICE),
        (MemoryError("pool"), console.EXIT_OUT_OF_MEMORY),
        (BrokenPipeError(), console.EXIT_BROKEN_PIPE),
        (KeyboardInterrupt(), console.EXIT_INTERRUPTED),
        (console.Terminated(signal.SIGHUP), console.EXIT_HUNG_UP),
        (console.Terminated(signal.SIGTERM), console.EXIT_TERMINATED),
    ],
)
def test_every_error_has_an_exit_code_and_one_line(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("paceline.llm.LLM", fail)
    assert cli.main(["generate", "a"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (code != console.EXIT_BROKEN_PIPE), lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paceline gen", ["generate "]),
        ("paceline generate --temp", ["--temperature "]),
        ("paceline generate --color al", ["always "]),
        ("paceline bench ", ["latency"]),
    ],
)
def test_a_shell_completes(line: str, expected: list[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    asked = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = run(env=asked)
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert set(expected) <= {*answer.read_text().split("\n")}, answer.read_text()


# ---- arguments ---------------------------------------------------------------------------------

DIGITS = "9" * 5000
DEEP = "[" * 100_000
LONG = "x" * 300


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["generate", ""], ["prompt is empty"]),
        (["generate", "a\udcff"], ["prompt has '\\udcff' at character 1", "UTF-8"]),
        (["generate", "a", "--stop", "\udcff"], ["stop[0] has '\\udcff'", "UTF-8"]),
        (["generate", "a", "--bad-words", "\udcff"], ["--bad-words[0] has '\\udcff'", "UTF-8"]),
        (["generate", "a", "--model", "\udcff"], ["model has '\\udcff'", "UTF-8"]),
        (["generate", "a", "--model", ""], ["model is ''", "the folder of a checkpoint"]),
        (["generate", "a", "--model", LONG], ["model is 'xxx", "255"]),
        (["generate", "a", "--model", "x/" * 3000], ["model is 'x/x", "4095"]),
        (["generate", "a", "--demo", LONG], ["demo is 'xxx", "'draft_model'"]),
        (["generate", "a", "--device", LONG], ["device is 'xxx", "'cuda'"]),
        (["generate", "a", "--logit-bias", DEEP], ["--logit-bias is not", "nested too deeply"]),
        (["generate", "a", "--logit-bias", f'{{"1": {DIGITS}}}'], ["--logit-bias", "digits"]),
        (["generate", "a", "--logit-bias", f'{{"{DIGITS}": 1}}'], ["--logit-bias", "token ids"]),
        (
            ["generate", "a", "--model", "x", "--speculative-config", DEEP],
            ["--speculative-config is not", "nested too deeply"],
        ),
        (
            ["generate", "a", "--model", "x", "--speculative-config", f'{{"k": {DIGITS}}}'],
            ["--speculative-config is not", "digits"],
        ),
        (["convert", LONG, "out"], ["model is 'xxx", "255"]),
        (["convert", "a", LONG], ["out is 'xxx", "255"]),
        (["convert", "a", "b", "--draft", LONG], ["--draft is 'xxx", "255"]),
        (["bench", "latency", "--sampling", DEEP], ["sampling is not", "nested too deeply"]),
        (["bench", "latency", "--sampling", f"[{DIGITS}]"], ["sampling is not", "digits"]),
        (["bench", "latency", "--speculative-config", DEEP], ["--speculative-config", "deeply"]),
        (["bench", "latency", "--concurrency", DIGITS], ["concurrency is '999"]),
        (["bench", "latency", "--drivers", LONG], ["drivers is 'xxx"]),
        (["bench", "latency", "--model", LONG], ["--model is 'xxx", "255"]),
        (["bench", "latency", "--config", "\udcff"], ["--config has '\\udcff'"]),
        (["bench", "latency", "--draft-config", LONG], ["--draft-config is 'xxx", "255"]),
        (["bench", "latency", "--json", LONG], ["--json is 'xxx", "255"]),
    ],
    ids=lambda value: shorten(value) if isinstance(value, list) else None,
)
def test_arguments_are_refused_by_name_before_a_model_is_loaded(
    argv: list[str],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("paceline.llm.load_pair", load)
    monkeypatch.setattr("paceline.bench.latency_command.load", load)
    assert cli.main(argv) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert is_one_error(captured.err, *parts)


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "a", "--max-tokens", DIGITS],
        ["generate", "a", "--temperature", "x" * 5000],
        ["generate", "a", "--stop-token-ids", DIGITS],
        ["generate", "a", "--" + "x" * 5000],
        ["bench", "latency", "--rounds", DIGITS],
        ["bench", "latency", "--dtype", "x" * 5000],
        ["x" * 5000],
    ],
    ids=range(7),
)
def test_usage_errors_are_shortened(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == cli.EXIT_USAGE
    (error,) = capsys.readouterr().err.splitlines()
    assert "error: " in error and len(error) < 600
    if argv[-2:] == ["--max-tokens", DIGITS]:
        assert "has too many digits; see paceline generate --help" in error


def test_a_rust_panic_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail(*_: Any, **__: Any) -> None:
        raise panic("called `Option::unwrap()` on a `None` value\nmore")

    monkeypatch.setattr("paceline.llm.load_pair", fail)
    assert cli.main(GENERATE) == cli.EXIT_FAILURE
    assert is_one_error(capsys.readouterr().err, "tokenizers package failed", "Option::unwrap")


def test_an_error_of_the_system_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "some/config.json")

    monkeypatch.setattr("paceline.llm.load_pair", fail)
    assert cli.main(GENERATE) == cli.EXIT_MODEL
    assert capsys.readouterr().err == "paceline: error: some/config.json: Permission denied\n"


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    code = """
import sys
from paceline.__main__ import main

class Interrupting:
    def find_spec(self, name, *_):
        if name == "paceline.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "paceline: interrupted\n")
