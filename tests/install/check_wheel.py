# SPDX-License-Identifier: Apache-2.0
"""Checks a wheel, and the environment that it is installed in: `python -P check_wheel.py WHEEL`.

The wheel must have a manylinux platform tag, hold what a user needs and no build leftovers, and the
installed package must generate, with only the dependencies that the wheel names.
"""

import importlib.util
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import paceline

DEMO = Path(__file__).parents[2] / "python" / "paceline" / "demo"
wheel = Path(sys.argv[1])
assert "manylinux" in wheel.name.rsplit("-", 1)[1], f"{wheel.name} has no manylinux platform tag"

with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    for file in filter(Path.is_file, DEMO.glob("[!_]*/*")):
        name = f"paceline/demo/{file.relative_to(DEMO)}"
        assert archive.read(name) == file.read_bytes(), f"{name} differs from {file}"
weights = [name for name in names if name.endswith(".safetensors")]
assert len(weights) == len(list(DEMO.glob("*/*.safetensors"))), f"weights ship once: {weights}"
modules = [name for name in names if name.endswith(".so")]
assert len(modules) == 1 and modules[0].startswith("paceline/_core"), modules
for needed in (
    "paceline/py.typed",
    "paceline/_core.pyi",
    "paceline/demo/NOTICE.md",
    "paceline/server/page/page.html",
    "paceline/demo/gemma3_code/model.safetensors",
):
    assert needed in names, f"{wheel.name} lacks {needed}"
strays = [n for n in names if n.endswith((".cc", ".h", ".a", ".pyc")) or n.startswith("training")]
assert not strays, f"{wheel.name} has {strays[:5]}"

package = Path(paceline.__file__).parent
assert package.parent == Path(sysconfig.get_path("platlib")), f"paceline is imported from {package}"
for optional in ("torch", "transformers"):
    assert importlib.util.find_spec(optional) is None, f"the wheel's dependencies bring {optional}"

command = Path(sysconfig.get_path("scripts")) / "paceline"
report = subprocess.run([command, "doctor"], capture_output=True, text=True, check=False)
assert report.returncode == 0, f"paceline doctor exited with {report.returncode}:\n{report.stderr}"
print(f"{wheel.name}: installed, and paceline doctor passed")
