# SPDX-License-Identifier: Apache-2.0
"""What the trainings of drafters for the Gemma 3 target share: their texts and their batches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from captured import Capture, CaptureError
from corpus import VOCAB_SIZE, token_stream
from demo_models import load_checkpoint
from fitting import Clock
from generation import greedy
from options import DEMO, add_minutes, corpus_from, options_for
from texts import Texts, Windows, continuations, many_continuations
from tokenizers import Tokenizer
from transformers import Gemma3ForCausalLM


@dataclass(frozen=True)
class DrafterPlan:
    """The numbers that all these trainings have; each is a command-line option."""

    seed: int = 0
    steps: int = 6000
    rate: float = 2e-3
    weight_decay: float = 0.05

    shortest_prompt: int = 32  # tokens of the training files before a continuation
    longest_prompt: int = 320
    rounds: int = 20  # batches of continuations
    prompts: int = 4096  # continuations in each batch
    new_tokens: int = 96  # length of a continuation
    texts_until: float = 0.3  # share of a limited time after which no batch starts

    batch: int = 64  # continuations per training step
    windows: int = 16  # windows of the training files per training step


@dataclass(frozen=True)
class Material:
    """The target, windows of the training files, and the target's continuations of those.

    With a capture there are no windows, and the continuations are outputs that were served.
    """

    target: Gemma3ForCausalLM
    windows: Windows
    own: Texts

    @classmethod
    def make(
        cls, plan: DrafterPlan, target: Path, stream: list[int], device: str, clock: Clock
    ) -> Material:
        """Loads the target and generates its continuations; seeds torch."""
        model, windows = cls._begin(plan, target, stream, device)
        own = many_continuations(
            lambda: continuations(
                lambda prompts, new_tokens: greedy(model, prompts, new_tokens),
                windows,
                rows=plan.prompts,
                shortest_prompt=plan.shortest_prompt,
                longest_prompt=plan.longest_prompt,
                new_tokens=plan.new_tokens,
            ),
            plan.rounds,
            clock.at(plan.texts_until),
        )
        return cls(model, windows, own)

    @classmethod
    def from_capture(
        cls, plan: DrafterPlan, target: Path, capture: Capture, device: str
    ) -> Material:
        """Loads the target and takes the outputs of a capture; seeds torch.

        Raises:
            CaptureError: All outputs are too short.
        """
        own = capture.texts(plan.longest_prompt, plan.new_tokens)
        model, windows = cls._begin(plan, target, [], device)
        print(f"{len(own.ids)} stretches of {capture.summary()}", flush=True)
        return cls(model, windows, own.to(windows.stream.device))

    @staticmethod
    def _begin(
        plan: DrafterPlan, target: Path, stream: list[int], device: str
    ) -> tuple[Gemma3ForCausalLM, Windows]:
        """Seeds torch; loads the target, and windows of a token stream."""
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        windows = Windows(stream, torch.device(device), plan.seed)
        return load_checkpoint(target, windows.stream.device), windows

    @classmethod
    def of(cls, arguments: argparse.Namespace, plan: DrafterPlan, clock: Clock) -> Material:
        """Makes the material that the command line names; exits if there is none."""
        if arguments.capture is not None:
            try:
                capture = Capture.load(arguments.capture, VOCAB_SIZE)
                return cls.from_capture(plan, arguments.target, capture, arguments.device)
            except CaptureError as error:
                sys.exit(str(error))
        tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
        stream = token_stream(tokenizer, corpus_from(arguments).train)
        return cls.make(plan, arguments.target, stream, arguments.device, clock)

    def texts(self, plan: DrafterPlan) -> Texts:
        """The continuations, with windows of the training files in the proportion of the plan."""
        own = self.own
        if not self.windows.stream.numel():
            return own
        count = len(own.ids) * plan.windows // plan.batch
        length = own.ids.shape[1]
        parts = [own, self.windows.texts(count, length, own.count, plan.shortest_prompt)]
        return Texts.join(parts)

    def batches(self, plan: DrafterPlan) -> Callable[[], Texts]:
        """Returns a function that draws the texts of a training step."""
        own, windows = self.own, self.windows
        num_windows = plan.windows if windows.stream.numel() else 0

        def draw() -> Texts:
            rows = torch.randint(len(own.ids), (plan.batch,), generator=windows.random)
            parts = [own.select(rows.to(own.ids.device))]
            if num_windows:
                length = own.ids.shape[1]
                parts.append(windows.texts(num_windows, length, own.count, plan.shortest_prompt))
            return Texts.join(parts)

        return draw


def drafter_options(
    description: str | None, plan: type[DrafterPlan], folder: str
) -> argparse.Namespace:
    """Parses the command line of a training that writes the demo's `folder`."""
    parser = options_for(description, plan)
    parser.add_argument("--target", type=Path, default=DEMO / "gemma3_code")
    parser.add_argument("--out", type=Path, default=DEMO / folder)
    parser.add_argument(
        "--capture",
        type=Path,
        help="train on the outputs that `paceline serve --capture` wrote to this folder, without "
        "the corpus",
    )
    add_minutes(parser)
    return parser.parse_args()
