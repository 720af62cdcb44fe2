# SPDX-License-Identifier: Apache-2.0
"""Loading checkpoints: targets, and drafters of any kind."""

from __future__ import annotations

import os

from .checkpoint import load_weights, open_checkpoint
from .drafter_checkpoint import DRAFT_MODEL, detect_method, load_drafter_weights, open_drafter
from .loaded_model import LoadedModel
from .tokenizer import load_tokenizer


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: bool = True,
) -> LoadedModel:
    """Loads a checkpoint in Hugging Face layout.

    Args:
        path: The folder: `config.json`, `model.safetensors` or shards with their index, and maybe
            `tokenizer.json` and `generation_config.json`.
        dtype: What matrices become: "float32", "bfloat16", or "auto": bfloat16 when every matrix is
            stored as BF16, else float32, which holds F16 and F32 without loss.
        device: Where the weights will lie: "cpu" or "cuda".
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The model and what came with it.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported; or there is no
            such device.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
        MemoryError: There is no room for the weights.
    """
    checkpoint = open_checkpoint(path, dtype)
    # First what is quick, so that a bad tokenizer does not show after minutes.
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_weights(checkpoint, device=device, progress=progress)
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        family=checkpoint.family.name,
        architecture=checkpoint.family.architecture,
        config=checkpoint.config,
        weight_dtype=checkpoint.weight_dtype,
        stored_dtypes=checkpoint.stored_dtypes,
        vocab_size=checkpoint.family.config["vocab_size"],
        max_position=checkpoint.family.config["max_position"],
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.hf.bos_token_id,
        tokenizer=tokenizer,
        notes=checkpoint.notes,
    )


def load_drafter(
    path: str | os.PathLike[str],
    target: LoadedModel,
    *,
    method: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    progress: bool = True,
) -> LoadedModel:
    """Loads a drafter of any kind for a target.

    Args:
        path: The drafter's folder.
        target: What it drafts for. A drafter that rides on it is checked against it and takes its
            dtype.
        method: "draft_model", "eagle", "eagle3" or "gemma4_mtp"; None: what the checkpoint is.
        dtype: Of a draft model, as for `load_checkpoint`.
        device: Where the weights will lie: "cpu" or "cuda"; the target's.
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The drafter; `LoadedModel.method` says what it is.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown; or the
            weights are a pickle.
        NotImplementedError: The drafter, or the way it is stored, is not supported.
        ValueError: It is not what `method` says, or was made for another target.
        MemoryError: There is no room for the weights.
    """
    if detect_method(path, method) == DRAFT_MODEL:
        return load_checkpoint(path, dtype=dtype, device=device, progress=progress)
    checkpoint = open_drafter(path, target.as_target(), method)
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_drafter_weights(checkpoint, device=device, progress=progress)
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        family=checkpoint.kind,
        architecture=checkpoint.family.architecture,
        config=checkpoint.config,
        weight_dtype=checkpoint.weight_dtype,
        stored_dtypes=checkpoint.stored_dtypes,
        vocab_size=checkpoint.family.config["vocab_size"],
        max_position=checkpoint.family.config["max_position"],
        eos_token_ids=(),
        bos_token_id=None,
        tokenizer=tokenizer,
        notes=checkpoint.notes,
    )
