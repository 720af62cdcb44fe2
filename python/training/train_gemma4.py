# SPDX-License-Identifier: Apache-2.0
"""Trains the Gemma 4 demo pair: a small target and its MTP assistant.

The target goes through the same two stages as the Gemma 3 one, on the same files with the same
tokenizer. The assistant then learns to draft several tokens in a row behind every token of the
target's own greedy continuations and of the training files: from the second on it takes what it has
put out itself, as it does when it drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import token_stream
from fitting import Clock, draft_loss, fit
from gemma4_model import (
    Assistant,
    Target,
    View,
    assistant_config,
    compile_layers,
    generate,
    load_target,
    rounded_to_bf16,
    save_assistant,
    save_target,
    target_config,
)
from options import DEMO, add_minutes, corpus_from, options_for, plan_from
from texts import Texts, Windows, many_continuations
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import log_softmax
from train_demo import TargetPlan, TargetTrainer


@dataclass(frozen=True)
class Plan(TargetPlan):
    """Every number of the training; each is an option of the command line."""

    # Rows of continuations are as long as windows, and as many: one shape serves both.
    longest_prompt: int = 416
    unrepeat_steps: int = 2400
    unrepeat_prompts: int = 4096
    unrepeat_batch: int = 64
    unrepeat_tokens: int = 96

    assistant_steps: int = 6000
    assistant_rate: float = 3e-3
    assistant_decay: float = 0.05  # of its weights
    draft_steps: int = 3  # tokens drafted in a row
    draft_decay: float = 0.8  # weight of each over that of the one before
    choice_weight: float = 1.0  # of the loss of the target's first choice beside the divergence
    assistant_rounds: int = 20  # batches of continuations
    assistant_prompts: int = 4096  # continuations in each of them
    assistant_tokens: int = 96  # length of a continuation
    assistant_batch: int = 96  # continuations of a step
    assistant_windows: int = 32  # windows of the training files of a step

    # Parts of a limited time after which a stage ends.
    target_until: float = 0.45
    unrepeat_until: float = 0.63
    texts_until: float = 0.71  # no round of continuations starts later


class Drafting:
    """The target with an assistant: what a training step computes, and what drafts come to."""

    def __init__(self, target: Target, assistant: Assistant, draft_steps: int) -> None:
        self.target = target
        self.assistant = assistant
        self.draft_steps = draft_steps

    def run(self, texts: Texts, *, ahead: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Drafts behind the token before each one of the texts' stretches.

        Draft i of a row stands behind token P = first + i - 1 and its step s drafts token
        P + 1 + s.

        Args:
            texts: At least two tokens come before each stretch.
            ahead: See `View.of`.

        Returns:
            The target's logits for tokens first + j, `[rows, count + draft_steps - 1, vocabulary]`,
            so that step s of draft i is judged by those at j = i + s; and for each step the
            assistant's, `[rows, count, vocabulary]`.
        """
        ids, target, assistant = texts.ids, self.target, self.assistant
        with torch.no_grad():
            states = target.states(ids)
            judges = texts.at(states.hidden, texts.index(-1, self.draft_steps - 1))
            wanted = target.logits(judges)
            last = texts.index(-2)
            hidden = texts.at(states.hidden, last)
            view = View.of(assistant.config, states, last, ahead)
        offered = []
        for step in range(self.draft_steps):
            with torch.no_grad():
                token = target.embed(texts.at(ids, texts.index(step - 1)))
            logits, hidden = assistant(token, hidden, view)
            offered.append(logits)
        return wanted, offered

    def loss(self, texts: Texts, plan: Plan) -> tuple[Tensor, list[Tensor]]:
        """The loss over some texts, and how often each step's first choice is the target's."""
        logits, drafts = self.run(texts)
        wanted, choice = log_softmax(logits, -1), logits.argmax(-1)
        total = torch.zeros((), device=texts.ids.device)
        index = torch.arange(texts.count, device=texts.ids.device)
        agreements = []
        for step, offered in enumerate(drafts):
            judge = slice(step, step + texts.count)
            loss, agreement = draft_loss(
                log_softmax(offered, -1),
                wanted[:, judge],
                choice[:, judge],
                (index + step < texts.count).expand(len(texts.ids), -1),
                plan.choice_weight,
            )
            total = total + plan.draft_decay**step * loss
            agreements.append(agreement)
        return total, agreements


class Trainer(TargetTrainer[Target]):
    """The stages of the Gemma 4 pair."""

    plan: Plan

    def new_target(self) -> Target:
        """The target before its training."""
        torch.manual_seed(self.plan.seed)
        return self.prepared(Target(target_config(), self.plan.dropout).to(self.device))

    def prepared(self, model: Target) -> Target:
        """The target, compiled if that is wanted."""
        if self.compiled:
            compile_layers(model)
        return model

    def forward(self, model: Target) -> Callable[[Tensor], Tensor]:
        """The model as a function from token ids to logits."""
        logits = torch.compile(model.logits, dynamic=False) if self.compiled else model.logits
        return lambda ids: logits(model.states(ids).hidden)

    def generate(self, model: Target, prompts: Tensor, new_tokens: int) -> Tensor:
        """Greedy continuations of prompts of one length, without the prompts."""
        return generate(model, prompts, new_tokens)

    def train_assistant(
        self, target: Target, texts_until: float | None = None, until: float | None = None
    ) -> Assistant:
        """Stage three: drafts for the target."""
        plan = self.plan
        own = many_continuations(
            lambda: self.continuations(target, plan.assistant_prompts, plan.assistant_tokens),
            plan.assistant_rounds,
            texts_until,
        )
        torch.manual_seed(plan.seed)
        assistant = Assistant(assistant_config(), target.config.hidden).to(self.device)
        if self.compiled:
            compile_layers(assistant)
        drafting = Drafting(target, assistant, plan.draft_steps)
        length = own.ids.shape[1]
        agreements: list[Tensor] = []

        def loss(_step: int) -> Tensor:
            rows = torch.randint(
                len(own.ids), (plan.assistant_batch,), generator=self.windows.random
            )
            parts = [own.select(rows.to(self.device))]
            if plan.assistant_windows:
                count, earliest = plan.assistant_windows, plan.shortest_prompt
                parts.append(self.windows.texts(count, length, own.count, earliest))
            value, agreements[:] = drafting.loss(Texts.join(parts), plan)
            return value

        def note() -> str:
            shares = " ".join(f"{share.item():.3f}" for share in agreements)
            return f"the target's choice at each step {shares}"

        fit(
            "assistant",
            assistant,
            loss,
            rate=plan.assistant_rate,
            weight_decay=plan.assistant_decay,
            steps=plan.assistant_steps,
            until=until,
            note=note,
        )
        return assistant


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = options_for(__doc__, Plan)
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument(
        "--tokenizer", type=Path, default=DEMO / "gemma3_code", help="a folder with a tokenizer"
    )
    parser.add_argument(
        "--target",
        type=Path,
        help="a trained target: the assistant alone is trained, for all the time",
    )
    parser.add_argument("--no-compile", action="store_true", help="run the models eagerly")
    add_minutes(parser)
    return parser.parse_args()


def main() -> None:
    """Trains and saves both models, each as soon as it is there."""
    arguments = parse_arguments()
    clock = Clock.start(arguments.minutes)
    plan = plan_from(arguments, Plan)
    corpus = corpus_from(arguments)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    stream = token_stream(tokenizer, corpus.train)
    print(f"{len(corpus.train)} files, {len(stream)} tokens", flush=True)

    torch.set_float32_matmul_precision("high")
    windows = Windows(stream, torch.device(arguments.device), plan.seed)
    trainer = Trainer(plan, windows, compiled=not arguments.no_compile)
    if arguments.target is None:
        folder = arguments.out / "gemma4_code"
        target = trainer.train_target(clock.at(plan.target_until))
        save_target(target, folder, arguments.tokenizer)  # for the case that stage two fails
        trainer.unlearn_repetition(target, clock.at(plan.unrepeat_until))
        target = rounded_to_bf16(target)
        save_target(target, folder, arguments.tokenizer)
        print(f"wrote {folder}", flush=True)
        texts_until = clock.at(plan.texts_until)
    else:
        target = load_target(arguments.target, windows.stream.device)
        texts_until = clock.at(0.3)
    assistant = trainer.train_assistant(trainer.prepared(target), texts_until, clock.at(1.0))
    save_assistant(assistant, arguments.out / "gemma4_code_assistant")
    print(f"wrote {arguments.out / 'gemma4_code_assistant'}", flush=True)


if __name__ == "__main__":
    main()
