"""A Redis Cluster as a client that does what a single server's does, as far as one can.

redis-py's own differs where it hurts: some of its errors are no `RedisError`, a node that hangs can hold a command up
for many times its bound, and a transaction runs event loops in threads. A pipeline may mix slots and keeps the order
within each; the keys of a transaction lie in one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.cluster import ClusterNode, ClusterPipeline, ClusterPubSub, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ConnectionError,
    DataError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from workers.redis_gate import Gate

FRESH_S = 0.1
"""Whatever goes wrong, the table of slots is read again no sooner."""


class ClusterClient(RedisCluster):
    """All errors of its commands are RedisErrors or OSErrors, and none takes longer than twice `timeout_s`."""

    def __init__(
        self, hosts: Sequence[tuple[str, int]], timeout_s: float, retries: int, options: dict[str, Any]
    ) -> None:
        super().__init__(
            startup_nodes=[ClusterNode(host, port) for host, port in hosts],
            # Where some slots have no server, the models in the others go on.
            require_full_coverage=False,
            retry=Retry(NoBackoff(), retries),
            **options,
        )
        self._gate = Gate()
        self._bound_s = 2 * timeout_s
        self._read_at = float("-inf")

    async def initialize(self, *args: Any, **options: Any) -> ClusterClient:
        """Reads the table of slots if it is unknown or doubted. Raises ConnectionError where no node answers."""
        if not self._initialize:
            return self
        if time.monotonic() - self._read_at < FRESH_S and self.nodes_manager.default_node is not None:
            self._initialize = False
            return self
        self._gate.enter()
        try:
            await super().initialize(*args, **options)
        except (RedisClusterException, RedisError, OSError) as error:
            self._gate.failed(error)
            raise ConnectionError(f"no node of the Cluster could be asked: {error}") from error
        self._gate.passed()
        self._read_at = time.monotonic()
        return self

    async def refresh(self) -> None:
        """Something is not where the table says. Raises ConnectionError."""
        self._initialize = True
        await self.initialize()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self.bounded():
            return await super().execute_command(*args, **options)

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """What is done inside raises RedisErrors and OSErrors only, TimeoutError after the bound."""
        try:
            async with asyncio.timeout(self._bound_s):
                yield
        except RedisClusterException as error:
            raise ConnectionError(str(error)) from error

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> _Pipeline:
        return _Pipeline(self, bool(transaction))  # type: ignore[abstract]  # redis-py's own forgets an attribute, too

    def pubsub(self, *args: Any, **options: Any) -> _PubSub:
        return _PubSub(self, *args, **options)


class _Pipeline(ClusterPipeline):
    def __init__(self, client: ClusterClient, transaction: bool) -> None:
        super().__init__(client, None)
        self._client = client
        self._is_transaction = transaction
        self._together: list[Command] = []

    async def __aenter__(self) -> _Pipeline:
        return self  # connects when there is something to send, as a single server's does

    async def __aexit__(self, *_: object) -> None:
        self._together = []
        await self.reset()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._together) if self._is_transaction else super().__len__()

    def execute_command(self, *args: Any, **options: Any) -> _Pipeline:
        if self._is_transaction:
            self._together.append((args, options))
        else:
            super().execute_command(*args, **options)
        return self

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        """`allow_redirections`: what met a slot that has moved is sent again, one by one; else that is its answer."""
        async with self._client.bounded():
            if not self._is_transaction:
                return await super().execute(raise_on_error, allow_redirections)
            commands, self._together = self._together, []
            return await _transact(self._client, commands) if commands else []


class _PubSub(ClusterPubSub):
    """Finds its node in the table of slots as it is now: a node that it was on may be gone."""

    def __init__(self, client: ClusterClient, *args: Any, **options: Any) -> None:
        super().__init__(client, *args, **options)
        self._client = client

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.connection is None:
            await self._client.refresh()
        async with self._client.bounded():
            return await super().execute_command(*args, **options)


Command = tuple[tuple[Any, ...], dict[str, Any]]


async def _transact(client: ClusterClient, commands: Sequence[Command]) -> list[Any]:
    """MULTI, the commands, EXEC; once more where the slot turns out to have moved."""
    await client.initialize()
    slots = {await client._determine_slot(*args) for args, _ in commands}
    if len(slots) > 1:
        raise DataError("the keys of a transaction lie in several slots of the Cluster")
    slot = slots.pop()
    try:
        return await _transact_on(client.nodes_manager.get_node_from_slot(slot), client, commands)
    except (AskError, ConnectionError):  # the former is a slot that has moved, too
        await client.refresh()
        return await _transact_on(client.nodes_manager.get_node_from_slot(slot), client, commands)


async def _transact_on(node: ClusterNode, client: ClusterClient, commands: Sequence[Command]) -> list[Any]:
    connection = node.acquire_connection()
    try:
        await node.disconnect_if_needed(connection)
        frame = [("MULTI",), *(args for args, _ in commands), ("EXEC",)]
        await connection.send_packed_command(connection.pack_commands(frame))
        refused = [error for _ in frame[:-1] if (error := await _refusal(connection)) is not None]
        if refused:
            await _refusal(connection)
            raise refused[0]
        answers = await connection.read_response()
    finally:
        node.release(connection)
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise answer
    return [_read(client, command, answer) for command, answer in zip(commands, answers, strict=True)]


async def _refusal(connection: Any) -> ResponseError | None:
    try:
        await connection.read_response()
    except ResponseError as error:
        return error
    return None


def _read(client: ClusterClient, command: Command, answer: Any) -> Any:
    args, options = command
    callback = client.response_callbacks.get(args[0])
    return callback(answer, **options) if callback else answer
