# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint in Hugging Face layout, whose files are opened once."""

from __future__ import annotations

import os
import stat
from functools import cached_property
from pathlib import Path
from typing import Final

from paceline._core import ModelFileError, ModelNotFoundError

from .converted import FOLDER_NAME, ConvertedFolder, read_converted
from .files import exists, find, read_file
from .messages import show_path
from .section import MAX_CONFIG_BYTES, Section, read_json_object
from .state_dict import StateDict
from .tensor_source import Weights
from .tokenizer import TokenizerInfo, read_tokenizer_file
from .weight_files import INDEX_NAME, WEIGHTS_NAME, open_weights

CONFIG_NAME: Final = "config.json"
GENERATION_NAME: Final = "generation_config.json"
TOKENIZER_NAME: Final = "tokenizer.json"
PICKLE_NAME: Final = "pytorch_model.bin"
MASK_NAME: Final = "mask_embedding.pt"
_GENERATION: Final = "the model's generation settings"


class CheckpointFolder:
    """The files of one checkpoint: each is opened when it is first needed, and only once.

    All functions that detect, check or load a checkpoint take its folder, so they see the same
    files.

    Attributes:
        path: The folder.
        is_converted: `paceline convert` wrote it, and it has no `config.json`; see `converted`.
    """

    def __init__(self, path: str | os.PathLike[str], weights: Weights | None = None) -> None:
        """Looks at the folder; opens no file.

        Args:
            path: The folder.
            weights: Tensors that take the place of its weight files and of its pickles.

        Raises:
            ModelNotFoundError: There is no such folder.
            ModelFileError: It is none.
            ValueError: The path is empty, or of another type.
        """
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ValueError(
                f"the path of a model is {path!r:.60} ({type(path).__name__}); expected the folder "
                "of a checkpoint as a string or a path"
            )
        self.path = Path(path)
        self._given_weights = weights
        status = find(self.path)
        if status is None:
            raise ModelNotFoundError(
                f"{show_path(path)}: no such folder; expected the folder of a checkpoint with "
                f"{CONFIG_NAME} and {WEIGHTS_NAME}"
            )
        if not stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: not a folder; expected the folder of a checkpoint")
        self.is_converted = exists(self.path / FOLDER_NAME) and not exists(self.path / CONFIG_NAME)

    def __repr__(self) -> str:
        return f"CheckpointFolder({str(self.path)!r})"

    @cached_property
    def config(self) -> Section:
        """`config.json`; errors as for `read_json_object`."""
        path = self.path / CONFIG_NAME
        if self.is_converted:
            raise ModelFileError(
                f"{self.path}: a folder written by `paceline convert` (it has {FOLDER_NAME}); "
                f"expected a checkpoint in Hugging Face layout, with {CONFIG_NAME}"
            )
        return Section(read_json_object(path, "the model's configuration"), str(path))

    @cached_property
    def converted(self) -> ConvertedFolder:
        """Reads what `paceline convert` wrote; errors as for `read_converted`."""
        path = self.path / FOLDER_NAME
        values = read_json_object(path, "the description of the folder", has_unique_keys=True)
        return read_converted(Section(values, str(path)))

    @cached_property
    def generation(self) -> Section | None:
        """`generation_config.json`, if there is one; errors as for `read_json_object`."""
        contents = self.generation_contents
        if contents is None:
            return None
        path = self.path / GENERATION_NAME
        return Section(read_json_object(path, _GENERATION, contents), str(path))

    @cached_property
    def generation_contents(self) -> bytes | None:
        """The bytes of `generation_config.json`, if there is one; errors as for `read_file`."""
        return self.read_if_there(GENERATION_NAME, _GENERATION)

    def read_if_there(self, name: str, what: str) -> bytes | None:
        """The bytes of a file of at most 64 MiB, or None; errors as for `read_file`."""
        path = self.path / name
        return read_file(path, what, max_bytes=MAX_CONFIG_BYTES) if exists(path) else None

    @cached_property
    def weights(self) -> Weights:
        """The tensors; errors as for `open_weights`."""
        return open_weights(self.path) if self._given_weights is None else self._given_weights

    @cached_property
    def tokenizer_contents(self) -> bytes | None:
        """The bytes of `tokenizer.json`, if there is one; errors as for `TokenizerInfo`."""
        path = self.path / TOKENIZER_NAME
        return read_tokenizer_file(path) if exists(path) else None

    @cached_property
    def tokenizer(self) -> TokenizerInfo | None:
        """The tokenizer; None: there is no `tokenizer.json`, and prompts are token ids."""
        if self.tokenizer_contents is None:
            return None
        return TokenizerInfo(self.path / TOKENIZER_NAME, self.tokenizer_contents)

    @property
    def has_only_pickle(self) -> bool:
        """Returns whether the weights are a pickle and nothing else."""
        return (
            self._given_weights is None
            and exists(self.path / PICKLE_NAME)
            and not any(exists(self.path / name) for name in (WEIGHTS_NAME, INDEX_NAME))
        )

    @property
    def mask_pickle(self) -> Path | None:
        """The file with a block drafter's own embedding for mask tokens, if it is to be read."""
        path = self.path / MASK_NAME
        return path if self._given_weights is None and exists(path) else None

    def check_no_pickle(self) -> None:
        """Refuses a folder of which a pickle would have to be read.

        Raises:
            ModelFileError: It is one; the message names the cure.
        """
        if self.has_only_pickle:
            raise ModelFileError(
                f"{self.path / PICKLE_NAME}: the weights are a pickle, which may run code when it "
                "is read and is never loaded directly; expected model.safetensors. An EAGLE "
                "draft head is converted once, weights only: paceline convert --allow-pickle "
                f"{self.path} OUT"
            )
        if self.mask_pickle is not None:
            raise ModelFileError(
                f"{self.mask_pickle}: the embedding of mask tokens is a pickle, which may run code "
                "when it is read and is never loaded directly. The drafter is converted once with "
                "its target, tensors only: paceline convert --allow-pickle TARGET OUT --draft "
                f"{self.path}"
            )


# The argument of functions that open a checkpoint.
Source = str | os.PathLike[str] | CheckpointFolder | StateDict


def as_folder(source: Source) -> CheckpointFolder | StateDict:
    """A checkpoint: a folder, given by its path or opened already, or one in memory.

    Raises:
        Exception: As for `CheckpointFolder`.
    """
    return source if isinstance(source, CheckpointFolder | StateDict) else CheckpointFolder(source)
