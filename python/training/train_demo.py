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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from corpus import END_OF_TEXT_ID, CorpusError, cut_prompts, load_corpus, token_stream
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
from generation import greedy
from measures import REPEATED_NGRAM
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Plan:
    """Every number of the training; each is an option of the command line."""

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

    drafter_steps: int = 6000
    drafter_rate: float = 4e-3
    drafter_rounds: int = 40  # batches of continuations the drafter learns from
    drafter_prompts: int = 2048  # continuations in each of them
    drafter_batch: int = 96  # continuations of a step
    drafter_windows: int = 16  # windows of the training files of a step
    drafter_windows_weight: float = 0.5  # of their loss beside that of the continuations
    drafter_tokens: int = 96  # length of a continuation


@dataclass(frozen=True)
class Continuations:
    """Prompts with greedy continuations, filled up behind to a common length.

    What fills a row up comes after everything that is learned from, so no causal model sees it.
    """

    ids: Tensor  # [rows, length]
    first: Tensor  # [rows] index of the first generated token
    new_tokens: int

    def select(self, rows: Tensor) -> Continuations:
        """The given rows, in their order."""
        return Continuations(self.ids[rows], self.first[rows], self.new_tokens)

    def generated(self) -> Tensor:
        """The generated tokens, `[rows, new_tokens]`."""
        return self.ids.gather(1, self._positions())

    def logits_of_generated(self, logits: Tensor) -> Tensor:
        """The logits that predict the generated tokens, `[rows, new_tokens, vocabulary]`."""
        rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        return logits[rows, self._positions() - 1]

    def _positions(self) -> Tensor:
        return self.first.unsqueeze(1) + torch.arange(self.new_tokens, device=self.first.device)


class Windows:
    """Random windows of a token stream that lies on the device."""

    def __init__(self, stream: list[int], device: torch.device, seed: int) -> None:
        self.stream = torch.tensor(stream, device=device)
        self.random = torch.Generator().manual_seed(seed)

    def sample(self, count: int, length: int) -> Tensor:
        """`[count, length]` token ids; half of the windows open with END_OF_TEXT.

        Without that the models would know the token only from the starts of files, and a prompt
        that an engine puts it in front of would surprise them.
        """
        starts = torch.randint(len(self.stream) - length, (count, 1), generator=self.random)
        marked = torch.rand(count, generator=self.random) < 0.5
        device = self.stream.device
        windows = self.stream[starts.to(device) + torch.arange(length, device=device)]
        windows[marked.to(device), 0] = END_OF_TEXT_ID
        return windows


class Trainer:
    """Holds what the stages share: the plan, the device, and the training text."""

    def __init__(self, plan: Plan, windows: Windows, *, compiled: bool) -> None:
        self.plan = plan
        self.windows = windows
        self.device = windows.stream.device
        self.compiled = compiled

    def train_target(self) -> Gemma3ForCausalLM:
        """Stage one: next-token prediction on the training files."""
        plan = self.plan
        model = self._new_model(target_config(), plan.dropout)
        logits_of = self._forward(model)

        def loss(_step: int) -> Tensor:
            return self._next_token_loss(logits_of)

        self._fit("target", model, loss, plan.target_steps, plan.target_rate)
        return model

    def unlearn_repetition(self, model: Gemma3ForCausalLM) -> None:
        """Stage two: unlikelihood of the tokens with which the model repeats itself."""
        plan = self.plan
        logits_of = self._forward(model)
        batches: list[Continuations] = []

        def loss(step: int) -> Tensor:
            if not batches:
                own = self._continuations(model, plan.unrepeat_prompts, plan.unrepeat_tokens)
                repeating = repetitions(own.generated(), REPEATED_NGRAM).any(1).float().mean()
                print(f"  step {step}: {repeating:.3f} of continuations repeat")
                rows = torch.arange(plan.unrepeat_prompts, device=self.device)
                batches.extend(own.select(part) for part in rows.split(plan.unrepeat_batch))
            unlikelihood = self._repetition_loss(logits_of, batches.pop())
            return self._next_token_loss(logits_of) + plan.unrepeat_weight * unlikelihood

        self._fit("unrepeat", model, loss, plan.unrepeat_steps, plan.unrepeat_rate)

    def distil(self, target: Gemma3ForCausalLM) -> Gemma3ForCausalLM:
        """Stage three: the drafter learns the target's distribution and its first choices."""
        plan = self.plan
        rounds = [
            self._continuations(target, plan.drafter_prompts, plan.drafter_tokens)
            for _ in range(plan.drafter_rounds)
        ]
        continuations = Continuations(
            torch.cat([part.ids for part in rounds]),
            torch.cat([part.first for part in rounds]),
            plan.drafter_tokens,
        )
        model = self._new_model(drafter_config(), dropout=0.0)
        logits_of, target_logits_of = self._forward(model), self._forward(target)

        def loss(_step: int) -> Tensor:
            rows = torch.randint(
                len(continuations.ids), (plan.drafter_batch,), generator=self.windows.random
            )
            own = continuations.select(rows.to(self.device))
            text = self.windows.sample(plan.drafter_windows, plan.window)
            with torch.no_grad():
                own_target = own.logits_of_generated(target_logits_of(own.ids))
                text_target = target_logits_of(text)
            on_own = distillation_loss(own.logits_of_generated(logits_of(own.ids)), own_target)
            on_text = distillation_loss(logits_of(text), text_target)
            return on_own + plan.drafter_windows_weight * on_text

        self._fit("drafter", model, loss, plan.drafter_steps, plan.drafter_rate)
        return model

    def _new_model(self, config: Gemma3TextConfig, dropout: float) -> Gemma3ForCausalLM:
        torch.manual_seed(self.plan.seed)
        model = Gemma3ForCausalLM(config).to(self.device)
        if dropout > 0:
            add_dropout(model, dropout)
        return model

    def _forward(self, model: Gemma3ForCausalLM) -> Callable[[Tensor], Tensor]:
        """The model as a function from token ids to logits."""
        call = torch.compile(model, dynamic=False) if self.compiled else model
        return lambda ids: call(ids, use_cache=False).logits

    def _next_token_loss(self, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        ids = self.windows.sample(self.plan.batch, self.plan.window + 1)
        logits = logits_of(ids[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def _continuations(
        self, model: Gemma3ForCausalLM, count: int, new_tokens: int
    ) -> Continuations:
        """Greedy continuations of training prompts, whose length each call draws anew.

        With one fixed length the target unlearns repetition at the positions behind it alone.
        """
        plan = self.plan
        choices = (plan.shortest_prompt, plan.longest_prompt + 1)
        length = int(torch.randint(*choices, (), generator=self.windows.random))
        prompts = self.windows.sample(count, length)
        model.eval()
        generated = greedy(model, prompts, new_tokens)
        model.train()
        filling = prompts.new_full((count, plan.longest_prompt - length), END_OF_TEXT_ID)
        return Continuations(
            ids=torch.cat([prompts, generated, filling], dim=1),
            first=torch.full((count,), length, device=self.device),
            new_tokens=new_tokens,
        )

    def _repetition_loss(
        self, logits_of: Callable[[Tensor], Tensor], continuations: Continuations
    ) -> Tensor:
        """The mean of -log(1 - p) over the punished tokens of the continuations."""
        generated = continuations.generated()
        punished = repetitions(generated, self.plan.unrepeat_from)
        logits = continuations.logits_of_generated(logits_of(continuations.ids)).float()
        chosen = log_softmax(logits, -1).gather(-1, generated.unsqueeze(-1)).squeeze(-1)
        penalty = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4))
        return (penalty * punished).sum() / punished.sum().clamp(min=1)

    def _fit(
        self,
        label: str,
        model: nn.Module,
        loss_of: Callable[[int], Tensor],
        steps: int,
        rate: float,
    ) -> None:
        """AdamW with a short warm-up and a linear way down to zero."""
        model.train()
        optimizer = self._optimizer(model, rate)
        warm_up = min(200, max(1, steps // 10))
        falling = steps - warm_up + 1
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / falling)
        )
        began = time.monotonic()
        for step in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
                loss = loss_of(step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if (step + 1) % max(1, steps // 10) == 0:
                seconds = time.monotonic() - began
                print(f"{label} {step + 1}/{steps}: loss {loss.item():.4f}, {seconds:.0f} s")
        model.eval()

    def _optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        vectors = [weight for weight in model.parameters() if weight.dim() == 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.plan.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )


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
    """The command line: places, the device, and one option for each field of the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(argparse.__file__).parent,
        help="standard library of the pinned CPython (default: that of this interpreter)",
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "python/paceline/demo")
    parser.add_argument(
        "--prompts", type=Path, default=REPOSITORY / "tests/support/demo_prompts.json"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run the models eagerly")
    for field in fields(Plan):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    return parser.parse_args()


def main() -> None:
    """Trains, rounds and saves both models and the evaluation prompts."""
    arguments = parse_arguments()
    plan = Plan(**{field.name: getattr(arguments, field.name) for field in fields(Plan)})
    ratio = work_per_token(drafter_config()) / work_per_token(target_config())
    print(f"work of the drafter over that of the target: {ratio:.4f}")
    if ratio >= DRAFTER_WORK_BAR:
        sys.exit(f"the drafter's work must stay below {DRAFTER_WORK_BAR} of the target's")
    try:
        corpus = load_corpus(arguments.stdlib)
    except CorpusError as error:
        sys.exit(str(error))

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
