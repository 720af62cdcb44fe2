# SPDX-License-Identifier: Apache-2.0
"""The training loop that all programs here share, its clock, and the loss of a draft."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Training steps between two looks at the clock. A look waits for the device.
_STEPS_IN_FLIGHT = 10


@dataclass(frozen=True)
class Clock:
    """The time limit of a program, if there is one.

    Attributes:
        began: Start of the program, by `time.monotonic`.
        seconds: The limit; None: the numbers of training steps decide.
    """

    began: float
    seconds: float | None = None

    @classmethod
    def start(cls, minutes: float | None) -> Clock:
        """Returns a clock that starts now."""
        return cls(time.monotonic(), None if minutes is None else 60 * minutes)

    def at(self, part: float) -> float | None:
        """The moment at which `part` (0 to 1) of the time is over; None without a limit."""
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
    """Trains with AdamW, a short warm-up and a linear decay of the learning rate to zero.

    Args:
        label: Prefix of the progress lines.
        model: The model to train; it is in evaluation mode afterwards.
        loss_of: Computes the loss of a training step.
        rate: The highest learning rate.
        weight_decay: Weight decay of the matrices; vectors have none.
        steps: Number of training steps.
        until: If given, training runs until this moment instead, and the learning rate decays with
            the time. The first training step, which may compile, does not count.
        note: Returns further text for the progress lines.
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
    draft_logprobs: Tensor,
    target_logprobs: Tensor,
    choice: Tensor,
    is_learned: Tensor,
    choice_weight: float,
) -> tuple[Tensor, Tensor]:
    """Computes the divergence from the target plus the cross-entropy of the target's top token.

    Args:
        draft_logprobs: Log-probabilities of the drafter, `[..., vocabulary]`.
        target_logprobs: Log-probabilities of the target, the same shape.
        choice: The target's most likely token, `[...]`; ignored outside `is_learned`.
        is_learned: The positions that count, `[...]`.
        choice_weight: Weight of the cross-entropy.

    Returns:
        The mean over these positions, and the share of them at which the drafter's most likely
        token is the target's.
    """
    weights = is_learned / is_learned.sum().clamp(min=1)
    divergence = (target_logprobs.exp() * (target_logprobs - draft_logprobs)).sum(-1)
    first = choice.clamp(min=0).unsqueeze(-1)
    missed = -draft_logprobs.gather(-1, first).squeeze(-1)
    is_same = draft_logprobs.argmax(-1) == choice
    loss = ((divergence + choice_weight * missed) * weights).sum()
    return loss, (is_same * weights).sum().detach()
