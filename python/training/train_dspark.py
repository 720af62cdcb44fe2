# SPDX-License-Identifier: Apache-2.0
"""Trains a DSpark drafter for the demo target.

The drafter learns the target's distribution for the tokens of a block that starts at a random
position. The texts are the target's greedy continuations, which are the output that it will draft,
and windows of the training files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from drafters import DrafterPlan, Material, drafter_options
from dspark_model import DSpark, DSparkConfig, save_dspark
from fitting import Clock, fit
from options import plan_from
from texts import Texts
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear, log_softmax, softmax
from transformers import Gemma3ForCausalLM

# Texts in one forward pass of the target.
_ROWS_AT_ONCE: Final = 256


@dataclass(frozen=True)
class Plan(DrafterPlan):
    """All numbers of the training; each is a command-line option."""

    steps: int = 16000
    rate: float = 3e-3
    rounds: int = 10
    batch: int = 48  # texts per training step
    windows: int = 10  # windows of the training files for each `batch` continuations
    blocks: int = 32  # blocks of each text in a training step
    block_decay: float = 4.0  # a draft's loss has the weight exp(-i / block_decay), i from 0
    choice_weight: float = 1.0  # weight of the target's most likely token
    distance_weight: float = 0.5  # weight of the L1 distance from the target's distribution
    confidence_weight: float = 1.0

    block: int = 7
    taps: str = "0,1,2,3,4"
    layers: int = 4
    intermediate: int = 640
    rank: int = 96


def new_drafter(plan: Plan, target: Gemma3ForCausalLM) -> DSpark:
    """The drafter before its training."""
    torch.manual_seed(plan.seed)
    hidden = target.config.hidden_size
    config = DSparkConfig(
        target_hidden=hidden,
        target_layers=target.config.num_hidden_layers,
        hidden=hidden,
        taps=tuple(int(tap) for tap in plan.taps.split(",")),
        layers=plan.layers,
        intermediate=plan.intermediate,
        block=plan.block,
        rank=plan.rank,
        max_position=target.config.max_position_embeddings,
    )
    return DSpark(config, target.lm_head.weight.detach()).to(target.device)


def states_of(
    target: Gemma3ForCausalLM, texts: Texts, taps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Runs the target over texts.

    Returns:
        The residual streams that leave the layers `taps`, `[rows, length, taps * hidden]`; and the
        input of the LM head for each token of the stretches, `[rows, count, hidden]`.
    """
    with torch.no_grad():
        out = target.model(texts.ids, use_cache=False, output_hidden_states=True)
    # hidden_states[0] is the embedding.
    streams = torch.cat([out.hidden_states[1 + tap] for tap in taps], -1)
    return streams, texts.at(out.last_hidden_state, texts.index())


class Pool:
    """Texts with the target's states, from which training steps draw.

    The target runs once over each text instead of in every training step; in bf16 a text of 416
    tokens takes 1 MB.

    Attributes:
        scale: The root mean square of each column of the streams, `[taps * hidden]`. Those of
            the demo target range from 1 to 27, so the streams here are divided by it.
    """

    def __init__(self, plan: Plan, drafter: DSpark, material: Material) -> None:
        self.plan = plan
        self.random = material.windows.random
        self.texts = texts = material.texts(plan)
        device = texts.ids.device
        on_gpu = device.type == "cuda"
        rows, length = texts.ids.shape
        taps, size = drafter.config.taps, drafter.config.target_hidden
        kept = {"dtype": torch.bfloat16 if on_gpu else torch.float32, "device": device}
        self.streams = torch.empty((rows, length, len(taps) * size), **kept)
        self.hidden = torch.empty((rows, texts.count, size), **kept)
        for part in torch.arange(rows, device=device).split(_ROWS_AT_ONCE):
            with torch.autocast(device.type, torch.bfloat16, on_gpu):
                streams, hidden = states_of(material.target, texts.select(part), taps)
            if part[0] == 0:
                self.scale = streams.float().pow(2).mean((0, 1)).sqrt()
            self.streams[part] = (streams.float() / self.scale).to(**kept)
            self.hidden[part] = hidden.to(**kept)
        print(f"the target ran over {rows} texts", flush=True)

    def draw(self) -> tuple[Tensor, ...]:
        """Returns the inputs of a `BlockLoss`: random texts, and where blocks start in them.

        That is anywhere in the stretch but on its last token.
        """
        plan, texts = self.plan, self.texts
        rows = torch.randint(len(texts.ids), (plan.batch,), generator=self.random)
        scores = torch.rand(plan.batch, texts.count - 1, generator=self.random)
        starts = scores.topk(min(plan.blocks, texts.count - 1), dim=1).indices
        rows, starts = rows.to(texts.ids.device), starts.to(texts.ids.device)
        chosen = texts.select(rows)
        anchors = chosen.first.unsqueeze(1) + starts
        return chosen.ids, chosen.first, anchors, self.streams[rows], self.hidden[rows]


class BlockLoss:
    """The loss of drafts of many blocks, each after the text's own tokens.

    Attributes:
        length: The mean acceptance length of the last call, if its blocks drafted greedily.
    """

    def __init__(self, plan: Plan, drafter: DSpark) -> None:
        self.plan = plan
        self.drafter = drafter
        self.length = torch.ones(())

    def __call__(
        self, ids: Tensor, first: Tensor, anchors: Tensor, streams: Tensor, hidden: Tensor
    ) -> Tensor:
        """Computes the loss.

        Args:
            ids: As in `Texts`, `[rows, length]`.
            first: As in `Texts`, `[rows]`.
            anchors: Positions of the first tokens of blocks, `[rows, blocks]`.
            streams: As of `states_of`.
            hidden: As of `states_of`.
        """
        plan, texts = self.plan, Texts(ids, first, hidden.shape[1])
        rows = self.drafter(streams, anchors, ids.gather(1, anchors))
        steps = torch.arange(self.drafter.config.block, device=ids.device)
        position = anchors.unsqueeze(-1) + steps
        shape, flat = position.shape, position.flatten(1)
        drafted, confidence = self.drafter.corrected(rows, texts.at(ids, flat).view(shape))
        # The target's choices are known for the tokens after those of the stretch.
        index = flat - first.unsqueeze(1)
        is_learned = (index < texts.count).view(shape)
        logits = linear(hidden, self.drafter.embed).float()
        target = texts.at(softmax(logits, -1), index).view(*shape, -1)
        choice = texts.at(logits.argmax(-1), index).view(shape)
        logprobs = log_softmax(drafted.float(), -1)
        missed = -logprobs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        distance = (logprobs.exp() - target).abs().sum(-1)
        accepted = (1 - distance.detach() / 2).clamp(0, 1)
        losses = (
            plan.choice_weight * missed
            + plan.distance_weight * distance
            + plan.confidence_weight
            * binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
        )
        weights = is_learned * torch.exp(-steps / plan.block_decay)
        is_same = (logprobs.argmax(-1) == choice) & is_learned
        self.length = 1 + is_same.long().cumprod(-1).sum(-1).float().mean()
        return (losses * weights).sum() / weights.sum()


def train(plan: Plan, drafter: DSpark, material: Material, until: float | None) -> None:
    """Trains the drafter on continuations and on fewer windows of the training files."""
    pool = Pool(plan, drafter, material)
    loss_of = BlockLoss(plan, drafter)
    fit(
        "drafter",
        drafter,
        loss_of,
        rate=plan.rate,
        weight_decay=plan.weight_decay,
        steps=plan.steps,
        until=until,
        note=lambda: f"acceptance length {loss_of.length.item():.3f}",
        draw=pool.draw,
    )
    drafter.fc.weight.data.div_(pool.scale)


def main() -> None:
    """Trains and saves the drafter."""
    arguments = drafter_options(__doc__, Plan, "gemma3_code_dspark")
    clock = Clock.start(arguments.minutes)
    plan = plan_from(arguments, Plan)
    material = Material.of(arguments, plan, clock)
    drafter = new_drafter(plan, material.target)
    train(plan, drafter, material, clock.at(1.0))
    nbytes = save_dspark(drafter, arguments.out)
    print(f"wrote {arguments.out}: {nbytes} bytes of tensors", flush=True)


if __name__ == "__main__":
    main()
