# SPDX-License-Identifier: Apache-2.0
"""Opens drafters: detects the method of a folder, and checks the tensors of draft heads.

Token ids among the weights of a draft head are its vocabulary, and the order of its clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline._core import ModelFileError
from paceline.speculative_fields import check_found_method

from .binding import BoundTensor, bind
from .block import translate_block
from .block_facts import BlockFacts, guess_block_facts, read_block_facts, without_copies
from .block_kinds import block_kind_of_config, default_num_drafts, own_block_kind
from .checkpoint import Checkpoint, OpenedModel, open_checkpoint
from .deepseek_v4_dspark import translate_stages
from .drafters import BLOCK_KINDS, GEMMA4_MTP, KINDS, MTP, Target
from .eagle import translate_eagle
from .eagle_facts import Facts, guess_facts, read_facts
from .family import Family
from .folder import CheckpointFolder, Source, as_folder
from .gemma4_assistant import CENTROIDS, PRE_PROJECTION, TOKEN_ORDERING, translate_assistant
from .kinds import kind_of_config, kind_of_tensors, read_speculators
from .messages import quote
from .mtp import check_has_mtp, translate_mtp
from .section import Section
from .tensor_source import NO_WEIGHTS, TensorSource, Weights, read_tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DRAFT_MODEL: Final = "draft_model"
# The canonical names of `d2t`, converted to ids of the target, and of an assistant's token order.
MAP_NAME: Final = "draft_to_target"
ORDERING_NAME: Final = "token_ordering"


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint(OpenedModel):
    """A draft head whose files were checked against a target; only its token ids were read yet."""

    @property
    def kind(self) -> str:
        """Its kind: "eagle", "eagle3", "mtp", "gemma4_mtp", "dflash", "dflash2"
        or "dspark"."""
        return self.family.name

    @property
    def draft_to_target(self) -> npt.NDArray[np.int32] | None:
        """int32 [draft_vocab_size], the target's token id of each row of the lm_head.

        None: row i is token id i.
        """
        return self.ids.get(MAP_NAME)

    @property
    def token_ordering(self) -> npt.NDArray[np.int32] | None:
        """int32 [draft_vocab_size], token ids cluster by cluster; None without clusters."""
        return self.ids.get(ORDERING_NAME)


def detect_method(source: Source, method: str | None = None) -> str:
    """The method of a drafter.

    Args:
        source: The drafter's folder.
        method: The method that the user named, or None.

    Returns:
        "draft_model", "eagle", "eagle3", "mtp", "gemma4_mtp", "dflash", "dflash2" or "dspark". A
        target's MTP layer drafts only where `method` says so. The block drafter in a target's own
        files does unless `method` is "draft_model".

    Raises:
        ModelNotFoundError: The folder or a file is missing.
        ModelFileError: A file is damaged; the configuration and the tensors contradict each other;
            or the weights are a pickle.
        NotImplementedError: It is a drafter of another kind.
        ValueError: It is for another method than `method`.
    """
    folder = as_folder(source)
    top = folder.config
    stated = kind_of_config(top)
    if stated is None and method != DRAFT_MODEL:
        stated = own_block_kind(top)
    folder.check_no_pickle()
    if method == MTP and stated is None:
        check_has_mtp(top)
        return MTP
    seen, sign = kind_of_tensors(folder.weights.owners)
    if stated in BLOCK_KINDS:
        seen, sign = None, ""  # it has the tensors of a draft head, and its configuration decides
    if stated is not None and seen is not None and stated != seen:
        raise ModelFileError(
            f"{top.source}: the configuration is that of a drafter of kind {stated!r}, but tensor "
            f"{quote(sign)} is one of kind {seen!r}"
        )
    found = stated or seen or DRAFT_MODEL
    if method is not None and method != found:
        if sign:
            reason = f"it has tensor {quote(sign)}"
        elif stated is not None:
            reason = f"{top.source} says so"
        else:
            sign = PRE_PROJECTION if method == GEMMA4_MTP else "fc.weight"
            reason = f"it has no tensor {quote(sign)}"
        check_found_method(method, found, f"{folder.path} holds a drafter", f" ({reason})")
    return found


def stated_num_drafts(folder: CheckpointFolder) -> int | None:
    """The number of drafts that a drafter's folder states; None: it states none.

    Folders of `paceline convert` and of the `speculators` package state it. For the folder of
    another block drafter, it is the number of drafts of a whole block, at most the largest
    k of an engine.

    Raises:
        ModelNotFoundError: The folder or its configuration is missing.
        ModelFileError: A key has a wrong value.
        NotImplementedError: It is a drafter of a kind that is not supported.
    """
    if folder.is_converted:
        return folder.converted.num_speculative_tokens
    top = folder.config
    speculators = read_speculators(top)
    if speculators is not None:
        return speculators.num_speculative_tokens
    if (block_kind_of_config(top) or own_block_kind(top)) is None:
        return None
    return default_num_drafts(top)


def open_any_drafter(
    source: Source, target: Target, *, method: str | None = None, dtype: str = "auto"
) -> Checkpoint | DrafterCheckpoint:
    """Opens a drafter of any kind and checks that it is complete and fits a target.

    Args:
        source: The drafter's folder.
        target: The target.
        method: As for `detect_method`.
        dtype: For a draft model, as for `open_checkpoint`; a draft head takes the target's.

    Raises:
        Exception: As for `open_checkpoint` and `open_drafter`.
    """
    folder = as_folder(source)
    if detect_method(folder, method) == DRAFT_MODEL:
        return open_checkpoint(folder, dtype, is_drafter=True)
    return open_drafter(folder, target, method)


def open_drafter(source: Source, target: Target, method: str | None = None) -> DrafterCheckpoint:
    """Opens a draft head and checks that it is complete and fits the target.

    Args:
        source: The folder: `config.json` and `model.safetensors`, or shards with their index.
        target: The target; its weight dtype becomes the drafter's.
        method: The method that the user named, one of `KINDS`, or None.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The drafter, or the way it is stored, is not supported.
        ValueError: It was made for another target, or is none of `KINDS`.
    """
    folder = as_folder(source)
    kind = detect_method(folder, method)
    if kind not in KINDS:
        raise ValueError(
            f"{folder.path}: a {kind!r}; expected one of {', '.join(map(repr, KINDS))}"
        )
    top = folder.config
    family, notes, weights, facts = _translate(kind, top, target, folder.weights)
    tensors = bind(family, weights, top.source)
    ids = {}
    if kind == GEMMA4_MTP and CENTROIDS in weights.owners:
        ids[ORDERING_NAME] = read_ordering(weights.owners, target.vocab_size)
    if facts is not None and facts.has_map:
        ids[MAP_NAME] = read_map(
            weights.owners, facts.prefix, facts.draft_vocab_size or 0, target.vocab_size
        )
    return DrafterCheckpoint(
        path=folder.path,
        top=top,
        family=family,
        weight_dtype=target.weight_dtype,
        tensors=tensors,
        ids=ids,
        notes=(*notes, *_dtype_notes(tensors, target.weight_dtype)),
    )


def _translate(
    kind: str, top: Section, target: Target, weights: Weights
) -> tuple[Family, list[str], Weights, Facts | BlockFacts | None]:
    """Translates a draft head of a known kind.

    Args:
        kind: One of `KINDS`.
        top: Its configuration.
        target: The target that it must fit.
        weights: Its tensors; `NO_WEIGHTS`: they will be dummy weights.

    Returns:
        The description with the tensors it needs; notes for the user; those of the tensors that are
        its own; and the parts of an EAGLE draft head or a block drafter, which may have token ids.
    """
    owners = weights.owners
    has_files = weights is not NO_WEIGHTS
    if kind == GEMMA4_MTP:
        has_centroids = CENTROIDS in owners if has_files else None
        family, notes = translate_assistant(top, target, has_centroids=has_centroids)
        return family, notes, weights, None
    if kind == MTP or own_block_kind(top) == kind:
        translate = translate_mtp if kind == MTP else translate_stages
        family, layers = translate(top, target, weights if has_files else None)
        return family, [], layers, None
    shapes = {name: tuple(source.info(name)[1]) for name, source in owners.items()}
    if kind in BLOCK_KINDS:
        parts = guess_block_facts(top, target)
        if has_files:
            parts = without_copies(read_block_facts(shapes), owners, target)
        return *translate_block(kind, top, parts, target), weights, parts
    facts = read_facts(shapes) if has_files else guess_facts(kind, top, target)
    return *translate_eagle(kind, top, facts, target), weights, facts


def drafter_config(
    hf_config: Mapping[str, object],
    target: Target,
    *,
    method: str | None = None,
    source: str = "config.json",
) -> dict[str, Any]:
    """The canonical description of a draft head, made from a configuration without any weights.

    Args:
        hf_config: The object in the draft head's `config.json`.
        target: The target that it must fit.
        method: One of `KINDS`; needed where the configuration does not name the kind, which is the
            case for EAGLE-1.
        source: The name of the configuration in messages.

    Returns:
        The description of `docs/model-format.md`.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: The draft head needs something that Paceline does not support.
        ValueError: It was made for another target, or its kind is unknown.
    """
    return dummy_head(Section(hf_config, source), target, method).config


def dummy_head(top: Section, target: Target, method: str | None) -> DrafterCheckpoint:
    """A draft head without weights, made from its configuration; see `drafter_config`."""
    stated = kind_of_config(top) or own_block_kind(top)
    kind = method or stated
    if kind not in KINDS or (stated is not None and stated != kind):
        raise ValueError(
            f"{top.source}: method is {method!r:.80} and the configuration says {stated!r}; "
            f"expected one of {', '.join(map(repr, KINDS))}, the same where both say it"
        )
    family = _translate(kind, top, target, NO_WEIGHTS)[0]
    return DrafterCheckpoint(
        path=Path(top.source), top=top, family=family, weight_dtype=target.weight_dtype
    )


def _dtype_notes(tensors: tuple[BoundTensor, ...], weight_dtype: str) -> list[str]:
    stored = {tensor.dtype for tensor in tensors if tensor.spec.is_matrix}
    if weight_dtype == "float32" or stored == {"BF16"}:
        return []
    names = " and ".join(sorted(stored))
    return [f"weights stored as {names} are rounded to bfloat16, the target's dtype"]


_INTEGERS: Final = {"I64": "<i8", "I32": "<i4"}


def _read_ids(shard: TensorSource, name: str, count: int, meaning: str) -> npt.NDArray[np.int64]:
    """Reads a list of integers."""
    import numpy as np

    dtype, shape, _ = shard.info(name)
    where = f"{shard.path}: tensor {name!r}"
    if dtype not in _INTEGERS:
        raise ModelFileError(f"{where} is stored as {dtype}; expected {' or '.join(_INTEGERS)}")
    if tuple(shape) != (count,):
        raise ModelFileError(f"{where} has shape {list(shape)}; expected [{count}], {meaning}")
    return _read_array(shard, name, _INTEGERS[dtype]).astype(np.int64)


def read_ordering(owners: Mapping[str, TensorSource], vocab_size: int) -> npt.NDArray[np.int32]:
    """Reads the token ids of an assistant's clusters, cluster by cluster: each id once."""
    import numpy as np

    name = TOKEN_ORDERING
    if name not in owners:
        raise ModelFileError(
            f"{owners[CENTROIDS].path}: tensor {CENTROIDS!r} is in the weights, but {name!r} is "
            "not; expected both or none of the two"
        )
    where = f"{owners[name].path}: tensor {name!r}"
    ids = _read_ids(owners[name], name, vocab_size, "a token id of the target at each index")
    is_bad = (ids < 0) | (ids >= vocab_size)
    if is_bad.any():
        index = int(is_bad.argmax())
        raise ModelFileError(
            f"{where}[{index}] is {int(ids[index])}; expected ids from 0 to {vocab_size - 1}"
        )
    counts = np.bincount(ids, minlength=vocab_size)
    if counts.max() > 1:
        token = int(counts.argmax())
        first, second = (int(index) for index in np.flatnonzero(ids == token)[:2])
        raise ModelFileError(
            f"{where} has token id {token} at indices {first} and {second}; expected every id once"
        )
    return ids.astype(np.int32)


def read_map(
    owners: Mapping[str, TensorSource], prefix: str, num_rows: int, vocab_size: int
) -> npt.NDArray[np.int32]:
    """Reads `d2t`, whose offsets are added to the row, as token ids of the target; checks `t2d`."""
    import numpy as np

    name = f"{prefix}d2t" if f"{prefix}d2t" in owners else "d2t"
    where = f"{owners[name].path}: tensor {name!r}"
    offsets = _read_ids(owners[name], name, num_rows, "a value for each row of 'lm_head.weight'")
    rows = np.arange(num_rows, dtype=np.int64)
    # An offset near the end of int64 would wrap around, perhaps into the allowed range.
    is_bad = (offsets < -rows) | (offsets >= vocab_size - rows)
    ids = rows + np.where(is_bad, 0, offsets)
    if is_bad.any():
        row = int(is_bad.argmax())
        raise ModelFileError(
            f"{where}[{row}] is {int(offsets[row])}, which is row {row} as token id "
            f"{row + int(offsets[row])}; expected ids from 0 to {vocab_size - 1}, as offsets "
            "from the row"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) != num_rows:
        token = int(unique[(counts > 1).argmax()])
        first, second = (int(row) for row in np.flatnonzero(ids == token)[:2])
        raise ModelFileError(
            f"{where} gives rows {first} and {second} the same token id {token}; expected a "
            "different one for each row"
        )
    _check_mask(owners, prefix, unique, vocab_size)
    return ids.astype(np.int32)


def _check_mask(
    owners: Mapping[str, TensorSource], prefix: str, ids: npt.NDArray[np.int64], vocab_size: int
) -> None:
    """Checks that `t2d`, where a file has it, marks the token ids that `d2t` maps to."""
    import numpy as np

    name = f"{prefix}t2d" if f"{prefix}t2d" in owners else "t2d"
    if name not in owners:
        return
    shard = owners[name]
    dtype, shape, _ = shard.info(name)
    where = f"{shard.path}: tensor {name!r}"
    if dtype not in ("BOOL", "U8") or tuple(shape) != (vocab_size,):
        raise ModelFileError(
            f"{where} is {dtype} of shape {list(shape)}; expected BOOL of shape [{vocab_size}], a "
            "mark for each id of the target"
        )
    marked = np.flatnonzero(_read_array(shard, name, "u1"))
    if not np.array_equal(marked, ids):
        raise ModelFileError(
            f"{where} marks {len(marked)} ids, but 'd2t' reaches {len(ids)}"
            f"{'' if len(marked) != len(ids) else ' others'}; expected the same ids"
        )


def _read_array(shard: TensorSource, name: str, dtype: str) -> npt.NDArray[Any]:
    import numpy as np

    return np.frombuffer(read_tensor(shard, name), np.dtype(dtype))
