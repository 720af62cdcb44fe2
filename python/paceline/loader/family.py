# SPDX-License-Identifier: Apache-2.0
"""The result of translating a configuration: a canonical description and the tensors it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from .conversion import Conversion
from .decoder import round_to_bfloat16
from .formats import PLAIN_DTYPES
from .row_part import RowPart

# Names that the lm_head of a target may have.
LM_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model needs.

    Attributes:
        name: The canonical name.
        source: The name in the checkpoint, after the prefix; the lm_head has no prefix.
        shape: The required shape.
        shape_keys: The shape in terms of keys of `config.json`, for messages; with a part, that of
            the stored tensor.
        dtypes: The dtypes that it may be stored in.
        part: The rows of the stored tensor that it consists of; None: all of it.
        stored_shapes: The shapes that the stored tensor may have; empty: `shape`.
        conversion: How it is made of stored tensors; None: it is stored as it is.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    shape_keys: str
    dtypes: tuple[str, ...] = PLAIN_DTYPES
    part: RowPart | None = None
    stored_shapes: tuple[tuple[int, ...], ...] = ()
    conversion: Conversion | None = None

    @property
    def is_matrix(self) -> bool:
        """Returns whether it is a matrix or one for each expert; norms and biases are float32."""
        return self.name.endswith(".weight") and len(self.shape) > 1


@dataclass(frozen=True)
class Family:
    """A decoder of one family, translated.

    Attributes:
        name: "llama", "qwen3", "gemma3", "gemma4", "gpt_oss", "glm4_moe_lite", "deepseek_v3",
            "deepseek_v4", "qwen3_moe", "qwen3_5", "qwen3_5_moe" or "qwen3_next"; for a draft head,
            its kind.
        architecture: The class name in `config.json`.
        config: The canonical description, for float32 weights; see `config_for`.
        tensors: Every tensor the model needs.
        prefixes: Prefixes that `TensorSpec.source` may have in the file, the likeliest first.
        ignored_prefixes: Prefixes of tensors of other parts of the checkpoint.
        ignored_sources: Unused tensors of the decoder, as `TensorSpec.source`.
        rounds_embed_scale: Whether factors on embeddings are rounded to the weight dtype.
        lm_head_names: Names that the lm_head may have.
        others: The same decoder with other names of tensors, such as one tensor for a matrix of all
            experts, as transformers has it in memory.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...] = ()
    ignored_sources: frozenset[str] = frozenset()
    rounds_embed_scale: bool = False
    lm_head_names: tuple[str, ...] = LM_HEADS
    others: tuple[Family, ...] = ()

    def for_tensors(self, names: Iterable[str]) -> Family:
        """This decoder, in the form that the tensors of a checkpoint have."""
        if not self.others:
            return self
        known = frozenset(names)

        def num_found(family: Family) -> int:
            return sum(
                any(prefix + spec.source in known for prefix in family.prefixes)
                for spec in family.tensors
            )

        return max((self, *self.others), key=num_found)

    @property
    def tied_table(self) -> str | None:
        """The canonical name of the table that is embeddings and lm_head; None: they are two."""
        if self.config["ties_lm_head"]:
            return "embed.weight"
        # An assistant's lm_head is stored under the name of its embeddings, which it does not have.
        return None if self.lm_head_names == LM_HEADS else "lm_head.weight"

    def config_for(self, weight_dtype: str) -> dict[str, Any]:
        """The canonical description for weights of one dtype.

        Gemma multiplies embeddings by a factor that transformers first casts to the dtype of the
        table, so in bfloat16 the factor is rounded.

        Args:
            weight_dtype: "float32" or "bfloat16".
        """
        config = dict(self.config)
        if self.rounds_embed_scale and weight_dtype == "bfloat16":
            config["embed_scale"] = round_to_bfloat16(config["embed_scale"])
            if "per_layer_inputs" in config:
                inputs = dict(config["per_layer_inputs"])
                inputs["embed_scale"] = round_to_bfloat16(inputs["embed_scale"])
                config["per_layer_inputs"] = inputs
        return config
