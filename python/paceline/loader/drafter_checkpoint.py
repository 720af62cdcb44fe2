# SPDX-License-Identifier: Apache-2.0
"""A drafter on disk that rides on a target: telling its kind, binding its tensors, loading them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline._core import ModelFileError

from .binding import BoundTensor, bind
from .checkpoint import check_directory
from .drafter_ids import read_map, read_ordering
from .drafters import GEMMA4_MTP, KINDS, Target
from .eagle import translate_eagle
from .eagle_facts import guess_facts, read_facts
from .family import Family
from .files import exists
from .gemma4_assistant import CENTROIDS, PRE_PROJECTION, translate_assistant
from .hf_config import CONFIG_NAME
from .kinds import kind_of_config, kind_of_tensors
from .messages import quote
from .section import Section, read_json_object
from .weight_files import INDEX_NAME, WEIGHTS_NAME, RawShard, Shard, open_shards

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DRAFT_MODEL: Final = "draft_model"
PICKLE_NAME: Final = "pytorch_model.bin"
# The canonical names of `d2t`, once it holds ids of the target, and of an assistant's token order.
MAP_NAME: Final = "draft_to_target"
ORDERING_NAME: Final = "token_ordering"


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter whose files were checked against a target; only its ids were read yet.

    Attributes:
        path: The folder.
        kind: "eagle", "eagle3" or "gemma4_mtp".
        family: The drafter, translated.
        weight_dtype: What matrices become: that of the target.
        tensors: Every tensor of weights, in the order in which the drafter is filled.
        draft_to_target: int32 [draft_vocab_size], the target's id of each row of the lm_head; None
            where the two are the same.
        token_ordering: int32 [draft_vocab_size], ids cluster by cluster; None without clusters.
        notes: What a user may want to know about the choices made, one sentence each.
    """

    path: Path
    kind: str
    family: Family
    weight_dtype: str
    tensors: tuple[BoundTensor, ...]
    draft_to_target: npt.NDArray[np.int32] | None
    token_ordering: npt.NDArray[np.int32] | None
    notes: tuple[str, ...]

    @property
    def ids(self) -> dict[str, npt.NDArray[np.int32]]:
        """Its tensors of ids by canonical name."""
        found = {MAP_NAME: self.draft_to_target, ORDERING_NAME: self.token_ordering}
        return {name: ids for name, ids in found.items() if ids is not None}

    @property
    def config(self) -> dict[str, Any]:
        """The canonical description."""
        return dict(self.family.config)

    @property
    def stored_dtypes(self) -> dict[str, int]:
        """How many matrices are stored in each dtype."""
        return dict(Counter(tensor.dtype for tensor in self.tensors if tensor.spec.is_matrix))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored, without ids."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def is_narrowed(self, tensor: BoundTensor) -> bool:
        """Whether the tensor has to be rounded here, from F16 to bfloat16.

        The library refuses to, since it loses bits and saves none. A drafter shares buffers with
        its target and has no choice.
        """
        return tensor.spec.is_matrix and tensor.dtype == "F16" and self.weight_dtype == "bfloat16"


def detect_method(path: str | os.PathLike[str], method: str | None = None) -> str:
    """Says how the drafter in a folder drafts.

    Args:
        path: The folder.
        method: What the user named, if anything.

    Returns:
        "draft_model", "eagle", "eagle3" or "gemma4_mtp".

    Raises:
        ModelNotFoundError: The folder or a file is missing.
        ModelFileError: A file is damaged; the configuration and the tensors contradict each other;
            or the weights are a pickle.
        NotImplementedError: It is a speculator of another kind.
        ValueError: It is not what `method` says.
    """
    directory = Path(path)
    check_directory(directory)
    top = _read_config(directory)
    stated = kind_of_config(top)
    check_no_pickle(directory)
    shards, _ = open_shards(directory)
    seen, sign = kind_of_tensors(_owners(shards))
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
        raise ValueError(
            f"speculative_config['method'] is {method!r:.80}, but {directory} holds a drafter for "
            f"{found!r} ({reason}); allowed: {found!r}, or no 'method'"
        )
    return found


def has_only_pickle(directory: Path) -> bool:
    """Whether the weights in a folder are a pickle and nothing else."""
    return exists(directory / PICKLE_NAME) and not any(
        exists(directory / name) for name in (WEIGHTS_NAME, INDEX_NAME)
    )


def check_no_pickle(directory: Path) -> None:
    """Refuses a folder whose weights are a pickle only.

    Raises:
        ModelFileError: They are; names the way out.
    """
    if has_only_pickle(directory):
        raise ModelFileError(
            f"{directory / PICKLE_NAME}: the weights are a pickle, which may run code when it is "
            "read and is never loaded directly; expected model.safetensors. An EAGLE drafter is "
            f"converted once, weights only: paceline convert --allow-pickle {directory} OUT"
        )


def open_drafter(
    path: str | os.PathLike[str], target: Target, method: str | None = None
) -> DrafterCheckpoint:
    """Opens a drafter that rides on a target and checks that it is complete and fits it.

    Args:
        path: The folder: `config.json` and `model.safetensors`, or shards with their index.
        target: What it has to fit; its weight dtype becomes the drafter's.
        method: What the user named: one of `KINDS`, or None.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The drafter, or the way it is stored, is not supported.
        ValueError: It was made for another target, or is none of `KINDS`.
    """
    kind = detect_method(path, method)
    directory = Path(path)
    if kind not in KINDS:
        raise ValueError(f"{directory}: a {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    top = _read_config(directory)
    shards, listing = open_shards(directory)
    owners = _owners(shards)
    draft_to_target = token_ordering = None
    if kind == GEMMA4_MTP:
        family, notes = translate_assistant(top, target, has_centroids=CENTROIDS in owners)
        tensors = bind(family, shards, listing, top.source)
        if CENTROIDS in owners:
            token_ordering = read_ordering(owners, target.vocab_size)
    else:
        facts = read_facts({name: _shape(shard, name) for name, shard in owners.items()})
        family, notes = translate_eagle(kind, top, facts, target)
        tensors = bind(family, shards, listing, top.source)
        if facts.has_map:
            draft_to_target = read_map(
                owners, facts.prefix, facts.draft_vocab_size or 0, target.vocab_size
            )
    notes += _dtype_notes(tensors, target.weight_dtype)
    return DrafterCheckpoint(
        directory,
        kind,
        family,
        target.weight_dtype,
        tensors,
        draft_to_target,
        token_ordering,
        tuple(notes),
    )


def drafter_config(
    hf_config: Mapping[str, object],
    target: Target,
    *,
    method: str | None = None,
    source: str = "config.json",
) -> dict[str, Any]:
    """The canonical description of a drafter for a configuration at hand, without any weights.

    Args:
        hf_config: The object in the drafter's `config.json`.
        target: What it has to fit.
        method: One of `KINDS`; needed where the configuration does not say, as that of an EAGLE-1
            head.
        source: What messages call the configuration.

    Returns:
        The description of `docs/model-format.md`.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: The drafter needs something that Paceline does not do.
        ValueError: It was made for another target, or its kind is unknown.
    """
    top = Section(hf_config, source)
    stated = kind_of_config(top)
    kind = method or stated
    if kind not in KINDS or (stated is not None and stated != kind):
        raise ValueError(
            f"{source}: method is {method!r:.80} and the configuration says {stated!r}; expected "
            f"one of {', '.join(map(repr, KINDS))}, the same where both say it"
        )
    if kind == GEMMA4_MTP:
        family, _ = translate_assistant(top, target)
    else:
        family, _ = translate_eagle(kind, top, guess_facts(kind, top, target), target)
    return dict(family.config)


def load_drafter_weights(
    checkpoint: DrafterCheckpoint, *, progress: bool = True, **builder_options: Any
) -> _core.Model:
    """Fills a drafter with the checkpoint's tensors, each copied and converted once.

    Args:
        checkpoint: What `open_drafter` returned.
        progress: Show a progress bar where standard error is a terminal.
        **builder_options: Passed on to `_core.ModelBuilder`.

    Raises:
        ModelFileError: The library refuses the description or a tensor.
        MemoryError: There is no room for the weights.
    """
    import numpy as np
    from tqdm import tqdm

    builder = _core.ModelBuilder(
        json.dumps(checkpoint.config), checkpoint.weight_dtype, **builder_options
    )
    with tqdm(
        total=checkpoint.nbytes,
        desc=f"Loading {checkpoint.path.name or checkpoint.path}",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for tensor in checkpoint.tensors:
            if checkpoint.is_narrowed(tensor):
                with RawShard(tensor.shard.path) as raw:
                    values = np.frombuffer(raw.read(tensor.source, tensor.nbytes), np.float16)
                wide = values.astype(np.float32).reshape(tensor.spec.shape)
                builder.put_array(tensor.spec.name, wide)
            else:
                builder.put_tensor(tensor.spec.name, tensor.shard.file, tensor.source)
            bar.update(tensor.nbytes)
        for name, ids in checkpoint.ids.items():
            builder.put_array(name, ids)
    return builder.finish()


def _read_config(directory: Path) -> Section:
    path = directory / CONFIG_NAME
    return Section(read_json_object(path, "the drafter's configuration"), str(path))


def _owners(shards: list[Shard]) -> dict[str, Shard]:
    return {name: shard for shard in shards for name in shard.file.names()}


def _shape(shard: Shard, name: str) -> tuple[int, ...]:
    return tuple(shard.file.info(name)[1])


def _dtype_notes(tensors: tuple[BoundTensor, ...], weight_dtype: str) -> list[str]:
    stored = {tensor.dtype for tensor in tensors if tensor.spec.is_matrix}
    if weight_dtype == "float32" or stored == {"BF16"}:
        return []
    names = " and ".join(sorted(stored))
    return [f"weights stored as {names} are rounded to bfloat16, the target's dtype"]
