# SPDX-License-Identifier: Apache-2.0
"""Models with dummy weights, made from a configuration alone, for benches and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .block_kinds import own_block_kind
from .checkpoint import OpenedModel, from_config, parse_target_config, read_hf_config
from .converted_model import describe_converted
from .drafter_checkpoint import DRAFT_MODEL, dummy_head
from .families import check_dtype, translate
from .folder import CheckpointFolder, Source, as_folder
from .hf_config import HfConfig
from .kinds import kind_of_config
from .loaded_model import LoadedModel
from .placement import Placement, drafter_placement
from .section import Section
from .tokenizer import TokenizerInfo


def load_dummy(
    source: Source,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    gpus: Sequence[int] = (),
    seed: int = 0,
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
        gpus: As for `load_checkpoint`.
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
        opened = describe_converted(folder, dtype)
    else:
        opened = _described(read_hf_config(folder), folder.path, dtype)
    return _make_up(opened, folder.tokenizer, Placement(device, gpus), seed)


def dummy_model(
    hf_config: Mapping[str, object],
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    gpus: Sequence[int] = (),
    draft_tensor_parallel_size: int | None = None,
    is_drafter: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """Makes a model with dummy weights from a configuration object; see `load_dummy`.

    Args:
        hf_config: The object in a `config.json`.
        name: Its name in messages; also the model's `path`.
        dtype: As for `load_dummy`.
        device: As for `load_dummy`.
        gpus: As for `load_dummy`.
        draft_tensor_parallel_size: As for `load_drafter`.
        is_drafter: It is a draft model.
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
    opened = _described(hf, Path(name), dtype, is_drafter=is_drafter)
    placement = Placement(device, gpus, is_drafter, draft_tensor_parallel_size)
    return _make_up(opened, None, placement, seed)


def dummy_drafter(
    hf_config: Mapping[str, object],
    target: LoadedModel,
    name: str,
    *,
    method: str | None = None,
    draft_feedback: str | None = None,
    device: str = "cpu",
    gpus: Sequence[int] = (),
    draft_tensor_parallel_size: int | None = None,
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
        gpus: As for `load_dummy`.
        draft_tensor_parallel_size: As for `load_drafter`.
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
    opened = dummy_head(top, target.as_target(), method).with_feedback(draft_feedback)
    placement = drafter_placement(device, gpus, draft_tensor_parallel_size)
    return _make_up(opened, None, placement, seed)


def load_dummy_drafter(
    source: Source,
    target: LoadedModel,
    *,
    method: str | None = None,
    draft_feedback: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    gpus: Sequence[int] = (),
    draft_tensor_parallel_size: int | None = None,
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
        gpus: As for `load_dummy`.
        draft_tensor_parallel_size: As for `load_drafter`.
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
    placement = drafter_placement(device, gpus, draft_tensor_parallel_size)
    if isinstance(folder, CheckpointFolder) and folder.is_converted:
        part = describe_converted(folder, dtype, is_drafter=True, method=method)
        part = part.with_feedback(draft_feedback)
        return _make_up(part, folder.tokenizer, placement, seed)
    drafter = dummy_drafter(
        folder.config.values,
        target,
        str(folder.path),
        method=method,
        draft_feedback=draft_feedback,
        device=device,
        gpus=gpus,
        draft_tensor_parallel_size=draft_tensor_parallel_size,
        seed=seed,
    )
    if drafter is not None:
        return drafter
    opened = _described(read_hf_config(folder), folder.path, dtype, is_drafter=True)
    return _make_up(opened, folder.tokenizer, placement, seed)


def _described(hf: HfConfig, path: Path, dtype: str, *, is_drafter: bool = False) -> OpenedModel:
    """A target or a draft model without its tensors."""
    check_dtype(dtype)
    weight_dtype = _named_dtype(hf.text, hf.top) if dtype == "auto" else dtype
    return from_config(hf, translate(hf), path, weight_dtype, is_drafter=is_drafter)


def _make_up(
    opened: OpenedModel, tokenizer: TokenizerInfo | None, placement: Placement, seed: int
) -> LoadedModel:
    """Gives a model dummy weights."""
    builder = placement.new_builder(opened.config, opened.weight_dtype)
    builder.fill_dummy(seed)
    note = "the weights are made up (load_format 'dummy'): the output is meaningless"
    opened = replace(opened, notes=(note,))
    return LoadedModel.of(opened, builder.finish(), tokenizer, is_dummy=True)


def _named_dtype(*sections: Section) -> str:
    """The dtype that a configuration names, of those that weights can have."""
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                return "float32" if section.text(key) == "float32" else "bfloat16"
    return "bfloat16"
