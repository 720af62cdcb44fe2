# SPDX-License-Identifier: Apache-2.0
"""The parts that draft heads share: `eagle.py`, `mtp.py`, `gemma4_assistant.py` and `block.py`
translate them.

A draft head is trained for one target and uses parts of it, such as its embeddings. Translating one
therefore needs a `Target`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline._core import ModelFileError
from paceline.option_schema import KEYS

from .binding import BoundTensor
from .decoder import Sizes
from .section import Section

EAGLE: Final = "eagle"
EAGLE3: Final = "eagle3"
MTP: Final = "mtp"
GEMMA4_MTP: Final = "gemma4_mtp"
DFLASH: Final = "dflash"
DFLASH2: Final = "dflash2"
DSPARK: Final = "dspark"
# Kinds of draft heads.
BLOCK_KINDS: Final = (DFLASH, DFLASH2, DSPARK)
KINDS: Final = (EAGLE, EAGLE3, MTP, GEMMA4_MTP, *BLOCK_KINDS)


@dataclass(frozen=True)
class Target:
    """The facts of a target that a draft head must fit.

    Attributes:
        path: The target's folder, for messages.
        architecture: The class name in its `config.json`.
        config: Its canonical description.
        weight_dtype: The dtype of its matrices: "float32" or "bfloat16".
        tables: Its embeddings and lm_head by their canonical names, one tensor where they are tied;
            empty where its tensors are not at hand.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    weight_dtype: str
    tables: Mapping[str, BoundTensor] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        """The width of its hidden states."""
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """The number of rows of its embedding table."""
        return int(self.config["vocab_size"])

    @property
    def num_layers(self) -> int:
        """The number of its layers."""
        return len(self.config["layers"])


def describe_drafter(kind: str, target: Target, **keys: Any) -> dict[str, Any]:
    """The object `drafter` of a draft head's description.

    Args:
        kind: One of `KINDS`.
        target: The target. Unless `keys` say otherwise, the draft head uses its embeddings and its
            lm_head.
        **keys: Those that the kind adds, and those that differ from a drafter that has a norm
            before attention and a final one, no bias, and none of EAGLE-3's switches.
    """
    return {
        "kind": kind,
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "has_fc_bias": False,
        "has_attn_norm": True,
        "has_final_norm": True,
        "owns_embedding": False,
        "owns_lm_head": False,
        "draft_vocab_size": target.vocab_size,
        **keys,
    }


def made_for_another(top: Section) -> str:
    """The beginning of a message about a draft head of another target."""
    return f"{top.source}: the drafter was made for another target:"


def check_target_width(top: Section, key: str, stated: int, target: Target) -> int:
    """Refuses a draft head whose configuration states another hidden size of its target.

    Returns:
        The hidden size.

    Raises:
        ValueError: It differs; names both values.
    """
    if stated != target.hidden_size:
        raise ValueError(
            f'{made_for_another(top)} key "{top.name(key)}" is {stated}, but {target.path} has a '
            f"hidden size of {target.hidden_size}"
        )
    return stated


def check_same_vocabulary(top: Section, section: Section, sizes: Sizes, target: Target) -> None:
    """Refuses a draft head of another vocabulary.

    Args:
        top: The draft head's configuration.
        section: The part of it that has the sizes.
        sizes: The sizes.
        target: The target that it must fit.

    Raises:
        ValueError: It has another number of token ids; names both values.
    """
    if sizes.vocab != target.vocab_size:
        raise ValueError(
            f'{made_for_another(top)} key "{section.name("vocab_size")}" is {sizes.vocab}, but '
            f"{target.path} has {target.vocab_size} ids; expected a drafter with the target's "
            "vocabulary"
        )


def check_fits(top: Section, section: Section, sizes: Sizes, target: Target, borrowed: str) -> None:
    """Refuses a draft head of a target with another vocabulary or hidden size.

    Args:
        top: As for `check_same_vocabulary`.
        section: As for `check_same_vocabulary`.
        sizes: As for `check_same_vocabulary`.
        target: The target that it must fit.
        borrowed: The parts of the target that it uses with its own hidden size; empty: none.

    Raises:
        ValueError: It does not fit; names both values.
    """
    check_same_vocabulary(top, section, sizes, target)
    key = "target_hidden_size"
    check_target_width(top, key, top.integer(key, target.hidden_size), target)
    if borrowed and sizes.hidden != target.hidden_size:
        raise ValueError(
            f'{made_for_another(top)} key "{section.name("hidden_size")}" is {sizes.hidden}, but '
            f"{target.path} has a hidden size of {target.hidden_size}, and the drafter uses its "
            f"{borrowed}"
        )


def check_full_head(top: Section, rows: int | None, vocab_size: int) -> None:
    """Checks the lm_head of a draft head without `d2t`, where row i is token id i of the target.

    Args:
        top: The draft head's configuration.
        rows: The rows of its lm_head; None: it has none.
        vocab_size: The token ids of the target.

    Raises:
        ModelFileError: They differ; names both values.
    """
    if rows is not None and rows != vocab_size:
        raise ModelFileError(
            f"{top.source}: 'd2t' is not in the weights, but 'lm_head.weight' has {rows} rows and "
            f"the target {vocab_size} token ids; expected 'd2t', or a row for each id"
        )


def take_positions(config: dict[str, Any], sizes: Sizes, target: Target, notes: list[str]) -> None:
    """Gives a draft head's description the target's number of positions.

    The limit in the file is the length of the training sequences. Rotary embeddings work beyond it;
    drafts there are only less likely to be accepted, and the target's own limit holds anyway.
    """
    if sizes.max_position < target.config["max_position"]:
        notes.append(
            f"the drafter was made for {sizes.max_position} positions and the target for "
            f"{target.config['max_position']}; beyond its own, fewer drafts may be accepted"
        )
    config["max_position"] = target.config["max_position"]


def with_feedback(config: Mapping[str, Any], feedback: str | None, where: object) -> dict[str, Any]:
    """The description of an MTP layer whose draft steps pass on another hidden state.

    Args:
        config: The description.
        feedback: "normed", after the last norm, or "raw", before it; None: as it says.
        where: What the drafter was read from, for messages.

    Raises:
        ValueError: It is another drafter.
    """
    if feedback is None:
        return dict(config)
    found = config.get("drafter", {}).get("kind", "draft_model")
    KEYS["draft_feedback"].check_method(feedback, found)
    if feedback == "normed" and "streams" in config:
        raise ValueError(
            f"speculative_config['x']['draft_feedback'] is {feedback!r}, but the drafter of "
            f"{where} passes on several residual streams, which have no norm; allowed: 'raw', or "
            "leave it out"
        )
    return {**config, "drafter": {**config["drafter"], "norm_output": feedback == "normed"}}
