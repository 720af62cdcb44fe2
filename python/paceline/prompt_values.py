# SPDX-License-Identifier: Apache-2.0
"""Logits and hidden states at every position of a prompt: `LLM.logits` and `LLM.hidden_states`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline import _core
from paceline.checks import check_int, wrong_value

if TYPE_CHECKING:
    from paceline.dispatcher import Dispatcher


def score_prompt(
    dispatcher: Dispatcher, token_ids: Sequence[int], **request: Any
) -> _core.RequestEvent:
    """Runs a request that generates nothing.

    Args:
        dispatcher: The engine's.
        token_ids: The prompt.
        **request: Arguments of `_core.Request`, which ask for logits or hidden states.

    Returns:
        The last event, which has what was asked for.

    Raises:
        ValueError: The prompt is not allowed.
        RuntimeError: The engine is closed or forked, or failed.
    """
    session = dispatcher.open()
    try:
        session.add_requests([_core.Request(token_ids, **request)])
        event = session.get()
        while event.finish_reason is None:
            event = session.get()
    finally:
        session.close()
    if event.finish_reason != "length":
        raise RuntimeError(
            f"the values of the prompt were not computed: {event.error or event.finish_reason}"
        )
    return event


def check_layers(layers: object, num_layers: int) -> list[int]:
    """Checks the `layers` of `LLM.hidden_states`.

    Args:
        layers: The value.
        num_layers: Layers of the target.

    Returns:
        Indices from 0 to `num_layers`.

    Raises:
        ValueError: It is no sequence of such indices, or has none.
    """
    allowed = f"indices from 0 (embeddings) to {num_layers} (after the final norm)"
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence) or not layers:
        raise wrong_value("layers", layers, f"a list of {allowed}, or from {-num_layers - 1} to -1")
    checked = [
        check_int(f"layers[{i}]", layer, -num_layers - 1, num_layers)
        for i, layer in enumerate(layers)
    ]
    return [layer % (num_layers + 1) for layer in checked]
