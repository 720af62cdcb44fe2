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
# How many schemas that refer to each other tell the types of a parameter. A client writes them.
_MAX_SCHEMAS: Final = 64


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


def _kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, by the keys that can say so; empty if none does."""
    kinds: set[str] = set()
    pending = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not pending:
            break
        one = pending.pop()
        if not isinstance(one, dict):
            continue
        if "type" in one:
            named = one["type"] if isinstance(one["type"], list) else [one["type"]]
            kinds |= {kind for kind in named if isinstance(kind, str)}
        elif "enum" in one or "const" in one:
            values = one.get("enum", [one.get("const")])
            if isinstance(values, list):
                kinds |= {"string" if isinstance(value, str) else "other" for value in values}
        else:
            for key in ("anyOf", "oneOf", "allOf"):
                if isinstance(one.get(key), list):
                    pending += one[key][:_MAX_SCHEMAS]
            pending.append(_referred(one.get("$ref"), root))
    return kinds


def _referred(ref: Any, root: Mapping[str, Any]) -> Any:
    """The schema that "#/a/b" names."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found: Any = root
    for part in ref[2:].split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


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
