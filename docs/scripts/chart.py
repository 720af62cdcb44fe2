# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/vllm_comparison.svg from docs/data/vllm_comparison.json.

    python docs/scripts/chart.py

The same data gives the same bytes. tests/python/test_docs_generated.py compares the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parents[1]
DATA: Final = DOCS / "data" / "vllm_comparison.json"
CHART: Final = DOCS / "images" / "vllm_comparison.svg"

ENGINES: Final = (("paceline", "Paceline", "#0b7a75"), ("vllm", "vLLM", "#9aa5b1"))
MEASURES: Final = (
    ("ms", "milliseconds per iteration (shorter is better)"),
    ("tokens_per_s", "tokens per second (longer is better)"),
)

WIDTH: Final = 880
MARGIN: Final = 24
COLUMN: Final = (WIDTH - 2 * MARGIN) / 4
BAR: Final = 18
LONGEST: Final = COLUMN - 78  # leaves room for the figure beside the longest bar
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def figure(value: float) -> str:
    """Formats a figure as the tables do: 5.37, and 5,878."""
    return f"{value:,}"


def text(x: float, y: float, words: str, *, size: int = 13, style: str = "") -> str:
    """Returns one line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{style}>{words}</text>'


def draw(data: dict[str, Any]) -> str:
    """Draws the chart.

    Args:
        data: The content of docs/data/vllm_comparison.json.

    Returns:
        The SVG file.
    """
    bold = ' font-weight="600"'
    grey = ' fill="#52606d"'
    title = (
        f"{data['target']} with an {data['drafter']} drafter, k = "
        f"{data['num_speculative_tokens']}, one {data['device']}"
    )
    lines = [text(MARGIN, 36, title, size=17, style=bold)]
    x = float(MARGIN)
    for _, name, colour in ENGINES:
        version = data[name.lower()]
        lines.append(f'<rect x="{x:g}" y="50" width="14" height="14" rx="2" fill="{colour}"/>')
        lines.append(text(x + 20, 62, f"{name} {version}"))
        x += 140
    lines.append(text(x, 62, f"c = requests that run at the same time; {data['date']}", style=grey))
    y = 104.0
    for index, row in enumerate(data["rows"]):
        lines.append(
            text(MARGIN + index * COLUMN, y - 12, f"c = {row['concurrency']}", size=15, style=bold)
        )
    for key, label in MEASURES:
        lines.append(text(MARGIN, y + 16, label, style=grey))
        y += 26
        for index, row in enumerate(data["rows"]):
            x = MARGIN + index * COLUMN
            longest = max(row[f"{engine}_{key}"] for engine, _, _ in ENGINES)
            for place, (engine, _, colour) in enumerate(ENGINES):
                value = row[f"{engine}_{key}"]
                width = LONGEST * value / longest
                top = y + place * (BAR + 4)
                lines.append(
                    f'<rect x="{x:g}" y="{top:g}" width="{width:.1f}" height="{BAR}" rx="2" '
                    f'fill="{colour}"/>'
                )
                lines.append(text(x + round(width, 1) + 6, top + 14, figure(value)))
        y += 2 * BAR + 14
    level = [row for row in data["rows"] if round(row["vllm_ms"] / row["paceline_ms"], 2) == 1]
    note = "Each column has its own scale."
    for row in level:
        note += f" At c = {row['concurrency']} an iteration takes the same time in both engines."
    work = (
        f"Random weights; {data['input_tokens']} tokens in, {data['output_tokens']} out; both "
        f"engines emit {data['synthetic_acceptance_length']} tokens per iteration by setting."
    )
    lines.append(text(MARGIN, y + 16, note, style=grey))
    lines.append(text(MARGIN, y + 36, work, style=grey))
    height = y + 54
    described = "; ".join(
        f"c = {row['concurrency']}: {row['paceline_ms']} and {row['vllm_ms']} ms, "
        f"{figure(row['paceline_tokens_per_s'])} and {figure(row['vllm_tokens_per_s'])} tokens/s"
        for row in data["rows"]
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" role="img" font-family="{FONT}" fill="#1f2933">',
            f"<title>{title}: Paceline beside vLLM</title>",
            f"<desc>Paceline and vLLM. {described}.</desc>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" '
            'fill="#ffffff" stroke="#d9e2ec"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Writes the chart."""
    CHART.write_text(draw(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
