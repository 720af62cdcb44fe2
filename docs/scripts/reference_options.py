# SPDX-License-Identifier: Apache-2.0
"""Makes the reference of the options of engines and of `speculative_config` from options.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.option_schema import ARGUMENTS, KEYS, Option
from reference_markdown import Entry, Group, Item, Page, Section

_C: Final = "paceline_options"


def _allowed(option: Option) -> str:
    """The values allowed, as messages say them."""
    if option.choices:
        return ", ".join(f'"{choice}"' for choice in option.choices)
    if option.kind in ("int", "float"):
        return option.allowed.removesuffix(", or None")
    return option.values and option.text(option.values)


def _places(option: Option) -> str:
    struct = "SpeculativeOptions" if option.is_key else "ExecutorOptions"
    places = ["Python"] + ([f"C++ ({struct})"] if option.cpp is not None else [])
    places += [f"C ({_C})"] if option.c else []
    if option.is_key:
        places.append("--speculative-config")
    elif option.cli is not None:
        only = option.cli.get("commands")
        places.append(option.flag + (f" of {only}" if only else ""))
    return ", ".join(places)


def _entry(option: Option) -> Entry:
    default = f'"{option.default}"' if isinstance(option.default, str) else option.default
    facts = {
        "values": _allowed(option),
        "unit": option.unit or "",
        "methods": ", ".join(f'"{method}"' for method in option.methods),
        "where": _places(option),
        "since": option.since,
    }
    items = [Item([name], text) for name, text in facts.items() if text]
    code = f"{option.name}: {option.type} = {default}"
    sections = [Section(text=option.described), Section("", items=items)]
    return Entry([option.name], code, "python", sections)


def _group(title: str, text: str, options: Mapping[str, Option]) -> Group:
    return Group(title, text, [_entry(option) for option in options.values()])


def pages() -> list[Page]:
    """Makes the page of the options."""
    return [
        Page(
            "reference-options.md",
            "options",
            "Options reference",
            "Every option of an engine and every key of `speculative_config`, with its values, and "
            "where else it exists under the same name. `python/paceline/options.toml` has each "
            "once; checks, types, flags and structs come from there.",
            [
                _group(
                    "Keys of speculative_config",
                    'Keys that are not vLLM\'s stand under "x". A key that names methods is '
                    "refused with any other.",
                    KEYS,
                ),
                _group("Options of an engine", "The arguments of `LLM`.", ARGUMENTS),
            ],
        )
    ]
