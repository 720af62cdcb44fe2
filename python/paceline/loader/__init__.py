# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face checkpoints into models; the only place that knows their names.

`docs/loading.md` says what is read and what is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, load_weights, open_checkpoint, open_directory
from .drafter_checkpoint import (
    DRAFT_MODEL,
    DrafterCheckpoint,
    detect_method,
    drafter_config,
    load_drafter_weights,
    open_drafter,
)
from .drafters import GEMMA4_MTP, Target
from .families import ARCHITECTURES, check_dtype, decoder_config, translate
from .gemma4_assistant import check_reads_layers_of
from .hf_config import HfConfig, Section, parse_hf_config, read_hf_config, read_json_object
from .kinds import kind_of_config
from .tokenizer import TokenizerInfo, check_tokenizers, load_tokenizer

if TYPE_CHECKING:
    from paceline import _core

__all__ = [
    "ARCHITECTURES",
    "Checkpoint",
    "DrafterCheckpoint",
    "LoadedModel",
    "Target",
    "TokenizerInfo",
    "check_compatible",
    "check_dtype",
    "check_tokenizers",
    "decoder_config",
    "detect_method",
    "drafter_config",
    "dummy_drafter",
    "dummy_model",
    "load_checkpoint",
    "load_drafter",
    "load_dummy",
    "load_dummy_drafter",
    "open_checkpoint",
    "open_drafter",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in place, and what came with it.

    Attributes:
        path: The checkpoint's folder.
        model: The weights; shared by every executor that uses them.
        family: "llama", "qwen3", "gemma3" or "gemma4"; of a drafter that rides on a target, its
            kind.
        architecture: The class name in `config.json`.
        config: The canonical description of `docs/model-format.md`.
        weight_dtype: Of the matrices: "float32" or "bfloat16".
        stored_dtypes: How many matrices the files hold in each dtype, e.g. `{"BF16": 210}`.
        vocab_size: Rows of the embedding table.
        max_position: Positions that the model was made for.
        eos_token_ids: Ids that end a text; maybe none.
        bos_token_id: The id that starts a text, if the files name one.
        tokenizer: None for a folder without `tokenizer.json`, whose model takes token ids only.
        notes: What a user may want to know about choices made while loading.
        is_dummy: The weights are made up; see `load_dummy`.
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
    is_dummy: bool = False

    @property
    def config_json(self) -> str:
        """The canonical description as JSON."""
        return json.dumps(self.config)

    @property
    def method(self) -> str:
        """How it drafts, as a drafter: "draft_model", "eagle", "eagle3" or "gemma4_mtp"."""
        drafter = self.config.get("drafter")
        return DRAFT_MODEL if drafter is None else str(drafter["kind"])

    def as_target(self) -> Target:
        """What a drafter for this model has to fit."""
        return Target(self.path, self.architecture, self.config, self.weight_dtype)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: bool = True,
) -> LoadedModel:
    """Loads a checkpoint in Hugging Face layout.

    Args:
        path: The folder: `config.json`, `model.safetensors` or shards with their index, and maybe
            `tokenizer.json` and `generation_config.json`.
        dtype: What matrices become: "float32", "bfloat16", or "auto": bfloat16 when every matrix is
            stored as BF16, else float32, which holds F16 and F32 without loss.
        device: Where the weights will lie: "cpu" or "cuda".
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The model and what came with it.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported; or there is no
            such device.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
        MemoryError: There is no room for the weights.
    """
    checkpoint = open_checkpoint(path, dtype)
    # First what is quick, so that a bad tokenizer does not show after minutes.
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_weights(checkpoint, device=device, progress=progress)
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        family=checkpoint.family.name,
        architecture=checkpoint.family.architecture,
        config=checkpoint.config,
        weight_dtype=checkpoint.weight_dtype,
        stored_dtypes=checkpoint.stored_dtypes,
        vocab_size=checkpoint.family.config["vocab_size"],
        max_position=checkpoint.family.config["max_position"],
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.hf.bos_token_id,
        tokenizer=tokenizer,
        notes=checkpoint.notes,
    )


def load_dummy(
    path: str | os.PathLike[str], *, dtype: str = "auto", device: str = "cpu", seed: int = 0
) -> LoadedModel:
    """Makes up the weights of a configuration, for benches and tests: the text is meaningless.

    Matrices and embeddings are normal with standard deviation 0.02, norms neutral, biases 0; they
    are made where they will lie.

    Args:
        path: A folder with `config.json`, and maybe `tokenizer.json`; weight files are not looked
            at.
        dtype: Of the matrices: "float32", "bfloat16", or "auto": what the configuration names, and
            bfloat16 where that is neither.
        device: Where the weights will lie: "cpu" or "cuda".
        seed: Same seed, same weights.

    Returns:
        The model and what came with it.

    Raises:
        ModelNotFoundError: The folder or its configuration is missing.
        ModelFileError: A file is damaged.
        NotImplementedError: The model is not supported, or there is no such device.
        ValueError: `dtype` is none of the above.
        MemoryError: There is no room for the weights.
    """
    directory = open_directory(path)
    hf = read_hf_config(directory, ARCHITECTURES)
    return _fill_dummy(hf, directory, load_tokenizer(directory), dtype, device, seed)


def dummy_model(
    hf_config: Mapping[str, object],
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Makes up the weights of a configuration at hand; see `load_dummy`.

    Args:
        hf_config: The object in a `config.json`.
        name: What messages call it; also the model's `path`.
        dtype: As for `load_dummy`.
        device: As for `load_dummy`.
        seed: As for `load_dummy`.

    Returns:
        The model, without a tokenizer.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: As for `load_dummy`.
        ValueError: As for `load_dummy`.
        MemoryError: There is no room for the weights.
    """
    hf = parse_hf_config(hf_config, name, ARCHITECTURES)
    return _fill_dummy(hf, Path(name), None, dtype, device, seed)


def _fill_dummy(
    hf: HfConfig,
    path: Path,
    tokenizer: TokenizerInfo | None,
    dtype: str,
    device: str,
    seed: int,
) -> LoadedModel:
    from paceline import _core

    check_dtype(dtype)
    family = translate(hf)
    weight_dtype = _named_dtype(hf.text, hf.top) if dtype == "auto" else dtype
    config = family.config_for(weight_dtype)
    builder = _core.ModelBuilder(json.dumps(config), weight_dtype, device)
    builder.fill_dummy(seed)
    return LoadedModel(
        path=path,
        model=builder.finish(),
        family=family.name,
        architecture=family.architecture,
        config=config,
        weight_dtype=weight_dtype,
        stored_dtypes={},
        vocab_size=config["vocab_size"],
        max_position=config["max_position"],
        eos_token_ids=tuple(i for i in hf.eos_token_ids if i < config["vocab_size"]),
        bos_token_id=hf.bos_token_id,
        tokenizer=tokenizer,
        notes=("the weights are made up (load_format 'dummy'): the text is meaningless",),
        is_dummy=True,
    )


def dummy_drafter(
    hf_config: Mapping[str, object],
    target: LoadedModel,
    name: str,
    *,
    method: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel | None:
    """Makes up the weights of a configuration of a drafter that rides on a target.

    Args:
        hf_config: The object in a `config.json`.
        target: What it drafts for; its weight dtype is the drafter's.
        name: What messages call it; also the drafter's `path`.
        method: "eagle", "eagle3" or "gemma4_mtp"; None: what the configuration says.
        device: As for `load_dummy`.
        seed: As for `load_dummy`.

    Returns:
        The drafter; None for the configuration of a model of its own.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: As for `load_dummy`.
        ValueError: It was made for another target, or is not what `method` says.
        MemoryError: There is no room for the weights.
    """
    from paceline import _core

    kind = kind_of_config(Section(hf_config, name)) or method
    if kind is None or kind == DRAFT_MODEL:
        return None
    facts = target.as_target()
    config = drafter_config(hf_config, facts, method=method, source=name)
    builder = _core.ModelBuilder(json.dumps(config), target.weight_dtype, device)
    builder.fill_dummy(seed)
    return LoadedModel(
        path=Path(name),
        model=builder.finish(),
        family=kind,
        architecture=kind,
        config=config,
        weight_dtype=target.weight_dtype,
        stored_dtypes={},
        vocab_size=config["vocab_size"],
        max_position=config["max_position"],
        eos_token_ids=(),
        bos_token_id=None,
        tokenizer=None,
        notes=("the weights are made up (load_format 'dummy'): the text is meaningless",),
        is_dummy=True,
    )


def load_dummy_drafter(
    path: str | os.PathLike[str],
    target: LoadedModel,
    *,
    method: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Makes up the weights of a drafter of any kind; see `load_dummy`.

    Args:
        path: A folder with the drafter's `config.json`; weight files are not looked at.
        target: What it drafts for.
        method: "draft_model", "eagle", "eagle3" or "gemma4_mtp"; None: what the configuration says,
            which is a model of its own where it says nothing, as that of an EAGLE-1 head.
        dtype: Of a draft model, as for `load_dummy`; any other takes the target's.
        device: As for `load_dummy`.
        seed: As for `load_dummy`.

    Returns:
        The drafter.

    Raises:
        ModelNotFoundError: The folder or its configuration is missing.
        ModelFileError: A file is damaged.
        NotImplementedError: The drafter is not supported, or there is no such device.
        ValueError: It was made for another target, or is not what `method` says.
        MemoryError: There is no room for the weights.
    """
    directory = open_directory(path)
    hf_config = read_json_object(directory / "config.json", "the drafter's configuration")
    drafter = dummy_drafter(
        hf_config, target, str(directory), method=method, device=device, seed=seed
    )
    return drafter or load_dummy(path, dtype=dtype, device=device, seed=seed)


def _named_dtype(*sections: Section) -> str:
    """The dtype that a configuration names, of those that weights can have."""
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                return "float32" if section.text(key) == "float32" else "bfloat16"
    return "bfloat16"


def load_drafter(
    path: str | os.PathLike[str],
    target: LoadedModel,
    *,
    method: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    progress: bool = True,
) -> LoadedModel:
    """Loads a drafter of any kind for a target.

    Args:
        path: The drafter's folder.
        target: What it drafts for. A drafter that rides on it is checked against it and takes its
            dtype.
        method: "draft_model", "eagle", "eagle3" or "gemma4_mtp"; None: what the checkpoint is.
        dtype: Of a draft model, as for `load_checkpoint`.
        device: Where the weights will lie: "cpu" or "cuda"; the target's.
        progress: Show a progress bar where standard error is a terminal.

    Returns:
        The drafter; `LoadedModel.method` says what it is.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown; or the
            weights are a pickle.
        NotImplementedError: The drafter, or the way it is stored, is not supported.
        ValueError: It is not what `method` says, or was made for another target.
        MemoryError: There is no room for the weights.
    """
    if detect_method(path, method) == DRAFT_MODEL:
        return load_checkpoint(path, dtype=dtype, device=device, progress=progress)
    checkpoint = open_drafter(path, target.as_target(), method)
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_drafter_weights(checkpoint, device=device, progress=progress)
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        family=checkpoint.kind,
        architecture=checkpoint.family.architecture,
        config=checkpoint.config,
        weight_dtype=checkpoint.weight_dtype,
        stored_dtypes=checkpoint.stored_dtypes,
        vocab_size=checkpoint.family.config["vocab_size"],
        max_position=checkpoint.family.config["max_position"],
        eos_token_ids=(),
        bos_token_id=None,
        tokenizer=tokenizer,
        notes=checkpoint.notes,
    )


def check_pair(
    path: str | os.PathLike[str],
    draft_path: str | os.PathLike[str],
    *,
    method: str | None = None,
    dtype: str = "auto",
) -> None:
    """Opens two checkpoints and reads no weights, so that what is wrong with the drafter shows
    before the target's are read.

    Args:
        path: The target's folder.
        draft_path: The drafter's.
        method: As for `load_drafter`.
        dtype: As for `load_checkpoint`.

    Raises:
        ModelNotFoundError: As for `load_drafter`.
        ModelFileError: As for `load_drafter`.
        NotImplementedError: As for `load_drafter`.
        ValueError: As for `load_drafter`.
    """
    checkpoint = open_checkpoint(path, dtype)
    if detect_method(draft_path, method) == DRAFT_MODEL:
        open_checkpoint(draft_path, dtype)
        return
    target = Target(
        checkpoint.path,
        checkpoint.family.architecture,
        checkpoint.config,
        checkpoint.weight_dtype,
    )
    open_drafter(draft_path, target, method)


def check_compatible(target: LoadedModel, draft: LoadedModel) -> None:
    """Checks that a drafter's token ids mean what the target's mean.

    Ids of made-up weights mean nothing: without both tokenizers there is nothing to compare.
    A drafter that rides on a target seldom brings a tokenizer; it is checked by its sizes.

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
    """Checks that a drafter that rides on a target can run beside one, maybe not the one it was
    loaded for.

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
