# SPDX-License-Identifier: Apache-2.0
"""Derives the options of an executor from the arguments of an `LLM`."""

from __future__ import annotations

from typing import Any

from paceline import _core
from paceline.config import EngineConfig
from paceline.custom_drafter import CustomDrafter
from paceline.loader import LoadedModel
from paceline.option_schema import ARGUMENTS
from paceline.speculative_config import SpeculativeConfig


def check_max_num_batched_tokens(
    config: EngineConfig, speculative: SpeculativeConfig | None
) -> None:
    """Checks the rows of an iteration before anything is loaded.

    Raises:
        ValueError: The given number is too small for the verify windows of all sequences.
    """
    k = 0 if speculative is None else speculative.num_speculative_tokens or 0
    rows = config.max_num_seqs * (k + 1)
    given = config.max_num_batched_tokens
    if given is not None and given < rows:
        raise ValueError(
            f"max_num_batched_tokens is {given}; allowed: an integer >= "
            f"max_num_seqs * (num_speculative_tokens + 1) = {rows}"
        )


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


def speculative_options(speculative: SpeculativeConfig) -> dict[str, Any]:
    """Returns those of the `options` of `_core.Executor` that say how tokens are drafted."""
    k = speculative.num_speculative_tokens or 0
    options: dict[str, Any] = {
        "num_speculative_tokens": k,
        "accept_method": speculative.rejection_sample_method,
        "synthetic_acceptance_length": speculative.synthetic_acceptance_length or 0.0,
        "samples_drafts": speculative.draft_sample_method == "probabilistic",
        "num_draft_proposals": speculative.draft_proposals or 0,
        "draft_driver": speculative.draft_driver,
        "draft_stop_threshold": speculative.draft_stop_threshold,
        "adaptive": speculative.adaptive,
    }
    if speculative.draft_position is not None:
        options["draft_position"] = speculative.draft_position
    if speculative.method == "ngram":
        options["ngram_min"] = speculative.prompt_lookup_min
        options["ngram_max"] = speculative.prompt_lookup_max
    if speculative.drafter is not None:
        options["host_drafter"] = CustomDrafter(speculative.drafter, k)
    return options
