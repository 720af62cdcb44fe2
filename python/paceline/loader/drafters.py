# SPDX-License-Identifier: Apache-2.0
"""What drafters that ride on a target have in common; `eagle.py` and `gemma4_assistant.py` are two.

A drafter is made for one target, and takes from it what it does not bring itself. So whoever
translates one needs a `Target`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .decoder import Sizes
from .section import Section

EAGLE: Final = "eagle"
EAGLE3: Final = "eagle3"
GEMMA4_MTP: Final = "gemma4_mtp"
# Kinds of drafters that ride on a target.
KINDS: Final = (EAGLE, EAGLE3, GEMMA4_MTP)


@dataclass(frozen=True)
class Target:
    """What a drafter has to fit.

    Attributes:
        path: The target's folder, for messages.
        architecture: The class name in its `config.json`.
        config: Its canonical description.
        weight_dtype: Of its matrices: "float32" or "bfloat16".
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    weight_dtype: str

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding table."""
        return int(self.config["vocab_size"])

    @property
    def num_layers(self) -> int:
        """Its layers."""
        return len(self.config["layers"])


def made_for_another(top: Section) -> str:
    """How a message about a drafter of another target begins."""
    return f"{top.source}: the drafter was made for another target:"


def check_same_vocabulary(top: Section, section: Section, sizes: Sizes, target: Target) -> None:
    """Refuses a drafter of another vocabulary.

    Args:
        top: The drafter's configuration.
        section: Where its sizes stand.
        sizes: They themselves.
        target: What it has to fit.

    Raises:
        ValueError: It has another number of ids; names both values.
    """
    if sizes.vocab != target.vocab_size:
        raise ValueError(
            f'{made_for_another(top)} key "{section.name("vocab_size")}" is {sizes.vocab}, but '
            f"{target.path} has {target.vocab_size} ids; expected a drafter with the target's "
            "vocabulary"
        )


def take_positions(config: dict[str, Any], sizes: Sizes, target: Target, notes: list[str]) -> None:
    """Gives a drafter's description the target's positions.

    The limit in the file is the length of the training texts. Rope has no end, a draft beyond it is
    only less likely to be right, and the target's own limit holds anyway.
    """
    if sizes.max_position < target.config["max_position"]:
        notes.append(
            f"the drafter was made for {sizes.max_position} positions and the target for "
            f"{target.config['max_position']}; it drafts beyond, where fewer drafts may be kept"
        )
    config["max_position"] = target.config["max_position"]
