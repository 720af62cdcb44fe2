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

from paceline.server.connection import JsonResponse, Send
from paceline.server.errors import ApiError
from paceline.server.metrics import RequestFigures
from paceline.server.traces import REQUEST_SPAN, Traces

_logger = logging.getLogger("paceline.access")

#: The key of a request's id in its ASGI scope.
REQUEST_ID: Final = "paceline.request_id"
#: The routes of Anthropic's API.
MESSAGE_PATHS: Final = ("/v1/messages", "/v1/messages/count_tokens")
#: Need no key: supervisors poll the first two, the page asks for the key itself, and the others say
#: nothing of this server.
OPEN_PATHS: Final = ("/health", "/ping", "/", "/docs", "/openapi.json")
# Ids are unique, not secret: one random number for the process, which takes time to draw.
_PROCESS: Final = uuid.uuid4().hex[:16].encode()
_NUMBERS: Final = itertools.count()
_ID: Final = re.compile(rb"[\w.-]{1,128}", re.ASCII)
_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
# Of W3C's Trace Context: version, trace id, parent id, flags.
_TRACEPARENT: Final = re.compile(rb"[\da-f]{2}-([\da-f]{32})-[\da-f]{16}-[\da-f]{2}")


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> JsonResponse:
    """Makes the response for an error, in the form of the API that the request is for."""
    is_message = scope["path"] in MESSAGE_PATHS
    body = error.message_body(scope[REQUEST_ID]) if is_message else error.body()
    return JsonResponse(body, status_code=error.status, headers=error.headers)


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
        traces: Traces | None = None,
    ) -> None:
        """Reads the id of a request, or makes one.

        Args:
            scope: The request. It gets the key REQUEST_ID, and with `traces` REQUEST_SPAN.
            send: The connection.
            figures: Counts the response.
            route: The name of the route in the figures.
            is_logged: Whether `end` logs the request.
            traces: Begins the request's span; None = it gets none.
        """
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self._id = given if _ID.fullmatch(given) else b"%s%016x" % (_PROCESS, next(_NUMBERS))
        scope[REQUEST_ID] = self._id.decode()
        self._headers = [(b"x-request-id", self._id)]
        if route in MESSAGE_PATHS:
            self._headers.append((b"request-id", self._id))
        trace_id = ""
        self._span = None if traces is None else traces.begin(scope["headers"], route)
        if self._span is not None:
            scope[REQUEST_SPAN] = self._span
            trace_id = self._span.trace_id
            self._headers += self._span.headers()
        elif found := _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"")):
            trace_id = found[1].decode()
            self._headers += [
                (key, value) for key, value in scope["headers"] if key in _TRACE_HEADERS
            ]
        self._trace = f", trace {trace_id}" if trace_id else ""
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
        """Ends the span, and logs the request, without what it says."""
        if self._span is not None:
            self._span.end(self._status)
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
