# SPDX-License-Identifier: Apache-2.0
"""Draws receipts being verified: docs/images/receipts.svg from docs/data/verified_receipts.json.

    python docs/scripts/verify_picture.py
    PYTHONPATH=python python docs/scripts/verify_picture.py --record    runs the commands again

The demo generates two outputs with receipts; then one token of the second receipt is edited. The
same data gives the same bytes. tests/python/test_docs_generated.py compares the picture, and
records the commands again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parents[1]
DATA: Final = DOCS / "data" / "verified_receipts.json"
PICTURE: Final = DOCS / "images" / "receipts.svg"

GENERATE: Final = (
    'paceline generate "class Stack:" "def read_lines(path):" --temperature 0.8 --seed 7 '
    "--receipts receipts.jsonl --with-text --quiet"
)
VERIFY: Final = "paceline verify receipts.jsonl"
EDIT: Final = "one token of the second receipt is edited"
POSITION: Final = 20

COLUMNS: Final = 92
CHARACTER: Final = 8.4
LINE: Final = 21
MARGIN: Final = 22
FONT: Final = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
COLOURS: Final = {"command": "#1f2933", "equal": "#0b7a75", "different": "#b42318"}
GREY: Final = "#52606d"


def record() -> dict[str, Any]:
    """Runs the commands and returns what they print and their exit codes."""
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:

        def run(command: str, *, shows_output: bool) -> None:
            arguments = shlex.split(command)[1:]
            done = subprocess.run(
                [sys.executable, "-m", "paceline", *arguments],
                capture_output=True,
                text=True,
                cwd=folder,
                check=False,
            )
            lines = done.stdout.splitlines() if shows_output else []
            steps.append({"command": command, "lines": lines, "exit_code": done.returncode})

        run(GENERATE, shows_output=False)
        run(VERIFY, shows_output=True)
        path = Path(folder, "receipts.jsonl")
        receipts = [json.loads(line) for line in path.read_text().splitlines()]
        receipts[1]["tokens"][POSITION] += 1
        path.write_text("".join(f"{json.dumps(receipt)}\n" for receipt in receipts))
        steps.append({"comment": EDIT})
        run(VERIFY, shows_output=True)
    return {"steps": steps}


def lines_of(data: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the picture, each with its colour."""
    lines: list[tuple[str, str]] = []
    for step in data["steps"]:
        if "comment" in step:
            lines += [("", GREY), (f"# {step['comment']}", GREY)]
            continue
        if lines:
            lines.append(("", GREY))
        wrapped = textwrap.wrap(step["command"], COLUMNS - 4)
        for index, text in enumerate(wrapped):
            start = "$ " if index == 0 else "    "
            end = " \\" if index + 1 < len(wrapped) else ""
            lines.append((f"{start}{text}{end}", COLOURS["command"]))
        for text in step["lines"]:
            kind = "different" if "different" in text else "equal"
            parts = textwrap.wrap(text, COLUMNS - 4, subsequent_indent="    ")
            lines += [(part, COLOURS[kind]) for part in parts]
        if step["lines"]:
            lines.append((f"exit code {step['exit_code']}", GREY))
    return lines


def draw(data: dict[str, Any]) -> str:
    """Draws the picture.

    Args:
        data: What `record` returns.
    """
    lines = lines_of(data)
    width = 2 * MARGIN + CHARACTER * COLUMNS
    height = 2 * MARGIN + LINE * len(lines)
    words = escape(" ".join(" ".join(text for text, _ in lines).split()))
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="{FONT}" font-size="14">',
        "<title>paceline verify on two receipts, and again after an edit</title>",
        f"<desc>{words}</desc>",
        f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8" '
        'fill="#ffffff" stroke="#d9e2ec"/>',
    ]
    for index, (text, colour) in enumerate(lines):
        if text:
            y = MARGIN + LINE * index + 15
            drawn.append(
                f'<text x="{MARGIN}" y="{y}" fill="{colour}" xml:space="preserve">'
                f"{escape(text, quote=False)}</text>"
            )
    return "\n".join([*drawn, "</svg>"]) + "\n"


def main() -> None:
    """Writes the picture, and with --record its data first."""
    parser = argparse.ArgumentParser(description="Draws docs/images/receipts.svg.")
    parser.add_argument("--record", action="store_true", help="run the commands again")
    if parser.parse_args().record:
        DATA.write_text(json.dumps(record(), indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
