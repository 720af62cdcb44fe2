# SPDX-License-Identifier: Apache-2.0
"""What DFlash2 adds to a block drafter: convolutions in its layers, and the candidate selector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .block_facts import CODEBOOKS, HIDDEN_PROJECTION, BlockFacts
from .block_kinds import SPECULATORS, find_key, markov_rank
from .decoder import Sizes
from .decoder_tensors import tensor_spec
from .family import TensorSpec
from .section import Section

#: The keys by the entries of the description that they become.
_CONVOLUTION: Final = {"taps": "conv_kernel_size", "group": "conv_group_size"}
_SELECTOR: Final = {"rank": "selector_rank", "top": "selector_top_k"}
#: The keys of DFlash2 alone.
DFLASH2_KEYS: Final = (*_CONVOLUTION.values(), *_SELECTOR.values())
#: All keys of z-lab's object with the block. Those of training change nothing.
_KNOWN_KEYS: Final = (
    *DFLASH2_KEYS,
    "attention_sink_bias",
    "attention_value_scale",
    "block_size",
    "causal",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "num_anchors",
    "output_multiplier",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
)
#: The convolutions of a layer: canonical name, name in the checkpoint.
_CONVOLUTIONS: Final = (("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv"))


def read_selector(top: Section, block: Section, facts: BlockFacts, sizes: Sizes) -> dict[str, Any]:
    """The keys "convolution" and "selector" of the object "block" of the description.

    Args:
        top: The configuration.
        block: The part that has the keys of the block.
        facts: The parts that the drafter has.
        sizes: Its sizes.

    Raises:
        ModelFileError: A key is missing or has a wrong value.
        NotImplementedError: A key is not known, or a value not supported.
    """
    if not top.has(SPECULATORS):
        for key in block.values:
            if block is not top and block.has(key) and key not in _KNOWN_KEYS:
                raise block.refusal(key, f"no such key, only {', '.join(sorted(_KNOWN_KEYS))}")
    if markov_rank(top) > 0:
        section = find_key("markov_rank", block) or top
        raise section.refusal("markov_rank", "0, or no such key, with a candidate selector")
    if facts.has_map or facts.draft_vocab_size not in (None, sizes.vocab):
        rows = facts.draft_vocab_size
        raise NotImplementedError(
            f"{top.source}: 'lm_head.weight' has {rows} rows, which Paceline does not support with "
            f"a candidate selector; supported: {sizes.vocab}, a row for each token id, and no 'd2t'"
        )

    def read(key: str) -> int:
        return (find_key(key, block, top) or block).integer(key)

    return {
        "convolution": {entry: read(key) for entry, key in _CONVOLUTION.items()},
        "selector": {entry: read(key) for entry, key in _SELECTOR.items()},
    }


def convolution_tensors(layer: int, sizes: Sizes, drafter: Mapping[str, Any]) -> list[TensorSpec]:
    """Lists the tensors of the convolutions of a layer; none in other drafters."""
    convolution = drafter["block"].get("convolution")
    if convolution is None:
        return []
    taps, group = convolution["taps"], convolution["group"]
    hidden = (sizes.hidden, "hidden_size")
    outputs = (
        2 * taps * (sizes.hidden // group),
        "2 * conv_kernel_size * hidden_size / conv_group_size",
    )
    specs = []
    for name, source in _CONVOLUTIONS:
        name, source = f"layers.{layer}.{name}", f"layers.{layer}.{source}"
        specs += [
            tensor_spec(
                f"{name}.base",
                f"{source}.base_kernel",
                (2, "2"),
                (taps, "conv_kernel_size"),
                hidden,
            ),
            tensor_spec(
                f"{name}.kernel.weight", f"{source}.kernel_projection.weight", outputs, hidden
            ),
        ]
    return specs


def selector_tensors(
    sizes: Sizes, facts: BlockFacts, drafter: Mapping[str, Any]
) -> list[TensorSpec]:
    """Lists the tensors of the candidate selector; none in other drafters."""
    selector = drafter["block"].get("selector")
    if selector is None:
        return []
    rank = (selector["rank"], "selector_rank")
    vocab = (sizes.vocab, "vocab_size")
    specs = [
        tensor_spec(f"selector.{name}.weight", source + facts.codebook_suffix, vocab, rank)
        for name, source in CODEBOOKS.items()
    ]
    hidden = (sizes.hidden, "hidden_size")
    return [*specs, tensor_spec("selector.weight", HIDDEN_PROJECTION, rank, hidden)]
