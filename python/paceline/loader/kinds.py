# SPDX-License-Identifier: Apache-2.0
"""The kind of a drafter, by its configuration and by its tensors."""

from __future__ import annotations

from collections.abc import Mapping

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
