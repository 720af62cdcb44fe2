# SPDX-License-Identifier: Apache-2.0
"""Loading checkpoints: targets, drafters of any kind, and both."""

from __future__ import annotations

from collections.abc import Sequence

from paceline._core import ModelFileError

from .binding import value_error
from .checkpoint import OpenedModel, load_weights, open_checkpoint
from .converted_model import open_converted
from .drafter_checkpoint import open_any_drafter
from .drafters import Target
from .dummy import load_dummy, load_dummy_drafter
from .folder import CheckpointFolder, Source, as_folder
from .loaded_model import LoadedModel
from .placement import Placement, drafter_placement
from .state_dict import StateDict
from .tokenizer import TokenizerInfo, check_tokenizers


def load_checkpoint(
    source: Source,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    gpus: Sequence[int] = (),
    progress: bool = True,
) -> LoadedModel:
    """Loads a checkpoint in Hugging Face layout, or the target of a folder of `paceline convert`.

    Args:
        source: The folder: `config.json`, `model.safetensors` or shards with their index, and maybe
            `tokenizer.json` and `generation_config.json`; or `paceline.json` and what it names.
        dtype: The dtype of matrices in memory: "float32", "bfloat16", or "auto": bfloat16 when
            every matrix is stored as BF16, else float32, which holds F16 and F32 without loss.
        device: The device of the weights: "cpu" or "cuda".
        gpus: With device "cuda", the GPU of each rank, of those that the process sees, from 0: each
            gets its part of a target, or a whole drafter. Empty: the first one has all.
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The model with its tokenizer and settings.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported; it has more than
            8 end-of-sequence ids; or there is no such device.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
        MemoryError: There is not enough memory for the weights.
    """
    folder = as_folder(source)
    opened = _open_target(folder, dtype)
    return _load(opened, folder.tokenizer, Placement(device, gpus), progress)


def load_drafter(
    source: Source,
    target: LoadedModel,
    *,
    method: str | None = None,
    draft_feedback: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    gpus: Sequence[int] = (),
    draft_tensor_parallel_size: int | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads a drafter of any kind for a target.

    Args:
        source: The drafter's folder.
        target: The target. A draft head is checked against it and takes its dtype.
        method: A method of `SpeculativeConfig` with a model; None: the checkpoint decides, which
            never says "mtp".
        draft_feedback: As for `load_pair`.
        dtype: For a draft model, as for `load_checkpoint`.
        device: The device of the weights: "cpu" or "cuda"; the target's.
        gpus: As for `load_checkpoint`; the target's.
        draft_tensor_parallel_size: `SpeculativeConfig.draft_tensor_parallel_size`: with 1 each GPU
            gets the whole drafter; None: bytes decide.
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The drafter; `LoadedModel.method` is its method.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown; or the
            weights are a pickle.
        NotImplementedError: The drafter, or the way it is stored, is not supported.
        ValueError: It is for another method than `method`, or was made for another target.
        MemoryError: There is not enough memory for the weights.
    """
    folder = as_folder(source)
    opened = _open_drafter(folder, target.as_target(), method, draft_feedback, dtype)
    placement = drafter_placement(device, gpus, draft_tensor_parallel_size)
    return _load(opened, folder.tokenizer, placement, progress)


def load_pair(
    source: Source,
    draft_source: Source | None = None,
    *,
    method: str | None = None,
    draft_feedback: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    gpus: Sequence[int] = (),
    draft_tensor_parallel_size: int | None = None,
    load_format: str = "auto",
    progress: bool = True,
) -> tuple[LoadedModel, LoadedModel | None]:
    """Loads a target and maybe a drafter for it; each file is opened once.

    Both are opened and checked before any weights are read, so that an error in the drafter shows
    before the target is loaded.

    Args:
        source: The target's folder.
        draft_source: The drafter's folder; None: no drafter.
        method: As for `load_drafter`.
        draft_feedback: Of an MTP layer: "normed" or "raw"; None: as its description says.
        dtype: As for `load_checkpoint`.
        device: The device of the weights: "cpu" or "cuda".
        gpus: As for `load_checkpoint`.
        draft_tensor_parallel_size: As for `load_drafter`.
        load_format: "auto", or "dummy" for dummy weights, as `load_dummy` makes them.
        progress: As for `load_checkpoint`.

    Returns:
        The target, and the drafter or None.

    Raises:
        Exception: As for `load_checkpoint` and `load_drafter`.
    """
    folder = as_folder(source)
    draft_folder = None if draft_source is None else as_folder(draft_source)
    if (
        isinstance(folder, CheckpointFolder)
        and isinstance(draft_folder, CheckpointFolder)
        and draft_folder.path.samefile(folder.path)
    ):
        draft_folder = folder
    if load_format == "dummy":
        target = load_dummy(folder, dtype=dtype, device=device, gpus=gpus)
        if draft_folder is None:
            return target, None
        return target, load_dummy_drafter(
            draft_folder,
            target,
            method=method,
            draft_feedback=draft_feedback,
            dtype=dtype,
            device=device,
            gpus=gpus,
            draft_tensor_parallel_size=draft_tensor_parallel_size,
        )
    opened = _open_target(folder, dtype)
    tokenizer = folder.tokenizer
    placement = Placement(device, gpus)
    if draft_folder is None:
        return _load(opened, tokenizer, placement, progress), None
    draft = _open_drafter(draft_folder, opened.as_target(), method, draft_feedback, dtype)
    draft_tokenizer = draft_folder.tokenizer
    if tokenizer is not None and draft_tokenizer is not None:
        check_tokenizers(
            opened.path,
            tokenizer,
            opened.family.config["vocab_size"],
            draft.path,
            draft_tokenizer,
            draft.family.config["vocab_size"],
        )
    of_drafter = drafter_placement(device, gpus, draft_tensor_parallel_size)
    return (
        _load(opened, tokenizer, placement, progress),
        _load(draft, draft_tokenizer, of_drafter, progress),
    )


def _open_target(folder: CheckpointFolder | StateDict, dtype: str) -> OpenedModel:
    if isinstance(folder, CheckpointFolder) and folder.is_converted:
        return open_converted(folder, dtype)
    return open_checkpoint(folder, dtype)


def _open_drafter(
    folder: CheckpointFolder | StateDict,
    target: Target,
    method: str | None,
    draft_feedback: str | None,
    dtype: str,
) -> OpenedModel:
    draft: OpenedModel
    if isinstance(folder, CheckpointFolder) and folder.is_converted:
        draft = open_converted(folder, dtype, is_drafter=True, method=method)
    else:
        draft = open_any_drafter(folder, target, method=method, dtype=dtype)
    return draft.with_feedback(draft_feedback)


def _load(
    opened: OpenedModel,
    tokenizer: TokenizerInfo | None,
    placement: Placement,
    progress: bool,
) -> LoadedModel:
    try:
        model = load_weights(opened, placement, progress=progress)
    except ModelFileError:
        raise
    except ValueError as error:
        # Values of tensors are first checked here, and a converted folder is checked only here.
        if opened.converted_file is not None:
            raise ModelFileError(f"{opened.converted_file}: {error}") from None
        raise value_error(error, opened.tensors) from None
    return LoadedModel.of(opened, model, tokenizer)
