# SPDX-License-Identifier: Apache-2.0
"""The block drafter in the files of DeepSeek-V4-Flash-0731 (method "dspark"): `mtp.0`, `mtp.1`, ...

These stages are no MTP layers, although "num_nextn_predict_layers" counts 1. They are layers of a
block drafter, which reads the mean of the target's residual streams after the layers of
"dspark_target_layer_ids" and uses the target's embeddings and lm_head. `docs/deepseek-v4.md` has
the equations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline._core import ModelFileError

from . import deepseek_v4
from .block_facts import CONFIDENCE_WEIGHT, MARKOV_TABLE, MARKOV_WEIGHT
from .decoder_tensors import tensor_spec
from .deepseek_v4_tensors import PUBLISHED, V4Tensors
from .description import check_description
from .drafters import DSPARK, Target, describe_drafter, made_for_another
from .families import ARCHITECTURES, translate
from .family import Family, TensorSpec
from .hf_config import parse_hf_config
from .mtp import check_same_model
from .section import Section
from .tensor_source import TensorSource, WeightMap, Weights

_STAGE: Final = "mtp."


def has_stage(weights: Weights) -> bool:
    """Returns whether the files of a target have the first stage."""
    return any(name.startswith(f"{_STAGE}0.main_") for name in weights.owners)


def translate_stages(
    top: Section, target: Target, weights: Weights | None
) -> tuple[Family, WeightMap]:
    """Translates the stages of a target.

    Args:
        top: The target's configuration.
        target: The target that they must fit: the one whose configuration this is.
        weights: The target's tensors; None: there are none.

    Returns:
        The description with the tensors it needs, and the tensors of the stages.

    Raises:
        ValueError: They are the stages of another target; names both values.
        ModelFileError: A key has a wrong value, or the files do not have all stages.
        NotImplementedError: They need something that Paceline does not support.
    """
    hf = parse_hf_config(top.values, top.source, ARCHITECTURES)
    whole = translate(hf)
    check_same_model(top, hf, whole, target, "it has the stages")
    layers = _target_layers(top, hf.text, target)
    count = len(layers)
    found: dict[str, TensorSource] = {}
    has_confidence = True
    if weights is not None:
        found = {name: s for name, s in weights.owners.items() if name.startswith(_STAGE)}
        _check_stages(weights.where, found, hf.text, count)
        has_confidence = f"{_STAGE}{count - 1}.{CONFIDENCE_WEIGHT}" in found
    description = deepseek_v4.describe_drafting_layer(hf, more_window=1)
    formats = description["attention"].get("qkv_a")
    rank = hf.text.integer("dspark_markov_rank")
    heads: dict[str, Any] = {"markov": {"kind": "vanilla", "rank": rank}}
    if has_confidence:
        heads["confidence"] = {"reads_token": True, "before_norm": True, "lacks_bias": True}
    config: dict[str, Any] = {
        **whole.config,
        "name": DSPARK,
        "ties_lm_head": False,
        "layers": [description] * count,
        "drafter": describe_drafter(
            DSPARK,
            target,
            aux_layers=[layer + 1 for layer in layers],
            **({} if formats is None else {"fc": formats}),
            block={
                "size": hf.text.integer(deepseek_v4.BLOCK_SIZE, low=1, high=64),
                "mask_token": hf.text.integer(
                    "dspark_noise_token_id", low=0, high=target.vocab_size - 1
                ),
                "samples_from_anchor": True,
                "full": {"is_causal": False},
                "sliding": {"is_causal": False, "is_anchored": True},
                **heads,
            },
        ),
    }
    check_description(config, (hf.text, top))
    family = Family(
        DSPARK,
        hf.architecture,
        config,
        tuple(_tensors(V4Tensors(whole.config, PUBLISHED), config)),
        (PUBLISHED.prefix,),
        lm_head_names=(PUBLISHED.lm_head,),
    )
    where = "" if weights is None else weights.where
    return family, WeightMap(where, found)


def _target_layers(top: Section, text: Section, target: Target) -> list[int]:
    """The target's layers whose output the stages read, from 0."""
    key = deepseek_v4.TARGET_LAYERS
    layers = deepseek_v4.read_target_layers(text)
    is_ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not is_ascending or layers[0] < 0 or layers[-1] >= target.num_layers:
        raise ValueError(
            f'{made_for_another(top)} key "{text.name(key)}" is {layers}; {target.path} has '
            f"{target.num_layers} layers: allowed: 0 to {target.num_layers - 1}, in ascending order"
        )
    return layers


def _check_stages(where: str, found: dict[str, TensorSource], text: Section, count: int) -> None:
    """Refuses files with other stages than `mtp.0` to the last one."""
    seen = sorted({name.split(".")[1] for name in found})
    if seen == sorted(map(str, range(count))):
        return
    stages = ", ".join(f"{_STAGE}{number}" for number in seen) or f"no tensors '{_STAGE}*'"
    key = text.name(deepseek_v4.TARGET_LAYERS)
    raise ModelFileError(
        f"{where}: the files have {stages}; method {DSPARK!r} needs {_STAGE}0 to "
        f'{_STAGE}{count - 1}, one stage for each layer of "{key}" of {text.source}; expected '
        "the checkpoint as published (transformers leaves the stages "
        "out when it saves a model), or {'method': None} (in JSON null) for plain decoding"
    )


def _tensors(tensors: V4Tensors, config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """Every tensor of the stages that a description has."""
    stages, block = config["layers"], config["drafter"]["block"]
    count = len(stages)
    first, last = f"{_STAGE}0.", f"{_STAGE}{count - 1}."
    hidden = tensors.hidden
    taps = (count * hidden[0], f"{count} * hidden_size")
    yield from tensors.matrix("fc", first, "main_proj", hidden, taps)
    yield tensor_spec("hidden_norm.weight", f"{first}main_norm.weight", hidden)
    for i, stage in enumerate(stages):
        yield from tensors.layer(stage, f"layers.{i}.", f"{_STAGE}{i}.")
    yield tensor_spec("final_norm.weight", f"{last}norm.weight", hidden)
    yield from tensors.end_mix(last)
    rank = (block["markov"]["rank"], "dspark_markov_rank")
    for name, source in (("markov.table", MARKOV_TABLE), ("markov", MARKOV_WEIGHT)):
        yield tensor_spec(f"{name}.weight", last + source, tensors.vocab, rank)
    if "confidence" in block:
        columns = (hidden[0] + rank[0], "hidden_size + dspark_markov_rank")
        yield tensor_spec("confidence.weight", last + CONFIDENCE_WEIGHT, (1, "1"), columns)
