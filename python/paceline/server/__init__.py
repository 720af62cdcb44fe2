# SPDX-License-Identifier: Apache-2.0
"""The HTTP server, `paceline serve`; needs the extra [server]. docs/server.md describes it."""
