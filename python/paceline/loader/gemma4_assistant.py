# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants (method "gemma4_mtp") as canonical descriptions and tensor names.

An assistant is a few Gemma 4 layers that compute queries only. Each reads the KV of the last layer
of the target that is of its type and owns its KV. The input is the target's embedding of a token
and a hidden state of the target's width. The output is logits, through the assistant's own lm_head,
and the hidden state for the next draft step. The small sizes compute logits only for the tokens of
the clusters whose centroids score best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline._core import ModelFileError

from .decoder import Layer, Sizes, check_common
from .decoder_tensors import decoder_tensors, tensor_spec
from .description import check_description
from .drafters import (
    GEMMA4_MTP,
    Target,
    check_same_vocabulary,
    check_target_width,
    describe_drafter,
    made_for_another,
    take_positions,
)
from .family import Family, TensorSpec
from .gemma4 import (
    GEMMA4_ARCHITECTURES,
    check_dense,
    describe_gemma4,
    read_gemma4_layer_types,
    read_gemma4_sizes,
    read_kv_shapes,
    unused_kv_sources,
)
from .hf_config import HfConfig, parse_hf_config
from .section import Section

# The "model_type" of each architecture.
ASSISTANT_ARCHITECTURES: Final[dict[str, str]] = {
    "Gemma4AssistantForCausalLM": "gemma4_assistant",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_unified_assistant",
}
# Only assistants have this tensor.
PRE_PROJECTION: Final = "pre_projection.weight"
CENTROIDS: Final = "masked_embedding.centroids.weight"
TOKEN_ORDERING: Final = "masked_embedding.token_ordering"

# The defaults of transformers.
_NUM_CENTROIDS: Final = 2048
_TOP_CENTROIDS: Final = 32
_EMBEDDINGS: Final = "model.embed_tokens.weight"


def is_assistant_config(top: Section) -> bool:
    """Returns whether a configuration names itself an assistant's."""
    names = top.strings("architectures")
    if names:
        return any(name in ASSISTANT_ARCHITECTURES for name in names)
    return top.has("model_type") and top.values["model_type"] in ASSISTANT_ARCHITECTURES.values()


def translate_assistant(
    top: Section, target: Target, *, has_centroids: bool | None = None
) -> tuple[Family, list[str]]:
    """Translates an assistant for a target.

    Args:
        top: Its configuration.
        target: The target that it must fit.
        has_centroids: Whether its tensors have centroids; None: there are no tensors.

    Returns:
        The description with the tensors it needs, without the order of tokens; and notes for the
        user.

    Raises:
        ValueError: It was made for another target; names both values.
        ModelFileError: A key has a wrong value, or contradicts the tensors.
        NotImplementedError: It needs something that Paceline does not support.
    """
    hf = parse_hf_config(top.values, top.source, ASSISTANT_ARCHITECTURES)
    text = hf.text
    if target.architecture not in GEMMA4_ARCHITECTURES:
        raise ValueError(
            f"{made_for_another(top)} it is {hf.architecture!r}, which reads the KV of a Gemma 4 "
            f"target, but {target.path} is {target.architecture!r}; expected one of "
            f"{', '.join(GEMMA4_ARCHITECTURES)}"
        )
    _check_supported(hf)
    is_unified = "Unified" in hf.architecture
    sizes = read_gemma4_sizes(text, is_unified=is_unified)
    backbone = check_target_width(
        top, "backbone_hidden_size", top.integer("backbone_hidden_size"), target
    )
    check_same_vocabulary(top, text, sizes, target)
    layers = _read_layers(text, sizes)
    notes: list[str] = []
    config = describe_gemma4(
        GEMMA4_MTP,
        text,
        sizes,
        layers,
        is_unified=is_unified,
        ties_lm_head=False,
        embed_scale=target.config["embed_scale"],
    )
    take_positions(config, sizes, target, notes)
    check_reads_layers_of(config, target, made_for_another(top))
    drafter = describe_drafter(GEMMA4_MTP, target, owns_lm_head=True)
    centroids = _read_centroids(top, text, sizes, has_centroids)
    if centroids is not None:
        drafter["centroids"] = centroids
    config["drafter"] = drafter
    check_description(config, (text, top))
    family = Family(
        GEMMA4_MTP,
        hf.architecture,
        config,
        _tensors(config, sizes, layers, backbone, centroids),
        prefixes=("",),
        ignored_prefixes=() if centroids is None else (TOKEN_ORDERING,),
        ignored_sources=frozenset(f"model.{name}" for name in unused_kv_sources(layers)),
        lm_head_names=(_EMBEDDINGS,),
    )
    return family, notes


def check_reads_layers_of(config: Mapping[str, Any], target: Target, message: str) -> None:
    """Checks that every layer of an assistant has a layer of the target to read.

    Args:
        config: The assistant's canonical description.
        target: The target.
        message: The beginning of errors.

    Raises:
        ValueError: The target has no layer of the same kind, or one of another shape; names the
            layer and both values.
    """
    targets = [entry["attention"] for entry in target.config["layers"]]
    last_owner = {
        attention["kind"]: i for i, attention in enumerate(targets) if "kv_source" not in attention
    }
    for i, entry in enumerate(config["layers"]):
        ours = entry["attention"]
        source = last_owner.get(ours["kind"])
        if source is None:
            kinds = " and ".join(f"{kind!r}" for kind in sorted(last_owner))
            raise ValueError(
                f"{message} layer {i} of the drafter is one of kind {ours['kind']!r} and has no "
                f"layer to read: those of {target.path} that own their KV are of kind {kinds}"
            )
        theirs = targets[source]
        for key, what in (
            ("window", "a window of"),
            ("num_kv_heads", "key and value heads:"),
            ("head_dim", "a head size of"),
        ):
            if ours[key] != theirs[key]:
                raise ValueError(
                    f"{message} layer {i} of the drafter has {what} {ours[key]}, but layer "
                    f"{source} of {target.path}, whose KV it reads (the last one of kind "
                    f"{ours['kind']!r} that owns its KV), has {theirs[key]}"
                )


def _check_supported(hf: HfConfig) -> None:
    check_common(hf, may_be_bidirectional_in_images=True)
    text = hf.text
    check_dense(text)
    text.only("use_double_wide_mlp", False)
    text.only("hidden_size_per_layer_input", 0)
    hf.top.only("tie_word_embeddings", True, f"true (the lm_head is {_EMBEDDINGS!r})")
    num_layers = text.integer("num_hidden_layers")
    # Older files say 0 where all layers read the target's KV.
    if text.integer("num_kv_shared_layers", 0, low=0) not in (0, num_layers):
        raise text.refusal(
            "num_kv_shared_layers", f"{num_layers} (all layers read the KV of the target)"
        )


def _read_layers(text: Section, sizes: Sizes) -> tuple[Layer, ...]:
    layer_types = read_gemma4_layer_types(text, sizes.layers)
    return tuple(
        Layer(layer_type, kv_heads, head_dim, sizes.intermediate, reads_target=True)
        for layer_type, (kv_heads, head_dim) in zip(
            layer_types, read_kv_shapes(text, sizes, layer_types), strict=True
        )
    )


def _read_centroids(
    top: Section, text: Section, sizes: Sizes, has_centroids: bool | None
) -> dict[str, int] | None:
    """The settings of the lm_head's clusters; None: it has none.

    Files of the sizes without clusters name the numbers too.
    """
    key = "use_ordered_embeddings"
    is_stated = top.boolean(key, False)
    if has_centroids is not None and has_centroids != is_stated:
        seen = "missing, which means false" if not top.has(key) else str(is_stated).lower()
        raise ModelFileError(
            f'{top.source}: key "{top.name(key)}" is {seen}, but {CENTROIDS!r} is '
            f"{'' if has_centroids else 'not '}in the weights; expected both to say the same"
        )
    if not is_stated:
        return None
    count = top.integer("num_centroids", _NUM_CENTROIDS)
    if sizes.vocab % count != 0:
        raise top.error(
            "num_centroids", f'a divisor of "{text.name("vocab_size")}" ({sizes.vocab})'
        )
    return {
        "count": count,
        "top": top.integer("centroid_intermediate_top_k", _TOP_CENTROIDS, high=count),
    }


def _tensors(
    config: Mapping[str, Any],
    sizes: Sizes,
    layers: Sequence[Layer],
    backbone: int,
    centroids: Mapping[str, int] | None,
) -> tuple[TensorSpec, ...]:
    """Lists every tensor but the order of tokens, in the order in which the model is filled."""
    hidden, width = (sizes.hidden, "hidden_size"), (backbone, "backbone_hidden_size")
    both = (2 * backbone, f"2 * {width[1]}")
    specs = [
        tensor_spec("fc.weight", PRE_PROJECTION, hidden, both),
        tensor_spec("feedback.weight", "post_projection.weight", width, hidden),
    ]
    for spec in decoder_tensors(config, sizes, layers):
        # Its own embeddings are only used as its lm_head.
        if spec.name != "embed.weight":
            specs.append(dataclasses.replace(spec, source=f"model.{spec.source}"))
    if centroids is not None:
        count = (centroids["count"], "num_centroids")
        specs.append(tensor_spec("centroids.weight", CENTROIDS, count, hidden))
    return tuple(specs)
