# SPDX-License-Identifier: Apache-2.0
"""MTP layers (method "mtp") as canonical descriptions and tensor names.

GLM-4.7-Flash and DeepSeek-V3 have one layer after the last one of the decoder. It predicts one
token more than the target does, and drafts any number when it reads its own output. It is in the
target's own files, and uses the target's embeddings and lm_head where they hold copies of them.
That of Qwen3.5 and Qwen3-Next has names of its own, and full attention whatever the target's layers
have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, Final

from paceline._core import ModelFileError

from . import deepseek_v4, qwen3_5, qwen3_5_tensors
from .binding import same_bytes
from .decoder_tensors import tensor_spec
from .deepseek import num_mtp_layers
from .deepseek_v4_tensors import PUBLISHED, V4Tensors
from .description import check_description
from .drafters import MTP, Target, describe_drafter, made_for_another
from .families import ARCHITECTURES, translate
from .family import Family, TensorSpec
from .hf_config import HfConfig, parse_hf_config
from .quantization import input_scales
from .qwen3_5_formats import PLAIN
from .section import Section
from .tensor_source import TensorSource, WeightMap, Weights

MTP_ARCHITECTURES: Final = (
    "Glm4MoeLiteForCausalLM",
    "DeepseekV3ForCausalLM",
    deepseek_v4.ARCHITECTURE,
    *qwen3_5.ARCHITECTURES,
)
# In published files of DeepSeek-V4.
_V4_LAYER: Final = "mtp."
# In files of Qwen3.5 and Qwen3-Next, without any prefix.
_QWEN_PART: Final = "mtp."
_SCALES: Final = (".weight_scale", ".weight_scale_inv")


def check_has_mtp(top: Section) -> HfConfig:
    """The configuration of a target with one MTP layer.

    Raises:
        NotImplementedError: It is of another family, or has another number of such layers.
        ModelFileError: A key has a wrong type.
    """
    hf = parse_hf_config(top.values, top.source, ARCHITECTURES)
    if hf.architecture not in MTP_ARCHITECTURES:
        raise NotImplementedError(
            f"{top.source}: method {MTP!r} needs a target with an MTP layer, but it is "
            f"{hf.architecture!r}; supported: {', '.join(MTP_ARCHITECTURES)}"
        )
    if hf.architecture in qwen3_5.ARCHITECTURES:
        qwen3_5.check_mtp_settings(hf.text)
        key, count = qwen3_5.num_mtp_layers(hf.text)
    else:
        key, count = num_mtp_layers(hf.text)
    if count != 1:
        raise hf.text.refusal(key, "1 layer")
    return hf


def translate_mtp(
    top: Section, target: Target, weights: Weights | None
) -> tuple[Family, WeightMap]:
    """Translates the MTP layer of a target.

    Args:
        top: The target's configuration.
        target: The target that it must fit: the one whose configuration this is.
        weights: The target's tensors; None: there are none, and the layer shares embeddings and
            lm_head.

    Returns:
        The description with the tensors it needs, and the tensors of the layer.

    Raises:
        ValueError: It is a layer of another target; names both values.
        ModelFileError: A key has a wrong value, or the files do not have the layer.
        NotImplementedError: It needs something that Paceline does not support.
    """
    hf = check_has_mtp(top)
    whole = translate(hf)
    check_same_model(top, hf, whole, target, "it is the layer")
    if hf.architecture in qwen3_5.ARCHITECTURES:
        return _translate_qwen3_5(top, hf, whole, target, weights)
    if hf.architecture == deepseek_v4.ARCHITECTURE:
        return _translate_v4(top, hf, whole, target, weights)
    number = target.num_layers
    layer = f"layers.{number}."
    owners = {} if weights is None else weights.owners
    prefixes = [p for p in whole.prefixes if any(name.startswith(p + layer) for name in owners)]
    prefix = (prefixes or whole.prefixes)[0]
    if weights is not None and not prefixes:
        raise _missing_layer(weights.where, prefix + layer)
    found = {name: source for name, source in owners.items() if name.startswith(prefix + layer)}
    # Copies of the target's tables are left where they are.
    copies = {
        "embed.weight": (f"{prefix}{layer}embed_tokens.weight", f"{prefix}embed_tokens.weight"),
        "lm_head.weight": (f"{prefix}{layer}shared_head.head.weight", "lm_head.weight"),
    }
    owned = {
        name: source
        for name, (source, original) in copies.items()
        if source in found and not _is_copy(owners, source, original)
    }
    config = _describe(whole, whole.config["layers"][-1], target, owned, norm_output=True)
    check_description(config, (hf.text, top))
    family = Family(
        MTP,
        hf.architecture,
        config,
        _tensors(whole, number, owned, prefix),
        prefixes=(prefix,),
        ignored_sources=frozenset(
            source.removeprefix(prefix) for name, (source, _) in copies.items() if name not in owned
        ),
        lm_head_names=(copies["lm_head.weight"][0],),
    )
    return family, WeightMap("" if weights is None else weights.where, found)


def _describe(
    whole: Family,
    layer: Mapping[str, Any],
    target: Target,
    owned: Container[str],
    *,
    norm_output: bool,
) -> dict[str, Any]:
    return {
        **whole.config,
        "name": MTP,
        "ties_lm_head": False,
        "layers": [layer],
        "drafter": describe_drafter(
            MTP,
            target,
            fc_norm=True,
            norm_output=norm_output,
            owns_embedding="embed.weight" in owned,
            owns_lm_head="lm_head.weight" in owned,
        ),
    }


def _translate_v4(
    top: Section, hf: HfConfig, whole: Family, target: Target, weights: Weights | None
) -> tuple[Family, WeightMap]:
    """Translates `mtp.0` of DeepSeek-V4, which shares embeddings and lm_head with its target."""
    layer = f"{_V4_LAYER}0."
    where = "" if weights is None else weights.where
    found: dict[str, TensorSource] = {}
    if weights is not None:
        found = {name: s for name, s in weights.owners.items() if name.startswith(_V4_LAYER)}
        others = sorted(name for name in found if not name.startswith(layer))
        if others:
            raise ModelFileError(
                f"{where}: tensor {others[0]!r} is of another MTP layer than {layer + '*'!r}; "
                f'method {MTP!r} needs a checkpoint with one, as "num_nextn_predict_layers" of '
                f"{hf.source} says"
            )
        if not found:
            raise _missing_layer(where, layer)
    description = deepseek_v4.describe_drafting_layer(hf)
    config = _describe(whole, description, target, (), norm_output=False)
    if "qkv_a" in description["attention"]:
        config["drafter"]["fc"] = description["attention"]["qkv_a"]
    check_description(config, (hf.text, top))
    tensors = V4Tensors(whole.config, PUBLISHED)
    hidden = tensors.hidden
    specs = [
        tensor_spec(f"{name}.weight", f"{layer}{source}.weight", hidden)
        for name, source in (("fc_norm.0", "enorm"), ("fc_norm.1", "hnorm"), ("final_norm", "norm"))
    ]
    for name, source in (("fc", "e_proj"), ("fc_hidden", "h_proj")):
        specs += tensors.matrix(name, layer, source, hidden, hidden)
    specs += tensors.end_mix(layer)
    specs += tensors.layer(description, "layers.0.", layer)
    family = Family(
        MTP,
        hf.architecture,
        config,
        tuple(specs),
        (PUBLISHED.prefix,),
        lm_head_names=(PUBLISHED.lm_head,),
    )
    return family, WeightMap(where, found)


def _translate_qwen3_5(
    top: Section, hf: HfConfig, whole: Family, target: Target, weights: Weights | None
) -> tuple[Family, WeightMap]:
    """Translates `mtp` of Qwen3.5, which shares embeddings and lm_head with its target."""
    where = "" if weights is None else weights.where
    found: dict[str, TensorSource] = {}
    if weights is not None:
        found = {name: s for name, s in weights.owners.items() if name.startswith(_QWEN_PART)}
        if not found:
            key = qwen3_5.num_mtp_layers(hf.text)[0]
            stated = f', which key "{hf.text.name(key)}" of {hf.source} counts'
            raise _missing_layer(where, _QWEN_PART, stated if hf.text.has(key) else "")
    shape = qwen3_5.read_shape(hf)
    formats = PLAIN
    # Files of some tools have a plain layer that their rule says nothing about.
    if weights is None or any(name.endswith(_SCALES) for name in found):
        formats = qwen3_5.read_mtp_formats(hf, shape, _QWEN_PART)
    is_dense = shape.experts is None

    def family(others: tuple[Family, ...], *, is_per_expert: bool) -> Family:
        layer = {
            "attention": qwen3_5.describe_attention(shape, formats),
            "mlp": qwen3_5.describe_mlp(
                shape, formats, is_dense=is_dense, is_per_expert=is_per_expert
            ),
        }
        config = _describe(whole, layer, target, (), norm_output=True)
        check_description(config, (hf.text, top))
        hidden, both = shape.hidden, (2 * shape.sizes.hidden, "2 * hidden_size")
        specs = [tensor_spec("fc.weight", "fc.weight", hidden, both)]
        specs += [
            tensor_spec(f"{name}.weight", f"{source}.weight", hidden)
            for name, source in (
                ("fc_norm.0", "pre_fc_norm_embedding"),
                ("fc_norm.1", "pre_fc_norm_hidden"),
                ("final_norm", "norm"),
            )
        ]
        specs += qwen3_5_tensors.full_layer_tensors(
            shape,
            formats,
            "layers.0.",
            "layers.0.",
            is_dense=is_dense,
            is_per_expert=is_per_expert,
        )
        return Family(
            MTP,
            hf.architecture,
            config,
            tuple(specs),
            prefixes=(_QWEN_PART,),
            ignored_sources=input_scales(specs),
            others=others,
        )

    if is_dense:
        translated = family((), is_per_expert=False)
    elif qwen3_5.have_scales([formats]):
        translated = family((), is_per_expert=True)
    else:
        translated = family((family((), is_per_expert=True),), is_per_expert=False)
    return translated.for_tensors(found), WeightMap(where, found)


def _missing_layer(where: str, layer: str, stated: str = "") -> ModelFileError:
    return ModelFileError(
        f"{where}: there are no tensors {layer + '*'!r}, the MTP layer that method {MTP!r} needs"
        f"{stated}; "
        "expected a checkpoint with it, as published (transformers leaves it out when it saves a "
        "model)"
    )


def check_same_model(top: Section, hf: HfConfig, whole: Family, target: Target, what: str) -> None:
    """Refuses the drafter in a model's own files for another target.

    Args:
        top: The configuration of the drafter's model.
        hf: The same, parsed.
        whole: That model.
        target: The target.
        what: What the drafter is or has, for messages.

    Raises:
        ValueError: They differ; names both values.
    """
    made_for = made_for_another(top)
    if target.architecture != hf.architecture:
        raise ValueError(
            f"{made_for} {what} of {hf.architecture!r}, but {target.path} is "
            f"{target.architecture!r}"
        )
    for key, ours, theirs in (
        ("hidden_size", whole.config["hidden_size"], target.hidden_size),
        ("vocab_size", whole.config["vocab_size"], target.vocab_size),
        ("num_hidden_layers", len(whole.config["layers"]), target.num_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f'{made_for} key "{hf.text.name(key)}" is {ours}, but that of {target.path} is '
                f"{theirs}"
            )


def _is_copy(owners: Mapping[str, TensorSource], name: str, original: str) -> bool:
    return original in owners and same_bytes(owners[name], name, owners[original], original)


def _tensors(
    whole: Family, number: int, owned: Mapping[str, str], prefix: str
) -> tuple[TensorSpec, ...]:
    """The tensors of the last layer under the number of this one, and what only this one has."""
    hidden = int(whole.config["hidden_size"])
    vocab = int(whole.config["vocab_size"])
    last, layer = f"layers.{number - 1}.", f"layers.{number}."
    specs = [
        TensorSpec(name, f"{layer}{source}", shape, keys)
        for name, source, shape, keys in (
            ("fc.weight", "eh_proj.weight", (hidden, 2 * hidden), "hidden_size, 2 * hidden_size"),
            ("fc_norm.0.weight", "enorm.weight", (hidden,), "hidden_size"),
            ("fc_norm.1.weight", "hnorm.weight", (hidden,), "hidden_size"),
            ("final_norm.weight", "shared_head.norm.weight", (hidden,), "hidden_size"),
        )
    ]
    specs += [
        TensorSpec(name, source.removeprefix(prefix), (vocab, hidden), "vocab_size, hidden_size")
        for name, source in owned.items()
    ]
    specs += [
        dataclasses.replace(
            spec,
            name=spec.name.replace(last, "layers.0.", 1),
            source=spec.source.replace(last, layer, 1),
        )
        for spec in whole.tensors
        if spec.name.startswith(last)
    ]
    return tuple(specs)
