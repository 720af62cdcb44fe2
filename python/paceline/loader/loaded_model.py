# SPDX-License-Identifier: Apache-2.0
"""A loaded model, and whether a target and a drafter fit each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import OpenedModel
from .drafter_checkpoint import DRAFT_MODEL
from .drafters import GEMMA4_MTP, Target
from .gemma4_assistant import check_reads_layers_of
from .section import Section
from .tokenizer import TokenizerInfo, check_tokenizers
from .weight_files import FileStamp, Shard

if TYPE_CHECKING:
    from paceline import _core


@dataclass(eq=False)
class WeightOrigin:
    """Where the weights of a model came from. Everything that shares the weights shares it.

    Attributes:
        files: The files, as they were when they were opened; none for tensors in memory and for
            dummy weights.
        num_updates: How often other weights took their place.
    """

    files: tuple[FileStamp, ...] = ()
    num_updates: int = 0

    @classmethod
    def of(cls, opened: OpenedModel) -> WeightOrigin:
        """That of a model whose files were opened."""
        sources = [
            source
            for tensor in opened.tensors
            for source in (tensor.shard, *(stored.shard for stored in tensor.siblings.values()))
        ]
        return cls(tuple({one.stamp: None for one in sources if isinstance(one, Shard)}))

    def replace(self) -> None:
        """Notes that other weights took the place of those of the files."""
        self.files = ()
        self.num_updates += 1


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, its tokenizer and its settings.

    Attributes:
        path: The checkpoint's folder, or the name of the argument that had the tensors.
        model: The weights; shared by every executor that uses them.
        family: "llama", "qwen3", "gemma3", "gemma4" or "gpt_oss"; for a draft head, its kind.
        architecture: The class name in `config.json`.
        config: The canonical description of `docs/model-format.md`.
        weight_dtype: The dtype of matrices: "float32" or "bfloat16".
        stored_dtypes: The number of matrices stored in each dtype, e.g. `{"BF16": 210}`.
        vocab_size: The number of rows of the embedding table.
        max_position: The number of positions that the model was made for.
        eos_token_ids: Token ids that end a completion; may be empty.
        bos_token_id: The token id that starts a prompt, if the files name one.
        tokenizer: The tokenizer; None for a folder without `tokenizer.json`, whose model takes
            token ids only.
        notes: Choices made while loading that a user may want to know about.
        hf_config: The configuration that was read; `update_weights` translates it again. None for
            a model that was not read from the layout of Hugging Face.
        generation_config: The object in `generation_config.json`; None without one.
        is_dummy: The weights are dummy weights; see `load_dummy`.
        weights: Where the weights came from.
    """

    path: Path
    model: _core.Model
    family: str
    architecture: str
    config: dict[str, Any]
    weight_dtype: str
    stored_dtypes: dict[str, int]
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer: TokenizerInfo | None
    notes: tuple[str, ...]
    hf_config: Section | None = None
    generation_config: Section | None = None
    is_dummy: bool = False
    weights: WeightOrigin = field(default_factory=WeightOrigin, compare=False)

    @classmethod
    def of(
        cls,
        opened: OpenedModel,
        model: _core.Model,
        tokenizer: TokenizerInfo | None,
        *,
        is_dummy: bool = False,
    ) -> LoadedModel:
        """A model whose files were checked, with its weights and its tokenizer."""
        config = opened.config
        return cls(
            path=opened.path,
            model=model,
            family=opened.family.name,
            architecture=opened.family.architecture,
            config=config,
            weight_dtype=opened.weight_dtype,
            stored_dtypes=opened.stored_dtypes,
            vocab_size=config["vocab_size"],
            max_position=config["max_position"],
            eos_token_ids=opened.eos_token_ids,
            bos_token_id=opened.bos_token_id,
            tokenizer=tokenizer,
            notes=opened.notes,
            hf_config=opened.top,
            generation_config=opened.generation,
            is_dummy=is_dummy,
            weights=WeightOrigin.of(opened),
        )

    @property
    def config_json(self) -> str:
        """The canonical description as JSON."""
        return json.dumps(self.config)

    @property
    def method(self) -> str:
        """The method it is a drafter for: "draft_model", or the kind of a draft head."""
        drafter = self.config.get("drafter")
        return DRAFT_MODEL if drafter is None else str(drafter["kind"])

    def as_target(self) -> Target:
        """The facts that a draft head for this model must fit."""
        return Target(self.path, self.architecture, self.config, self.weight_dtype)


# ---- do target and drafter fit? ------------------------------------------------------------------


def check_compatible(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a drafter's token ids mean what the target's mean.

    With dummy weights token ids have no meaning, so without both tokenizers there is nothing to
    compare. A draft head seldom comes with a tokenizer; its sizes are checked.

    Raises:
        ValueError: The tokenizers differ, or one is missing and the embedding tables have different
            numbers of rows.
    """
    if draft.method != DRAFT_MODEL:
        check_drafter_fits(target, draft)
        if target.tokenizer is None or draft.tokenizer is None:
            return
    has_both = target.tokenizer is not None and draft.tokenizer is not None
    if target.is_dummy and draft.is_dummy and not has_both:
        return
    check_tokenizers(
        target.path,
        target.tokenizer,
        target.vocab_size,
        draft.path,
        draft.tokenizer,
        draft.vocab_size,
    )


def check_drafter_fits(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a draft head fits a target, which need not be the one it was loaded for.

    Raises:
        ValueError: Sizes or dtypes differ; names both values.
    """
    target_hidden_size = draft.config["drafter"]["target_hidden_size"]
    for what, ours, theirs in (
        ("hidden size", target.config["hidden_size"], target_hidden_size),
        ("vocabulary", target.vocab_size, draft.vocab_size),
        ("weight dtype", target.weight_dtype, draft.weight_dtype),
    ):
        if ours != theirs:
            raise ValueError(
                f"{draft.path}: the drafter was loaded for a target whose {what} is {theirs!r}, "
                f"but that of {target.path} is {ours!r}"
            )
    if draft.method != GEMMA4_MTP:
        return
    if draft.config["embed_scale"] != target.config["embed_scale"]:
        raise ValueError(
            f"{draft.path}: the drafter was loaded for a target that multiplies its embeddings by "
            f"{draft.config['embed_scale']}, but {target.path} does by "
            f"{target.config['embed_scale']}"
        )
    check_reads_layers_of(
        draft.config,
        target.as_target(),
        f"{draft.path}: the drafter was loaded for another target:",
    )
