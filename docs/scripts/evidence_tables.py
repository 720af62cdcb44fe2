# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/performance.md from the benches in docs/gpu-evidence.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

EVIDENCE: Final = Path(__file__).resolve().parents[1] / "gpu-evidence.json"

DENSE: Final = {"qwen3-8b": "Qwen3-8B", "llama-3-8b": "Llama-3-8B", "gemma3-27b": "Gemma3-27B"}
TARGETS: Final = {
    **DENSE,
    "qwen3-8b-fp8": "Qwen3-8B-FP8",
    "gpt-oss-20b": "GPT-OSS-20B",
    "gpt-oss-120b": "GPT-OSS-120B",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "deepseek-v4-flash": "DeepSeek-V4-Flash, 12 layers",
}
DRAFTERS: Final = {
    "qwen3-8b": "EAGLE-3",
    "llama-3-8b": "EAGLE",
    "gemma3-27b": "270M",
    "qwen3-8b-fp8": "EAGLE-3",
    "gpt-oss-20b": "EAGLE-3",
    "gpt-oss-120b": "20B",
    "glm-4.7-flash": "MTP",
    "deepseek-v4-flash": "MTP",
}
# The kernels of each row of the table of times; a name with "gemm" is a product.
KERNELS: Final = {
    "attention": ("paged_attention",),
    "norms": ("rms_norm",),
    "rotary embedding, KV append": ("qk_norm_rope_append",),
    "activation": ("gated_activation",),
    "draw": ("draw",),
}

Row = dict[str, Any]


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def bench(name: str) -> dict[str, Any]:
    """The figures and the trace of one bench."""
    found: dict[str, Any] = json.loads(EVIDENCE.read_text())["benches"][name]
    return found


def rows_of(name: str) -> list[Row]:
    """The measured rows of one bench."""
    rows: list[Row] = bench(name)["figures"]["rows"]
    return rows


def milliseconds(value: float) -> str:
    """Three or four digits."""
    return f"{value:.2f}" if value < 15 else f"{value:.1f}"


def last_full_run() -> str:
    """When all GPU tests passed, and on what; or which of them did not."""
    evidence = json.loads(EVIDENCE.read_text())
    machine = evidence["machine"]
    place = f"on an {machine['gpu']} with driver {machine['driver']}"
    tests = [r for r in evidence["results"] if r["title"] in ("python", "replicas")
             or r["title"].endswith("_test")]  # fmt: skip
    passed = [r for r in tests if r["exit"] == 0]
    dates = sorted({r["date"] for r in passed})
    since = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    others = ", ".join(f"`{r['title']}`" for r in tests if r["exit"] != 0)
    rest = f"; not to their end: {others}" if others else ""
    return f"{len(passed)} of {len(tests)} GPU tests last passed on {since} {place}{rest}"


def _times_plain(row: Row, rows: Sequence[Row]) -> float:
    """Tokens per second over those of plain decoding with as many sequences."""
    (plain,) = (
        other["output_tokens_per_s"]
        for other in rows
        if other["draft_driver"] is None
        and other["workload"]["concurrency"] == row["workload"]["concurrency"]
    )
    return float(row["output_tokens_per_s"] / plain)


def summary() -> str:
    """Throughput of every pair, and the ratio to plain decoding."""
    lines = []
    for name, target in TARGETS.items():
        rows = rows_of(name)
        cells = {
            row["workload"]["concurrency"]: f"{row['output_tokens_per_s']:,.0f} "
            f"({_times_plain(row, rows):.2f})"
            for row in rows
            if row["draft_driver"] == "unrolled"
        }
        pair = f"{target} + {DRAFTERS[name]}"
        lines.append((pair, *(cells.get(c, "") for c in (1, 16, 64))))
    return table(("pair", "c = 1", "16", "64"), lines)


def latency() -> str:
    """Every pair, plain and with its drafter, by concurrency."""
    lines = []
    for name, target in TARGETS.items():
        rows = [row for row in rows_of(name) if row["draft_driver"] in (None, "unrolled")]
        for row in sorted(rows, key=lambda row: row["draft_driver"] is not None):
            words = f"{target} plain"
            if row["draft_driver"] is not None:
                words = f"{target} + {DRAFTERS[name]}, k=3"
            lines.append(
                (
                    words,
                    row["workload"]["concurrency"],
                    milliseconds(row["iteration_ms"]),
                    milliseconds(row["iteration_p99_ms"]),
                    f"{row['tokens_per_iteration']:.2f}",
                    f"{row['output_tokens_per_s']:.0f}",
                    "" if row["draft_driver"] is None else f"{_times_plain(row, rows):.2f}",
                    f"{row['floor_share']:.0%}".replace("%", " %"),
                    f"{row['idle_share']:.1%}".replace("%", " %"),
                )
            )
    head = ("configuration", "c", "ms per iteration", "p99", "tokens per iteration", "tokens/s")
    return table((*head, "times plain", "share of the floor", "idle"), lines)


def pairs() -> str:
    """The figures of `bench pairs`, as vLLM's `bench serve` counts them."""
    lines = [
        (
            row["pair"],
            f"{row['temperature']:g}",
            row["max_concurrency"],
            f"{row['output_throughput']:,.0f}",
            f"{row['median_ttft_ms']:.1f}",
            f"{row['median_itl_ms']:.2f}",
            f"{row['p99_itl_ms']:.2f}",
            f"{row['spec_decode_acceptance_length']:.2f}",
            milliseconds(row["iteration_ms"]),
            f"{row['floor_share']:.0%}".replace("%", " %"),
        )
        for row in rows_of("pairs")
    ]
    head = ("pair", "T", "c", "output tokens/s", "median TTFT, ms", "median ITL, ms", "p99 ITL, ms")
    return table((*head, "acceptance length", "iteration, ms", "share of the floor"), lines)


def first_token() -> str:
    """Times to the first token of one prompt, with the share of the floor."""
    cells: dict[int, list[str]] = {}
    for row in rows_of("first-token"):
        share = f"{row['prompt_floor_ms'] / row['prompts_ms']:.0%}".replace("%", " %")
        cells.setdefault(row["workload"]["input_len"], []).extend(
            (f"{row['prompts_ms']:,.0f}", f"{row['prompt_floor_ms']:,.0f}", share)
        )
    head = ["prompt tokens"]
    for words in ("plain", "EAGLE-3"):
        head += [f"{words}, ms", "floor, ms", "share"]
    return table(head, [(f"{count:,}", *line) for count, line in cells.items()])


def drivers() -> str:
    """Milliseconds per iteration of the Gemma pair by draft driver."""
    cells: dict[str, list[str]] = {}
    for row in rows_of("gemma3-27b"):
        if row["draft_driver"] is not None:
            cells.setdefault(row["draft_driver"], []).append(f"{row['iteration_ms']:.2f}")
    return table(("driver", "c = 1", "16", "64"), [(k, *v) for k, v in cells.items()])


def sampling() -> str:
    """Milliseconds per iteration by sampling, with what a drafted row adds to temperature 0."""
    lines: dict[str, list[str]] = {}
    greedy: dict[int, float] = {}
    for row in rows_of("sampling"):
        c, ms = row["workload"]["concurrency"], row["iteration_ms"]
        values = row["workload"]["sampling"]
        words = "plain" if row["draft_driver"] is None else "k=3"
        words += f", T={values['temperature']:g}"
        if "top_p" in values:
            words += f", top_p {values['top_p']}"
        cell = f"{ms:.3f}"
        if row["draft_driver"] is not None:
            greedy.setdefault(c, ms)
            if values["temperature"] > 0:
                cell += f" ({ms / greedy[c] - 1:+.1%})".replace("%", " %")
        lines.setdefault(words, []).append(cell)
    order = sorted(lines, key=lambda words: words.startswith("k="))
    return table(("requests", "c = 1", "16", "64"), [(k, *lines[k]) for k in order])


def kernel_times() -> str:
    """Milliseconds of an iteration by kind of kernel, each kernel timed alone."""
    columns: list[tuple[str, Row]] = []
    for name, target in DENSE.items():
        traced = [
            row
            for row in bench(name)["trace"]["rows"]
            if row["configuration"] in ("k=3", "k=3 unrolled")
            and (name != "llama-3-8b" or row["concurrency"] == 64)
        ]
        pair = f"{target} + {DRAFTERS[name]}"
        for i, row in enumerate(traced):
            c = row["concurrency"]
            columns.append((f"{pair}, c = {c}" if i == 0 else str(c), row))

    def total(row: Row, kind: str) -> float:
        kernels = row["kernels"]
        if kind == "products":
            kernels = [kernel for kernel in kernels if "gemm" in kernel["name"]]
        elif kind != "all, one by one":
            kernels = [kernel for kernel in kernels if kernel["name"] in KERNELS[kind]]
        return sum(kernel["total_us"] for kernel in kernels) / 1e3

    lines = [
        (kind, *(f"{total(row, kind):.2f}" for _, row in columns))
        for kind in ("products", *KERNELS, "all, one by one")
    ]
    graph = (f"{row['iteration_us'] / 1e3:.2f}" for _, row in columns)
    lines.append(("the iteration in its graph", *graph))
    return table(("kernels", *(words for words, _ in columns)), lines)
