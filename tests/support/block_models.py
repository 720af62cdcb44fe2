# SPDX-License-Identifier: Apache-2.0
"""Tiny block drafters, DFlash, DFlash2 and DSpark, in every layout that is read, for tests.

    path = write(BlockSpec("z-lab", window=6), target_dir, tmp_path / "drafter")

Every parameter is random. torch is imported when it is first used.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_models import vocabulary_maps
from tiny_models import load_tensors, read_json, save_tensors, write_json

if TYPE_CHECKING:
    import torch

MASK_NAME = "mask_embedding.pt"
# z-lab's DFlash and DFlash2, deepseek-ai's flat configuration, the same nested, the flat one with
# layers of Gemma 4, that of speculators, and Muse-Glimmer's assistant.
LAYOUTS = ("z-lab", "deepseek", "nested", "gemma4", "speculators", "assistant")
_CONTEXT = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


@dataclass(frozen=True)
class BlockSpec:
    """A tiny block drafter.

    Attributes:
        layout: One of `LAYOUTS`.
        seed: The seed of the weights.
        block_size: Tokens of a block.
        num_layers: Layers; with a window, every second one slides, beginning with the first.
        window: Positions that a sliding layer sees; 0: all layers are full.
        is_causal: What the file says of causality in sliding layers; None: it says nothing.
        aux_layers: The target's layers by their input.
        markov_rank: Columns of the Markov head's table; 0: DFlash.
        markov_type: "vanilla", "gated" or "rnn".
        confidence: What the confidence head reads: "hidden" states, or the "token" before, too;
            "": there is none.
        from_anchor: What a speculators file says of the row of the newest token; None: nothing.
        draft_vocab_size: Rows of the lm_head; None: all ids.
        attention_bias: Biases on q, k, v and o.
        intermediate_size: Width of the MLP.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Elements of a head; twice as many in the layout "gemma4".
        k_eq_v: In the layout "gemma4": values are keys, and there is one head of them.
        embed_scale: What the file says of the factor on embeddings; None: it says nothing.
        soft_cap: What the file says of the cap on logits; None: it says nothing.
        has_mask_embedding: A pickle has the embedding of mask tokens.
        has_swa_keys: z-lab's own keys, which make all layers slide, say what the window is.
        all_slide: With a window, all layers slide, as the file's list of them says.
        taps: Rows that a row of a convolution reads; 0: there is none, nor a selector.
        group: Elements that share a factor of a convolution.
        selector_rank: Columns of the codebooks.
        selector_top: Candidates of a draft.
        multiplier: What the file says of the factor on logits; None: it says nothing.
        codebook_suffix: What the names of the codebooks end with.
    """

    layout: str = "z-lab"
    seed: int = 0
    block_size: int = 5
    num_layers: int = 2
    window: int = 0
    is_causal: bool | None = None
    aux_layers: tuple[int, ...] = (1, 3, 5)
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: str = ""
    from_anchor: bool | None = None
    draft_vocab_size: int | None = None
    attention_bias: bool = False
    intermediate_size: int = 80
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    k_eq_v: bool = True
    embed_scale: float | None = None
    soft_cap: float | None = None
    has_mask_embedding: bool = False
    has_swa_keys: bool = False
    all_slide: bool = False
    taps: int = 0
    group: int = 8
    selector_rank: int = 5
    selector_top: int = 4
    multiplier: float | None = None
    codebook_suffix: str = ""

    @property
    def method(self) -> str:
        """Its method in `speculative_config`."""
        if self.taps:
            return "dflash2"
        return "dspark" if self.markov_rank else "dflash"

    @property
    def samples_from_anchor(self) -> bool:
        """Whether the row of the newest token predicts one."""
        if self.from_anchor is not None:
            return self.from_anchor
        if self.layout == "speculators":
            return self.method == "dspark"
        return self.layout not in ("z-lab", "assistant")

    @property
    def max_drafts(self) -> int:
        """The drafts of a whole block."""
        return self.block_size - (0 if self.samples_from_anchor else 1)

    @property
    def owns_tables(self) -> bool:
        """Whether the files have embeddings and an lm_head over all ids."""
        return self.layout in ("deepseek", "nested", "gemma4")

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Key and value heads, and elements of a head, of every layer."""
        if self.layout != "gemma4":
            return self.kv_heads, self.head_dim
        return 1 if self.k_eq_v else self.kv_heads, 2 * self.head_dim

    def slides(self, layer: int) -> bool:
        """Whether a layer slides."""
        return self.window > 0 and (self.has_swa_keys or self.all_slide or layer % 2 == 0)


def write(spec: BlockSpec, target_dir: Path, out: Path) -> Path:
    """Writes a drafter for a target into a new folder."""
    target = read_json(target_dir / "config.json")
    target = target.get("text_config", target)
    out.mkdir(parents=True)
    write_json(out / "config.json", config_json(spec, target))
    tensors = random_tensors(spec, target)
    if spec.owns_tables:
        # Such files have copies of the target's tables.
        theirs = load_tensors(target_dir)
        embedding = theirs["model.embed_tokens.weight"].float()
        tensors["embed_tokens.weight"] = embedding
        tensors["lm_head.weight"] = theirs.get("lm_head.weight", embedding).float().clone()
    save_tensors(out, tensors)
    if spec.has_mask_embedding:
        write_mask_embedding(spec, target, out)
    return out


def write_mask_embedding(spec: BlockSpec, target: Mapping[str, Any], out: Path) -> None:
    """Writes the embedding of mask tokens, as z-lab does."""
    import torch

    generator = torch.Generator().manual_seed(spec.seed)
    embedding = torch.randn(target["hidden_size"], generator=generator)
    contents = {"mask_token_id": target["vocab_size"] - 1, "embedding": embedding}
    torch.save(contents, out / MASK_NAME)


def config_json(spec: BlockSpec, target: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, as in published drafters."""
    vocab = target["vocab_size"]
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20_000.0,
        "hidden_act": "silu",
        "attention_bias": spec.attention_bias,
        "tie_word_embeddings": False,
    }
    if spec.layout == "gemma4":
        layer |= _gemma4_keys(spec)
    elif spec.window and not spec.has_swa_keys:
        kinds = ("full_attention", "sliding_attention")
        layer["layer_types"] = [kinds[spec.slides(i)] for i in range(spec.num_layers)]
        layer["sliding_window"] = spec.window
        layer["use_sliding_window"] = True
    by_output = [index - 1 for index in spec.aux_layers]
    head: dict[str, Any] = {"mask_token_id": vocab - 1}
    if spec.layout in ("deepseek", "nested", "gemma4"):
        head |= _head_keys(spec)
    if spec.taps:
        head |= _selector_keys(spec)
    if spec.layout == "assistant":
        del layer["vocab_size"]
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
        return (
            layer
            | head
            | {
                "architectures": ["MuseGlimmerAssistantModel"],
                "model_type": "muse_glimmer_assistant",
                "block_size": spec.block_size,
                "target_layer_ids": by_output,
            }
        )
    if spec.layout == "z-lab":
        nested = head | {"target_layer_ids": by_output}
        stated = {
            "causal": spec.is_causal,
            "input_embedding_scale": spec.embed_scale,
            "final_logit_softcapping": spec.soft_cap,
            "output_multiplier": spec.multiplier,
        }
        nested |= {key: value for key, value in stated.items() if value is not None}
        if spec.has_swa_keys:
            nested |= {"use_swa": True, "swa_window_size": spec.window}
        if spec.taps:
            nested["block_size"] = spec.block_size
            return layer | {"architectures": ["DFlash2DraftModel"], "dflash_config": nested}
        return layer | {
            "architectures": ["DFlashDraftModel"],
            "block_size": spec.block_size,
            "dflash_config": nested,
        }
    if spec.layout in ("deepseek", "gemma4"):
        name = "Qwen3DSparkModel" if spec.layout == "deepseek" else "Gemma4DSparkModel"
        return (
            layer
            | head
            | {
                "architectures": [name],
                "block_size": spec.block_size,
                "target_layer_ids": by_output,
                "num_anchors": 512,
            }
        )
    if spec.layout == "nested":
        return layer | {
            "architectures": ["DSparkDraftModel"],
            "dflash_config": head
            | {
                "projector_type": "dspark",
                "block_size": spec.block_size,
                "target_layer_ids": by_output,
            },
        }
    config: dict[str, Any] = {
        "architectures": [_DRAFT_MODELS[spec.method]],
        "speculators_model_type": spec.method,
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": list(spec.aux_layers),
        "draft_vocab_size": spec.draft_vocab_size or vocab,
        "target_hidden_size": target["hidden_size"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": spec.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": spec.max_drafts}
            ],
            "verifier": {
                "name_or_path": "some/target",
                "architectures": list(target["architectures"]),
            },
        },
    }
    config |= head
    if spec.is_causal is not None:
        config["sliding_window_non_causal"] = not spec.is_causal
    if spec.from_anchor is not None:
        config["sample_from_anchor"] = spec.from_anchor
    return config | (_head_keys(spec) if spec.markov_rank else {})


_DRAFT_MODELS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}


def _selector_keys(spec: BlockSpec) -> dict[str, Any]:
    return {
        "conv_kernel_size": spec.taps,
        "conv_group_size": spec.group,
        "selector_rank": spec.selector_rank,
        "selector_top_k": spec.selector_top,
    }


def _head_keys(spec: BlockSpec) -> dict[str, Any]:
    return {
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov_type,
        "enable_confidence_head": bool(spec.confidence),
        "confidence_head_with_markov": spec.confidence == "token",
    }


def _gemma4_keys(spec: BlockSpec) -> dict[str, Any]:
    """What differs in a configuration with layers of Gemma 4; no other key says the same."""
    kv_heads, head_dim = spec.attention_heads
    return {
        "model_type": "gemma4_unified_text" if spec.k_eq_v else "gemma4_text",
        "global_head_dim": head_dim,
        "num_global_key_value_heads": kv_heads if spec.k_eq_v else None,
        "attention_k_eq_v": spec.k_eq_v,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "layer_types": ["full_attention"] * spec.num_layers,
        "sliding_window": 16,
        "final_logit_softcapping": spec.soft_cap,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 20_000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }


def shapes(spec: BlockSpec, target: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor but copies of the target's tables, `d2t` and `t2d`."""
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    kv_heads, head_dim = spec.attention_heads
    queries, keys = spec.heads * head_dim, kv_heads * head_dim
    has_own_values = spec.layout != "gemma4" or not spec.k_eq_v
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.aux_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(spec.num_layers):
        name = f"layers.{i}."
        found[f"{name}input_layernorm.weight"] = (hidden,)
        found[f"{name}post_attention_layernorm.weight"] = (hidden,)
        if spec.layout == "gemma4":
            found[f"{name}pre_feedforward_layernorm.weight"] = (hidden,)
            found[f"{name}post_feedforward_layernorm.weight"] = (hidden,)
            found[f"{name}layer_scalar"] = (1,)
        for projection, shape in {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }.items():
            if projection == "v_proj" and not has_own_values:
                continue
            found[f"{name}self_attn.{projection}.weight"] = shape
            if spec.attention_bias:
                found[f"{name}self_attn.{projection}.bias"] = shape[:1]
        found[f"{name}self_attn.q_norm.weight"] = (head_dim,)
        found[f"{name}self_attn.k_norm.weight"] = (head_dim,)
        found[f"{name}mlp.gate_proj.weight"] = (spec.intermediate_size, hidden)
        found[f"{name}mlp.up_proj.weight"] = (spec.intermediate_size, hidden)
        found[f"{name}mlp.down_proj.weight"] = (hidden, spec.intermediate_size)
        for convolution in ("attention_conv", "mlp_conv") if spec.taps else ():
            outputs = 2 * spec.taps * (hidden // spec.group)
            found[f"{name}{convolution}.base_kernel"] = (2, spec.taps, hidden)
            found[f"{name}{convolution}.kernel_projection.weight"] = (outputs, hidden)
    rows = spec.draft_vocab_size or vocab
    if spec.draft_vocab_size is not None:
        found["lm_head.weight"] = (rows, hidden)
    rank = spec.markov_rank
    if rank:
        found["markov_head.markov_w1.weight"] = (vocab, rank)
        found["markov_head.markov_w2.weight"] = (rows, rank)
    if spec.markov_type == "gated":
        found["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        found["markov_head.gate_proj.bias"] = (rank,)
    if spec.markov_type == "rnn":
        found["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        found["markov_head.joint_proj.bias"] = (3 * rank,)
    if spec.confidence:
        inputs = hidden + (rank if spec.confidence == "token" else 0)
        found["confidence_head.proj.weight"] = (1, inputs)
        found["confidence_head.proj.bias"] = (1,)
    if spec.taps:
        for codebook in ("predecessor_codebook", "successor_codebook"):
            name = f"candidate_selector.{codebook}{spec.codebook_suffix}"
            found[name] = (vocab, spec.selector_rank)
        found["candidate_selector.hidden_projection.weight"] = (spec.selector_rank, hidden)
    if spec.layout == "assistant":
        found = {_CONTEXT.get(name, name): shape for name, shape in found.items()}
    return found


def random_tensors(spec: BlockSpec, target: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of `shapes`, random; the reduced vocabulary is a random choice of ids."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(spec, target).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.seed} {name}".encode()))
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and not name.endswith("bias")
        tensors[name] = 1 + 0.1 * noise if is_norm else 0.2 * noise
        if name.endswith("base_kernel"):
            tensors[name][:, 0] += 1  # a convolution that changes little at first
    if spec.draft_vocab_size is not None:
        generator = torch.Generator().manual_seed(spec.seed)
        chosen = torch.randperm(target["vocab_size"], generator=generator)
        ids = chosen[: spec.draft_vocab_size].sort().values
        tensors |= vocabulary_maps(ids, target["vocab_size"])
    return tensors
