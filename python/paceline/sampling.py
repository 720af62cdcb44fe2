# SPDX-License-Identifier: Apache-2.0
"""How the tokens of one request are chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from paceline.config import MAX_SEED, check_int

MAX_STOP_TOKEN_IDS: Final = 8


class _RefuseUnknownKeywords(type):
    """Names what exists when a keyword that other engines take is not there yet."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        allowed = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in kwargs:
            if key not in allowed:
                raise TypeError(
                    f"SamplingParams has no parameter {key!r} in this version; "
                    f"it has: {', '.join(allowed)}"
                )
        return super().__call__(*args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(metaclass=_RefuseUnknownKeywords):
    """Sampling of one request.

    Attributes:
        temperature: 0 = greedy, else the logits are divided by it before the draw; finite, >= 0.
        max_tokens: Most tokens to emit, >= 1. Prompt and output together also end at
            `max_model_len`.
        seed: Same seed, prompt and model: same tokens, whatever else runs. None = derived from the
            LLM's seed and the number of the request, see `LLM.generate`.
        stop_token_ids: The request ends after any of these, besides the checkpoint's own
            end-of-sequence ids. The stop token is in `token_ids` and not in `text`. At most 8 in
            all.
        ignore_eos: Do not end at the checkpoint's end-of-sequence ids.

    Raises:
        ValueError: A value that is not allowed; names the parameter.
        TypeError: A parameter that does not exist; lists those that do.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        value = self.temperature
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < 0
        ):
            raise ValueError(f"temperature is {value!r}; allowed: a finite number >= 0")
        object.__setattr__(self, "temperature", float(value))
        max_tokens = check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        object.__setattr__(self, "max_tokens", max_tokens)
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0, MAX_SEED))
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(
            self.stop_token_ids, Sequence
        ):
            raise ValueError(
                f"stop_token_ids is {self.stop_token_ids!r}; allowed: a sequence of token ids"
            )
        stop_token_ids = tuple(
            check_int(f"stop_token_ids[{i}]", token, 0, 2**31 - 1)
            for i, token in enumerate(self.stop_token_ids)
        )
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(stop_token_ids)} entries; "
                f"allowed: at most {MAX_STOP_TOKEN_IDS}"
            )
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; allowed: True or False")
