# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of every kind of drafter: the outputs of an engine for tiny models, and both
ways to load a pair."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import block_models
from block_models import BlockSpec
from drafter_golden import silence_layers
from paceline import LLM, SamplingParams, _core
from paceline.loader import load_checkpoint, load_drafter
from paceline.loader.convert import convert
from tiny_models import (
    TinySpec,
    copy_checkpoint,
    edit_tensors,
    make,
    read_json,
    write_json,
)

if TYPE_CHECKING:
    import torch

ENGINE: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_bytes": 16 << 20, "show_progress": False}
PROMPTS = [[5, 17, 90, 3], [44] * 7, list(range(2, 40)), [9]]
# What a speculative_config chooses for a target whose folder has a DSpark drafter with blocks of 5.
DSPARK_CHOICES: tuple[tuple[dict[str, Any] | None, str | None, int | None], ...] = (
    (None, "dspark", 5),
    ({"num_speculative_tokens": 2}, "dspark", 2),
    ({"method": "dspark"}, "dspark", 5),
    ({"method": None}, None, None),
    ({"method": "ngram", "num_speculative_tokens": 2}, "ngram", 2),
)


def outputs(llm: LLM) -> list[list[int]]:
    """The outputs at two temperatures."""
    tokens = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=7)
        tokens += [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    return tokens


@functools.cache
def plain_outputs(target: TinySpec) -> list[list[int]]:
    """The outputs without a drafter."""
    with LLM(make(target), **ENGINE) as llm:
        return outputs(llm)


def check_both_ways(target: Path, drafter: Path, out: Path) -> None:
    """Checks that a drafter has the same bytes from its checkpoint and from a converted pair."""
    folder = _core.load_model_folder(str(convert(target, out, drafter, progress=False)))
    assert folder.draft is not None
    loaded = load_drafter(drafter, load_checkpoint(target, progress=False), progress=False)
    assert bytes(folder.draft.arena()) == bytes(loaded.model.arena())


# ---- a target and a block drafter with one distribution ----------------------------------------


def context_free_pair(target: Path, spec: BlockSpec, out: Path) -> tuple[Path, Path]:
    """A target whose logits do not depend on the tokens before, and a drafter of the same kind.

    All embeddings are one vector, and layers add nothing. A drafter without an lm_head of its own
    and without a Markov head has the target's logits.
    """
    target = copy_checkpoint(target, out / "target")
    path = block_models.write(spec, target, out / "drafter")
    config = read_json(path / "config.json")
    layer = config.get("transformer_layer_config", config)
    layer["rms_norm_eps"] = read_json(target / "config.json")["rms_norm_eps"]
    write_json(path / "config.json", config)

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        silence_layers(tensors)
        for name, tensor in tensors.items():
            if name.endswith("embed_tokens.weight"):
                tensor.copy_(tensor[:1].expand_as(tensor))
            elif name == "lm_head.weight":
                tensor.mul_(0.3)  # flat, so that many tokens occur and distributions overlap
        for name in ("norm.weight", "model.norm.weight"):
            if name in tensors:
                tensors[name].fill_(1.0)

    for folder in (target, path):
        edit_tensors(folder, silence)
    return target, path


def check_always_right(target: Path, drafter: Path, spec: BlockSpec) -> None:
    """Checks that a drafter with the target's own distribution has every draft accepted.

    A draft is right if, and only if, it was drawn with the noise of its own position.
    """
    config = {
        "model": str(drafter),
        "num_speculative_tokens": spec.max_drafts,
        "x": {"adaptive": False},
    }
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
    with LLM(target, speculative_config=config, **ENGINE) as llm:
        for output in llm.generate(PROMPTS, params):
            assert len(set(output.outputs[0].token_ids)) > 5  # not always the same token
            counters = output.metrics.speculative_decoding
            assert counters["num_accepted_draft_tokens"] == counters["num_draft_tokens"] > 0
