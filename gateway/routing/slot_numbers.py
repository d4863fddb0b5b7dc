"""Numbers slots over all workers of a model: in the order of worker ids, each has as many numbers as slots. Pure.

With one worker these are its own slot numbers. They move when workers come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from workers.protocol.heartbeat import Heartbeat

ANY = -1


def firsts(workers: Sequence[Heartbeat]) -> list[int]:
    """Return the number of each worker's first slot. `workers` are sorted by id."""
    return list(accumulate((worker.slots for worker in workers), initial=0))[:-1]


def located(number: int, workers: Sequence[Heartbeat]) -> tuple[Heartbeat, int] | None:
    """Return the worker that has the slot of this number, and its own number for it; None: no worker has."""
    for first, worker in zip(firsts(workers), workers, strict=True):
        if first <= number < first + worker.slots:
            return worker, number - first
    return None


def number_of(worker_id: str, slot: int, workers: Sequence[Heartbeat]) -> int:
    """Return the number of a worker's slot; ANY where the worker is none of these."""
    for first, worker in zip(firsts(workers), workers, strict=True):
        if worker.worker == worker_id:
            return first + slot
    return ANY
