"""Runs a worker process around its engine: listen, register, serve, drain, leave.

start -> listening -> registered -> serving --signal--> draining --idle or bound--> cut -> flushed -> gone
                                        |`--/health/drain--^                         ^
                                        `-----engine crashed-------------------------'
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from workers.dead_peers import notice_dead_peer
from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad
from workers.http_server.connections import ConnectionBounds
from workers.http_server.descriptors import raise_limit
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer
from workers.protocol.drain import left_s
from workers.protocol.events import CallEvent
from workers.protocol.exits import Exit
from workers.protocol.failures import Failure, FailureCode
from workers.protocol.framing import HEALTH_PATH
from workers.protocol.heartbeat import Heartbeat, ModelFacts
from workers.service.access import WorkerAccess
from workers.service.app import METRICS_PATH, build_app
from workers.service.bodies import refusal_body
from workers.service.call_story import Stories
from workers.service.desk import CallDesk
from workers.service.desk import Engine as DeskEngine
from workers.service.gateway_watch import GatewayWatch
from workers.service.heartbeat import Registration, connect
from workers.service.mailbox import Mailbox
from workers.service.metrics import WorkerMetrics
from workers.service.probes import READY_PATH, Probes
from workers.service.services import Services
from workers.service.shortage import Shortage, is_shortage
from workers.service.stream import EventHub
from workers.tracing.tracer import OFF, Tracer

FLUSH_S = 2.0
"""Seconds that the last events may take to be sent."""

KEEP_ALIVE_S = 90
"""Seconds that idle HTTP connections are kept: longer than clients keep them, so that none closes under a request."""

RESERVED_PATHS = frozenset(path.encode() for path in (HEALTH_PATH, READY_PATH, METRICS_PATH))
"""Paths that are answered when there is no room for other requests."""

logger = logging.getLogger(__name__)


class PortTaken(OSError):
    """The address to listen on is in use."""


class Engine(DeskEngine, Protocol):
    """An engine as the process sees it: it calls `emit` once per step, on its own thread."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def counters(self) -> EngineCounters: ...
    def load(self) -> EngineLoad: ...
    def start(self) -> None: ...
    def retire(self) -> None:
        """Hand on the cache that others may go on with, while the last calls run: the process is about to end."""

    def stop(self) -> None:
        """End the thread; no event comes after it."""


class Desk(Protocol):
    """The desk of the worker's calls, whatever their kind."""

    draining: bool
    idle: asyncio.Event

    @property
    def num_calls(self) -> int: ...
    def fail_all(self, failure: Failure) -> None: ...


Emit = Callable[[int, list[CallEvent]], None]
OnCrash = Callable[[BaseException], None]
BuildEngine = Callable[[Emit, OnCrash], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One worker's identity in the fleet, and how it is reached."""

    worker: str
    model: str
    address: str
    """URL for gateways; empty: made from the socket."""
    secret: str
    redis_url: str
    facts: ModelFacts
    version: str
    fingerprint: str = ""
    """As in `Heartbeat`."""
    drain_s: float = 20.0
    gateway_grace_s: float = 5.0
    redis_wait_s: float = 60.0
    """Seconds that a starting worker waits for Redis: without it no gateway would ever find the worker. A new start
    would have to load the model again.
    """


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: any free one. Raises PortTaken, or OSError for an unusable address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_dead_peer(sock)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} of {host} is in use; choose another with --worker-port") from error
        raise
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the URL at which other machines reach a socket; if it listens on all addresses, with the host's own."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        with contextlib.suppress(OSError):  # a host that cannot resolve its own name says so by being unreachable
            host = socket.gethostbyname(socket.gethostname())
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _http_server(app: ASGIApp, http: type[HttpProtocol]) -> HttpServer:
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FLUSH_S),
    )
    return HttpServer(config, refusal_body, ConnectionBounds.of(raise_limit(), reserved=RESERVED_PATHS))


class WorkerServer:
    """One worker's server. Build it on the running loop, then await `run` once."""

    def __init__(
        self,
        place: Place,
        sock: socket.socket,
        services: Services,
        build_engine: BuildEngine,
        *,
        hung_s: Callable[[], float] = float,
        http: type[HttpProtocol] = HttpProtocol,
        tracer: Tracer = OFF,
    ) -> None:
        """`build_engine` makes the engine and connects the parts in `services` to it. `hung_s`: as for `Probes`."""
        self._place = place
        self._sock = sock
        self._services = services
        self.address = place.address or address_of(sock)
        """Base URL for gateways."""
        self._boot = secrets.token_hex(6)
        self._started_at = time.time()
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._engine = build_engine(self._mailbox.put, self._crash_from_thread)
        self._metrics = WorkerMetrics(
            place.model,
            self._engine.load,
            lambda: self._engine.counters,
            lambda: services.form_counts,
            worker=place.worker,
            version=place.version,
            draining=lambda: self._calls.draining,
            devices=services.devices,
        )
        self._hub = EventHub(self._boot, grace_s=place.gateway_grace_s)
        self._drains_since = 0.0  # time.monotonic(), once it drains
        stories = Stories(tracer, place.worker, place.model)
        self.desk = self._call_desk(services, stories)
        self._mailbox.connect(self._deliver)
        self._calls: Desk = self.desk if services.pool is None else services.pool
        if services.pool is not None:
            services.pool.follow(self._pooled, stories)
        self._redis = connect(place.redis_url)
        heads = services.heads if services.pool is None else None
        self._registration = Registration(self._redis, place.secret, self._heartbeat, heads)
        self._shortage = Shortage(self._registration.hurry)
        probes = Probes(self._facts, self._calls, self._registration.registered, self._begin_to_drain, hung_s)
        self._http = _http_server(self._app(probes), http)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._crash: BaseException | None = None

    async def run(self) -> Exit:
        """Serve until a signal or a crash; return the process's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.set_exception_handler(self._on_loose_error)
        self._engine.start()
        try:
            async with asyncio.TaskGroup() as group:
                http = group.create_task(self._http.serve(sockets=[self._sock]))
                watch = GatewayWatch(self._redis, self._hub.gateways, self._hub.doubt)
                beats = group.create_task(self._registration.run())
                watching = group.create_task(watch.run())
                code = await self._live()
                self._hub.close()
                self._http.should_exit = True
                await http
                beats.cancel()
                watching.cancel()
            await self._registration.leave()
        finally:
            self._engine.stop()
            await self._redis.aclose()
            self._sock.close()
        return code

    async def _live(self) -> Exit:
        """Serve from the first heartbeat to the last event; return the exit code."""
        try:
            async with asyncio.timeout(self._place.redis_wait_s):
                await _first(self._registration.registered, self._stop)
        except TimeoutError:
            logger.error("Redis did not answer for %.0f s; check --redis-url", self._place.redis_wait_s)
            return Exit.NO_REDIS
        logger.info("serving %s at %s with %d slots", self._place.model, self.address, self._engine.slots)
        await self._stop.wait()
        code = Exit.CRASHED if self._crash is not None else await self._drain()
        self._mailbox.flush()
        if self._calls.num_calls:
            self._calls.fail_all(self._last_words())
        await self._flush()
        return code

    def _on_loose_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that no task waits for, such as one of reading a connection."""
        if is_shortage(context.get("exception")):
            self._shortage.note()
        loop.default_exception_handler(context)

    def _begin_to_drain(self) -> None:
        """Take no new calls; those that run go on."""
        if not self._calls.draining:
            self._calls.draining = True
            self._drains_since = time.monotonic()
            self._engine.retire()
            self._registration.hurry()
            logger.info("draining %d calls", self._calls.num_calls)

    async def _drain(self) -> Exit:
        self._begin_to_drain()
        bound_s = left_s(self._place.drain_s, time.monotonic() - self._drains_since)
        logger.info("stopping in %.0f s at most", bound_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await _first(self._calls.idle, self._stop_now)
        if self._crash is not None:
            return Exit.CRASHED
        if self._calls.num_calls:
            logger.warning("cutting off %d calls that did not finish", self._calls.num_calls)
            return Exit.DRAIN_CUT
        return Exit.OK

    async def _flush(self) -> None:
        """Wait until every gateway's connection has taken the last events, at most `FLUSH_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while not self._hub.caught_up:  # noqa: ASYNC110 - once, at the end; an event would cost every step
                    await asyncio.sleep(0.01)

    def _last_words(self) -> Failure:
        if is_shortage(self._crash):
            return self._shortage.note()
        if self._crash is not None:
            return Failure(FailureCode.INTERNAL, "the worker's engine failed; send the request again")
        return Failure(
            FailureCode.DRAINING, "the worker stopped before the answer was finished; send the request again"
        )

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()
        logger.info("%s: stopping%s", signal.Signals(number).name, " at once" if self._stop_now.is_set() else "")

    def _call_desk(self, services: Services, stories: Stories) -> CallDesk:
        return CallDesk(
            self._hub,
            self._engine,
            services.prompts,
            self._metrics,
            services.defaults,
            services.constraints,
            services.answers,
            services.heads,
            services.adapter_hashes,
            stories,
            services.lane,
        )

    def _deliver(self, step: int, events: list[CallEvent]) -> None:
        try:
            self.desk.deliver(step, events)
        except Exception as error:  # noqa: BLE001 - the loop's edge: a lost step would leave its calls silent for ever
            self._on_crash(error)

    def _pooled(self, num_tokens: int, seconds: float) -> None:
        """Count an answered call for vectors or scores."""
        self._metrics.pooled(num_tokens, seconds)
        self.desk.rates.held(time.monotonic() - seconds)

    def _crash_from_thread(self, error: BaseException) -> None:
        """Report a crash; the engine's thread calls this as its last act."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending already
            self._loop.call_soon_threadsafe(self._on_crash, error)

    def _on_crash(self, error: BaseException) -> None:
        logger.critical("the engine failed, or a step of it could not be delivered: %s", error, exc_info=error)
        self._crash = error
        self._calls.draining = True
        self._stop_now.set()
        self._stop.set()

    def _app(self, probes: Probes) -> ASGIApp:
        return build_app(
            desk=self.desk,
            hub=self._hub,
            metrics=self._metrics,
            shortage=self._shortage,
            access=WorkerAccess(self._place.secret, self._place.worker, self._boot),
            pool=self._services.pool,
            more=[*probes.routes(), *self._services.routes()],
        )

    def _heartbeat(self) -> Heartbeat:
        load, shelf, hashes = self._engine.load(), self._services.adapters, self._services.adapter_hashes()
        return Heartbeat(
            worker=self._place.worker,
            boot=self._boot,
            model=self._place.model,
            address=self.address,
            slots=load.slots,
            slots_busy=load.slots_busy,
            n_ctx=self._engine.n_ctx,
            kv_tokens=load.kv_tokens,
            kv_tokens_used=load.kv_tokens_used,
            facts=self._place.facts,
            fingerprint=self._place.fingerprint,
            draining=self._calls.draining or self._shortage.lasts,
            started_at=self._started_at,
            kind=self._services.kind,
            infill=self._services.infill,
            adapters=tuple(hashes),
            adapter_hashes=hashes,
            adapters_resident=() if shelf is None else shelf.resident(),
            adapter_load_ms=0.0 if shelf is None else shelf.load_ms(),
            adapter_room=0 if shelf is None else shelf.room(),
            overdraft=load.overdraft,
            load=self.desk.rates.load(load, self._engine.counters),
        )

    def _facts(self) -> dict[str, Any]:
        load = self._engine.load()
        return {
            "status": "draining" if self._calls.draining else "ok",
            "kind": self._services.kind,
            "model": self._place.model,
            "worker": self._place.worker,
            "boot": self._boot,
            "slots": load.slots,
            "slots_busy": load.slots_busy,
            "version": self._place.version,
        }


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
