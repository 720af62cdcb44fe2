# SPDX-License-Identifier: Apache-2.0
"""How many outputs, and how many bytes of bodies, the server holds at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from paceline.server.errors import ApiError, refusal

#: Bytes of a body that the event loop parses and reads itself, in a few milliseconds at most.
MAX_SHORT_BODY: Final = 2**14
_RETRY_AFTER_S: Final = 1


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


class BodyBytes:
    """Counts the bytes of long bodies, from their arrival until nothing needs them any more. For
    one event loop.

    Bodies of MAX_SHORT_BODY bytes do not count: each connection may buffer more than that before
    its request is known, and a few long ones must not keep all others out.

    Attributes:
        limit: The largest number of bytes.
        num_held: Those that are held now.
    """

    def __init__(self, limit: int) -> None:
        """Starts without bodies."""
        self.limit = limit
        self.num_held = 0

    def check(self, num_bytes: int) -> None:
        """Raises ApiError 503 if a body of `num_bytes` would exceed the limit now."""
        if num_bytes > MAX_SHORT_BODY and self.num_held + num_bytes > self.limit:
            raise ApiError(
                503,
                f"the bodies of other requests take {self.num_held} bytes, this one {num_bytes}, "
                f"and {self.limit} are allowed together; try again later, send less, or start the "
                "server with a larger --max-body-bytes",
                code="bodies_full",
                headers={"retry-after": str(_RETRY_AFTER_S)},
            )


class HeldBytes:
    """The part of one body in `BodyBytes`."""

    def __init__(self, total: BodyBytes) -> None:
        """Starts without bytes."""
        self._total = total
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Notes that the body has `num_bytes` by now; ApiError as for `BodyBytes.check`."""
        self.release()
        self._total.check(num_bytes)
        if num_bytes > MAX_SHORT_BODY:
            self._num_bytes = num_bytes
            self._total.num_held += num_bytes

    def release(self) -> None:
        """Gives the bytes back. Doing it twice is fine."""
        self._total.num_held -= self._num_bytes
        self._num_bytes = 0
