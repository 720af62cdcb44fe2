# SPDX-License-Identifier: Apache-2.0
"""Trains the demo checkpoints: a small Gemma 3 model of Python code and its drafter.

Three stages follow one another. The target learns the training files. It then unlearns to repeat
itself: where its own greedy continuations come back to a passage they already held, the tokens
that do so become less likely. Last, the drafter learns the target's distribution, on the training
files and on greedy continuations by the target, which is the text it will have to draft.
"""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from corpus import cut_prompts, token_stream
from corpus import train_tokenizer as train_bpe
from demo_models import (
    DRAFTER_WORK_BAR,
    add_dropout,
    drafter_config,
    rounded_to_bf16,
    save_checkpoint,
    target_config,
    work_per_token,
)
from fitting import fit
from generation import greedy
from measures import REPEATED_NGRAM
from options import DEMO, REPOSITORY, corpus_from, options_for, plan_from
from texts import Texts, Windows, continuations, many_continuations
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class TargetPlan:
    """The numbers of a target's training; each is an option of the command line."""

    seed: int = 0
    window: int = 512  # tokens of a training window
    batch: int = 64  # windows of a step
    dropout: float = 0.1
    weight_decay: float = 0.1

    target_steps: int = 5000
    target_rate: float = 3e-3

    shortest_prompt: int = 32  # tokens of the training files before a continuation
    longest_prompt: int = 320

    unrepeat_steps: int = 600
    unrepeat_rate: float = 1e-3
    unrepeat_weight: float = 1.5
    unrepeat_prompts: int = 1024  # continuations generated at once
    unrepeat_batch: int = 256  # of which a step uses so many
    unrepeat_tokens: int = 80  # length of a continuation
    unrepeat_from: int = 4  # tokens of the repetition that stay unpunished, plus one


@dataclass(frozen=True)
class Plan(TargetPlan):
    """Every number of the training; each is an option of the command line."""

    drafter_steps: int = 6000
    drafter_rate: float = 4e-3
    drafter_rounds: int = 40  # batches of continuations the drafter learns from
    drafter_prompts: int = 2048  # continuations in each of them
    drafter_batch: int = 96  # continuations of a step
    drafter_windows: int = 16  # windows of the training files of a step
    drafter_windows_weight: float = 0.5  # of their loss beside that of the continuations
    drafter_tokens: int = 96  # length of a continuation


class TargetTrainer(ABC, Generic[Model]):
    """The stages that make a target, for a model of any kind."""

    def __init__(self, plan: TargetPlan, windows: Windows, *, compiled: bool) -> None:
        self.plan = plan
        self.windows = windows
        self.device = windows.stream.device
        self.compiled = compiled

    @abstractmethod
    def new_target(self) -> Model:
        """The target before its training."""

    @abstractmethod
    def forward(self, model: Model) -> Callable[[Tensor], Tensor]:
        """The model as a function from token ids to logits."""

    @abstractmethod
    def generate(self, model: Model, prompts: Tensor, new_tokens: int) -> Tensor:
        """Greedy continuations of prompts of one length, without the prompts."""

    def train_target(self, until: float | None = None) -> Model:
        """Stage one: next-token prediction on the training files."""
        model = self.new_target()
        logits_of = self.forward(model)

        def loss(_step: int) -> Tensor:
            return self._next_token_loss(logits_of)

        self.fit("target", model, loss, self.plan.target_steps, self.plan.target_rate, until)
        return model

    def unlearn_repetition(self, model: Model, until: float | None = None) -> None:
        """Stage two: unlikelihood of the tokens with which the model repeats itself."""
        plan = self.plan
        logits_of = self.forward(model)
        batches: list[Texts] = []

        def loss(step: int) -> Tensor:
            if not batches:
                own = self.continuations(model, plan.unrepeat_prompts, plan.unrepeat_tokens)
                repeating = repetitions(own.learned(), REPEATED_NGRAM).any(1).float().mean()
                print(f"  step {step}: {repeating:.3f} of continuations repeat", flush=True)
                rows = torch.arange(plan.unrepeat_prompts, device=self.device)
                batches.extend(own.select(part) for part in rows.split(plan.unrepeat_batch))
            unlikelihood = self._repetition_loss(logits_of, batches.pop())
            return self._next_token_loss(logits_of) + plan.unrepeat_weight * unlikelihood

        self.fit("unrepeat", model, loss, plan.unrepeat_steps, plan.unrepeat_rate, until)

    def continuations(self, model: Model, count: int, new_tokens: int) -> Texts:
        """Greedy continuations of training prompts of one length, which each call draws anew."""
        was_training = model.training
        model.eval()
        # What autocast has cast without gradients must not serve the step that follows.
        with torch.autocast(
            self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False
        ):
            texts = continuations(
                lambda prompts, tokens: self.generate(model, prompts, tokens),
                self.windows,
                rows=count,
                shortest_prompt=self.plan.shortest_prompt,
                longest_prompt=self.plan.longest_prompt,
                new_tokens=new_tokens,
            )
        model.train(was_training)
        return texts

    def fit(
        self,
        label: str,
        model: nn.Module,
        loss_of: Callable[[int], Tensor],
        steps: int,
        rate: float,
        until: float | None = None,
    ) -> None:
        """Trains a model with the plan's weight decay."""
        decay = self.plan.weight_decay
        fit(label, model, loss_of, rate=rate, weight_decay=decay, steps=steps, until=until)

    def _next_token_loss(self, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        ids = self.windows.sample(self.plan.batch, self.plan.window + 1)
        logits = logits_of(ids[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def _repetition_loss(self, logits_of: Callable[[Tensor], Tensor], own: Texts) -> Tensor:
        """The mean of -log(1 - p) over the punished tokens of the continuations."""
        generated = own.learned()
        punished = repetitions(generated, self.plan.unrepeat_from)
        logits = own.at(logits_of(own.ids), own.index(-1)).float()
        chosen = log_softmax(logits, -1).gather(-1, generated.unsqueeze(-1)).squeeze(-1)
        penalty = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4))
        return (penalty * punished).sum() / punished.sum().clamp(min=1)


class Trainer(TargetTrainer[Gemma3ForCausalLM]):
    """The stages of the Gemma 3 pair."""

    plan: Plan

    def new_target(self) -> Gemma3ForCausalLM:
        """The target before its training."""
        return self._new_model(target_config(), self.plan.dropout)

    def forward(self, model: Gemma3ForCausalLM) -> Callable[[Tensor], Tensor]:
        """The model as a function from token ids to logits."""
        call = torch.compile(model, dynamic=False) if self.compiled else model
        return lambda ids: call(ids, use_cache=False).logits

    def generate(self, model: Gemma3ForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
        """Greedy continuations of prompts of one length, without the prompts."""
        return greedy(model, prompts, new_tokens)

    def distil(self, target: Gemma3ForCausalLM) -> Gemma3ForCausalLM:
        """Stage three: the drafter learns the target's distribution and its first choices."""
        plan = self.plan
        own = many_continuations(
            lambda: self.continuations(target, plan.drafter_prompts, plan.drafter_tokens),
            plan.drafter_rounds,
        )
        model = self._new_model(drafter_config(), dropout=0.0)
        logits_of, target_logits_of = self.forward(model), self.forward(target)

        def loss(_step: int) -> Tensor:
            rows = torch.randint(len(own.ids), (plan.drafter_batch,), generator=self.windows.random)
            batch = own.select(rows.to(self.device))
            judged = batch.index(-1)
            text = self.windows.sample(plan.drafter_windows, plan.window)
            with torch.no_grad():
                own_target = batch.at(target_logits_of(batch.ids), judged)
                text_target = target_logits_of(text)
            on_own = distillation_loss(batch.at(logits_of(batch.ids), judged), own_target)
            on_text = distillation_loss(logits_of(text), text_target)
            return on_own + plan.drafter_windows_weight * on_text

        self.fit("drafter", model, loss, plan.drafter_steps, plan.drafter_rate)
        return model

    def _new_model(self, config: Gemma3TextConfig, dropout: float) -> Gemma3ForCausalLM:
        torch.manual_seed(self.plan.seed)
        model = Gemma3ForCausalLM(config).to(self.device)
        if dropout > 0:
            add_dropout(model, dropout)
        return model


def distillation_loss(offered: Tensor, wanted: Tensor) -> Tensor:
    """Divergence from the wanted logits plus the loss of their first choice, per position."""
    log_wanted = log_softmax(wanted.flatten(0, 1).float(), -1)
    log_offered = log_softmax(offered.flatten(0, 1).float(), -1)
    divergence = kl_div(log_offered, log_wanted, reduction="batchmean", log_target=True)
    choice = -log_offered.gather(-1, log_wanted.argmax(-1, keepdim=True)).mean()
    return divergence + choice


def repetitions(generated: Tensor, first: int) -> Tensor:
    """Marks tokens inside an n-gram that its continuation already held, n = REPEATED_NGRAM.

    The first `first - 1` tokens of a repeated n-gram stay unmarked: a line may well begin like an
    earlier one, it is to end differently.
    """
    same = generated.unsqueeze(2) == generated.unsqueeze(1)
    ends = same.tril(-1)
    for back in range(1, REPEATED_NGRAM):
        ends[:, back:, back:] &= same[:, :-back, :-back]
        ends[:, :back] = False
        ends[:, :, :back] = False
    last_of_repeat = ends.any(2)
    marked = last_of_repeat.clone()
    for back in range(1, REPEATED_NGRAM - first + 1):
        marked[:, :-back] |= last_of_repeat[:, back:]
    return marked


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = options_for(__doc__, Plan)
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--no-compile", action="store_true", help="run the models eagerly")
    return parser.parse_args()


def main() -> None:
    """Trains, rounds and saves both models and the evaluation prompts."""
    arguments = parse_arguments()
    plan = plan_from(arguments, Plan)
    ratio = work_per_token(drafter_config()) / work_per_token(target_config())
    print(f"work of the drafter over that of the target: {ratio:.4f}")
    if ratio >= DRAFTER_WORK_BAR:
        sys.exit(f"the drafter's work must stay below {DRAFTER_WORK_BAR} of the target's")
    corpus = corpus_from(arguments)

    tokenizer = train_bpe(corpus.train.values())
    prompts = cut_prompts(corpus.held_out, tokenizer, 100)
    stream = token_stream(tokenizer, corpus.train)
    print(f"{len(corpus.train)} files, {len(stream)} tokens; {len(corpus.held_out)} held out")

    torch.set_float32_matmul_precision("high")
    windows = Windows(stream, torch.device(arguments.device), plan.seed)
    trainer = Trainer(plan, windows, compiled=not arguments.no_compile)
    target = trainer.train_target()
    trainer.unlearn_repetition(target)
    target = rounded_to_bf16(target)
    save_checkpoint(target, tokenizer, arguments.out / "gemma3_code")
    drafter = trainer.distil(target)
    save_checkpoint(drafter, tokenizer, arguments.out / "gemma3_code_draft")

    arguments.prompts.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(prompt) for prompt in prompts]
    arguments.prompts.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
