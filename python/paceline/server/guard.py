# SPDX-License-Identifier: Apache-2.0
"""What every request passes before its route: key, host, limits, and the reading of its body."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from paceline.checks import shorten
from paceline.server.bodies import BODY, ClientGone, Receive, read_body, too_large
from paceline.server.connection import Send
from paceline.server.errors import ApiError
from paceline.server.exchange import MESSAGE_PATHS, OPEN_PATHS, Exchange, error_response
from paceline.server.openapi import PATHS
from paceline.server.service import Service

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Of the path and all headers.
MAX_HEADER_BYTES: Final = 16 * 2**10
#: The key of a request's API key in its ASGI scope; without a key on the server there is none.
API_KEY: Final = "paceline.api_key"
GENERATING_PATHS: Final = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
# These make outputs, or the token ids for one, so they are refused while the server is full, before
# their body is read.
_ADMITTED_PATHS: Final = (*GENERATING_PATHS, *MESSAGE_PATHS, "/tokenize", "/detokenize")
# A refused body is read to its end, or as far as this, because most clients read no answer before
# they have sent all. Its time is limited as that of other bodies, and so are pauses.
_DISCARD_BYTES: Final = 2**30
_DISCARD_PAUSE_S: Final = 2.0


class Guard:
    """An ASGI application around another one. Refuses by default: each path but those of
    `OPEN_PATHS` needs the key."""

    def __init__(self, app: App, service: Service) -> None:
        """Takes the application that has the routes."""
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        service = self._service
        generates = scope["method"] == "POST" and scope["path"] in GENERATING_PATHS
        exchange = Exchange(
            scope,
            send,
            service.figures,
            route=scope["path"] if scope["path"] in PATHS else "other",
            is_logged=service.has_access_log,
            traces=service.traces if generates else None,
        )
        try:
            await self._answer(scope, receive, exchange.send)
        finally:
            exchange.end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._service.limits
        body = None
        try:
            headers = {key: value for key, value in scope["headers"]}
            self._check(scope, headers)
            if scope["method"] == "POST":
                body = scope[BODY] = await read_body(
                    receive,
                    max_bytes=limits.max_body_bytes,
                    timeout_s=limits.read_timeout_s,
                    total=self._service.body_bytes,
                )
        except ClientGone:
            return
        except ApiError as error:
            await _refuse(error, scope, receive, send, discard_s=limits.read_timeout_s)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if body is not None:
                body.release()

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Checks all that is known without the body."""
        path = scope["path"]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        num_bytes += sum(len(key) + len(value) for key, value in scope["headers"])
        if num_bytes > MAX_HEADER_BYTES:
            raise ApiError(
                431,
                f"the path and the headers have {num_bytes} bytes; allowed: {MAX_HEADER_BYTES}",
                headers={"connection": "close"},
            )
        if path in OPEN_PATHS:
            return
        self._check_key(scope, headers)
        if scope["method"] != "POST":
            return
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        # A page of another site can send other types without asking the browser's user.
        if kind != b"application/json":
            raise ApiError(
                415, f"content-type is {shorten(kind.decode('latin-1'))}; allowed: application/json"
            )
        limit = self._service.limits.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > limit:
            raise too_large(limit)
        if path in _ADMITTED_PATHS:
            if self._service.is_draining:
                raise ApiError(503, "the server is about to end; send the request to another one")
            self._service.admission.check()
        self._service.body_bytes.check(int(length))

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Checks the request's API key and notes it in its scope."""
        keys = self._service.api_keys
        if not keys:
            _check_host(headers.get(b"host", b"").decode("latin-1"))
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # Clients of Anthropic's API send the second, and may send both.
        sent = (bearer if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        # Compares with all, so that the time does not tell which one is alike.
        found = [
            key for given in sent for key in keys if secrets.compare_digest(given, key.encode())
        ]
        if found:
            scope[API_KEY] = found[0]
        else:
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY', or "
                "'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _check_host(host: str) -> None:
    """Refuses names of other hosts: a web page could have its own name lead to this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return
    if name != "localhost":
        raise ApiError(
            403,
            f"the header host is {shorten(host)}; allowed without an API key: localhost, or an "
            "address. Start the server with --api-key",
        )


async def _refuse(
    error: ApiError, scope: Scope, receive: Receive, send: Send, *, discard_s: float
) -> None:
    """Sends an error at once, and then reads on for a while: a connection that is closed while its
    client still writes loses the answer."""
    response = error_response(error, scope)
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": response.raw_headers,
        }
    )
    is_head = scope["method"] == "HEAD"
    body = b"" if is_head else response.body
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if scope["method"] == "POST":
        num_bytes, is_more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(discard_s):
                while is_more and num_bytes < _DISCARD_BYTES:
                    message = await asyncio.wait_for(receive(), _DISCARD_PAUSE_S)
                    num_bytes += len(message.get("body", b""))
                    is_more = message.get("more_body", False)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
