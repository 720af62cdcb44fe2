# SPDX-License-Identifier: Apache-2.0
"""Verifies receipts of outputs. docs/receipts.md defines them.

`receipt` has the format, `maker` makes receipts of requests, `replay` verifies them, and `digests`
has the digests in them. Each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.receipts.receipt import ReceiptError, check_receipt, read_receipts
    from paceline.receipts.replay import Inputs, Verdict, verify

__all__ = ["Inputs", "ReceiptError", "Verdict", "check_receipt", "read_receipts", "verify"]

_MODULE_OF: Final = {
    "ReceiptError": "receipt",
    "check_receipt": "receipt",
    "read_receipts": "receipt",
    "Inputs": "replay",
    "Verdict": "replay",
    "verify": "replay",
}


# An LLM makes receipts and `replay` runs an LLM, so an import at the top would be a cycle.
def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
