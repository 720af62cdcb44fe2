# SPDX-License-Identifier: Apache-2.0
"""Files that a command line names may have no end: they are refused with bounded memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.commands.text_files import MAX_CONFIG_BYTES, read_text_file
from time_limits import HANG_LIMIT_S


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--config", "/dev/zero"],
        ["generate", "--prompts-file", "/dev/zero"],
        ["bench", "serve", "--dataset-name", "custom", "--dataset-path", "/dev/zero"],
    ],
    ids=["serve", "generate", "bench"],
)
def test_a_device_is_refused(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *argv],
        capture_output=True,
        text=True,
        preexec_fn=limit_memory,
        timeout=HANG_LIMIT_S,
    )
    assert done.returncode == cli.EXIT_USAGE
    assert "/dev/zero is a device; allowed: a file or a pipe" in done.stderr


def test_a_huge_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    assert cli.main(["serve", "--config", str(path)]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert f"--config {path}" in error or f"{path} has more than {MAX_CONFIG_BYTES}" in error


def test_pipes_and_the_null_device_are_read(tmp_path: Path) -> None:
    assert read_text_file(Path("/dev/null"), 10) == ""
    command = f"{sys.executable} -m paceline generate -q --max-tokens 2 --prompts-file <(echo x=)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
