# SPDX-License-Identifier: Apache-2.0
"""Variables that begin with PACELINE_: those that are read are known, others are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.commands.environment import check_environment, known_variables
from time_limits import HANG_LIMIT_S

ROOT = Path(__file__).parents[2]
# How C++, Python, make and the shell read a variable.
READ = re.compile(
    r"""getenv\("(PACELINE_\w+)"\)|environ(?:\.get\(|\[)"(PACELINE_\w+)"|\$[({]+(PACELINE_\w+)"""
    r"""|_VARIABLE: Final = "(PACELINE_\w+)\""""
)
#: Of CMake, where other names in braces are its own variables.
READ_BY_CMAKE = re.compile(r"ENV\{(PACELINE_\w+)\}")
SOURCES = (
    "cpp",
    "cuda",
    "python",
    "tests",
    "examples",
    ".ci",
    ".github",
    "Makefile",
    "CMakeLists.txt",
)


def test_every_variable_that_a_source_reads_is_known() -> None:
    read: dict[str, str] = {}
    for name in SOURCES:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in (".so", ".pyc") or path.is_dir():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.name == "CMakeLists.txt":
                read |= dict.fromkeys(READ_BY_CMAKE.findall(text), str(path))
                continue
            for groups in READ.findall(text):
                read[next(filter(None, groups))] = str(path)
    some = {"PACELINE_SEED", "PACELINE_CUBLASLT", "PACELINE_PORTABLE", "PACELINE_API_KEY"}
    assert some | {"PACELINE_CUDA_ARCHITECTURES"} < set(read)
    unknown = {name: path for name, path in read.items() if name not in known_variables()}
    assert unknown == {}


def test_known_variables_are_taken() -> None:
    check_environment(dict.fromkeys(known_variables(), "1") | {"HOME": "/", "PACELINER": "1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PACELINE_MAX_NUM_SEQ", "; did you mean PACELINE_MAX_NUM_SEQS?"),
        ("PACELINE_SERVICE_HOST", "enableServiceLinks: false"),
    ],
)
def test_an_unknown_variable_is_refused(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "8")
    assert cli.main(["doctor"]) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"the environment variable {name} is not known" in captured.err
    assert hint in captured.err


def test_help_is_printed_beside_an_unknown_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_XYZ", "1")
    command = [sys.executable, "-m", "paceline", "--help"]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_LIMIT_S)
