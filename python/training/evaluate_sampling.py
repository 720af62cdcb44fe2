# SPDX-License-Identifier: Apache-2.0
"""Measures acceptance lengths of the demos with sampling, for each acceptance method.

Prints a table in Markdown with a row for each demo and temperature. A length is one plus the mean
number of accepted drafts per iteration with drafts, over all prompts and seeds. Unlike the greedy
evaluations, it counts repetitions too, since sampled output hardly repeats itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluate_demo import NEW_TOKENS, REPOSITORY

from paceline import LLM, SamplingParams
from paceline.demo import Demo, demo_names, find_demo

#: Column title -> (rejection_sample_method, draft_sample_method).
METHODS = {
    "coupled": ("coupled", "probabilistic"),
    "standard, sampled": ("standard", "probabilistic"),
    "block, sampled": ("block", "probabilistic"),
    "standard, greedy": ("standard", "greedy"),
    "block, greedy": ("block", "greedy"),
}


def acceptance_length(llm: LLM, texts: Sequence[str], params: Sequence[SamplingParams]) -> float:
    """Mean acceptance length, bonus token included, over every prompt with each of `params`."""
    prompts = [text for text in texts for _ in params]
    outputs = llm.generate(prompts, [one for _ in texts for one in params])
    totals = [output.metrics.speculative_decoding for output in outputs]
    accepted = sum(total["num_accepted_draft_tokens"] for total in totals if total)
    return 1 + accepted / sum(total["num_spec_steps"] for total in totals if total)


def lengths(
    demo: Demo,
    method: str,
    num_drafts: int,
    texts: Sequence[str],
    params: Sequence[Sequence[SamplingParams]],
    device: str,
) -> list[float]:
    """The acceptance length for each group of `params`."""
    rejection_sample_method, draft_sample_method = METHODS[method]
    config: dict[str, Any] = demo.speculative_config(num_drafts)
    config |= {
        "rejection_sample_method": rejection_sample_method,
        "draft_sample_method": draft_sample_method,
    }
    with LLM(demo.target, speculative_config=config, device=device) as llm:
        return [acceptance_length(llm, texts, group) for group in params]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K")
    parser.add_argument("--temperatures", default="0.7,1.0")
    parser.add_argument("--sampling", default="{}", help="further SamplingParams, as JSON")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each prompt")
    parser.add_argument("--demos", default=",".join(n for n in demo_names() if n != "ngram"))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    texts = [entry["text"] for entry in json.loads(arguments.prompts.read_text())]
    temperatures = [float(t) for t in arguments.temperatures.split(",")]
    params = [
        [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=NEW_TOKENS,
                **json.loads(arguments.sampling),
            )
            for seed in range(arguments.seeds)
        ]
        for temperature in temperatures
    ]
    print(f"| demo | T | {' | '.join(arguments.methods)} |")
    print("|---|---|" + "---|" * len(arguments.methods))
    for name in arguments.demos.split(","):
        columns = [
            lengths(
                find_demo(name), method, arguments.num_speculative_tokens, texts, params,
                arguments.device,
            )
            for method in arguments.methods
        ]  # fmt: skip
        for temperature, row in zip(temperatures, zip(*columns, strict=True), strict=True):
            cells = " | ".join(f"{length:.3f}" for length in row)
            print(f"| `{name}` | {temperature} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
