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
    "gather": "ops",
    "gemm": "ops",
    "moe": "ops",
    "norm": "ops",
    "recurrent": "ops",
    "rope": "ops",
    "streams": "ops",
}


def documented_rooms() -> dict[str, str]:
    """The column of each room, in the order of the table in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([\w/]+)/` \| (shared|host|device|both) \|", text, re.MULTILINE))


#: A kind of layer has a folder in model/layers/, whose files belong to these rooms.
KIND_ROOMS = {
    "config": "model/description",
    "weights": "model/weights",
    "layer": "model/forward",
}
#: Kinds that are made of others.
KINDS_OF_KINDS = {"moe": ("dense",), "parallel": ("dense", "moe")}
#: Where kinds are named outside of their folders: one list at each of the three floors.
KIND_LISTS = {
    "model/description/layer_config.h",
    "model/weights/weights.h",
    "model/forward/activations.h",
}


def kind_of(path: str) -> str:
    """The kind of layer that a path below cpp/src belongs to; "" if to none."""
    found = re.match(r"model/layers/(\w+)/", path)
    return found[1] if found else ""


def room_of(path: str) -> str:
    """The room of a path below cpp/src or cuda."""
    if kind_of(path):
        return KIND_ROOMS[Path(path).stem]
    first, *others = path.split("/")[:-1]
    return "/".join([CUDA_ROOMS.get(first, first), *others])


def may_include(room: str, included: str, columns: dict[str, str]) -> bool:
    """Whether files of `room` may include headers of `included`."""
    order = list(columns)
    if order.index(included) > order.index(room):
        return False
    crosses = {columns[room], columns[included]} == {"host", "device"}
    return not crosses


def may_name(path: str, kind: str) -> bool:
    """Whether a file may include a header of a kind of layer; "" is no kind."""
    own = kind_of(path)
    return kind in ("", own, *KINDS_OF_KINDS.get(own, ())) or path in KIND_LISTS


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
            elif not may_name(path, kind_of(header)):
                found.append(f"{path} includes {header}, a kind of layer that it may not know")
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
        ("model/layers/latent/config.h", "model/layers/latent/weights.h"),  # upwards in a kind
        ("model/layers/latent/layer.cc", "model/layers/compressed/layer.h"),  # between kinds
        ("model/forward/decoder.cc", "model/layers/latent/layer.h"),  # past the lists
    ],
)
def test_a_wrong_include_is_found(path: str, header: str) -> None:
    assert len(violations({path: f'#include "{header}"\n'}, documented_rooms())) == 1


#: Words that only the files of a kind and the lists have.
KIND_WORDS = {
    "multi_head": r"\bMultiHead\w*",
    "latent": r"\bLatent(Attention(Weights)?|Scratch|Widths)\b",
    "compressed": r"\bCompressed(Attention(Weights)?|Scratch|Widths)\b",
    "recurrent": r"\bRecurrent(Attention(Weights)?|Scratch|Widths)\b",
    "dense": r"\bDenseMlp\w*",
    "moe": r"\bMoe(Mlp\w*|Scratch|Widths)\b",
    "parallel": r"\bParallel(Mlp\w*|Scratch|Widths)\b",
}


@pytest.mark.parametrize("kind", KIND_WORDS)
def test_a_kind_is_named_in_eight_files(kind: str) -> None:
    """A new kind writes five files of its own and changes the three lists."""
    words = re.compile(KIND_WORDS[kind])
    files = {path: text for path, text in sources().items() if path.startswith("model/")}
    naming = [
        path
        for path, text in files.items()
        if words.search(re.sub(r"//.*", "", text)) or f"layers/{kind}/" in text
    ]
    own = [path for path in naming if kind_of(path) == kind]
    others = [path for path in naming if kind_of(path) != kind]
    made_of_it = [path for path in others if kind in KINDS_OF_KINDS.get(kind_of(path), ())]
    assert len(own) == 5
    assert set(others) - set(made_of_it) <= KIND_LISTS, others
    assert len(own) + len(KIND_LISTS) <= 8


def types_only(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements under `if TYPE_CHECKING`."""
    return [
        inner
        for node in statements
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    ]


def imports_of(path: Path) -> list[str]:
    """The names that a module imports when it is loaded or its types are checked."""
    package = path.relative_to(ROOT / "python").parent.parts
    names = []
    statements = ast.parse(path.read_text("utf-8")).body
    for node in [*statements, *types_only(statements)]:
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
    assert "paceline.llm" in graph["paceline.commands.generate"]  # for its types only
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
