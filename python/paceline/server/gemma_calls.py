# SPDX-License-Identifier: Apache-2.0
"""The notation in which Gemma 4 writes the arguments of a call, as in call:NAME{key:value,...}.

A string is between two <|"|>, keys are bare or strings, and everything else is as in JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Final

from paceline.server.json_values import read_json

_CALL: Final = re.compile(r"\s*call:([\w.-]+)\s*(\{.*)", re.DOTALL)
_TOKEN: Final = re.compile(
    r'\s+|(?P<mark>[\[\]{}:,])|<\|"\|>(?P<string>.*?)<\|"\|>|(?!<\|"\|>)(?P<bare>[^\[\]{}:,]+)',
    re.DOTALL,
)


def read_gemma_call(text: str) -> tuple[str, str] | None:
    """Reads a call.

    Args:
        text: What is between the tags of a call.

    Returns:
        The arguments as JSON and the name of the function; None if it is no call.
    """
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    try:
        # What is no token stays, and is no JSON.
        arguments = read_json(_TOKEN.sub(_as_json, found[2].rstrip()))
        return json.dumps(arguments, ensure_ascii=False), found[1]
    except (ValueError, RecursionError):
        return None


def _as_json(token: re.Match[str]) -> str:
    if token["string"] is not None:
        return json.dumps(token["string"])
    if token["bare"] is None:
        return token["mark"] or ""  # or a space
    bare = token["bare"].strip()
    if not token.string.startswith(":", token.end()):  # no key
        with contextlib.suppress(ValueError):
            read_json(bare)
            return bare
    return json.dumps(bare)
