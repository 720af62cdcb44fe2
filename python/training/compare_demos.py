# SPDX-License-Identifier: Apache-2.0
"""Compares the demos in Paceline: acceptance, cost of a draft step, and speed.

Prints a table in Markdown. The demos run one request at a time at temperature 0, on the prompts of
the other evaluations. Acceptance is counted as in those; speed is over all generated tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluate_demo import NEW_TOKENS, REPOSITORY
from measures import acceptance

from paceline import LLM, SamplingParams
from paceline.bench.models import load, load_draft
from paceline.demo import Demo, demo_names, find_demo

WARM_UP_PROMPTS = 8


def tokens_per_second(llm: LLM, texts: Sequence[str]) -> tuple[float, list[Any]]:
    """Generates for one prompt after another; returns the speed and the chunks of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    for text in texts[:WARM_UP_PROMPTS]:
        llm.generate(text, params)
    start = time.perf_counter()
    runs = [list(llm.stream([text], params)) for text in texts]
    seconds = time.perf_counter() - start
    return sum(len(chunk.token_ids) for chunks in runs for chunk in chunks) / seconds, runs


def draft_cost(demo: Demo) -> str:
    """Bytes of the matrices that a draft step reads, as a share of the target's forward."""
    if demo.draft is None:
        return "none"
    target = load(str(demo.target), dummy=False)
    draft = load_draft(str(demo.draft), target, method=demo.name, dummy=False)
    return f"{draft.costs.all_bytes / target.costs.all_bytes:.1%}"


def row(demo: Demo, num_drafts: int, texts: Sequence[str], device: str, plain: float) -> str:
    """Returns one line of the table; `plain` is tokens per second without speculation."""
    with LLM(
        demo.target, speculative_config=demo.speculative_config(num_drafts), device=device
    ) as llm:
        speed, runs = tokens_per_second(llm, texts)
    continuations, emitted = [], []
    for chunks in runs:
        counts = [len(chunk.token_ids) for chunk in chunks if chunk.token_ids]
        continuations.append([token for chunk in chunks for token in chunk.token_ids])
        emitted.append(counts[1:])  # the prefill emits the first token
    length = acceptance(continuations, emitted).mean_acceptance_length
    return (
        f"| `{demo.name}` | {num_drafts} | {length:.2f} | {draft_cost(demo)} "
        f"| {plain:.0f} | {speed:.0f} | {speed / plain:.2f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument(
        "--num-speculative-tokens", default="3", metavar="K,...", help="one k or several"
    )
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    texts = [entry["text"] for entry in json.loads(arguments.prompts.read_text())]
    print("| demo | k | acceptance length | draft step / target | plain | speculative | ratio |")
    print("|---|---|---|---|---|---|---|")
    plain: dict[Path, float] = {}
    for name in demo_names():
        demo = find_demo(name)
        if demo.target not in plain:
            with LLM(demo.target, device=arguments.device) as llm:
                plain[demo.target], _ = tokens_per_second(llm, texts)
        for k in arguments.num_speculative_tokens.split(","):
            print(row(demo, int(k), texts, arguments.device, plain[demo.target]), flush=True)


if __name__ == "__main__":
    main()
