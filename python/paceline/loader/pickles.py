# SPDX-License-Identifier: Apache-2.0
"""`paceline convert --allow-pickle`: reads an EAGLE draft head from a pickle, weights only.

This is the only file that imports torch. Its weights-only reader builds tensors and refuses a
pickle that asks for anything else.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline._core import ModelFileError

from .drafter_checkpoint import DRAFT_MODEL, detect_method
from .files import open_regular, read_file
from .folder import CONFIG_NAME, PICKLE_NAME, TOKENIZER_NAME, CheckpointFolder
from .section import MAX_CONFIG_BYTES
from .weight_files import WEIGHTS_NAME

if TYPE_CHECKING:
    import torch

# The dtypes that the loader reads; `d2t` and `t2d` are integers.
_DTYPES: Final = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.bool": "BOOL",
}


def convert_pickle(source: CheckpointFolder, out: Path) -> CheckpointFolder:
    """Rewrites the draft head in a folder with `model.safetensors` instead of the pickle.

    Args:
        source: A folder with `config.json` and `pytorch_model.bin`.
        out: An empty folder for the result, which has the same tensors.

    Returns:
        The folder `out`.

    Raises:
        ModelNotFoundError: A file is missing.
        ModelFileError: The pickle holds anything but tensors, or is damaged.
        NotImplementedError: It is no EAGLE draft head, or torch is not installed.
        OSError: `out` cannot be written.
    """
    pickle = source.path / PICKLE_NAME
    settings = read_file(
        source.path / CONFIG_NAME, "the drafter's configuration", max_bytes=MAX_CONFIG_BYTES
    )
    copies = {CONFIG_NAME: settings}
    if source.tokenizer_contents is not None:
        copies[TOKENIZER_NAME] = source.tokenizer_contents
    tensors = _read_pickle(pickle)
    _write_safetensors(out / WEIGHTS_NAME, tensors, pickle)
    for name, contents in copies.items():
        (out / name).write_bytes(contents)
    written = CheckpointFolder(out)
    if detect_method(written) == DRAFT_MODEL:
        raise NotImplementedError(
            f"{pickle}: not an EAGLE draft head (it has no tensor 'fc.weight'); "
            "--allow-pickle reads only those. Save other models as model.safetensors"
        )
    return written


def _read_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        import torch
    except ModuleNotFoundError:
        raise NotImplementedError(
            "--allow-pickle reads the file with torch, which is not installed; pip install torch"
        ) from None
    os.close(open_regular(path, "weights"))
    # torch.save has written zip files since 2020; older formats are not supported.
    if not zipfile.is_zipfile(path):
        raise ModelFileError(f"{path}: not a zip file; expected one that torch.save wrote")
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFileError(
            f"{path}: cannot be read weights-only ({type(error).__name__}): {lines[0]:.300}"
        ) from error
    if not isinstance(tensors, Mapping) or not tensors:
        raise ModelFileError(
            f"{path}: holds {type(tensors).__name__} {tensors!r:.60}; expected a dict of tensors"
        )
    size = path.stat().st_size
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelFileError(
                f"{path}: entry {name!r:.80} is {type(tensor).__name__}; expected tensors by name"
            )
        if str(tensor.dtype) not in _DTYPES or tensor.layout is not torch.strided:
            raise ModelFileError(
                f"{path}: tensor {name!r:.80} is {tensor.dtype}, {tensor.layout}; expected a "
                f"dense one of {', '.join(_DTYPES)}"
            )
        # A stride of 0 can turn a few bytes into a huge tensor.
        if tensor.numel() * tensor.element_size() > size:
            raise ModelFileError(
                f"{path}: tensor {name!r:.80} has shape {list(tensor.shape)}, which is more than "
                f"the file's {size} bytes"
            )
    return tensors


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """Writes tensors without converting them."""
    import torch

    # Wide elements first: with no gaps between tensors every one of them is aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "from": source.name}}
    end = 0
    for name in order:
        tensor = tensors[name]
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in order:
            flat = tensors[name].detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
