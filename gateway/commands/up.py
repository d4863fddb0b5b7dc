"""`paddock up`: a private Redis, this machine's workers and its gateways, started in this order, stopped in reverse.

SIGUSR1 replaces the gateways, one after the other, if there are several.

Errors that can be found before, such as in the settings, are reported before the first process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from redis.asyncio import Redis

from accounts.protocol.records import KeysInvalid, read_records
from accounts.protocol.sign_on import SignOnInvalid, read_sign_on
from accounts.settings import AccountsSettings, socket_path
from gateway.access import first_key
from gateway.access.local_caller import WARNING, OpenRefused, check_open
from gateway.api.operations.accounts import UNIX
from gateway.commands.listeners import Listeners, listen, number_of_gateways, port_of
from gateway.commands.target import address_file, address_of, welcome
from gateway.settings import GatewaySettings, UpSettings
from gateway.tls import files_of, unverified
from workers import sources
from workers.commands.models.orders import LibraryOrders
from workers.http_server.tls import TlsUnusable
from workers.models.catalog import Catalog, CatalogError
from workers.models.folder.folder import NOTHING_NAMED
from workers.models.library import Library, ModelUnusable, wanted
from workers.process import sockets
from workers.process.black_box import progress_of
from workers.process.signals import StopSignals
from workers.process.sockets import PortTaken
from workers.protocol.exits import FINAL, Exit
from workers.protocol.keys import ROLES, Role
from workers.secret_file import GATEWAY_SECRET, WORKER_SECRET
from workers.supervisor.catalog_watch import CatalogWatch
from workers.supervisor.child import Child
from workers.supervisor.fleet import Fleet, NoRedis
from workers.supervisor.folder_watch import FolderWatch
from workers.supervisor.output import Console, Output, Terminal
from workers.supervisor.plan import PlannedWorker, Site, available_cores, plan
from workers.supervisor.processes import Recipe, describe
from workers.supervisor.redis_process import PrivateRedis
from workers.supervisor.residents import Residents, residents_of
from workers.supervisor.state_folder import FolderTaken, StateFolder
from workers.supervisor.supervisor import Supervisor, black_box_of, write_specs

READY_TIMEOUT_S = 900.0
"""Seconds after which a start that is not ready is given up; loading a large model from a slow disk takes minutes."""

PROGRESS_S = 5.0
POLL_S = 0.03
ASKED_S = 2.0
"""Seconds within which a gateway answers whether it is ready. A connection to one that does not run yet waits."""
ACCOUNTS_READY_S = 5.0
"""Maximum seconds for which the welcome waits for the accounts service, whose database may be away."""
KILL_MARGIN_S = 5.0

SOCKET_LOOK_S = 1.0
"""Seconds between two looks whether the private Redis' socket still has its name."""
SOCKET_LOOKS = 10
"""Number of looks after which a Redis that was never seen with its socket is started again."""


def run(settings: UpSettings) -> int:
    """Run until SIGINT, SIGTERM or a failure, and return the exit code (`workers.protocol.exits`)."""
    # Unless a level was asked for, the terminal shows what needs attention; the log files hold everything.
    threshold = settings.log_level if "log_level" in settings.model_fields_set else "warning"
    with Terminal() as terminal:
        return _run(settings, Console(threshold, terminal.say, raw=settings.log_format == "json"), terminal)


def _run(settings: UpSettings, console: Console, terminal: Terminal) -> int:
    started = time.monotonic()
    try:
        watched = FolderWatch.of(settings, console)
        catalog = wanted(settings) if watched is None else watched.load()
        read_records(settings.api_keys)
        read_sign_on(settings.oidc)
        check_open(settings, os.environ)
        num_workers, cores = sum(model.workers for model in catalog.models), available_cores()
        num_gateways = number_of_gateways(settings.gateways, num_workers, cores)
        files = files_of(settings, num_gateways)
        if files is not None:
            files.context()
        mode = int(settings.uds_mode, 8)
        listeners = listen(
            settings.host, settings.port, num_gateways, settings.uds, mode, admin_port=settings.admin_port
        )
        with contextlib.closing(listeners), StateFolder(settings.state_dir, console.say) as folder:
            if settings.open:
                console.say(f"paddock: OPEN: {WARNING} (--open)")
            if exposure := folder.exposure():
                console.say(f"paddock: {exposure}")
            library, site = Library.of(settings), Site.of(folder.path)
            models = library.locate_all(catalog)
            residents = residents_of(catalog, models, settings, site, console)
            ready = _fill_in(settings, folder, catalog, listeners)
            workers = () if residents else plan(models, site.cores, site.devices, site.host)
            write_specs(workers, ready)
            file = settings.catalog if watched is None else ready.catalog
            watch = None if file is None else CatalogWatch(file.absolute(), library, site, console, residents)
            now = partial(wanted, settings) if watched is None else lambda: NOTHING_NAMED
            orders = partial(LibraryOrders, library, site.host, folder.path, now, console.say)
            machine = Machine(
                ready, folder, listeners, workers, console, terminal.show, started, orders, watch, residents, watched
            )
            return asyncio.run(machine.run())
    except (CatalogError, KeysInvalid, SignOnInvalid, OpenRefused, FolderTaken, TlsUnusable) as error:
        return _report_end(console, error, Exit.USAGE)
    except PortTaken as error:
        return _report_end(console, error, Exit.PORT_TAKEN)
    except ModelUnusable as error:
        return _report_end(console, error, error.exit)
    except NoRedis as error:
        return _report_end(console, error, Exit.NO_REDIS)
    except OSError as error:
        return _report_end(console, error, Exit.USAGE)


def _fill_in(settings: UpSettings, folder: StateFolder, found: Catalog, listeners: Listeners) -> UpSettings:
    """Return the settings for the child processes, with state folder, port, catalog and secrets filled in."""
    catalog = settings.catalog
    if catalog is None:
        catalog = folder.run / "catalog.json"
        folder.keep(catalog, msgspec.json.encode(found))
    return settings.model_copy(
        update={
            "state_dir": folder.path,
            "port": settings.port if listeners.port is None else listeners.port,
            "gateway_targets": ",".join(listeners.targets(settings.host)),
            "catalog": catalog.absolute(),
            "worker_secret": settings.worker_secret or folder.secret(WORKER_SECRET),
            "gateway_secret": settings.gateway_secret or folder.secret(GATEWAY_SECRET),
            "accounts_url": settings.accounts_url or _accounts_url(settings, folder),
        }
    )


def _accounts_url(settings: UpSettings, folder: StateFolder) -> str:
    """Return where gateways reach the accounts service of this machine; empty: none is run."""
    if not settings.accounts:
        return ""
    listen = settings.accounts_listen
    if not listen:
        return f"{UNIX}{socket_path(folder.path)}"
    return f"{UNIX}{listen}" if "/" in listen else f"http://{listen}"


def _report_end(console: Console, error: Exception, code: Exit) -> int:
    console.say(f"paddock: {error}")
    return int(code)


class Machine:
    """Starts, watches and stops the processes of one `paddock up`."""

    def __init__(
        self,
        settings: UpSettings,
        folder: StateFolder,
        listeners: Listeners,
        workers: tuple[PlannedWorker, ...],
        console: Console,
        show: Callable[[str], None],
        started: float,
        orders: Callable[[Redis], LibraryOrders],
        watch: CatalogWatch | None = None,
        residents: Residents | None = None,
        models_dir: FolderWatch | None = None,
    ) -> None:
        """`show` prints a text on standard output. `orders` carries out what admins order of the models folder. `watch`
        follows the catalog's file; None: there is none. `residents` loads models on demand; None: all workers run from
        the start. `models_dir` follows the folder whose models are served; None: there is none."""
        self._settings = settings
        self._folder = folder
        self._listeners = listeners
        self._workers = workers
        self._console = console
        self._show = show
        self._started = started
        self._urls: dict[Role, str] = {
            "gateway": settings.redis_url,
            "supervisor": settings.redis_url,
            "worker": settings.worker_redis_url or settings.redis_url,
        }
        self._stack: list[Child | Supervisor] = []
        """The parts that run beside the gateways, in the order in which they were started."""
        self._gateways: list[Child] = []
        self._renewing: asyncio.Task[None] | None = None
        self._orders = orders
        self._watch = watch
        self._residents = residents
        self._models_dir = models_dir
        self._beside: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._code = int(Exit.OK)
        self._ready = False

    async def run(self) -> int:
        private = None if self._settings.redis_url else self._private_redis()
        fleet = Fleet(self._urls["supervisor"])
        try:
            if private:
                await private.prepare()
            async with asyncio.TaskGroup() as tasks:
                with StopSignals(self._asked_to_stop, self._hurry):
                    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._renew_soon, tasks)
                    starting = tasks.create_task(self._start(tasks, private, fleet))
                    await self._over.wait()
                    starting.cancel()
                    await asyncio.wait({starting})
                    await self._stop()
            return self._code
        finally:
            await fleet.aclose()
            if private:
                private.remove(self._console.say)

    def _private_redis(self) -> PrivateRedis:
        own = self._settings.gateway_secret
        secrets: dict[Role, str] = {"gateway": own, "supervisor": own, "worker": self._settings.worker_secret}
        private = PrivateRedis(self._folder.path, secrets)
        self._urls = {role: private.url(role) for role in ROLES}
        return private

    async def _start(self, tasks: asyncio.TaskGroup, private: PrivateRedis | None, fleet: Fleet) -> None:
        """Start Redis, workers and gateway, wait until all are ready, and print the welcome. A failure ends the run."""
        self._console.held = "log_level" not in self._settings.model_fields_set
        try:
            if private:
                self._start_redis(tasks, private)
            if private:
                await fleet.wait_until_reachable()
            else:
                await fleet.wait_until_reachable(self._settings.redis_wait_s, self._say)
            self._say("redis ready")
            supervisor = self._supervisor(fleet)
            self._stack.append(supervisor)
            if self._settings.accounts:
                self._stack.append(self._keep(tasks, self._accounts(), self._restore, final=frozenset()))
            tasks.create_task(self._keep_workers(supervisor))
            self._beside.append(tasks.create_task(self._orders(fleet.client).run()))
            if self._residents is not None:
                self._beside.append(tasks.create_task(self._residents.run(supervisor, fleet)))
            for number in range(max(1, len(self._listeners.own))):
                self._gateways.append(self._keep(tasks, self._gateway(number), self._restore, final=FINAL))
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._wait_until_ready(fleet)
        except NoRedis as error:
            self._console.say(f"paddock: {error}")
            self._finish(Exit.NO_REDIS)
        except TimeoutError:
            self._console.say(f"paddock: not ready within {READY_TIMEOUT_S:g} s; see {self._folder.logs}")
            self._finish(Exit.CRASHED)
        else:
            if not self._over.is_set():
                self._ready = True
                await self._welcome()
                self._console.held = False
                if self._watch is not None:
                    self._beside.append(tasks.create_task(self._watch.run(supervisor)))
                if self._models_dir is not None and (file := self._settings.catalog) is not None:
                    self._beside.append(tasks.create_task(self._models_dir.run(partial(self._folder.keep, file))))

    def _start_redis(self, tasks: asyncio.TaskGroup, private: PrivateRedis) -> None:
        async def prepare() -> None:
            self._folder.restore()
            await private.prepare()

        plain = {name: value for name, value in os.environ.items() if not name.startswith(sources.PREFIX)}
        child = self._keep(tasks, private.recipe(plain), prepare, final=frozenset())
        self._stack.append(child)
        tasks.create_task(self._watch_socket(private, child))

    async def _watch_socket(self, private: PrivateRedis, child: Child) -> None:
        """Give Redis' socket its name again when that is gone, since whoever is not connected yet can't reach it any
        more. Where that fails Redis is started anew, and loses all that it holds."""
        named, num_missed = None, 0
        while not await self._is_over_within(SOCKET_LOOK_S):
            try:
                is_named = private.is_named()
            except OSError:  # it can't be known just now: a disk that fails, a folder that may not be entered
                continue
            if not is_named and child.pid is not None and private.name_again():
                self._console.say(f"paddock: {private.socket} was gone; it has its name again")
                is_named = True
            if is_named:
                named, num_missed = child.pid, 0
                continue
            num_missed += child.pid is not None
            # A process that was never seen with it may be about to make it.
            if num_missed and (child.pid == named or num_missed >= SOCKET_LOOKS):
                self._console.say(f"paddock: {private.socket} is gone; redis is started again")
                num_missed = 0
                await child.renew()

    async def _is_over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    def _supervisor(self, fleet: Fleet) -> Supervisor:
        settings = self._settings.model_copy(update={"worker_redis_url": self._urls["worker"]})
        return Supervisor(
            self._workers,
            settings,
            fleet,
            self._console,
            environment=os.environ,
            on_final=self._worker_lost,
            chooser=self._residents,
        )

    def _accounts(self) -> Recipe:
        values = {name: getattr(self._settings, name) for name in AccountsSettings.model_fields}
        values |= {"redis_url": self._urls["gateway"], "log_format": "json"}
        environment = sources.environment_of(AccountsSettings.model_construct(**values), os.environ)
        return Recipe("accounts", (sys.executable, "-m", "accounts.cli"), environment, KILL_MARGIN_S)

    def _gateway(self, number: int) -> Recipe:
        values = {name: getattr(self._settings, name) for name in GatewaySettings.model_fields}
        descriptors, counts, name = self._listeners.descriptors(number), self._listeners.counts, "gateway"
        values |= {"redis_url": self._urls["gateway"], "log_format": "json"}
        values["listen_fds"] = ",".join(map(str, descriptors))
        admin = [] if self._listeners.admin is None else [self._listeners.admin.fileno()]
        values["admin_fd"] = admin[0] if admin else 0
        if self._listeners.own:
            name = f"gateway-{number}"
            values["counts_fd"] = 0 if counts is None else counts.fileno()
            values["gateway_id"] = f"{self._settings.gateway_id}-{number}" if self._settings.gateway_id else ""
        environment = sources.environment_of(GatewaySettings.model_construct(**values), os.environ)
        argv = (sys.executable, "-m", "gateway.cli", "gateway")
        inherited = (*descriptors, *admin, *([] if counts is None else [counts.fileno()]))
        return Recipe(name, argv, environment, self._settings.drain_s + KILL_MARGIN_S, inherited)

    async def _restore(self) -> None:
        self._folder.restore()

    def _keep(
        self,
        tasks: asyncio.TaskGroup,
        recipe: Recipe,
        prepare: Callable[[], Awaitable[None]],
        final: frozenset[Exit],
    ) -> Child:
        output = Output(recipe.name, self._folder.logs, self._console)

        async def died(code: int, is_final: bool) -> None:
            if is_final:
                self._lost(code, f"{recipe.name} can't run ({describe(code)}): {output.complaint()}")

        child = Child(recipe, output, on_death=died, prepare=prepare, is_prepared=self._folder.is_whole, final=final)
        tasks.create_task(child.keep())
        return child

    def _renew_soon(self, tasks: asyncio.TaskGroup) -> None:
        if not self._listeners.own:
            self._console.say("paddock: one gateway can't be replaced while it serves; run more with --gateways")
        elif self._ready and not self._over.is_set() and (self._renewing is None or self._renewing.done()):
            self._renewing = tasks.create_task(self._renew())

    async def _renew(self) -> None:
        """Replace the gateways, one after the other. Streams of each run to their end; the others take new calls."""
        for number, child in enumerate(self._gateways):
            self._console.say(f"paddock: {child.name} is being replaced")
            await child.renew()
            await self._wait_for_gateway(number)
            if self._over.is_set():
                return
        self._console.say("paddock: all gateways have been replaced")

    async def _keep_workers(self, supervisor: Supervisor) -> None:
        code = await supervisor.keep()
        if not self._over.is_set():
            self._lost(code, "no worker is left")

    def _worker_lost(self, code: int, line: str) -> None:
        if not self._ready:
            self._lost(code, line)
        else:
            self._console.say(f"paddock: {line}")

    def _lost(self, code: int, line: str) -> None:
        if not self._over.is_set():
            self._console.say(f"paddock: {line}")
            self._finish(code if code > 0 else Exit.CRASHED)

    async def _wait_until_ready(self, fleet: Fleet) -> None:
        missing = {worker.worker_id: worker for worker in self._workers}
        told = time.monotonic()
        # A cancellation may get lost in the Redis client, so the loops look for the end themselves.
        while missing and not self._over.is_set():
            for worker_id in await fleet.present({id: worker.model.name for id, worker in missing.items()}):
                found = missing.pop(worker_id)
                self._say(f"{found.name} ready: {found.model.name}{f' on GPU {found.device}' if found.device else ''}")
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                self._say(f"still loading: {', '.join(map(self._loading, missing.values()))}")
            await asyncio.sleep(POLL_S)
        for number in range(len(self._gateways)):
            await self._wait_for_gateway(number)
        if not self._over.is_set():
            self._say(f"{len(self._gateways)} gateways ready" if self._listeners.own else "gateway ready")

    def _loading(self, worker: PlannedWorker) -> str:
        """Return a worker's name, with how much of its model is loaded where that is known."""
        progress = progress_of(black_box_of(worker, self._settings))
        return worker.name if progress is None else f"{worker.name} ({progress:.0%})"

    async def _wait_for_gateway(self, number: int) -> None:
        listener = self._listeners.own[number] if self._listeners.own else self._listeners.shared
        while not self._over.is_set() and not await self._gateway_agrees("/ready", listener):  # noqa: ASYNC110 - a process
            await asyncio.sleep(POLL_S)

    async def _gateway_agrees(self, path: str, listener: socket.socket, key: str = "") -> bool:
        """Return whether a gateway answers a GET of this path with 200 soon. One that is not there yet does not."""
        return await self._status_of(path, listener, key) == 200

    async def _status_of(self, path: str, listener: socket.socket, key: str) -> int:
        """Return the status with which a gateway answers a GET of this path; 0: it does not answer soon."""
        try:
            async with asyncio.timeout(ASKED_S):
                reader, writer = await self._connect(listener)
                with contextlib.closing(writer):
                    bearer = f"Authorization: Bearer {key}\r\n" if key else ""
                    head = f"GET {path} HTTP/1.1\r\nHost: paddock\r\n{bearer}Connection: close\r\n\r\n"
                    writer.write(head.encode())
                    status = (await reader.readline()).split()[1:2]
                    return int(status[0]) if status and status[0].isdigit() else 0
        except (OSError, TimeoutError):
            return 0

    async def _wait_for_accounts(self, key: str) -> None:
        """Wait until teams and keys can be managed, though not for long: models are served without that."""
        ends = time.monotonic() + ACCOUNTS_READY_S
        listener = self._listeners.admin or self._listeners.shared
        while not self._over.is_set() and await self._status_of("/admin/teams/default", listener, key) in (0, 503):
            if time.monotonic() > ends:
                told = "the accounts service is not ready, its log says why; models are served without it"
                self._console.say(f"paddock: {told}")
                return
            await asyncio.sleep(POLL_S)

    async def _connect(self, listener: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if listener.family == socket.AF_UNIX:
            return await asyncio.open_unix_connection(str(self._settings.uds))
        encrypted = None if self._settings.tls_cert is None else unverified()
        return await asyncio.open_connection(sockets.host_of(self._settings.host), port_of(listener), ssl=encrypted)

    @property
    def _asks_for_certificates(self) -> bool:
        return self._settings.tls_client_ca is not None and self._listeners.port is not None

    async def _is_refused(self, key: str) -> bool:
        """Return whether the gateways know no such key."""
        if self._asks_for_certificates:
            return False  # without a client's certificate they don't say
        return not await self._gateway_agrees("/v1/models", self._listeners.shared, key)

    async def _welcome(self) -> None:
        address = address_of(self._settings)
        key_file, filed = self._folder.first_key, ""
        try:
            filed = first_key.read_file(key_file)
        except OSError as error:
            told = "" if self._settings.api_key else "; callers need the key in it"
            self._console.say(f"paddock: {key_file} can't be read ({error.strerror}){told}")
        key = self._settings.api_key or filed
        if key and await self._is_refused(key):
            key = ""  # it was the file's; this Redis had another first key already
        if key and self._settings.accounts and not self._asks_for_certificates:
            await self._wait_for_accounts(key)
        kept_in = key_file if key and key == filed else None
        named = [worker.model.name for worker in self._workers] if self._residents is None else self._residents.names
        models = tuple(dict.fromkeys(named))
        targets = self._listeners.targets(self._settings.host)
        if address.uds is None:
            self._keep_address(address.url)
        elif targets:  # `paddock chat` speaks to ports
            self._keep_address(f"{'http' if self._settings.tls_cert is None else 'https'}://{targets[0]}")
        has_console = self._settings.console
        is_open = self._settings.open
        told = welcome(
            address, key, kept_in, models, self._folder.logs, targets, has_console=has_console, is_open=is_open
        )
        self._show(told)

    def _keep_address(self, url: str) -> None:
        """Keep the address for `paddock chat`."""
        file = address_file(self._folder.path)
        try:
            self._folder.keep(file, f"{url}\n".encode())
        except OSError as error:
            self._console.say(f"paddock: {file} can't be written ({error.strerror}); `paddock chat` needs --url {url}")

    def _say(self, text: str) -> None:
        self._console.say(f"paddock: {text} ({time.monotonic() - self._started:.1f} s)")

    def _finish(self, code: int) -> None:
        if not self._over.is_set():
            self._code = int(code)
            self._over.set()

    def _asked_to_stop(self) -> None:
        self._console.say("paddock: stopping, streams drain first; Ctrl-C again to stop at once")
        self._finish(Exit.OK)

    def _hurry(self) -> None:
        self._console.say("paddock: stopping at once")
        for part in (*self._stack, *self._gateways):
            part.hurry()

    async def _stop(self) -> None:
        """Stop the gateways first, so that their streams drain while workers still answer, and Redis last."""
        self._console.held = False
        for task in self._beside:
            task.cancel()
        self._folder.remove(address_file(self._folder.path))
        await asyncio.gather(*(gateway.stop() for gateway in self._gateways))
        self._listeners.close()
        for gateway in self._gateways:
            if gateway.last_code == Exit.DRAIN_CUT:
                self._console.say(f"paddock: {gateway.name} cut off the streams that were left after its drain time")
        for part in reversed(self._stack):
            await part.stop()
        self._folder.remove(socket_path(self._folder.path))  # left behind where the accounts service was killed
        self._console.say("paddock: stopped")
