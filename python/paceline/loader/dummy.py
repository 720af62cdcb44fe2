# SPDX-License-Identifier: Apache-2.0
"""Models of a configuration with made-up weights, for benches and tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from .checkpoint import open_directory
from .drafter_checkpoint import DRAFT_MODEL, drafter_config
from .families import ARCHITECTURES, check_dtype, translate
from .hf_config import CONFIG_NAME, HfConfig, parse_hf_config, read_hf_config
from .kinds import kind_of_config
from .loaded_model import LoadedModel
from .section import Section, read_json_object
from .tokenizer import TokenizerInfo, load_tokenizer


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
    hf_config = read_json_object(directory / CONFIG_NAME, "the drafter's configuration")
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
