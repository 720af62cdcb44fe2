# SPDX-License-Identifier: Apache-2.0
"""The training loop that all programs here share, its clock, and the loss of a draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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


class _Step:
    """A training step: both passes and the optimizer."""

    def __init__(
        self, model: nn.Module, loss_of: Callable[..., Tensor], rate: float, weight_decay: float
    ) -> None:
        self.model = model
        self.loss_of = loss_of
        self.optimizer = _optimizer(model, rate, weight_decay)
        self.device = next(model.parameters()).device

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def run(self, *inputs: Tensor | int) -> Tensor:
        """Runs the step; returns the loss."""
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            loss = self.loss_of(*inputs)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class _GraphStep(_Step):
    """A training step that a GPU runs as one CUDA graph, on copies of its inputs.

    Small models train several times as fast this way: the host no longer launches their kernels.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[..., Tensor],
        weight_decay: float,
        inputs: Sequence[Tensor],
    ) -> None:
        super().__init__(model, loss_of, 0.0, weight_decay)
        for group in self.optimizer.param_groups:
            group["lr"] = torch.zeros((), device=self.device)
            group["capturable"] = True
        self.inputs = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # at rate 0; allocates what a capture must not
                super().run(*self.inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss = super().run(*self.inputs)

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)

    def run(self, *inputs: Tensor | int) -> Tensor:
        """Runs the step; returns the loss."""
        for mine, value in zip(self.inputs, inputs, strict=True):
            assert isinstance(value, Tensor)
            mine.copy_(value)
        self.graph.replay()
        return self.loss


def fit(
    label: str,
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    *,
    rate: float,
    weight_decay: float,
    steps: int,
    until: float | None = None,
    note: Callable[[], str] | None = None,
    draw: Callable[[], Sequence[Tensor]] | None = None,
) -> None:
    """Trains with AdamW, a short warm-up and a linear decay of the learning rate to zero.

    Args:
        label: Prefix of the progress lines.
        model: The model to train; it is in evaluation mode afterwards.
        loss_of: Computes the loss of a training step, from its number or from what `draw` returns.
        rate: The highest learning rate.
        weight_decay: Weight decay of the matrices; vectors have none.
        steps: Number of training steps.
        until: If given, training runs until this moment instead, and the learning rate decays with
            the time. The first training step, which may compile, does not count.
        note: Returns further text for the progress lines.
        draw: Returns tensors of fixed shapes. Then a GPU runs training steps as a CUDA graph, so
            `loss_of` must neither wait for the device nor draw random numbers.
    """
    model.train()
    if draw is not None and next(model.parameters()).is_cuda:
        stepping: _Step = _GraphStep(model, loss_of, weight_decay, draw())
    else:
        stepping = _Step(model, loss_of, rate, weight_decay)
    warm_up = min(200, max(1, steps // 10))
    began = time.monotonic()
    step, reported, progress = 0, 0, 0.0
    while progress < 1:
        stepping.set_rate(rate * min((step + 1) / warm_up, 1 - progress))
        loss = stepping.run(*((step,) if draw is None else draw()))
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
