# SPDX-License-Identifier: Apache-2.0
"""Checks that a target and a drafter fit each other."""

from __future__ import annotations

from .drafter_checkpoint import DRAFT_MODEL
from .drafters import GEMMA4_MTP
from .gemma4_assistant import check_reads_layers_of
from .loaded_model import LoadedModel
from .tokenizer import check_tokenizers


def check_compatible(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a drafter's token ids mean what the target's mean.

    With dummy weights token ids have no meaning, so without both tokenizers there is nothing to
    compare. A draft head seldom comes with a tokenizer; its sizes are checked.

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
    """Checks that a draft head fits a target, which need not be the one it was loaded for.

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
