# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap, and all names of `__all__` exist."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline import _core

HEAVY = (
    "huggingface_hub",
    "jinja2",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
)
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.serial
def test_import_takes_less_than_300_ms() -> None:
    code = (
        "import time; start = time.perf_counter(); import paceline; "
        "print(time.perf_counter() - start)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize(
    "statement", ["import paceline", "from paceline import SamplingParams, SpeculativeConfig"]
)
def test_import_leaves_heavy_packages_alone(statement: str) -> None:
    code = f"{statement}; import sys; print([n for n in {HEAVY!r} if n in sys.modules])"
    assert run_python(code) == "[]"


def test_llm_does_not_import_torch() -> None:
    code = "from paceline import LLM; import sys; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_all_names_exist() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(dir(paceline)) == set(paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = paceline.nonesuch


def test_version_has_one_source() -> None:
    assert paceline.__version__ == _core.version()
    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text())["project"]
        assert project["dynamic"] == ["version"]
        assert f"VERSION {_core.version()} " in (PYPROJECT.parent / "CMakeLists.txt").read_text()


def test_at_most_six_required_dependencies() -> None:
    if PYPROJECT.is_file():
        assert len(tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]) <= 6


def public_modules() -> list[ModuleType]:
    names = [
        info.name
        for info in pkgutil.walk_packages(paceline.__path__, "paceline.")
        # Ray is installed for tests/ray_serve only.
        if not info.name.endswith("__main__") and not info.name.startswith("paceline.ray")
    ]
    return [paceline, *(importlib.import_module(name) for name in names)]


def test_everything_public_has_a_docstring() -> None:
    bare = []
    for module in public_modules():
        if not inspect.getdoc(module):
            bare.append(module.__name__)
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", None) == module.__name__
            if name.startswith("_") or not is_own or not callable(value):
                continue
            if not (value.__doc__ or "").strip():
                bare.append(f"{module.__name__}.{name}")
            if inspect.isclass(value):
                bare += [
                    f"{module.__name__}.{name}.{member_name}"
                    for member_name, member in vars(value).items()
                    if not member_name.startswith("_")
                    and (inspect.isroutine(member) or isinstance(member, property))
                    and not (member.__doc__ or "").strip()
                ]
    assert not bare


def test_docstrings_of_the_binding_have_arguments_and_results() -> None:
    for method in (_core.Executor.add_requests, _core.Executor.poll, _core.load_model_folder):
        assert "Args:" in method.__doc__ and "Returns:" in method.__doc__
        assert "Raises:" in method.__doc__


def test_exceptions_are_what_callers_expect() -> None:
    assert issubclass(paceline.ModelFileError, ValueError)
    assert issubclass(paceline.ModelNotFoundError, paceline.ModelFileError)
    assert issubclass(paceline.ModelNotFoundError, FileNotFoundError)
    assert issubclass(paceline.InternalError, RuntimeError)
    assert issubclass(paceline.OutOfMemoryError, MemoryError)
    assert issubclass(paceline.DeviceError, RuntimeError)
    assert issubclass(paceline.RequestError, RuntimeError)
    assert paceline.ModelFileError.__module__ == "paceline"
