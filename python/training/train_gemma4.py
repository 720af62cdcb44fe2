# SPDX-License-Identifier: Apache-2.0
"""Trains the Gemma 4 demo pair: a small target and its MTP assistant.

The target goes through the same two stages as the Gemma 3 target, on the same files with the same
tokenizer. Then the assistant learns to draft several tokens in a row after every token of the
target's greedy continuations and of the training files. From the second draft on it reads its own
output, as it does in inference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import token_stream
from fitting import Clock, draft_loss, fit
from gemma4_files import load_target, save_assistant, save_target
from gemma4_model import (
    Assistant,
    Target,
    View,
    assistant_config,
    compile_layers,
    generate,
    rounded_to_bf16,
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
    """All numbers of the training; each is a command-line option."""

    # Continuations have the shape of a batch of windows, so the model is compiled once for both.
    longest_prompt: int = 416
    unrepeat_steps: int = 2400
    unrepeat_prompts: int = 4096
    unrepeat_batch: int = 64
    unrepeat_tokens: int = 96

    assistant_steps: int = 6000
    assistant_rate: float = 3e-3
    assistant_decay: float = 0.05  # weight decay
    draft_steps: int = 3  # tokens drafted in a row
    draft_decay: float = 0.8  # weight of a draft's loss relative to that of the previous draft
    choice_weight: float = 1.0  # weight of the target's most likely token; the divergence has 1
    assistant_rounds: int = 20  # batches of continuations
    assistant_prompts: int = 4096  # continuations in each batch
    assistant_tokens: int = 96  # length of a continuation
    assistant_batch: int = 96  # continuations per training step
    assistant_windows: int = 32  # windows of the training files per training step

    # Shares of a limited time after which a stage ends.
    target_until: float = 0.45
    unrepeat_until: float = 0.63
    texts_until: float = 0.71  # no batch of continuations starts later


class Drafting:
    """The target with an assistant: the forward pass of a training step and of the evaluation."""

    def __init__(self, target: Target, assistant: Assistant, draft_steps: int) -> None:
        self.target = target
        self.assistant = assistant
        self.draft_steps = draft_steps

    def run(self, texts: Texts, *, ahead: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Starts drafting before every token of the stretches of the texts.

        Draft i of a row starts after token P = first + i - 1, and its step s drafts token
        P + 1 + s.

        Args:
            texts: Texts with at least two tokens before each stretch.
            ahead: See `View.of`.

        Returns:
            The target's logits for tokens first + j, `[rows, count + draft_steps - 1, vocabulary]`,
            where step s of draft i is compared with j = i + s; and for each step the assistant's
            logits, `[rows, count, vocabulary]`.
        """
        ids, target, assistant = texts.ids, self.target, self.assistant
        with torch.no_grad():
            states = target.states(ids)
            judged = texts.at(states.hidden, texts.index(-1, self.draft_steps - 1))
            target_logits = target.logits(judged)
            last = texts.index(-2)
            hidden = texts.at(states.hidden, last)
            view = View.of(assistant.config, states, last, ahead)
        drafted = []
        for step in range(self.draft_steps):
            with torch.no_grad():
                token = target.embed(texts.at(ids, texts.index(step - 1)))
            logits, hidden = assistant(token, hidden, view)
            drafted.append(logits)
        return target_logits, drafted

    def loss(self, texts: Texts, plan: Plan) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss over some texts, and each step's agreement with the target."""
        logits, drafts = self.run(texts)
        target_logprobs, choice = log_softmax(logits, -1), logits.argmax(-1)
        total = torch.zeros((), device=texts.ids.device)
        index = torch.arange(texts.count, device=texts.ids.device)
        agreements = []
        for step, draft_logits in enumerate(drafts):
            targets = slice(step, step + texts.count)
            loss, agreement = draft_loss(
                log_softmax(draft_logits, -1),
                target_logprobs[:, targets],
                choice[:, targets],
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
        """Returns the target, compiled if `compiled` is set."""
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
            return f"agreement with the target at each step {shares}"

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
    """Parses the command line."""
    parser = options_for(__doc__, Plan)
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument(
        "--tokenizer", type=Path, default=DEMO / "gemma3_code", help="folder with the tokenizer"
    )
    parser.add_argument(
        "--target",
        type=Path,
        help="folder of a trained target; then only the assistant is trained, for the whole time",
    )
    parser.add_argument("--no-compile", action="store_true", help="run the models eagerly")
    add_minutes(parser)
    return parser.parse_args()


def main() -> None:
    """Trains both models and saves each as soon as it is complete."""
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
        save_target(target, folder, arguments.tokenizer)  # in case stage two fails
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
