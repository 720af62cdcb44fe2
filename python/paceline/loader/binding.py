# SPDX-License-Identifier: Apache-2.0
"""Matches the tensors of a checkpoint with those that a model needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paceline._core import ModelFileError

from .conversion import Sibling, StoredTensor
from .family import LM_HEADS, Family, TensorSpec
from .formats import FP8_DTYPE, PLAIN_DTYPES
from .messages import name_some, quote
from .tensor_source import TensorSource, Weights

if TYPE_CHECKING:
    from paceline import _core

    from .conversion import Elements

_EXPERT: Final = re.compile(r"(\.experts\.)\d+\.\w+\.weight$")
# The cure, in messages, for a drafter that was given as the target.
CURE: Final = ": name it in speculative_config['model'], or after --draft of `paceline convert`"


@dataclass(frozen=True)
class BoundTensor:
    """A tensor that a model needs, found in a checkpoint.

    Attributes:
        spec: The tensor that the model needs.
        shard: What holds it.
        source: Its full name there.
        dtype: The stored dtype, as safetensors spells it.
        nbytes: The size as stored, in bytes; with a part, that of the part.
        siblings: Further tensors that it is made of, by `Sibling.source`.
    """

    spec: TensorSpec
    shard: TensorSource
    source: str
    dtype: str
    nbytes: int
    siblings: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def sources(self) -> Iterator[str]:
        """Every name in the checkpoint that it is made of."""
        yield self.source
        yield from (stored.name for stored in self.siblings.values())

    def converted(self) -> Elements | None:
        """The elements of a tensor that is made; None: it is stored as it is."""
        if self.spec.conversion is None:
            return None
        return self.spec.conversion.array(StoredTensor(self.shard, self.source), self.siblings)

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the tensor; see `TensorSource.chunks`."""
        array = self.converted()
        if array is not None:
            return iter((array.tobytes(),))
        chunks = self.shard.chunks(self.source)
        part = self.spec.part
        return chunks if part is None else part.cut(chunks, self.shard.info(self.source)[2])

    def put(self, builder: _core.ModelBuilder) -> None:
        """Fills its weight of a model; see `TensorSource.put`."""
        array = self.converted()
        if array is not None:
            return builder.put_array(self.spec.name, array)
        part = self.spec.part
        if part is None:
            self.shard.put(builder, self.spec.name, self.source)
        else:
            self.shard.put_part(builder, self.spec.name, self.source, part)


def bind(family: Family, weights: Weights, config_source: str) -> tuple[BoundTensor, ...]:
    """Finds every tensor that a model needs, and refuses tensors that it does not use.

    Args:
        family: The model, translated.
        weights: Where the tensors come from.
        config_source: The configuration file, for messages.

    Returns:
        The tensors in the order of `family.tensors`.

    Raises:
        ModelFileError: Tensors are missing, misshapen or unknown.
        NotImplementedError: A tensor is stored in a dtype that is not supported.
    """
    owners = weights.owners
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
            if source not in missing:
                missing.append(source)
            continue
        dtype, _, nbytes = shard.info(source)
        if dtype not in spec.dtypes:
            raise _wrong_dtype(f"{shard.path}: tensor {quote(source)}", dtype, spec, config_source)
        allowed = spec.stored_shapes or (spec.shape,)
        _check_shape(shard, source, allowed, spec.shape_keys, config_source)
        if spec.part is not None:
            nbytes = nbytes // spec.part.stored_rows * spec.part.rows
        siblings: dict[str, StoredTensor] = {}
        if (made := spec.conversion) is not None:
            siblings = _siblings(made.siblings, prefix, weights, config_source, missing)
            dtype = made.dtype(dtype)
        bound.append(BoundTensor(spec, shard, source, dtype, nbytes, siblings))
    if missing:
        _raise_missing(missing, family, weights)
    _check_unexpected(family, prefix, bound, weights, config_source)
    return tuple(bound)


def _check_shape(
    shard: TensorSource,
    source: str,
    allowed: Sequence[tuple[int, ...]],
    shape_keys: str,
    config_source: str,
) -> None:
    shape = tuple(shard.info(source)[1])
    if shape not in allowed:
        raise ModelFileError(
            f"{shard.path}: tensor {quote(source)} has shape {list(shape)}; expected "
            f"{' or '.join(str(list(one)) for one in allowed)} ({shape_keys} of {config_source})"
        )


def _siblings(
    siblings: Iterable[Sibling],
    prefix: str,
    weights: Weights,
    config_source: str,
    missing: list[str],
) -> dict[str, StoredTensor]:
    """Finds the further tensors of a conversion; adds those that are missing to a list."""
    found: dict[str, StoredTensor] = {}
    for sibling in siblings:
        source = prefix + sibling.source
        shard = weights.owners.get(source)
        if shard is None:
            if sibling.is_required and source not in missing:
                missing.append(source)
            continue
        dtype = shard.info(source)[0]
        if dtype not in sibling.dtypes:
            raise _wrong_format_dtype(
                f"{shard.path}: tensor {quote(source)}", dtype, sibling.dtypes, config_source
            )
        _check_shape(shard, source, sibling.shapes, sibling.shape_keys, config_source)
        found[sibling.source] = StoredTensor(shard, source)
    return found


def same_bytes(shard: TensorSource, name: str, other: TensorSource, other_name: str) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if shard.is_same(name, other, other_name):
        return True
    dtype, shape, nbytes = shard.info(name)
    other_dtype, other_shape, other_nbytes = other.info(other_name)
    if (dtype, tuple(shape), nbytes) != (other_dtype, tuple(other_shape), other_nbytes):
        return False
    return all(
        ours == theirs
        for ours, theirs in zip(shard.chunks(name), other.chunks(other_name), strict=True)
    )


def value_error(error: ValueError, tensors: Iterable[BoundTensor]) -> ValueError:
    """The library's error about a value of a tensor, with the tensor's file and its name there.

    Args:
        error: The error, which begins with the canonical name of the tensor.
        tensors: The tensors that it may be about.
    """
    message = str(error)
    found = [tensor for tensor in tensors if message.startswith(f"'{tensor.spec.name}'")]
    if len(found) != 1:
        return error
    (tensor,) = found
    rest = message[len(tensor.spec.name) + 2 :]
    return ModelFileError(f"{tensor.shard.path}: tensor {quote(tensor.source)}{rest}")


def _wrong_dtype(tensor: str, dtype: str, spec: TensorSpec, config_source: str) -> Exception:
    if spec.dtypes != PLAIN_DTYPES:
        return _wrong_format_dtype(tensor, dtype, spec.dtypes, config_source)
    hint = ""
    if dtype == FP8_DTYPE:
        hint = f' ({dtype} only where "quantization_config" of {config_source} gives it scales)'
    return NotImplementedError(
        f"{tensor} is stored as {dtype}, which Paceline does not support; supported: "
        f"{', '.join(PLAIN_DTYPES)}{hint}"
    )


def _wrong_format_dtype(
    tensor: str, dtype: str, allowed: Sequence[str], config_source: str
) -> ModelFileError:
    return ModelFileError(
        f"{tensor} is stored as {dtype}; expected {' or '.join(allowed)}, because key "
        f'"quantization_config" of {config_source} gives its matrix scales'
    )


def _scaled_lm_head(name: str, weights: Weights) -> str | None:
    """A tensor of an lm_head that has scales."""
    module = name.removesuffix("weight")
    ends = ("qweight", "weight_packed", "weight_scale")
    return next((module + end for end in ends if module + end in weights.owners), None)


def _raise_missing(missing: list[str], family: Family, weights: Weights) -> None:
    count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
    hint = ""
    if not weights.owners:
        hint = "; there are no tensors"
    elif "fc.weight" in weights.owners and "drafter" not in family.config:
        hint = f"; with 'fc.weight' it is an EAGLE draft head and no target{CURE}"
    elif missing == [family.lm_head_names[0]] and (found := _scaled_lm_head(missing[0], weights)):
        hint = (
            f"; {quote(found)} is there, but an lm_head with scales is not supported; use a "
            "checkpoint that leaves it out"
        )
    elif missing == [family.lm_head_names[0]] and family.tied_table is None:
        hint = '; a model that shares it with the embeddings says "tie_word_embeddings": true'
    elif f"{missing[0]}_blocks" in weights.owners:
        hint = '; for its "_blocks" the configuration needs a "quantization_config" (mxfp4)'
    elif missing[0].removesuffix("_blocks") in weights.owners:
        hint = '; without "_blocks" the configuration may have no "quantization_config"'
    elif (plain := f"{missing[0].rpartition('.')[0]}.weight") in weights.owners and missing[
        0
    ].endswith((".qweight", ".weight_packed")):
        hint = (
            f"; {quote(plain)} is there, a matrix without scales, which the lists of the key "
            '"quantization_config" have to leave out'
        )
    elif (joined := _EXPERT.sub(r"\1gate_up_proj", missing[0])) in weights.owners:
        hint = (
            f"; its experts are joined in {quote(joined)}, but experts with scales have tensors of "
            "their own"
        )
    elif missing[0].endswith("embed_tokens.weight") and len(missing) > 1:
        prefixes = ", ".join(map(repr, family.prefixes))
        hint = f"; there are {name_some(weights.owners)}; allowed prefixes: {prefixes}"
    else:
        module = missing[0].rpartition(".")[0]
        names = sorted(name for name in weights.owners if name.rpartition(".")[0] == module)
        seen = f"; there are {name_some(names)}" if names else ""
        hint = f"{seen}; expected a whole checkpoint, or a configuration that fits its tensors"
        ends = (".qweight", ".weight_packed", ".weight_scale")
        if missing[0].endswith(".weight") and any(name.endswith(ends) for name in names):
            hint += ': such weights need the key "quantization_config" in config.json'
    raise ModelFileError(
        f"{weights.where}: {count} missing: {name_some(missing)}, which {family.architecture} "
        f"needs{hint}"
    )


def _check_unexpected(
    family: Family,
    prefix: str,
    bound: Iterable[BoundTensor],
    weights: Weights,
    config_source: str,
) -> None:
    used = {name: tensor for tensor in bound for name in tensor.sources}
    unexpected: list[str] = []
    for name, shard in weights.owners.items():
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
    count = "1 tensor is" if len(unexpected) == 1 else f"{len(unexpected)} tensors are"
    raise ModelFileError(
        f"{weights.where}: {count} not part of {family.architecture} as {config_source} describes "
        "it: "
        f"{name_some(unexpected)}; expected no further tensors, or a configuration that has a use "
        "for them"
    )


def _check_tied_copy(
    name: str, shard: TensorSource, table: BoundTensor, config_source: str
) -> None:
    """Refuses a tied lm_head that is neither the embeddings nor a copy of them."""
    if not same_bytes(shard, name, table.shard, table.source):
        raise ModelFileError(
            f"{shard.path}: tensor {quote(name)} differs from {table.source!r}, but key "
            f'"tie_word_embeddings" of {config_source} is true; expected no such tensor, a copy, '
            "or false"
        )
