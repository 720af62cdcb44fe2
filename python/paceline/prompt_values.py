# SPDX-License-Identifier: Apache-2.0
"""Logits and hidden states at every position of a prompt: `LLM.logits` and `LLM.hidden_states`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from paceline import _core
from paceline.checks import check_int, wrong_value

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from paceline.dispatcher import Dispatcher

# How often, and after which pause, hidden states are asked for again while the queue is full.
_NUM_TRIES: Final = 100
_PAUSE_S: Final = 0.1


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


def patient_hidden_states(
    dispatcher: Dispatcher, token_ids: Sequence[int], layers: Sequence[int]
) -> npt.NDArray[np.float32]:
    """Computes hidden states beside other requests; waits while too many are queued.

    Args:
        dispatcher: The engine's.
        token_ids: The prompt.
        layers: The result of `check_layers`.

    Returns:
        As `LLM.hidden_states`.

    Raises:
        Exception: As for `score_prompt`.
    """
    for rest in reversed(range(_NUM_TRIES)):
        try:
            states = score_prompt(dispatcher, token_ids, hidden_layers=layers).hidden_states
            break
        except NotImplementedError:
            raise
        except RuntimeError:
            dispatcher.check_running()
            if not rest:
                raise
        time.sleep(_PAUSE_S)
    assert states is not None
    return states.numpy()


def check_layers(layers: object, num_layers: int, name: str = "layers") -> list[int]:
    """Checks the `layers` of `LLM.hidden_states`.

    Args:
        layers: The value.
        num_layers: Layers of the target.
        num_layers: Layers of the target.
        name: Its name, for the message.

    Returns:
        Indices from 0 to `num_layers`.

    Raises:
        ValueError: It is no sequence of such indices, or has none.
    """
    allowed = f"indices from 0 (embeddings) to {num_layers} (after the final norm)"
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence) or not layers:
        raise wrong_value(name, layers, f"a list of {allowed}, or from {-num_layers - 1} to -1")
    checked = [
        check_int(f"{name}[{i}]", layer, -num_layers - 1, num_layers)
        for i, layer in enumerate(layers)
    ]
    return [layer % (num_layers + 1) for layer in checked]
