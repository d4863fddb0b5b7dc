"""What a process says of itself."""

from __future__ import annotations

import asyncio

from workers.protocol.metrics import of_process
from workers.protocol.metrics.book import Book
from workers.protocol.metrics.process import Process


def told(book: Book, name: str) -> float:
    [line] = [line for line in book.render().decode().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


async def test_tasks_of_the_event_loop_are_counted_where_it_runs() -> None:
    book = Book(of_process.GROUP.metrics)
    process = Process(book)
    process.count_tasks()
    before = told(book, "paddock_event_loop_tasks")
    waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(5)]
    process.count_tasks()
    assert told(book, "paddock_event_loop_tasks") == before + 5
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    process.count_tasks()
    assert told(book, "paddock_event_loop_tasks") == before


def test_memory_and_files() -> None:
    book = Book(of_process.GROUP.metrics)
    Process(book)
    before = told(book, "process_open_fds")
    with open("/dev/null"):
        assert told(book, "process_open_fds") == before + 1
    assert told(book, "process_resident_memory_bytes") > 1 << 20
