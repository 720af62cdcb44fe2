# SPDX-License-Identifier: Apache-2.0
"""Small trained checkpoints that ship with the package: the first command does something."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from paceline.checks import shorten


@dataclasses.dataclass(frozen=True)
class Demo:
    """A target and a way to draft for it.

    Attributes:
        name: What `--demo` takes; also the method of `speculative_config`.
        target: Folder of the target.
        draft: Folder of the drafter; None for a method that has none.
        num_speculative_tokens: A good k.
        options: Further keys of `speculative_config`.
    """

    name: str
    target: Path
    draft: Path | None
    num_speculative_tokens: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def speculative_config(self, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """What `LLM` takes.

        Args:
            num_speculative_tokens: k; None = the demo's own.
        """
        config: dict[str, Any] = {"method": self.name, **self.options}
        if self.draft is not None:
            config["model"] = str(self.draft)
        k = num_speculative_tokens
        config["num_speculative_tokens"] = self.num_speculative_tokens if k is None else k
        return config


_FOLDER: Final = Path(__file__).parent
_DEMOS: Final = {
    "draft_model": Demo(
        name="draft_model",
        target=_FOLDER / "gemma3_code",
        draft=_FOLDER / "gemma3_code_draft",
        num_speculative_tokens=4,
    ),
    "eagle3": Demo(
        name="eagle3",
        target=_FOLDER / "gemma3_code",
        draft=_FOLDER / "gemma3_code_eagle3",
        num_speculative_tokens=3,
    ),
    "gemma4_mtp": Demo(
        name="gemma4_mtp",
        target=_FOLDER / "gemma4_code",
        draft=_FOLDER / "gemma4_code_assistant",
        num_speculative_tokens=3,
    ),
    "ngram": Demo(
        name="ngram",
        target=_FOLDER / "gemma3_code",
        draft=None,
        num_speculative_tokens=4,
        options={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
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
        raise ValueError(f"demo is {shorten(name)}; allowed: {', '.join(map(repr, demo_names()))}")
    demo = _DEMOS[name]
    for folder in (demo.target, demo.draft):
        if folder is not None and not (folder / "config.json").is_file():
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
        ValueError: An unknown name, or that of a demo without a drafter.
        paceline.ModelNotFoundError: The checkpoints are not in this installation.
    """
    demo = find_demo(name)
    if demo.draft is None:
        raise ValueError(f"demo is {name!r}, which has no drafter; allowed: one that has")
    return demo.target, demo.draft
