# SPDX-License-Identifier: Apache-2.0
"""What a server and its replicas send each other: plain values that `pickle` reads."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline import _core

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine_options import ExecutorOptions
    from paceline.llm import LLM
    from paceline.loader import LoadedModel
    from paceline.speculative_config import SpeculativeConfig

# One entry for each of the tokens, as in `_core.RequestEvent`.
_Logprobs = Sequence[Sequence[tuple[int, float, int]]]


def unsendable(values: Mapping[str, Any]) -> Iterator[tuple[str, Exception]]:
    """Yields the names of values that no other process can read, each with the reason."""
    for name, value in values.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            yield name, error


class EngineRequest:
    """A request for an engine in another process: the arguments of `_core.Request`."""

    def __init__(self, prompt: Sequence[int], **sampling: Any) -> None:
        """Stores the arguments; the engine checks them.

        Raises:
            NotImplementedError: An argument, such as a constraint that is an object of this
                process, cannot be sent to another process.
        """
        for name, error in unsendable(sampling):
            raise NotImplementedError(
                f"{name} cannot be sent to a replica, which is another process: {error}"
            )
        self.prompt = list(prompt)
        self.sampling: dict[str, Any] = sampling

    @property
    def num_samples(self) -> int:
        """Samples of the prompt."""
        return int(self.sampling.get("num_samples", 1))


@dataclasses.dataclass(slots=True)
class EngineEvent:
    """An event of an engine in another process; the attributes are those of `_core.RequestEvent`
    that generated outputs are made of. With `is_refused`, `error` says that the request is not
    allowed."""

    id: int
    sample: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: _Logprobs = ()
    prompt_logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    error: str = ""
    is_refused: bool = False
    num_drafted: int = 0
    num_accepted: int = 0
    drafter: str = ""
    counters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_cached_tokens: int = 0
    arrival_us: int = 0
    first_token_us: int = 0
    finish_us: int = 0

    @classmethod
    def of(cls, event: _core.RequestEvent, run: int) -> EngineEvent:
        """Copies an event of this process's engine.

        Args:
            event: The event.
            run: The id that the copy gets.
        """
        is_last = event.finish_reason is not None
        return cls(
            id=run,
            sample=event.sample,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=event.finish_reason,
            error=event.error,
            num_drafted=event.num_drafted,
            num_accepted=event.num_accepted,
            drafter=event.drafter,
            counters=dict(event.counters) if is_last else {},
            num_cached_tokens=event.num_cached_tokens,
        )


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that a server needs of its replicas' engines, which are alike.

    Attributes:
        target: The target, without its weights.
        draft: The drafter, without its weights; None without one.
        config: The engine's configuration.
        speculative: The configuration of speculative decoding; None without it.
        max_model_len: Largest number of tokens of a request.
        options: The options in effect.
        capabilities: See `LLM.capabilities`. Asking CUDA in the server would take memory of a GPU.
        memory_report: Of one replica.
        stats: The result of `_core.Executor.stats` when they were collected.
        device: The class of the device; see `_core.device_class`.
    """

    target: LoadedModel
    draft: LoadedModel | None
    config: EngineConfig
    speculative: SpeculativeConfig | None
    max_model_len: int
    options: ExecutorOptions
    capabilities: dict[str, Any]
    memory_report: dict[str, Any]
    stats: dict[str, Any]
    device: str

    @classmethod
    def of(cls, llm: LLM, executor: _core.Executor) -> Facts:
        """Collects the facts of an engine in this process."""
        return cls(
            target=_without_weights(llm.target),
            draft=None if llm.draft is None else _without_weights(llm.draft),
            config=llm.config,
            speculative=llm.speculative_config,
            max_model_len=llm.max_model_len,
            options=executor.options,
            capabilities=llm.capabilities(),
            memory_report=executor.memory_report(),
            stats=executor.stats(),
            device=_core.device_class(llm.target.model.device),
        )


def _without_weights(model: LoadedModel) -> LoadedModel:
    stub: Any = SimpleNamespace(device=model.model.device)
    return dataclasses.replace(model, model=stub, hf_config=None)
