# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM's modules and classes that Paceline lacks, and what takes their place.

An attempt to use one raises an error that says so. docs/from-vllm.md has a table of them. Code is
in backticks, which errors leave out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

_TABLES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def _names(table: str) -> dict[str, dict[str, str]]:
    texts = _TABLES["texts"]
    return {
        owner: {
            name: re.sub(r"<(\w+)>", lambda found: texts[found[1]], text)
            for name, text in names.items()
        }
        for owner, names in _TABLES[table].items()
    }


#: By module: names in it.
MODULE_NAMES: Final = _names("modules")
#: By class: attributes of its objects.
ATTRIBUTES: Final = _names("attributes")


def missing_name(module: str, name: str) -> Exception:
    """The error about a name that a module lacks.

    It is an ImportError for names of vLLM: where `from module import name` meets an AttributeError,
    Python raises another error without the advice.
    """
    advice = MODULE_NAMES.get(module, {}).get(name)
    if advice is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module} has no {name}: {_plain(advice)}", name=module)


def missing_attribute(owner: Any, kind: str, name: str) -> AttributeError:
    """The error about an attribute that an object lacks.

    Args:
        owner: The object.
        kind: The name of its class in ATTRIBUTES.
        name: The attribute.
    """
    advice = ATTRIBUTES[kind].get(name)
    message = f"{kind!r} object has no attribute {name!r}"
    if advice is not None:
        message += f": {_plain(advice)}"
    return AttributeError(message, name=name, obj=owner)


def _plain(advice: str) -> str:
    return advice.replace("`", "")
