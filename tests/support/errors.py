# SPDX-License-Identifier: Apache-2.0
"""Comparing error messages in tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def raises(kind: type[Exception], *parts: object) -> Any:
    """Expects an error whose message holds every part, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(str(part)) for part in parts))


def refuses(call: Callable[[], Any], *parts: object, kind: type[Exception] = ValueError) -> None:
    """Makes a call and expects an error of it, as `raises` does."""
    with raises(kind, *parts):
        call()
