# SPDX-License-Identifier: Apache-2.0
"""Random JSON schemas of the kinds that public suites of schemas have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "kind", "value", "items", "tags", "size", "unit", "owner", "x-y", "ключ")
_WORDS = ("red", "green", "blue", "on", "off", "north east", 'a "quoted" one', "äöü", "1")


def make_schema(seed: int) -> Schema:
    """The schema of a seed: its root is an object, an array or a scalar of any of the families."""
    rng = random.Random(seed)
    root = rng.choice((_object, _object, _array, _referring, _choice, _any, _recursive))
    return root(rng, 2)


def _enum(rng: random.Random, _: int) -> Schema:
    values: list[Any] = rng.sample(_WORDS, rng.randint(1, 4))
    if rng.random() < 0.3:
        values += [None, True, 7, -2.5]
    return {"enum": values}


def _const(rng: random.Random, _: int) -> Schema:
    return {"const": rng.choice((1, "fixed", None, False, ["a", 1], {"k": "v"}))}


def _string(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "string", "maxLength": rng.randint(1, 10)}
    if rng.random() < 0.4:
        schema["minLength"] = rng.randint(0, schema["maxLength"])
    return schema


def _pattern(rng: random.Random, _: int) -> Schema:
    patterns = ("^[a-z]{2,5}$", "^[A-Z][a-z]*-[0-9]{3}$", "^(yes|no|maybe)$", "^\\d{1,3}(\\.\\d)?$")
    return {"type": "string", "pattern": rng.choice(patterns)}


def _format(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "format": rng.choice(("date", "time", "date-time", "uuid", "ipv4"))}


def _integer(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-1000, 1000)
    bounds: Schema = {"minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 50)}
    return {"type": "integer", **bounds}


def _number(rng: random.Random, _: int) -> Schema:
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 30)}


def _scalar(rng: random.Random, _: int) -> Schema:
    return {"type": rng.choice(("boolean", "null", ["integer", "null"], ["boolean", "null"]))}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["additionalProperties"] = {"type": "boolean"}
        schema["required"] = names
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.25:
        prefix = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}
    return {**schema, "items": _any(rng, depth - 1)}


def _choice(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    branches = []
    for tag in rng.sample(("a", "b", "c"), 2):
        branch = _object(rng, depth - 1)
        branch["properties"] = {"tag": {"const": tag}, **branch["properties"]}
        branch["required"] = ["tag", *branch["required"]]
        branches.append(branch)
    return {"oneOf": branches}


def _all_of(rng: random.Random, depth: int) -> Schema:
    return {"allOf": [_integer(rng, depth), {"type": "integer"}]}


def _referring(rng: random.Random, depth: int) -> Schema:
    schema = _object(rng, depth)
    schema["$defs"] = {"shared": _any(rng, 0)}
    for name in list(schema["properties"])[:2]:
        schema["properties"][name] = {"$ref": "#/$defs/shared"}
    return schema


def _recursive(rng: random.Random, depth: int) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "v": _any(rng, 0),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


_LEAVES: tuple[Callable[[random.Random, int], Schema], ...] = (
    _enum, _const, _string, _pattern, _format, _integer, _number, _scalar, _all_of,
)  # fmt: skip


def _any(rng: random.Random, depth: int) -> Schema:
    if depth > 0 and rng.random() < 0.5:
        return rng.choice((_object, _array, _choice))(rng, depth)
    return rng.choice(_LEAVES)(rng, depth)
