# SPDX-License-Identifier: Apache-2.0
"""The notation in which Qwen3-Coder and Qwen3.5 write calls: a tag for the function and for each
parameter, with the value as text between two tags.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_FUNCTION: Final = ("<function=", "</function>")
_PARAMETER: Final = ("<parameter=", "</parameter>")


def read_qwen_call(text: str, tools: Sequence[Any]) -> tuple[str, str] | None:
    """Reads a call.

    Args:
        text: What is between the tags of a call.
        tools: Those that may be called. A value is JSON where the type of the parameter in the
            tool's schema is another than a string; otherwise it is a string.

    Returns:
        The arguments as JSON and the name of the function; None if it is no call.
    """
    rest = text.strip()
    if not rest.startswith(_FUNCTION[0]) or ">" not in rest:
        return None
    name, _, rest = rest[len(_FUNCTION[0]) :].partition(">")
    name = name.strip()
    # The output may have ended before the last tag.
    rest = rest.rstrip().removesuffix(_FUNCTION[1])
    schemas = _parameters_of(name, tools)
    arguments: dict[str, Any] = {}
    for piece in rest.split(_PARAMETER[0])[1:]:
        key, mark, value = piece.partition(">")
        if not mark:
            return None
        at = value.rfind(_PARAMETER[1])
        if at >= 0:
            if value[at + len(_PARAMETER[1]) :].strip():
                return None
            value = value[:at]
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _value_of(value, schemas.get(key.strip()))
    if not name or rest.split(_PARAMETER[0])[0].strip():
        return None
    return json.dumps(arguments, ensure_ascii=False), name


def _parameters_of(name: str, tools: Sequence[Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters; empty if there are none."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _value_of(text: str, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, dict) else "string"
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["string"]:
        return text
    try:
        # Models write Python's spelling, too.
        value = {"True": True, "False": False, "None": None}.get(text.strip(), ...)
        value = json.loads(text) if value is ... else value
    except (ValueError, RecursionError):
        return text
    # A string may look like JSON.
    return text if "string" in kinds and value is not None else value
