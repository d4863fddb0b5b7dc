"""The metrics of any process, by Prometheus' own collectors; those that begin with `process_` need `/proc`."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from workers.metrics.declaration import When
from workers.metrics.groups import Group


class ProcessMetrics:
    """The process's metrics, of which the event loop's tasks are counted here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.group = Group("Every process", registry)
        self.group.collector(ProcessCollector(registry=None))
        self.group.collector(PlatformCollector(registry=None), When.START)
        self._tasks = self.group.gauge("paddock_event_loop_tasks", "tasks of its event loop, those that wait included")

    def count_tasks(self) -> None:
        """Count the event loop's tasks; on the loop, as no other thread may. Some thousands take a millisecond."""
        self._tasks.set(len(asyncio.all_tasks()))
