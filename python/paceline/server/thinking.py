# SPDX-License-Identifier: Apache-2.0
"""How requests say whether a model thinks and how much, and the variables of chat templates that do
it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from paceline.checks import shorten
from paceline.server.errors import refusal
from paceline.server.formats import Format

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_EFFORTS_OF_HARMONY: Final = ("low", "medium", "high")
_EFFORT: Final = "reasoning_effort"
_SWITCHES: Final = ("enable_thinking", "thinking")


class Thinking(NamedTuple):
    """The settings of thinking that a model's chat template reads.

    Attributes:
        efforts: The values of its variable `reasoning_effort`; empty if it has none.
        switch: The name of its variable that switches thinking on and off; None if it has none.
        begins: Whether a prompt ends with the tag before reasoning: without the switch, with it on,
            with it off.
    """

    efforts: tuple[str, ...] = ()
    switch: str | None = None
    begins: tuple[bool, bool, bool] = (False, False, False)

    def begins_with(self, variables: Mapping[str, Any] | None) -> bool:
        """Returns whether the prompt of a request ends with the tag before reasoning.

        Args:
            variables: Those of the chat template; None = there are none.
        """
        value = (variables or {}).get(self.switch or "")
        return self.begins[1 if value is True else 2 if value is False else 0]


def thinking_of(
    variables: Collection[str],
    text_format: Format | None,
    render: Callable[[dict[str, Any]], str] | None = None,
) -> Thinking:
    """Finds out how a template's thinking is chosen.

    Args:
        variables: The variables that the template reads.
        text_format: How the model writes messages; None = unknown.
        render: Renders a prompt with the values of some variables; None = there is no template.
    """
    is_harmony = text_format is not None and text_format.name == "openai"
    efforts = _EFFORTS_OF_HARMONY if is_harmony else EFFORTS
    switch = next((name for name in _SWITCHES if name in variables), None)

    def begins(given: dict[str, Any]) -> bool:
        if render is None or text_format is None or not text_format.thought:
            return False
        try:
            return render(given).rstrip().endswith(text_format.thought)
        except ValueError:  # a request tells it
            return False

    states = [{}, *({switch: state} if switch else {} for state in (True, False))]
    without, on, off = map(begins, states)
    return Thinking(efforts if _EFFORT in variables else (), switch, (without, on, off))


def with_effort(
    given: dict[str, Any] | None, effort: Any, thinking: Thinking, name: str = _EFFORT
) -> dict[str, Any] | None:
    """Adds an effort to the variables of the chat template, if the template reads one.

    A template with a switch thinks unless the effort is "none". One with neither gets nothing.

    Args:
        given: The variables so far; None = there are none.
        effort: The effort; None = that of the template.
        thinking: What the template reads.
        name: The name of the effort in errors.

    Returns:
        The variables.

    Raises:
        ApiError: There is no such effort, or `given` says it already.
    """
    if effort is None:
        return given
    allowed = thinking.efforts or EFFORTS
    if effort not in allowed:
        raise refusal(
            f"{name} is {shorten(effort)}; allowed with this model: {', '.join(allowed)}",
            name.partition(".")[0],
        )
    added: dict[str, Any] = {}
    if thinking.efforts:
        added[_EFFORT] = effort
    elif thinking.switch is not None:
        added[thinking.switch] = effort != "none"
    for key in added:
        if key in (given or {}):
            raise refusal(
                f"{name} is given, and {key} in chat_template_kwargs is too; allowed: one of them",
                name.partition(".")[0],
            )
    return {**(given or {}), **added} if added else given


def with_switch(
    given: dict[str, Any] | None, is_on: bool | None, thinking: Thinking
) -> dict[str, Any] | None:
    """Switches thinking on or off with the variable of the chat template.

    Args:
        given: The variables so far; None = there are none.
        is_on: Whether the model is to think; None = as it does by itself.
        thinking: What the template reads.

    Returns:
        The variables.

    Raises:
        ApiError: The template has no such variable, or `given` says it already.
    """
    if is_on is None or (is_on and thinking.efforts):
        return given  # a model with efforts thinks in any case
    if not is_on and thinking == Thinking():
        return given  # it does not think
    if thinking.switch is None:
        raise refusal(
            f"thinking is {'enabled' if is_on else 'disabled'}, but this model's chat template "
            "has no switch for it; leave it out",
            "thinking",
        )
    if thinking.switch in (given or {}):
        raise refusal(
            f"thinking is given, and {thinking.switch} in chat_template_kwargs is too; allowed: "
            "one of them",
            "thinking",
        )
    return {**(given or {}), thinking.switch: is_on}
