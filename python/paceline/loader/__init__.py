# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face checkpoints into models; the only package that knows their names.

`docs/loading.md` says what is read and what is refused.
"""

from __future__ import annotations

from .checkpoint import Checkpoint, open_checkpoint
from .drafter_checkpoint import DrafterCheckpoint, detect_method, drafter_config, open_drafter
from .drafters import Target
from .dummy import dummy_drafter, dummy_model, load_dummy, load_dummy_drafter
from .families import ARCHITECTURES, check_dtype, decoder_config
from .folder import CheckpointFolder
from .load import load_checkpoint, load_drafter, load_pair
from .loaded_model import LoadedModel, check_compatible
from .state_dict import StateDict, memory_config, memory_tokenizer
from .tokenizer import TokenizerInfo, check_tokenizers

__all__ = [
    "ARCHITECTURES",
    "Checkpoint",
    "CheckpointFolder",
    "DrafterCheckpoint",
    "LoadedModel",
    "StateDict",
    "Target",
    "TokenizerInfo",
    "check_compatible",
    "check_dtype",
    "check_tokenizers",
    "decoder_config",
    "detect_method",
    "drafter_config",
    "dummy_drafter",
    "dummy_model",
    "load_checkpoint",
    "load_drafter",
    "load_dummy",
    "load_dummy_drafter",
    "load_pair",
    "memory_config",
    "memory_tokenizer",
    "open_checkpoint",
    "open_drafter",
]
