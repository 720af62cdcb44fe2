# SPDX-License-Identifier: Apache-2.0
"""Ray's choice of a replica for each request: by prefix, bounded by load."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from paceline.replicas.prefixes import PrefixRouter, block_keys


class PrefixRequestRouter(RequestRouter):
    """Chooses as `paceline serve --replicas` does; see `PrefixRouter`.

    Each handle has a router of its own, which knows the requests of that handle. The arguments of a
    request are its prompt, a list of token ids, and a dict with its salt; calls with others go to
    the least busy replica.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes the `request_router_kwargs`: `block_size`, `max_blocks` and `max_num_seqs`, as for
        `PrefixRouter`."""
        self._block_size: int = kwargs["block_size"]
        self._prefixes = PrefixRouter(
            block_size=self._block_size,
            max_blocks=kwargs["max_blocks"],
            max_num_seqs=kwargs["max_num_seqs"],
        )
        self._num_open: collections.Counter[ReplicaID] = collections.Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Sorts the replicas; Ray takes the first one that has room."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        num_open = {replica: self._num_open[replica] for replica in by_id}
        ranked = self._prefixes.ranked(self._keys(pending_request), num_open)
        return [[by_id[replica]] for replica in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Remembers which replica has got a prompt."""
        self._num_open[replica_id] += 1
        self._prefixes.note_chosen(replica_id, self._keys(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts a request that has ended."""
        self._num_open[replica_id] -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets a replica."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forgets the replicas that are gone."""
        before = set(self._replica_id_set)
        super().update_replicas(replicas)
        for replica_id in before - set(self._replica_id_set):
            self._forget(replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._prefixes.forget(replica_id)
        self._num_open.pop(replica_id, None)

    def _keys(self, pending_request: PendingRequest | None) -> list[int]:
        args: Sequence[Any] = pending_request.args if pending_request else ()
        if len(args) != 2 or not isinstance(args[0], list):
            return []
        prompt, sampling = args
        return block_keys(prompt, self._block_size, sampling.get("cache_salt", ""))
