# SPDX-License-Identifier: Apache-2.0
"""The rooms of the C++ sources include each other only as docs/architecture.md says, and modules of
the Python package import each other without cycles."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Rooms that the folders of cuda/ belong to, where the names differ.
CUDA_ROOMS = {
    "common": "device",
    "attention": "ops",
    "compressed": "ops",
    "elementwise": "ops",
    "fork": "ops",
    "gemm": "ops",
    "moe": "ops",
    "norm": "ops",
    "rope": "ops",
    "streams": "ops",
}


def documented_rooms() -> dict[str, str]:
    """The column of each room, in the order of the table in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([\w/]+)/` \| (shared|host|device|both) \|", text, re.MULTILINE))


def room_of(path: str) -> str:
    """The room of a path below cpp/src or cuda."""
    first, *others = path.split("/")[:-1]
    return "/".join([CUDA_ROOMS.get(first, first), *others])


def may_include(room: str, included: str, columns: dict[str, str]) -> bool:
    """Whether files of `room` may include headers of `included`."""
    order = list(columns)
    if order.index(included) > order.index(room):
        return False
    crosses = {columns[room], columns[included]} == {"host", "device"}
    return not crosses


def violations(files: dict[str, str], columns: dict[str, str]) -> list[str]:
    """Includes that the table does not allow. `files`: texts by path below cpp/src or cuda."""
    found = []
    for path, text in files.items():
        room = room_of(path)
        for header in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            included = room_of(header)
            if included not in columns:
                found.append(f"{path} includes {header}, which is in no documented room")
            elif not may_include(room, included, columns):
                found.append(f"{path} ({room}) includes {header} ({included})")
    return found


def sources() -> dict[str, str]:
    """All sources of the library by their path below cpp/src or cuda."""
    files = {}
    for root in (ROOT / "cpp" / "src", ROOT / "cuda"):
        for path in sorted(root.rglob("*")):
            if path.suffix in (".h", ".cc", ".cuh", ".cu"):
                name = str(path.relative_to(root))
                files[name if name not in files else f"{name} "] = path.read_text(encoding="utf-8")
    return files


def test_every_folder_is_a_documented_room() -> None:
    columns = documented_rooms()
    rooms = [room_of(path) for path in sources()]
    assert set(rooms) == set(columns)


def test_includes_follow_the_documented_layers() -> None:
    files = sources()
    assert len(files) > 100
    assert violations(files, documented_rooms()) == []


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("wire/limits.h", "kv/kv_layout.h"),  # upwards
        ("ops/ops.h", "sample/logits.h"),
        ("device/cpu_context.h", "graph/cpu_graph.h"),
        ("graph/iteration.h", "batch/batch.h"),  # across the columns
        ("scheduler/scheduler.h", "device/device_arena.h"),
        ("norm/rms_norm.cu", "graph/cuda_graph.h"),
        ("model/description/layer_config.h", "model/weights/linear.h"),
        ("model/weights/linear.h", "model/forward/decoder.h"),
        ("runner/runner.h", "engine/samples.h"),
        ("tuning/chunk_chooser.h", "runner/runner.h"),
        ("ops/ops.h", "ring/iteration_ring.h"),  # in no room
    ],
)
def test_a_wrong_include_is_found(path: str, header: str) -> None:
    assert len(violations({path: f'#include "{header}"\n'}, documented_rooms())) == 1


def imports_of(path: Path) -> list[str]:
    """The names that a module imports when it is loaded, as dotted paths."""
    package = path.relative_to(ROOT / "python").parent.parts
    names = []
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_imports_have_no_cycles() -> None:
    modules = {
        ".".join(path.relative_to(ROOT / "python").with_suffix("").parts): path
        for path in (ROOT / "python" / "paceline").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert "paceline.loader.load" in modules
    graph = {name: {*imports_of(path)} & {*modules} for name, path in modules.items()}
    assert "paceline.running_llm" in graph["paceline.llm"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
