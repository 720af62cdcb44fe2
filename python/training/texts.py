# SPDX-License-Identifier: Apache-2.0
"""The training data: windows of the training files, and the target's own continuations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from corpus import END_OF_TEXT_ID
from torch import Tensor


@dataclass(frozen=True)
class Texts:
    """A batch of token rows of one length; the model learns from one stretch of each row.

    Padding comes after the stretch, so no causal model sees it.

    Attributes:
        ids: Token ids, `[rows, length]`.
        first: Index of the first token of the stretch, `[rows]`.
        count: Length of the stretch.
    """

    ids: Tensor
    first: Tensor
    count: int

    def to(self, device: torch.device) -> Texts:
        """Returns the texts on a device."""
        return Texts(self.ids.to(device), self.first.to(device), self.count)

    def select(self, rows: Tensor) -> Texts:
        """Returns the given rows, in that order."""
        return Texts(self.ids[rows], self.first[rows], self.count)

    def index(self, offset: int = 0, more: int = 0) -> Tensor:
        """Consecutive indices from `first + offset` on, `[rows, count + more]`."""
        steps = torch.arange(self.count + more, device=self.first.device)
        return self.first.unsqueeze(1) + offset + steps

    def learned(self) -> Tensor:
        """Returns the tokens of the stretch, `[rows, count]`."""
        return self.ids.gather(1, self.index())

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """Picks from `values`, `[rows, length, ...]`, at `index`, `[rows, n]`, clamped to a row."""
        rows = torch.arange(len(values), device=values.device).unsqueeze(1)
        return values[rows, index.clamp(0, values.shape[1] - 1)]

    @staticmethod
    def join(parts: list[Texts]) -> Texts:
        """Concatenates the rows of texts with equal length and count."""
        return Texts(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.first for part in parts]),
            parts[0].count,
        )


class Windows:
    """Random windows of a token stream on the device."""

    def __init__(self, stream: list[int], device: torch.device, seed: int) -> None:
        self.stream = torch.tensor(stream, dtype=torch.long, device=device)
        self.random = torch.Generator().manual_seed(seed)

    def sample(self, count: int, length: int) -> Tensor:
        """Returns token ids `[count, length]`; half of the windows start with END_OF_TEXT.

        Otherwise the models would know the token from the starts of files only, and a prompt that
        starts with it would be outside the training data.
        """
        starts = torch.randint(len(self.stream) - length, (count, 1), generator=self.random)
        marked = torch.rand(count, generator=self.random) < 0.5
        device = self.stream.device
        windows = self.stream[starts.to(device) + torch.arange(length, device=device)]
        windows[marked.to(device), 0] = END_OF_TEXT_ID
        return windows

    def texts(self, rows: int, length: int, count: int, earliest: int) -> Texts:
        """Returns windows with a random stretch of `count` tokens, at index `earliest` or later."""
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
    """Continues training prompts greedily; each call draws one prompt length.

    With one fixed length the target would unlearn repetition only at the positions after it.

    Args:
        generate: Takes prompts of one length and a number of tokens, returns the continuations.
        windows: The training files.
        rows: Number of continuations.
        shortest_prompt: Least number of prompt tokens.
        longest_prompt: Greatest number of prompt tokens; rows are padded to this length plus
            `new_tokens`.
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
    """Calls `make` for `rounds` rounds, or until the moment `until`; at least once."""
    began = time.monotonic()
    parts = [make()]
    while len(parts) < rounds and (until is None or time.monotonic() < until):
        parts.append(make())
    texts = Texts.join(parts)
    print(f"{len(texts.ids)} continuations in {time.monotonic() - began:.0f} s", flush=True)
    return texts
