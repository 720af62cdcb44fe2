# SPDX-License-Identifier: Apache-2.0
"""How many outputs the server holds at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline.server.errors import ApiError, refusal

_RETRY_AFTER_S = 1


class Admission:
    """Counts the outputs that run or wait. For one event loop.

    Attributes:
        limit: The largest number of outputs.
        num_open: The outputs that run or wait now.
        num_refused: Requests that were refused because of the limit.
    """

    def __init__(self, limit: int) -> None:
        """Starts without outputs."""
        self.limit = limit
        self.num_open = 0
        self.num_refused = 0

    def check(self, num_outputs: int = 1) -> None:
        """Raises ApiError 429 if `num_outputs` more would exceed the limit."""
        if self.num_open + num_outputs > self.limit:
            self.num_refused += 1
            raise ApiError(
                429,
                f"the queue is full: {self.num_open} outputs run or wait, and {self.limit} are "
                "allowed; try again later, or start the server with a larger --max-num-seqs or "
                "--max-queue",
                code="queue_full",
                headers={"retry-after": str(_RETRY_AFTER_S)},
            )

    @contextlib.contextmanager
    def admit(self, num_outputs: int, param: str) -> Iterator[None]:
        """Holds places for the outputs of a request.

        Args:
            num_outputs: How many.
            param: The field of the request that says so.

        Raises:
            ApiError: As `check_size` and `check`.
        """
        self.check_size(num_outputs, param)
        self.check(num_outputs)
        self.num_open += num_outputs
        try:
            yield
        finally:
            self.num_open -= num_outputs

    def check_size(self, num_outputs: int, param: str) -> None:
        """Raises ApiError 400 if `num_outputs` exceeds the limit even of an idle server."""
        if num_outputs > self.limit:
            raise refusal(
                f"the request has {num_outputs} outputs; allowed: {self.limit}. Send several "
                "requests, or start the server with a larger --max-queue",
                param,
            )
