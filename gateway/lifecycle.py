"""Runs a gateway process: starts its parts in order, serves, drains on a signal, and exits with a code for the reason.

    settings -> the port is ours -> Redis answers -> keys, catalog, fleet -> serving -> draining -> the end

The first SIGTERM, SIGINT or SIGHUP (a closed terminal) drains the gateway: new calls and `/ready` get a 503, running
streams go on for `drain_s`, then end with an error in the stream. A second signal, unless it is SIGHUP, cuts them off
at once. SIGUSR1, from `paddock up` with several gateways, drains it too, but first leaves new connections and callers
to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import redis.asyncio
import uvicorn
import uvloop
from redis.exceptions import RedisError

from accounts.protocol.records import KeysInvalid
from accounts.protocol.sign_on import SignOnInvalid
from gateway import __version__
from gateway.access.local_caller import WARNING, OpenRefused, check_open
from gateway.access.proxies import ProxiesInvalid
from gateway.api.http.websocket_protocol import WebSocketProtocol, connection_bounds, refusal_body
from gateway.api.intake.disconnect import beside
from gateway.app import App, build
from gateway.settings import GatewaySettings
from gateway.store.client import connect
from gateway.telemetry import finish
from gateway.tls import tls_of
from workers.http_server.acceptor import SharedCounts
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer
from workers.http_server.tls import Tls, TlsUnusable
from workers.models.catalog import CatalogError
from workers.process.limits import keep_little, started_threads
from workers.process.signals import is_hurrying, stop_signals
from workers.process.sockets import PortTaken, UnixPath, listen, listen_unix
from workers.protocol.exits import Exit
from workers.tracing.tracer import Tracer, TracingUnusable, tracing

log = logging.getLogger(__name__)

ASIDE = 8
"""Number of threads for work that would block the event loop."""
LEAVE_S = 1.5
"""Seconds for which a gateway that is replaced still takes requests on its open connections, and tells their callers
with `Connection: close` to open new ones, which other gateways accept."""
CLOSE_S = 2.0
"""Seconds that open connections may take to close once every answer is complete."""
KEEP_ALIVE_S = 75
"""Seconds for which idle connections stay open. Balancers close theirs earlier (60 s: nginx, ALB), as they should: if
the gateway closed one first, a request on its way would fail."""
GC_THRESHOLDS = 5_000, 3, 50
"""Arguments of `gc.set_threshold`. After 5,000 new objects, the youngest generation is collected, which takes 0.3 ms (4
ms if all live on); after 3 such collections, the second generation; after 50 of the second, the oldest. Streams leave
no garbage to collect; a caller that disconnects leaves 150 objects, 19 KiB. With 10 (Python's default) instead of 3,
one team's waiting calls grew the second generation to 100,000 objects, which took 54 ms to collect."""


LARGE_BLOCK_BYTES = 256 << 10
"""Blocks of this size or more return to the system when freed. Only request bodies and what is made of them are."""


SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread may hold the interpreter while the event loop waits for it; one long C call may take longer."""


class CannotStart(Exception):
    """The gateway can't start. The message is one line for the operator; `code` is the exit code."""

    def __init__(self, code: Exit, line: str) -> None:
        super().__init__(line)
        self.code = code


def run(settings: GatewaySettings) -> int:
    """Run the gateway until a signal stops it, and return the exit code."""
    finish.configure(settings.log_level, settings.log_format)
    keep_little(LARGE_BLOCK_BYTES)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with _tracing(settings) as tracer, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # Started now: if a thread can't be started later, the part that needs it fails, and the gateway ends.
            runner.get_loop().set_default_executor(started_threads("paddock-aside", ASIDE))
            return int(runner.run(_live(settings, tracer)))
    except CannotStart as error:
        print(f"paddock gateway: {error}", file=sys.stderr)
        return int(error.code)


@contextlib.contextmanager
def _tracing(settings: GatewaySettings) -> Iterator[Tracer]:
    """Yield the tracer. Leave the `with` block only after the last span has ended. Raises CannotStart."""
    name = settings.gateway_id or f"{socket.gethostname()}-{os.getpid()}"
    resource = {"service.name": "paddock-gateway", "service.version": __version__, "service.instance.id": name}
    asked = (settings.otlp_endpoint, settings.otlp_headers, settings.trace_share)
    try:
        with tracing(*asked, resource, __version__, os.environ) as tracer:
            yield tracer
    except TracingUnusable as error:
        raise CannotStart(Exit.USAGE, str(error)) from None


async def _live(settings: GatewaySettings, tracer: Tracer) -> Exit:
    _check(settings)
    try:
        tls = tls_of(settings)
    except TlsUnusable as error:
        raise CannotStart(Exit.USAGE, str(error)) from None
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(listener) for listener in _listeners(settings, held)]
        _check_open(settings, listeners)
        asked = held.enter_context(_signals())
        client = _client(settings.redis_url)
        try:
            if not await _redis_answers(client, settings.redis_wait_s, asked.first):
                log.info("gateway stopped before it was ready")
                return Exit.OK
            app = await _built(settings, client, tracer)
            async with app.running():
                return await _serve(app, listeners, settings, asked, tls)
        except RedisError as error:
            raise CannotStart(Exit.NO_REDIS, f"Redis failed at the start: {error}") from error
        finally:
            await client.aclose()


def _check(settings: GatewaySettings) -> None:
    """Raise CannotStart if a setting without a default is unset."""
    if not settings.redis_url:
        raise CannotStart(
            Exit.USAGE,
            "no Redis is named; set PADDOCK_REDIS_URL (such as redis://127.0.0.1:6379/0), or run `paddock up`, "
            "which starts a private one",
        )
    if not settings.worker_secret:
        raise CannotStart(
            Exit.USAGE,
            "worker_secret is unset: give gateways and workers the same PADDOCK_WORKER_SECRET, or use `paddock up`",
        )


def _check_open(settings: GatewaySettings, listeners: list[socket.socket]) -> None:
    """Raise CannotStart if others than this machine's own callers could call without a key."""
    try:
        check_open(settings, os.environ, listeners)
    except OpenRefused as error:
        raise CannotStart(Exit.USAGE, str(error)) from None


def _server(app: App, listeners: list[socket.socket], settings: GatewaySettings, tls: Tls | None) -> HttpServer:
    config = uvicorn.Config(
        app.asgi,
        http=HttpProtocol,
        ws=WebSocketProtocol,
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=settings.ping_interval_s,
        # Clients that run a tool between two requests may read nothing, and so answer no ping, for as long.
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(CLOSE_S),
    )
    bounds, counts = connection_bounds(settings), _counts(settings, listeners)
    return HttpServer(config, refusal_body, bounds, app.callers, counts, tls)


async def _serve(
    app: App, listeners: list[socket.socket], settings: GatewaySettings, asked: Asked, tls: Tls | None
) -> Exit:
    server = _server(app, listeners, settings, tls)
    app.gauges.follow(server.state.bounded)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    if settings.open:
        log.warning("the gateway is open: %s", WARNING)
    log.info("gateway ready", extra={"fields": _told_of(listeners[0], settings)})
    drained: list[bool] = []

    async def drain() -> None:
        await asked.first.wait()
        if asked.replaced:
            server.leave_port()
            app.in_flight.drain()
            await _passed(LEAVE_S, asked.second)
        log.info("gateway stopping", extra={"fields": {"calls": app.pipeline.num_calls}})
        async with beside(_cut_when(asked.second, app)):
            drained.append(await app.drain(settings.drain_s))
        server.should_exit = True

    async with beside(drain()), contextlib.nullcontext() if tls is None else beside(tls.watch()):
        await server.serve(sockets=listeners)
    clean = bool(drained) and drained[0] and not asked.second.is_set()
    log.info("gateway stopped", extra={"fields": {"cut": not clean}})
    return Exit.OK if clean else Exit.DRAIN_CUT


class Asked:
    """The signals that the operator has sent: the first drains the gateway, the second cuts calls off."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.replaced = False
        """Whether the first signal was SIGUSR1: other gateways of this machine take what comes from now on."""

    def note(self, number: int) -> None:
        if not self.first.is_set():
            self.first.set()
        elif is_hurrying(number):
            self.second.set()

    def note_replaced(self) -> None:
        if not self.first.is_set():
            self.replaced = True
            self.first.set()


@contextlib.contextmanager
def _signals() -> Iterator[Asked]:
    asked = Asked()
    loop = asyncio.get_running_loop()
    stops = stop_signals()
    for number in stops:
        loop.add_signal_handler(number, asked.note, number)
    loop.add_signal_handler(signal.SIGUSR1, asked.note_replaced)
    try:
        yield asked
    finally:
        for number in (*stops, signal.SIGUSR1):
            loop.remove_signal_handler(number)


async def _passed(seconds: float, over: asyncio.Event) -> None:
    """Return after so many seconds, or when `over` is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()


async def _cut_when(event: asyncio.Event, app: App) -> None:
    await event.wait()
    app.pipeline.cut_all()


def _told_of(listener: socket.socket, settings: GatewaySettings) -> dict[str, object]:
    """Return the address that a socket listens on, as a log line tells it."""
    if listener.family == socket.AF_UNIX:
        return {"uds": str(settings.uds)}
    host, port = listener.getsockname()[:2]
    return {"host": host, "port": port}


def _counts(settings: GatewaySettings, listeners: list[socket.socket]) -> SharedCounts | None:
    """Return the connections of the gateways that share the first listener; None: this gateway alone has it."""
    if not settings.counts_fd:
        return None
    ports = [int(address.rpartition(":")[2]) for address in settings.gateway_targets.split(",")]
    return SharedCounts(settings.counts_fd, ports.index(listeners[1].getsockname()[1]), len(ports))


def _listeners(settings: GatewaySettings, held: contextlib.ExitStack) -> list[socket.socket]:
    """Return the sockets to serve on, before anything else is started; the one for admins, if there is one, comes last.

    Raises CannotStart."""
    listeners = _listeners_for_callers(settings, held)
    if settings.admin_fd:
        listeners.append(_inherited(settings.admin_fd))
    elif settings.admin_port:
        listeners.append(_listener(settings.host, settings.admin_port, "--admin-port"))
    return listeners


def _listeners_for_callers(settings: GatewaySettings, held: contextlib.ExitStack) -> list[socket.socket]:
    """Return the sockets of `listen_fds` or, without these, one that listens on the port or the Unix socket, whose path
    is removed at the end of `held`. Raises CannotStart."""
    if settings.listen_fds:
        return [_inherited(int(number)) for number in settings.listen_fds.split(",")]
    if settings.uds is None:
        return [_listener(settings.host, settings.port, "--port")]
    try:
        listener = listen_unix(settings.uds, int(settings.uds_mode, 8))
    except PortTaken as error:
        raise _taken(error, "--uds") from None
    except OSError as error:
        raise CannotStart(Exit.USAGE, error.strerror or str(error)) from None
    held.callback(UnixPath(settings.uds).remove)
    return [listener]


def _inherited(descriptor: int) -> socket.socket:
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotStart(Exit.USAGE, f"can't listen on the socket {descriptor}: {error.strerror}") from None


def _listener(host: str, port: int, flag: str) -> socket.socket:
    try:
        return listen(host, port, watched=False)
    except PortTaken as error:
        raise _taken(error, flag) from None
    except OSError as error:
        raise CannotStart(Exit.USAGE, f"can't listen on {host} port {port}: {error.strerror}") from None


def _taken(error: PortTaken, flag: str) -> CannotStart:
    return CannotStart(Exit.PORT_TAKEN, f"{error}; stop what listens there or choose another with {flag}")


def _client(url: str) -> redis.asyncio.Redis:
    try:
        return connect(url)
    except ValueError as error:
        raise CannotStart(Exit.USAGE, f"the Redis URL can't be used: {error}") from None


async def _redis_answers(client: redis.asyncio.Redis, wait_s: float, stop: asyncio.Event) -> bool:
    """Wait until Redis answers; return False if `stop` is set first. Raises CannotStart if it takes over `wait_s`."""
    # The client may swallow a cancellation, so the waiting looks at `stop` as well.
    waiting = asyncio.create_task(_wait_for_redis(client, wait_s, stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (waiting, stopping):
        task.cancel()
    await asyncio.wait({waiting, stopping})
    return not waiting.cancelled() and waiting.result() and not stop.is_set()


async def _wait_for_redis(client: redis.asyncio.Redis, wait_s: float, stop: asyncio.Event) -> bool:
    deadline = time.monotonic() + wait_s
    told = False
    while not stop.is_set():
        try:
            await client.ping()
            return True
        except (RedisError, OSError) as error:
            if time.monotonic() > deadline:
                line = f"Redis did not answer in {wait_s:g} s ({error}); start it or mend PADDOCK_REDIS_URL"
                raise CannotStart(Exit.NO_REDIS, line) from None
            if not told:
                log.warning("Redis does not answer yet (%s); waiting up to %g s for it", error, wait_s)
            told = True
        await asyncio.sleep(0.1)
    return False


async def _built(settings: GatewaySettings, client: redis.asyncio.Redis, tracer: Tracer) -> App:
    try:
        return await build(settings, client, tracer)
    except (CatalogError, KeysInvalid, ProxiesInvalid, SignOnInvalid) as error:
        raise CannotStart(Exit.USAGE, str(error)) from None
    except OSError as error:
        line = f"the state folder {settings.state_dir} can't be used: {error.strerror}; choose another with --state-dir"
        raise CannotStart(Exit.USAGE, line) from None
