# SPDX-License-Identifier: Apache-2.0
"""Small trained checkpoints that ship with the package: the first command does something."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final


@dataclasses.dataclass(frozen=True)
class Demo:
    """A pair of checkpoints.

    Attributes:
        name: What `--demo` takes.
        target: Folder of the target.
        draft: Folder of the drafter.
        num_speculative_tokens: A good k.
    """

    name: str
    target: Path
    draft: Path
    num_speculative_tokens: int


_FOLDER: Final = Path(__file__).parent
_DEMOS: Final = {
    "draft_model": Demo(
        name="draft_model",
        target=_FOLDER / "gemma3_code",
        draft=_FOLDER / "gemma3_code_draft",
        num_speculative_tokens=4,
    ),
}


def demo_names() -> list[str]:
    """Names that `find_demo` takes."""
    return sorted(_DEMOS)


def find_demo(name: str) -> Demo:
    """Finds a demo's checkpoints.

    Args:
        name: One of `demo_names()`.

    Returns:
        The demo; its folders exist.

    Raises:
        ValueError: An unknown name.
        paceline.ModelNotFoundError: The checkpoints are not in this installation.
    """
    if name not in _DEMOS:
        raise ValueError(f"demo is {name!r}; allowed: {', '.join(map(repr, demo_names()))}")
    demo = _DEMOS[name]
    for folder in (demo.target, demo.draft):
        if not (folder / "config.json").is_file():
            from paceline._core import ModelNotFoundError

            raise ModelNotFoundError(
                f"{folder}: the demo checkpoint is not in this installation; "
                "install the package from a full checkout, or name a model"
            )
    return demo


def demo_paths(name: str) -> tuple[Path, Path]:
    """Finds a demo's checkpoints.

    Args:
        name: One of `demo_names()`.

    Returns:
        The folders of target and drafter.

    Raises:
        ValueError: An unknown name.
        paceline.ModelNotFoundError: The checkpoints are not in this installation.
    """
    demo = find_demo(name)
    return demo.target, demo.draft
