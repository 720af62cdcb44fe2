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

from paceline.server.json_values import read_json

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
    root = _parameters_of(name, tools)
    properties = root.get("properties")
    schemas = properties if isinstance(properties, dict) else {}
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
        arguments[key.strip()] = _value_of(value, schemas.get(key.strip()), root)
    if not name or rest.split(_PARAMETER[0])[0].strip():
        return None
    return json.dumps(arguments, ensure_ascii=False), name


def _parameters_of(name: str, tools: Sequence[Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters; empty if there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


_MAX_NESTED: Final = 8  # schemas in schemas that name a type


def _kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows, by the keys that can say so; empty if none does."""
    if not isinstance(schema, dict) or depth > _MAX_NESTED:
        return set()
    if "type" in schema:
        kinds = schema["type"]
        return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind}
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {
            "string" if isinstance(value, str) else "other"
            for value in (values if isinstance(values, list) else [])
        }
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return {kind for one in schema[key] for kind in _kinds_of(one, root, depth + 1)}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/"):
        found: Any = root
        for part in ref[2:].split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        return _kinds_of(found, root, depth + 1)
    return set()


def _value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    kinds = _kinds_of(schema, root) if isinstance(schema, dict) else {"string"}
    if kinds == {"string"}:
        return text
    try:
        # Models write Python's spelling, too.
        value = {"True": True, "False": False, "None": None}.get(text.strip(), ...)
        value = read_json(text) if value is ... else value
    except (ValueError, RecursionError):
        return text
    # A string may look like JSON.
    return text if "string" in kinds and value is not None else value
