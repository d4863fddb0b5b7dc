"""Runs a worker process around its engine: listen, register, serve, drain, leave (`workers.service.lifecycle`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import ASGIApp

from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad
from workers.http_server.acceptor import raise_limit
from workers.http_server.connections import ConnectionBounds
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer
from workers.metrics.worker import WorkerMetrics
from workers.process.limits import HeapUpkeep
from workers.process.signals import RESERVED_BY, stop_signals
from workers.process.sockets import address_of
from workers.protocol.control import left_s
from workers.protocol.events import Failure, FailureCode
from workers.protocol.exits import Exit
from workers.protocol.framing import HEALTH_PATH
from workers.protocol.heartbeat import DeviceMemory, Heartbeat, ModelFacts, WorkerKind
from workers.service.calls.stream import EventHub
from workers.service.lifecycle import Lifecycle, is_shortage
from workers.service.registration.gateway_watch import GatewayWatch
from workers.service.registration.heartbeat import Adverts, Rates, Registration, connect
from workers.service.routes.app import METRICS_PATH, WorkerAccess, build_app
from workers.service.routes.bodies import refusal_body
from workers.service.routes.probes import READY_PATH, SETTLE_S, Probes

FLUSH_S = 2.0
"""Maximum seconds for sending the last events; then the connections are closed."""

KEEP_ALIVE_S = 90
"""Seconds that idle HTTP connections stay open: longer than clients keep them, so that requests find none closed."""

RESERVED_PATHS = frozenset(path.encode() for path in (HEALTH_PATH, READY_PATH, METRICS_PATH))
"""Paths that are answered even when all connections for other requests are taken."""

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The part of an engine that the server needs."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def counters(self) -> EngineCounters: ...
    def load(self) -> EngineLoad: ...
    def start(self) -> None: ...
    def stop(self) -> None:
        """End the engine's thread; no event comes after that."""


class Calls(Protocol):
    """The part that the server needs of an object that keeps a worker's calls (`GenerateCalls` or `PooledCalls`)."""

    @property
    def idle(self) -> asyncio.Event: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def rates(self) -> Rates: ...
    def end_all(self, why: Callable[[], Failure]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """One worker's identity in the fleet, and how it is reached."""

    worker: str
    model: str
    address: str
    """URL at which gateways reach the worker; empty: made from the listening socket's address."""
    secret: str
    redis_url: str
    facts: ModelFacts
    version: str
    fingerprint: str = ""
    """Hash of the model's file and the build of llama.cpp, as in `Heartbeat`; empty: unknown."""
    drain_s: float = 20.0
    gateway_grace_s: float = 5.0
    redis_wait_s: float = 60.0
    """Seconds that a starting worker waits for Redis, without which no gateway finds it. The wait is long because a
    new start would have to load the model again."""
    boot: str = field(default_factory=lambda: secrets.token_hex(6))
    """Id of this process; the next process with the same `worker` id has another one."""
    started_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The parts of a worker that a server runs, wired by its composition root."""

    kind: WorkerKind
    engine: Engine
    calls: Calls
    hub: EventHub
    metrics: WorkerMetrics
    routes: Sequence[Route]
    """All routes but those that every worker has."""
    adverts: Adverts | None
    """Prefix hashes for the fleet; None: conversations are not cached."""
    announced: Callable[[Heartbeat], Heartbeat]
    """Adds to a heartbeat what only this kind of worker reports."""
    retire: Callable[[], None]
    """Begins to write the cache to disk for other workers. Called when the worker is reserved and when it starts to
    drain; calls go on."""
    stay: Callable[[], None]
    """Undoes `retire`. Called when the worker is released."""


def metrics_of(
    worker: WorkerIdentity,
    engine: Engine,
    life: Lifecycle,
    forms: Callable[[], Mapping[str, int]] = dict,
    devices: Callable[[], Sequence[DeviceMemory]] = tuple,
) -> WorkerMetrics:
    """Return a worker's metrics, in a registry of their own. `forms` and `devices`: as for `WorkerMetrics`."""
    return WorkerMetrics(
        CollectorRegistry(),
        worker.model,
        engine.load,
        lambda: engine.counters,
        forms,
        worker=worker.worker,
        version=worker.version,
        draining=lambda: life.draining or life.reserved,
        devices=devices,
    )


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
        identity: WorkerIdentity,
        sock: socket.socket,
        life: Lifecycle,
        served: Served,
        *,
        hung_s: Callable[[], float] = float,
        http: type[HttpProtocol] = HttpProtocol,
    ) -> None:
        """`hung_s` returns the seconds that the engine's step has run beyond its bound; 0 while it has not."""
        self._identity = identity
        self._sock = sock
        self._life = life
        self._served = served
        self._engine, self._calls = served.engine, served.calls
        self.address = identity.address or address_of(sock)
        """Base URL at which gateways reach the worker."""
        self._redis = connect(identity.redis_url)
        self._registration = Registration(self._redis, identity.secret, self._heartbeat, served.adverts)
        life.shortage.listen(self._registration.hurry)
        probes = Probes(
            *(self._facts, life, self._calls, self._registration.registered, self._begin_to_drain, hung_s),
            identity.boot,
        )
        app = build_app(
            hub=served.hub,
            metrics=served.metrics,
            shortage=life.shortage,
            access=WorkerAccess(identity.secret, identity.worker, identity.boot),
            routes=[*probes.routes(), *served.routes],
        )
        self._http = _http_server(app, http)

    async def run(self) -> Exit:
        """Serve until a signal or a crash; return the process's exit code."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._life.signalled, number)
        for number, reserved in RESERVED_BY.items():
            loop.add_signal_handler(number, self._reserve, reserved)
        loop.set_exception_handler(self._on_loose_error)
        self._engine.start()
        hub = self._served.hub
        try:
            async with asyncio.TaskGroup() as group:
                http = group.create_task(self._http.serve(sockets=[self._sock]))
                watch = GatewayWatch(self._redis, hub.gateways, hub.doubt)
                beats = group.create_task(self._registration.run())
                watching = group.create_task(watch.run())
                upkeep = group.create_task(HeapUpkeep().run())
                code = await self._live()
                hub.close()
                self._http.should_exit = True
                await http
                beats.cancel()
                watching.cancel()
                upkeep.cancel()
            await self._registration.leave()
        finally:
            self._engine.stop()
            await self._redis.aclose()
            self._sock.close()
        return code

    async def _live(self) -> Exit:
        """Serve from the first heartbeat to the last event; return the exit code."""
        identity, life = self._identity, self._life
        try:
            async with asyncio.timeout(identity.redis_wait_s):
                await _first(self._registration.registered, life.stopping)
        except TimeoutError:
            logger.error("Redis did not answer for %.0f s; check --redis-url", identity.redis_wait_s)
            return Exit.NO_REDIS
        logger.info("serving %s at %s with %d slots", identity.model, self.address, self._engine.slots)
        await _first(life.stopping, life.leaving)
        if not life.stopping.is_set():
            await self._finish()
        if life.crash is not None:
            code = Exit.CRASHED
        else:
            code = await self._drain() if life.stopping.is_set() else Exit.DRAINED
        self._calls.end_all(self._last_words)
        await self._flush()
        return code

    def _on_loose_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that no task waits for, such as one of reading a connection."""
        if is_shortage(context.get("exception")):
            self._life.shortage.note()
        loop.default_exception_handler(context)

    def _begin_to_drain(self) -> None:
        """Take no new calls from now on; running calls go on."""
        if self._life.drain():
            self._served.retire()
            self._registration.hurry()
            logger.info("draining %d calls", self._calls.num_calls)

    def _reserve(self, reserved: bool) -> None:
        """Have gateways send no new calls, or send calls again."""
        if self._life.reserve(reserved):
            self._registration.hurry()
            (self._served.retire if reserved else self._served.stay)()
            logger.info("reserved: no new calls" if reserved else "released: new calls are taken")

    async def _finish(self) -> None:
        """Wait until no call runs, however long that takes; return early if the process is to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._life.stopping.wait()
        await _first(self._calls.idle, self._life.stopping)

    async def _drain(self) -> Exit:
        self._begin_to_drain()
        bound_s = left_s(self._identity.drain_s, time.monotonic() - self._life.drains_since)
        logger.info("stopping in %.0f s at most", bound_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await _first(self._calls.idle, self._life.at_once)
        if self._life.crash is not None:
            return Exit.CRASHED
        if self._calls.num_calls:
            logger.warning("cutting off %d calls that did not finish", self._calls.num_calls)
            return Exit.DRAIN_CUT
        return Exit.OK

    async def _flush(self) -> None:
        """Wait until every gateway's connection has taken the last events, at most `FLUSH_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while not self._served.hub.caught_up:  # noqa: ASYNC110 - once, at the end; an event would cost every step
                    await asyncio.sleep(0.01)

    def _last_words(self) -> Failure:
        if is_shortage(self._life.crash):
            return self._life.shortage.note()
        if self._life.crash is not None:
            return Failure(FailureCode.INTERNAL, "the worker's engine failed; send the request again")
        return Failure(
            FailureCode.DRAINING, "the worker stopped before the answer was finished; send the request again"
        )

    def _heartbeat(self) -> Heartbeat:
        identity, load, counters = self._identity, self._engine.load(), self._engine.counters
        beat = Heartbeat(
            worker=identity.worker,
            boot=identity.boot,
            model=identity.model,
            address=self.address,
            slots=load.slots,
            slots_busy=load.slots_busy,
            n_ctx=self._engine.n_ctx,
            kv_tokens=load.kv_tokens,
            kv_tokens_used=load.kv_tokens_used,
            facts=identity.facts,
            fingerprint=identity.fingerprint,
            draining=self._life.draining or self._life.reserved or self._life.shortage.lasts,
            reserved=self._life.reserved,
            started_at=identity.started_at,
            kind=self._served.kind,
            overdraft=load.overdraft,
            load=self._calls.rates.load(load, counters),
            cache_ram_bytes=counters.ram_bytes,
            cache_disk_bytes=counters.disk.num_bytes,
        )
        return self._served.announced(beat)

    def _facts(self) -> dict[str, Any]:
        identity, load = self._identity, self._engine.load()
        return {
            "status": "draining" if self._life.draining else "reserved" if self._life.reserved else "ok",
            "kind": self._served.kind,
            "model": identity.model,
            "worker": identity.worker,
            "boot": identity.boot,
            "slots": load.slots,
            "slots_busy": load.slots_busy,
            "version": identity.version,
        }


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
