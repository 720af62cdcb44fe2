# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint on disk: its files, which tensor lies where, and loading them.

The C++ library maps and validates safetensors files; Python only reads names and shapes and hands
over which tensor is which. Neither torch nor the safetensors package is involved.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import _core
from paceline._core import ModelFileError, ModelNotFoundError

from .binding import CURE, BoundTensor, bind
from .families import ARCHITECTURES, check_dtype, translate
from .family import Family
from .files import exists, find
from .hf_config import CONFIG_NAME, HfConfig, read_hf_config
from .kinds import kind_of_config
from .messages import quote, show, show_path
from .section import Section, read_json_object
from .weight_files import WEIGHTS_NAME, open_shards


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were checked; no weights were read yet.

    Attributes:
        path: The folder.
        hf: Its configuration.
        family: The decoder, translated.
        weight_dtype: What matrices become: "float32" or "bfloat16".
        tensors: Every tensor the model needs, in the order in which it is filled.
        notes: What a user may want to know about the choices made, one sentence each.
    """

    path: Path
    hf: HfConfig
    family: Family
    weight_dtype: str
    tensors: tuple[BoundTensor, ...]
    notes: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The canonical description, for `weight_dtype`."""
        return self.family.config_for(self.weight_dtype)

    @property
    def stored_dtypes(self) -> dict[str, int]:
        """How many matrices are stored in each dtype."""
        return dict(Counter(tensor.dtype for tensor in self.tensors if tensor.spec.is_matrix))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, of those that the vocabulary has."""
        vocab_size = self.family.config["vocab_size"]
        return tuple(token for token in self.hf.eos_token_ids if token < vocab_size)


def open_checkpoint(path: str | os.PathLike[str], dtype: str = "auto") -> Checkpoint:
    """Opens the checkpoint in a folder and checks that it has all that its configuration asks for.

    Args:
        path: The folder: `config.json` and `model.safetensors`, or shards with
            `model.safetensors.index.json`.
        dtype: "float32", "bfloat16", or "auto": bfloat16 when every matrix is stored as BF16, else
            float32.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
    """
    check_dtype(dtype)
    directory = open_directory(path)
    hf = _read_config(directory)
    family = translate(hf)
    shards, listing = open_shards(directory)
    tensors = bind(family, shards, listing, hf.source)
    weight_dtype, notes = _choose_dtype(dtype, tensors)
    checkpoint = Checkpoint(directory, hf, family, weight_dtype, tensors, tuple(notes))
    dropped = sorted(set(hf.eos_token_ids) - set(checkpoint.eos_token_ids))
    if dropped:
        note = (
            f"end-of-sequence ids {show(dropped)} of {directory} are outside of its "
            f"vocabulary ({family.config['vocab_size']} ids) and are left out"
        )
        checkpoint = Checkpoint(directory, hf, family, weight_dtype, tensors, (*notes, note))
    return checkpoint


def open_directory(path: str | os.PathLike[str]) -> Path:
    """Checks that a path can be the folder of a checkpoint.

    Args:
        path: The folder.

    Returns:
        The folder.

    Raises:
        ModelNotFoundError: There is no such folder.
        ModelFileError: It is none, or one that `paceline convert` wrote.
    """
    directory = Path(path)
    check_directory(directory)
    return directory


def load_weights(
    checkpoint: Checkpoint, *, device: str = "cpu", progress: bool = True
) -> _core.Model:
    """Fills a model with the checkpoint's tensors, each copied and converted once.

    Args:
        checkpoint: What `open_checkpoint` returned.
        device: "cpu" or "cuda": where the weights will lie.
        progress: Show a progress bar where standard error is a terminal.

    Raises:
        ModelFileError: The library refuses the description or a tensor.
        NotImplementedError: There is no such device.
        MemoryError: There is no room for the weights.
    """
    from tqdm import tqdm

    builder = _core.ModelBuilder(json.dumps(checkpoint.config), checkpoint.weight_dtype, device)
    with tqdm(
        total=checkpoint.nbytes,
        desc=f"Loading {checkpoint.path.name or checkpoint.path}",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for tensor in checkpoint.tensors:
            builder.put_tensor(tensor.spec.name, tensor.shard.file, tensor.source)
            bar.update(tensor.nbytes)
    return builder.finish()


def _read_config(directory: Path) -> HfConfig:
    """The configuration of a target; that of a drafter is refused with a hint."""
    try:
        return read_hf_config(directory, ARCHITECTURES)
    except NotImplementedError as error:
        path = directory / CONFIG_NAME
        top = Section(read_json_object(path, "the model's configuration"), str(path))
        kind = kind_of_config(top)
        if kind is None:
            raise
        raise NotImplementedError(
            f"{error}; it is a drafter ({kind}) and no target{CURE}"
        ) from None


def check_directory(directory: Path) -> None:
    """Checks that a path can be the folder of a checkpoint; errors as for `open_directory`."""
    status = find(directory)
    if status is None:
        raise ModelNotFoundError(
            f"{show_path(directory)}: no such folder; expected the local folder of a checkpoint "
            f"with {CONFIG_NAME} and {WEIGHTS_NAME} (nothing is downloaded)"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ModelFileError(f"{directory}: not a folder; expected the folder of a checkpoint")
    if exists(directory / "paceline.json") and not exists(directory / CONFIG_NAME):
        raise ModelFileError(
            f"{directory}: a folder written by `paceline convert` (it has paceline.json); "
            "expected a Hugging Face checkpoint with config.json"
        )


def _choose_dtype(dtype: str, tensors: Iterable[BoundTensor]) -> tuple[str, list[str]]:
    """The weight dtype, and what there is to say about it."""
    matrices = [tensor for tensor in tensors if tensor.spec.is_matrix]
    stored = {tensor.dtype for tensor in matrices}
    names = " and ".join(sorted(stored))
    if dtype == "auto":
        if stored == {"BF16"}:
            return "bfloat16", []
        if stored == {"F32"}:
            return "float32", []
        return "float32", [f"weights stored as {names} are loaded as float32, which is lossless"]
    if dtype == "float32" or stored == {"BF16"}:
        return dtype, []
    narrow = next((tensor for tensor in matrices if tensor.dtype == "F16"), None)
    if narrow is not None:
        # The library refuses it: two 16-bit formats, and the way from one to the other loses bits
        # without saving any.
        raise ValueError(
            f"dtype is 'bfloat16', but tensor {quote(narrow.source)} of {narrow.shard.path} is "
            "stored as F16, which would lose 3 bits of each value; allowed: 'auto' or 'float32'"
        )
    return dtype, [f"weights stored as {names} are rounded to bfloat16, as asked"]
