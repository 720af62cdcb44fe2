# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm serve` on the command line of `paceline serve`.

Those whose value changes nothing are taken off it; the others are refused, all in one error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.vllm_arguments import flag_advice, flag_value, refused_too


def take_flags(words: Sequence[str], own: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes vLLM's flags off a command line.

    Args:
        words: The command line.
        own: The flags that Paceline has.

    Returns:
        The rest, and the flags' values by name, such as {"swap_space": 4}.
    """
    rest, given = [], {}
    left = list(words)
    while left:
        word = left.pop(0)
        flag, has_value, text = word.partition("=")
        name = flag.removeprefix("--").partition(".")[0].replace("-", "_")
        is_negative = flag_advice(name) is None and name.startswith("no_")
        name = name.removeprefix("no_") if is_negative else name
        advice = flag_advice(name)
        if advice is None or not flag.startswith("--") or flag in own:
            rest.append(word)
        elif has_value:
            given[name] = flag_value(text)
        elif advice.is_switch or not left or left[0].startswith("--"):
            given[name] = not is_negative
        else:
            given[name] = flag_value(left.pop(0))
    return rest, given


def refusals(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns what to do instead of each flag that would change something, by the flag.

    Args:
        given: The result of `take_flags`.
        options: Paceline's own options by name. Values that vLLM alone takes are refused here only
            beside other flags, since their own errors say more.
    """
    refused = {}
    for name, value in given.items():
        advice = flag_advice(name)
        if advice is not None and not advice.accepts(value):
            refused[_words(name, value)] = advice.plain
    if refused:
        for name, text in refused_too("LLM", options).items():
            refused[_words(name, options[name])] = text
    return refused


def words_of(given: Mapping[str, Any]) -> str:
    """The flags for a message."""
    return ", ".join(_words(name, value) for name, value in given.items())


def _words(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
