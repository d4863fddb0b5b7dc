"""In which order the workers of a pool are tried for one call. Pure; Redis decides which of them has a slot left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from workers.protocol.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the ranking knew of one worker."""

    worker: str
    slots: int
    free: int
    draining: bool
    avoided: bool

    @property
    def reason(self) -> str:
        if self.draining:
            return "left out: it is draining"
        text = f"{self.free} of {self.slots} slots free"
        return f"{text}, last: this call has failed there" if self.avoided else text


@dataclass(frozen=True, slots=True)
class Ranking:
    order: tuple[str, ...]
    """Worker ids, best first."""
    candidates: tuple[Candidate, ...]
    """Every worker considered, in the pool's order."""

    @property
    def reasons(self) -> dict[str, str]:
        """Worker id -> why it stands where it does."""
        return {candidate.worker: candidate.reason for candidate in self.candidates}


def rank(
    workers: Sequence[Heartbeat],
    leases_in_use: Mapping[str, int] | None,
    avoid: frozenset[str] = frozenset(),
    turn: int = 0,
) -> Ranking:
    """Most free slots first; workers equally free take turns as `turn` counts up.

    `leases_in_use` (worker id -> leases) is fresher than the heartbeat, for the workers that it names. Draining workers
    are left out, avoided ones as well unless no other is there.
    """
    in_use = leases_in_use or {}
    candidates = tuple(
        Candidate(
            worker.worker,
            worker.slots,
            worker.slots - in_use.get(worker.worker, worker.slots_busy),
            worker.draining,
            worker.worker in avoid,
        )
        for worker in workers
    )
    serving = [candidate for candidate in candidates if not candidate.draining]
    allowed = [candidate for candidate in serving if not candidate.avoided] or serving
    order: list[Candidate] = []
    for _, equals in groupby(sorted(allowed, key=_busiest_last), key=_busiest_last):
        group = list(equals)
        first = turn % len(group)
        order += group[first:] + group[:first]
    return Ranking(tuple(candidate.worker for candidate in order), candidates)


def _busiest_last(candidate: Candidate) -> int:
    return -candidate.free
