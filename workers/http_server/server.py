"""Runs uvicorn's server with bounded connections and without its signal handlers: its owner decides when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn

from workers.http_server.acceptor import Acceptor, SharedCounts
from workers.http_server.connections import ConnectionBounds, Connections
from workers.http_server.pacer import KnownCallers
from workers.http_server.state import Form, ServerState
from workers.http_server.tls import Tls
from workers.process.ticks import wait_tick

ENDED_LOOK_S = 0.005

log = logging.getLogger(__name__)


class ServerDiffers(RuntimeError):
    """Raised if the installed uvicorn lacks something that this server builds on."""


def check_parts(protocol: type) -> None:
    """Check that the base classes that `protocol` has from uvicorn have every name in `protocol.UVICORN_PARTS`.

    Raises ServerDiffers."""
    theirs = [each for each in protocol.__mro__ if each.__module__.startswith("uvicorn.")]
    there = {name for each in theirs for name in vars(each)}
    for each in theirs:
        there.update(*(made.__code__.co_names for made in vars(each).values() if inspect.isfunction(made)))
    missing = sorted(set(getattr(protocol, "UVICORN_PARTS", ())) - there)
    if missing:
        raise ServerDiffers(
            f"uvicorn {uvicorn.__version__} has no `{missing[0]}`, which `{protocol.__name__}` builds on. Install the "
            "version that Paddock's requirements name."
        )


class HttpServer(uvicorn.Server):
    """Serves on sockets that already listen, until `should_exit` is set."""

    def __init__(
        self,
        config: uvicorn.Config,
        form: Form,
        bounds: ConnectionBounds,
        callers: KnownCallers | None = None,
        counts: SharedCounts | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`form` writes the bodies of the server's own refusals. `callers`: callers known by their keys, each with a
        queue of its own when many requests wait; None: nobody has a key. `counts`: connections of all processes that
        accept on the first of its listening sockets; None: no other process does. `tls`: for its listening sockets but
        Unix ones, which carry none.

        Raises ServerDiffers."""
        self._stopping = asyncio.Event()
        super().__init__(config)
        for protocol in (config.http, config.ws):
            if isinstance(protocol, type):
                check_parts(protocol)
        self._counts = counts
        self._tls = tls
        free = tls.without_certificate if tls else frozenset[bytes]()
        self.server_state = self.state = ServerState(form, Connections(bounds), config.ws_max_size, callers, free)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        acceptors = [
            Acceptor(
                listener,
                self.state.bounded,
                self._protocol,
                None if number else self._counts,
                None if listener.family == socket.AF_UNIX else self._tls,
                self.state.parse_turns,
            )
            for number, listener in enumerate(sockets or ())
        ]
        # uvicorn closes them and waits for them, as it does with its own servers.
        self.servers = cast(list[asyncio.base_events.Server], acceptors)
        for acceptor in acceptors:
            acceptor.start()
        self.started = True

    async def main_loop(self) -> None:
        """Renew the `date` header every second until `should_exit` is set.

        uvicorn's own loop looks ten times a second whether it is, which wakes an idle process."""
        while not await self.on_tick(0):
            await wait_tick(1.0, self._stopping)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and wait until the open connections and requests have ended, as long as the configuration
        says. uvicorn's own way looks for their end ten times a second, so that nothing ends within a tenth."""
        for closed in (*self.servers, *(sockets or ())):
            closed.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - uvicorn's own sets
                    await asyncio.sleep(ENDED_LOOK_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            log.warning("%d requests have not ended in time and are cut off", len(self.server_state.tasks))
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    @property
    def should_exit(self) -> bool:
        return self._stopping.is_set()

    @should_exit.setter
    def should_exit(self, should_exit: bool) -> None:
        if should_exit:
            self._stopping.set()
        else:
            self._stopping.clear()

    def leave_port(self) -> None:
        """Accept no more connections on the first listening socket; other processes do."""
        self.servers[0].close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.state, app_state=self.lifespan.state)  # type: ignore[call-arg]
