# SPDX-License-Identifier: Apache-2.0
"""Trains the demo checkpoints: a small Gemma 3 model of Python code and its drafter.

There are three stages. First the target learns the training files. Then it learns not to repeat
itself: where its greedy continuations return to an earlier passage, the repeating tokens become
less likely. Last, the drafter learns the target's distribution, on the training files and on the
target's greedy continuations, which are the output that it will draft.
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
    """The numbers of a target's training; each is a command-line option."""

    seed: int = 0
    window: int = 512  # tokens of a training window
    batch: int = 64  # windows per training step
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
    unrepeat_batch: int = 256  # continuations per training step
    unrepeat_tokens: int = 80  # length of a continuation
    unrepeat_from: int = 4  # first token of a repetition that is punished, counted from 1


@dataclass(frozen=True)
class Plan(TargetPlan):
    """All numbers of the training; each is a command-line option."""

    drafter_steps: int = 6000
    drafter_rate: float = 4e-3
    drafter_rounds: int = 40  # batches of continuations the drafter learns from
    drafter_prompts: int = 2048  # continuations in each batch
    drafter_batch: int = 96  # continuations per training step
    drafter_windows: int = 16  # windows of the training files per training step
    drafter_windows_weight: float = 0.5  # weight of their loss; the continuations have 1
    drafter_tokens: int = 96  # length of a continuation


class TargetTrainer(ABC, Generic[Model]):
    """The two stages that train a target of any architecture."""

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
        """Stage two: an unlikelihood loss on the tokens with which the model repeats itself."""
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
        """Continues training prompts greedily; each call draws one prompt length."""
        was_training = model.training
        model.eval()
        # The training step that follows needs gradients, so it must not reuse cached casts.
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
        """Mean of -log(1 - p) over the punished tokens of the continuations."""
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
        """Stage three: the drafter learns the target's distribution and its most likely tokens."""
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


def distillation_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Divergence from the target plus the cross-entropy of its most likely token, per position."""
    target = log_softmax(target_logits.flatten(0, 1).float(), -1)
    draft = log_softmax(draft_logits.flatten(0, 1).float(), -1)
    divergence = kl_div(draft, target, reduction="batchmean", log_target=True)
    choice = -draft.gather(-1, target.argmax(-1, keepdim=True)).mean()
    return divergence + choice


def repetitions(generated: Tensor, first: int) -> Tensor:
    """Marks tokens of n-grams that occurred earlier in their continuation, n = REPEATED_NGRAM.

    The first `first - 1` tokens of a repeated n-gram stay unmarked: a line may begin like an
    earlier one, but should end differently.
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
    """Parses the command line."""
    parser = options_for(__doc__, Plan)
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--no-compile", action="store_true", help="run the models eagerly")
    return parser.parse_args()


def main() -> None:
    """Trains both models, rounds them to bf16, and saves them with the evaluation prompts."""
    arguments = parse_arguments()
    plan = plan_from(arguments, Plan)
    ratio = work_per_token(drafter_config()) / work_per_token(target_config())
    print(f"drafter's work / target's work: {ratio:.4f}")
    if ratio >= DRAFTER_WORK_BAR:
        sys.exit(
            f"the drafter's work is {ratio:.4f} of the target's; it must stay below "
            f"{DRAFTER_WORK_BAR}: make drafter_config smaller"
        )
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
