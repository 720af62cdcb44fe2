# SPDX-License-Identifier: Apache-2.0
"""A new kind of layer is five files of its own and a line in three lists: the toy kind of
tests/toy_kind is added to a copy of the sources, and at test level 2 built and run there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from toy_kind import add_to_build, add_toy_kind

import test_layers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the build reads of the repository."""
    for name in ("cpp", "cuda", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CMakeLists.txt", "CMakePresets.json", "docs", "third_party", "python"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_a_kind_touches_eight_source_files(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = add_toy_kind(copy)
    assert len(touched) == len(set(touched)) == 8
    changed = [
        str(path.relative_to(copy))
        for path in sorted((copy / "cpp").rglob("*.[ch]*"))
        if not (before := ROOT / path.relative_to(copy)).exists()
        or before.read_bytes() != path.read_bytes()
    ]
    assert changed == sorted(touched)
    monkeypatch.setattr(test_layers, "ROOT", copy)
    assert test_layers.violations(test_layers.sources(), test_layers.documented_rooms()) == []


def test_a_reference_from_another_kind_is_seen(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy_kind(copy)
    other = copy / "cpp/src/model/layers/dense/layer.cc"
    other.write_text('#include "model/layers/toy/layer.h"\n' + other.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(test_layers, "ROOT", copy)
    found = test_layers.violations(test_layers.sources(), test_layers.documented_rooms())
    assert len(found) == 1
    assert "dense/layer.cc" in found[0]


# It compiles the library.
if os.environ.get("PACELINE_TEST_LEVEL") == "2":

    def test_the_toy_kind_runs(copy: Path) -> None:
        (copy / "CMakeLists.txt").unlink()
        shutil.copy(ROOT / "CMakeLists.txt", copy)
        add_toy_kind(copy)
        add_to_build(copy)
        build = copy / "build"
        options = ("-DPACELINE_TESTS=ON", "-DPACELINE_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release")
        for command in (
            ["cmake", "-S", str(copy), "-B", str(build), "-G", "Ninja", *options],
            ["cmake", "--build", str(build), "--target", "toy_kind_test"],
            [str(build / "tests/toy_kind_test")],
        ):
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
