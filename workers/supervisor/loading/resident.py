"""Holds what a supervisor notes of each worker that it has loaded on demand, and of the wall clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from workers.protocol.heartbeat import Heartbeat
from workers.residency.picture import NEVER, Share, Status
from workers.supervisor.loading.load_watch import LoadWatch
from workers.supervisor.plan import PlannedWorker

LEAST_MOVE_S = 1.0
"""Seconds by which the wall clock must have been set for times of this supervisor to be set as well."""


@dataclass(slots=True)
class Resident:
    """A worker that was started here, until its process is gone."""

    id: str
    """The planner's name for it. Another worker may get its place, and so its id in the fleet, once it is gone."""
    worker: PlannedWorker
    shares: tuple[Share, ...]
    since: float
    status: Status = "loading"
    last_used: float = NEVER
    num_running: int = 0
    load_s: float = 0.0
    """Seconds that loading it took; 0: it loads."""
    beat: Heartbeat | None = None
    """The last heartbeat that was read."""
    released_at: float = 0.0
    """When it was last released, after it had been reserved; 0: never."""
    seen_bytes: int = 0
    """While it loads: what main memory has given it so far."""
    is_stable: bool = False
    watch: LoadWatch | None = None
    replaces: str = ""
    """Id of the worker with outdated settings whose place it takes."""
    is_told_reserved: bool = False
    """Whether its heartbeat says that it gets no new calls."""
    told_at: float = NEVER
    """When it was last told whether it is reserved."""
    sleeps: bool = False
    """Whether its model's weights stay in memory once it is gone."""
    settles_at: float = NEVER
    """Until when a call may be on its way to it: gateways hear late that it is reserved."""

    @property
    def model(self) -> str:
        return self.worker.model.name

    @property
    def maps_files(self) -> bool:
        """Whether it computes with the pages of its model's files, rather than with memory of its own."""
        return self.worker.model.llama.use_mmap and not self.worker.device


@dataclass(slots=True)
class WallClock:
    """Notices when the wall clock is set, or the machine was asleep."""

    _lead_s: float = field(default_factory=lambda: time.time() - time.monotonic())

    def moved_s(self) -> float:
        """Return the seconds by which it was set since the last time that this returned some; 0: it was not."""
        moved_s = time.time() - time.monotonic() - self._lead_s
        if abs(moved_s) < LEAST_MOVE_S:
            return 0.0
        self._lead_s += moved_s
        return moved_s
