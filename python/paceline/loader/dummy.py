# SPDX-License-Identifier: Apache-2.0
"""Models with dummy weights, made from a configuration alone, for benches and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import _core

from .block_kinds import own_block_kind
from .checkpoint import check_end_ids, parse_target_config, read_hf_config
from .converted_model import part_for
from .drafter_checkpoint import DRAFT_MODEL, drafter_config
from .drafters import with_feedback
from .families import check_dtype, translate
from .folder import CheckpointFolder, Source, as_folder
from .hf_config import HfConfig
from .kinds import kind_of_config
from .loaded_model import LoadedModel
from .section import Section
from .tokenizer import TokenizerInfo


def load_dummy(
    source: Source, *, dtype: str = "auto", device: str = "cpu", seed: int = 0
) -> LoadedModel:
    """Makes a model with dummy weights, for benches and tests. Its output is meaningless.

    Matrices and embeddings are drawn from a normal distribution with standard deviation 0.02, norms
    are neutral, biases 0. The weights are made on their device.

    Args:
        source: A folder with `config.json`, and maybe `tokenizer.json`; weight files are not
            opened.
        dtype: The dtype of matrices: "float32", "bfloat16", or "auto": the one that the
            configuration names, and bfloat16 if it names neither.
        device: The device of the weights: "cpu" or "cuda".
        seed: The seed of the weights.

    Returns:
        The model with its tokenizer and settings.

    Raises:
        ModelNotFoundError: The folder or its configuration is missing.
        ModelFileError: A file is damaged.
        NotImplementedError: The model is not supported, or there is no such device.
        ValueError: `dtype` is none of the above.
        MemoryError: There is not enough memory for the weights.
    """
    folder = as_folder(source)
    if isinstance(folder, CheckpointFolder) and folder.is_converted:
        return _made_up_part(folder, dtype, device, seed)
    return _make_up(read_hf_config(folder), folder.path, folder.tokenizer, dtype, device, seed)


def dummy_model(
    hf_config: Mapping[str, object],
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Makes a model with dummy weights from a configuration object; see `load_dummy`.

    Args:
        hf_config: The object in a `config.json`.
        name: Its name in messages; also the model's `path`.
        dtype: As for `load_dummy`.
        device: As for `load_dummy`.
        seed: As for `load_dummy`.

    Returns:
        The model, without a tokenizer.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: As for `load_dummy`.
        ValueError: As for `load_dummy`.
        MemoryError: There is not enough memory for the weights.
    """
    hf = parse_target_config(Section(hf_config, name))
    return _make_up(hf, Path(name), None, dtype, device, seed)


def dummy_drafter(
    hf_config: Mapping[str, object],
    target: LoadedModel,
    name: str,
    *,
    method: str | None = None,
    draft_feedback: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel | None:
    """Makes a draft head with dummy weights.

    Args:
        hf_config: The object in a `config.json`.
        target: The target; its weight dtype becomes the draft head's.
        name: Its name in messages; also the draft head's `path`.
        method: "eagle", "eagle3", "mtp" or "gemma4_mtp"; None: the one that the configuration
            names.
        draft_feedback: As for `load_pair`.
        device: As for `load_dummy`.
        seed: As for `load_dummy`.

    Returns:
        The draft head; None for the configuration of a draft model.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: As for `load_dummy`.
        ValueError: It was made for another target, or is for another method than `method`.
        MemoryError: There is not enough memory for the weights.
    """
    top = Section(hf_config, name)
    kind = kind_of_config(top) or method or own_block_kind(top)
    if kind is None or kind == DRAFT_MODEL:
        return None
    config = drafter_config(hf_config, target.as_target(), method=method, source=name)
    config = with_feedback(config, draft_feedback, name)
    return _fill(
        config,
        target.weight_dtype,
        device,
        seed,
        path=Path(name),
        family=kind,
        architecture=kind,
        hf_config=top,
    )


def load_dummy_drafter(
    source: Source,
    target: LoadedModel,
    *,
    method: str | None = None,
    draft_feedback: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Makes a drafter of any kind with dummy weights; see `load_dummy`.

    Args:
        source: A folder with the drafter's `config.json`; weight files are not opened.
        target: The target.
        method: A method of `SpeculativeConfig` with a model; None: the one that the configuration
            names, else a draft model. EAGLE-1 and MTP have to be named.
        draft_feedback: As for `load_pair`.
        dtype: For a draft model, as for `load_dummy`; a draft head takes the target's.
        device: As for `load_dummy`.
        seed: As for `load_dummy`.

    Returns:
        The drafter.

    Raises:
        ModelNotFoundError: The folder or its configuration is missing.
        ModelFileError: A file is damaged.
        NotImplementedError: The drafter is not supported, or there is no such device.
        ValueError: It was made for another target, or is for another method than `method`.
        MemoryError: There is not enough memory for the weights.
    """
    folder = as_folder(source)
    if isinstance(folder, CheckpointFolder) and folder.is_converted:
        return _made_up_part(
            folder,
            dtype,
            device,
            seed,
            is_drafter=True,
            method=method,
            draft_feedback=draft_feedback,
        )
    drafter = dummy_drafter(
        folder.config.values,
        target,
        str(folder.path),
        method=method,
        draft_feedback=draft_feedback,
        device=device,
        seed=seed,
    )
    if drafter is not None:
        return drafter
    return _make_up(
        read_hf_config(folder),
        folder.path,
        folder.tokenizer,
        dtype,
        device,
        seed,
        is_drafter=True,
    )


def _made_up_part(
    folder: CheckpointFolder,
    dtype: str,
    device: str,
    seed: int,
    *,
    is_drafter: bool = False,
    method: str | None = None,
    draft_feedback: str | None = None,
) -> LoadedModel:
    """Makes the target or the drafter of a folder of `paceline convert` with dummy weights."""
    part = part_for(folder, dtype, is_drafter=is_drafter, method=method)
    return _fill(
        with_feedback(part.config, draft_feedback, folder.path),
        part.dtype,
        device,
        seed,
        path=folder.path,
        family=str(part.config["name"]),
        architecture=part.architecture,
        eos_token_ids=() if is_drafter else folder.converted.stop_token_ids,
        bos_token_id=folder.converted.bos_token_id,
        tokenizer=folder.tokenizer,
        generation_config=folder.generation,
    )


def _make_up(
    hf: HfConfig,
    path: Path,
    tokenizer: TokenizerInfo | None,
    dtype: str,
    device: str,
    seed: int,
    *,
    is_drafter: bool = False,
) -> LoadedModel:
    """Makes a target or a draft model with dummy weights."""
    check_dtype(dtype)
    family = translate(hf)
    vocab_size = family.config["vocab_size"]
    if not is_drafter:
        check_end_ids(hf, vocab_size)
    weight_dtype = _named_dtype(hf.text, hf.top) if dtype == "auto" else dtype
    return _fill(
        family.config_for(weight_dtype),
        weight_dtype,
        device,
        seed,
        path=path,
        family=family.name,
        architecture=family.architecture,
        eos_token_ids=tuple(token for token in hf.eos_token_ids if token < vocab_size),
        bos_token_id=hf.bos_token_id,
        tokenizer=tokenizer,
        hf_config=hf.top,
        generation_config=hf.generation,
    )


def _fill(
    config: dict[str, Any],
    weight_dtype: str,
    device: str,
    seed: int,
    *,
    path: Path,
    family: str,
    architecture: str,
    eos_token_ids: tuple[int, ...] = (),
    bos_token_id: int | None = None,
    tokenizer: TokenizerInfo | None = None,
    hf_config: Section | None = None,
    generation_config: Section | None = None,
) -> LoadedModel:
    builder = _core.ModelBuilder(json.dumps(config), weight_dtype, device)
    builder.fill_dummy(seed)
    return LoadedModel(
        path=path,
        model=builder.finish(),
        family=family,
        architecture=architecture,
        config=config,
        weight_dtype=weight_dtype,
        stored_dtypes={},
        vocab_size=config["vocab_size"],
        max_position=config["max_position"],
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        tokenizer=tokenizer,
        notes=("the weights are made up (load_format 'dummy'): the output is meaningless",),
        hf_config=hf_config,
        generation_config=generation_config,
        is_dummy=True,
    )


def _named_dtype(*sections: Section) -> str:
    """The dtype that a configuration names, of those that weights can have."""
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                return "float32" if section.text(key) == "float32" else "bfloat16"
    return "bfloat16"
