"""Reads what workers really take, so that the next prediction of the same worker is better: soon after it is ready, and
again as it serves.

Main memory is what the system counts for its processes; a GPU's is what NVIDIA's driver tells of each process. Two
readings a moment apart are taken, and the smaller counts: a helper process that starts looks like twice its memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from workers.footprint.devices import DeviceProvider
from workers.footprint.learned import believed, files_of
from workers.footprint.taken import process_ids, swapped_bytes, taken_bytes
from workers.supervisor.needs import Needs
from workers.supervisor.plan import PlannedWorker

logger = logging.getLogger(__name__)

READ_AT_S = (2.0, 30.0, 120.0, 600.0)
"""Seconds after a worker is ready at which its memory is read; after the last of them every READ_EVERY_S."""
READ_EVERY_S = 3600.0
APART_S = 0.5


@dataclass(frozen=True, slots=True)
class _Due:
    worker: PlannedWorker
    pid: int
    has_served: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The memory that a worker takes now."""

    host: int
    swapped: int
    gpus: tuple[int, ...] | None
    """Of each of its GPUs; None: that is not known."""


@dataclass(slots=True)
class Readings:
    """Takes readings of one machine's workers, one at a time, beside everything else."""

    needs: Needs
    providers: Sequence[DeviceProvider]
    _counts: dict[int, int] = field(default_factory=dict)
    """Process id -> number of readings that were taken, or are due."""
    _due: deque[_Due] = field(default_factory=deque)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, worker: PlannedWorker, pid: int, ready_s: float, *, has_served: bool) -> None:
        """Have a worker's memory read if it is time. `ready_s`: seconds since it is ready."""
        count = self._counts.get(pid, 0)
        if ready_s >= due_at(count):
            # A machine that slept does not read many times in a row.
            while due_at(count) <= ready_s:
                count += 1
            self._counts[pid] = count
            self._due.append(_Due(worker, pid, has_served))
            self._more.set()

    def keep(self, pids: Collection[int | None]) -> None:
        """Forget processes that are gone."""
        self._counts = {pid: count for pid, count in self._counts.items() if pid in pids}

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._more.clear()
            while self._due:
                await self._read(self._due.popleft())
            await self._more.wait()

    async def _read(self, due: _Due) -> None:
        name = due.worker.model.name
        prediction = self.needs.found.get(name)
        if prediction is None or prediction.spec != due.worker.model:
            return  # it runs with settings that are not in force any more
        taken = await asyncio.to_thread(self._taken, due)
        if taken is None:
            return
        footprint = prediction.footprint
        host = believed(taken.host, taken.swapped, footprint, has_served=due.has_served)
        if host is None or len(taken.gpus or ()) != len(footprint.gpus):
            return  # on more GPUs than were predicted it is another worker
        await asyncio.to_thread(self.needs.learned.record, prediction.key, footprint, host=host, gpus=taken.gpus or ())
        if self.needs.found.get(name) is prediction:
            self.needs.correct(name)

    def _taken(self, due: _Due) -> Taken | None:
        first = self._taken_now(due)
        time.sleep(APART_S)
        second = self._taken_now(due)
        if first is None or second is None:
            return None
        gpus = None if first.gpus is None or second.gpus is None else tuple(map(min, first.gpus, second.gpus))
        return Taken(min(first.host, second.host), max(first.swapped, second.swapped), gpus)

    def _taken_now(self, due: _Due) -> Taken | None:
        host = taken_bytes(due.pid, [*files_of(due.worker.model)])
        if not host:  # it has ended, or the system tells nothing
            return None
        wanted = due.worker.device.split(",") if due.worker.device else []
        pids = process_ids(due.pid)
        found = (
            {id_: size for provider in self.providers for id_, size in provider.taken(pids).items()} if wanted else {}
        )
        gpus = tuple(found[id_] for id_ in wanted) if all(id_ in found for id_ in wanted) else None
        return Taken(host, swapped_bytes(due.pid), gpus)


def due_at(count: int) -> float:
    """Return the seconds after a worker is ready at which it is read, if it has been so many times."""
    return READ_AT_S[count] if count < len(READ_AT_S) else READ_AT_S[-1] + (count + 1 - len(READ_AT_S)) * READ_EVERY_S
