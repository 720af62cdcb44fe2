# SPDX-License-Identifier: Apache-2.0
"""Served traffic as training data: the shards that `paceline serve --capture` writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import END_OF_TEXT_ID
from safetensors import safe_open
from texts import Texts
from torch import Tensor

FORMAT, VERSION = "paceline.capture", "1"
# Those that are read; a capture may have hidden states too.
_TENSORS = (
    *("prompt_ids", "prompt_offsets", "output_ids", "output_offsets", "output_requests"),
    *("step_drafted", "step_accepted"),
)


class CaptureError(RuntimeError):
    """A folder has no capture that can be trained on."""


@dataclass(frozen=True)
class Capture:
    """The outputs of a folder's shards.

    Attributes:
        model: The target that wrote them.
        pairs: Token ids of the prompt and of the output, each `[n]`, for every output.
        num_steps: Iterations with drafts.
        num_accepted: Drafts that these accepted.
    """

    model: str
    pairs: list[tuple[Tensor, Tensor]]
    num_steps: int
    num_accepted: int

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Capture:
        """Reads all shards.

        Raises:
            CaptureError: There is none, one has another format, they are those of several targets,
                or a token id is not below `vocab_size`.
        """
        models: set[str] = set()
        pairs: list[tuple[Tensor, Tensor]] = []
        num_steps = num_accepted = 0
        for path in sorted(folder.glob("capture-*.safetensors")):
            with safe_open(path, framework="pt") as shard:
                facts = shard.metadata() or {}
                if (facts.get("format"), facts.get("version")) != (FORMAT, VERSION):
                    raise CaptureError(f"{path} is no shard of {FORMAT}, version {VERSION}")
                models.add(facts["model"])
                tensors = {name: shard.get_tensor(name) for name in _TENSORS}
            for ids in (tensors["prompt_ids"], tensors["output_ids"]):
                if len(ids) and int(ids.max()) >= vocab_size:
                    raise CaptureError(
                        f"{path} has the token id {int(ids.max())}; the target's are below "
                        f"{vocab_size}, so another target wrote it"
                    )
            prompts = list(_parts(tensors["prompt_ids"], tensors["prompt_offsets"]))
            outputs = _parts(tensors["output_ids"], tensors["output_offsets"])
            owners = tensors["output_requests"].tolist()
            pairs += [(prompts[i], output) for i, output in zip(owners, outputs, strict=True)]
            num_steps += int((tensors["step_drafted"] > 0).sum())
            num_accepted += int(tensors["step_accepted"].sum())
        if len(models) != 1:
            found = f"shards of {len(models)} targets: {', '.join(sorted(models))}"
            raise CaptureError(f"{folder} has {found if models else 'no shard'}; allowed: one")
        return cls(models.pop(), pairs, num_steps, num_accepted)

    def texts(self, longest_prompt: int, new_tokens: int) -> Texts:
        """Cuts the outputs into stretches, each after the tokens before it.

        The rest of an output, which is shorter than a stretch, is kept if it has half the length of
        one, or if the output has no other stretch. It is then made as long as a stretch with the
        tokens before it, which are those of the prompt or of the stretch before.

        Args:
            longest_prompt: Most tokens that a row has before its stretch.
            new_tokens: Tokens of a stretch. Outputs that have fewer with their prompt are left out.

        Raises:
            CaptureError: All outputs are too short.
        """
        rows, first = [], []
        length = longest_prompt + new_tokens
        for prompt, output in self.pairs:
            ids = torch.cat([prompt, output]).long()
            ends = list(range(len(prompt) + new_tokens, len(ids) + 1, new_tokens))
            left = len(ids) - (ends[-1] if ends else len(prompt))
            if not ends or 2 * left >= new_tokens:
                ends.append(len(ids))
            for end in ends:
                if end > new_tokens:
                    begin = max(0, end - length)
                    row = torch.full((length,), END_OF_TEXT_ID)
                    row[: end - begin] = ids[begin:end]
                    rows.append(row)
                    first.append(end - new_tokens - begin)
        if not rows:
            raise CaptureError(
                f"no output of the capture has more than {new_tokens} tokens with its prompt; "
                "choose a smaller --new-tokens"
            )
        return Texts(torch.stack(rows), torch.tensor(first), new_tokens)

    def summary(self) -> str:
        """Describes the capture in one line, with the acceptance length that was served."""
        tokens = sum(len(output) for _, output in self.pairs)
        length = 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0
        return (
            f"{len(self.pairs)} outputs of {self.model} with {tokens} tokens; they were served "
            f"with an acceptance length of {length:.3f} in {self.num_steps} iterations with drafts"
        )


def _parts(values: Tensor, offsets: Tensor) -> Iterator[Tensor]:
    """The parts of a joined tensor."""
    bounds = offsets.tolist()
    for begin, end in itertools.pairwise(bounds):
        yield values[begin:end]
