# SPDX-License-Identifier: Apache-2.0
"""Models from tensors in memory: `LLM.from_state_dict`, `from_module` and `update_weights`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline import _core
from paceline._core import ModelFileError
from paceline.checks import shorten
from paceline.config import EngineConfig
from paceline.device import chosen_gpus, resolve_device
from paceline.loader import (
    LoadedModel,
    StateDict,
    load_pair,
    memory_config,
    memory_tokenizer,
    open_checkpoint,
    open_drafter,
)
from paceline.loader.binding import BoundTensor, value_error
from paceline.loader.block_kinds import own_block_kind
from paceline.loader.checkpoint import OpenedModel, widened
from paceline.loader.drafters import MTP, Target
from paceline.loader.state_dict import MemoryTensors
from paceline.speculative_config import SpeculativeConfig

Speculative = SpeculativeConfig | Mapping[str, Any] | str | None


def load_state_dicts(
    target: StateDict,
    draft: StateDict | None,
    speculative_config: Speculative,
    *,
    config: EngineConfig,
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
    if speculative is not None and draft is None and _has_own_drafter(target, speculative.method):
        draft = target  # its own layers
    needs_draft = speculative is not None and speculative.has_model
    if needs_draft != (draft is not None):
        given = "no drafter" if draft is None else f"a drafter ({draft.path})"
        raise ValueError(
            f"speculative_config is {shorten(speculative_config)} and there is {given}; allowed: "
            'both, such as {"num_speculative_tokens": 3} with a drafter, or neither, except that '
            "methods 'mtp', 'ngram' and 'custom', and 'dspark' where the target's own files have "
            "such a drafter, have no drafter of their own"
        )
    device = resolve_device(config.device)
    gpus = chosen_gpus(device, config.tensor_parallel_size, config.devices)
    loaded, drafter = load_pair(
        target,
        draft,
        method=None if speculative is None else speculative.method,
        draft_feedback=None if speculative is None else speculative.draft_feedback,
        dtype=config.dtype,
        device=device,
        gpus=gpus,
        draft_tensor_parallel_size=(
            None if speculative is None else speculative.draft_tensor_parallel_size
        ),
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
    info = memory_tokenizer(tokenizer)
    target = StateDict(
        memory_config(config, "config"),
        state_dict,
        "state_dict",
        generation=None
        if generation_config is None
        else memory_config(generation_config, "generation_config"),
        tokenizer=info,
    )
    if (draft_config is None) != (draft_state_dict is None):
        missing = "draft_config" if draft_config is None else "draft_state_dict"
        raise ValueError(
            f"{missing} is None; allowed: both draft_config and draft_state_dict, or none"
        )
    if draft_state_dict is None:
        return target, None
    drafter_config = memory_config(draft_config, "draft_config")
    return target, StateDict(drafter_config, draft_state_dict, "draft_state_dict", tokenizer=info)


def from_modules(
    module: Any, tokenizer: object, draft_module: Any
) -> tuple[StateDict, StateDict | None]:
    """Target and drafter of `LLM.from_module`; no tensor is looked at yet.

    Raises:
        ValueError: A module has no configuration or no state_dict.
    """
    info = memory_tokenizer(tokenizer)
    target = _of_module(module, "module", info)
    return target, None if draft_module is None else _of_module(draft_module, "draft_module", info)


class BusyError(RuntimeError):
    """Weights or the drafter cannot change now, because requests run or wait, or because another
    change is under way."""


def update_weights(
    executor: _core.Executor,
    target: LoadedModel,
    draft: LoadedModel | None,
    state_dict: Mapping[str, Any],
    draft_state_dict: Mapping[str, Any] | None,
) -> tuple[LoadedModel, LoadedModel | None]:
    """Replaces the weights of an engine's models in place; see `LLM.update_weights`.

    Returns:
        What is known of the two models with their new weights.

    Raises:
        Exception: As for `LLM.update_weights`.
    """
    if draft_state_dict is not None and draft is None:
        raise ValueError(
            "draft_state_dict is given, but the LLM has no drafter; allowed: None, or an LLM with "
            "a drafter"
        )
    if draft_state_dict is not None and draft is not None and draft.model is target.model:
        raise ValueError(
            "draft_state_dict is given, but target and drafter are the same model; allowed: None"
        )
    opened = reopen(target, state_dict, "state_dict")
    updates = [(target.model, named_tensors(opened))]
    tensors = opened.tensors
    new_target = renewed(target, opened)
    new_facts = dataclasses.replace(opened.as_target(), path=target.path)
    new_draft = draft
    if draft_state_dict is not None and draft is not None:
        opened = reopen(draft, draft_state_dict, "draft_state_dict", new_facts)
        updates.append((draft.model, named_tensors(opened)))
        tensors += opened.tensors
        new_draft = renewed(draft, opened)

    def update() -> None:
        _core.update_models(updates)
        target.weights.replace()
        if draft_state_dict is not None and draft is not None:
            draft.weights.replace()

    try:
        num_requests = executor.while_idle(update)
    except ValueError as error:
        raise value_error(error, tensors) from None
    if num_requests > 0:
        raise BusyError(
            f"update_weights: {num_requests} request{' runs' if num_requests == 1 else 's run'} or "
            "wait; no weight has changed; allowed: between requests, so wait for their outputs, or "
            "close their streams, and call it again"
        )
    return new_target, new_draft


def _has_own_drafter(target: StateDict, method: str | None) -> bool:
    """Returns whether a method drafts with tensors that are those of the target."""
    return method is not None and method in (MTP, own_block_kind(target.config))


def reopen(
    loaded: LoadedModel,
    tensors: Mapping[str, Any],
    name: str,
    target: Target | None = None,
) -> OpenedModel:
    """Checks new tensors against the configuration that a model was loaded with.

    Args:
        loaded: The model.
        tensors: Its new tensors by name.
        name: The argument that has them, for messages.
        target: For a drafter: the facts of its target.

    Raises:
        ModelFileError: A tensor is missing, unknown, misshapen or cannot be read; names it.
        NotImplementedError: The model was not read from the layout of Hugging Face.
    """
    if loaded.hf_config is None:
        raise NotImplementedError(
            f"update_weights: {loaded.path} was not read from the layout of Hugging Face, whose "
            "names the new tensors have; load the original checkpoint instead"
        )
    memory = StateDict(loaded.hf_config, tensors, name)
    opened: OpenedModel
    if target is None or loaded.method == "draft_model":
        opened = open_checkpoint(memory, loaded.weight_dtype, is_drafter=True)
    else:
        opened = open_drafter(memory, target, loaded.method)
        if loaded.method == MTP:
            feedback = "normed" if loaded.config["drafter"]["norm_output"] else "raw"
            opened = opened.with_feedback(feedback)
    if opened.config != loaded.config:
        keys = [key for key in loaded.config if opened.config.get(key) != loaded.config[key]]
        raise ModelFileError(
            f"{name}: the tensors are those of another model than the one that was loaded (they "
            f"differ in {', '.join(keys)}); expected tensors of the same form"
        )
    return opened


def named_tensors(opened: OpenedModel) -> list[tuple[str, _core.Tensor]]:
    """The tensors of an opened model, as `_core.update_models` takes them."""
    named = [(tensor.spec.name, _narrowed(opened, tensor)) for tensor in opened.tensors]
    named += [(name, _core.Tensor(ids, name)) for name, ids in opened.ids.items()]
    return named


def _narrowed(opened: OpenedModel, tensor: BoundTensor) -> _core.Tensor:
    if opened.is_narrowed(tensor):
        return _core.Tensor(widened(tensor), tensor.source)
    array = tensor.converted()
    if array is not None:
        return _core.Tensor(array, tensor.source)
    assert isinstance(tensor.shard, MemoryTensors)
    return tensor.shard.part(tensor.source, tensor.spec.part)


def renewed(loaded: LoadedModel, opened: OpenedModel) -> LoadedModel:
    """What is known of a model after its tensors were replaced."""
    return dataclasses.replace(
        loaded, stored_dtypes=opened.stored_dtypes, notes=opened.notes, is_dummy=False
    )


def _of_module(module: Any, name: str, tokenizer: Any) -> StateDict:
    if hasattr(module, "_orig_mod"):
        raise ValueError(
            f"{name} is what torch.compile returned; expected the model itself: {name}._orig_mod"
        )
    config = getattr(module, "config", None)
    to_state_dict = getattr(module, "state_dict", None)
    if config is None or not callable(to_state_dict):
        raise ValueError(
            f"{name} is {shorten(module)} ({type(module).__name__}); expected a model of "
            "transformers: a module with config and state_dict()"
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
