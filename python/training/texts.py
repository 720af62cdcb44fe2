# SPDX-License-Identifier: Apache-2.0
"""What the models learn from: windows of the training files, and the target's own continuations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from corpus import END_OF_TEXT_ID
from torch import Tensor


@dataclass(frozen=True)
class Texts:
    """Texts of one length, of which a stretch is learned from.

    What fills a row up comes after that stretch, so no causal model sees it.

    Attributes:
        ids: `[rows, length]`.
        first: `[rows]`, index of the first token of the stretch.
        count: Its length.
    """

    ids: Tensor
    first: Tensor
    count: int

    def select(self, rows: Tensor) -> Texts:
        """The given rows, in their order."""
        return Texts(self.ids[rows], self.first[rows], self.count)

    def index(self, offset: int = 0, more: int = 0) -> Tensor:
        """`[rows, count + more]`: indices from `offset` behind the first of the stretch on."""
        steps = torch.arange(self.count + more, device=self.first.device)
        return self.first.unsqueeze(1) + offset + steps

    def learned(self) -> Tensor:
        """The tokens of the stretch, `[rows, count]`."""
        return self.ids.gather(1, self.index())

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """Of `values`, `[rows, length, ...]`, those at an index `[rows, n]`; ends are repeated."""
        rows = torch.arange(len(values), device=values.device).unsqueeze(1)
        return values[rows, index.clamp(0, values.shape[1] - 1)]

    @staticmethod
    def join(parts: list[Texts]) -> Texts:
        """Texts of one length and one count, behind one another."""
        return Texts(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.first for part in parts]),
            parts[0].count,
        )


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

    def texts(self, rows: int, length: int, count: int, earliest: int) -> Texts:
        """Windows with a stretch of `count` tokens somewhere at or behind index `earliest`."""
        first = torch.randint(earliest, length - count + 1, (rows,), generator=self.random)
        return Texts(self.sample(rows, length), first.to(self.stream.device), count)


def continuations(
    generate: Callable[[Tensor, int], Tensor],
    windows: Windows,
    *,
    rows: int,
    shortest_prompt: int,
    longest_prompt: int,
    new_tokens: int,
) -> Texts:
    """Greedy continuations of training prompts, whose length each call draws anew.

    With one fixed length a target would unlearn repetition at the positions behind it alone.

    Args:
        generate: Continues prompts of one length by so many tokens.
        windows: The training text.
        rows: How many.
        shortest_prompt: Tokens before a continuation, at least.
        longest_prompt: At most; rows have that and `new_tokens` tokens.
        new_tokens: Tokens of a continuation.
    """
    choices = (shortest_prompt, longest_prompt + 1)
    length = int(torch.randint(*choices, (), generator=windows.random))
    prompts = windows.sample(rows, length)
    generated = generate(prompts, new_tokens)
    filling = prompts.new_full((rows, longest_prompt - length), END_OF_TEXT_ID)
    return Texts(
        ids=torch.cat([prompts, generated, filling], dim=1),
        first=torch.full((rows,), length, device=prompts.device),
        count=new_tokens,
    )


def many_continuations(make: Callable[[], Texts], rounds: int, until: float | None = None) -> Texts:
    """So many rounds of continuations; fewer, but one, where a moment comes first."""
    began = time.monotonic()
    parts = [make()]
    while len(parts) < rounds and (until is None or time.monotonic() < until):
        parts.append(make())
    texts = Texts.join(parts)
    print(f"{len(texts.ids)} continuations in {time.monotonic() - began:.0f} s", flush=True)
    return texts
