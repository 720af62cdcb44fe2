# SPDX-License-Identifier: Apache-2.0
"""Types: the stub matches the module; the package and what users write are strictly typed."""

from __future__ import annotations

import os
import re
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


def python_of(page: Path) -> str:
    """All Python code of a page; a later block may use the names of an earlier one."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return "".join(blocks)


def test_package_and_user_code_are_strictly_typed(tmp_path: Path) -> None:
    snippets = tmp_path / "snippets"
    snippets.mkdir()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if code := python_of(page):
            (snippets / f"page_{page.stem.lower().replace('-', '_')}.py").write_text(code)
    assert (snippets / "page_readme.py").is_file()
    run(
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--cache-dir",
        str(tmp_path / "cache"),
        "python/paceline",
        "tests/support/user_code.py",
        *map(str, sorted((ROOT / "examples").glob("*.py"))),
        *map(str, sorted(snippets.glob("*.py"))),
        cwd=ROOT,
    )


def test_package_says_that_it_is_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
    assert (Path(paceline.__file__).parent / "_core.pyi").is_file()
