# SPDX-License-Identifier: Apache-2.0
"""Trains an EAGLE-3 draft head for the demo target.

The draft head learns the target's distribution over a reduced vocabulary, on the training files and
on the target's greedy continuations, which are the output that it will draft. Every training step
drafts several tokens in a row: from the second draft on, the draft head reads its own output, as it
does in inference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from corpus import VOCAB_SIZE
from drafters import DrafterPlan, Material, drafter_options
from eagle3_model import AUX_LAYERS, DraftHead, DraftHeadConfig, DraftKeys, save_head
from fitting import Clock, draft_loss, fit
from options import plan_from
from texts import Texts
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import Gemma3ForCausalLM


@dataclass(frozen=True)
class Plan(DrafterPlan):
    """All numbers of the training; each is a command-line option."""

    draft_steps: int = 3  # tokens drafted in a row
    draft_decay: float = 0.8  # weight of a draft's loss relative to that of the previous draft
    choice_weight: float = 1.0  # weight of the target's most likely token; the divergence has 1

    draft_vocab: int = 3072
    intermediate: int = 640


def choose_vocabulary(texts: Texts, stream: Tensor, size: int) -> Tensor:
    """Returns the most frequent ids of continuations, then of training files, ascending."""
    own = torch.bincount(texts.learned().flatten(), minlength=VOCAB_SIZE).double()
    files = torch.bincount(stream, minlength=VOCAB_SIZE).double()
    chosen = (own / own.sum() + 0.1 * files / files.sum().clamp(min=1)).topk(size).indices
    covered = (own[chosen].sum() / own.sum()).item()
    print(f"{size} of {VOCAB_SIZE} ids cover {covered:.4f} of the continuations", flush=True)
    return chosen.sort().values


class Drafting:
    """The target with a draft head: the forward pass of training steps and of the evaluation."""

    def __init__(self, target: Gemma3ForCausalLM, head: DraftHead, draft_steps: int) -> None:
        self.target = target
        self.head = head
        self.draft_steps = draft_steps
        rows = torch.full((VOCAB_SIZE,), -1, device=head.ids.device)
        rows[head.ids] = torch.arange(len(head.ids), device=head.ids.device)
        self.rows = rows

    def run(self, texts: Texts) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Drafts every token of the stretches of the texts in every step.

        Returns:
            The target's logits for the stretches, `[rows, count, vocabulary]`; and for each step s
            a pair: the draft head's logits for the same tokens, `[rows, count, draft_vocab]`, where
            drafting started after the token s + 1 positions before, and a mask `[rows, count]` of
            the tokens for which that position exists.
        """
        ids, head = texts.ids, self.head
        with torch.no_grad():
            out = self.target.model(ids, use_cache=False, output_hidden_states=True)
            streams = torch.cat([out.hidden_states[layer] for layer in AUX_LAYERS], dim=-1)
            # An EAGLE-3 draft head reads the embeddings without the target's factor.
            embeddings = self.target.model.embed_tokens.weight[ids]
            target_logits = self.target.lm_head(texts.at(out.last_hidden_state, texts.index(-1)))
        # Position i drafts token i + 2 + s, so the last positions have no token to learn.
        length = ids.shape[1] - 1 - self.draft_steps
        hidden = head.first_hidden(streams[:, :length])
        keys = DraftKeys()
        drafted = []
        for step in range(self.draft_steps):
            embedding = embeddings[:, 1 + step : 1 + step + length]
            hidden = head(embedding, hidden, step, keys)
            position = texts.index(-2 - step)
            exists = (position >= 0) & (position < length)
            drafted.append((head.logits(texts.at(hidden, position)), exists))
        return target_logits, drafted


class Trainer:
    """Trains a draft head for a target."""

    def __init__(self, plan: Plan, target: Gemma3ForCausalLM, head: DraftHead) -> None:
        self.plan = plan
        self.head = head
        self.drafting = Drafting(target, head, plan.draft_steps)
        self.agreement: list[Tensor] = []

    def loss(self, texts: Texts) -> Tensor:
        """Returns the loss over some texts; stores each step's agreement with the target."""
        plan, drafting = self.plan, self.drafting
        logits, drafts = drafting.run(texts)
        target_logprobs = log_softmax(logits[..., self.head.ids].float(), -1)
        choice = drafting.rows[logits.argmax(-1)]
        total = torch.zeros((), device=texts.ids.device)
        self.agreement = []
        for step, (draft_logits, exists) in enumerate(drafts):
            loss, agreement = draft_loss(
                log_softmax(draft_logits.float(), -1),
                target_logprobs,
                choice,
                exists & (choice >= 0),
                plan.choice_weight,
            )
            total = total + plan.draft_decay**step * loss
            self.agreement.append(agreement)
        return total

    def fit(self, material: Material, until: float | None) -> None:
        """Trains the draft head on continuations and on fewer windows of the training files."""
        plan = self.plan
        draw = material.batches(plan)

        def loss(_step: int) -> Tensor:
            return self.loss(draw())

        def note() -> str:
            shares = " ".join(f"{share.item():.3f}" for share in self.agreement)
            return f"agreement with the target at each step {shares}"

        fit(
            "draft head",
            self.head,
            loss,
            rate=plan.rate,
            weight_decay=plan.weight_decay,
            steps=plan.steps,
            until=until,
            note=note,
        )


def main() -> None:
    """Trains and saves the draft head."""
    arguments = drafter_options(__doc__, Plan, "gemma3_code_eagle3")
    clock = Clock.start(arguments.minutes)
    plan = plan_from(arguments, Plan)
    material = Material.of(arguments, plan, clock)
    target = material.target
    ids = choose_vocabulary(material.own, material.windows.stream, plan.draft_vocab)
    hidden = target.config.hidden_size
    config = DraftHeadConfig(
        target_hidden=hidden,
        hidden=hidden,
        intermediate=plan.intermediate,
        draft_vocab=plan.draft_vocab,
        max_position=target.config.max_position_embeddings,
    )
    head = DraftHead(config, ids).to(target.device)
    Trainer(plan, target, head).fit(material, clock.at(1.0))
    nbytes = save_head(head, arguments.out)
    print(f"wrote {arguments.out}: {nbytes} bytes of tensors", flush=True)


if __name__ == "__main__":
    main()
