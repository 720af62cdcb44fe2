# SPDX-License-Identifier: Apache-2.0
"""Measures the DSpark drafter of the demo against its bar, with Paceline or torch alone.

The prompts and the counting are those of `evaluate_demo.py`. `--engine torch` runs the training
form of the drafter on the target's own output. That is exact, because a drafter whose proposals are
accepted drafts after the target's own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from demo_models import load_checkpoint
from dspark_model import DSpark, load_dspark
from evaluate_demo import NEW_TOKENS, Run
from evaluate_eagle3 import drafter_arguments, evaluate
from generation import greedy_each
from measures import emitted_by_drafts
from texts import Texts
from tokenizers import Tokenizer
from train_dspark import states_of
from transformers import Gemma3ForCausalLM

NUM_DRAFTS = 7
ACCEPTANCE_BAR = 4.0


@torch.no_grad()
def emitted(
    model: Gemma3ForCausalLM,
    drafter: DSpark,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    num_drafts: int,
) -> list[list[int]]:
    """The number of tokens that each iteration emits, for each prompt."""
    counts = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        ids = torch.tensor([[*prompt, *continuation]], device=model.device)
        first = torch.tensor([len(prompt)], device=model.device)
        texts = Texts(ids, first, len(continuation))
        streams, _ = states_of(model, texts, drafter.config.taps)
        anchors, tokens = texts.index(), texts.learned()
        drafts = drafter.draft(drafter(streams, anchors, tokens), tokens)[0]
        counts.append(emitted_by_drafts(continuation, drafts.T.tolist()[:num_drafts]))
    return counts


def simulate(target: Path, drafter: Path, texts: Sequence[str], *, num_drafts: int) -> Run:
    """Simulates greedy speculative decoding: the result that a correct engine must reach."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model = load_checkpoint(target, device)
    prompts = [tokenizer.encode(text).ids for text in texts]
    continuations = greedy_each(model, prompts, NEW_TOKENS)
    counts = emitted(model, load_dspark(drafter, model), prompts, continuations, num_drafts)
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in continuations]
    return Run(continuations, counts, decoded)


def main() -> None:
    """Evaluates the drafter; exits with 1 if the bar is missed."""
    folders = {"target": "gemma3_code", "drafter": "gemma3_code_dspark"}
    parser = drafter_arguments(__doc__, **folders, num_drafts=NUM_DRAFTS)
    evaluate(parser.parse_args(), simulate, ACCEPTANCE_BAR)


if __name__ == "__main__":
    main()
