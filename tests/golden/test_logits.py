# SPDX-License-Identifier: Apache-2.0
"""Logits against transformers, in float32, on tiny random checkpoints of every dense family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logits_golden import (
    PROMPT_TOKENS,
    assert_close,
    check_that_a_tensor_shows,
    check_that_it_shows,
    logits_of,
    prompt_of,
)
from tiny_models import (
    FULL,
    SLIDING,
    TinySpec,
    copy_checkpoint,
    describe,
    load_tensors,
    make,
    read_json,
    reference_logits,
    save_tensors,
    write_json,
)

pytestmark = pytest.mark.golden

HEADS = ((4, 4, 16), (4, 2, 32), (4, 1, 64))  # query heads, kv heads, head size: ratios 1, 2, 4

GEMMA4_EXPERTS = TinySpec(
    "gemma4",
    has_experts=True,
    top_k=3,
    layer_types=(SLIDING, FULL) * 2,
    k_eq_v=True,
    shared_layers=0,
    per_layer_size=0,
    logit_soft_cap=30.0,
)

SPECS = [
    # Seeds, GQA ratios and head sizes.
    *(
        TinySpec(family, seed=seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for family in ("llama", "qwen3", "gemma3", "gemma4")
        for seed, (heads, kv_heads, head_dim) in enumerate(HEADS)
    ),
    # An lm_head that is tied or not, unlike the family's default.
    TinySpec("llama", seed=3, tied=True),
    TinySpec("qwen3", seed=3, tied=True),
    TinySpec("gemma3", seed=3, tied=False),
    # Biases.
    TinySpec("llama", seed=4, attention_bias=True),
    TinySpec("llama", seed=5, mlp_bias=True),
    TinySpec("llama", seed=6, attention_bias=True, mlp_bias=True, tied=True, kv_heads=1),
    TinySpec("qwen3", seed=4, attention_bias=True),
    TinySpec("gemma3", seed=4, attention_bias=True),
    # Rope scalings, in both spellings of the configuration.
    *(
        TinySpec(family, seed=7, rope=rope, old_spelling=old, head_dim=32)
        for family in ("llama", "qwen3", "gemma3")
        for rope in ("default", "linear", "llama3", "yarn")
        for old in (False, True)
    ),
    # Windows: one key, smaller than the prompt, as long as it, one more, larger.
    *(TinySpec("gemma3", seed=8, window=w) for w in (1, 7, 44, PROMPT_TOKENS, 46, 512)),
    TinySpec("gemma3", seed=9, layer_types=("sliding_attention",) * 2),
    TinySpec("gemma3", seed=9, layer_types=("full_attention", "sliding_attention") * 2),
    # The soft cap on logits, for which Gemma 3 still has a key.
    TinySpec("gemma3", seed=10, logit_soft_cap=8.0),
    # Storage: halves, shards, padding rows, odd sizes.
    *(
        TinySpec(family, seed=11, dtype=dtype)
        for family in ("llama", "qwen3", "gemma3", "gemma4")
        for dtype in ("float16", "bfloat16")
    ),
    TinySpec("llama", seed=12, shards=3),
    TinySpec("gemma3", seed=12, shards=2, dtype="bfloat16"),
    TinySpec("qwen3", seed=13, vocab_size=131, hidden_size=72, intermediate_size=90, head_dim=18),
    # Gemma 4, by default as the small sizes: the last half of the layers shares KV and has wide
    # MLPs, and all layers have per-layer inputs. Then without each feature, in both spellings.
    TinySpec("gemma4", seed=30, old_spelling=True, logit_soft_cap=8.0),
    TinySpec("gemma4", seed=31, shared_layers=0),
    TinySpec("gemma4", seed=32, per_layer_size=0, shared_layers=2, wide_mlp=False),
    TinySpec("gemma4", seed=33, per_layer_size=20, num_layers=7, shared_layers=1),
    # The large sizes: no v projection in full layers, one KV head there.
    *(
        TinySpec(
            "gemma4",
            seed=34,
            k_eq_v=True,
            shared_layers=0,
            per_layer_size=0,
            logit_soft_cap=30.0,
            full_kv_heads=full_kv_heads,
            old_spelling=old,
        )
        for full_kv_heads in (1, 4)
        for old in (False, True)
    ),
    TinySpec("gemma4", seed=35, k_eq_v=True, kv_heads=4, full_head_dim=24, attention_bias=True),
    TinySpec("gemma4", seed=36, unified=True, k_eq_v=True, shared_layers=0, logit_soft_cap=30.0),
    TinySpec("gemma4", seed=37, unified=True, shared_layers=3, attention_bias=True, tied=False),
    # Rotations of part of a head: a quarter of 16 pairs, less than one, all.
    *(TinySpec("gemma4", seed=38, partial_rotary=part) for part in (0.03, 0.5, 1.0)),
    *(TinySpec("gemma4", seed=39, window=w) for w in (1, PROMPT_TOKENS, 512)),
    TinySpec("gemma4", seed=40, layer_types=(FULL,) * 4, full_head_dim=64),
    TinySpec("gemma4", seed=41, layer_types=(SLIDING, FULL, SLIDING, SLIDING, FULL, FULL)),
    TinySpec("gemma4", seed=42, vocab_size=131, hidden_size=72, intermediate_size=90, head_dim=18),
    TinySpec("gemma4", seed=43, shards=3, dtype="bfloat16", k_eq_v=True),
    # The 26B model, whose layers have a mixture beside the dense MLP; then with other features too.
    *(replace(GEMMA4_EXPERTS, seed=44, dtype=dtype) for dtype in ("float32", "bfloat16")),
    replace(GEMMA4_EXPERTS, seed=45, old_spelling=True, num_experts=11, hidden_size=72, shards=2),
    replace(GEMMA4_EXPERTS, seed=46, top_k=8, per_layer_size=8, shared_layers=2),
    replace(GEMMA4_EXPERTS, seed=47, top_k=1, k_eq_v=False, layer_types=None, tied=False),
]


@pytest.mark.parametrize("spec", SPECS, ids=describe)
def test_logits_equal_transformers(spec: TinySpec) -> None:
    path = make(spec)
    prompt = prompt_of(spec)
    # float32 arithmetic on the stored weights of any dtype, as in the reference.
    assert_close(logits_of(path, prompt), reference_logits(path, prompt))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4"])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_short_prompts(family: str, length: int) -> None:
    spec = TinySpec(family, seed=20)
    prompt = prompt_of(spec)[:length]
    assert_close(logits_of(make(spec), prompt), reference_logits(make(spec), prompt))


@pytest.mark.parametrize(
    "spec",
    [TinySpec("gemma3", seed=21), TinySpec("gemma4", seed=21), replace(GEMMA4_EXPERTS, seed=21)],
    ids=describe,
)
@pytest.mark.parametrize("chunk", [1, 16, 45])
def test_chunked_prefill_gives_the_samelogits_of(spec: TinySpec, chunk: int) -> None:
    prompt = prompt_of(spec)
    whole = logits_of(make(spec), prompt)
    chunked = logits_of(make(spec), prompt, prefill_chunk_size=chunk)
    np.testing.assert_array_equal(chunked, whole)


@pytest.mark.parametrize(
    ("prefix", "architecture"),
    [
        ("language_model.model.", "Gemma3ForConditionalGeneration"),
        ("model.language_model.", "Gemma3ForConditionalGeneration"),
        ("", "Gemma3TextModel"),
    ],
)
def test_prefixes_of_gemma3(prefix: str, architecture: str, tmp_path: Path) -> None:
    """The text part of a checkpoint with a vision tower is the plain text model."""
    import torch

    plain = make(TinySpec("gemma3", seed=22))
    path = copy_checkpoint(plain, tmp_path / "nested")
    config = read_json(path / "config.json")
    tensors = {
        prefix + name.removeprefix("model."): tensor for name, tensor in load_tensors(plain).items()
    }
    if architecture == "Gemma3ForConditionalGeneration":
        config = {"architectures": [architecture], "model_type": "gemma3", "text_config": config}
        del config["text_config"]["architectures"]
        tensors["vision_tower.x.weight"] = torch.zeros(2, 2)
        tensors["multi_modal_projector.x"] = torch.zeros(2)
    else:
        config["architectures"] = [architecture]
    save_tensors(path, tensors)
    write_json(path / "config.json", config)
    prompt = prompt_of(TinySpec("gemma3"))
    np.testing.assert_array_equal(logits_of(path, prompt), logits_of(plain, prompt))


@pytest.mark.parametrize(
    ("prefix", "architecture"),
    [
        ("model.language_model.", "Gemma4ForConditionalGeneration"),
        ("model.language_model.", "Gemma4UnifiedForConditionalGeneration"),
        ("", "Gemma4TextModel"),
    ],
)
def test_prefixes_of_gemma4(prefix: str, architecture: str, tmp_path: Path) -> None:
    """The same in a multimodal checkpoint, with the unused tensors of published files."""
    import torch

    spec = TinySpec("gemma4", seed=24, unified="Unified" in architecture)
    plain = make(spec)
    path = copy_checkpoint(plain, tmp_path / "nested")
    config = read_json(path / "config.json")
    tensors = {
        prefix + name.removeprefix("model."): tensor for name, tensor in load_tensors(plain).items()
    }
    for layer in (3, 4, 5):  # those that read the KV of others
        for name, rows in (("k_proj", 32), ("v_proj", 32), ("k_norm", 16)):
            source = f"{prefix}layers.{layer}.self_attn.{name}.weight"
            tensors[source] = torch.randn(rows, *([64] if name != "k_norm" else []))
    if architecture.endswith("ForConditionalGeneration"):
        config = {"architectures": [architecture], "text_config": config}
        del config["text_config"]["architectures"]
        for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
            tensors[f"model.{part}.x.weight"] = torch.zeros(2, 2)
    else:
        config["architectures"] = [architecture]
    save_tensors(path, tensors)
    write_json(path / "config.json", config)
    np.testing.assert_array_equal(
        logits_of(path, prompt_of(spec)), logits_of(plain, prompt_of(spec))
    )


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_bfloat16_weights_stay_close(family: str) -> None:
    """In bfloat16 embedding factors are rounded too; only gross errors show at this tolerance."""
    spec = TinySpec(family, seed=23, dtype="bfloat16", hidden_size=72)
    prompt = prompt_of(spec)
    expected = reference_logits(make(spec), prompt)
    seen = logits_of(make(spec), prompt, dtype="auto")
    assert np.abs(seen - expected).max() <= 0.1 * np.abs(expected).max()


def _widen_windows(config: dict[str, Any]) -> None:
    for layer in config["layers"]:
        layer["attention"]["window"] += layer["attention"]["kind"] == "sliding"


def _swap_ropes(config: dict[str, Any]) -> None:
    config["ropes"].reverse()


def _scale_by_head_dim(config: dict[str, Any]) -> None:
    for layer in config["layers"]:
        layer["attention"]["scale"] = layer["attention"]["head_dim"] ** -0.5


WRONG_FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "window + 1": _widen_windows,
    "ropes swapped": _swap_ropes,
    "scale": _scale_by_head_dim,
    "norm offset": lambda config: config.update(norm_weight_offset=0.0),
    "embed scale": lambda config: config.update(embed_scale=7.75),
    "eps": lambda config: config.update(norm_eps=1e-2),
}


def _attentions(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [layer["attention"] for layer in config["layers"]]


def _scale_by_own_head_dim(config: dict[str, Any]) -> None:
    for attention in _attentions(config):
        attention["scale"] = attention["head_dim"] ** -0.5


def _drop_v_norm(config: dict[str, Any]) -> None:
    for attention in _attentions(config):
        attention.pop("has_v_norm", None)


def _read_first_of_type(config: dict[str, Any]) -> None:
    _attentions(config)[3]["kv_source"] = 0  # sliding like layer 1, which is the last owner


def _rotate_whole_head(config: dict[str, Any]) -> None:
    rope = config["ropes"][1]
    count = len(rope["inv_freq"])
    rope["inv_freq"] = [1_000_000.0 ** (-i / count) for i in range(count)]


def _shrink_frequencies(config: dict[str, Any]) -> None:
    rope = config["ropes"][1]  # as if the rotated part were a whole head
    rotated = sum(value > 0 for value in rope["inv_freq"])
    values = [1_000_000.0 ** (-i / rotated) for i in range(rotated)]
    rope["inv_freq"] = values + [0.0] * (len(rope["inv_freq"]) - rotated)


def _set_per_layer(key: str, value: float | str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["per_layer_inputs"] = config["per_layer_inputs"] | {key: value}

    return change


WRONG_FACTS_OF_GEMMA4: dict[str, Callable[[dict[str, Any]], None]] = {
    "window + 1": _widen_windows,
    "scale": _scale_by_own_head_dim,
    "v norm": _drop_v_norm,
    "kv source": _read_first_of_type,
    "whole head rotated": _rotate_whole_head,
    "frequencies of the part": _shrink_frequencies,
    "norm offset": lambda config: config.update(norm_weight_offset=1.0),
    "soft cap": lambda config: config.update(logit_soft_cap=0.0),
    # The norms after them cancel proj_scale except for the epsilon, and scale entirely.
    "per-layer table": _set_per_layer("embed_scale", 1.0),
    "per-layer projection": _set_per_layer("proj_scale", 1e-3),
    "per-layer activation": _set_per_layer("activation", "silu"),
}


@pytest.mark.parametrize("fact", WRONG_FACTS_OF_GEMMA4)
def test_a_wrong_fact_of_gemma4_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_a_wrong_fact_shows`, for the switches that only Gemma 4 has."""
    spec = TinySpec("gemma4", seed=1, logit_soft_cap=8.0)
    check_that_it_shows(spec, WRONG_FACTS_OF_GEMMA4[fact], monkeypatch)


def _set_mixtures(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for layer in config["layers"]:
            layer["mlp"]["mixture"] |= changes

    return change


WRONG_FACTS_OF_EXPERTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "router without hidden^-0.5": _set_mixtures(logit_scale=1.0),
    # The norm after the mixture cancels a factor on all weights of a row.
    "one expert less": _set_mixtures(top_k=2),
    "activation": _set_mixtures(activation="silu"),
}


@pytest.mark.parametrize("fact", WRONG_FACTS_OF_EXPERTS)
def test_a_wrong_fact_of_experts_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(GEMMA4_EXPERTS, seed=1)
    check_that_it_shows(spec, WRONG_FACTS_OF_EXPERTS[fact], monkeypatch)


# The names of tensors whose values a wrong tensor has instead.
WRONG_TENSORS_OF_EXPERTS = {
    "experts read the dense input": ("pre_feedforward_layernorm_2", "pre_feedforward_layernorm"),
    "norms of branches swapped": ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
    "scale of the router": ("router.scale", "pre_feedforward_layernorm.weight"),
    "no scales of experts": ("router.per_expert_scale", None),
    "gate and up exchanged": ("experts.gate_up_proj", None),
}


@pytest.mark.parametrize("fact", WRONG_TENSORS_OF_EXPERTS)
def test_a_wrong_tensor_of_experts_shows(fact: str, tmp_path: Path) -> None:
    spec = replace(GEMMA4_EXPERTS, seed=1)
    path, prompt = make(spec), prompt_of(spec)
    tensors = load_tensors(path)
    wrong, source = WRONG_TENSORS_OF_EXPERTS[fact]

    def change(name: str, tensor: Any) -> Any:
        if wrong not in name:
            return tensor
        if source is not None:
            return tensors[name.replace(wrong, source)]
        return tensor.roll(tensor.shape[1] // 2, 1) if tensor.ndim > 1 else tensor * 0 + 1

    check_that_a_tensor_shows(path, prompt, reference_logits(path, prompt), change, tmp_path)


@pytest.mark.parametrize("fact", WRONG_FACTS)
def test_a_wrong_fact_shows(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description that is wrong in one fact differs by more than ten times the tolerance."""
    check_that_it_shows(TinySpec("gemma3", seed=1), WRONG_FACTS[fact], monkeypatch)
