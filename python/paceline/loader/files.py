# SPDX-License-Identifier: Apache-2.0
"""Reading the files of a checkpoint: regular files only, and never more than a stated size.

A folder may come from anywhere. Opening a FIFO would wait for its writer, and a device such as
`/dev/zero` has a size of 0 and no end.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from paceline._core import ModelFileError, ModelNotFoundError

from .messages import show_path

_CHUNK_BYTES: Final = 16 << 20

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def find(path: Path) -> os.stat_result | None:
    """Returns the status of the file or folder at a path, links followed.

    Returns:
        The status; None: the path does not exist.

    Raises:
        ModelFileError: The system gives an error, e.g. because a name is too long or a folder may
            not be searched.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise ModelFileError(f"{show_path(path)}: {_reason(error)}") from None


def exists(path: Path) -> bool:
    """Returns whether a path exists; raises ModelFileError as `find` does."""
    return find(path) is not None


def open_regular(path: Path, what: str) -> int:
    """Opens a regular file for reading; never waits.

    Args:
        path: The file, or a link to it.
        what: What the file holds, as it reads in a message, e.g. "the model's configuration".

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFileError: It is a folder, a FIFO, a socket or a device, or cannot be opened.
    """
    status = find(path)
    if status is None:
        raise ModelNotFoundError(f"{path}: no such file; expected {what} in the model's folder")
    # Opening a device may have side effects, so the kind of the file is checked before.
    _check_regular(path, what, status)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read {what}: {_reason(error)}") from None
    try:
        _check_regular(path, what, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(path: Path, what: str, *, max_bytes: int) -> bytes:
    """Reads a whole file.

    Args:
        path: The file, or a link to it.
        what: What the file holds, for messages.
        max_bytes: The largest size allowed.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFileError: It is no regular file, cannot be read, or holds more than `max_bytes`.
    """
    fd = open_regular(path, what)
    try:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise ModelFileError(f"{path}: {size} bytes; {what} may have at most {max_bytes} bytes")
        # A file may hold more than its size says, or grow.
        parts: list[bytes] = []
        num_bytes = 0
        while part := os.read(fd, min(_CHUNK_BYTES, max_bytes + 1 - num_bytes)):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise ModelFileError(
                    f"{path}: more than {max_bytes} bytes; {what} may have at most {max_bytes} "
                    "bytes"
                )
        return b"".join(parts)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read {what}: {_reason(error)}") from None
    finally:
        os.close(fd)


def _check_regular(path: Path, what: str, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ModelFileError(
            f"{path}: {_KINDS.get(kind, 'no regular file')}; expected {what}, a regular file"
        )


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


# ---- names of files with chat templates and special tokens ---------------------------------------

TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
SPECIAL_TOKENS_NAME: Final = "special_tokens_map.json"
TEMPLATE_NAME: Final = "chat_template.jinja"
OLD_TEMPLATE_NAME: Final = "chat_template.json"
CHAT_NAMES: Final = (
    TOKENIZER_CONFIG_NAME,
    SPECIAL_TOKENS_NAME,
    TEMPLATE_NAME,
    OLD_TEMPLATE_NAME,
)
# The folder of further chat templates.
MORE_TEMPLATES: Final = "additional_chat_templates"
_MORE_TEMPLATE: Final = re.compile(rf"{MORE_TEMPLATES}/\w[\w-]*\.jinja", re.ASCII)


def is_more_template(name: str) -> bool:
    """Returns whether a name, relative to the folder, is that of a further chat template."""
    return _MORE_TEMPLATE.fullmatch(name) is not None
