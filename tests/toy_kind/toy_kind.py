# SPDX-License-Identifier: Apache-2.0
"""Adds the toy kind of attention to a copy of the sources, as CONTRIBUTING.md says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
#: The kind's own files.
DRAWER: Final = ("config.h", "config.cc", "weights.h", "layer.h", "layer.cc")
#: The three lists that name the kinds: their file, the line after which a line is added, and the
#: line.
LISTS: Final = (
    (
        "cpp/src/model/description/layer_config.h",
        '#include "model/layers/multi_head/config.h"\n',
        '#include "model/layers/toy/config.h"\n',
    ),
    (
        "cpp/src/model/weights/weights.h",
        '#include "model/layers/multi_head/weights.h"\n',
        '#include "model/layers/toy/weights.h"\n',
    ),
    (
        "cpp/src/model/forward/activations.h",
        '#include "model/layers/multi_head/layer.h"\n',
        '#include "model/layers/toy/layer.h"\n',
    ),
)
_VARIANT: Final = "RecurrentAttention>;"
_BUILD: Final = (
    ("  cpp/src/model/layers/multi_head/layer.cc\n", "  cpp/src/model/layers/toy/config.cc\n"),
    ("cpp/src/model/layers/multi_head/layer.cc\n", "cpp/src/model/layers/toy/layer.cc\n"),
)


def _insert(text: str, after: str, line: str) -> str:
    """Adds `line` after each occurrence of `after`, with its indentation."""
    if after not in text:
        raise ValueError(f"{after.strip()!r} is not there; the recipe has to change")
    lines = []
    for old in text.splitlines(keepends=True):
        lines.append(old)
        if old.endswith(after):
            indentation = old[: len(old) - len(old.lstrip())]
            lines.append(indentation + line.lstrip())
    return "".join(lines)


def add_toy_kind(root: Path) -> list[str]:
    """Adds the kind.

    Args:
        root: A copy of the repository.

    Returns:
        The source files that are written or changed, from `root`.

    Raises:
        ValueError: A list is not where the recipe says.
    """
    drawer = root / "cpp/src/model/layers/toy"
    drawer.mkdir(parents=True)
    touched = []
    for name in DRAWER:
        shutil.copy(HERE / name, drawer / name)
        touched.append(f"cpp/src/model/layers/toy/{name}")
    for name, after, line in LISTS:
        text = _insert((root / name).read_text("utf-8"), after, line)
        if name.endswith("layer_config.h"):
            if _VARIANT not in text:
                raise ValueError(f"{name} does not end the variant with {_VARIANT}")
            text = text.replace(_VARIANT, "RecurrentAttention, ToyAttention>;")
        (root / name).write_text(text, "utf-8")
        touched.append(name)
    return touched


def add_to_build(root: Path) -> None:
    """Adds the kind's sources and its test to the build of the copy."""
    build = root / "CMakeLists.txt"
    text = build.read_text("utf-8")
    for after, line in _BUILD:
        text = _insert(text, after, line)
    build.write_text(text, "utf-8")
    shutil.copy(HERE / "toy_kind_test.cc", root / "tests/cpp/toy_kind_test.cc")
    with (root / "tests/CMakeLists.txt").open("a", encoding="utf-8") as tests:
        tests.write("\npaceline_test(NAME toy_kind_test SOURCES cpp/toy_kind_test.cc)\n")


if __name__ == "__main__":
    add_toy_kind(Path(sys.argv[1]))
    add_to_build(Path(sys.argv[1]))
