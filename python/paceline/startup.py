# SPDX-License-Identifier: Apache-2.0
"""Derives the options of an executor from the arguments of an `LLM`."""

from __future__ import annotations

from typing import Any

from paceline import _core
from paceline.config import EngineConfig
from paceline.loader import LoadedModel
from paceline.option_schema import ARGUMENTS
from paceline.speculative_checks import speculative_options
from paceline.speculative_config import SpeculativeConfig


def check_before_loading(config: EngineConfig, speculative: SpeculativeConfig | None) -> None:
    """Checks conditions between options of the engine and drafting before anything is loaded.

    Raises:
        ValueError: An option is not allowed beside others.
    """
    method = None if speculative is None else speculative.method
    _core.check_options(executor_options(config, speculative), method)


def check_max_model_len(given: int | None, target: LoadedModel, draft: LoadedModel | None) -> None:
    """Checks the maximum length, given or the default of an engine that has enough memory.

    Raises:
        ValueError: The target or the drafter does not support it.
    """
    if given is not None and given > target.max_position:
        raise ValueError(
            f"max_model_len is {given}; allowed: 1 to {target.max_position}, the length that "
            f"{target.path} supports"
        )
    draft_model = None if draft is None else draft.model
    max_model_len = given or _core.default_options(target.model, draft_model, {})["max_model_len"]
    if draft is not None and draft.max_position < max_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len} ({target.path} supports "
            f"{target.max_position} tokens), but the drafter {draft.path} supports only "
            f"{draft.max_position}; allowed: max_model_len={draft.max_position} or less with this "
            "drafter"
        )


def executor_options(config: EngineConfig, speculative: SpeculativeConfig | None) -> dict[str, Any]:
    """Returns the `options` of `_core.Executor`."""
    options: dict[str, Any] = {
        option.name: 0 if (value := getattr(config, option.name)) is None else value
        for option in ARGUMENTS.values()
        if option.cpp is not None
    }
    if config.disable_log_stats:
        options["log_interval_s"] = 0.0
    if speculative is not None:
        options |= speculative_options(speculative)
    return options
