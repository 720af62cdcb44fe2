# SPDX-License-Identifier: Apache-2.0
"""The kind of a drafter, by its configuration and by its tensors.

A folder of the `speculators` package has a drafter whose configuration names its target. It can be
given as the model: its verifier becomes the target, and itself the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.limits import MAX_SPECULATIVE_TOKENS

from .block_kinds import block_kind_of_config
from .drafters import GEMMA4_MTP
from .eagle_facts import eagle_kind_of_config, eagle_kind_of_tensors
from .gemma4_assistant import PRE_PROJECTION, is_assistant_config
from .section import Section


def kind_of_config(top: Section) -> str | None:
    """The kind that a configuration names; None: it names none, so that the tensors decide.

    Raises:
        ModelFileError: A key has a wrong type.
        NotImplementedError: It is a drafter of the `speculators` package that is not supported.
    """
    if is_assistant_config(top):
        return GEMMA4_MTP
    return block_kind_of_config(top) or eagle_kind_of_config(top)


def kind_of_tensors(names: Mapping[str, object]) -> tuple[str | None, str]:
    """The kind that the tensors show.

    Args:
        names: The tensors of a checkpoint by name.

    Returns:
        The kind, None for a draft model; and the name of a tensor that shows it.
    """
    kind, sign = eagle_kind_of_tensors(names)
    if kind is None and PRE_PROJECTION in names:
        return GEMMA4_MTP, PRE_PROJECTION
    return kind, sign


# ---- folders of the `speculators` package --------------------------------------------------------

# The cure, in messages, for a target that is not found.
CURE: Final = "; or name the target as the model, and this folder as speculative_config['model']"


@dataclass(frozen=True)
class Speculators:
    """The use of such a folder, as its configuration states it.

    Attributes:
        section: The section "speculators_config".
    """

    section: Section

    @property
    def verifier(self) -> str:
        """The target: a folder, absolute or relative to this one, or a model on the hub.

        Raises:
            ModelFileError: It is not named.
        """
        verifier = self.section.section("verifier")
        if verifier is None:
            raise self.section.error("verifier", f"an object with the target{CURE}")
        if not verifier.has("name_or_path") or not verifier.text("name_or_path"):
            raise verifier.error("name_or_path", f"the target's folder or its name{CURE}")
        return verifier.text("name_or_path")

    @property
    def num_speculative_tokens(self) -> int:
        """The k of the default proposal method, else of the first one.

        Raises:
            ModelFileError: It is missing, or out of range.
        """
        key = "proposal_methods"
        expected = "a list of objects with speculative_tokens, or k in speculative_config"
        methods = self.section.values.get(key)
        if not isinstance(methods, list) or not methods:
            raise self.section.error(key, expected)
        named = [value for value in methods if isinstance(value, dict)]
        if len(named) < len(methods):
            raise self.section.error(key, expected)
        chosen = named[0]
        if self.section.has("default_proposal_method"):
            default = self.section.text("default_proposal_method")
            matching = [value for value in named if value.get("proposal_type") == default]
            if not matching:
                raise self.section.error(
                    "default_proposal_method", f'the "proposal_type" of one of "{key}"'
                )
            chosen = matching[0]
        path = self.section.name(f"{key}[{named.index(chosen)}]")
        section = Section(chosen, self.section.source, path)
        return section.integer("speculative_tokens", high=MAX_SPECULATIVE_TOKENS)


def read_speculators(top: Section) -> Speculators | None:
    """Returns what a `config.json` says about its target; None: it is not one of the package.

    Raises:
        ModelFileError: A key has a wrong type.
        NotImplementedError: It is a drafter of a kind that is not supported.
    """
    section = top.section("speculators_config")
    if section is None:
        return None
    kind_of_config(top)
    return Speculators(section)
