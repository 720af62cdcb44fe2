# SPDX-License-Identifier: Apache-2.0
"""Measures the EAGLE-3 draft head of the demo against its bar, with Paceline or torch alone.

The prompts and the counting are those of `evaluate_demo.py`. `--engine torch` runs the training
form of the draft head on the target's own output. That is exact, because a draft head whose
proposals are accepted drafts after the target's own output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from demo_models import load_checkpoint
from eagle3_model import load_head
from evaluate_demo import NEW_TOKENS, REPOSITORY, Run, run_engine
from generation import greedy_each
from measures import acceptance, emitted_by_drafts
from texts import Texts
from tokenizers import Tokenizer
from train_eagle3 import Drafting

NUM_DRAFTS = 3
ACCEPTANCE_BAR = 2.4


@torch.no_grad()
def simulate(target: Path, drafter: Path, texts: Sequence[str], *, num_drafts: int) -> Run:
    """Simulates greedy speculative decoding: the result that a correct engine must reach."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model, head = load_checkpoint(target, device), load_head(drafter, device)
    drafting = Drafting(model, head, num_drafts)
    prompts = [tokenizer.encode(text).ids for text in texts]
    continuations = greedy_each(model, prompts, NEW_TOKENS)
    emitted = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        # The training form skips the last positions of a row, so pad.
        ids = torch.tensor([[*prompt, *continuation, *[0] * num_drafts]], device=device)
        first = torch.tensor([len(prompt)], device=device)
        _, drafted = drafting.run(Texts(ids, first, len(continuation)))
        # Step s at index j drafts token j, starting from token j - 1 - s.
        drafts = [
            head.ids[logits[0].argmax(-1)].tolist()[step + 1 :]
            for step, (logits, _) in enumerate(drafted)
        ]
        emitted.append(emitted_by_drafts(continuation, drafts))
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in continuations]
    return Run(continuations, emitted, decoded)


def drafter_arguments(
    doc: str, *, target: str, drafter: str, num_drafts: int = NUM_DRAFTS
) -> argparse.ArgumentParser:
    """The options that the evaluations of drafters share; target and drafter are demo folders."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    demo = REPOSITORY / "python/paceline/demo"
    parser.add_argument("--target", type=Path, default=demo / target)
    parser.add_argument("--drafter", type=Path, default=demo / drafter)
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=num_drafts, metavar="K")
    parser.add_argument("--engine", choices=("paceline", "torch"), default="paceline")
    return parser


def evaluate(
    arguments: argparse.Namespace, simulate_with: Callable[..., Run], acceptance_bar: float
) -> None:
    """Prints the measures of a drafter; exits with 1 if the bar is missed."""
    texts = [row["text"] for row in json.loads(arguments.prompts.read_text())]
    run_with = run_engine if arguments.engine == "paceline" else simulate_with
    run = run_with(
        arguments.target, arguments.drafter, texts, num_drafts=arguments.num_speculative_tokens
    )
    report = acceptance(run.continuations, run.emitted)
    print(f"mean acceptance length {report.mean_acceptance_length:.3f} (bar {acceptance_bar})")
    print(f"counted tokens {report.counted_share:.3f}")
    if report.mean_acceptance_length < acceptance_bar:
        sys.exit("the bar is missed")


def main() -> None:
    """Evaluates the draft head; exits with 1 if the bar is missed."""
    parser = drafter_arguments(__doc__, target="gemma3_code", drafter="gemma3_code_eagle3")
    evaluate(parser.parse_args(), simulate, ACCEPTANCE_BAR)


if __name__ == "__main__":
    main()
