# SPDX-License-Identifier: Apache-2.0
"""The library's limits for a decoder, reported as errors of the file that the decoder came from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline import _core
from paceline._core import ModelFileError

from .section import Section

_ROPE_KEYS: Final = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
# The keys of configuration files that an entry of the description is made of.
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "max_position": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "embed_scale": ("hidden_size",),
    "logit_soft_cap": ("final_logit_softcapping",),
    "ropes": _ROPE_KEYS,
    "inv_freq": _ROPE_KEYS,
    "ropes.scale": _ROPE_KEYS,
    "layers": ("num_hidden_layers",),
    "num_qo_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_global_key_value_heads"),
    "head_dim": ("head_dim", "global_head_dim"),
    "scale": ("query_pre_attn_scalar", "head_dim"),
    "intermediate": ("intermediate_size", "moe_intermediate_size"),
    "dense.intermediate": ("intermediate_size",),
    "mixture.intermediate": ("moe_intermediate_size",),
    "shared.intermediate": ("n_shared_experts", "moe_intermediate_size"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token", "top_k_experts"),
    "num_groups": ("n_group",),
    "top_groups": ("topk_group",),
    "weight_scale": ("routed_scaling_factor",),
    **{
        key: (key,)
        for key in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "latent_norm_eps",
        )
    },
    "window": ("sliding_window",),
    "o_groups": ("o_groups",),
    "o_lora_rank": ("o_lora_rank",),
    "rope_head_dim": ("qk_rope_head_dim", "partial_rotary_factor", "head_dim"),
    "tokens_per_entry": ("compress_rates", "compress_rate_csa", "compress_rate_hca"),
    "indexer.num_heads": ("index_n_heads",),
    "indexer.head_dim": ("index_head_dim",),
    "indexer.top_k": ("index_topk",),
    "streams.count": ("hc_mult",),
    "streams.sinkhorn_iterations": ("hc_sinkhorn_iters",),
    "streams.eps": ("hc_eps",),
    "alpha": ("swiglu_alpha",),
    "limit": ("swiglu_limit",),
    "format": ("quantization_config",),
    "per_layer_inputs.size": ("hidden_size_per_layer_input",),
    "per_layer_inputs.vocab_size": ("vocab_size_per_layer_input",),
    "drafter.target_hidden_size": ("target_hidden_size", "backbone_hidden_size"),
    "drafter.draft_vocab_size": ("draft_vocab_size",),
    "drafter.aux_layers": ("eagle_aux_hidden_state_layer_ids",),
    "logit_scale": ("output_multiplier",),
    "convolution.taps": ("conv_kernel_size",),
    "convolution.group": ("conv_group_size",),
    "selector.rank": ("selector_rank",),
    "selector.top": ("selector_top_k",),
    "centroids.count": ("num_centroids",),
    "centroids.top": ("centroid_intermediate_top_k",),
}


def check_description(config: Mapping[str, Any], sections: Sequence[Section]) -> None:
    """Checks a description before anything large is read or written.

    Args:
        config: The canonical description.
        sections: The parts of the configuration that it was made of.

    Raises:
        ModelFileError: The library does not take it; names the file, the keys, the value and what
            is allowed.
    """
    for i, rope in enumerate(config["ropes"]):
        # Infinity is no JSON, so the library could not name its key.
        named = {f"inv_freq[{j}]": value for j, value in enumerate(rope["inv_freq"])}
        for key, value in (named | {"scale": rope["scale"]}).items():
            if not math.isfinite(value):
                name = f"ropes[{i}].{key}"
                raise _error(name, f"{name} is {value}; allowed: a finite number", sections)
    try:
        _core.check_decoder_config(json.dumps(config))
    except ValueError as error:
        message = str(error).removeprefix("decoder config: ")
        path = re.match(r"[\w.\[\]]+(?= is )", message)
        raise _error(path.group() if path else "", message, sections) from None


def _error(path: str, message: str, sections: Sequence[Section]) -> ModelFileError:
    parts = re.sub(r"\[\d+\]", "", path).split(".")
    keys = _KEYS.get(".".join(parts[-2:])) or _KEYS.get(parts[-1], ())
    named = dict.fromkeys(
        section.name(key) for key in keys for section in sections if section.has(key)
    )
    shown = ", ".join(f'"{key}"' for key in named or keys[:1])
    where = f"{'keys' if len(named) > 1 else 'key'} {shown}: " if shown else ""
    return ModelFileError(f"{sections[0].source}: {where}{message}")
