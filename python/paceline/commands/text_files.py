# SPDX-License-Identifier: Apache-2.0
"""Text files that a command line names: read with bounded memory."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Final

#: Bytes of a file with options, and of one with prompts.
MAX_CONFIG_BYTES: Final = 2**20
MAX_PROMPT_BYTES: Final = 2**30


def read_text_file(path: Path, max_bytes: int) -> str:
    """Reads a file or a pipe, such as that of bash's <(...), as UTF-8, with "\\n" for ends of
    lines of all kinds.

    Args:
        path: The file.
        max_bytes: Its largest size.

    Raises:
        ValueError: It is a device, such as /dev/zero, which may have no end, or larger.
        UnicodeDecodeError: It is not UTF-8.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISCHR(mode) and not file.isatty() and not os.path.samefile(path, os.devnull):
            raise ValueError(f"{path} is a device; allowed: a file or a pipe")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes; allowed: at most as many")
    return io.StringIO(content.decode("utf-8"), newline=None).read()
