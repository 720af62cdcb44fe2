# SPDX-License-Identifier: Apache-2.0
"""A model with its weights in place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drafter_checkpoint import DRAFT_MODEL
from .drafters import Target
from .tokenizer import TokenizerInfo

if TYPE_CHECKING:
    from paceline import _core


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in place, and what came with it.

    Attributes:
        path: The checkpoint's folder.
        model: The weights; shared by every executor that uses them.
        family: "llama", "qwen3", "gemma3" or "gemma4"; of a drafter that rides on a target, its
            kind.
        architecture: The class name in `config.json`.
        config: The canonical description of `docs/model-format.md`.
        weight_dtype: Of the matrices: "float32" or "bfloat16".
        stored_dtypes: How many matrices the files hold in each dtype, e.g. `{"BF16": 210}`.
        vocab_size: Rows of the embedding table.
        max_position: Positions that the model was made for.
        eos_token_ids: Ids that end a text; maybe none.
        bos_token_id: The id that starts a text, if the files name one.
        tokenizer: None for a folder without `tokenizer.json`, whose model takes token ids only.
        notes: What a user may want to know about choices made while loading.
        is_dummy: The weights are made up; see `load_dummy`.
    """

    path: Path
    model: _core.Model
    family: str
    architecture: str
    config: dict[str, Any]
    weight_dtype: str
    stored_dtypes: dict[str, int]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer: TokenizerInfo | None
    notes: tuple[str, ...]
    is_dummy: bool = False

    @property
    def config_json(self) -> str:
        """The canonical description as JSON."""
        return json.dumps(self.config)

    @property
    def method(self) -> str:
        """How it drafts, as a drafter: "draft_model", "eagle", "eagle3" or "gemma4_mtp"."""
        drafter = self.config.get("drafter")
        return DRAFT_MODEL if drafter is None else str(drafter["kind"])

    def as_target(self) -> Target:
        """What a drafter for this model has to fit."""
        return Target(self.path, self.architecture, self.config, self.weight_dtype)
