# SPDX-License-Identifier: Apache-2.0
"""What PACELINE_CUDA_ARCHITECTURES may be: CMake refuses other values before it looks for nvcc."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("70,90a", "PACELINE_CUDA_ARCHITECTURES has 70; allowed: 80;86;87;89;90a;"),
        ("90", "PACELINE_CUDA_ARCHITECTURES has 90; allowed: 80;86;87;89;90a;"),
        ("80;sm_90a", "PACELINE_CUDA_ARCHITECTURES has sm_90a; allowed: 80;86;87;89;90a;"),
        ("", "PACELINE_CUDA_ARCHITECTURES is empty; allowed: a list of 80;86;87;89;90a;"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, value: str, message: str) -> None:
    done = subprocess.run(
        [
            "cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DPACELINE_CUDA=ON",
            f"-DPACELINE_CUDA_ARCHITECTURES={value}",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
