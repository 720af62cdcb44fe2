# SPDX-License-Identifier: Apache-2.0
"""The Gemma 4 family: targets, and the parts that its assistants share with them.

Configurations have two spellings of the sizes of full layers. Published files have
"global_head_dim" and "num_global_key_value_heads"; files that transformers 5 saved again have
"per_layer_config".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from paceline._core import ModelFileError

from .decoder import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_PER_LAYER_SIZE,
    Layer,
    PerLayerInputs,
    Sizes,
    check_common,
    check_top_k,
    describe,
    read_activation,
    read_sizes,
    round_to_float32,
)
from .decoder_tensors import decoder_tensors, expert_tensors, tensor_spec
from .family import Family, TensorSpec
from .hf_config import HfConfig
from .layer_types import FULL, SLIDING, read_layer_types
from .rope import RopeSettings, read_rope_of_gemma4
from .section import DEFAULTS, Section

# The "model_type" of each architecture of targets.
GEMMA4_ARCHITECTURES: Final[dict[str, str]] = {
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4TextModel": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}

# The defaults of transformers.
_ROPES: Final = {
    FULL: RopeSettings("proportional", 1_000_000.0, partial=0.25),
    SLIDING: RopeSettings(theta=10_000.0),
}
_GLOBAL_HEAD_DIM: Final = 512

# Published files are multimodal; text-only files are saved again from them.
_PREFIXES: Final = ("model.language_model.", "model.", "language_model.model.", "")
_OTHER_PREFIXES: Final = tuple(
    f"model.{part}."
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
)

# The norms of a layer's two branches: canonical name, name in the checkpoint.
_BRANCH_NORMS: Final = (
    ("mlp.dense_norm.weight", "post_feedforward_layernorm_1.weight"),
    ("mlp.router_norm.weight", "router.scale"),
    ("mlp.expert_norm.weight", "pre_feedforward_layernorm_2.weight"),
    ("mlp.mixture_norm.weight", "post_feedforward_layernorm_2.weight"),
)


@dataclass(frozen=True)
class _Experts:
    """The mixture beside the dense MLP of every layer of the 26B model.

    Attributes:
        count: How many experts there are.
        top_k: How many of them a token uses.
        intermediate: The width of each of them.
    """

    count: int
    top_k: int
    intermediate: int


def gemma4(hf: HfConfig) -> Family:
    """Translates a target.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A value is valid but not supported. The message names its key.
    """
    check_common(hf, may_be_bidirectional_in_images=True)
    text = hf.text
    is_unified = "Unified" in hf.architecture
    experts = None if is_unified else _read_experts(text)
    sizes = read_gemma4_sizes(text, is_unified=is_unified)
    layers = _read_layers(text, sizes)
    per_layer_inputs = None
    if not is_unified:
        size = text.integer("hidden_size_per_layer_input", 256, low=0, high=MAX_PER_LAYER_SIZE)
        if size > 0:
            vocab = text.integer("vocab_size_per_layer_input", 262_144)
            per_layer_inputs = PerLayerInputs(size, vocab)
    ties = (hf.top if hf.top.has("tie_word_embeddings") else text).boolean(
        "tie_word_embeddings", True
    )
    config = describe_gemma4(
        "gemma4",
        text,
        sizes,
        layers,
        is_unified=is_unified,
        ties_lm_head=ties,
        per_layer_inputs=per_layer_inputs,
        embed_scale=round_to_float32(math.sqrt(sizes.hidden)),
    )
    tensors = decoder_tensors(config, sizes, layers)
    if experts is not None:
        for layer in config["layers"]:
            layer["mlp"] = _describe_branches(layer["mlp"], experts, sizes)
        tensors += tuple(_branch_tensors(experts, sizes))
    return Family(
        "gemma4",
        hf.architecture,
        config,
        tensors,
        _PREFIXES,
        ignored_prefixes=_OTHER_PREFIXES,
        ignored_sources=unused_kv_sources(layers),
        rounds_embed_scale=True,
    )


def check_dense(text: Section) -> None:
    """Refuses experts in the layers of a drafter.

    Raises:
        NotImplementedError: It has some.
    """
    if text.boolean("enable_moe_block", False):
        raise text.refusal("enable_moe_block", "false")


def _read_experts(text: Section) -> _Experts | None:
    if not text.boolean("enable_moe_block", False):
        return None
    count = text.integer("num_experts", high=MAX_EXPERTS)
    top_k = text.integer("top_k_experts")
    check_top_k(text, "top_k_experts", top_k, "num_experts", count)
    return _Experts(count, top_k, text.integer("moe_intermediate_size"))


def _describe_branches(dense: dict[str, Any], experts: _Experts, sizes: Sizes) -> dict[str, Any]:
    mixture = {
        "num_experts": experts.count,
        "top_k": experts.top_k,
        "intermediate": experts.intermediate,
        "activation": dense["activation"],
        "has_bias": False,
        # The softmax over all logits is divided by the sum of the chosen ones.
        "router": "softmax_of_chosen",
        "has_router_bias": False,
        # transformers applies this factor to the router's input.
        "logit_scale": round_to_float32(sizes.hidden**-0.5),
        "has_expert_scales": True,
    }
    return {"dense": dense, "mixture": mixture}


def _branch_tensors(experts: _Experts, sizes: Sizes) -> Iterator[TensorSpec]:
    """The tensors of all layers besides those of the dense MLPs."""
    count = (experts.count, "num_experts")
    hidden = (sizes.hidden, "hidden_size")
    width = (experts.intermediate, "moe_intermediate_size")
    for i in range(sizes.layers):
        layer = f"layers.{i}."
        for name, source in _BRANCH_NORMS:
            yield tensor_spec(layer + name, layer + source, hidden)
        router = f"{layer}router."
        yield tensor_spec(f"{layer}mlp.router.weight", f"{router}proj.weight", count, hidden)
        yield tensor_spec(f"{layer}mlp.router.expert_scales", f"{router}per_expert_scale", count)
        yield from expert_tensors(f"{layer}mlp.", layer, count, hidden, width, is_joined=True)


def read_gemma4_sizes(text: Section, *, is_unified: bool) -> Sizes:
    """Reads the sizes.

    Args:
        text: The decoder's part of the configuration.
        is_unified: The architecture is that of the 12B model, which has other defaults.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
    """
    defaults = DEFAULTS["gemma4_unified" if is_unified else "gemma4"]
    return read_sizes(text.with_defaults(defaults))


def describe_gemma4(
    name: str,
    text: Section,
    sizes: Sizes,
    layers: tuple[Layer, ...],
    *,
    is_unified: bool,
    ties_lm_head: bool,
    embed_scale: float,
    per_layer_inputs: PerLayerInputs | None = None,
) -> dict[str, Any]:
    """Writes the canonical description of a target, or of an assistant's layers."""
    has_sliding = any(layer.layer_type == SLIDING for layer in layers)
    return describe(
        name,
        sizes,
        layers,
        window=text.integer("sliding_window", 1024 if is_unified else 512) if has_sliding else 0,
        ropes=read_rope_of_gemma4(text, _ROPES),
        attention_scale=1.0,
        activation=read_activation(text, ("hidden_activation",), "gelu_pytorch_tanh"),
        ties_lm_head=ties_lm_head,
        has_qk_norm=True,
        has_v_norm=True,
        attention_bias=text.boolean("attention_bias", False),
        has_post_norms=True,
        has_layer_scale=True,
        per_layer_inputs=per_layer_inputs,
        embed_scale=embed_scale,
        logit_soft_cap=text.number("final_logit_softcapping", 0.0, allow_zero=True),
    )


def unused_kv_sources(layers: tuple[Layer, ...]) -> frozenset[str]:
    """The unused k and v tensors that files hold for layers that read another layer's KV."""
    return frozenset(
        f"layers.{i}.self_attn.{name}"
        for i, layer in enumerate(layers)
        if not layer.owns_kv
        for name in (
            "k_proj.weight",
            "k_proj.bias",
            "v_proj.weight",
            "v_proj.bias",
            "k_norm.weight",
            "v_norm.weight",
        )
    )


def read_gemma4_layer_types(text: Section, num_layers: int) -> tuple[str, ...]:
    """The kind of attention of each layer; the last one is a full layer.

    Raises:
        ModelFileError: The list has another length, or does not end with a full layer.
        NotImplementedError: It names another kind.
    """
    layer_types = read_layer_types(text, num_layers, 6)
    if not text.has("layer_types"):
        return (*layer_types[:-1], FULL)
    if layer_types[-1] != FULL:
        expected = f"{FULL!r}, which the last layer of Gemma 4 always is"
        raise text.wrong("layer_types", f"ends with {layer_types[-1]!r}; expected {expected}")
    return layer_types


def _read_layers(text: Section, sizes: Sizes) -> tuple[Layer, ...]:
    """The layers: sizes depend on the type, and the last layers may read the KV of earlier ones."""
    layer_types = read_gemma4_layer_types(text, sizes.layers)
    k_eq_v = text.boolean("attention_k_eq_v", False)
    num_shared = text.integer("num_kv_shared_layers", 0, low=0)
    if num_shared >= sizes.layers:
        raise text.error(
            "num_kv_shared_layers",
            f'an integer from 0 to {sizes.layers - 1}, below "{text.name("num_hidden_layers")}" '
            "(a model without KV is an assistant, not a target)",
        )
    first_shared = sizes.layers - num_shared
    last_owner = {layer_type: i for i, layer_type in enumerate(layer_types[:first_shared])}
    is_wide = text.boolean("use_double_wide_mlp", False)
    kv_shapes = read_kv_shapes(text, sizes, layer_types)
    layers: list[Layer] = []
    for i, layer_type in enumerate(layer_types):
        is_shared = i >= first_shared
        if is_shared and layer_type not in last_owner:
            raise text.error(
                "num_kv_shared_layers",
                f"fewer, since layer {i} is the first {layer_type} layer and so has no layer to "
                "read KV from",
            )
        kv_heads, head_dim = kv_shapes[i]
        source = last_owner[layer_type] if is_shared else None
        if source is not None and kv_shapes[source] != kv_shapes[i]:
            raise ModelFileError(
                f"{text.source}: layer {i} has {kv_heads} key and value heads of {head_dim}, but "
                f"reads the KV of layer {source} with {kv_shapes[source][0]} of "
                f"{kv_shapes[source][1]}; expected the same"
            )
        layers.append(
            Layer(
                layer_type,
                kv_heads,
                head_dim,
                sizes.intermediate * (2 if is_wide and is_shared else 1),
                k_eq_v=k_eq_v and layer_type == FULL and not is_shared,
                kv_source=source,
            )
        )
    return tuple(layers)


def read_kv_shapes(
    text: Section, sizes: Sizes, layer_types: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Key and value heads and the head size of every layer, from either spelling.

    "num_global_key_value_heads" is only read with "attention_k_eq_v", as in transformers.

    Raises:
        ModelFileError: A key has a wrong value, or the spellings contradict each other.
        NotImplementedError: Something else differs from layer to layer.
    """
    k_eq_v = text.boolean("attention_k_eq_v", False)
    by_layer = text.section("per_layer_config")
    seen: list[tuple[int, int]] | None = None
    if by_layer is not None:
        overrides = {_layer_index(by_layer, key, sizes.layers): key for key in by_layer.values}
        seen = []
        for i in range(sizes.layers):
            section = by_layer.section(overrides[i]) if i in overrides else None
            seen.append((sizes.kv_heads, sizes.head_dim))
            if section is None:
                continue
            for key in section.values:
                if key not in ("head_dim", "num_key_value_heads"):
                    raise section.refusal(key, "head_dim, num_key_value_heads")
            seen[i] = (
                section.integer("num_key_value_heads", sizes.kv_heads),
                section.integer("head_dim", sizes.head_dim, high=MAX_HEAD_DIM),
            )
    keys = ("global_head_dim", "num_global_key_value_heads")
    if seen is None or any(text.has(key) for key in keys):
        head_dim = text.integer(keys[0], _GLOBAL_HEAD_DIM, high=MAX_HEAD_DIM)
        kv_heads = text.integer(keys[1], sizes.kv_heads) if k_eq_v else sizes.kv_heads
        spelled = [
            (kv_heads, head_dim) if layer_type == FULL else (sizes.kv_heads, sizes.head_dim)
            for layer_type in layer_types
        ]
        if seen is not None and seen != spelled:
            layer = next(i for i in range(sizes.layers) if seen[i] != spelled[i])
            raise ModelFileError(
                f'{text.source}: keys "per_layer_config" and "{keys[0]}", "{keys[1]}" disagree on '
                f"layer {layer}: {seen[layer]} and {spelled[layer]} (key and value heads, head "
                "size); expected the same, or one of the spellings"
            )
        seen = spelled
    for i, (kv_heads, head_dim) in enumerate(seen):
        if sizes.qo_heads % kv_heads != 0:
            raise ModelFileError(
                f"{text.source}: layer {i} has {kv_heads} key and value heads; expected a divisor "
                f'of "{text.name("num_attention_heads")}" ({sizes.qo_heads})'
            )
        if head_dim % 2 != 0:
            raise ModelFileError(
                f"{text.source}: layer {i} has a head size of {head_dim}; expected an even integer"
            )
    return seen


def _layer_index(by_layer: Section, key: str, num_layers: int) -> int:
    is_number = key.isdecimal() and key.isascii() and len(key) <= len(str(num_layers))
    if not is_number or int(key) >= num_layers:
        raise by_layer.error(key, f'no such key: layers are "0" to "{num_layers - 1}"')
    return int(key)
