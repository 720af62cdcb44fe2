# SPDX-License-Identifier: Apache-2.0
"""Runs the Python and shell blocks of pages, one after the other, as a reader would.

    python snippet_runner.py JOBS RESULTS FOLDER

JOBS is a JSON file: a list of {"page", "line", "language", "code"}. The Python blocks of a page
share one namespace, and all its blocks share a working folder below FOLDER. RESULTS becomes a JSON
file: for each block its output, and "error", which is null if the block succeeded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS = 120


def run_python(code: str, name: str, namespace: dict[str, Any]) -> tuple[str, str | None]:
    """Runs a block in the namespace of its page; returns its output and the error."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), namespace)
    except BaseException:
        return output.getvalue(), traceback.format_exc()
    return output.getvalue(), None


def run_shell(code: str, folder: Path) -> tuple[str, str | None]:
    """Runs a block in bash, where `paceline` is this interpreter's; returns output and error."""
    # A program, not a function: a signal to a command in the background has to reach it.
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    program = programs / "paceline"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paceline "$@"\n')
    program.chmod(0o755)
    script = f'PATH="{programs}:$PATH"\nset -euo pipefail\n{code}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.stdout, None if done.returncode == 0 else f"exit {done.returncode}:\n{done.stdout}"


def main() -> None:
    """Runs all blocks."""
    jobs, results, scratch = (Path(argument) for argument in sys.argv[1:4])
    namespaces: dict[str, dict[str, Any]] = {}
    found = []
    page = None
    for job in json.loads(jobs.read_text()):
        if job["page"] != page:
            for namespace in namespaces.values():
                namespace.clear()  # frees the engines of the page before
            page = job["page"]
        folder = scratch / page.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        start = time.monotonic()
        if job["language"] == "python":
            namespace = namespaces.setdefault(page, {"__name__": "__main__"})
            # Empty lines in front give errors the line numbers of the page.
            code = "\n" * job["line"] + job["code"]
            output, error = run_python(code, page, namespace)
        else:
            output, error = run_shell(job["code"], folder)
        seconds = round(time.monotonic() - start, 2)
        found.append({**job, "output": output, "error": error, "seconds": seconds})
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
