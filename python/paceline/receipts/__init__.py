# SPDX-License-Identifier: Apache-2.0
"""Receipts of outputs, which a replay on the same weights verifies. docs/receipts.md defines them.

`receipt` has the format, `maker` makes receipts of requests, `replay` verifies them, and `digests`
has the digests in them.
"""
