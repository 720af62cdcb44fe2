# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all Python tests."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

import pytest

# `make test-ray` runs these, in an environment that has Ray.
collect_ignore = [] if importlib.util.find_spec("ray") else ["ray_serve"]

CONSTRAINTS = Path(__file__).parent / "constraints.txt"


def pytest_configure() -> None:
    """Gives each process of pytest-xdist cores of its own.

    The engines of a process take a thread for each core that it may use. With all cores for every
    process, most of the time would go into switching threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker and count <= len(cores):
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: count])


@functools.cache
def difference_from_pinned(package: str) -> str:
    """Says how the installed version of a package differs from the pinned one, or nothing."""
    found = re.search(rf"^{package}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found is not None, f"{CONSTRAINTS} does not pin {package}"
    installed = importlib.metadata.version(package)
    if installed == found[1]:
        return ""
    return (
        f"{package} {installed} is installed, and tests/constraints.txt has {found[1]}: other "
        "versions compute other logits. Put the pinned one in front of it with PYTHONPATH"
    )


@pytest.fixture(autouse=True)
def transformers_is_pinned(request: pytest.FixtureRequest) -> None:
    """Fails comparisons with another version of transformers before they confuse anyone."""
    if request.node.get_closest_marker("golden"):
        difference = difference_from_pinned("transformers")
        assert not difference, difference
