# SPDX-License-Identifier: Apache-2.0
"""Whether a target and a drafter belong together."""

from __future__ import annotations

import os

from .checkpoint import open_checkpoint
from .drafter_checkpoint import DRAFT_MODEL, detect_method, open_drafter
from .drafters import GEMMA4_MTP, Target
from .gemma4_assistant import check_reads_layers_of
from .loaded_model import LoadedModel
from .tokenizer import check_tokenizers


def check_pair(
    path: str | os.PathLike[str],
    draft_path: str | os.PathLike[str],
    *,
    method: str | None = None,
    dtype: str = "auto",
) -> None:
    """Opens two checkpoints and reads no weights, so that what is wrong with the drafter shows
    before the target's are read.

    Args:
        path: The target's folder.
        draft_path: The drafter's.
        method: As for `load_drafter`.
        dtype: As for `load_checkpoint`.

    Raises:
        ModelNotFoundError: As for `load_drafter`.
        ModelFileError: As for `load_drafter`.
        NotImplementedError: As for `load_drafter`.
        ValueError: As for `load_drafter`.
    """
    checkpoint = open_checkpoint(path, dtype)
    if detect_method(draft_path, method) == DRAFT_MODEL:
        open_checkpoint(draft_path, dtype)
        return
    target = Target(
        checkpoint.path,
        checkpoint.family.architecture,
        checkpoint.config,
        checkpoint.weight_dtype,
    )
    open_drafter(draft_path, target, method)


def check_compatible(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a drafter's token ids mean what the target's mean.

    Ids of made-up weights mean nothing: without both tokenizers there is nothing to compare.
    A drafter that rides on a target seldom brings a tokenizer; it is checked by its sizes.

    Raises:
        ValueError: The tokenizers differ, or one is missing and the embedding tables have different
            numbers of rows.
    """
    if draft.method != DRAFT_MODEL:
        check_drafter_fits(target, draft)
        if target.tokenizer is None or draft.tokenizer is None:
            return
    has_both = target.tokenizer is not None and draft.tokenizer is not None
    if target.is_dummy and draft.is_dummy and not has_both:
        return
    check_tokenizers(
        target.path,
        target.tokenizer,
        target.vocab_size,
        draft.path,
        draft.tokenizer,
        draft.vocab_size,
    )


def check_drafter_fits(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a drafter that rides on a target can run beside one, maybe not the one it was
    loaded for.

    Raises:
        ValueError: Sizes or dtypes differ; names both values.
    """
    target_hidden_size = draft.config["drafter"]["target_hidden_size"]
    for what, ours, theirs in (
        ("hidden size", target.config["hidden_size"], target_hidden_size),
        ("vocabulary", target.vocab_size, draft.vocab_size),
        ("weight dtype", target.weight_dtype, draft.weight_dtype),
    ):
        if ours != theirs:
            raise ValueError(
                f"{draft.path}: the drafter was loaded for a target whose {what} is {theirs!r}, "
                f"but that of {target.path} is {ours!r}"
            )
    if draft.method != GEMMA4_MTP:
        return
    if draft.config["embed_scale"] != target.config["embed_scale"]:
        raise ValueError(
            f"{draft.path}: the drafter was loaded for a target that multiplies its embeddings by "
            f"{draft.config['embed_scale']}, but {target.path} does by "
            f"{target.config['embed_scale']}"
        )
    check_reads_layers_of(
        draft.config,
        target.as_target(),
        f"{draft.path}: the drafter was loaded for another target:",
    )
