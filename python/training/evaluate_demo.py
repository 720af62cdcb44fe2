# SPDX-License-Identifier: Apache-2.0
"""Measures the demo checkpoints against their bars, with Paceline or with transformers alone.

`--engine paceline` decodes with Paceline and counts the tokens that its iterations emit. `--engine
transformers` needs no build of Paceline: the target continues the prompts greedily, and one forward
pass of the drafter per prompt gives its proposals. That is exact, because a drafter whose proposals
are accepted drafts after the target's own output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import load_corpus, token_stream
from demo_models import load_checkpoint, work_per_token
from generation import greedy_each, predictions
from measures import AcceptanceReport, acceptance, emitted_per_iteration, tokenizes
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import Gemma3ForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
NEW_TOKENS = 64
DRAFT_LENGTH = 4
WINDOW = 512

ACCEPTANCE_BAR = 2.2
COUNTED_BAR = 0.80
TOKENIZES_BAR = 0.60


@dataclass(frozen=True)
class Run:
    """An engine's output per prompt.

    Attributes:
        continuations: Token ids.
        emitted: Tokens emitted by each verify iteration.
        texts: The continuations as text.
    """

    continuations: list[list[int]]
    emitted: list[list[int]]
    texts: list[str]


def run_engine(
    target: Path,
    drafter: Path,
    texts: Sequence[str],
    *,
    num_drafts: int = DRAFT_LENGTH,
    **options: Any,
) -> Run:
    """Decodes greedily with Paceline; `options` are further keys of `speculative_config`."""
    from paceline import LLM, SamplingParams

    config = {
        "model": str(drafter),
        "num_speculative_tokens": num_drafts,
        "x": {"adaptive": False},
        **options,
    }
    continuations: list[list[int]] = [[] for _ in texts]
    emitted: list[list[int]] = [[] for _ in texts]
    decoded = [""] * len(texts)
    with LLM(target, speculative_config=config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        for chunk in llm.stream(list(texts), params):
            ids = list(chunk.token_ids)
            # The prefill emits the first token, not a verify iteration.
            if continuations[chunk.index] and ids:
                emitted[chunk.index].append(len(ids))
            continuations[chunk.index] += ids
            decoded[chunk.index] += chunk.text
    return Run(continuations, emitted, decoded)


def simulate(
    target: Gemma3ForCausalLM,
    drafter: Gemma3ForCausalLM,
    tokenizer: Tokenizer,
    texts: Sequence[str],
) -> Run:
    """Simulates greedy speculative decoding: the result that a correct engine must reach."""
    prompts = [tokenizer.encode(text).ids for text in texts]
    continuations = greedy_each(target, prompts, NEW_TOKENS)
    emitted = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        proposed = predictions(drafter, prompt, continuation)
        matches = [a == b for a, b in zip(proposed, continuation, strict=True)]
        emitted.append(emitted_per_iteration(matches, DRAFT_LENGTH))
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in continuations]
    return Run(continuations, emitted, decoded)


def readable(texts: Sequence[str], continuations: Sequence[str]) -> int:
    """Counts the prompts that Python's tokenizer reads together with their continuations."""
    return sum(tokenizes(text + more) for text, more in zip(texts, continuations, strict=True))


@torch.no_grad()
def nats_per_byte(model: Gemma3ForCausalLM, tokenizer: Tokenizer, stream: Sequence[int]) -> float:
    """The loss over a token stream, cut into windows; the first token of each is not scored."""
    lengths = [len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    nats, scored_bytes = 0.0, 0
    for start in range(0, len(stream) - WINDOW, WINDOW):
        ids = torch.tensor([stream[start : start + WINDOW]], device=model.device)
        logits = model(ids, use_cache=False).logits[0, :-1]
        nats += cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        scored_bytes += sum(lengths[i] for i in stream[start + 1 : start + WINDOW])
    return nats / scored_bytes


def report_bars(report: AcceptanceReport, readable_count: int, prompts: int) -> bool:
    """Prints each measure with its bar; returns whether all bars are reached."""
    print(f"mean acceptance length {report.mean_acceptance_length:.3f} (bar {ACCEPTANCE_BAR})")
    print(f"counted tokens {report.counted_share:.3f} (bar {COUNTED_BAR})")
    print(f"tokenised by Python {readable_count}/{prompts} (bar {TOKENIZES_BAR:.0%})")
    return (
        report.mean_acceptance_length >= ACCEPTANCE_BAR
        and report.counted_share >= COUNTED_BAR
        and readable_count >= TOKENIZES_BAR * prompts
    )


def main() -> None:
    """Evaluates the saved checkpoints; exits with 1 if they miss a bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, default=REPOSITORY / "python/paceline/demo")
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--stdlib", type=Path, help="also report the held-out losses")
    parser.add_argument("--engine", choices=("paceline", "transformers"), default="paceline")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N continuations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    target = load_checkpoint(arguments.demo / "gemma3_code", device)
    drafter = load_checkpoint(arguments.demo / "gemma3_code_draft", device)
    tokenizer = Tokenizer.from_file(str(arguments.demo / "gemma3_code" / "tokenizer.json"))
    texts = [row["text"] for row in json.loads(arguments.prompts.read_text())]

    for context in (0, 256):
        ratio = work_per_token(drafter.config, context) / work_per_token(target.config, context)
        print(f"drafter's work / target's work, {context} cached tokens: {ratio:.4f}")
    if arguments.stdlib is not None:
        stream = token_stream(tokenizer, load_corpus(arguments.stdlib).held_out)
        for label, model in (("target", target), ("drafter", drafter)):
            nats = nats_per_byte(model, tokenizer, stream)
            bits = nats / math.log(2)
            print(f"held-out loss of the {label}: {nats:.4f} nats, {bits:.4f} bits per byte")

    if arguments.engine == "paceline":
        demo = arguments.demo
        run = run_engine(demo / "gemma3_code", demo / "gemma3_code_draft", texts)
    else:
        run = simulate(target, drafter, tokenizer, texts)
    for text, continuation in list(zip(texts, run.texts, strict=True))[: arguments.show]:
        print(f"{'-' * 80}\n{text}{'~' * 40}\n{continuation}")
    report = acceptance(run.continuations, run.emitted)
    if not report_bars(report, readable(texts, run.texts), len(texts)):
        sys.exit("a bar is missed")


if __name__ == "__main__":
    main()
