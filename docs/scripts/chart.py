# SPDX-License-Identifier: Apache-2.0
"""Draws comparisons with vLLM: docs/images/vllm_comparison.svg from docs/data/vllm_comparison.json.

    python docs/scripts/chart.py
    python docs/scripts/chart.py comparison.json    draws comparison.svg beside it

tests/cuda/compare_vllm.py writes such files. The same data gives the same bytes.
tests/python/test_docs_generated.py compares the file.
"""

from __future__ import annotations

import argparse
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

BOLD: Final = ' font-weight="600"'
GREY: Final = ' fill="#52606d"'

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


def title_of(pair: dict[str, Any]) -> str:
    """What was compared, on which device."""
    return (
        f"{pair['target']} with an {pair['drafter']} drafter, k = "
        f"{pair['num_speculative_tokens']}, one {pair['device']}"
    )


def check_complete(pair: dict[str, Any]) -> None:
    """Checks that both engines have figures in every row.

    Raises:
        ValueError: They have not; names the first figure that is missing.
    """
    for row in pair["rows"]:
        for engine, name, _ in ENGINES:
            for key, _ in MEASURES:
                if f"{engine}_{key}" not in row:
                    raise ValueError(
                        f"{pair['target']} has no figures of {name} at c = {row['concurrency']}; "
                        "measure both engines with tests/cuda/compare_vllm.py"
                    )


def notes_of(pair: dict[str, Any]) -> list[str]:
    """The two lines below the bars of a pair."""
    note = "Each column has its own scale."
    for row in pair["rows"]:
        if round(row["vllm_ms"] / row["paceline_ms"], 2) == 1:
            c = row["concurrency"]
            note += f" At c = {c} an iteration takes the same time in both engines."
    if "note" in pair:
        note += f" {pair['note']}"
    weights = pair["weights"].partition(",")[0]
    return [
        note,
        f"{weights[0].upper()}{weights[1:]}; {pair['input_tokens']} tokens in, "
        f"{pair['output_tokens']} out; both engines emit {pair['synthetic_acceptance_length']} "
        "tokens per iteration by setting.",
    ]


def draw_pair(pair: dict[str, Any], y: float) -> tuple[list[str], float]:
    """Draws one pair of models.

    Args:
        pair: An entry of the file.
        y: Where it begins.

    Returns:
        The elements, and where they end.
    """
    lines = [text(MARGIN, y + 36, title_of(pair), size=17, style=BOLD)]
    x = float(MARGIN)
    for engine, name, colour in ENGINES:
        lines.append(
            f'<rect x="{x:g}" y="{y + 50:g}" width="14" height="14" rx="2" fill="{colour}"/>'
        )
        lines.append(text(x + 20, y + 62, f"{name} {pair[engine]}"))
        x += 140
    words = f"c = requests that run at the same time; {pair['date']}"
    lines.append(text(x, y + 62, words, style=GREY))
    y += 104
    for index, row in enumerate(pair["rows"]):
        lines.append(
            text(MARGIN + index * COLUMN, y - 12, f"c = {row['concurrency']}", size=15, style=BOLD)
        )
    for key, label in MEASURES:
        lines.append(text(MARGIN, y + 16, label, style=GREY))
        y += 26
        for index, row in enumerate(pair["rows"]):
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
    for note in notes_of(pair):
        lines.append(text(MARGIN, y + 16, note, style=GREY))
        y += 20
    return lines, y + 14


def describe(pair: dict[str, Any]) -> str:
    """The figures in words, for those who cannot see the bars."""
    rows = "; ".join(
        f"c = {row['concurrency']}: {row['paceline_ms']} and {row['vllm_ms']} ms, "
        f"{figure(row['paceline_tokens_per_s'])} and "
        f"{figure(row['vllm_tokens_per_s'])} tokens/s"
        for row in pair["rows"]
    )
    return f"{title_of(pair)}: {rows}."


def draw(data: dict[str, Any]) -> str:
    """Draws the chart: the pairs of models below one another.

    Args:
        data: The content of docs/data/vllm_comparison.json.

    Returns:
        The SVG file.

    Raises:
        ValueError: An engine has not been measured.
    """
    pairs = data["pairs"]
    lines: list[str] = []
    height = 0.0
    for pair in pairs:
        check_complete(pair)
        if lines:
            lines.append(
                f'<path d="M{MARGIN} {height:g}H{WIDTH - MARGIN}" stroke="#d9e2ec" fill="none"/>'
            )
        drawn, height = draw_pair(pair, height)
        lines += drawn
    described = " ".join(describe(pair) for pair in pairs)
    targets = " and ".join(pair["target"] for pair in pairs)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" role="img" font-family="{FONT}" fill="#1f2933">',
            f"<title>Paceline beside vLLM: {targets}</title>",
            f"<desc>Figures of Paceline and vLLM. {described}</desc>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" '
            'fill="#ffffff" stroke="#d9e2ec"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Writes the chart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "data", nargs="?", type=Path, help="draw this file (default: that of the pages)"
    )
    data = parser.parse_args().data
    out = CHART if data is None else data.with_suffix(".svg")
    try:
        out.write_text(draw(json.loads((data or DATA).read_text())))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
