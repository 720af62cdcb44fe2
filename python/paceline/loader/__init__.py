# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face checkpoints into models; the only place that knows their names.

`docs/loading.md` says what is read and what is refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, load_weights, open_checkpoint
from .families import ARCHITECTURES, check_dtype, decoder_config
from .tokenizer import TokenizerInfo, check_tokenizers, load_tokenizer

if TYPE_CHECKING:
    from paceline import _core

__all__ = [
    "ARCHITECTURES",
    "Checkpoint",
    "LoadedModel",
    "TokenizerInfo",
    "check_compatible",
    "check_dtype",
    "check_tokenizers",
    "decoder_config",
    "load_checkpoint",
    "open_checkpoint",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in place, and what came with it.

    Attributes:
        path: The checkpoint's folder.
        model: The weights; shared by every executor that uses them.
        family: "llama", "qwen3" or "gemma3".
        architecture: The class name in `config.json`.
        config: The canonical description of `docs/model-format.md`.
        weight_dtype: Of the matrices: "float32" or "bfloat16".
        stored_dtypes: How many matrices the files hold in each dtype, e.g. `{"BF16": 210}`.
        vocab_size: Rows of the embedding table.
        max_position: Positions that the model was made for.
        eos_token_ids: Ids that end a text; maybe none.
        bos_token_id: The id that starts a text, if the files name one.
        tokenizer: None for a folder without `tokenizer.json`, whose model takes token ids only.
        notes: What a user may want to know about choices made while loading.
    """

    path: Path
    model: _core.Model
    family: str
    architecture: str
    config: dict[str, Any]
    weight_dtype: str
    stored_dtypes: dict[str, int]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer: TokenizerInfo | None
    notes: tuple[str, ...]

    @property
    def config_json(self) -> str:
        """The canonical description as JSON."""
        return json.dumps(self.config)


def load_checkpoint(
    path: str | os.PathLike[str], *, dtype: str = "auto", progress: bool = True
) -> LoadedModel:
    """Loads a checkpoint in Hugging Face layout.

    Args:
        path: The folder: `config.json`, `model.safetensors` or shards with their index, and maybe
            `tokenizer.json` and `generation_config.json`.
        dtype: What matrices become: "float32", "bfloat16", or "auto": bfloat16 when every matrix is
            stored as BF16, else float32, which holds F16 and F32 without loss.
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The model and what came with it.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
        MemoryError: There is no room for the weights.
    """
    checkpoint = open_checkpoint(path, dtype)
    # First what is quick, so that a bad tokenizer does not show after minutes.
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_weights(checkpoint, progress=progress)
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


def check_compatible(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a drafter's token ids mean what the target's mean.

    Raises:
        ValueError: The tokenizers differ, or one is missing and the embedding tables have different
            numbers of rows.
    """
    check_tokenizers(
        target.path,
        target.tokenizer,
        target.vocab_size,
        draft.path,
        draft.tokenizer,
        draft.vocab_size,
    )
