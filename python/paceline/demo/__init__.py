# SPDX-License-Identifier: Apache-2.0
"""Small trained checkpoints that ship with the package, so that the first command works."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from paceline.checks import shorten


@dataclasses.dataclass(frozen=True)
class Demo:
    """A target and its drafter.

    Attributes:
        name: Value of `--demo`; also the method of `speculative_config`.
        target: Folder of the target.
        draft: Folder of the drafter; None if the method needs none.
        num_speculative_tokens: The default k.
        options: Further keys of `speculative_config`.
    """

    name: str
    target: Path
    draft: Path | None
    num_speculative_tokens: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def speculative_config(self, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """Makes the `speculative_config` of `LLM`.

        The number of drafts is fixed, since a demo shows what is accepted, not speed.

        Args:
            num_speculative_tokens: k; None = the demo's own.
        """
        config: dict[str, Any] = {"method": self.name, **self.options}
        if self.draft is not None:
            config["model"] = str(self.draft)
        k = num_speculative_tokens
        config["num_speculative_tokens"] = self.num_speculative_tokens if k is None else k
        config["x"] = {"adaptive": False}
        return config


_FOLDER: Final = Path(__file__).parent
_GEMMA3: Final = _FOLDER / "gemma3_code"
_GEMMA4: Final = _FOLDER / "gemma4_code"
_LOOKUP: Final = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
_DEMOS: Final = {
    demo.name: demo
    for demo in (
        Demo("draft_model", _GEMMA3, _FOLDER / "gemma3_code_draft", 4),
        Demo("eagle3", _GEMMA3, _FOLDER / "gemma3_code_eagle3", 3),
        Demo("gemma4_mtp", _GEMMA4, _FOLDER / "gemma4_code_assistant", 3),
        Demo("ngram", _GEMMA3, None, 4, _LOOKUP),
    )
}


def demo_names() -> list[str]:
    """The names for `find_demo`."""
    return sorted(_DEMOS)


def find_demo(name: str) -> Demo:
    """Finds a demo and checks that its folders exist.

    Args:
        name: One of `demo_names()`.

    Returns:
        The demo.

    Raises:
        ValueError: An unknown name.
        paceline.ModelNotFoundError: This installation lacks the checkpoints.
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
    """Finds the folders of a demo with a drafter.

    Args:
        name: One of `demo_names()`.

    Returns:
        The folders of target and drafter.

    Raises:
        ValueError: An unknown name, or a demo without a drafter.
        paceline.ModelNotFoundError: This installation lacks the checkpoints.
    """
    demo = find_demo(name)
    if demo.draft is None:
        raise ValueError(f"demo is {name!r}, which has no drafter; allowed: a demo with a drafter")
    return demo.target, demo.draft
