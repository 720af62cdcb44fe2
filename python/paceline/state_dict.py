# SPDX-License-Identifier: Apache-2.0
"""Models from tensors in memory: `LLM.from_state_dict` and `LLM.from_module`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks import shorten
from paceline.config import SpeculativeConfig
from paceline.device import resolve_device
from paceline.loader import (
    LoadedModel,
    StateDict,
    load_pair,
    memory_config,
    memory_tokenizer,
)

Speculative = SpeculativeConfig | Mapping[str, Any] | str | None


def load_state_dicts(
    target: StateDict,
    draft: StateDict | None,
    speculative_config: Speculative,
    *,
    device: str,
    dtype: str,
    progress: bool,
) -> tuple[LoadedModel, LoadedModel | None, SpeculativeConfig | None]:
    """Loads a target and maybe a drafter from memory; arguments as for `LLM.from_state_dict`.

    Returns:
        The target, the drafter or None, and the configuration of speculative decoding.

    Raises:
        Exception: As for `LLM.from_state_dict`.
    """
    if draft is not None and isinstance(speculative_config, Mapping):
        # The drafter is at hand; `model` is only its name.
        speculative_config = {"model": str(draft.path), **speculative_config}
    speculative = None
    if speculative_config is not None:
        speculative = SpeculativeConfig.parse(speculative_config)
    needs_draft = speculative is not None and speculative.method != "ngram"
    if needs_draft != (draft is not None):
        given = "no drafter" if draft is None else f"a drafter ({draft.path})"
        raise ValueError(
            f"speculative_config is {shorten(speculative_config)} and there is {given}; allowed: "
            'both, such as {"num_speculative_tokens": 3} with a drafter, or neither, except that '
            "method 'ngram' has no drafter"
        )
    loaded, drafter = load_pair(
        target,
        draft,
        method=None if speculative is None else speculative.method,
        dtype=dtype,
        device=resolve_device(device),
        progress=progress,
    )
    return loaded, drafter, speculative


def from_mappings(
    config: object,
    state_dict: Mapping[str, Any],
    tokenizer: object,
    generation_config: object,
    draft_config: object,
    draft_state_dict: Mapping[str, Any] | None,
) -> tuple[StateDict, StateDict | None]:
    """Target and drafter of `LLM.from_state_dict`; no tensor is looked at yet.

    Raises:
        ValueError: An argument has a wrong type, or one of the drafter's two is missing.
    """
    target = StateDict(
        memory_config(config, "config"),
        state_dict,
        "state_dict",
        generation=None
        if generation_config is None
        else memory_config(generation_config, "generation_config"),
        tokenizer=memory_tokenizer(tokenizer),
    )
    if (draft_config is None) != (draft_state_dict is None):
        missing = "draft_config" if draft_config is None else "draft_state_dict"
        raise ValueError(
            f"{missing} is None; allowed: both draft_config and draft_state_dict, or none"
        )
    if draft_state_dict is None:
        return target, None
    drafter_config = memory_config(draft_config, "draft_config")
    return target, StateDict(drafter_config, draft_state_dict, "draft_state_dict")


def from_modules(
    module: Any, tokenizer: object, draft_module: Any
) -> tuple[StateDict, StateDict | None]:
    """Target and drafter of `LLM.from_module`; no tensor is looked at yet.

    Raises:
        ValueError: A module has no configuration or no state_dict.
    """
    target = _of_module(module, "module", memory_tokenizer(tokenizer))
    return target, None if draft_module is None else _of_module(draft_module, "draft_module", None)


def _of_module(module: Any, name: str, tokenizer: Any) -> StateDict:
    config = getattr(module, "config", None)
    to_state_dict = getattr(module, "state_dict", None)
    if config is None or not callable(to_state_dict):
        raise ValueError(
            f"{name} is a {type(module).__name__}; expected a model of transformers: a module with "
            "config and state_dict()"
        )
    section = memory_config(config, f"{name}.config")
    # A configuration that was never saved does not name the class.
    values = {**section.values, "architectures": [type(module).__name__]}
    generation = getattr(module, "generation_config", None)
    return StateDict(
        type(section)(values, section.source),
        to_state_dict(),
        name,
        generation=None
        if generation is None
        else memory_config(generation, f"{name}.generation_config"),
        tokenizer=tokenizer,
    )
