"""Makes a Redis client from a URL, the same way in gateways, workers and supervisors.

A client connects on first use and reconnects when needed. Each client has a gate (`trouble.Gate`): a failed attempt to
connect closes it for a moment, longer after each failure and with a random part, so that not all clients reconnect at
once when Redis comes back. While the gate is closed, commands that need a new connection fail at once.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, cast

import redis.asyncio
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, InvalidResponse, ReadOnlyError, RedisError, ResponseError, TimeoutError

from workers.process.resolver import RESOLVER, connect_tcp, first_connected
from workers.process.sockets import notice_dead_peer, tcp_options
from workers.redis.bounded_answers import bounded_parser
from workers.redis.cluster import ClusterClient
from workers.redis.long_commands import ClusterLongCommands, LongCommands, PoolCommands
from workers.redis.short_commands import (
    CLOSED,
    ClusterCommands,
    Command,
    ServerCommands,
    ShortCommands,
    ShortConnection,
)
from workers.redis.trouble import Gate
from workers.redis.url import Login, RedisUrl, Tls, checked

MAX_CONNECTIONS = 100
"""Maximum number of connections of one client to its server. A Cluster's client runs at most this many commands at the
same time. Further commands wait for their turn."""
UNBOUNDED = 2**31
"""redis-py's own limit of a pool, set too high to be reached: `_Pool` has a limit at which commands wait instead."""

SENTINEL_TIMEOUT_S = 0.5
"""Maximum seconds to wait for one Sentinel. Sentinels are asked one after the other; the first answer counts."""
UNREADABLE = (InvalidResponse, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that redis-py's parsers raise over bytes that are no valid answer of a Redis."""


def connect(url: str, *, timeout_s: float, retries: int, longest_bytes: int = 0) -> redis.asyncio.Redis:
    """Return a client for any URL of `workers.redis.url`; nothing is sent yet.

    `timeout_s` bounds each of: the wait for a free connection, connecting, and the wait for one answer. `retries`: how
    often a command is sent again after its connection broke, so it can run more than once. `longest_bytes`: bytes after
    which an answer raises AnswerTooLong, 0: none (answers to short commands and of Sentinels are not bounded). Raises
    BadRedisUrl."""
    place = checked(url)
    options = {
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s,
        **_noticing(place),
        **_login(place.login),
        **_tls_options(place.tls),
        **({"parser_class": bounded_parser(longest_bytes)} if longest_bytes else {}),
    }
    match place.kind:
        case "cluster":
            options["ssl"] = place.tls is not None
            # The class is no `Redis`, but has the same commands and behaves in the same way (`workers.redis.cluster`).
            kind = _PlainTls if place.tls else _PlainTcp
            client = ClusterClient(place.hosts, timeout_s, retries, MAX_CONNECTIONS, options, kind)
            return cast(redis.asyncio.Redis, client)
        case "sentinel":
            return _behind_sentinels(place, {**options, "retry": _retry(retries), "db": place.db}, retries)
        case _:
            pool = _Pool(**_where(place), **options, retry=_retry(retries), db=place.db)
            return _client(pool, _server_commands(place, timeout_s, retries), retries)


def short_commands_of(client: redis.asyncio.Redis) -> ShortCommands:
    """Return what sends the client's short commands. `client`: a result of `connect`."""
    known: object = client
    if isinstance(known, ClusterClient):
        return ClusterCommands(known)
    if isinstance(known, _Client):
        return known.short_commands
    raise TypeError("this client was not made by workers.redis.link.connect")


def long_commands_of(client: redis.asyncio.Redis) -> LongCommands:
    """Return what sends the client's commands with long values or replies. `client`: a result of `connect`."""
    known: object = client
    if isinstance(known, ClusterClient):
        return ClusterLongCommands(known)
    if isinstance(known, _Client):
        return known.long_commands
    raise TypeError("this client was not made by workers.redis.link.connect")


def cluster_of(client: redis.asyncio.Redis) -> ClusterClient | None:
    """Return the client if it is a ClusterClient, otherwise None."""
    known: object = client
    return known if isinstance(known, ClusterClient) else None


async def run_command(client: redis.asyncio.Redis, command: Command) -> Any:
    """Run a command that the client has no method for, and return its answer. Raises redis.RedisError, OSError."""
    return await client.execute_command(*command)  # type: ignore[no-untyped-call]


def _retry(retries: int) -> Retry:
    return Retry(NoBackoff(), retries, supported_errors=(ConnectionError,))


def _where(place: RedisUrl) -> dict[str, Any]:
    if place.kind == "socket":
        return {"connection_class": _Unix, "path": place.path}
    host, port = place.hosts[0]
    return {"connection_class": _Tls if place.tls else _Tcp, "host": host, "port": port}


class _Client(redis.asyncio.Redis):
    """A client of one server, with a connection for short commands beside its pool."""

    short_commands: ServerCommands
    long_commands: PoolCommands

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self.short_commands.close()
        await asyncio.sleep(0)  # the event loop may be closed next: the connection ends in its next turn
        await super().aclose(close_connection_pool)


def _client(pool: ConnectionPool, short_commands: ServerCommands, retries: int) -> _Client:
    client = cast(_Client, _Client.from_pool(pool))
    client.short_commands = short_commands
    client.long_commands = PoolCommands(pool, retries)
    return client


def _server_commands(
    place: RedisUrl, timeout_s: float, retries: int, find: Callable[[], Awaitable[tuple[str, int]]] | None = None
) -> ServerCommands:
    """Return the short commands of a server. `find` returns the server's host and port; None: they are in `place`."""
    tls = _tls_context(place.tls)

    async def dial(protocol: Callable[[], ShortConnection]) -> ShortConnection:
        if place.kind == "socket":
            loop = asyncio.get_running_loop()
            return (await loop.create_unix_connection(protocol, place.path))[1]
        host, port = await find() if find is not None else place.hosts[0]
        transport, wire = await connect_tcp(protocol, host, port, tls=tls)
        notice_dead_peer(transport.get_extra_info("socket"))
        return wire

    login: list[Command] = []
    if place.login.username or place.login.password:
        login.append(("AUTH", *filter(None, (place.login.username, place.login.password))))
    if place.db:
        login.append(("SELECT", place.db))
    name = place.path or place.service or "{}:{}".format(*place.hosts[0])
    return ServerCommands(dial, login, place=name, timeout_s=timeout_s, retries=retries)


def _tls_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Return what TLS connections are made with. It is the same as redis-py makes of `_tls_options`."""
    if tls is None:
        return None
    files = {option: os.path.expanduser(path) for option, path in tls.files.items()}
    context = ssl.create_default_context()
    context.check_hostname = tls.check_hostname and tls.verify
    context.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_NONE
    if "ssl_certfile" in files:
        context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"))
    if "ssl_ca_certs" in files:
        context.load_verify_locations(files["ssl_ca_certs"])
    return context


def _behind_sentinels(place: RedisUrl, options: dict[str, Any], retries: int) -> redis.asyncio.Redis:
    """Return a client of the server that the Sentinels name as master."""
    bound = min(SENTINEL_TIMEOUT_S, options["socket_timeout"])
    asked = {
        "socket_connect_timeout": bound,
        "socket_timeout": bound,
        "retry": _retry(0),
        "ssl": place.tls is not None,
        **_login(place.sentinel_login),
        **_tls_options(place.tls),
    }
    sentinels = _Sentinels(place.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    for client in sentinels.sentinels:
        client.connection_pool.connection_class = _PlainTls if place.tls else _PlainTcp
    kind = _SentinelTls if place.tls else _SentinelTcp
    pool = _SentinelPool(place.service, sentinels, connection_class=kind, **options)
    commands = _server_commands(
        place, options["socket_timeout"], retries, lambda: sentinels.discover_master(place.service)
    )
    return _client(pool, commands, retries)


def _noticing(place: RedisUrl) -> dict[str, Any]:
    """Return options (TCP keep-alive) by which even a silent subscription notices that its server's machine is gone."""
    if place.kind == "socket":
        return {}
    return {"socket_keepalive": True, "socket_keepalive_options": dict(tcp_options())}


def _login(login: Login) -> dict[str, str]:
    given = {"username": login.username, "password": login.password}
    return {name: value for name, value in given.items() if value}


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        **{option: os.path.expanduser(path) for option, path in tls.files.items()},
        "ssl_check_hostname": tls.check_hostname,
        "ssl_cert_reqs": "required" if tls.verify else "none",
    }


class _Written(AbstractConnection):
    """A connection that raises a ConnectionError where redis-py alone would let uvloop's RuntimeError through: when the
    server closes the connection just as a command is written."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)
        except RuntimeError as error:
            raise ConnectionError(f"the connection to Redis was closed as it was written to ({error})") from None

    async def disconnect(self, nowait: bool = False, *args: Any, **options: Any) -> None:
        """Close the connection; without waiting, after an error, drop what was not sent yet: a long command that was
        given up would stay in memory until Redis reads on, and then run."""
        if nowait and (writer := self._writer) is not None:
            writer.transport.abort()
        await super().disconnect(nowait, *args, **options)


class _Checked(_Written):
    """A connection that closes, with a ConnectionError, if its server is a replica now and refuses a write: the next
    connection finds the new master. It also closes if the server sends bytes that are no valid answer, for which
    redis-py alone would raise ValueError or the like."""

    is_over = False
    """Whether its pool has been closed, so that it must not connect any more."""

    async def connect_check_health(self, *args: Any, **options: Any) -> None:
        if not self.is_over:
            await super().connect_check_health(*args, **options)
        if self.is_over:
            await self.disconnect(nowait=True)
            raise ConnectionError(CLOSED)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            # Redis 6.2 wraps an error that a script ran into in another message.
            if isinstance(error, ReadOnlyError) or "-READONLY" in str(error):
                await self.disconnect(nowait=True)
                raise ConnectionError("this Redis is a replica now and takes no writes") from None
            raise
        except UNREADABLE as error:
            await self.disconnect(nowait=True)
            raise ConnectionError(f"what came from Redis is no answer ({type(error).__name__}: {error})") from None


class _ByName(_Written, Connection):
    """A connection to the addresses that RESOLVER finds for its host. A certificate must be for the host's name."""

    _address = ""
    """The address that is tried now."""

    def _connection_arguments(self) -> dict[str, Any]:
        arguments = {**super()._connection_arguments(), "host": self._address}
        return {**arguments, "server_hostname": self.host} if "ssl" in arguments else arguments

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            await first_connected(await RESOLVER.addresses(self.host), self._connect_to_address)

    async def _connect_to_address(self, address: str) -> None:
        self._address = address
        await super()._connect()  # type: ignore[no-untyped-call]


class _PlainTcp(_ByName):
    pass


class _PlainTls(_ByName, SSLConnection):
    pass


class _Tcp(_Checked, _ByName):
    pass


class _Tls(_Checked, _ByName, SSLConnection):
    pass


class _Unix(_Checked, UnixDomainSocketConnection):
    pass


class _SentinelTcp(_Checked, _ByName, SentinelManagedConnection):
    pass


class _SentinelTls(_Checked, _ByName, SentinelManagedSSLConnection):
    pass


class _Sentinels(Sentinel):
    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            found: tuple[str, int] = await super().discover_master(service_name)
        except MasterNotFoundError:
            # The library's message lists each client with all its options.
            line = f"none of the {len(self.sentinels)} Sentinels answers that it knows a living master {service_name!r}"
            raise MasterNotFoundError(line) from None
        return found


class _Pool(ConnectionPool):
    """A pool of `MAX_CONNECTIONS` connections behind a gate. Commands wait for a free connection in order of arrival.

    redis-py's own pool raises an error when no connection is free; callers would take that for a Redis that is down."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "max_connections": UNBOUNDED})
        self._gate = Gate()
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._wait_s: float = options["socket_timeout"]
        self._is_closed = False

    async def aclose(self) -> None:
        """Close all connections for good: a retry of what waits now would make one that nobody closes."""
        self._is_closed = True
        connections: Any = (*self._available_connections, *self._in_use_connections)
        for connection in connections:
            connection.is_over = True
        await super().aclose()

    async def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except builtins.TimeoutError:
            message = f"none of {MAX_CONNECTIONS} connections to Redis was free within {self._wait_s:g} s"
            raise TimeoutError(message) from None
        connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        connection.is_over = self._is_closed
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        try:
            await super().release(connection)
        finally:
            self._free.release()

    async def ensure_connection(self, connection: Any) -> None:
        if connection.is_connected:
            await super().ensure_connection(connection)
            return
        self._gate.enter()
        try:
            await super().ensure_connection(connection)
        except (RedisError, OSError) as error:
            self._gate.failed(error)
            raise
        self._gate.passed()


class _SentinelPool(_Pool, SentinelConnectionPool):
    """A pool, behind a gate, of connections to the master; closing it also closes the clients of the Sentinels."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()
