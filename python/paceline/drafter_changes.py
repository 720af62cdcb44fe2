# SPDX-License-Identifier: Apache-2.0
"""A drafter for an engine that runs: found and loaded beside the requests, or given new weights."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from paceline import _core
from paceline.checks import shorten
from paceline.config import EngineConfig
from paceline.limits import MAX_SPECULATIVE_TOKENS
from paceline.loader import LoadedModel, check_compatible, load_drafter, load_dummy_drafter
from paceline.loader.binding import value_error
from paceline.loader.block_kinds import num_block_drafts
from paceline.model_sources import find_models
from paceline.speculative_config import SpeculativeConfig
from paceline.startup import check_before_loading
from paceline.weights import named_tensors, renewed, reopen

_logger = logging.getLogger("paceline")

Speculative = SpeculativeConfig | Mapping[str, Any] | str | None


def log_drafter(speculative: SpeculativeConfig | None, draft: LoadedModel | None) -> None:
    """Logs what drafts from now on."""
    if speculative is None:
        _logger.info("no drafter: decoding is plain")
    elif draft is None:
        _logger.info("the drafter is the method %r", speculative.method)
    else:
        _logger.info("the drafter is %s, method %r", draft.path, speculative.method)


def with_drafter_facts(
    target: LoadedModel, draft: LoadedModel, speculative: SpeculativeConfig
) -> SpeculativeConfig:
    """Completes a configuration with what a loaded drafter tells: its method, and maybe k.

    Raises:
        ValueError: The drafter does not fit the target or the configuration.
    """
    speculative = speculative.resolved(draft.method)
    if speculative.num_speculative_tokens is None:
        # Only a block drafter comes without k, and only from memory: see `find_models`.
        k = min(num_block_drafts(draft.config), MAX_SPECULATIVE_TOKENS)
        speculative = dataclasses.replace(speculative, num_speculative_tokens=k)
    check_compatible(target, draft)
    return speculative


def load_for(
    target: LoadedModel,
    config: EngineConfig,
    given: Speculative,
    draft: LoadedModel | None,
    *,
    cache_dir: str | os.PathLike[str] | None,
    progress: bool,
) -> tuple[SpeculativeConfig | None, LoadedModel | None]:
    """Finds and loads the drafter of a configuration, for a target that is loaded.

    Args:
        target: The target.
        config: Of the engine.
        given: As for `LLM.set_drafter`.
        draft: The drafter, if it is loaded already.
        cache_dir: As for `LLM`.
        progress: As for `LLM`.

    Returns:
        The complete configuration, and the drafter; None for each that there is not.

    Raises:
        Exception: As for `LLM.set_drafter`.
    """
    speculative = None if given is None else SpeculativeConfig.parse(given)
    check_before_loading(config, speculative)
    if speculative is not None and speculative.is_off:
        speculative = None
    if draft is not None:
        if speculative is None or not speculative.has_model:
            raise ValueError(
                f"draft is given and speculative_config is {shorten(given)}; allowed: a method "
                "with a model, or draft=None"
            )
        speculative = dataclasses.replace(speculative, model=speculative.model or str(draft.path))
        return with_drafter_facts(target, draft, speculative), draft
    if speculative is None or not speculative.has_model:
        return speculative, None
    sources = find_models(
        target.path,
        speculative,
        cache_dir=cache_dir,
        load_format="dummy" if target.is_dummy else "auto",
        progress=progress,
    )
    speculative = sources.speculative
    check_before_loading(config, speculative)
    assert sources.draft is not None and speculative is not None
    arguments: dict[str, Any] = {
        "method": speculative.method,
        "draft_feedback": speculative.draft_feedback,
        "dtype": config.dtype,
        "device": target.model.device,
        "gpus": target.model.gpus,
        "draft_tensor_parallel_size": speculative.draft_tensor_parallel_size,
    }
    if target.is_dummy:
        draft = load_dummy_drafter(sources.draft, target, **arguments)
    else:
        draft = load_drafter(sources.draft, target, **arguments, progress=progress)
    return with_drafter_facts(target, draft, speculative), draft


def update_drafter(
    executor: _core.Executor,
    target: LoadedModel,
    draft: LoadedModel | None,
    state_dict: Mapping[str, Any],
) -> LoadedModel:
    """Replaces the weights of an engine's drafter in place; see `LLM.update_drafter`.

    Returns:
        What is known of the drafter with its new weights.

    Raises:
        Exception: As for `LLM.update_drafter`.
    """
    if draft is None or draft.model is target.model:
        what = "no drafter with weights" if draft is None else "its target as its drafter"
        raise ValueError(
            f"update_drafter: the LLM has {what}; allowed: an LLM with a drafter of its own"
        )
    opened = reopen(draft, state_dict, "state_dict", target.as_target())
    updates = [(draft.model, named_tensors(opened))]
    try:
        executor.update_drafter(lambda: _core.update_models(updates))
    except ValueError as error:
        raise value_error(error, opened.tensors) from None
    return renewed(draft, opened)
