# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one server; docs/replicas.md describes them.

An engine in a process of its own is a *replica*. The server's process keeps the text of requests
and their tokens so far, so that a request goes on elsewhere when its replica ends.
"""
