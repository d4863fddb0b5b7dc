"""Which workers of a pool a call can do nothing with, while others are there: they lack its adapters, or it asked for a
slot of another one. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.slot_numbers import ANY, located
from workers.protocol.heartbeat import Heartbeat


def unfit(
    workers: Sequence[Heartbeat], avoid: frozenset[str], adapters: frozenset[str], slot: int = ANY
) -> frozenset[str]:
    """Ids of workers to be left out beside those in `avoid`; none where nobody would be left.

    `workers` by id. `slot` is a number over all of them (`slot_numbers`): its worker is waited for while it serves.
    """
    if not adapters and slot == ANY:
        return frozenset()
    serving = [worker for worker in workers if worker.worker not in avoid and not worker.draining]
    fit = {worker.worker for worker in serving if adapters.issubset(worker.adapters)}
    place = located(slot, workers)
    if place is not None and place[0].worker in fit:
        fit = {place[0].worker}
    return frozenset(worker.worker for worker in workers) - fit if fit else frozenset()
