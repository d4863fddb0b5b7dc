"""Computes a gateway's share: the slots that it may use while Redis is away and can't be asked for one. Pure.

Slot k of a worker belongs to the gateway at place (k + hash of the worker) mod n of the list of the n gateways. If all
gateways use the same list, each slot belongs to exactly one, and their shares of a worker differ by one slot at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True, slots=True)
class SlotShare:
    """One gateway's share of the slots, computed from its place in the sorted list of all gateways."""

    number: int
    num_gateways: int

    def slots_of(self, worker: str, slots: int) -> int:
        """Return how many of a worker's slots are this gateway's."""
        first = (self.number - crc32(worker.encode())) % self.num_gateways
        return max(0, -(-(slots - first) // self.num_gateways))

    def part_of(self, bound: int) -> int:
        """Return this gateway's part of a bound that holds for all gateways together: at least 1, unless the bound is
        0.
        """
        return -(-bound // self.num_gateways)


class GatewayRing:
    """The list of gateways (the ring), as this gateway last read it from Redis.

    A gateway that joined a moment ago has no share: others may not have read its name yet, and would use its slots.
    """

    def __init__(self, gateway: str, settle_s: float, missed_s: float) -> None:
        """`settle_s`: seconds within which every gateway has read the list again. `missed_s`: a gateway that is silent
        for more seconds counts as cut off from Redis.
        """
        self._gateway = gateway
        self._settle_s = settle_s
        self._missed_s = missed_s
        self._ids: Sequence[str] = ()
        self._joined_at = 0.0
        self._seen_at = 0.0
        self._missed_at = -math.inf

    def update(self, silent_s: Mapping[str, float], *, stayed: bool, now: float) -> None:
        """Set the list. `silent_s`: id of each live gateway, this one included -> seconds since its heartbeat.
        `stayed`: whether this gateway was on the list already. `now`: time.monotonic().
        """
        if not stayed or not self._ids:
            self._joined_at = now
        others = {*self._ids, *silent_s} - {self._gateway}
        # If Redis hung for all gateways, it then processes the heartbeats that were sent while it hung, and the other
        # gateways look as if they had never been silent. So this gateway's own silence counts as well.
        silent = now - self._seen_at > self._missed_s
        if self._ids and any(silent or silent_s.get(id, math.inf) > self._missed_s for id in others):
            self._missed_at = now
        self._ids = sorted(silent_s)
        self._seen_at = now

    def others_were_away(self, since: float) -> bool:
        """Return whether other gateways, too, may have been without Redis since `since`, the time.monotonic() when this
        one lost it.
        """
        return self._missed_at >= since - self._missed_s

    def share(self) -> SlotShare | None:
        """Return this gateway's share of the slots; None while other gateways may not have read its name yet."""
        if self._gateway not in self._ids or self._seen_at - self._joined_at < self._settle_s:
            return None
        return SlotShare(self._ids.index(self._gateway), len(self._ids))
