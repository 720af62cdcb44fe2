# SPDX-License-Identifier: Apache-2.0
"""What every training here shares: the loop, its clock, and the loss of a drafted token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Steps between two looks at the clock: a device runs behind the program that feeds it.
_STEPS_IN_FLIGHT = 10


@dataclass(frozen=True)
class Clock:
    """The time a program may take, if there is a limit.

    Attributes:
        began: When it started, by `time.monotonic`.
        seconds: What it may take; None: as long as its numbers of steps say.
    """

    began: float
    seconds: float | None = None

    @classmethod
    def start(cls, minutes: float | None) -> Clock:
        """A clock that starts now."""
        return cls(time.monotonic(), None if minutes is None else 60 * minutes)

    def at(self, part: float) -> float | None:
        """The moment when that part of the time is over; None without a limit."""
        return None if self.seconds is None else self.began + part * self.seconds


def fit(
    label: str,
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    *,
    rate: float,
    weight_decay: float,
    steps: int,
    until: float | None = None,
    note: Callable[[], str] | None = None,
) -> None:
    """AdamW with a short warm-up and a linear way down to zero.

    Args:
        label: What the lines of progress begin with.
        model: What learns; it is in evaluation mode afterwards.
        loss_of: The loss of a step.
        rate: The highest learning rate.
        weight_decay: Of the matrices; vectors have none.
        steps: How many there are.
        until: If given, steps go on up to this moment instead, and the rate falls with the time.
            The first step, which may compile, does not count.
        note: More for the lines of progress.
    """
    model.train()
    optimizer = _optimizer(model, rate, weight_decay)
    device = next(model.parameters()).device
    warm_up = min(200, max(1, steps // 10))
    began = time.monotonic()
    step, reported, progress = 0, 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm_up, 1 - progress)
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
            loss = loss_of(step)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if until is None:
            progress = step / steps
        elif step == 1 or step % _STEPS_IN_FLIGHT == 0:
            loss.item()
            if step == 1:
                began = time.monotonic()
            progress = (time.monotonic() - began) / max(until - began, 1e-9)
        if int(10 * progress) > reported:
            reported = int(10 * progress)
            seconds = time.monotonic() - began
            more = "" if note is None else ", " + note()
            print(f"{label} {step}: loss {loss.item():.4f}{more}, {seconds:.0f} s", flush=True)
    model.eval()


def _optimizer(model: nn.Module, rate: float, weight_decay: float) -> torch.optim.Optimizer:
    weights = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": weight_decay},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.95),
        fused=weights[0].is_cuda,
    )


def draft_loss(
    offered: Tensor, wanted: Tensor, choice: Tensor, is_learned: Tensor, choice_weight: float
) -> tuple[Tensor, Tensor]:
    """Divergence from the target plus the loss of the target's first choice.

    Args:
        offered: Log-probabilities of the drafter, `[..., vocabulary]`.
        wanted: Those of the target.
        choice: The target's first choice, `[...]`; anything where nothing is learned.
        is_learned: The positions that count, `[...]`.
        choice_weight: Of the second part.

    Returns:
        The mean over these positions, and how often the drafter's first choice is the target's.
    """
    weights = is_learned / is_learned.sum().clamp(min=1)
    divergence = (wanted.exp() * (wanted - offered)).sum(-1)
    first = choice.clamp(min=0).unsqueeze(-1)
    missed = -offered.gather(-1, first).squeeze(-1)
    is_same = offered.argmax(-1) == choice
    loss = ((divergence + choice_weight * missed) * weights).sum()
    return loss, (is_same * weights).sum().detach()
