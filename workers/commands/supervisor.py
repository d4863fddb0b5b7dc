"""`paddock supervisor`: runs this machine's workers, as a part of a fleet that shares the given Redis."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from functools import partial

import msgspec
from redis.asyncio import Redis

from workers.commands.models.orders import LibraryOrders
from workers.models.catalog import CatalogError
from workers.models.folder.folder import NOTHING_NAMED
from workers.models.library import Library, ModelUnusable, wanted
from workers.process.signals import StopSignals
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings
from workers.supervisor.catalog_watch import CatalogWatch
from workers.supervisor.fleet import Fleet
from workers.supervisor.folder_watch import FolderWatch
from workers.supervisor.output import Console, Terminal
from workers.supervisor.plan import PlannedWorker, Site, plan
from workers.supervisor.residents import Residents, residents_of
from workers.supervisor.state_folder import FolderTaken, StateFolder
from workers.supervisor.supervisor import Supervisor, write_specs


def run(settings: SupervisorSettings) -> int:
    """Run the workers until SIGINT or SIGTERM, or until none can run; return the exit code."""
    raw = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    with Terminal() as terminal:
        return _run(settings, Console(settings.log_level, terminal.say, raw=raw))


def _run(settings: SupervisorSettings, console: Console) -> int:
    for name, flag in (("redis_url", "--redis-url"), ("worker_secret", "--worker-secret")):
        if not getattr(settings, name):
            console.say(f"paddock: {name} is unset: a supervisor needs it; give {flag}, or use `paddock up`")
            return Exit.USAGE
    try:
        watched = FolderWatch.of(settings, console)
        catalog = wanted(settings) if watched is None else watched.load()
        with StateFolder(settings.state_dir, console.say) as folder:
            if exposure := folder.exposure():
                console.say(f"paddock: {exposure}")
            library, site = Library.of(settings), Site.of(settings.state_dir)
            models = library.locate_all(catalog)
            residents = residents_of(catalog, models, settings, site, console)
            workers = () if residents else plan(models, site.cores, site.devices, site.host)
            write_specs(workers, settings)
            file = settings.catalog
            if watched is not None:
                file = folder.run / "catalog.json"
                folder.keep(file, msgspec.json.encode(catalog))
            watch = None if file is None else CatalogWatch(file, library, site, console, residents)
            follow = None if watched is None or file is None else partial(watched.run, partial(folder.keep, file))
            now = partial(wanted, settings) if watched is None else lambda: NOTHING_NAMED
            orders = partial(LibraryOrders, library, site.host, folder.path, now, console.say)
            return asyncio.run(_keep(workers, settings, console, orders, watch, follow, residents))
    except (CatalogError, FolderTaken, OSError) as error:
        console.say(f"paddock: {error}")
        return Exit.USAGE
    except ModelUnusable as error:
        console.say(f"paddock: {error}")
        return error.exit


async def _keep(
    workers: tuple[PlannedWorker, ...],
    settings: SupervisorSettings,
    console: Console,
    orders: Callable[[Redis], LibraryOrders],
    watch: CatalogWatch | None,
    follow: Callable[[], Coroutine[None, None, None]] | None,
    residents: Residents | None,
) -> int:
    """Keep the workers until told to stop, and return the exit code. `watch` follows the catalog's file; `follow` the
    folder whose models are served, and writes that file; None: there is none."""
    fleet = Fleet(settings.redis_url)
    supervisor = Supervisor(
        workers,
        settings,
        fleet,
        console,
        environment=os.environ,
        on_final=lambda _, line: console.say(f"paddock: {line}"),
        chooser=residents,
    )
    stops: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(orders(fleet.client).run())]
            if watch is not None:
                beside.append(tasks.create_task(watch.run(supervisor)))
            if follow is not None:
                beside.append(tasks.create_task(follow()))
            if residents is not None:
                beside.append(tasks.create_task(residents.run(supervisor, fleet)))
            with StopSignals(lambda: stops.append(tasks.create_task(supervisor.stop())), supervisor.hurry):
                code = await supervisor.keep()
            for task in beside:
                task.cancel()
            return code
    finally:
        await fleet.aclose()
