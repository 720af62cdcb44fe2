# SPDX-License-Identifier: Apache-2.0
"""Fields of OpenAI's API that have no effect here, because they say nothing of the output.

They are taken so that clients which always send them work; a value that OpenAI's API would refuse
is refused here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.checks import check_text
from paceline.server.bodies import Fields
from paceline.server.errors import refusal, wrong_field
from paceline.server.field_schemas import CHAT_FIELDS, MAX_TEXT, NO_EFFECT


def _check(name: str, value: Any) -> None:
    schema = CHAT_FIELDS[name]
    if "enum" in schema:
        if value not in schema["enum"]:
            raise wrong_field(name, value, ", ".join(schema["enum"]))
    elif schema["type"] == "string":
        if len(check_text(name, value)) > MAX_TEXT:
            raise refusal(f"{name} is too long; allowed: {MAX_TEXT} characters", name)
    elif not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise wrong_field(name, value, "an object of strings")


def take_no_effect(fields: Fields, names: Iterable[str] = NO_EFFECT) -> dict[str, Any]:
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
        _check(name, value)
    return given
