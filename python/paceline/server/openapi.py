# SPDX-License-Identifier: Apache-2.0
"""/openapi.json, which describes the routes and their bodies, and /docs, which shows it.

The usual pages for such a description load scripts from other hosts.
"""

from __future__ import annotations

import html
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import paceline
from paceline.server.exchange import MESSAGE_PATHS, OPEN_PATHS
from paceline.server.field_schemas import FIELDS, Schema, Schemas
from paceline.server.live_page import policy_headers, read_part

# They take values of what is refused that are the same as leaving the field out.
_OTHERS: Final = (
    "Other fields are refused, except some of OpenAI's and vLLM's with the value that is their "
    "default."
)


# What routes.toml says.
_ROUTES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("routes.toml").read_text(encoding="utf-8")
)
#: The paths of all routes, but for those that end with a name.
PATHS: Final = frozenset((*_ROUTES["bodies"], *_ROUTES["facts"])) - {"/v1/models/{name}"}


def document() -> dict[str, Any]:
    """Returns the description of all routes, in OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Error": _ERROR, "MessageError": _MESSAGE_ERROR}
    for path, body in _ROUTES["bodies"].items():
        name = body["name"]
        schemas[name] = _schema(FIELDS[path], body["required"])
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if body["streams"]:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        asked = {"required": True, "content": _json_of(name)}
        described = _operation(f"post{name}", path, body["text"], "The result.", content)
        paths[path] = {"post": described | {"requestBody": asked}}
    for path, (text, kind) in _ROUTES["facts"].items():
        name = "get" + "".join(filter(str.isalnum, path.title()))
        fact = _operation(name, path, text, text, {kind: {}})
        if "{name}" in path:
            fact["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if path in OPEN_PATHS:
            fact["security"] = []
        paths[path] = {"get": fact}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": paceline.__version__, "description": _OTHERS},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],  # the first without --api-key
    }


def _operation(
    name: str, path: str, text: str, result: str, content: dict[str, Any]
) -> dict[str, Any]:
    error = "MessageError" if path in MESSAGE_PATHS else "Error"
    return {
        "operationId": name,
        "summary": text,
        "responses": {
            "200": {"description": result, "content": content},
            "default": {"description": "An error.", "content": _json_of(error)},
        },
    }


def _schema(fields: Schemas, required: list[str]) -> Schema:
    """The schema of a body: a field that is null counts as absent."""
    properties = {}
    for name, schema in sorted(fields.items()):
        if name not in required:
            text = schema.get("description", "")
            bare = {key: value for key, value in schema.items() if key != "description"}
            schema = {"anyOf": [bare, {"type": "null"}], "description": text}
        properties[name] = schema
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _of_strings(*names: str) -> Schema:
    properties = {name: {"type": ["string", "null"]} for name in names}
    return {"type": "object", "properties": properties, "required": list(names)}


_ERROR: Final[Schema] = {
    "type": "object",
    "properties": {"error": _of_strings("message", "type", "param", "code")},
    "required": ["error"],
}
_MESSAGE_ERROR: Final[Schema] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": _of_strings("message", "type"),
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}

# ---- the page ------------------------------------------------------------------------------------


def docs_page() -> tuple[bytes, dict[str, str]]:
    """Makes the page at /docs of the document: without a script, and from this host alone.

    Returns:
        The page, and its headers.
    """
    described = document()
    rows = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            title = f"<code>{method.upper()} {html.escape(path)}</code> {_escaped(operation)}"
            body = operation.get("requestBody")
            if body is None:
                rows.append(f"<p>{title}</p>")
                continue
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            table = _table(described["components"]["schemas"][name])
            rows.append(f"<details><summary>{title}</summary>{table}</details>")
    style, text = read_part("docs.css"), read_part("docs.html")
    for place, part in (
        ("/* style */", style),
        ("<!-- description -->", html.escape(described["info"]["description"])),
        ("<!-- routes -->", "\n".join(rows)),
    ):
        text = text.replace(place, part)
    return text.encode(), policy_headers(f"\n{style}")


def _escaped(operation: Mapping[str, Any]) -> str:
    return html.escape(operation["summary"])


def _table(schema: Schema) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{_kind(one)}"
        f"{', required' if name in schema['required'] else ''}</td>"
        f"<td>{html.escape(one.get('description', ''))}</td></tr>\n"
        for name, one in schema["properties"].items()
    )
    head = "<tr><th>field</th><th>value</th><th>meaning</th></tr>"
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{rows}</tbody>\n</table>"


def _kind(schema: Schema) -> str:
    """Returns what a value may be, in words."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(html.escape(str(value)) for value in schema["enum"])
    if "const" in schema:
        return html.escape(str(schema["const"]))
    kind = str(schema["type"])
    if kind == "array":
        return f"list of {_kind(schema['items'])}"
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    if least is None:
        return kind
    above = "above " if "exclusiveMinimum" in schema else ""
    most = schema.get("maximum")
    return f"{kind}, {above}{least:g}" + ("" if most is None else f" to {most:.20g}")
