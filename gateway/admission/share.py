"""Which slots are a gateway's own, to be used while Redis can't be asked whose they are. Pure.

Slot k of a worker belongs to the gateway at place (k + hash of the worker) mod n of the list of the n gateways: as long
as all go by one list, each slot is one gateway's, and no two have shares of a worker that differ by more than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True, slots=True)
class Seat:
    """One gateway's place among all of them."""

    number: int
    num_gateways: int

    def slots_of(self, worker: str, slots: int) -> int:
        """How many of a worker's slots are this gateway's."""
        first = (self.number - crc32(worker.encode())) % self.num_gateways
        return max(0, -(-(slots - first) // self.num_gateways))

    def part_of(self, bound: int) -> int:
        """Of a bound that all gateways keep together: at least 1, where there is any."""
        return -(-bound // self.num_gateways)


class Roll:
    """The gateways as this one last saw them.

    Who has just joined has no seat: the others may not have heard of it, and would take its slots for theirs.
    """

    def __init__(self, gateway: str, settle_s: float, missed_s: float) -> None:
        """`settle_s`: within this time every gateway has read the list again. `missed_s`: who has not been heard of for
        so long could not reach Redis.
        """
        self._gateway = gateway
        self._settle_s = settle_s
        self._missed_s = missed_s
        self._ids: Sequence[str] = ()
        self._joined_at = 0.0
        self._seen_at = 0.0
        self._missed_at = -math.inf

    def seen(self, silent_s: Mapping[str, float], *, stayed: bool, now: float) -> None:
        """`silent_s`: all that live, this one among them -> time since they beat. `stayed`: it was on the list already.
        `now`: time.monotonic().
        """
        if not stayed or not self._ids:
            self._joined_at = now
        others = {*self._ids, *silent_s} - {self._gateway}
        # What a Redis that hung for all was sent meanwhile it does when it goes on: the others then look as if they had
        # never been silent, so this gateway's own silence counts as well.
        silent = now - self._seen_at > self._missed_s
        if self._ids and any(silent or silent_s.get(id, math.inf) > self._missed_s for id in others):
            self._missed_at = now
        self._ids = sorted(silent_s)
        self._seen_at = now

    def others_were_away(self, since: float) -> bool:
        """Whether they may have been without Redis, too, as this one was since then, time.monotonic()."""
        return self._missed_at >= since - self._missed_s

    def seat(self) -> Seat | None:
        if self._gateway not in self._ids or self._seen_at - self._joined_at < self._settle_s:
            return None
        return Seat(self._ids.index(self._gateway), len(self._ids))
