# SPDX-License-Identifier: Apache-2.0
"""A decoder as the loader hands it on: its canonical description and the tensors it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from .decoder import round_to_bfloat16

# Where the lm_head of a target may stand.
LM_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model needs.

    Attributes:
        name: The canonical name.
        source: The name in the checkpoint, after the prefix; the lm_head has no prefix.
        shape: The shape it must have.
        shape_keys: The same in words of `config.json`, for messages.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    shape_keys: str

    @property
    def is_matrix(self) -> bool:
        """Whether it is stored in the weight dtype; norms and biases are always float32."""
        return len(self.shape) == 2


@dataclass(frozen=True)
class Family:
    """A decoder of one family, translated.

    Attributes:
        name: "llama", "qwen3", "gemma3" or "gemma4"; of a drafter, its kind.
        architecture: The class name in `config.json`.
        config: The canonical description, for float32 weights; see `config_for`.
        tensors: Every tensor the model needs.
        prefixes: What may stand before `TensorSpec.source`, the likeliest first.
        ignored_prefixes: Tensors of other parts of the checkpoint.
        ignored_sources: Tensors of the decoder that nobody reads, as `TensorSpec.source`.
        rounds_embed_scale: Whether factors on embeddings are rounded to the weight dtype.
        lm_head_names: Where the lm_head may stand.
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

    @property
    def tied_table(self) -> str | None:
        """Canonical name of the table that is embeddings and lm_head in one; None: they are two."""
        if self.config["ties_lm_head"]:
            return "embed.weight"
        # An assistant's table is its lm_head alone, under the name of embeddings.
        return None if self.lm_head_names == LM_HEADS else "lm_head.weight"

    def config_for(self, weight_dtype: str) -> dict[str, Any]:
        """The canonical description for weights of one dtype.

        Gemma multiplies embeddings by a factor that transformers first casts to the dtype of the
        table, so in bfloat16 it is a rounded one.

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
