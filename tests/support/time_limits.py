# SPDX-License-Identifier: Apache-2.0
"""How long a test waits for what must happen."""

#: Seconds against hangs alone: a slow machine, or one that does other work, meets no such limit. A
#: test that fails by it raises a TimeoutError, TimeoutExpired or AssertionError that names it.
HANG_LIMIT_S = 600.0
