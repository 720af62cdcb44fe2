# SPDX-License-Identifier: Apache-2.0
"""Measures the Gemma 4 demo pair against its bar, with Paceline or with torch alone.

The prompts and the counting are those of `evaluate_demo.py`. The assistant drafts at position P-1
first, where it was trained and where Paceline drafts by default, then at P, as in transformers. The
bar is for P-1. `--engine torch` runs the training form of the assistant on the target's own output.
That is exact, because an assistant whose proposals are accepted drafts after that output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from evaluate_demo import NEW_TOKENS, Run, readable, run_engine
from evaluate_eagle3 import drafter_arguments
from gemma4_files import load_assistant, load_target
from gemma4_model import generate
from generation import until_end
from measures import acceptance, emitted_by_drafts
from texts import Texts
from tokenizers import Tokenizer
from train_gemma4 import Drafting

ACCEPTANCE_BAR = 2.2
# Position of the queries: that of the last token with KV, or one later.
DRAFT_POSITIONS = {"last": 0, "next": 1}


@torch.no_grad()
def simulate(
    target: Path, drafter: Path, texts: Sequence[str], *, num_drafts: int, draft_position: str
) -> Run:
    """Simulates greedy speculative decoding: the result that a correct engine must reach."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model = load_target(target, device)
    drafting = Drafting(model, load_assistant(drafter, device), num_drafts)
    prompts = [tokenizer.encode(text).ids for text in texts]
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    generated = generate(model, torch.tensor(rows, device=device), NEW_TOKENS, lengths)
    continuations = [until_end(ids) for ids in generated.tolist()]
    emitted = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        ids = torch.tensor([[*prompt, *continuation]], device=device)
        # The prefill emits the first token, so drafting starts after it.
        first = torch.tensor([len(prompt) + 1], device=device)
        own = Texts(ids, first, len(continuation))
        _, drafted = drafting.run(own, ahead=DRAFT_POSITIONS[draft_position])
        # Step s at index i drafts token i + 1 + s, starting from token i.
        drafts = [logits[0].argmax(-1).tolist() for logits in drafted]
        emitted.append(emitted_by_drafts(continuation, drafts))
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in continuations]
    return Run(continuations, emitted, decoded)


def main() -> None:
    """Prints the measures; exits with 1 if the bar is missed."""
    parser = drafter_arguments(__doc__, target="gemma4_code", drafter="gemma4_code_assistant")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N continuations")
    arguments = parser.parse_args()
    texts = [row["text"] for row in json.loads(arguments.prompts.read_text())]
    is_reached = False
    for position in DRAFT_POSITIONS:
        if arguments.engine == "paceline":
            run = run_engine(
                arguments.target,
                arguments.drafter,
                texts,
                num_drafts=arguments.num_speculative_tokens,
                method="gemma4_mtp",
                x={"draft_position": position, "adaptive": False},
            )
        else:
            run = simulate(
                arguments.target,
                arguments.drafter,
                texts,
                num_drafts=arguments.num_speculative_tokens,
                draft_position=position,
            )
        report = acceptance(run.continuations, run.emitted)
        length = report.mean_acceptance_length
        if position == "last":
            print(f"mean acceptance length {length:.3f} (bar {ACCEPTANCE_BAR})")
            print(f"counted tokens {report.counted_share:.3f}")
            print(f"tokenised by Python {readable(texts, run.texts)}/{len(texts)}")
            for text, more in list(zip(texts, run.texts, strict=True))[: arguments.show]:
                print(f"{'-' * 80}\n{text}{'~' * 40}\n{more}")
            is_reached = length >= ACCEPTANCE_BAR
        else:
            print(f"mean acceptance length {length:.3f} with drafts at position P")
    if not is_reached:
        sys.exit("the bar is missed")


if __name__ == "__main__":
    main()
