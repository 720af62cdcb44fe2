# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads as canonical descriptions and tensor names.

Three layouts are read: EAGLE-1 and EAGLE-3 as SafeAILab writes them, and EAGLE-3 in the format of
the `speculators` package. What comes out is a decoder description with the key "drafter" of
`docs/model-format.md`, and nothing downstream asks which layout it came from.

A head is made for one target, and takes from it what it does not bring itself: embeddings, lm_head,
rope. Where a configuration and the tensors can both say something, the tensors decide and a
configuration that says otherwise is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline._core import ModelFileError

from .decoder import (
    LINEARS,
    QK_NORMS,
    Family,
    Sizes,
    TensorSpec,
    describe,
    read_activation,
    read_sizes,
    same_layers,
)
from .drafters import (
    EAGLE,
    EAGLE3,
    Target,
    check_same_vocabulary,
    made_for_another,
    take_positions,
)
from .families import is_same_family
from .hf_config import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    RopeSettings,
    Section,
    read_layer_types,
    read_rope,
)

LAYER_MODEL_TYPES: Final = ("llama", "qwen3")
# What EAGLE-3 heads are made for unless they say otherwise: (2, L // 2, L - 3).
_NUM_DEFAULT_AUX: Final = 3
_MAP_NAMES: Final = ("d2t", "t2d")
_QK_NORM_SOURCES: Final = tuple(source for _, source in QK_NORMS)


@dataclass(frozen=True)
class Facts:
    """What a drafter brings: read from its tensors, or guessed from the configuration.

    Attributes:
        prefix: What stands before every name but the lm_head's.
        first_layer: What stands before the tensors of layer 0: "midlayer." or "layers.0.".
        draft_vocab_size: Rows of its lm_head; None: it has none.
        fc_shape: Shape of `fc.weight`; None: unknown.
        has_embedding: It has an embedding table.
        has_map: It has `d2t`.
        has_fc_bias: `fc.bias`.
        has_input_norm: `input_norm.weight`: one norm over all auxiliary states before fc.
        num_fc_norms: `fc_norm.N.weight`: one norm for each of them.
        has_attn_norm: A norm before attention in layer 0.
        has_final_norm: `norm.weight`.
        has_qk_norm: Norms on q and k.
        has_qkv_bias: Biases on q, k and v.
        has_o_bias: A bias on o.
        has_mlp_bias: Biases on gate, up and down.
    """

    prefix: str = ""
    first_layer: str = "layers.0."
    draft_vocab_size: int | None = None
    fc_shape: tuple[int, ...] | None = None
    has_embedding: bool = False
    has_map: bool = False
    has_fc_bias: bool = False
    has_input_norm: bool = False
    num_fc_norms: int = 0
    has_attn_norm: bool = True
    has_final_norm: bool = True
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False


def eagle_kind_of_config(top: Section) -> str | None:
    """The kind of EAGLE that a configuration names; None: none, so the tensors have to tell.

    Published EAGLE-1 heads call themselves `LlamaForCausalLM`.

    Raises:
        NotImplementedError: A speculator of the `speculators` package that is not supported.
    """
    if top.has("speculators_model_type"):
        if top.text("speculators_model_type") != "eagle3":
            raise top.refusal("speculators_model_type", "eagle3")
        return EAGLE3
    for name in top.strings("architectures") or []:
        if re.search("eagle-?3", name, re.IGNORECASE):
            return EAGLE3
        if re.search("eagle", name, re.IGNORECASE):
            return EAGLE
    return None


def eagle_kind_of_tensors(names: Mapping[str, object]) -> tuple[str | None, str]:
    """The kind of EAGLE that tensors speak for.

    Args:
        names: The tensors of a checkpoint by name.

    Returns:
        The kind, None for something without `fc.weight`; and the name of a tensor that shows it.
    """
    prefix = _find_prefix(names)
    if f"{prefix}fc.weight" not in names:
        return None, ""
    signs = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "midlayer.", "d2t")
    for sign in signs:
        for name in names:
            if name.startswith(prefix + sign):
                return EAGLE3, name
    return EAGLE, f"{prefix}fc.weight"


def _find_prefix(names: Mapping[str, object]) -> str:
    """What stands before the names of a drafter's tensors: "" or "model."."""
    return "model." if "model.fc.weight" in names and "fc.weight" not in names else ""


def read_facts(shapes: Mapping[str, tuple[int, ...]]) -> Facts:
    """Reads what a drafter brings off its tensors.

    Args:
        shapes: Shape of every tensor by name.
    """
    prefix = _find_prefix(shapes)
    is_midlayer = any(name.startswith(f"{prefix}midlayer.") for name in shapes)
    layer = "midlayer." if is_midlayer else "layers.0."

    def has(name: str) -> bool:
        return prefix + name in shapes

    num_fc_norms = 0
    while has(f"fc_norm.{num_fc_norms}.weight"):
        num_fc_norms += 1
    lm_head = shapes.get("lm_head.weight")
    return Facts(
        prefix=prefix,
        first_layer=layer,
        draft_vocab_size=lm_head[0] if lm_head else None,
        fc_shape=shapes.get(f"{prefix}fc.weight"),
        has_embedding=has("embed_tokens.weight"),
        has_map=has("d2t") or "d2t" in shapes,
        has_fc_bias=has("fc.bias"),
        has_input_norm=has("input_norm.weight"),
        num_fc_norms=num_fc_norms,
        has_attn_norm=has(f"{layer}input_layernorm.weight"),
        has_final_norm=has("norm.weight"),
        has_qk_norm=any(has(layer + source) for source in _QK_NORM_SOURCES),
        has_qkv_bias=has(f"{layer}self_attn.q_proj.bias"),
        has_o_bias=has(f"{layer}self_attn.o_proj.bias"),
        has_mlp_bias=has(f"{layer}mlp.gate_proj.bias"),
    )


def guess_facts(kind: str, top: Section, target: Target) -> Facts:
    """What a drafter of a configuration brings, where there are no tensors to look at.

    For made-up weights. Embeddings count as the target's where the configuration does not speak of
    them, and an EAGLE-3 head as one with an lm_head of its own.
    """
    layer = _layer_section(top)
    bias = layer.boolean("attention_bias", False)
    qk_norm = layer.text("model_type", "llama") == "qwen3"
    if kind == EAGLE:
        return Facts(
            has_attn_norm=False,
            has_final_norm=False,
            has_fc_bias=top.boolean("bias", False),
            has_qk_norm=qk_norm,
            has_qkv_bias=bias or top.boolean("qkv_bias", False),
            has_o_bias=bias,
            has_mlp_bias=layer.boolean("mlp_bias", False),
        )
    rows = top.integer("draft_vocab_size", target.vocab_size)
    num_aux = len(_aux_layers(top) or range(_NUM_DEFAULT_AUX))
    return Facts(
        draft_vocab_size=rows,
        has_map=rows != target.vocab_size,
        has_input_norm=top.boolean("norm_before_fc", False),
        num_fc_norms=num_aux if top.boolean("fc_norm", False) else 0,
        has_qk_norm=qk_norm,
        has_qkv_bias=bias or top.boolean("qkv_bias", False),
        has_o_bias=bias,
        has_mlp_bias=layer.boolean("mlp_bias", False),
    )


def translate_eagle(
    kind: str, top: Section, facts: Facts, target: Target
) -> tuple[Family, list[str]]:
    """Translates a head for a target.

    Args:
        kind: "eagle" or "eagle3".
        top: Its configuration.
        facts: What it brings.
        target: What it has to fit.

    Returns:
        The description with the tensors it needs, without `d2t`; and what a user may want to know.

    Raises:
        ValueError: It was made for another target; names both values.
        ModelFileError: A key has a wrong value, or contradicts the tensors.
        NotImplementedError: It needs something that Paceline does not do.
    """
    layer = _layer_section(top)
    model_type = layer.text("model_type", "llama")
    if model_type not in LAYER_MODEL_TYPES:
        raise layer.refusal("model_type", ", ".join(LAYER_MODEL_TYPES))
    for section in (top, layer):
        if section.has("quantization_config"):
            raise section.refusal("quantization_config", "none (weights in BF16, F16 or F32)")
    if model_type == "qwen3":
        sizes = read_sizes(
            layer, vocab=target.vocab_size, head_dim=128, max_position=32_768, eps=1e-6
        )
    else:
        sizes = read_sizes(layer, vocab=target.vocab_size, max_position=2048, eps=1e-6)
    _check_target(kind, top, layer, sizes, facts, target)
    _check_biases(top, layer, facts)
    if facts.has_qk_norm != (model_type == "qwen3"):
        seen = "are in the weights" if facts.has_qk_norm else "are not in the weights"
        raise ModelFileError(
            f'{top.source}: key "{layer.name("model_type")}" is {model_type!r}, but '
            f"{' and '.join(_QK_NORM_SOURCES)} {seen}; expected 'qwen3' with them, 'llama' without"
        )

    notes: list[str] = []
    drafter: dict[str, Any] = {"kind": kind, "target_hidden_size": target.hidden_size}
    if kind == EAGLE3:
        drafter |= _read_eagle3(top, facts, target, notes)
    else:
        drafter |= _read_eagle(top, sizes, facts)
    drafter |= {
        "has_fc_bias": facts.has_fc_bias,
        "has_attn_norm": facts.has_attn_norm,
        "has_final_norm": facts.has_final_norm,
        "owns_embedding": facts.has_embedding,
        "owns_lm_head": facts.draft_vocab_size is not None,
        "draft_vocab_size": facts.draft_vocab_size or target.vocab_size,
    }
    config = _description(kind, top, layer, sizes, facts, target, notes)
    config["drafter"] = drafter
    tensors = _drafter_tensors(kind, sizes, facts, drafter)
    family = Family(
        kind,
        (top.strings("architectures") or [kind])[0],
        config,
        tensors,
        prefixes=(facts.prefix,),
        ignored_prefixes=tuple(p + name for p in {"", facts.prefix} for name in _MAP_NAMES),
    )
    return family, notes


def _layer_section(top: Section) -> Section:
    """Where the sizes of the layers stand."""
    return top.section("transformer_layer_config") or top


# ---- does it fit? ------------------------------------------------------------------------------


def _check_target(
    kind: str, top: Section, layer: Section, sizes: Sizes, facts: Facts, target: Target
) -> None:
    """Refuses a head of another target, with both values."""
    _check_verifier(top, target)
    check_same_vocabulary(top, layer, sizes, target)
    made_for = made_for_another(top)
    target_hidden = top.integer("target_hidden_size", target.hidden_size)
    if target_hidden != target.hidden_size:
        raise ValueError(
            f'{made_for} key "{top.name("target_hidden_size")}" is {target_hidden}, but '
            f"{target.path} has a hidden size of {target.hidden_size}"
        )
    borrowed = [
        name
        for name, is_owned in (
            ("embeddings", facts.has_embedding),
            ("lm_head", facts.draft_vocab_size is not None),
            ("hidden states", kind == EAGLE3),
        )
        if not is_owned
    ]
    if borrowed and sizes.hidden != target.hidden_size:
        raise ValueError(
            f'{made_for} key "{layer.name("hidden_size")}" is {sizes.hidden}, but {target.path} '
            f"has a hidden size of {target.hidden_size}, and the drafter uses its "
            f"{' and '.join(borrowed)}"
        )


def _check_verifier(top: Section, target: Target) -> None:
    speculators = top.section("speculators_config")
    verifier = speculators.section("verifier") if speculators is not None else None
    names = verifier.strings("architectures") if verifier is not None else None
    if verifier is None or not names:
        return
    if any(is_same_family(target.architecture, name) for name in names):
        return
    who = f" ({verifier.text('name_or_path')})" if verifier.has("name_or_path") else ""
    raise ValueError(
        f"{made_for_another(top)} key "
        f'"{verifier.name("architectures")}" is {names}{who}, but {target.path} is '
        f"{target.architecture!r}"
    )


def _check_biases(top: Section, layer: Section, facts: Facts) -> None:
    keys: list[tuple[Section, str, str, bool]] = [
        (layer, "attention_bias", "self_attn.q_proj.bias", facts.has_qkv_bias),
        (layer, "mlp_bias", "mlp.gate_proj.bias", facts.has_mlp_bias),
        (top, "bias", "fc.bias", facts.has_fc_bias),
    ]
    if top.has("qkv_bias"):
        # The older key of heads for Qwen2: biases on q, k and v alone.
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


def _read_eagle(top: Section, sizes: Sizes, facts: Facts) -> dict[str, Any]:
    if sizes.layers != 1:
        raise top.refusal("num_hidden_layers", "1 layer in an EAGLE-1 head")
    if facts.has_map:
        raise ModelFileError(
            f"{top.source}: 'd2t' is in the weights, but an EAGLE-1 head has no reduced vocabulary"
        )
    _check_full_head(top, sizes.vocab, facts)
    return {
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }


def _check_full_head(top: Section, vocab_size: int, facts: Facts) -> None:
    """Without `d2t` a row of the lm_head is an id of the target."""
    rows = facts.draft_vocab_size
    if rows is not None and rows != vocab_size:
        raise ModelFileError(
            f"{top.source}: 'd2t' is not in the weights, but 'lm_head.weight' has {rows} rows and "
            f"the target {vocab_size} ids; expected 'd2t', or a row for each id"
        )


def _read_eagle3(top: Section, facts: Facts, target: Target, notes: list[str]) -> dict[str, Any]:
    rows = facts.draft_vocab_size
    stated = top.integer("draft_vocab_size", rows or target.vocab_size)
    if rows is None and stated != target.vocab_size:
        raise ModelFileError(
            f'{top.source}: key "{top.name("draft_vocab_size")}" is {stated}, but '
            f"'lm_head.weight' is not in the weights, and the target's lm_head has "
            f"{target.vocab_size} rows"
        )
    if rows is not None and stated != rows:
        raise ModelFileError(
            f'{top.source}: key "{top.name("draft_vocab_size")}" is {stated}, but '
            f"'lm_head.weight' has {rows} rows; expected the same number"
        )
    if facts.has_map and rows is None:
        raise ModelFileError(
            f"{top.source}: 'd2t' is in the weights, but 'lm_head.weight' is not; expected both or "
            "none of the two"
        )
    if not facts.has_map:
        _check_full_head(top, target.vocab_size, facts)
    aux_layers = _choose_aux_layers(top, facts, target, notes)
    if facts.num_fc_norms and facts.num_fc_norms != len(aux_layers):
        raise ModelFileError(
            f"{top.source}: {facts.num_fc_norms} tensors 'fc_norm.N.weight' are in the weights, "
            f"but the drafter takes {len(aux_layers)} layers of the target {aux_layers}; expected "
            "one for each"
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
            f'{top.source} has no key "norm_before_residual"; true is assumed, as elsewhere'
        )
    return {
        "aux_layers": aux_layers,
        "norm_before_residual": top.boolean("norm_before_residual", is_speculators),
        "norm_before_fc": facts.has_input_norm,
        "fc_norm": facts.num_fc_norms > 0,
        "norm_output": top.boolean("norm_output", False),
    }


def _aux_layers(top: Section) -> list[int] | None:
    """The layers that the configuration names, if it does."""
    key = "eagle_aux_hidden_state_layer_ids"
    for section in (top, top.section("eagle_config")):
        if section is None or not section.has(key):
            continue
        value = section.values[key]
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise section.error(key, "a list of layers of the target")
        return list(value)
    return None


def _choose_aux_layers(top: Section, facts: Facts, target: Target, notes: list[str]) -> list[int]:
    """The layers whose incoming residual stream the drafter takes."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = _aux_layers(top)
    num_layers = target.num_layers
    chosen = named
    if chosen is None:
        chosen = [2, num_layers // 2, num_layers - 3]
        notes.append(f"the drafter takes the streams that enter the target's layers {chosen}")
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
                f"{top.source}: 'fc.weight' has {columns} columns, which are "
                f"{columns // target.hidden_size} hidden states of {target.path} "
                f"({target.hidden_size} wide), but {where} {len(chosen)} layers, {chosen}"
            )
    is_ascending = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not is_ascending or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise ValueError(
            f'{top.source}: key "{key}" is {chosen}{"" if named is not None else " by default"}; '
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
        notes.append(f"{top.source} has no rope_theta; the drafter takes the target's rope")
    take_positions(config, sizes, target, notes)
    return config


def _own_rope(layer: Section) -> RopeSettings | None:
    """The drafter's rope, or None where its configuration does not speak of one."""
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
    """The rope of the target's layers that attend to everything."""
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


def _drafter_tensors(
    kind: str, sizes: Sizes, facts: Facts, drafter: Mapping[str, Any]
) -> tuple[TensorSpec, ...]:
    """Every tensor but `d2t`, in the order in which the drafter is filled."""
    hidden = (sizes.hidden, "hidden_size")
    target_hidden = drafter["target_hidden_size"]
    qo_rows = (sizes.qo_heads * sizes.head_dim, "num_attention_heads * head_dim")
    kv_rows = (sizes.kv_heads * sizes.head_dim, "num_key_value_heads * head_dim")
    intermediate = (sizes.intermediate, "intermediate_size")
    specs: list[TensorSpec] = []

    def add(name: str, source: str, *dims: tuple[int, str]) -> None:
        shape = tuple(size for size, _ in dims)
        specs.append(TensorSpec(name, source, shape, ", ".join(key for _, key in dims)))

    if facts.has_embedding:
        add("embed.weight", "embed_tokens.weight", (sizes.vocab, "vocab_size"), hidden)
    if kind == EAGLE3:
        num_aux = len(drafter["aux_layers"])
        columns = (num_aux * target_hidden, f"{num_aux} * hidden size of the target")
        if facts.has_input_norm:
            add("fc_input_norm.weight", "input_norm.weight", columns)
        for i in range(facts.num_fc_norms):
            width = (target_hidden, "hidden size of the target")
            add(f"fc_norm.{i}.weight", f"fc_norm.{i}.weight", width)
    else:
        columns = (sizes.hidden + target_hidden, "2 * hidden_size")
    add("fc.weight", "fc.weight", hidden, columns)
    if facts.has_fc_bias:
        add("fc.bias", "fc.bias", hidden)
    for i in range(sizes.layers):
        theirs = facts.first_layer if i == 0 else f"layers.{i}."
        _add_layer(
            add,
            f"layers.{i}.",
            theirs,
            norms=_layer_norms(kind, i, facts),
            facts=facts,
            dims={
                "attn_in": (2 * sizes.hidden, "2 * hidden_size")
                if kind == EAGLE3 and i == 0
                else hidden,
                "hidden": hidden,
                "qo": qo_rows,
                "kv": kv_rows,
                "mlp": intermediate,
                "head": (sizes.head_dim, "head_dim"),
            },
        )
    if facts.has_final_norm or kind == EAGLE3:
        add("final_norm.weight", "norm.weight", hidden)
    if facts.draft_vocab_size is not None:
        add("lm_head.weight", "lm_head.weight", (facts.draft_vocab_size, "rows"), hidden)
    return tuple(specs)


def _layer_norms(kind: str, index: int, facts: Facts) -> list[tuple[str, str]]:
    norms = [("mlp_norm.weight", "post_attention_layernorm.weight")]
    if kind == EAGLE3 or index > 0 or facts.has_attn_norm:
        norms.insert(0, ("attn_norm.weight", "input_layernorm.weight"))
    if kind == EAGLE3 and index == 0:
        norms.insert(0, ("hidden_norm.weight", "hidden_norm.weight"))
    return norms


def _add_layer(
    add: Callable[..., None],
    ours: str,
    theirs: str,
    *,
    norms: list[tuple[str, str]],
    facts: Facts,
    dims: Mapping[str, tuple[int, str]],
) -> None:
    for name, source in norms:
        add(ours + name, theirs + source, dims["hidden"])
    if facts.has_qk_norm:
        for name, source in QK_NORMS:
            add(ours + name, theirs + source, dims["head"])
    out_in = {
        "attn.q": ("qo", "attn_in", facts.has_qkv_bias),
        "attn.k": ("kv", "attn_in", facts.has_qkv_bias),
        "attn.v": ("kv", "attn_in", facts.has_qkv_bias),
        "attn.o": ("hidden", "qo", facts.has_o_bias),
        "mlp.gate": ("mlp", "hidden", facts.has_mlp_bias),
        "mlp.up": ("mlp", "hidden", facts.has_mlp_bias),
        "mlp.down": ("hidden", "mlp", facts.has_mlp_bias),
    }
    for name, source in LINEARS:
        rows, columns, has_bias = out_in[name]
        add(f"{ours}{name}.weight", f"{theirs}{source}.weight", dims[rows], dims[columns])
        if has_bias:
            add(f"{ours}{name}.bias", f"{theirs}{source}.bias", dims[rows])
