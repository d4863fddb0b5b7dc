"""A client of a Redis Cluster that behaves, as far as possible, like the client of a single server.

The base class, redis-py's own client, keeps the table of slots (which node has which slot), the nodes and their
connections. Sending commands is done here, because in redis-py a node that is down closes the connections to all other
nodes, a command can take many times its timeout, some errors are no `RedisError`, and transactions run event loops in
threads. A pipeline can mix slots and keeps the order within each; the keys of a transaction must be in one slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.cluster import (
    ClusterNode,
    ClusterPipeline,
    ClusterPubSub,
    PipelineCommand,
    RedisCluster,
    _ClusterNodePoolAdapter,
)
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    DataError,
    MovedError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from workers.redis.trouble import Gate

FRESH_S = 0.5
"""Minimum seconds between two readings of the table of slots, whatever goes wrong."""

ROUNDS = 3
"""Maximum number of times that a command is sent. If Redis then answers ASK, it is sent once more, to another node."""

NODE_CONNECTIONS = 4096
"""Maximum connections to one node; redis-py raises an error for more. Never reached: `max_under_way` is far less."""

AWAY = (ConnectionError, TimeoutError, OSError)

Command = tuple[tuple[Any, ...], dict[str, Any]]

log = logging.getLogger(__name__)


class ClusterClient(RedisCluster):
    """A client whose commands raise only RedisErrors or OSErrors and take no longer than twice `timeout_s`."""

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        timeout_s: float,
        retries: int,
        max_under_way: int,
        options: dict[str, Any],
        kind: type[Connection] = Connection,
    ) -> None:
        """`max_under_way`: maximum number of commands or pipelines at once. Others wait, and may time out meanwhile.
        `kind`: the class of the connections."""
        options = dict(options)
        of_connections = {"parser_class": options.pop("parser_class")} if "parser_class" in options else {}
        super().__init__(
            startup_nodes=[ClusterNode(host, port) for host, port in hosts],
            # If some slots have no server, models in the other slots are still served.
            require_full_coverage=False,
            retry=Retry(NoBackoff(), retries),
            max_connections=NODE_CONNECTIONS,
            **options,
        )
        # The library takes neither, and makes later nodes with these.
        self.connection_kwargs |= {"connection_class": kind, **of_connections}
        for node in self.startup_nodes:
            node.connection_class = kind
            node.connection_kwargs |= of_connections
        self.retries = retries
        self._gate = Gate()
        self._bound_s = 2 * timeout_s
        self._under_way = asyncio.Semaphore(max_under_way)
        self._table_lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._read_at = float("-inf")

    async def initialize(self, *args: Any, **options: Any) -> ClusterClient:
        """Read the table of slots if it is unknown. If it is known but maybe outdated, read it in the background."""
        if not self._knows_slots:
            async with self._table_lock:
                if not self._knows_slots:
                    await self._read_table()
        elif self._initialize:
            self.doubt()
        self._initialize = False
        return self

    @property
    def _knows_slots(self) -> bool:
        node: ClusterNode | None = self.nodes_manager.default_node  # the library's own annotation forgets None
        return node is not None

    def doubt(self) -> None:
        """Have the table of slots read again soon, since it seems to be outdated."""
        self._initialize = False
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_again(), name="redis cluster slots")

    async def has_moved(self, error: MovedError) -> None:
        """Update the table with the slot's new node, which the error names, and have the whole table read again."""
        await self.nodes_manager.move_slot(error)
        self.doubt()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if "target_nodes" in options or len(args) < 2 or args[0] in self.command_flags:
            async with self.bounded():
                await self.initialize()
                return await super().execute_command(*args, **options)
        (answer,) = await self.send([(args, options)])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def send(
        self, commands: Sequence[Command], *, redirect: bool = True, timeout_s: float | None = None
    ) -> list[Any]:
        """Return one answer or exception per command; commands of one slot run in order. `redirect`: whether a command
        whose slot has moved is sent again, to the slot's new node. If not, that command and the later ones of its slot
        get the server's errors as their answers. `timeout_s` bounds the whole in place of the client's own bound; that
        of a connection, for sending and for each answer, still holds."""
        answers: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        async with self.bounded(timeout_s):
            await self.initialize()
            for tries in range(ROUNDS):
                by_node = await self._by_node(commands, left, answers)
                await asyncio.gather(*(self._send_to(node, commands, at, answers) for node, at in by_node.items()))
                again = [at for at in left if self._is_worth_again(answers[at], tries, redirect)]
                moved = {one.slot_id: one for at in again if isinstance(one := answers[at], MovedError)}
                for error in moved.values():
                    await self.has_moved(error)
                left = again
                if not left:
                    break
            for at, answer in enumerate(answers):
                if redirect and isinstance(answer, AskError) and not isinstance(answer, MovedError):
                    answers[at] = await self._ask(answer, commands[at])
        return answers

    async def slot_of(self, args: Sequence[Any]) -> int:
        """Return the slot of a command's keys. Raises RedisError if they are in several slots."""
        if args[0] == "XREAD":  # the library would ask a server which of these words are keys
            words = [word if isinstance(word, str) else bytes(word).decode() for word in args[1:] if _is_text(word)]
            return self.keyslot(words[words.index("STREAMS") + 1])
        return await self._determine_slot(*args)

    def node_of(self, slot: int) -> ClusterNode | None:
        """Return the node that has the slot by the table; None if the table has none."""
        nodes = self.nodes_manager.slots_cache.get(slot)
        return nodes[0] if nodes else None

    @asynccontextmanager
    async def bounded(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Run a `with` block as one command: at most `max_under_way` such blocks run at once, others wait. Raises
        TimeoutError after `timeout_s` (None: twice the client's), and nothing but RedisErrors and OSErrors."""
        try:
            async with asyncio.timeout(self._bound_s if timeout_s is None else timeout_s), self._under_way:
                yield
        except RedisClusterException as error:
            raise ConnectionError(str(error)) from error

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> _Pipeline:
        return _Pipeline(self, bool(transaction))  # type: ignore[abstract]  # redis-py's own forgets an attribute, too

    def pubsub(self, *args: Any, **options: Any) -> _PubSub:
        return _PubSub(self, *args, **options)

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        self._initialize = False  # otherwise the base class would close nothing
        await super().aclose()

    async def _read_table(self) -> None:
        self._gate.enter()
        try:
            await self.nodes_manager.initialize()
            if self.commands_parser.commands:
                self.commands_parser.node = self.nodes_manager.default_node
            else:
                await self._read_commands()
        except (RedisClusterException, RedisError, OSError) as error:
            self._gate.failed(error)
            raise ConnectionError(f"no node of the Cluster could be asked: {error}") from error
        self._gate.passed()
        self._read_at = time.monotonic()

    async def _read_commands(self) -> None:
        """Read the table of commands from any node that answers; the first may be down. Raises RedisError, OSError."""
        first = self.nodes_manager.default_node
        failed: Exception = RedisClusterException("the Cluster's table has no nodes")
        for node in (first, *(node for node in self.get_nodes() if node is not first)):
            self.commands_parser.node = node
            try:
                await self.commands_parser.initialize()
            except (RedisError, OSError) as error:
                failed = error
            else:
                self.nodes_manager.default_node = node
                return
        raise failed

    async def _read_again(self) -> None:
        try:
            await asyncio.sleep(self._read_at + FRESH_S - time.monotonic())
            async with self.bounded():
                await self._read_table()
        except (RedisError, OSError) as error:
            log.debug("the slots of the Cluster could not be read again: %s", error)
        finally:
            self._reading = None

    async def _by_node(
        self, commands: Sequence[Command], places: Sequence[int], answers: list[Any]
    ) -> dict[ClusterNode, list[int]]:
        found: dict[ClusterNode, list[int]] = {}
        for at in places:
            slot = await self.slot_of(commands[at][0])
            node = self.node_of(slot)
            if node is None:
                answers[at] = ClusterDownError(f"CLUSTERDOWN no server has slot {slot}")
                self.doubt()
            else:
                found.setdefault(node, []).append(at)
        return found

    async def _send_to(
        self, node: ClusterNode, commands: Sequence[Command], places: Sequence[int], answers: list[Any]
    ) -> None:
        batch = [PipelineCommand(at, *commands[at][0], **commands[at][1]) for at in places]
        try:
            await node.execute_pipeline(batch)
        except AWAY as error:
            for command in batch:
                command.result = error
        for command in batch:
            answers[command.position] = command.result
        if any(isinstance(command.result, (*AWAY, ClusterDownError)) for command in batch):
            node.update_active_connections_for_reconnect()
            await node.disconnect_free_connections()
            self.doubt()

    def _is_worth_again(self, answer: Any, tries: int, redirect: bool) -> bool:
        if isinstance(answer, (MovedError, TryAgainError)):
            return redirect
        return isinstance(answer, ConnectionError) and tries < self.retries

    async def _ask(self, error: AskError, command: Command) -> Any:
        """Send a command once to the node that its slot is moving to, which the ASK error names."""
        node = self.get_node(host=error.host, port=error.port)
        if node is None:
            return error
        args, options = command
        batch = [PipelineCommand(0, "ASKING"), PipelineCommand(1, *args, **options)]
        try:
            await node.execute_pipeline(batch)
        except AWAY as away:
            return away
        return batch[1].result


def _is_text(word: object) -> bool:
    return isinstance(word, str | bytes)


class _Pipeline(ClusterPipeline):
    def __init__(self, client: ClusterClient, transaction: bool) -> None:
        super().__init__(client, None)
        self._client = client
        self._is_transaction = transaction
        self._commands: list[Command] = []

    async def __aenter__(self) -> _Pipeline:
        return self  # connects only when there is something to send, as a single server's pipeline does

    async def __aexit__(self, *_: object) -> None:
        self._commands = []

    def __len__(self) -> int:
        return len(self._commands)

    def execute_command(self, *args: Any, **options: Any) -> _Pipeline:
        options.pop("target_nodes", None)  # the command's key decides the node
        self._commands.append((args, options))
        return self

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        commands, self._commands = self._commands, []
        if not commands:
            return []
        if self._is_transaction:
            async with self._client.bounded():
                return await _transact(self._client, commands)
        answers = await self._client.send(commands, redirect=allow_redirections)
        for answer in answers:
            if raise_on_error and isinstance(answer, BaseException):
                raise answer
        return answers


class _PubSub(ClusterPubSub):
    """A subscription at one node, no matter which: what is published at any node reaches all nodes."""

    def __init__(self, client: ClusterClient, *args: Any, **options: Any) -> None:
        super().__init__(client, *args, **options)
        self._client = client

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self._client.bounded():
            pool: object = self.connection_pool
            if pool is None:
                await self._client.initialize()
                adapter: Any = _ClusterNodePoolAdapter(self._client.get_random_primary_node())
                self.connection_pool = adapter
            return await super().execute_command(*args, **options)


async def _transact(client: ClusterClient, commands: Sequence[Command]) -> list[Any]:
    """Send MULTI, the commands and EXEC; send all once more if the slot has moved or the connection was stale."""
    await client.initialize()
    slots = {await client.slot_of(args) for args, _ in commands}
    if len(slots) > 1:
        raise DataError("the keys of a transaction lie in several slots of the Cluster")
    slot = slots.pop()
    try:
        return await _transact_on(client.node_of(slot), client, commands)
    except MovedError as error:
        await client.has_moved(error)
    except ConnectionError:
        client.doubt()
        if not client.retries:
            raise
    return await _transact_on(client.node_of(slot), client, commands)


async def _transact_on(node: ClusterNode | None, client: ClusterClient, commands: Sequence[Command]) -> list[Any]:
    if node is None:
        raise ClusterDownError("CLUSTERDOWN no server has the slot of a transaction")
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
