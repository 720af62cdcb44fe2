# SPDX-License-Identifier: Apache-2.0
"""Finds the folders of the target and the drafter that the arguments of an `LLM` name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

from paceline._core import ModelNotFoundError
from paceline.checks import check_path, shorten
from paceline.hub import fetch, find_folder, is_hub_id
from paceline.loader import CheckpointFolder, TokenizerInfo
from paceline.loader.block_kinds import (
    block_kind_of_config,
    block_subfolders,
    own_block_kind,
)
from paceline.loader.deepseek_v4_dspark import has_stage
from paceline.loader.drafter_checkpoint import detect_method, stated_num_drafts
from paceline.loader.files import exists, find
from paceline.loader.folder import TOKENIZER_NAME
from paceline.loader.kinds import CURE, Speculators, read_speculators
from paceline.speculative_config import SpeculativeConfig
from paceline.speculative_fields import BLOCK_METHODS

#: What `tokenizer` may be, for messages.
TOKENIZER: Final = "a folder with tokenizer.json, that file, or the name of a model on the hub"


class _Options(TypedDict):
    """Arguments of `find_folder` and `fetch`."""

    cache_dir: str | os.PathLike[str] | None
    needs_weights: bool
    progress: bool


@dataclass(frozen=True)
class ModelSources:
    """Where the models of an `LLM` are.

    Attributes:
        target: The target's folder.
        draft: The drafter's folder; None: there is no drafter, or it has no model.
        speculative: The complete configuration; None: plain decoding.
    """

    target: CheckpointFolder
    draft: CheckpointFolder | None
    speculative: SpeculativeConfig | None


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
        model: The target, as for `LLM`; or a folder that names a target and drafts for it.
        speculative: How to draft, as given. None = as the model's folder says.
        revision: Of the model, as for `LLM`.
        cache_dir: As for `LLM`.
        load_format: As for `LLM`; "dummy" leaves the weights on the hub.
        progress: Show progress bars where standard error is a terminal.

    Raises:
        ModelFileError: A folder does not say what its target is, or how to draft.
        ValueError: `speculative` lacks a drafter, and the model brings none.
        Exception: As for `hub.find_folder`; or a folder does not exist.
    """
    options: _Options = {
        "cache_dir": cache_dir,
        "needs_weights": load_format != "dummy",
        "progress": progress,
    }
    folder = CheckpointFolder(find_folder(model, revision=revision, **options))
    target = folder
    speculators = None if folder.is_converted else read_speculators(folder.config)
    if speculators is not None:
        target = CheckpointFolder(_find_verifier(folder, speculators, options))
        speculative = _with_own_drafter(
            speculative, folder, lambda: speculators.num_speculative_tokens
        )
    elif folder.is_converted and folder.converted.draft is not None:
        speculative = _with_own_drafter(
            speculative, folder, lambda: folder.converted.num_speculative_tokens
        )
    else:
        speculative = _with_block_drafter(
            speculative, folder, needs_weights=options["needs_weights"]
        )
    if speculative is not None and speculative.method == "mtp" and speculative.model is None:
        return ModelSources(target, target, speculative)
    if speculative is None or speculative.model is None:
        return ModelSources(target, None, speculative)
    if speculative.model == str(folder.path) and speculative.num_speculative_tokens is not None:
        return ModelSources(target, folder, speculative)
    argument = "speculative_config['model']"
    draft = find_folder(
        speculative.model, revision=speculative.revision, argument=argument, **options
    )
    if speculative.method == "mtp" and not draft.samefile(target.path):
        raise ValueError(
            f"{argument} is {shorten(speculative.model)}, but method 'mtp' drafts with a layer in "
            f"the target's own files, {target.path}; allowed: no 'model'"
        )
    drafter = CheckpointFolder(draft)
    if speculative.num_speculative_tokens is None:
        k = stated_num_drafts(drafter)
        if k is None:
            detect_method(drafter, speculative.method)  # raises: every block drafter states k
        speculative = dataclasses.replace(speculative, num_speculative_tokens=k)
    return ModelSources(target, drafter, speculative)


def find_tokenizer(
    tokenizer: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> TokenizerInfo:
    """Reads the tokenizer that `LLM(tokenizer=...)` names; downloads it if it is on the hub.

    Raises:
        Exception: As for `hub.find_folder` and `TokenizerInfo`.
    """
    check_path("tokenizer", tokenizer, TOKENIZER)
    found = find_folder(
        tokenizer,
        cache_dir=cache_dir,
        needs_weights=False,
        progress=progress,
        argument="tokenizer",
    )
    path = found if found.is_file() else found / TOKENIZER_NAME
    if not exists(path):
        raise ModelNotFoundError(f"tokenizer: {path} does not exist; expected {TOKENIZER}")
    return TokenizerInfo(path)


def _with_block_drafter(
    given: SpeculativeConfig | None, folder: CheckpointFolder, *, needs_weights: bool
) -> SpeculativeConfig | None:
    """Completes a configuration with the block drafter in the target's subfolder or own files.

    Args:
        given: The configuration.
        folder: The target's folder.
        needs_weights: Whether its weights are at hand. Where they lack the drafter that the
            target's configuration describes, there is none unless the method is named.

    Raises:
        ModelNotFoundError: The subfolder has no configuration.
        ValueError: There are two and the configuration names none, or there is not the named one,
            or the subfolder has another model.
    """
    needs_drafter = given is None or (given.is_incomplete and not given.is_off)
    is_named = given is not None and given.method in BLOCK_METHODS and given.model is None
    if given is not None and not needs_drafter and not is_named:
        return given.completed(str(folder.path))
    names = BLOCK_METHODS if given is None or given.method is None else (given.method,)
    found = [name for name in block_subfolders(folder.path) if name in names]
    if len(found) > 1:
        raise ValueError(
            f"{folder.path} has the drafters {' and '.join(map(repr, found))}, and "
            "speculative_config names neither; allowed: a 'method' that is one of them, or "
            "{'method': None} (in JSON null) for plain decoding"
        )
    if found:
        _check_subfolder(folder.path / found[0])
        config = SpeculativeConfig(method=found[0]) if given is None else given
        return dataclasses.replace(config, method=found[0], model=str(folder.path / found[0]))
    own = None if folder.is_converted else own_block_kind(folder.config)
    if own in names and (is_named or not needs_weights or has_stage(folder.weights)):
        config = SpeculativeConfig(method=own) if given is None else given
        return dataclasses.replace(config, method=own, model=str(folder.path))
    if given is not None and given.method in BLOCK_METHODS:
        raise ValueError(
            f"speculative_config['method'] is {given.method!r} and 'model' is missing, but "
            f"{folder.path} has no subfolder {given.method!r} and no such drafter in its own "
            "files; allowed: the drafter's folder or its name on the hub as 'model'"
        )
    return None if given is None else given.completed(str(folder.path))


def _check_subfolder(path: Path) -> None:
    """Refuses a subfolder of a target that is named after a method and has no drafter for it."""
    role = (
        f"a subfolder {path.name!r} of a target is its drafter, unless speculative_config names "
        "another drafter or is {'method': None} (in JSON null)"
    )
    try:
        kind = block_kind_of_config(CheckpointFolder(path).config)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; {role}") from error
    if kind != path.name:
        what = "no block drafter" if kind is None else f"a drafter for {kind!r}"
        raise ValueError(f"{path} has {what}; expected one for {path.name!r}; {role}")


def _with_own_drafter(
    given: SpeculativeConfig | None,
    folder: CheckpointFolder,
    default_k: Callable[[], int | None],
) -> SpeculativeConfig | None:
    """Completes a configuration with the drafter that the model brings, if it names no other."""
    drafter = str(folder.path)
    if given is None:
        return SpeculativeConfig(model=drafter, num_speculative_tokens=default_k())
    has_k = given.is_off or given.num_speculative_tokens is not None
    return given.completed(drafter, drafter, None if has_k else default_k())


def _find_verifier(folder: CheckpointFolder, speculators: Speculators, options: _Options) -> Path:
    """The folder of the target that a folder of the `speculators` package names.

    The name is that of a folder, absolute or relative to this one, or of a model on the hub. The
    working directory does not matter.
    """
    name = speculators.verifier
    source = f'{folder.config.source}: key "speculators_config.verifier.name_or_path" is'
    path = folder.path / name
    if find(path) is not None:
        return path
    if not is_hub_id(name):
        raise ModelNotFoundError(
            f"{source} {shorten(name)}, and there is no such folder; expected the target's folder, "
            f"absolute or relative to {folder.path}, or a model on the hub{CURE}"
        )
    try:
        return fetch(name, **options)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{source} {shorten(name)}: {error}{CURE}") from error
