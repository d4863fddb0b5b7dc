"""`paddock supervisor`: runs this machine's workers, as a part of a fleet that shares the given Redis."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

from workers.commands.models.orders import LibraryOrders
from workers.models.catalog import CatalogError
from workers.models.library import Library, ModelUnusable, wanted
from workers.process.signals import StopSignals
from workers.protocol.exits import Exit
from workers.settings import SupervisorSettings
from workers.supervisor.catalog_watch import CatalogWatch
from workers.supervisor.fleet import Fleet
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
        catalog = wanted(settings)
        with StateFolder(settings.state_dir, console.say) as folder:
            if exposure := folder.exposure():
                console.say(f"paddock: {exposure}")
            library, site = Library.of(settings), Site.of(settings.state_dir)
            models = library.locate_all(catalog)
            residents = residents_of(catalog, models, settings, site, console)
            workers = () if residents else plan(models, site.cores, site.devices, site.host)
            write_specs(workers, settings)
            return asyncio.run(_keep(workers, settings, console, library, site, residents))
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
    library: Library,
    site: Site,
    residents: Residents | None,
) -> int:
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
            beside = []
            if settings.catalog is not None:
                watch = CatalogWatch(settings.catalog, library, site, console, residents)
                beside.append(tasks.create_task(watch.run(supervisor)))
            catalog = partial(wanted, settings)
            orders = LibraryOrders(library, site.host, settings.state_dir, catalog, console.say, fleet.client)
            beside.append(tasks.create_task(orders.run()))
            if residents is not None:
                beside.append(tasks.create_task(residents.run(supervisor, fleet)))
            with StopSignals(lambda: stops.append(tasks.create_task(supervisor.stop())), supervisor.hurry):
                code = await supervisor.keep()
            for task in beside:
                task.cancel()
            return code
    finally:
        await fleet.aclose()
