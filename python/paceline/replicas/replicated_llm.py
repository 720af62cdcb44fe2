# SPDX-License-Identifier: Apache-2.0
"""`ReplicatedLLM`: an `LLM` whose engines run in other processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from paceline.dispatcher import Dispatcher
from paceline.llm import LLM
from paceline.replicas.messages import Facts
from paceline.replicas.placement import place
from paceline.replicas.remote import RemoteExecutor
from paceline.replicas.replica_set import ReplicaSet

if TYPE_CHECKING:
    from paceline import _core


class ReplicatedLLM(LLM):
    """Prompts, text and outputs of requests whose tokens replicas generate.

    It has no weights: `logits`, `hidden_states`, `update_weights`, `set_drafter` and
    `update_drafter` are refused.
    """

    def __init__(self, executor: RemoteExecutor, facts: Facts) -> None:
        """Takes over an executor.

        Args:
            executor: Runs the requests.
            facts: Of its engines.
        """
        self._facts = facts
        self._describe(
            facts.target,
            facts.draft,
            facts.config,
            facts.speculative,
            max_model_len=facts.max_model_len,
            device=facts.device,
        )
        # It has all that a dispatcher and the methods that are left call.
        self._dispatcher = Dispatcher(
            cast("_core.Executor", executor),
            cast("Callable[..., _core.Request]", executor.make_request),
        )

    def capabilities(self) -> dict[str, Any]:
        """See `LLM.capabilities`; those of a replica."""
        return copy.deepcopy(self._facts.capabilities)

    def update_weights(
        self,
        state_dict: Mapping[str, Any],
        *,
        draft_state_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Is refused.

        Raises:
            NotImplementedError: In every case: the weights are in the processes of the engines.
        """
        raise NotImplementedError("replicas keep their weights; start them again with new ones")

    def set_drafter(self, speculative_config: object, **options: object) -> None:
        """Is refused.

        Raises:
            NotImplementedError: In every case: the drafters are in the processes of the engines.
        """
        raise NotImplementedError("replicas keep their drafter; start them again with another one")

    def update_drafter(self, state_dict: Mapping[str, Any]) -> None:
        """Is refused.

        Raises:
            NotImplementedError: As for `update_weights`.
        """
        raise NotImplementedError("replicas keep their weights; start them again with new ones")


def start_replicas(
    num_replicas: int, arguments: Mapping[str, Any], *, log_level: str
) -> ReplicatedLLM:
    """Starts engines on this machine, each in a process of its own.

    Args:
        num_replicas: How many.
        arguments: Those of `LLM`, for each of them.
        log_level: That of their loggers.

    Returns:
        The LLM that they run for, which ends them when it is closed.

    Raises:
        ValueError: There are fewer GPUs, or an argument cannot be sent to another process.
        Exception: What `LLM` raises.
    """
    executor = ReplicaSet(*place(num_replicas, arguments, os.environ), log_level=log_level)
    return ReplicatedLLM(executor, executor.facts)
