# SPDX-License-Identifier: Apache-2.0
"""Opening a Hugging Face checkpoint, and filling a model with its weights.

The C++ library maps and validates safetensors files. Python reads names and shapes and tells the
library which tensor is which. Neither needs torch or the safetensors package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paceline.limits import MAX_STOP_TOKEN_IDS
from paceline.progress import progress_bar

from .binding import CURE, BoundTensor, bind
from .drafters import Target, with_feedback
from .families import ARCHITECTURES, check_dtype, translate
from .family import Family
from .folder import CheckpointFolder, Source, as_folder
from .formats import PLAIN_DTYPES
from .hf_config import HfConfig, parse_hf_config
from .kinds import kind_of_config
from .messages import model_name, quote, show
from .placement import Placement
from .quantization import input_notes
from .section import Section
from .state_dict import StateDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline import _core


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model whose files were checked; none of its matrices was read yet.

    Attributes:
        path: The folder, or the name of the argument that has the tensors.
        top: Its configuration, as read; None: it was not in the layout of Hugging Face.
        family: The decoder, translated.
        weight_dtype: The dtype of matrices in memory: "float32" or "bfloat16".
        tensors: Every tensor of weights, in the order in which the model is filled; none where the
            weights will be dummy weights.
        ids: Its tensors of token ids by canonical name.
        notes: Choices that a user may want to know about, one sentence each.
        eos_token_ids: Token ids that end a completion, of those that the vocabulary has.
        bos_token_id: The token id that starts a prompt, if the files name one.
        generation: The object in `generation_config.json`, if there is one.
        converted_file: The weight file in a folder of `paceline convert`; None: it is not from one.
    """

    path: Path
    top: Section | None
    family: Family
    weight_dtype: str
    tensors: tuple[BoundTensor, ...] = ()
    ids: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation: Section | None = None
    converted_file: Path | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The canonical description, for `weight_dtype`."""
        return self.family.config_for(self.weight_dtype)

    @property
    def stored_dtypes(self) -> dict[str, int]:
        """How many matrices are stored in each dtype."""
        return dict(Counter(tensor.dtype for tensor in self.tensors if tensor.spec.is_matrix))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of weights as stored."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def as_target(self) -> Target:
        """The facts that a draft head for this model must fit."""
        tables = {tensor.spec.name: tensor for tensor in self.tensors}
        tables = {
            name: tables[name] for name in ("embed.weight", "lm_head.weight") if name in tables
        }
        if self.family.config["ties_lm_head"] and tables:
            tables["lm_head.weight"] = tables["embed.weight"]
        return Target(self.path, self.family.architecture, self.config, self.weight_dtype, tables)

    def is_narrowed(self, tensor: BoundTensor) -> bool:
        """Returns whether Python has to round the tensor, from F16 to bfloat16.

        The library refuses to, because that loses bits and saves no memory. A drafter shares
        buffers with its target and has no choice; a target has, and is refused before. `convert`
        has rounded what must be, and the library refuses the rest.
        """
        is_rounded = tensor.dtype == "F16" and self.weight_dtype == "bfloat16"
        return is_rounded and tensor.spec.is_matrix and self.converted_file is None

    def with_feedback(self, feedback: str | None) -> Self:
        """The same with another `draft_feedback`; see `with_feedback` of `drafters.py`."""
        config = with_feedback(self.family.config, feedback, self.path)
        return replace(self, family=replace(self.family, config=config))


@dataclass(frozen=True, kw_only=True)
class Checkpoint(OpenedModel):
    """A target or a draft model whose files were checked; no weights were read yet.

    Attributes:
        hf: Its configuration.
    """

    hf: HfConfig


def open_checkpoint(source: Source, dtype: str = "auto", *, is_drafter: bool = False) -> Checkpoint:
    """Opens a checkpoint and checks that it has every tensor that its configuration asks for.

    Args:
        source: The folder: `config.json` and `model.safetensors`, or shards with
            `model.safetensors.index.json`.
        dtype: "float32", "bfloat16", or "auto": bfloat16 when every matrix without scales is stored
            as BF16, else float32.
        is_drafter: It is a draft model, whose end-of-sequence ids are not used.

    Returns:
        The checkpoint.

    Raises:
        ModelNotFoundError: The folder, its configuration or a weight file is missing.
        ModelFileError: A file is damaged, or tensors are missing, misshapen or unknown.
        NotImplementedError: The model, or the way it is stored, is not supported; or a target has
            more end-of-sequence ids than a request can stop at.
        ValueError: `dtype` is none of the above, or "bfloat16" for weights stored as F16.
    """
    check_dtype(dtype)
    folder = as_folder(source)
    hf = read_hf_config(folder)
    family = translate(hf).for_tensors(folder.weights.owners)
    tensors = bind(family, folder.weights, hf.source)
    weight_dtype, notes = _choose_dtype(dtype, tensors)
    notes += input_notes(hf)
    opened = from_config(
        hf, family, folder.path, weight_dtype, tensors=tensors, is_drafter=is_drafter
    )
    dropped = sorted({*hf.eos_token_ids} - {*opened.eos_token_ids})
    if dropped and not is_drafter:
        notes.append(
            f"end-of-sequence ids {show(dropped)} of {folder.path} are outside of its "
            f"vocabulary ({family.config['vocab_size']} ids) and are left out"
        )
    return replace(opened, notes=tuple(notes))


def from_config(
    hf: HfConfig,
    family: Family,
    path: Path,
    weight_dtype: str,
    *,
    tensors: tuple[BoundTensor, ...] = (),
    is_drafter: bool = False,
) -> Checkpoint:
    """A target or a draft model with the settings of its configuration.

    Raises:
        NotImplementedError: A target has more end-of-sequence ids than a request can stop at.
    """
    eos_token_ids = tuple(
        token for token in hf.eos_token_ids if token < family.config["vocab_size"]
    )
    if not is_drafter:
        _check_end_ids(hf, len(eos_token_ids))
    return Checkpoint(
        path=path,
        top=hf.top,
        family=family,
        weight_dtype=weight_dtype,
        tensors=tensors,
        eos_token_ids=eos_token_ids,
        bos_token_id=hf.bos_token_id,
        generation=hf.generation,
        hf=hf,
    )


def read_hf_config(folder: CheckpointFolder | StateDict) -> HfConfig:
    """The configuration of a target or a draft model.

    Raises:
        ModelNotFoundError: `config.json` is missing.
        ModelFileError: A file is no JSON object, or a key has a wrong type.
        NotImplementedError: The architecture is not supported; the message says so if it is a draft
            head's.
    """
    return parse_target_config(folder.config, folder.generation)


def parse_target_config(config: Section, generation: Section | None = None) -> HfConfig:
    """The same from the objects of both files; raises what they do."""
    try:
        return parse_hf_config(config.values, config.source, ARCHITECTURES, generation)
    except NotImplementedError as error:
        kind = kind_of_config(config)
        if kind is None:
            raise
        raise NotImplementedError(
            f"{error}; it is a draft head ({kind}) and no target{CURE}"
        ) from None


def _check_end_ids(hf: HfConfig, num_ids: int) -> None:
    """Refuses a target with more end-of-sequence ids than a request can stop at.

    The error names the file, the key, the number of ids of the vocabulary and the limit.
    """
    if num_ids > MAX_STOP_TOKEN_IDS and hf.eos_section is not None:
        section = hf.eos_section
        raise NotImplementedError(
            f'{section.source}: key "{section.name("eos_token_id")}" has {num_ids} ids of the '
            f"vocabulary; supported: at most {MAX_STOP_TOKEN_IDS}, because a request can stop at "
            "no more"
        )


def load_weights(
    opened: OpenedModel, placement: Placement, *, progress: bool = True
) -> _core.Model:
    """Fills a model with its tensors, each copied and converted once.

    Args:
        opened: What `open_checkpoint` or `open_drafter` returned.
        placement: Where they go.
        progress: Show a progress bar where standard error is a terminal.

    Raises:
        ModelFileError: The library refuses a tensor, or a file changed since it was opened.
        Exception: As for `Placement.new_builder`.
    """
    builder = placement.new_builder(opened.config, opened.weight_dtype)
    what = f"Loading {model_name(opened.path)}"
    with progress_bar(opened.nbytes, what, "B", is_shown=progress, is_scaled=True) as bar:
        for tensor in opened.tensors:
            if opened.is_narrowed(tensor):
                builder.put_array(tensor.spec.name, widened(tensor))
            else:
                tensor.put(builder)
            bar.update(tensor.nbytes)
        for name, ids in opened.ids.items():
            builder.put_array(name, ids)
    return builder.finish()


def widened(tensor: BoundTensor) -> npt.NDArray[np.float32]:
    """A tensor stored as F16, in float32, from which the library rounds to bfloat16."""
    import numpy as np

    values = np.frombuffer(b"".join(tensor.chunks()), np.float16)
    return values.astype(np.float32).reshape(tensor.spec.shape)


def _choose_dtype(dtype: str, tensors: Sequence[BoundTensor]) -> tuple[str, list[str]]:
    """The weight dtype, and notes about the choice; matrices with scales do not count."""
    matrices = [
        tensor for tensor in tensors if tensor.spec.is_matrix and tensor.dtype in PLAIN_DTYPES
    ]
    stored = {tensor.dtype for tensor in matrices}
    names = " and ".join(sorted(stored))
    if dtype == "auto":
        if stored == {"BF16"}:
            return "bfloat16", []
        if stored == {"F32"}:
            return "float32", []
        return "float32", [f"weights stored as {names} are loaded as float32, which is lossless"]
    if dtype == "float32" or stored == {"BF16"}:
        return dtype, []
    narrow = next((tensor for tensor in matrices if tensor.dtype == "F16"), None)
    # The values of int4 and nvfp4 are bfloat16 numbers already, whatever the other matrices are.
    has_bfloat16 = any(tensor.spec.conversion is not None for tensor in tensors)
    if narrow is not None and not has_bfloat16:
        # The library refuses it: rounding one 16-bit format to the other loses bits and saves no
        # memory.
        raise ValueError(
            f"dtype is 'bfloat16', but tensor {quote(narrow.source)} of {narrow.shard.path} is "
            "stored as F16, which would lose 3 bits of each value; allowed: 'auto' or 'float32'"
        )
    return dtype, [f"weights stored as {names} are rounded to bfloat16, as asked"]
