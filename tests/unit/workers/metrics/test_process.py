"""What a process says of itself."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from tests.support.scrape import Scrape, page_of
from workers.metrics.types import ProcessMetrics


def told(registry: CollectorRegistry, name: str) -> float:
    return Scrape(page_of(registry)).value(name)


async def test_tasks_of_the_event_loop_are_counted_where_it_runs() -> None:
    registry = CollectorRegistry()
    process = ProcessMetrics(registry)
    process.count_tasks()
    before = told(registry, "paddock_event_loop_tasks")
    waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(5)]
    process.count_tasks()
    assert told(registry, "paddock_event_loop_tasks") == before + 5
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    process.count_tasks()
    assert told(registry, "paddock_event_loop_tasks") == before


def test_memory_and_files() -> None:
    registry = CollectorRegistry()
    ProcessMetrics(registry)
    before = told(registry, "process_open_fds")
    with open("/dev/null"):
        assert told(registry, "process_open_fds") == before + 1
    assert told(registry, "process_resident_memory_bytes") > 1 << 20
