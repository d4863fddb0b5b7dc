"""All metrics of a gateway's scrape, and all of a worker's."""

from __future__ import annotations

from workers.protocol.metrics import of_gateway, of_process, of_worker
from workers.protocol.metrics.metric import Group, Metric

GATEWAY: tuple[Group, ...] = (*of_gateway.GROUPS, of_process.GROUP)
WORKER: tuple[Group, ...] = (*of_worker.GROUPS, of_process.GROUP)


def metrics_of(groups: tuple[Group, ...]) -> tuple[Metric, ...]:
    return tuple(metric for group in groups for metric in group.metrics)
