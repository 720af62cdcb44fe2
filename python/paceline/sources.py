# SPDX-License-Identifier: Apache-2.0
"""Finds the folders of the target and the drafter that the arguments of an `LLM` name."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.config import SpeculativeConfig
from paceline.hub import find_folder
from paceline.loader import CheckpointFolder


@dataclass(frozen=True)
class ModelSources:
    """Where the models of an `LLM` are.

    Attributes:
        target: The target's folder.
        draft: The drafter's folder; None: there is no drafter, or it has no model.
    """

    target: CheckpointFolder
    draft: CheckpointFolder | None


def find_models(
    model: str | os.PathLike[str],
    speculative: SpeculativeConfig | None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    load_format: str = "auto",
    progress: bool = True,
) -> ModelSources:
    """Finds the folders of target and drafter; downloads those that the hub has.

    Args:
        model: The target, as for `LLM`.
        speculative: The drafter.
        revision: Of the target, as for `LLM`.
        cache_dir: As for `LLM`.
        load_format: As for `LLM`; "dummy" leaves the weights on the hub.
        progress: Show progress bars where standard error is a terminal.

    Raises:
        Exception: As for `hub.find_folder`; or a folder does not exist.
    """
    needs_weights = load_format != "dummy"

    def find(name: str | os.PathLike[str], revision: str | None, argument: str) -> CheckpointFolder:
        return CheckpointFolder(
            find_folder(
                name,
                revision=revision,
                cache_dir=cache_dir,
                needs_weights=needs_weights,
                progress=progress,
                argument=argument,
            )
        )

    target = find(model, revision, "model")
    draft = None
    if speculative is not None and speculative.model is not None:
        draft = find(speculative.model, speculative.revision, "speculative_config['model']")
    return ModelSources(target, draft)
