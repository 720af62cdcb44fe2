# SPDX-License-Identifier: Apache-2.0
"""Assistants that fit another target, are damaged, contradict themselves or are not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assistant_models import AssistantSpec
from assistant_pair import CENTROIDS, DENSE, ORDERING, TARGET, opened, target_of
from errors import raises
from paceline._core import ModelFileError
from paceline.loader import drafter_config
from tiny_models import (
    FULL,
    SLIDING,
    TinySpec,
    edit_config,
    edit_section,
    edit_tensors,
    make,
    read_json,
)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_another_family(family: str, assistant: Callable[..., Path]) -> None:
    target = TinySpec(family)
    architecture = target_of(target).architecture
    with raises(
        ValueError, "made for another target", "'Gemma4AssistantForCausalLM'", "Gemma 4 target",
        f"is '{architecture}'", "Gemma4ForCausalLM",
    ):  # fmt: skip
        opened(assistant(), target)


def test_another_hidden_size(assistant: Callable[..., Path]) -> None:
    path = assistant(target=replace(TARGET, hidden_size=48))
    with raises(ValueError, "another target", '"backbone_hidden_size" is 48', "size of 64"):
        opened(path)


def test_another_vocabulary(assistant: Callable[..., Path]) -> None:
    path = assistant(target=replace(TARGET, vocab_size=144))
    with raises(ValueError, "another target", '"text_config.vocab_size" is 144', "128 ids"):
        opened(path)


def test_a_layer_with_nothing_to_read(assistant: Callable[..., Path]) -> None:
    target = replace(TARGET, layer_types=(FULL,) * 4)
    with raises(
        ValueError, "layer 0 of the drafter", "'sliding'", "no layer to read", make(target),
        "are of kind 'full'",
    ):  # fmt: skip
        opened(assistant(), target)


def test_a_later_layer_with_nothing_to_read(assistant: Callable[..., Path]) -> None:
    target = replace(TARGET, layer_types=(FULL,) * 4)
    path = assistant(layer_types=(FULL, SLIDING, FULL))
    with raises(ValueError, "layer 1 of the drafter", "'sliding'", "no layer to read"):
        opened(path, target)


SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "window": (
        {"window": 16},
        ("layer 0 of the drafter", "a window of 8", "layer 1 of", "'sliding'", "has 16"),
    ),
    "heads": (
        {"kv_heads": 2},
        ("layer 0 of the drafter", "key and value heads: 1", "layer 1 of", "has 2"),
    ),
    "head size": (
        {"head_dim": 24, "full_head_dim": 32},
        ("layer 0 of the drafter", "a head size of 16", "layer 1 of", "has 24"),
    ),
    "head size of full layers": (
        {"full_head_dim": 48},
        ("layer 3 of the drafter", "a head size of 32", "layer 2 of", "'full'", "has 48"),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_layer_of_another_shape(case: str, assistant: Callable[..., Path]) -> None:
    """The layer that is read is the last one that owns its KV; the last three of six do not."""
    changes, parts = SHAPES[case]
    with raises(ValueError, "another target", *parts):
        opened(assistant(), replace(TARGET, **changes))


def test_full_layers_with_fewer_heads(assistant: Callable[..., Path]) -> None:
    path = assistant(AssistantSpec(), DENSE)
    with raises(ValueError, "layer 3", "key and value heads: 1", "layer 5", "has 2"):
        opened(path, replace(DENSE, full_kv_heads=2))


# ---- damaged, contradictory or not supported ---------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "post_projection.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.layer_scalar",
        "model.layers.3.self_attn.q_norm.weight",
    ],
)
def test_missing_tensors(name: str, assistant: Callable[..., Path]) -> None:
    path = assistant()
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with raises(ModelFileError, "1 tensor is missing", repr(name), "Gemma4AssistantForCausalLM"):
        opened(path)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("pre_projection.weight", (32, 64), "[32, 128] (hidden_size, 2 * backbone_hidden_size"),
        ("post_projection.weight", (32, 64), "[64, 32] (backbone_hidden_size, hidden_size"),
        ("model.embed_tokens.weight", (127, 32), "[128, 32] (vocab_size, hidden_size"),
        (CENTROIDS, (8, 32), "[16, 32] (num_centroids, hidden_size"),
        ("model.layers.3.self_attn.q_norm.weight", (16,), "[32] (the layer's head_dim"),
    ],
)
def test_misshapen_tensors(
    name: str, shape: tuple[int, ...], expected: str, assistant: Callable[..., Path]
) -> None:
    path = assistant()
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with raises(ModelFileError, name, list(shape), f"expected {expected}"):
        opened(path)


ORDERINGS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "beyond": (lambda t: t[ORDERING].__setitem__(5, 128), ("[5] is 128", "ids from 0 to 127")),
    "below": (lambda t: t[ORDERING].__setitem__(5, -1), ("[5] is -1", "ids from 0 to 127")),
    "twice": (
        lambda t: t[ORDERING].__setitem__(7, int(t[ORDERING][3])),
        ("at indices 3 and 7", "every id once"),
    ),
    "zeros": (lambda t: t[ORDERING].zero_(), ("id 0 at indices 0 and 1", "every id once")),
    "short": (lambda t: t.update({ORDERING: t[ORDERING][1:].clone()}), ("[127]", "[128]")),
    "floats": (lambda t: t.update({ORDERING: t[ORDERING].float()}), ("stored as F32", "I64")),
    "absent": (lambda t: t.pop(ORDERING), (CENTROIDS, repr(ORDERING), "both or none")),
}


@pytest.mark.parametrize("case", ORDERINGS)
def test_bad_orders_of_tokens(case: str, assistant: Callable[..., Path]) -> None:
    change, parts = ORDERINGS[case]
    path = assistant()
    edit_tensors(path, change)
    with raises(ModelFileError, ORDERING if case != "absent" else "", *parts):
        opened(path)


CLUSTER_KEYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "not said": (
        {"use_ordered_embeddings": ...},
        ('"use_ordered_embeddings" is missing', "false", "is in the weights"),
    ),
    "denied": ({"use_ordered_embeddings": False}, ("is false", "is in the weights")),
    "no flag": ({"use_ordered_embeddings": 1}, ('"use_ordered_embeddings" is 1', "true or false")),
    "no divisor": (
        {"num_centroids": 24},
        ('"num_centroids" is 24', 'a divisor of "text_config.vocab_size" (128)'),
    ),
    "too many": ({"num_centroids": 256}, ('"num_centroids" is 256', "a divisor of")),
    "more than there are": (
        {"centroid_intermediate_top_k": 17},
        ('"centroid_intermediate_top_k" is 17', "1 to 16"),
    ),
}


@pytest.mark.parametrize("case", CLUSTER_KEYS)
def test_bad_keys_of_clusters(case: str, assistant: Callable[..., Path]) -> None:
    changes, parts = CLUSTER_KEYS[case]
    path = assistant()
    edit_config(path, **changes)
    with raises(ModelFileError, "config.json", *parts):
        opened(path)


def test_clusters_that_are_not_there(assistant: Callable[..., Path]) -> None:
    path = assistant(AssistantSpec())
    clusters = {"num_centroids": 16, "centroid_intermediate_top_k": 3}
    edit_config(path, use_ordered_embeddings=True, **clusters)
    with raises(ModelFileError, '"use_ordered_embeddings" is true', "is not in the weights"):
        opened(path)
    # Without any weights there is nothing to contradict.
    config = drafter_config(read_json(path / "config.json"), target_of(TARGET))
    assert config["drafter"]["centroids"] == {"count": 16, "top": 3}


TEXT_KEYS: dict[str, tuple[type[Exception], dict[str, Any], tuple[str, ...]]] = {
    "mixture": (NotImplementedError, {"enable_moe_block": True}, ("enable_moe_block", "true")),
    "wide": (NotImplementedError, {"use_double_wide_mlp": True}, ("use_double_wide_mlp", "false")),
    "per-layer inputs": (
        NotImplementedError,
        {"hidden_size_per_layer_input": 8},
        ('"text_config.hidden_size_per_layer_input" is 8', "supported: 0"),
    ),
    "own KV": (
        NotImplementedError,
        {"num_kv_shared_layers": 3},
        ('"text_config.num_kv_shared_layers" is 3', "supported: 4"),
    ),
    "quantised": (
        NotImplementedError,
        {"quantization_config": {"bits": 4}},
        ("quantization_config", "none"),
    ),
    "both ways": (
        NotImplementedError,
        {"use_bidirectional_attention": "all"},
        ("use_bidirectional_attention", "vision"),
    ),
    "rope": (
        NotImplementedError,
        {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}},
        ("yarn", "default, proportional"),
    ),
    "activation": (NotImplementedError, {"hidden_activation": "relu"}, ("relu", "gelu")),
    "last layer": (
        ModelFileError,
        {"layer_types": [SLIDING] * 4},
        ("ends with 'sliding_attention'", "full_attention"),
    ),
    "layers": (ModelFileError, {"layer_types": [FULL]}, ("1 entries", "expected 4")),
    "no width": (ModelFileError, {"hidden_size": ...}, ('"text_config.hidden_size" is missing',)),
}


@pytest.mark.parametrize("case", TEXT_KEYS)
def test_text_keys(case: str, assistant: Callable[..., Path]) -> None:
    kind, changes, parts = TEXT_KEYS[case]
    path = assistant()
    edit_section(path, "text_config", **changes)
    with raises(kind, "config.json", *parts):
        opened(path)


def test_top_keys(assistant: Callable[..., Path]) -> None:
    path = assistant()
    edit_config(path, tie_word_embeddings=False)
    with raises(NotImplementedError, '"tie_word_embeddings" is false', "embed_tokens"):
        opened(path)
    edit_config(path, tie_word_embeddings=True, quantization_config={"quant_method": "x"})
    with raises(NotImplementedError, "quantization_config", "none (weights in BF16, F16 or F32)"):
        opened(path)
    edit_config(path, quantization_config=..., backbone_hidden_size=...)
    with raises(ModelFileError, '"backbone_hidden_size" is missing'):
        opened(path)
