"""Sends commands whose values may be long over connections of the client's pool, one for the commands of each call.

So nobody else's command waits behind such values, and no others end if they take too long.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from workers.redis.cluster import ClusterClient
from workers.redis.short_commands import Command
from workers.redis.trouble import LateTimeout


class LongCommands(Protocol):
    """Sends commands with long values or long replies to Redis, and returns their answers."""

    async def ask(self, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        """Run commands in order, and return their answers: bytes, numbers, lists, None, or an error that Redis replied.
        Raises redis.RedisError or OSError if there are no answers. Commands may run twice if a connection breaks.

        `timeout_s` bounds the whole call; None: the client's own bound holds, for sending and for each answer."""
        ...


class PoolCommands:
    """Sends long commands to one server."""

    def __init__(self, pool: ConnectionPool, retries: int) -> None:
        """`retries`: how often to send again what a broken connection left without an answer."""
        self._pool = pool
        self._retries = retries

    async def ask(self, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        if not commands:
            return []
        try:
            async with asyncio.timeout(None) if timeout_s is None else LateTimeout(timeout_s):
                for _ in range(self._retries):
                    try:
                        return await self._ask(commands, is_bounded=timeout_s is not None)
                    except ConnectionError:
                        pass  # a kept connection can be dead, as after a restart of Redis
                return await self._ask(commands, is_bounded=timeout_s is not None)
        except builtins.TimeoutError:
            raise TimeoutError(f"Redis did not answer within {timeout_s:g} s") from None

    async def _ask(self, commands: Sequence[Command], *, is_bounded: bool) -> list[Any]:
        connection: Any = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            with _without_timeout(connection, is_bounded):
                # If this is cancelled or fails, redis-py closes the connection, so no late answer is taken by others.
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await _answer(connection) for _ in commands]
        finally:
            await self._pool.release(connection)


class ClusterLongCommands:
    """Sends long commands to a Redis Cluster, whose own client gives each call a connection of its own."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster

    async def ask(self, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        return await self._cluster.send([(command, {}) for command in commands], timeout_s=timeout_s)


@contextmanager
def _without_timeout(connection: Any, lifted: bool) -> Iterator[None]:
    """Run a block without the connection's own bound on sending and reading if `lifted`; the caller then has one."""
    own_s = connection.socket_timeout
    connection.socket_timeout = None if lifted else own_s
    try:
        yield
    finally:
        connection.socket_timeout = own_s


async def _answer(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
