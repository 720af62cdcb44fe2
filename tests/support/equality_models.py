# SPDX-License-Identifier: Apache-2.0
"""The tiny targets and drafters of tests/property/test_equality.py."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import assistant_models
import block_models
import deepseek_v4_dspark
import deepseek_v4_models
import eagle_models
import mtp_models
import qwen3_5_mtp
import tiny_models
from assistant_models import AssistantSpec
from block_models import BlockSpec
from deepseek_v4_dspark import StagesSpec
from deepseek_v4_models import V4Spec
from eagle_models import EagleSpec
from paceline.loader import LoadedModel, load_checkpoint, load_drafter
from tiny_models import QWEN3_5, TinyDelta, TinySpec

VOCAB = 128
AUX_LAYERS = (0, 1)

TARGETS: dict[str, TinySpec | V4Spec] = {
    **{name: TinySpec(name) for name in ("llama", "qwen3", "gemma3", "gemma4")},
    # The large sizes: keys as values in full layers, a layer's own KV in every layer.
    "gemma4_large": TinySpec(
        "gemma4", k_eq_v=True, shared_layers=0, per_layer_size=0, logit_soft_cap=30.0
    ),
    "gpt_oss": TinySpec("gpt_oss", num_experts=4, top_k=2),
    "gpt_oss_large": TinySpec("gpt_oss", num_layers=4, quantization="mxfp4"),
    # q, k and v are rows of one matrix, and each has scales of its own.
    "qwen3_fp8": TinySpec("qwen3", quantization="fp8_block"),
    # Dense and sparse layers; weights of experts that sum to less than 1.
    "qwen3_moe": TinySpec("qwen3_moe", num_layers=3, dense_layers=(1,), top_k=3, normalises=False),
    # A mixture beside the dense MLP of every layer.
    "gemma4_experts": TinySpec(
        "gemma4",
        has_experts=True,
        top_k=3,
        num_layers=4,
        k_eq_v=True,
        shared_layers=0,
        per_layer_size=0,
        logit_soft_cap=30.0,
    ),
    # Latent attention, and a mixture with a shared expert.
    "glm": TinySpec("glm4_moe_lite"),
    # A window alone, entries of 4 tokens that an indexer chooses, entries of 8.
    "deepseek_v4": V4Spec(ratios=(0, 4, 128)),
    # Gated delta nets, and full attention with an output gate; then with experts.
    "qwen3_5": TinySpec("qwen3_5"),
    "qwen3_5_moe": TinySpec("qwen3_5_moe", top_k=3),
    # Of a gated delta net q, k, v and z are in fp8, and its rates are not.
    "qwen3_5_fp8": TinySpec(
        "qwen3_5",
        quantization="fp8_block",
        head_dim=128,
        delta=TinyDelta(key_dim=128, value_heads=2, value_dim=64),
    ),
}
# An lm_head without clusters and with them.
ASSISTANTS = {
    "gemma4_mtp": AssistantSpec(seed=3),
    "gemma4_mtp_clusters": AssistantSpec(seed=3, centroids=(16, 3)),
}
# Blocks for every k; a window that begins with each row or with the block, and all ids or fewer.
BLOCKS = {
    "dflash": BlockSpec(
        "z-lab", seed=3, block_size=17, window=9, aux_layers=AUX_LAYERS
    ),
    "dflash2": BlockSpec(
        "z-lab", seed=3, block_size=17, window=9, aux_layers=AUX_LAYERS, is_causal=False,
        all_slide=True, taps=2, selector_top=16,
    ),
    # More taps than some blocks have rows.
    "dflash2_anchored": BlockSpec(
        "speculators", seed=3, block_size=17, window=9, aux_layers=AUX_LAYERS, taps=4,
        selector_top=3,
    ),
    "dspark": BlockSpec(
        "speculators", seed=3, block_size=16, window=9, aux_layers=AUX_LAYERS, markov_rank=8,
        draft_vocab_size=96,
    ),
    "dspark_gemma4": BlockSpec(
        "gemma4", seed=3, block_size=16, aux_layers=AUX_LAYERS, markov_rank=8, soft_cap=30.0
    ),
    # With confidence heads, by which drafts end early.
    "dspark_gated": BlockSpec(
        "deepseek", seed=3, block_size=16, aux_layers=AUX_LAYERS, markov_rank=8,
        markov_type="gated", confidence="token",
    ),
    "dspark_rnn": BlockSpec(
        "speculators", seed=3, block_size=17, window=9, aux_layers=AUX_LAYERS, markov_rank=8,
        markov_type="rnn", from_anchor=False, confidence="hidden",
    ),
}  # fmt: skip
# A block drafter in the target's own files.
STAGES = {"dspark_stages": StagesSpec(seed=3, block_size=16, layers=(0, 1, 2))}
HEADS = {
    name: EagleSpec(name, seed=3, aux_layers=AUX_LAYERS, num_aux=len(AUX_LAYERS))
    for name in ("eagle", "eagle3")
}
MTP_FAMILIES = ("glm", "deepseek_v4", "qwen3_5", "qwen3_5_moe", "qwen3_5_fp8")
# A noisy copy agrees often, a smaller model of the same family with other weights seldom. EAGLE
# draft heads, assistants, blocks and MTP layers are random too, and prompt lookup is right by
# accident. "other_family" has a dense drafter for mixtures, a mixture for Llama, a recurrent
# drafter for DeepSeek-V4, and an ordinary one for recurrent targets.
DRAFTERS = (
    "self",
    "noisy",
    "same_family",
    "other_family",
    "ngram",
    "mtp",
    *HEADS,
    *ASSISTANTS,
    *BLOCKS,
    *STAGES,
)
# What "other_family" is.
_OTHERS = {
    "llama": "gpt_oss",
    "qwen3": "qwen3_moe",
    "gemma3": "qwen3",
    "gemma4": "gemma3",
    "gpt_oss": "gemma4",
    "glm4_moe_lite": "llama",
    "qwen3_5": "qwen3",
    "qwen3_5_moe": "llama",
    "qwen3_5_fp8": "gemma3",
    "qwen3_moe": "qwen3",
}


def is_possible(family: str, drafter: str) -> bool:
    """Whether the drafter is for targets of the family."""
    spec = TARGETS[family]
    if drafter in ASSISTANTS:
        return isinstance(spec, TinySpec) and spec.family == "gemma4"
    if drafter == "mtp":
        return family in MTP_FAMILIES
    if drafter in STAGES:
        return family == "deepseek_v4"
    # Draft heads and blocks read one hidden state a layer.
    return isinstance(spec, TinySpec) or (drafter not in HEADS and drafter not in BLOCKS)


def most_ranks(family: str, drafter: str) -> int:
    """The most ranks, of 1, 2 and 4, that can share the target beside the drafter."""
    if drafter in ASSISTANTS:  # they read the target's KV
        return 1
    return 2 if family == "deepseek_v4" else 4  # it has two groups of heads


@functools.cache
def model(family: str, variant: str, dtype: str) -> LoadedModel:
    """A target ("target"), or a drafter for it that is a model."""
    spec = replace(TARGETS[family], seed=7, vocab_size=VOCAB)
    if variant in ("target", "self"):
        return load_checkpoint(_make(spec), dtype=dtype, progress=False)
    path = _scratch() / f"{family}-{variant}"
    if variant in ("noisy", "same_family", "other_family"):
        return load_checkpoint(_make_other(variant, spec, path), dtype=dtype, progress=False)
    if not path.exists():
        _write_drafter(variant, spec, path)
    target = model(family, "target", dtype)
    method = "mtp" if variant == "mtp" else None
    return load_drafter(path, target, method=method, progress=False)


@functools.cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="paceline-equality-"))


def _make(spec: TinySpec | V4Spec) -> Path:
    return tiny_models.make(spec) if isinstance(spec, TinySpec) else deepseek_v4_models.make(spec)


def _make_other(variant: str, spec: TinySpec | V4Spec, path: Path) -> Path:
    """A whole model that drafts."""
    if variant == "other_family":
        other = _OTHERS[spec.family] if isinstance(spec, TinySpec) else "qwen3_5"
        return tiny_models.make(TinySpec(other, seed=9, vocab_size=VOCAB))
    if variant == "same_family":
        if isinstance(spec, V4Spec):
            return _make(replace(spec, seed=8, ratios=(4, 0)))
        small = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "num_experts": 4, "top_k": 2}
        if spec.family == "gpt_oss":
            small["num_layers"] = 2
        return _make(replace(spec, seed=8, **small))
    if not path.exists():
        plain = _make(spec)
        if isinstance(spec, TinySpec) and spec.quantization is not None:
            plain = tiny_models.plain_copy(plain)
        tiny_models.perturbed_copy(plain, path, noise=0.03, seed=1)
    return path


def _write_drafter(variant: str, spec: TinySpec | V4Spec, path: Path) -> None:
    """Writes a drafter that is not a whole model."""
    if isinstance(spec, V4Spec) and variant in STAGES:
        path.mkdir()
        deepseek_v4_dspark.write_random(path, spec, STAGES[variant])
    elif isinstance(spec, V4Spec):  # its files have an MTP layer
        tiny_models.copy_checkpoint(_make(spec), path)
    elif variant == "mtp":
        (qwen3_5_mtp if spec.family in QWEN3_5 else mtp_models).write(spec, path)
    elif variant in ASSISTANTS:
        assistant_models.write(ASSISTANTS[variant], _make(spec), path)
    elif variant in BLOCKS:
        block_models.write(BLOCKS[variant], _make(spec), path)
    else:
        eagle_models.write(HEADS[variant], _make(spec), path)
