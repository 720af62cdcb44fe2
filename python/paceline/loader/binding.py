# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a checkpoint is which: every one that a model needs, and no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from paceline._core import ModelFileError

from .family import LM_HEADS, Family, TensorSpec
from .messages import name_some, quote
from .weight_files import INDEX_NAME, RawShard, Shard

STORED_DTYPES: Final = ("BF16", "F16", "F32")

# Where a drafter belongs.
CURE: Final = ": name it in speculative_config['model'], or after --draft of `paceline convert`"


@dataclass(frozen=True)
class BoundTensor:
    """A tensor that the model needs and where the checkpoint keeps it.

    Attributes:
        spec: What is needed.
        shard: The file it lies in.
        source: Its full name there.
        dtype: As stored: "BF16", "F16" or "F32".
        nbytes: Bytes as stored.
    """

    spec: TensorSpec
    shard: Shard
    source: str
    dtype: str
    nbytes: int


def bind(
    family: Family, shards: list[Shard], listing: Mapping[str, str], config_source: str
) -> tuple[BoundTensor, ...]:
    """Finds every tensor that the model needs, and refuses those that nobody asked for."""
    owners = {name: shard for shard in shards for name in shard.file.names()}
    prefix = next((p for p in family.prefixes if f"{p}embed_tokens.weight" in owners), None)
    if prefix is None:
        prefix = family.prefixes[0]
    lm_head = next((name for name in family.lm_head_names if name in owners), None)

    bound: list[BoundTensor] = []
    missing: list[str] = []
    for spec in family.tensors:
        source = prefix + spec.source
        if spec.name == "lm_head.weight":
            source = lm_head or family.lm_head_names[0]
        shard = owners.get(source)
        if shard is None:
            missing.append(source)
            continue
        dtype, shape, nbytes = shard.file.info(source)
        if dtype not in STORED_DTYPES:
            raise NotImplementedError(
                f"{shard.path}: tensor {quote(source)} is stored as {dtype}, which Paceline does "
                f"not support; supported: {', '.join(STORED_DTYPES)}"
            )
        if tuple(shape) != spec.shape:
            raise ModelFileError(
                f"{shard.path}: tensor {quote(source)} has shape {list(shape)}; expected "
                f"{list(spec.shape)} ({spec.shape_keys} of {config_source})"
            )
        bound.append(BoundTensor(spec, shard, source, dtype, nbytes))
    if missing:
        _raise_missing(missing, family, shards, owners)
    _check_unexpected(family, prefix, bound, owners, listing, config_source)
    return tuple(bound)


def _raise_missing(
    missing: list[str], family: Family, shards: list[Shard], owners: Mapping[str, Shard]
) -> None:
    where = str(shards[0].path) if len(shards) == 1 else str(shards[0].path.parent / INDEX_NAME)
    count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
    hint = ""
    if "fc.weight" in owners:
        hint = f"; with 'fc.weight' it is an EAGLE drafter and no target{CURE}"
    elif missing == [family.lm_head_names[0]] and family.tied_table is None:
        hint = '; a model that shares it with the embeddings says "tie_word_embeddings": true'
    elif missing[0].endswith("embed_tokens.weight") and len(missing) > 1:
        prefixes = ", ".join(map(repr, family.prefixes))
        hint = f"; the file has {name_some(owners)}; allowed prefixes: {prefixes}"
    raise ModelFileError(
        f"{where}: {count} missing: {name_some(missing)}, which {family.architecture} needs{hint}"
    )


def _check_unexpected(
    family: Family,
    prefix: str,
    bound: Iterable[BoundTensor],
    owners: Mapping[str, Shard],
    listing: Mapping[str, str],
    config_source: str,
) -> None:
    used = {tensor.source: tensor for tensor in bound}
    unexpected: list[str] = []
    for name, shard in owners.items():
        if name in used or name.endswith("rotary_emb.inv_freq"):
            continue
        if name.startswith(family.ignored_prefixes or ("\0",)):
            continue
        if name.startswith(prefix) and name.removeprefix(prefix) in family.ignored_sources:
            continue
        if family.tied_table is not None and name in LM_HEADS:
            table = next(t for t in used.values() if t.spec.name == family.tied_table)
            _check_tied_copy(name, shard, table, config_source)
            continue
        unexpected.append(name)
    if not unexpected:
        return
    shard = owners[unexpected[0]]
    where = str(shard.path.parent / INDEX_NAME) if listing else str(shard.path)
    count = "1 tensor is" if len(unexpected) == 1 else f"{len(unexpected)} tensors are"
    raise ModelFileError(
        f"{where}: {count} not part of {family.architecture} as {config_source} describes it: "
        f"{name_some(unexpected)}"
    )


def _check_tied_copy(name: str, shard: Shard, table: BoundTensor, config_source: str) -> None:
    """A tied lm_head may be in the file, as a copy of the embeddings."""
    dtype, shape, nbytes = shard.file.info(name)
    same = (dtype, tuple(shape), nbytes) == (
        table.dtype,
        table.spec.shape,
        table.nbytes,
    )
    if same:
        with RawShard(shard.path) as left, RawShard(table.shard.path) as right:
            same = all(
                ours == theirs
                for ours, theirs in zip(
                    left.chunks(name, nbytes), right.chunks(table.source, nbytes), strict=True
                )
            )
    if not same:
        raise ModelFileError(
            f"{shard.path}: tensor {quote(name)} differs from {table.source!r}, but key "
            f'"tie_word_embeddings" of {config_source} is true; expected no such tensor, a copy, '
            "or false"
        )
