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
from markdown_pages import blocks, pages

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


def test_package_and_user_code_are_strictly_typed(tmp_path: Path) -> None:
    snippets = []
    for page in pages():
        # A later block may use the names of an earlier one.
        code = [b.code for b in blocks(page) if b.language == "python" and b.how != "file"]
        if code:
            name = re.sub(r"[^a-z0-9]", "_", str(page).lower())
            snippets.append(tmp_path / f"page_{name}.py")
            snippets[-1].write_text("\n".join(code))
    assert tmp_path / "page_readme_md.py" in snippets
    run(
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--cache-dir",
        str(tmp_path / "cache"),
        "python/paceline",
        "tests/support/user_code.py",
        *map(str, sorted((ROOT / "examples").glob("*.py"))),
        *map(str, snippets),
        cwd=ROOT,
    )


def test_package_says_that_it_is_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
    assert (Path(paceline.__file__).parent / "_core.pyi").is_file()
