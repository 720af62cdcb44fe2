# SPDX-License-Identifier: Apache-2.0
"""Folders of the `speculators` package: a drafter whose configuration names its target.

Such a folder can be given as the model: its verifier becomes the target, and itself the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.limits import MAX_SPECULATIVE_TOKENS

from .kinds import kind_of_config
from .section import Section

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
