# SPDX-License-Identifier: Apache-2.0
"""Trains an EAGLE-3 draft head for the demo target.

The draft head learns the target's distribution over a reduced vocabulary, on the training files and
on the target's greedy continuations, which are the output that it will draft. Every training step
drafts several tokens in a row: from the second draft on, the draft head reads its own output, as it
does in inference.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import VOCAB_SIZE, token_stream
from demo_models import load_checkpoint
from eagle3_model import AUX_LAYERS, DraftHead, DraftHeadConfig, DraftKeys, save_head
from fitting import Clock, draft_loss, fit
from generation import greedy
from options import DEMO, add_minutes, corpus_from, options_for, plan_from
from texts import Texts, Windows, continuations, many_continuations
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import Gemma3ForCausalLM


@dataclass(frozen=True)
class Plan:
    """All numbers of the training; each is a command-line option."""

    seed: int = 0
    steps: int = 6000
    rate: float = 2e-3
    weight_decay: float = 0.05

    draft_steps: int = 3  # tokens drafted in a row
    draft_decay: float = 0.8  # weight of a draft's loss relative to that of the previous draft
    choice_weight: float = 1.0  # weight of the target's most likely token; the divergence has 1

    draft_vocab: int = 3072
    intermediate: int = 640

    shortest_prompt: int = 32  # tokens of the training files before a continuation
    longest_prompt: int = 320
    rounds: int = 20  # batches of continuations
    prompts: int = 4096  # continuations in each batch
    new_tokens: int = 96  # length of a continuation
    texts_until: float = 0.3  # share of a limited time after which no batch starts

    batch: int = 64  # continuations per training step
    windows: int = 16  # windows of the training files per training step


def choose_vocabulary(texts: Texts, stream: Tensor, size: int) -> Tensor:
    """Returns the most frequent ids of continuations, then of training files, ascending."""
    own = torch.bincount(texts.learned().flatten(), minlength=VOCAB_SIZE).double()
    files = torch.bincount(stream, minlength=VOCAB_SIZE).double()
    chosen = (own / own.sum() + 0.1 * files / files.sum()).topk(size).indices
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

    def fit(self, own: Texts, windows: Windows, until: float | None) -> None:
        """Trains the draft head on continuations and on fewer windows of the training files."""
        plan = self.plan
        length = own.ids.shape[1]

        def loss(_step: int) -> Tensor:
            rows = torch.randint(len(own.ids), (plan.batch,), generator=windows.random)
            parts = [own.select(rows.to(own.ids.device))]
            if plan.windows:
                parts.append(windows.texts(plan.windows, length, own.count, plan.shortest_prompt))
            return self.loss(Texts.join(parts))

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


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = options_for(__doc__, Plan)
    parser.add_argument("--target", type=Path, default=DEMO / "gemma3_code")
    parser.add_argument("--out", type=Path, default=DEMO / "gemma3_code_eagle3")
    add_minutes(parser)
    return parser.parse_args()


def main() -> None:
    """Trains and saves the draft head."""
    arguments = parse_arguments()
    clock = Clock.start(arguments.minutes)
    plan = plan_from(arguments, Plan)
    corpus = corpus_from(arguments)
    device = torch.device(arguments.device)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    windows = Windows(token_stream(tokenizer, corpus.train), device, plan.seed)
    target = load_checkpoint(arguments.target, device)
    own = many_continuations(
        lambda: continuations(
            lambda prompts, new_tokens: greedy(target, prompts, new_tokens),
            windows,
            rows=plan.prompts,
            shortest_prompt=plan.shortest_prompt,
            longest_prompt=plan.longest_prompt,
            new_tokens=plan.new_tokens,
        ),
        plan.rounds,
        clock.at(plan.texts_until),
    )
    ids = choose_vocabulary(own, windows.stream, plan.draft_vocab)
    hidden = target.config.hidden_size
    config = DraftHeadConfig(
        target_hidden=hidden,
        hidden=hidden,
        intermediate=plan.intermediate,
        draft_vocab=plan.draft_vocab,
        max_position=target.config.max_position_embeddings,
    )
    head = DraftHead(config, ids).to(device)
    Trainer(plan, target, head).fit(own, windows, clock.at(1.0))
    nbytes = save_head(head, arguments.out)
    print(f"wrote {arguments.out}: {nbytes} bytes of tensors", flush=True)


if __name__ == "__main__":
    main()
