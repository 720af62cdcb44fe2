# SPDX-License-Identifier: Apache-2.0
"""Fields of OpenAI's API that have no effect here, because they say nothing of the output.

They are taken so that clients which always send them work; a value that OpenAI's API would refuse
is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from paceline.checks import check_text
from paceline.server.bodies import Fields
from paceline.server.errors import refusal, wrong_field

MAX_TEXT: Final = 512
#: The values of fields that have few.
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "service_tier": ("auto", "default", "flex", "scale", "priority"),
    "verbosity": ("low", "medium", "high"),
}


def _check_text(name: str, value: Any) -> None:
    if len(check_text(name, value)) > MAX_TEXT:
        raise refusal(f"{name} is too long; allowed: {MAX_TEXT} characters", name)


def _check_choice(name: str, value: Any) -> None:
    if value not in CHOICES[name]:
        raise wrong_field(name, value, ", ".join(CHOICES[name]))


def _check_metadata(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise wrong_field(name, value, "an object of strings")


_CHECKS: Final[Mapping[str, Callable[[str, Any], None]]] = {
    "metadata": _check_metadata,
    "prompt_cache_key": _check_text,
    "prompt_cache_retention": _check_choice,
    "safety_identifier": _check_text,
    "service_tier": _check_choice,
    "user": _check_text,
    "verbosity": _check_choice,
}
#: Of every route.
NO_EFFECT: Final = tuple(name for name in _CHECKS if name != "verbosity")


def take_no_effect(fields: Fields, names: Collection[str] = NO_EFFECT) -> dict[str, Any]:
    """Takes fields that have no effect.

    Args:
        fields: The fields of the request.
        names: Those of them to take.

    Returns:
        Those that are given.

    Raises:
        ApiError: One is malformed.
        ValueError: Likewise.
    """
    given = {name: value for name in names if (value := fields.take(name)) is not None}
    for name, value in given.items():
        _CHECKS[name](name, value)
    return given
