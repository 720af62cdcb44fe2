# SPDX-License-Identifier: Apache-2.0
"""The live page at /: one document with its style and its script, which needs no other host."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Final

_SCRIPTS: Final = ("client.js", "figures.js", "page.js")


def page() -> tuple[bytes, dict[str, str]]:
    """Reads the page.

    Returns:
        The document, and its headers. Its policy allows the page's own style and script, by their
        hashes, and requests to the server that it came from.
    """
    style = read_part("page.css")
    script = "\n".join(map(read_part, _SCRIPTS))
    html = read_part("page.html").replace("/* style */", style).replace("/* script */", script)
    allowed = {
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
    }
    return html.encode(), policy_headers(style, allowed)


def policy_headers(style: str, allowed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Makes the headers of a page.

    Args:
        style: Its style.
        allowed: What its policy allows beside the style; None = nothing.
    """
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        **(allowed or {}),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(" ".join(rule) for rule in policy.items()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def read_part(name: str) -> str:
    """Reads a file of the folder `page`."""
    return (resources.files("paceline.server") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
