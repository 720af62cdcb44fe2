# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `paceline bench latency` and its parts."""
