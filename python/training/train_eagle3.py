# SPDX-License-Identifier: Apache-2.0
"""Trains an EAGLE-3 head for the demo target.

The head learns the target's distribution over a reduced vocabulary, on the training files and on
greedy continuations by the target, which is the text it will have to draft. Every step of the
training drafts several tokens in a row: from the second on the head takes what it has put out
itself, as it does when it drafts.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from corpus import END_OF_TEXT_ID, VOCAB_SIZE, CorpusError, load_corpus, token_stream
from demo_models import load_checkpoint
from eagle3_model import AUX_LAYERS, DraftKeys, Head, HeadConfig, save_head
from generation import greedy
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from train_demo import REPOSITORY, Windows
from transformers import Gemma3ForCausalLM


@dataclass(frozen=True)
class Plan:
    """Every number of the training; each is an option of the command line."""

    seed: int = 0
    steps: int = 4000
    rate: float = 2e-3
    weight_decay: float = 0.05

    draft_steps: int = 3  # tokens drafted in a row
    draft_decay: float = 0.8  # weight of each over that of the one before
    choice_weight: float = 1.0  # of the loss of the target's first choice beside the divergence

    draft_vocab: int = 2048
    intermediate: int = 768

    shortest_prompt: int = 32  # tokens of the training files before a continuation
    longest_prompt: int = 320
    rounds: int = 20  # batches of continuations
    prompts: int = 2048  # continuations in each of them
    new_tokens: int = 96  # length of a continuation

    batch: int = 64  # continuations of a step
    windows: int = 16  # windows of the training files of a step
    window: int = 384  # their length


@dataclass(frozen=True)
class Texts:
    """Texts of one length, and from where on they are learned.

    Attributes:
        ids: `[rows, length]`.
        first: `[rows]`, index of the first token that is to be drafted.
        last: `[rows]`, index of the last one.
    """

    ids: Tensor
    first: Tensor
    last: Tensor

    def select(self, rows: Tensor) -> Texts:
        """The given rows, in their order."""
        return Texts(self.ids[rows], self.first[rows], self.last[rows])


def continuations(target: Gemma3ForCausalLM, windows: Windows, plan: Plan) -> Texts:
    """Greedy continuations of training prompts of many lengths.

    What fills a row up comes after everything that is learned from, so no causal model sees it.
    """
    parts = []
    for _ in range(plan.rounds):
        choices = (plan.shortest_prompt, plan.longest_prompt + 1)
        length = int(torch.randint(*choices, (), generator=windows.random))
        prompts = windows.sample(plan.prompts, length)
        generated = greedy(target, prompts, plan.new_tokens)
        filling = prompts.new_full((plan.prompts, plan.longest_prompt - length), END_OF_TEXT_ID)
        first = torch.full((plan.prompts,), length, device=prompts.device)
        ids = torch.cat([prompts, generated, filling], dim=1)
        parts.append(Texts(ids, first, first + plan.new_tokens - 1))
    return Texts(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.first for part in parts]),
        torch.cat([part.last for part in parts]),
    )


def choose_vocabulary(texts: Texts, stream: Tensor, size: int) -> Tensor:
    """The ids that occur most often in continuations, then in the training files, ascending."""
    index = torch.arange(texts.ids.shape[1], device=texts.ids.device)
    is_new = (index >= texts.first.unsqueeze(1)) & (index <= texts.last.unsqueeze(1))
    own = torch.bincount(texts.ids[is_new], minlength=VOCAB_SIZE).double()
    files = torch.bincount(stream, minlength=VOCAB_SIZE).double()
    chosen = (own / own.sum() + 0.1 * files / files.sum()).topk(size).indices
    covered = (own[chosen].sum() / own.sum()).item()
    print(f"{size} of {VOCAB_SIZE} ids cover {covered:.4f} of the continuations")
    return chosen.sort().values


class Trainer:
    """Holds what a step needs."""

    def __init__(self, plan: Plan, target: Gemma3ForCausalLM, head: Head) -> None:
        self.plan = plan
        self.target = target
        self.head = head
        rows = torch.full((VOCAB_SIZE,), -1, device=head.ids.device)
        rows[head.ids] = torch.arange(len(head.ids), device=head.ids.device)
        self.rows = rows

    def loss(self, texts: Texts) -> tuple[Tensor, list[float]]:
        """The loss over some texts, and how often each step's first choice is the target's."""
        plan, head, ids = self.plan, self.head, texts.ids
        with torch.no_grad():
            out = self.target(ids, use_cache=False, output_hidden_states=True)
            streams = torch.cat([out.hidden_states[layer] for layer in AUX_LAYERS], dim=-1)
            table = self.target.get_input_embeddings().weight
            embeddings = table[ids]  # without the target's factor, as a head takes them
            wanted = log_softmax(out.logits[..., head.ids].float(), -1)
            choices = self.rows[out.logits.argmax(-1)]
        # Position i drafts token i + 2 + s: that many places at the end have nothing to learn.
        length = ids.shape[1] - 1 - plan.draft_steps
        hidden = head.first_hidden(streams[:, :length])
        keys = DraftKeys()
        index = torch.arange(length, device=ids.device)
        total = torch.zeros((), device=ids.device)
        agreement = []
        for step in range(plan.draft_steps):
            embedding = embeddings[:, 1 + step : 1 + step + length]
            logits, hidden = head(embedding, hidden, step, keys)
            drafted = index + 2 + step
            judge = slice(1 + step, 1 + step + length)  # the target's logits for that token
            choice = choices[:, judge]
            is_learned = (
                (drafted >= texts.first.unsqueeze(1))
                & (drafted <= texts.last.unsqueeze(1))
                & (choice >= 0)
            )
            offered = log_softmax(logits.float(), -1)[is_learned]
            target = wanted[:, judge][is_learned]
            divergence = (target.exp() * (target - offered)).sum(-1).mean()
            first_choice = choice[is_learned].unsqueeze(-1)
            missed = -offered.gather(-1, first_choice).mean()
            total = total + plan.draft_decay**step * (divergence + plan.choice_weight * missed)
            is_same = offered.argmax(-1) == first_choice.squeeze(-1)
            agreement.append(is_same.float().mean().item())
        return total, agreement

    def fit(self, own: Texts, windows: Windows) -> None:
        """AdamW with a short warm-up and a linear way down to zero."""
        plan, head = self.plan, self.head
        matrices = [weight for weight in head.parameters() if weight.dim() > 1]
        vectors = [weight for weight in head.parameters() if weight.dim() == 1]
        device = own.ids.device
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": plan.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=plan.rate,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )
        warm_up = min(200, max(1, plan.steps // 10))
        falling = plan.steps - warm_up + 1
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (plan.steps - step) / falling)
        )
        began = time.monotonic()
        for step in range(plan.steps):
            rows = torch.randint(len(own.ids), (plan.batch,), generator=windows.random)
            with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
                loss, agreement = self.loss(own.select(rows.to(device)))
                if plan.windows:
                    on_text, _ = self.loss(self._sample(windows))
                    loss = loss + 0.5 * on_text
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if (step + 1) % max(1, plan.steps // 20) == 0:
                shares = " ".join(f"{share:.3f}" for share in agreement)
                seconds = time.monotonic() - began
                print(
                    f"{step + 1}/{plan.steps}: loss {loss.item():.4f}, the target's choice at each "
                    f"step {shares}, {seconds:.0f} s",
                    flush=True,
                )

    def _sample(self, windows: Windows) -> Texts:
        ids = windows.sample(self.plan.windows, self.plan.window)
        first = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        return Texts(ids, first, first + self.plan.window - 1)


def parse_arguments() -> argparse.Namespace:
    """The command line: places, the device, and one option for each field of the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(argparse.__file__).parent,
        help="standard library of the pinned CPython (default: that of this interpreter)",
    )
    demo = REPOSITORY / "python/paceline/demo"
    parser.add_argument("--target", type=Path, default=demo / "gemma3_code")
    parser.add_argument("--out", type=Path, default=demo / "gemma3_code_eagle3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Plan):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    return parser.parse_args()


def main() -> None:
    """Trains and saves the head."""
    arguments = parse_arguments()
    plan = Plan(**{field.name: getattr(arguments, field.name) for field in fields(Plan)})
    try:
        corpus = load_corpus(arguments.stdlib)
    except CorpusError as error:
        sys.exit(str(error))
    device = torch.device(arguments.device)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    windows = Windows(token_stream(tokenizer, corpus.train), device, plan.seed)
    target = load_checkpoint(arguments.target, device)
    began = time.monotonic()
    own = continuations(target, windows, plan)
    print(f"{len(own.ids)} continuations in {time.monotonic() - began:.0f} s", flush=True)
    ids = choose_vocabulary(own, windows.stream, plan.draft_vocab)
    hidden = target.config.hidden_size
    config = HeadConfig(
        target_hidden=hidden,
        hidden=hidden,
        intermediate=plan.intermediate,
        draft_vocab=plan.draft_vocab,
        max_position=target.config.max_position_embeddings,
    )
    head = Head(config, ids).to(device)
    Trainer(plan, target, head).fit(own, windows)
    nbytes = save_head(head, arguments.out)
    print(f"wrote {arguments.out}: {nbytes} bytes of tensors")


if __name__ == "__main__":
    main()
