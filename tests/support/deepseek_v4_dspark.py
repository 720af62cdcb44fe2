# SPDX-License-Identifier: Apache-2.0
"""Tiny DeepSeek-V4 models with a block drafter in their own files, and its equations in float64.

    path = make_with_stages(V4Spec(seed=1), StagesSpec())   # as published
    StagesReference(V4Spec(seed=1), StagesSpec())           # its drafts

No code of Paceline is used, and the reference has no cache.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiny_models
from block_reference import BlockReference
from deepseek_v4_models import (
    V4Spec,
    make,
    published_config,
    published_tensors,
    stored_tensors,
    value_of,
    whole_state,
)
from deepseek_v4_reference import V4MtpReference, V4TargetReference
from eagle_reference import TargetStates

# Tensors of an MTP layer that a stage does not have.
_MTP_ALONE = ("e_proj.", "h_proj.", "enorm.", "hnorm.", "norm.", "hc_head_")


@dataclass(frozen=True)
class StagesSpec:
    """The block drafter of a tiny model.

    Attributes:
        seed: Of the weights.
        block_size: Rows of a block.
        markov_rank: Columns of the Markov head's table.
        markov_type: The type of the Markov head; the published files have this one.
        confidence: What the confidence head reads beside hidden states: the "token" before.
        layers: The target's layers whose output it reads; it has a stage for each.
    """

    seed: int = 0
    block_size: int = 5
    markov_rank: int = 6
    markov_type: str = "vanilla"
    confidence: str = "token"
    layers: tuple[int, ...] = (1, 2, 3)

    @property
    def taps(self) -> int:
        """Taps of a convolution over the block, which these stages lack."""
        return 0

    @property
    def max_drafts(self) -> int:
        """The drafts of a whole block."""
        return self.block_size

    @property
    def samples_from_anchor(self) -> bool:
        """The row of the newest token predicts the next one."""
        return True


def config_json(spec: V4Spec, stages: StagesSpec) -> dict[str, Any]:
    """`config.json`, as published: it counts one MTP layer."""
    return published_config(spec) | {
        "compress_ratios": [*spec.ratios, *[0] * len(stages.layers)],
        "dspark_block_size": stages.block_size,
        "dspark_markov_rank": stages.markov_rank,
        "dspark_noise_token_id": spec.vocab_size - 1,
        "dspark_target_layer_ids": list(stages.layers),
    }


def stage_values(spec: V4Spec, stages: StagesSpec) -> dict[str, Tensor]:
    """Every tensor of `mtp.*` by its published name, random."""
    unscaled = replace(spec, has_scales=False)
    mtp = published_tensors(unscaled, whole_state(unscaled))
    layer = {
        name.removeprefix("mtp.0."): tuple(tensor.shape)
        for name, tensor in mtp.items()
        if name.startswith("mtp.0.")
    }
    hidden, vocab, rank = spec.hidden, spec.vocab_size, stages.markov_rank
    last = f"mtp.{len(stages.layers) - 1}."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.0.main_proj.weight": (hidden, len(stages.layers) * hidden),
        "mtp.0.main_norm.weight": (hidden,),
        f"{last}norm.weight": (hidden,),
        f"{last}markov_head.markov_w1.weight": (vocab, rank),
        f"{last}markov_head.markov_w2.weight": (vocab, rank),
        f"{last}confidence_head.proj.weight": (1, hidden + rank),
    }
    for i in range(len(stages.layers)):
        shapes |= {
            f"mtp.{i}.{name}": shape
            for name, shape in layer.items()
            if not name.startswith(_MTP_ALONE)
        }
    shapes |= {last + name: shape for name, shape in layer.items() if name.startswith("hc_head_")}
    values: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{stages.seed} {name}".encode()))
        noise = torch.randn(shape, generator=generator)
        if name == f"{last}norm.weight":
            values[name] = 3.0 + 0.2 * noise
        elif "norm" in name or name.endswith("scale"):
            values[name] = 1.0 + 0.2 * noise
        elif name.endswith(("base", "attn_sink")):
            values[name] = noise
        elif "confidence" in name:
            # Estimates that are not all 0 or 1, and in which both parts count.
            values[name] = 0.01 * noise
            values[name][:, hidden:] *= 200
        else:
            values[name] = 0.2 * noise
    return values


@functools.cache
def make_with_stages(spec: V4Spec, stages: StagesSpec) -> Path:
    """A folder in the published layout, with the stages instead of the MTP layer; read-only."""
    path = make(spec).parent / f"stages-{zlib.crc32(repr((spec, stages)).encode()):08x}"
    path.mkdir()
    write_random(path, spec, stages)
    return path


def write_random(path: Path, spec: V4Spec, stages: StagesSpec) -> None:
    """Writes a target with random stages."""
    write_stages(path, spec, stages, stored_tensors(spec, stage_values(spec, stages)))


def write_stages(path: Path, spec: V4Spec, stages: StagesSpec, stored: dict[str, Tensor]) -> None:
    """Writes a target with some tensors of `mtp.*`."""
    target = {
        name: tensor
        for name, tensor in published_tensors(spec, whole_state(spec)).items()
        if not name.startswith("mtp.")
    }
    tiny_models.save_tensors(path, target | stored)
    tiny_models.write_json(path / "config.json", config_json(spec, stages))


class _StageWeights(MutableMapping[str, Tensor]):
    """The tensors of one stage by their names in it, as a view on those of all stages."""

    def __init__(self, whole: StagesReference, stage: int) -> None:
        self.whole = whole
        self.prefix = f"mtp.{stage}."

    def __getitem__(self, name: str) -> Tensor:
        return self.whole.weights[self.prefix + name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.whole.weights[self.prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self.whole.weights[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        names = [name for name in self.whole.weights if name.startswith(self.prefix)]
        return iter([name.removeprefix(self.prefix) for name in names])

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Stage(V4MtpReference):
    """One stage, which has the layer of an MTP layer and another attention."""

    def __init__(self, whole: StagesReference, stage: int) -> None:
        self.target: Any = whole.target
        self.config = whole.config
        self.weights: Any = _StageWeights(whole, stage)

    def run_block(self, x: Tensor, context: Tensor) -> Tensor:
        """The streams of a block's rows [rows, 4, hidden] after the stage.

        Args:
            x: Those before it.
            context: What the entries of the context are made from, [tokens, hidden].
        """
        first = len(context)
        # All rows see the last entries of the context, and each other.
        hidden = torch.arange(first + len(x)) < first - self.config["sliding_window"]

        def attention(rows: Tensor) -> Tensor:
            entries = torch.cat([self.entries(context), self.entries(rows, first)])
            return self.attend(rows, entries, hidden, first)

        x = self.branch(x, "attn", attention)
        return self.branch(x, "ffn", self.mixture)


class StagesReference(BlockReference):
    """The block drafter in the files of DeepSeek-V4-Flash-0731, from its equations.

    Attributes:
        weights: Its tensors by their published names, without scales. To train it, replace them
            with tensors that require gradients.
    """

    def __init__(
        self,
        spec: V4Spec,
        stages: StagesSpec,
        target: V4TargetReference,
        stored: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Takes the tensors of `make_with_stages`, or others as they are stored."""
        self.spec: Any = stages
        self.target: Any = target
        self.config = config_json(spec, stages)
        tensors = dict(stored or stored_tensors(spec, stage_values(spec, stages)))
        self.weights = {
            name: value_of(tensors, name).double()
            for name in tensors
            if not name.endswith(".scale") or name.endswith("hc_head_scale")
        }
        self.mask_token = self.config["dspark_noise_token_id"]
        self.room = lambda tokens: 1 << 30
        self.least_confidence = 0.0
        self.stages = [_Stage(self, i) for i in range(len(stages.layers))]

    def streams_of(self, streams: Tensor) -> Tensor:
        """What is read of the streams [tokens, 4, hidden] after a layer, [tokens, hidden]."""
        return streams.mean(1)

    def context(self, states: TargetStates) -> Tensor:
        """What entries of the context are made from, [tokens, hidden]."""
        taps = torch.cat([self.streams_of(states.streams[i]) for i in self.spec.layers], dim=-1)
        first = self.stages[0]
        return first.rms(first.linear(taps.to(first.weights["main_proj.weight"].dtype),
                                      "main_proj"), "main_norm")  # fmt: skip

    def block(self, context: Tensor, newest: int, num_drafts: int) -> Tensor:
        """The streams of all rows of a block after the last stage, [rows, 4, hidden]."""
        ids = torch.tensor([newest] + [self.mask_token] * (num_drafts - 1))
        x = self.target.embedding[ids].to(context.dtype).unsqueeze(1).repeat(1, 4, 1)
        for stage in self.stages:
            x = stage.run_block(x, context)
        return x

    def logits(self, rows: Tensor) -> Tensor:
        """The logits of a block without its Markov head, [num_drafts, vocab]."""
        return self.stages[-1].logits(rows)

    def head_weights(self) -> Mapping[str, Tensor]:
        """The tensors of the Markov head and of the confidence head."""
        return self.stages[-1].weights

    def confidence_input(self, row: Tensor) -> Tensor:
        """What the confidence head reads of a row [4, hidden]: the sum that the last norm reads."""
        return self.stages[-1].summed(row.unsqueeze(0))[0]
