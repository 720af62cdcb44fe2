# SPDX-License-Identifier: Apache-2.0
"""One version is the oldest CMake everywhere, and the tests build with it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "3.25"


def found(path: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_file_names_the_oldest_cmake() -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["cmakeMinimumRequired"]
    assert f"{presets['major']}.{presets['minor']}" == OLDEST
    assert presets["patch"] == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"cmake>={OLDEST}" in project["build-system"]["requires"]
    assert f"cmake>={OLDEST}" in project["project"]["optional-dependencies"]["test"]
    assert project["tool"]["scikit-build"]["cmake"]["version"] == f">={OLDEST}"
    folders = ("", "tests/**/", "examples/**/")
    listfiles = [path for folder in folders for path in ROOT.glob(f"{folder}CMakeLists.txt")]
    minimums = [
        version
        for path in listfiles
        for version in found(str(path), r"^cmake_minimum_required\(VERSION ([0-9.]+)\)")
    ]
    assert len(minimums) >= 2
    assert set(minimums) == {OLDEST}


def test_the_tests_build_with_the_oldest_cmake() -> None:
    (pinned,) = found("tests/constraints.txt", r"^cmake==([0-9.]+)")
    assert pinned.startswith(f"{OLDEST}.")
