# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: the one that has the KV of its first blocks, unless it is busy.

A replica's own prefix cache decides what is taken over. What is known here is what was sent to
whom, which is wrong only about what a replica has evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

# A replica may hold more outputs than the least busy one by this share of those that it can run.
_SLACK_SHARE: Final = 0.25
_MIN_SLACK: Final = 2
_NOTHING: Final[OrderedDict[int, None]] = OrderedDict()


def block_keys(tokens: Sequence[int], block_size: int, cache_salt: str = "") -> list[int]:
    """Names the full blocks of a prompt: each by the salt, its tokens and all tokens before it.

    Two blocks may have the same name by accident, which costs a worse choice and nothing else.
    """
    keys: list[int] = []
    key = hash(cache_salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        key = hash((key, tuple(tokens[end - block_size : end])))
        keys.append(key)
    return keys


class PrefixRouter:
    """Chooses replicas. For one thread at a time."""

    def __init__(self, *, block_size: int, max_blocks: int, max_num_seqs: int) -> None:
        """Starts without knowledge.

        Args:
            block_size: Tokens of a block.
            max_blocks: Blocks of a replica that are remembered; those used least recently go.
            max_num_seqs: Outputs that a replica can run at the same time.
        """
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._slack = max(_MIN_SLACK, int(max_num_seqs * _SLACK_SHARE))
        self._known: dict[Hashable, OrderedDict[int, None]] = {}
        self._turns: dict[Hashable, int] = {}  # when each was chosen last
        self._turn = 0

    def choose(self, keys: Sequence[int], num_open: Mapping[Hashable, int]) -> Hashable:
        """Chooses the replica of a request, and remembers that it gets the prompt.

        Args:
            keys: The `block_keys` of the prompt.
            num_open: The replicas that take requests, and the outputs that each holds; not empty.

        Returns:
            The first of `ranked`.
        """
        chosen = self.ranked(keys, num_open)[0]
        self.note_chosen(chosen, keys)
        return chosen

    def ranked(self, keys: Sequence[int], num_open: Mapping[Hashable, int]) -> list[Hashable]:
        """Sorts replicas, the best one first; for the arguments see `choose`.

        Replicas that hold at most the slack more outputs than the least busy one come first. Of
        these, those with most of the first blocks; then the least busy ones; then those that were
        not chosen for longest.
        """
        most = min(num_open.values()) + self._slack
        return sorted(
            num_open,
            key=lambda replica: (
                num_open[replica] > most,
                -self.num_known(replica, keys),
                num_open[replica],
                self._turns.get(replica, 0),
            ),
        )

    def note_chosen(self, replica: Hashable, keys: Sequence[int]) -> None:
        """Remembers that a replica gets a prompt."""
        self._turn += 1
        self._turns[replica] = self._turn
        self.note(replica, keys)

    def num_known(self, replica: Hashable, keys: Sequence[int]) -> int:
        """Returns the number of first blocks that a replica has."""
        known = self._known.get(replica, _NOTHING)
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)

    def note(self, replica: Hashable, keys: Sequence[int]) -> None:
        """Remembers that a replica has blocks."""
        known = self._known.setdefault(replica, OrderedDict())
        # The first blocks last: they are of use to most, so they go last.
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """Forgets the blocks of a replica that has ended."""
        self._known.pop(replica, None)
        self._turns.pop(replica, None)
