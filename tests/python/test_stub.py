# SPDX-License-Identifier: Apache-2.0
"""Types: the stub matches the module, and the package is strictly typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[2]


def run(*argv: str, cwd: Path) -> str:
    """Runs a module of Python in another folder; returns what it printed."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in paths if p)
    }
    result = subprocess.run(
        [sys.executable, "-m", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# A stub cannot express the metaclass of pybind11's classes, nor the constructor of classes that
# have none.
ALLOWED = r"""
paceline\._core\.(Array|Executor|Model|ModelBuilder|ModelFolder|Request|RequestEvent|SafetensorsFile|Tensor)
paceline\._core\.(Array|Model|ModelFolder|RequestEvent)\.__init__
"""


def test_stub_matches_the_module(tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text(ALLOWED)
    run("mypy.stubtest", "paceline._core", "--allowlist", "allowed", cwd=tmp_path)


def test_package_is_strictly_typed(tmp_path: Path) -> None:
    run(
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(tmp_path),
        cwd=ROOT,
    )


def test_package_says_that_it_is_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
    assert (Path(paceline.__file__).parent / "_core.pyi").is_file()


def test_users_see_the_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "from paceline import LLM, SamplingParams\n"
        "llm = LLM('model', speculative_config=None)\n"
        "reveal_type(llm.generate('a', SamplingParams(max_tokens=3))[0].outputs[0].token_ids)\n"
    )
    cache = str(tmp_path / "cache")
    assert "list[int]" in run("mypy", "--strict", "--cache-dir", cache, "user.py", cwd=tmp_path)
