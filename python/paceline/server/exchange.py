# SPDX-License-Identifier: Apache-2.0
"""A request and its response, from outside: its id, its trace, its status and its time."""

from __future__ import annotations

import itertools
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any, Final

from paceline.server.connection import Send
from paceline.server.metrics import RequestFigures

_logger = logging.getLogger("paceline.access")

#: The key of a request's id in its ASGI scope.
REQUEST_ID: Final = "paceline.request_id"
# Ids are unique, not secret: one random number for the process, which takes time to draw.
_PROCESS: Final = uuid.uuid4().hex[:16].encode()
_NUMBERS: Final = itertools.count()
_ID: Final = re.compile(rb"[\w.-]{1,128}", re.ASCII)
# Of W3C's Trace Context: version, trace id, parent id, flags.
_TRACEPARENT: Final = re.compile(rb"[\da-f]{2}-([\da-f]{32})-[\da-f]{16}-[\da-f]{2}")


class Exchange:
    """Counts and logs a response, and gives it the id and the trace of its request."""

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        send: Send,
        figures: RequestFigures,
        *,
        route: str,
        is_logged: bool,
    ) -> None:
        """Reads the id of a request, or makes one.

        Args:
            scope: The request. It gets the key REQUEST_ID.
            send: The connection.
            figures: Counts the response.
            route: The name of the route in the figures.
            is_logged: Whether `end` logs the request.
        """
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self._id = given if _ID.fullmatch(given) else b"%s%016x" % (_PROCESS, next(_NUMBERS))
        scope[REQUEST_ID] = self._id.decode()
        self._headers = [(b"x-request-id", self._id)]
        trace = headers.get(b"traceparent", b"")
        found = _TRACEPARENT.fullmatch(trace)
        self._trace = "" if found is None else f", trace {found[1].decode()}"
        if found is not None:
            self._headers.append((b"traceparent", trace))
        self._scope = scope
        self._send = send
        self._figures = figures
        self._route = route
        self._is_logged = is_logged
        self._started = time.monotonic()
        self._status = 0  # 0 = the client has gone away

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Sends a part of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._figures.num_responses[self._route, self._status] += 1
            message = {**message, "headers": [*message["headers"], *self._headers]}
        await self._send(message)

    def end(self) -> None:
        """Logs the request, without what it says."""
        if self._is_logged:
            _logger.info(
                "%s %s: %s in %.0f ms, request %s%s",
                self._scope["method"],
                self._route,
                self._status or "gone",
                (time.monotonic() - self._started) * 1e3,
                self._id.decode(),
                self._trace,
            )
