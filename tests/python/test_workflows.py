# SPDX-License-Identifier: Apache-2.0
"""The workflow files and the Dockerfile name targets, files and settings that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def make_targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(phony.split())


def load(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    return {
        ("on" if key is True else key): value
        for key, value in yaml.safe_load(path.read_text()).items()
    }


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_triggers_limits_and_versions(path: Path) -> None:
    workflow = load(path)
    assert workflow["name"] == path.stem
    assert workflow["on"] and workflow["permissions"]
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        assert any("actions/checkout@" in step.get("uses", "") for step in job["steps"]), name
    for step in steps_of(path):
        assert ("run" in step) != ("uses" in step), step
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_calls_make_targets_that_exist(path: Path) -> None:
    commands = "\n".join(step.get("run", "") for step in steps_of(path))
    called = set(re.findall(r"^make ([\w-]+)", commands, re.MULTILINE))
    assert called and called <= make_targets(), called - make_targets()
    for script in re.findall(r"\bpython3? ([\w./-]+\.py)", commands):
        assert (ROOT / script).is_file(), script


def test_ci_runs_the_same_targets_as_the_workflow() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    in_script = set(re.findall(r"^run make ([\w-]+)", script, re.MULTILINE))
    commands = [step.get("run", "") for step in steps_of(ROOT / ".github/workflows/ci.yml")]
    in_workflow = {target for line in commands for target in re.findall(r"^make ([\w-]+)", line)}
    assert in_script == in_workflow


def test_makefile_documents_every_public_target() -> None:
    text = (ROOT / "Makefile").read_text()
    documented = set(re.findall(r"^#   make ([\w-]+) ", text, re.MULTILINE))
    assert documented == {t for t in make_targets() if not t.startswith("check-")}


def test_dockerfile_builds_from_files_of_the_context() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages: set[str] = set()
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            image, _, stage = rest.partition(" AS ")
            is_named = ":" in image and not image.endswith(":latest")
            assert is_named or image in stages, image
            stages.add(stage)
        elif word == "COPY" and (source := re.match(r"--from=(\S+)", rest)):
            assert source[1] in stages, line
        assert word in ("", "#", "FROM", "RUN", "COPY", "ENV", "USER", "ENTRYPOINT"), line
    assert {"cpu", "cuda"} <= stages
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    # What the build of the package reads must reach the image.
    for needed in (
        "CMakeLists.txt",
        "cpp",
        "cuda",
        "python",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "third_party",
    ):
        assert (ROOT / needed).exists() and needed not in ignored


def test_versions_of_cuda_agree() -> None:
    images = set(re.findall(r"nvidia/cuda:(\S+?)-", (ROOT / "Dockerfile").read_text()))
    images |= set(
        re.findall(r"nvidia/cuda:(\S+?)-", (ROOT / ".github/workflows/ci.yml").read_text())
    )
    assert len(images) == 1 and images.pop().startswith("13.")
