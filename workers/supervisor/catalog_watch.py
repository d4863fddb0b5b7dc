"""Has a supervisor keep other workers when its catalog's file changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from workers.models.catalog import Catalog, CatalogError
from workers.models.catalog_file import POLL_S, CatalogFile
from workers.models.library import Library, ModelUnusable, missing_files, with_paths
from workers.supervisor.loading.inventory import Rules
from workers.supervisor.output import Console
from workers.supervisor.plan import Site, replan
from workers.supervisor.residents import Residents
from workers.supervisor.supervisor import Supervisor

T = TypeVar("T")


class CatalogWatch:
    """Follows a catalog's file. What can't be served changes nothing, and the console says why."""

    def __init__(
        self, path: Path, library: Library, site: Site, console: Console, residents: Residents | None = None
    ) -> None:
        """`residents`: loads models on demand; None: all workers run from the start."""
        self._file = CatalogFile(path, partial(missing_files, path))
        self._library = library
        self._console = console
        self._site = site
        self._residents = residents

    async def run(self, supervisor: Supervisor) -> None:
        """Have `supervisor` keep what the file asks for, until cancelled. The first look takes what the file has, which
        may have changed since the supervisor's workers were planned."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                found = await asyncio.to_thread(self._file.poll)
                if found is not None:
                    await self._take(found, supervisor)
            except (CatalogError, ModelUnusable) as error:
                self._console.say(f"paddock: catalog refused: {error}; the workers stay as they are")
            except RuntimeError as error:  # no thread can be started just now
                self._console.say(f"paddock: the catalog can't be looked at just now: {error}")

    async def _take(self, found: Catalog, supervisor: Supervisor) -> None:
        """Have the workers of a catalog kept. Raises CatalogError, ModelUnusable."""
        located = with_paths(found, self._file.path)
        # A model may have to be downloaded first: that takes hours, and a stop must not wait for it.
        served = await beside(lambda: self._library.locate_all(located))
        if self._residents is not None:
            self._residents.serve(served, Rules.of(located))
            return
        if any(model.residency is not None for model in served):
            raise CatalogError(f"{self._file.path}: `residency` can't be added while workers run; start them anew")
        workers = replan(supervisor.wanted, served, self._site, supervisor.pids)
        if workers != supervisor.wanted:
            supervisor.want(workers)


async def beside(work: Callable[[], T]) -> T:
    """Return what `work` returns. It runs on a thread of its own, which delays nobody's end.

    Raises what `work` raises, and RuntimeError if no thread can be started."""
    job: Future[T] = Future()

    def run() -> None:
        job.set_running_or_notify_cancel()
        try:
            job.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: whoever awaits the job gets the error
            job.set_exception(error)

    threading.Thread(target=run, name="paddock-catalog", daemon=True).start()
    return await asyncio.wrap_future(job)
