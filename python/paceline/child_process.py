# SPDX-License-Identifier: Apache-2.0
"""Starts processes of Python beside this one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def start_python(module: str, *descriptors: int, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that calls the function `main` of a module.

    It imports the same modules as this process, whatever the working directory has, and a Ctrl-C on
    the terminal does not reach it.

    Args:
        module: The full name of the module.
        *descriptors: Files that the process inherits, and the arguments of `main`.
        **options: Further arguments of `subprocess.Popen`.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main(*{descriptors})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        process_group=0,
        **options,
    )
