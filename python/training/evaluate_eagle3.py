# SPDX-License-Identifier: Apache-2.0
"""Measures the demo target with a drafter of any kind in the engine, against the bar of EAGLE-3.

The prompts and the counting are those of `evaluate_demo.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from evaluate_demo import REPOSITORY, run_engine
from measures import acceptance

NUM_DRAFTS = 3
ACCEPTANCE_BAR = 2.4


def main() -> None:
    """Prints the measures; the exit status says whether they reach the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    demo = REPOSITORY / "python/paceline/demo"
    parser.add_argument("--target", type=Path, default=demo / "gemma3_code")
    parser.add_argument("--drafter", type=Path, default=demo / "gemma3_code_eagle3")
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=NUM_DRAFTS, metavar="K")
    arguments = parser.parse_args()
    texts = [row["text"] for row in json.loads(arguments.prompts.read_text())]
    run = run_engine(
        arguments.target, arguments.drafter, texts, num_drafts=arguments.num_speculative_tokens
    )
    report = acceptance(run.continuations, run.emitted)
    print(f"mean acceptance length {report.mean_acceptance_length:.3f} (bar {ACCEPTANCE_BAR})")
    print(f"counted tokens {report.counted_share:.3f}")
    if report.mean_acceptance_length < ACCEPTANCE_BAR:
        sys.exit("the bar is missed")


if __name__ == "__main__":
    main()
