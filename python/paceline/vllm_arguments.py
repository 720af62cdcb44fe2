# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM that Paceline lacks: which values change nothing, and what to do instead.

A value that would change nothing is accepted. Others are refused, all of a call in one error that
ends with this advice, which vllm_arguments.toml has.
"""

from __future__ import annotations

import enum
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

#: The beginning of advice that is a reason; what accepts a value leaves it out.
LEAVE_OUT: Final = "leave it out: "


@dataclass(frozen=True)
class Advice:
    """An argument of vLLM that Paceline lacks.

    Attributes:
        text: What to do instead of giving it.
        harmless: The values that change nothing; "all" of them, as far as outputs go.
        is_switch: Whether vLLM's flag of that name has no value.
    """

    text: str
    harmless: tuple[object, ...] | Literal["all"] = ()
    is_switch: bool = False

    def accepts(self, value: object) -> bool:
        """Returns whether a value changes nothing; True is not 1, and enum members go by name."""
        if isinstance(value, enum.Enum):
            value = value.name
        return self.harmless == "all" or any(
            type(value) is type(one) and value == one for one in self.harmless
        )

    @property
    def plain(self) -> str:
        """The advice for an error."""
        return self.text.replace("`", "")


def _advice(kind: str, text: str, *values: object) -> Advice:
    """An argument of a table of vllm_arguments.toml, which explains the kinds."""
    text = re.sub(r"<(\w+)>", lambda name: _TABLES["texts"][name[1]], text)
    is_switch = kind == "off" or kind.endswith("_switch")
    kind = kind.removesuffix("_switch")
    if kind == "any":
        reason = text if text.startswith("leave it out") else LEAVE_OUT + text
        return Advice(reason, "all", is_switch)
    accepted: dict[str, tuple[object, ...]] = {"none": (None,), "off": (None, False), "only": ()}
    return Advice(text, (*accepted[kind], *values), is_switch)


def _advices(owner: str) -> dict[str, Advice]:
    """The arguments of an owner, in order of name."""
    found = {
        name: _advice(kind, *([entry] if isinstance(entry, str) else entry))
        for kind, arguments in _TABLES[owner].items()
        for name, entry in arguments.items()
    }
    return dict(sorted(found.items()))


_TABLES: Final[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_SERVE: Final = "paceline serve"
#: By owner and argument.
ADVICE: Final = {owner: _advices(owner) for owner in _TABLES if owner not in ("texts", _SERVE)}
#: By flag of `vllm serve`; those that are arguments of its `LLM` are above.
FLAGS: Final = _advices(_SERVE)
#: Arguments that both have, with fewer values here: refused with others of the same call.
_FEWER_VALUES: Final[dict[str, dict[str, Advice]]] = {
    "LLM": {
        "dtype": Advice(
            "'auto' loads a checkpoint in float16 as float32, which is lossless",
            ("auto", "float32", "bfloat16"),
        ),
    },
}
_SAME: Final = {
    "AsyncLLM": "LLM",
    "AsyncLLM.chat": "LLM.chat",
    "AsyncLLM.generate": "LLM.generate",
    "AsyncLLM.stream_chat": "LLM.chat",
    "EngineConfig": "LLM",
}


def advice_for(owner: str, argument: str) -> Advice | None:
    """The advice for an argument of vLLM; None if there is none.

    Args:
        owner: What has no such argument, as in errors.
        argument: The argument.
    """
    return ADVICE.get(_SAME.get(owner, owner), {}).get(argument)


def is_harmless(owner: str, argument: str, value: object) -> bool:
    """Returns whether a value of an argument of vLLM changes nothing."""
    advice = advice_for(owner, argument)
    return advice is not None and advice.accepts(value)


def advice_end(owner: str, argument: str) -> str:
    """The end of an error about an argument that does not exist; "" without advice."""
    advice = advice_for(owner, argument)
    return "" if advice is None else f"; {advice.plain}"


def refused_too(owner: str, given: Mapping[str, object]) -> dict[str, str]:
    """Which arguments that exist here have a value that vLLM alone takes, and the advice.

    Args:
        owner: As for `advice_for`.
        given: Arguments and their values.
    """
    fewer = _FEWER_VALUES.get(_SAME.get(owner, owner), {})
    return {
        name: fewer[name].plain
        for name, value in given.items()
        if name in fewer and not fewer[name].accepts(value)
    }


def flag_advice(name: str) -> Advice | None:
    """The advice for a flag of `vllm serve`, such as "enforce_eager"; None if there is none."""
    return FLAGS.get(name) or ADVICE["LLM"].get(name)


def flag_value(text: str) -> Any:
    """The value that vLLM reads from the text of a flag."""
    if text in ("None", "none"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
