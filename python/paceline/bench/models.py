# SPDX-License-Identifier: Apache-2.0
"""Models for benchmarks: checkpoints, or dummy weights of a given shape.

Dummy weights are normal with standard deviation 0.02, never zeros: zeros run faster than real data
on some machines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import _core


@dataclass(frozen=True)
class BenchModel:
    """A model to measure.

    Attributes:
        name: For tables.
        model: Its weights.
        config: Its canonical description.
    """

    name: str
    model: _core.Model
    config: dict[str, Any]

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that one forward pass reads, the lm_head included."""
        item = 4 if self.model.weight_dtype == "float32" else 2
        return count_matrix_parameters(self.config) * item


def _gemma3(
    *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int
) -> dict[str, Any]:
    """A Hugging Face config of the Gemma 3 architecture, every sixth layer with full attention."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 128,
        "layer_types": [
            "full_attention" if (i + 1) % 6 == 0 or i + 1 == layers else "sliding_attention"
            for i in range(layers)
        ],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }


#: Shapes by name. The first is out of any core's cache, the second a tenth of it.
DUMMY_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "gemma3-101m": _gemma3(hidden=896, layers=10, heads=14, kv_heads=2, intermediate=2816),
    "gemma3-10m": _gemma3(hidden=512, layers=2, heads=8, kv_heads=1, intermediate=1536),
}


def load(source: str, *, dummy: bool, dtype: str = "auto") -> BenchModel:
    """Makes a model ready to measure.

    Args:
        source: A name of DUMMY_SHAPES, or a folder in Hugging Face layout.
        dummy: Read only the folder's `config.json` and make the weights up.
        dtype: "auto", "float32" or "bfloat16".

    Returns:
        The model.

    Raises:
        ValueError: Neither a known shape nor a folder.
        paceline.ModelFileError: A file that does not hold what it must.
    """
    from paceline.loader import decoder_config, load_checkpoint

    if source in DUMMY_SHAPES:
        hf_config = DUMMY_SHAPES[source]
    elif not Path(source).is_dir():
        raise ValueError(
            f"model is {source!r}; allowed: a folder, or a dummy shape: {', '.join(DUMMY_SHAPES)}"
        )
    elif not dummy:
        loaded = load_checkpoint(source, dtype=dtype)
        return BenchModel(Path(source).name, loaded.model, loaded.config)
    else:
        hf_config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    weight_dtype = "bfloat16" if dtype == "auto" else dtype
    config = decoder_config(hf_config, weight_dtype)
    builder = _core.ModelBuilder(json.dumps(config), weight_dtype)
    builder.fill_dummy(0)
    name = source if source in DUMMY_SHAPES else Path(source).name
    return BenchModel(f"{name} (dummy)", builder.finish(), config)


def count_matrix_parameters(config: dict[str, Any]) -> int:
    """Counts the matrix parameters that one token's forward pass multiplies with.

    Args:
        config: A canonical description (docs/model-format.md).

    Returns:
        Parameters of all projections and of the lm_head, without embedding lookups and norms.
    """
    hidden = config["hidden_size"]
    total = config["vocab_size"] * hidden
    for layer in config["layers"]:
        attention = layer["attention"]
        q_width = attention["num_qo_heads"] * attention["head_dim"]
        kv_width = attention["num_kv_heads"] * attention["head_dim"]
        total += hidden * (2 * q_width + 2 * kv_width) + 3 * hidden * layer["mlp"]["intermediate"]
    return int(total)
