# SPDX-License-Identifier: Apache-2.0
"""Hashes the PTX of all CUDA kernels, to show which of them a change compiles to other code.

    python tests/support/ptx_hashes.py build/cuda before.json             write the hashes
    python tests/support/ptx_hashes.py build/cuda after.json before.json  and compare with others

The first argument is the folder of a configured CUDA build, whose flags are used without those for
line numbers. This needs nvcc and no GPU. Kernels have their mangled names without hashes of paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_JOBS = 2
_DROPPED = ("-lineinfo", "-Xptxas", "--generate-code", "-c")


def ptx(entry: dict[str, Any]) -> str:
    words = shlex.split(entry["command"])
    output = words.index("-o")
    kept = [one for one in words[:output] + words[output + 2 :] if not one.startswith(_DROPPED)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.ptx"
        kept += ["-arch=compute_90a", "-ptx", "-o", str(path)]
        subprocess.run(kept, cwd=entry["directory"], check=True)
        return path.read_text()


def normalise(text: str) -> str:
    """Removes comments, hashes of paths, and numbers that depend on the kernels before."""
    text = re.sub(r"\s*//.*", "", text)
    # A name with internal linkage; the number before it is its length.
    found = re.finditer(r"(?<!\d)(\d+)(?=_(?:GLOBAL__N_|INTERNAL)_)", text)
    for name in {one[1] + text[one.end() : one.end() + int(one[1])] for one in found}:
        text = text.replace(name, "<internal>")
    text = re.sub(r"(\$L__BB|__local_depot|\$str|prototype_)\d+", r"\1", text)
    return re.sub(r"\n\s*\n", "\n", text)


def hashes(text: str) -> dict[str, str]:
    """By kernel; what is outside of kernels has the name ""."""
    first, *rest = re.split(r"\n(?=(?:\.\w+ )?\.entry )", normalise(text))
    parts = {"": first}
    for part in rest:
        kernel, _, after = part.partition("\n}")
        parts[re.findall(r"\.entry ([^\s(]+)", kernel)[0]] = kernel
        parts[""] += after
    return {name: hashlib.sha256(body.encode()).hexdigest()[:16] for name, body in parts.items()}


def main(folder: str, written: str, expected: str | None = None) -> int:
    commands = json.loads((Path(folder) / "compile_commands.json").read_text())
    commands = [one for one in commands if one["file"].endswith(".cu")]
    root = os.path.commonpath([one["file"] for one in commands])
    entries = {os.path.relpath(one["file"], root): one for one in commands}
    with ThreadPoolExecutor(_JOBS) as pool:
        texts = pool.map(ptx, entries.values())
        found = {name: hashes(text) for name, text in zip(entries, texts, strict=True)}
    Path(written).write_text(json.dumps(found, indent=1) + "\n")
    if expected is None:
        return 0
    others = json.loads(Path(expected).read_text())
    num_different = 0
    for name in sorted({*found, *others}):
        now, before = found.get(name, {}), others.get(name, {})
        states = {
            "different": [one for one in now if one in before and now[one] != before[one]],
            "missing": [one for one in before if one not in now],
            "new": [one for one in now if one not in before],
        }
        num_different += len(states["different"]) + len(states["missing"])
        counts = [f"{len(ones)} {state}" for state, ones in states.items() if ones]
        num_kernels = len({*now} - {""})
        print(f"{name}: {num_kernels} kernels,", ", ".join(counts) or "all equal")
        for state, ones in states.items():
            for one in ones:
                print(f"  {state}: {one or '(outside of kernels)'}")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
