# SPDX-License-Identifier: Apache-2.0
"""EAGLE draft heads as canonical descriptions and tensor names.

Three layouts are read: EAGLE-1 and EAGLE-3 as SafeAILab writes them, and EAGLE-3 in the format of
the `speculators` package. The result is a decoder description with the key "drafter" of
`docs/model-format.md`, and no later code depends on the layout.

A draft head is trained for one target and uses the target's embeddings, lm_head or rope if it
has none. If a configuration and the tensors state the same fact, the tensors decide,
and a configuration that contradicts them is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

from paceline._core import ModelFileError

from .decoder import Layer, Sizes, describe, read_activation, read_sizes, same_layers
from .decoder_tensors import layer_tensors, tensor_spec
from .description import check_description
from .drafters import (
    EAGLE3,
    Target,
    check_fits,
    check_full_head,
    describe_drafter,
    made_for_another,
    take_positions,
)
from .eagle_facts import QK_NORM_SOURCES, Facts, aux_layers, layer_section
from .families import is_same_family
from .family import Family, TensorSpec
from .layer_types import FULL, LAYER_TYPES, SLIDING, read_layer_types
from .messages import shorten, show
from .rope import RopeSettings, read_rope
from .section import DEFAULTS, Section

LAYER_MODEL_TYPES: Final = ("llama", "qwen3")
_MAP_NAMES: Final = ("d2t", "t2d")


def translate_eagle(
    kind: str, top: Section, facts: Facts, target: Target
) -> tuple[Family, list[str]]:
    """Translates an EAGLE draft head for a target.

    Args:
        kind: "eagle" or "eagle3".
        top: Its configuration.
        facts: The parts that it has.
        target: The target that it must fit.

    Returns:
        The description with the tensors it needs, without `d2t`; and notes for the user.

    Raises:
        ValueError: It was made for another target; names both values.
        ModelFileError: A key has a wrong value, or contradicts the tensors.
        NotImplementedError: It needs something that Paceline does not support.
    """
    layer = layer_section(top)
    model_type = layer.text("model_type", "llama")
    if model_type not in LAYER_MODEL_TYPES:
        raise layer.refusal("model_type", ", ".join(LAYER_MODEL_TYPES))
    for section in (top, layer):
        if section.has("quantization_config"):
            raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")
    defaults = DEFAULTS[model_type] | {"vocab_size": target.vocab_size}
    sizes = read_sizes(layer.with_defaults(defaults))
    _check_target(kind, top, layer, sizes, facts, target)
    _check_biases(top, layer, facts)
    if facts.has_qk_norm != (model_type == "qwen3"):
        seen = "are in the weights" if facts.has_qk_norm else "are not in the weights"
        found = f"is {model_type!r}, but {' and '.join(QK_NORM_SOURCES)} {seen}"
        raise layer.wrong("model_type", f"{found}; expected 'qwen3' with them, 'llama' without")

    notes: list[str] = []
    keys: dict[str, Any] = {}
    if kind == EAGLE3:
        keys = _read_eagle3(top, facts, target, notes)
    else:
        _check_eagle(top, sizes, facts)
    drafter = describe_drafter(
        kind,
        target,
        **keys,
        has_fc_bias=facts.has_fc_bias,
        has_attn_norm=facts.has_attn_norm,
        has_final_norm=facts.has_final_norm,
        owns_embedding=facts.has_embedding,
        owns_lm_head=facts.draft_vocab_size is not None,
        draft_vocab_size=facts.draft_vocab_size or target.vocab_size,
    )
    config = _description(kind, top, layer, sizes, facts, target, notes)
    config["drafter"] = drafter
    check_description(config, (layer, top))
    tensors = _tensors(kind, sizes, facts, config)
    family = Family(
        kind,
        (top.strings("architectures") or [kind])[0],
        config,
        tensors,
        prefixes=(facts.prefix,),
        ignored_prefixes=tuple(p + name for p in {"", facts.prefix} for name in _MAP_NAMES),
    )
    return family, notes


# ---- does it fit? ------------------------------------------------------------------------------


def _check_target(
    kind: str, top: Section, layer: Section, sizes: Sizes, facts: Facts, target: Target
) -> None:
    """Refuses a draft head of another target, with both values."""
    _check_verifier(top, target)
    borrowed = [
        name
        for name, is_owned in (
            ("embeddings", facts.has_embedding),
            ("lm_head", facts.draft_vocab_size is not None),
            ("hidden states", kind == EAGLE3),
        )
        if not is_owned
    ]
    check_fits(top, layer, sizes, target, " and ".join(borrowed))


def _check_verifier(top: Section, target: Target) -> None:
    speculators = top.section("speculators_config")
    verifier = speculators.section("verifier") if speculators is not None else None
    names = verifier.strings("architectures") if verifier is not None else None
    if verifier is None or not names:
        return
    if any(is_same_family(target.architecture, name) for name in names):
        return
    name = f" ({shorten(verifier.text('name_or_path'))})" if verifier.has("name_or_path") else ""
    raise ValueError(
        f"{made_for_another(top)} key "
        f'"{verifier.name("architectures")}" is {show(names)}{name}, but {target.path} is '
        f"{target.architecture!r}"
    )


def _check_biases(top: Section, layer: Section, facts: Facts) -> None:
    keys: list[tuple[Section, str, str, bool]] = [
        (layer, "attention_bias", "self_attn.q_proj.bias", facts.has_qkv_bias),
        (layer, "mlp_bias", "mlp.gate_proj.bias", facts.has_mlp_bias),
        (top, "bias", "fc.bias", facts.has_fc_bias),
    ]
    if top.has("qkv_bias"):
        # The older key of draft heads for Qwen2: biases on q, k and v only.
        keys[0] = (top, "qkv_bias", "self_attn.q_proj.bias", facts.has_qkv_bias)
    for section, key, name, is_there in keys:
        if section.has(key) and section.boolean(key) != is_there:
            _raise_contradiction(section, key, name, is_there)


def _raise_contradiction(section: Section, key: str, tensor: str, is_there: bool) -> None:
    value = str(section.boolean(key)).lower()
    raise ModelFileError(
        f'{section.source}: key "{section.name(key)}" is {value}, but {tensor!r} is '
        f"{'' if is_there else 'not '}in the weights; expected both to say the same"
    )


# ---- what is special about each ----------------------------------------------------------------


def _check_eagle(top: Section, sizes: Sizes, facts: Facts) -> None:
    if sizes.layers != 1:
        raise top.refusal("num_hidden_layers", "1 layer in an EAGLE-1 draft head")
    if facts.has_map:
        raise ModelFileError(
            f"{top.source}: 'd2t' is in the weights, but an EAGLE-1 draft head has no reduced "
            "vocabulary"
        )
    check_full_head(top, facts.draft_vocab_size, sizes.vocab)


def _read_eagle3(top: Section, facts: Facts, target: Target, notes: list[str]) -> dict[str, Any]:
    rows = facts.draft_vocab_size
    stated = top.integer("draft_vocab_size", rows or target.vocab_size)
    if rows is None and stated != target.vocab_size:
        seen = f"is {stated}, but 'lm_head.weight' is not in the weights"
        rows_of = f"the target's lm_head has {target.vocab_size} rows"
        raise top.wrong("draft_vocab_size", f"{seen}, and {rows_of}")
    if rows is not None and stated != rows:
        seen = f"is {stated}, but 'lm_head.weight' has {rows} rows"
        raise top.wrong("draft_vocab_size", f"{seen}; expected the same number")
    if facts.has_map and rows is None:
        raise ModelFileError(
            f"{top.source}: 'd2t' is in the weights, but 'lm_head.weight' is not; expected both or "
            "none of the two"
        )
    if not facts.has_map:
        check_full_head(top, rows, target.vocab_size)
    aux_layers = _choose_aux_layers(top, facts, target, notes)
    if facts.num_fc_norms and facts.num_fc_norms != len(aux_layers):
        raise ModelFileError(
            f"{top.source}: {facts.num_fc_norms} tensors 'fc_norm.N.weight' are in the weights, "
            f"but the drafter reads {len(aux_layers)} layers of the target "
            f"{show(aux_layers)}; expected one for each"
        )
    if facts.num_fc_norms and facts.has_input_norm:
        raise ModelFileError(
            f"{top.source}: 'input_norm.weight' and 'fc_norm.0.weight' are both in the weights; "
            "expected at most one of the two"
        )
    for key, tensor, is_there in (
        ("norm_before_fc", "input_norm.weight", facts.has_input_norm),
        ("fc_norm", "fc_norm.0.weight", facts.num_fc_norms > 0),
    ):
        if top.has(key) and top.boolean(key) != is_there:
            _raise_contradiction(top, key, tensor, is_there)
    is_speculators = top.has("speculators_model_type")
    if is_speculators and not top.has("norm_before_residual"):
        notes.append(
            f'{top.source} has no key "norm_before_residual"; true is assumed, as other engines do'
        )
    return {
        "aux_layers": aux_layers,
        "norm_before_residual": top.boolean("norm_before_residual", is_speculators),
        "norm_before_fc": facts.has_input_norm,
        "fc_norm": facts.num_fc_norms > 0,
        "norm_output": top.boolean("norm_output", False),
    }


def _choose_aux_layers(top: Section, facts: Facts, target: Target, notes: list[str]) -> list[int]:
    """The target's layers whose incoming residual stream the draft head reads."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = aux_layers(top)
    num_layers = target.num_layers
    chosen = named
    if chosen is None:
        chosen = [2, num_layers // 2, num_layers - 3]
        notes.append(
            f"the drafter reads the residual streams that enter the target's layers {chosen}"
        )
    if facts.fc_shape is not None:
        columns = facts.fc_shape[-1] if facts.fc_shape else 0
        if columns % target.hidden_size != 0:
            raise ValueError(
                f"{made_for_another(top)} 'fc.weight' has "
                f"{columns} columns, but {target.path} has a hidden size of {target.hidden_size}; "
                "expected a multiple of it"
            )
        if columns // target.hidden_size != len(chosen):
            where = f'key "{key}" names' if named is not None else "it takes"
            raise ValueError(
                f"{top.source}: 'fc.weight' has {columns} columns, "
                f"{columns // target.hidden_size} times the hidden size of {target.path} "
                f"({target.hidden_size}), but {where} {len(chosen)} layers, {show(chosen)}"
            )
    default = "" if named is not None else " by default"
    is_ascending = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not is_ascending or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise ValueError(
            f'{top.source}: key "{key}" is {show(chosen)}{default}; '
            f"{target.path} has {num_layers} layers: allowed: 0 to {num_layers - 1}, in ascending "
            "order"
        )
    return chosen


# ---- the description ---------------------------------------------------------------------------


def _description(
    kind: str,
    top: Section,
    layer: Section,
    sizes: Sizes,
    facts: Facts,
    target: Target,
    notes: list[str],
) -> dict[str, Any]:
    layer_types = (FULL,) * sizes.layers
    if layer.has("layer_types"):
        layer_types = read_layer_types(layer, sizes.layers, 1)
    window = layer.integer("sliding_window") if SLIDING in layer_types else 0
    rope = _own_rope(layer)
    shares_head = facts.draft_vocab_size is None
    config = describe(
        kind,
        sizes,
        same_layers(sizes, layer_types),
        window=window,
        ropes=dict.fromkeys(LAYER_TYPES, rope or RopeSettings()),
        attention_scale=sizes.head_dim**-0.5,
        activation=read_activation(layer, ("hidden_act",), "silu"),
        ties_lm_head=False,
        has_qk_norm=facts.has_qk_norm,
        mlp_bias=facts.has_mlp_bias,
        logit_soft_cap=target.config["logit_soft_cap"] if shares_head else 0.0,
    )
    for entry in config["layers"]:
        entry["attention"]["has_qkv_bias"] = facts.has_qkv_bias
        entry["attention"]["has_o_bias"] = facts.has_o_bias
    if rope is None:
        config["ropes"] = [_rope_of_target(top, sizes.head_dim, target)]
        notes.append(f"{top.source} has no rope_theta; the drafter uses the target's rope")
    take_positions(config, sizes, target, notes)
    return config


def _own_rope(layer: Section) -> RopeSettings | None:
    """The draft head's rope; None: its configuration names none."""
    parameters = layer.section("rope_parameters")
    scaling = layer.section("rope_scaling")
    has_theta = layer.has("rope_theta") or any(
        section is not None and _names_theta(section) for section in (parameters, scaling)
    )
    if not has_theta:
        if (parameters is not None and parameters.values) or (scaling and scaling.values):
            raise layer.error("rope_theta", "the base that the scaling belongs to")
        return None
    return read_rope(layer, 10_000.0)


def _names_theta(section: Section) -> bool:
    return section.has("rope_theta") or any(
        isinstance(value, dict) and value.get("rope_theta") is not None
        for value in section.values.values()
    )


def _rope_of_target(top: Section, head_dim: int, target: Target) -> dict[str, Any]:
    """The rope of the target's full layers."""
    layers = [entry["attention"] for entry in target.config["layers"]]
    attention = next((entry for entry in layers if entry["kind"] == "full"), layers[0])
    if attention["head_dim"] != head_dim:
        raise ModelFileError(
            f'{top.source}: key "rope_theta" is missing, and the target\'s rope is for heads of '
            f"{attention['head_dim']} elements while the drafter's have {head_dim}; expected a "
            "number above 0"
        )
    rope: dict[str, Any] = target.config["ropes"][attention["rope"]]
    return rope


# ---- the tensors -------------------------------------------------------------------------------


def _tensors(
    kind: str, sizes: Sizes, facts: Facts, config: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Lists every tensor but `d2t`, in the order in which the model is filled."""
    hidden = (sizes.hidden, "hidden_size")
    drafter, entries = config["drafter"], config["layers"]
    target_hidden = drafter["target_hidden_size"]
    specs: list[TensorSpec] = []
    if facts.has_embedding:
        vocab = (sizes.vocab, "vocab_size")
        specs.append(tensor_spec("embed.weight", "embed_tokens.weight", vocab, hidden))
    if kind == EAGLE3:
        num_aux = len(drafter["aux_layers"])
        columns = (num_aux * target_hidden, f"{num_aux} * hidden size of the target")
        if facts.has_input_norm:
            specs.append(tensor_spec("fc_input_norm.weight", "input_norm.weight", columns))
        for i in range(facts.num_fc_norms):
            width = (target_hidden, "hidden size of the target")
            specs.append(tensor_spec(f"fc_norm.{i}.weight", f"fc_norm.{i}.weight", width))
    else:
        columns = (sizes.hidden + target_hidden, "2 * hidden_size")
    specs.append(tensor_spec("fc.weight", "fc.weight", hidden, columns))
    if facts.has_fc_bias:
        specs.append(tensor_spec("fc.bias", "fc.bias", hidden))
    plain = Layer(FULL, sizes.kv_heads, sizes.head_dim, sizes.intermediate)
    for i, entry in enumerate(entries):
        reads_both = kind == EAGLE3 and i == 0
        specs += layer_tensors(
            f"layers.{i}.",
            facts.first_layer if i == 0 else f"layers.{i}.",
            sizes,
            plain,
            entry,
            _layer_norms(kind, i, facts),
            (2 * sizes.hidden, "2 * hidden_size") if reads_both else None,
        )
    if facts.has_final_norm or kind == EAGLE3:
        specs.append(tensor_spec("final_norm.weight", "norm.weight", hidden))
    if facts.draft_vocab_size is not None:
        rows = (facts.draft_vocab_size, "rows")
        specs.append(tensor_spec("lm_head.weight", "lm_head.weight", rows, hidden))
    return tuple(specs)


def _layer_norms(kind: str, index: int, facts: Facts) -> list[tuple[str, str]]:
    norms = [("mlp_norm.weight", "post_attention_layernorm.weight")]
    if kind == EAGLE3 or index > 0 or facts.has_attn_norm:
        norms.insert(0, ("attn_norm.weight", "input_layernorm.weight"))
    if kind == EAGLE3 and index == 0:
        norms.insert(0, ("hidden_norm.weight", "hidden_norm.weight"))
    return norms
