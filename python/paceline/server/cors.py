# SPDX-License-Identifier: Apache-2.0
"""Pages of other origins that may use the server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from paceline.checks import shorten

if TYPE_CHECKING:
    from paceline.server.guard import App

_logger = logging.getLogger("paceline")

ANY: Final = "*"
# Headers of responses that pages may read beside those that every page may.
_EXPOSED: Final = ("x-request-id", "request-id", "retry-after", "traceparent", "tracestate")


def check_origins(origins: Sequence[str]) -> None:
    """Checks the origins of --cors-origin.

    Raises:
        ValueError: One is neither an origin nor "*".
    """
    for origin in origins:
        if origin != ANY and not _is_origin(origin):
            raise ValueError(
                f"--cors-origin is {shorten(origin)}; allowed: an origin as browsers send it, in "
                "lower case and without a path, such as https://example.org or "
                "http://localhost:3000, or '*' for all"
            )


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    is_bare = text == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    return is_bare and bool(parts.hostname) and text == text.lower()


def allow_origins(app: App, origins: Sequence[str], *, has_key: bool) -> App:
    """Lets pages of other origins use an application.

    Args:
        app: The application, whose checks of keys and hosts hold for these pages too.
        origins: The origins; none = the application stays as it is.
        has_key: Whether requests need an API key.
    """
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    if ANY in origins and not has_key:
        _logger.warning(
            "--cors-origin is '*' and there is no --api-key: every page that a browser on this "
            "machine opens can use the server"
        )
    # Browsers ask without the key whether they may send a request with it, so this comes first.
    made: Any = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY,),
        expose_headers=_EXPOSED,
    )
    allowed: App = made
    return allowed
