# SPDX-License-Identifier: Apache-2.0
"""The Qwen3-MoE family: the layers of Qwen3, some or all of them with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from .decoder import (
    Layer,
    check_common,
    check_top_k,
    describe,
    read_activation,
    read_sizes,
    same_fact,
    same_layers,
)
from .decoder_tensors import decoder_tensors, expert_tensors, tensor_spec
from .family import Family, TensorSpec
from .hf_config import HfConfig
from .layer_types import FULL, check_full_layers
from .quantization import (
    FOUR_BIT_METHODS,
    Quantization,
    check_plain_lm_head,
    input_scales,
    read_quantization,
    with_formats,
)
from .rope import read_rope
from .section import DEFAULTS, Section

_PREFIXES: Final = ("model.", "")
# The modules of an expert, by the name of their format.
_OF_EXPERT: Final = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclass(frozen=True)
class _Experts:
    """The mixture of a sparse layer.

    Attributes:
        count: How many experts there are; 0: all layers are dense.
        top_k: How many of them a token uses.
        intermediate: The width of each of them.
        normalises: The weights of a token's experts are divided by their sum.
    """

    count: int
    top_k: int
    intermediate: int
    normalises: bool


def qwen3_moe(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    check_common(hf, may_have_scales=True)
    text = hf.text
    # Unlike Qwen3's, the default head size is hidden_size / num_attention_heads.
    sizes = read_sizes(text.with_defaults(DEFAULTS["qwen3_moe"]))
    check_full_layers(hf.architecture, text, sizes.layers)
    experts = _read_experts(text)
    is_sparse = _read_sparse_layers(text, sizes.layers, experts)
    ties = text.boolean("tie_word_embeddings", False)
    activation = read_activation(text, ("hidden_act",), "silu")
    quantization = read_quantization(hf, FOUR_BIT_METHODS)
    check_plain_lm_head(quantization, ties_lm_head=ties)
    layers = tuple(
        _with_expert_formats(layer, i, experts, quantization) if is_sparse[i] else layer
        for i, layer in enumerate(
            with_formats(
                same_layers(sizes, (FULL,) * sizes.layers),
                quantization,
                _PREFIXES,
                is_sparse=is_sparse,
            )
        )
    )
    config = describe(
        "qwen3_moe",
        sizes,
        layers,
        window=0,
        ropes={FULL: read_rope(text, 10_000.0)},
        attention_scale=sizes.head_dim**-0.5,
        activation=activation,
        ties_lm_head=ties,
        has_qk_norm=True,
        attention_bias=text.boolean("attention_bias", False),
    )

    def family(others: tuple[Family, ...], *, is_joined: bool) -> Family:
        described = [
            one | {"mlp": _describe_mixture(experts, activation, layer, is_joined=is_joined)}
            if sparse
            else one
            for one, layer, sparse in zip(config["layers"], layers, is_sparse, strict=True)
        ]
        whole = config | {"layers": described}
        tensors = decoder_tensors(whole, sizes, layers, partial(_mixture_tensors, sizes.hidden))
        return Family(
            "qwen3_moe",
            hf.architecture,
            whole,
            tensors,
            _PREFIXES,
            ignored_sources=input_scales(tensors),
            others=others,
        )

    # Experts with scales have tensors of their own in every file.
    has_scales = any(layer.formats.gate_up or layer.formats.down for layer in layers)
    joined = () if has_scales else (family((), is_joined=True),)
    return family(joined, is_joined=False)


def _read_experts(text: Section) -> _Experts:
    # Files have the first key. The second one is its name in transformers.
    key, other = "num_experts", "num_local_experts"
    count = 0
    if not (text.has(key) and text.integer(key, low=0) == 0):
        count = same_fact(text, key, other, 128)
        key = key if text.has(key) or not text.has(other) else other
    top_k = text.integer("num_experts_per_tok", 8)
    if count > 0:
        check_top_k(text, "num_experts_per_tok", top_k, key, count)
    return _Experts(
        count,
        top_k,
        text.integer("moe_intermediate_size", 768),
        # Published files say true.
        normalises=text.boolean("norm_topk_prob", False),
    )


def _read_sparse_layers(text: Section, num_layers: int, experts: _Experts) -> tuple[bool, ...]:
    """Whether each layer has a mixture."""
    step = text.integer("decoder_sparse_step", 1)
    key = "mlp_only_layers"
    dense = text.values[key] if text.has(key) else []
    layers = range(num_layers)
    if not isinstance(dense, list) or not all(type(i) is int and i in layers for i in dense):
        raise text.error(key, f"a list of layers, 0 to {num_layers - 1}")
    return tuple(experts.count > 0 and i not in dense and (i + 1) % step == 0 for i in layers)


def _with_expert_formats(
    layer: Layer, index: int, experts: _Experts, quantization: Quantization | None
) -> Layer:
    """A sparse layer with the formats of its experts in place of those of a dense MLP.

    Raises:
        NotImplementedError: Some of its experts have scales and others have none.
    """
    if quantization is None:
        return layer
    formats = {
        name: quantization.of_experts(modules, experts.count, f"layers.{index}.", _PREFIXES)
        for name, modules in _OF_EXPERT.items()
    }
    return replace(layer, formats=replace(layer.formats, **formats))


def _describe_mixture(
    experts: _Experts, activation: str, layer: Layer, *, is_joined: bool
) -> dict[str, Any]:
    # A softmax over all logits that is then divided by the sum of the chosen ones is that over the
    # chosen ones.
    return {
        "num_experts": experts.count,
        "top_k": experts.top_k,
        "intermediate": experts.intermediate,
        "activation": activation,
        "has_bias": False,
        "router": "softmax_of_chosen" if experts.normalises else "softmax",
        "has_router_bias": False,
        **({} if is_joined else {"per_expert": True}),
        **layer.formats.entries("gate_up", "down"),
    }


def _mixture_tensors(
    hidden_size: int, mlp: str, mixture: Mapping[str, Any], layer: Layer
) -> Iterator[TensorSpec]:
    """The router and the experts of a layer."""
    count = (mixture["num_experts"], "num_experts")
    hidden = (hidden_size, "hidden_size")
    width = (mixture["intermediate"], "moe_intermediate_size")
    is_joined = "per_expert" not in mixture
    yield tensor_spec(f"{mlp}router.weight", f"{mlp}gate.weight", count, hidden)
    yield from expert_tensors(
        mlp, mlp, count, hidden, width, is_joined=is_joined, formats=layer.formats
    )
