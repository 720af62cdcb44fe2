# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in memory: a configuration, and tensors that other libraries hold.

Tensors are read through DLPack, so torch is not needed for those of any other library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline._core import ModelFileError
from paceline.checks import shorten

from .messages import quote
from .row_part import RowPart
from .section import Section
from .tensor_source import TensorSource
from .tokenizer import TokenizerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK_BYTES: Final = 16 << 20


class MemoryTensors:
    """The tensors of a mapping: a `TensorSource`, and `Weights`.

    Attributes:
        path: The name of the argument, for messages.
    """

    def __init__(self, tensors: Mapping[str, Any], name: str) -> None:
        """Looks at no tensor.

        Raises:
            ValueError: It is no mapping, or a name is no string.
        """
        if not isinstance(tensors, Mapping):
            raise ValueError(
                f"{name} is {shorten(tensors)} ({type(tensors).__name__}); expected a mapping from "
                "the names of Hugging Face checkpoints to tensors, such as module.state_dict()"
            )
        for key in tensors:
            if not isinstance(key, str):
                raise ValueError(
                    f"{name} has the key {key!r:.60} ({type(key).__name__}); expected names of "
                    "tensors as strings"
                )
        self.path = Path(name)
        self._objects = tensors
        self._tensors: dict[str, _core.Tensor] = {}

    @property
    def where(self) -> str:
        """See `Weights.where`."""
        return str(self.path)

    @property
    def owners(self) -> Mapping[str, TensorSource]:
        """This object, by the name of every tensor; see `Weights.owners`."""
        # Not an attribute: a cycle would keep the tensors until the garbage collector runs.
        return dict.fromkeys(self._objects, self)

    def tensor(self, name: str) -> _core.Tensor:
        """A tensor, taken over when it is first needed.

        Raises:
            ModelFileError: It is no tensor that can be read; names it.
            NotImplementedError: It is on a GPU that cannot be used.
        """
        found = self._tensors.get(name)
        if found is None:
            found = _core.Tensor(self._objects[name], f"{self.path}: tensor {quote(name)}")
            self._tensors[name] = found
        return found

    def info(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """See `TensorSource.info`."""
        return self.tensor(name).info()

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `TensorSource.chunks`."""
        tensor = self.tensor(name)
        _, shape, nbytes = tensor.info()
        elements = 1
        for size in shape:
            elements *= size
        step = max(1, _CHUNK_BYTES * elements // max(nbytes, 1))
        for first in range(0, elements, step):
            yield tensor.read(first, min(step, elements - first))

    def is_same(self, name: str, other: TensorSource, other_name: str) -> bool:
        """See `TensorSource.is_same`."""
        return isinstance(other, MemoryTensors) and self.tensor(name).is_same_memory(
            other.tensor(other_name)
        )

    def put(self, builder: _core.ModelBuilder, weight: str, name: str) -> None:
        """See `TensorSource.put`."""
        builder.put_dlpack(weight, self.tensor(name))

    def put_part(self, builder: _core.ModelBuilder, weight: str, name: str, part: RowPart) -> None:
        """See `TensorSource.put_part`."""
        builder.put_dlpack(weight, self.part(name, part))

    def part(self, name: str, part: RowPart | None) -> _core.Tensor:
        """Some rows of a tensor, or all of it; raises as `tensor` does."""
        whole = self.tensor(name)
        return whole if part is None else whole.rows(part.groups, part.first, part.count)


class StateDict:
    """A checkpoint in memory, with what loading needs of a `CheckpointFolder`.

    Attributes:
        path: The name of the argument that has the tensors, for messages.
        config: What would be in `config.json`.
        generation: What would be in `generation_config.json`, or None.
        weights: The tensors.
        tokenizer: The tokenizer, or None.
    """

    def __init__(
        self,
        config: Section,
        tensors: Mapping[str, Any],
        name: str,
        *,
        generation: Section | None = None,
        tokenizer: TokenizerInfo | None = None,
    ) -> None:
        """Looks at no tensor.

        Args:
            config: The configuration.
            tensors: From the names of Hugging Face checkpoints to objects with `__dlpack__`.
            name: The name of the argument.
            generation: The generation settings.
            tokenizer: The tokenizer.

        Raises:
            ValueError: `tensors` is no mapping, or a name is no string.
        """
        self.path = Path(name)
        self.config = config
        self.generation = generation
        self.weights = MemoryTensors(tensors, name)
        self.tokenizer = tokenizer

    def check_no_pickle(self) -> None:
        """Nothing here is a pickle; see `CheckpointFolder.check_no_pickle`."""


def memory_config(config: object, name: str) -> Section:
    """The configuration of a model in memory.

    Args:
        config: A mapping as in `config.json`, or an object whose `to_dict()` returns one, such as a
            configuration of transformers.
        name: The name of the argument, for messages.

    Raises:
        ValueError: It is neither.
        ModelFileError: It has values that JSON has not.
    """
    to_dict: Callable[[], object] | None = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{name} is {shorten(config)} ({type(config).__name__}); expected a mapping as in "
            "config.json, or an object with to_dict()"
        )
    try:
        plain = json.loads(json.dumps(dict(values)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{name}: a value is not one of JSON ({error!s:.120}); expected what config.json holds"
        ) from None
    return Section(plain, name)


def memory_tokenizer(tokenizer: object) -> TokenizerInfo | None:
    """The tokenizer of a model in memory.

    Args:
        tokenizer: None, a `tokenizer.json` or its folder, a `tokenizers.Tokenizer`, or a tokenizer
            of transformers that has one; its chat template and special tokens are used too.

    Raises:
        ValueError: It is of another type.
        Exception: As for `TokenizerInfo`.
    """
    if tokenizer is None:
        return None
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        return TokenizerInfo(path / "tokenizer.json" if path.is_dir() else path)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    to_str: Callable[[], object] | None = getattr(backend, "to_str", None)
    contents = to_str() if callable(to_str) else None
    if not isinstance(contents, str):
        raise ValueError(
            f"tokenizer is {shorten(tokenizer)} ({type(tokenizer).__name__}); allowed: None, the "
            "path of a tokenizer.json or of its folder, a tokenizers.Tokenizer, or a fast "
            "tokenizer of transformers"
        )
    settings = {
        "chat_template": getattr(tokenizer, "chat_template", None),
        **getattr(tokenizer, "special_tokens_map", {}),
    }
    # The path names no file.
    return TokenizerInfo(Path("<tokenizer>", "tokenizer.json"), contents.encode(), settings)
