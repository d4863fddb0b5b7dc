"""Runs the accounts service: listens, serves until a signal stops it, and exits with a code for the reason.

A database that is down does not end the service: requests get a 503, and usage waits in Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.types import ASGIApp

from accounts.app import build
from accounts.budgets.webhooks import WebhookUnusable
from accounts.database.database import DatabaseUnusable
from accounts.database.upgrade import DatabaseTooNew
from accounts.protocol.sign_on import SignOnInvalid
from accounts.settings import AccountsSettings, socket_path
from workers.http_server.acceptor import raise_limit
from workers.http_server.connections import ConnectionBounds
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer
from workers.http_server.state import Refusal
from workers.process import log_lines
from workers.process.signals import stop_signals
from workers.process.sockets import PortTaken, UnixPath, listen, listen_unix
from workers.protocol.exits import Exit
from workers.redis.link import connect
from workers.redis.url import BadRedisUrl

log = logging.getLogger(__name__)

SOCKET_MODE = 0o600
CLOSE_S = 5
"""Seconds that requests may take to end once the service stops."""
REDIS_TIMEOUT_S = 5.0


def run(settings: AccountsSettings) -> int:
    """Run the service until a signal stops it, and return the exit code."""
    log_lines.configure(settings.log_level, settings.log_format, ())
    try:
        return int(asyncio.run(_live(settings)))
    except (DatabaseUnusable, SignOnInvalid, WebhookUnusable, BadRedisUrl) as error:
        print(f"paddock accounts: {error}", file=sys.stderr)
        return int(Exit.USAGE)
    except ExceptionGroup as group:
        if (too_new := group.subgroup(DatabaseTooNew)) is None:
            raise
        print(f"paddock accounts: {too_new.exceptions[0]}", file=sys.stderr)
        return int(Exit.USAGE)
    except PortTaken as error:
        print(f"paddock accounts: {error}", file=sys.stderr)
        return int(Exit.PORT_TAKEN)
    except OSError as error:
        print(f"paddock accounts: {error.strerror or error}", file=sys.stderr)
        return int(Exit.USAGE)


async def _live(settings: AccountsSettings) -> Exit:
    if not settings.redis_url:
        print("paddock accounts: no Redis is named; set PADDOCK_REDIS_URL, as for gateways", file=sys.stderr)
        return Exit.USAGE
    with contextlib.ExitStack() as held:
        listener = held.enter_context(_listener(settings, held))
        redis = connect(settings.redis_url, timeout_s=REDIS_TIMEOUT_S, retries=0)
        try:
            accounts = build(settings, redis)
            server = _server(accounts.asgi)
            with _stopping(server):
                async with accounts.running():
                    log.info("accounts ready", extra={"fields": {"database": accounts.database.engine.dialect.name}})
                    await server.serve(sockets=[listener])
            accounts.database.close()
        finally:
            await redis.aclose()
    log.info("accounts stopped")
    return Exit.OK


def _listener(settings: AccountsSettings, held: contextlib.ExitStack) -> socket.socket:
    host, _, port = settings.accounts_listen.rpartition(":")
    if port.isdigit() and "/" not in settings.accounts_listen:
        return listen(host, int(port))
    path = Path(settings.accounts_listen) if settings.accounts_listen else socket_path(settings.state_dir)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = listen_unix(path, SOCKET_MODE)
    held.callback(UnixPath(path).remove)
    return listener


def _server(app: ASGIApp) -> HttpServer:
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    return HttpServer(config, _refusal_body, ConnectionBounds.of(raise_limit()))


def _refusal_body(refusal: Refusal) -> bytes:
    told = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": None}
    return msgspec.json.encode({"error": told})


@contextlib.contextmanager
def _stopping(server: HttpServer) -> Iterator[None]:
    """Stop the server when a signal asks this process to stop."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    numbers: tuple[signal.Signals, ...] = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
