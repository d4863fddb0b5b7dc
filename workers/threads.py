"""Makes pools whose threads run from the start: a process that is short of memory may hang where it starts a thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_threads(name: str, at_once: int) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already. Raises RuntimeError where one can't be started.

    An ordinary pool starts them when jobs come, and without memory for one the event loop waits in `Thread.start` for
    ever.
    """
    threads = ThreadPoolExecutor(at_once, thread_name_prefix=name)
    together = threading.Barrier(at_once)
    try:
        for job in [threads.submit(together.wait) for _ in range(at_once)]:
            job.result()
    except BaseException:
        together.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    return threads
