"""One connection to Redis for the short commands that a process sends often: none waits for an earlier one's answer.

redis-py's client takes 55 us of processor time for a command, this one 8: no pool, no streams, no parser in Python. An
answer waits here for those before it, so long values and long replies (`workers.redis.long_commands`), blocking
commands and subscriptions stay with the client's own connections. Source: Redis serialization protocol specification,
RESP2.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import hiredis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from workers.redis.cluster import ClusterClient
from workers.redis.trouble import LATE_S, Gate

MAX_SENT_BYTES = 1 << 20
"""Maximum bytes of the commands that are sent together. The most that is needed is the text of all admission scripts,
for loading them: a quarter of this. Longer commands belong to `workers.redis.long_commands`."""

Command = tuple[str | int | float | bytes, ...]

_pack = cast(Callable[[Command], bytes], hiredis.pack_command)  # its stub says a tuple of one

CLOSED = "this process has closed its connection to Redis"

_ERRORS: dict[str, type[RedisError]] = {
    "LOADING": BusyLoadingError,
    "NOAUTH": AuthenticationError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
    "WRONGPASS": AuthenticationError,
}
"""Code of an error -> its class, as redis-py has it; other errors are plain ResponseErrors."""


class ShortCommands(Protocol):
    """Sends short commands to Redis and returns their answers."""

    async def ask(self, *commands: Command) -> list[Any]:
        """Run commands in order, and return their answers: bytes, numbers, lists, None, or an error that Redis replied.
        Raises redis.RedisError or OSError if there are no answers. Commands may run twice if a connection breaks."""
        ...


def fields_of(answer: Any) -> dict[bytes, bytes]:
    """Return the fields and values of a hash, from the answer to HGETALL."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


class ClusterCommands:
    """Sends short commands to a Redis Cluster, whose own client knows the server that has a command's keys."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster

    async def ask(self, *commands: Command) -> list[Any]:
        return await self._cluster.send([(command, {}) for command in commands])


class ServerCommands:
    """Sends short commands to one server over one connection, which is made on first use and again after it broke.

    Belongs to one event loop."""

    def __init__(
        self,
        dial: Callable[[Callable[[], ShortConnection]], Awaitable[ShortConnection]],
        login: Sequence[Command],
        *,
        place: str,
        timeout_s: float,
        retries: int,
    ) -> None:
        """`dial` makes a connection with the given protocol. `login`: the commands to send on a new connection.
        `place`: the server's name in messages. `timeout_s` bounds connecting, and each wait for an answer. `retries`:
        how often to send again what a broken connection left without an answer."""
        self._dial = dial
        self._login = login
        self._place = place
        self._timeout_s = timeout_s
        self._retries = retries
        self._gate = Gate()
        self._dialling = asyncio.Lock()
        self._connection: ShortConnection | None = None
        self._is_closed = False

    async def ask(self, *commands: Command) -> list[Any]:
        left = self._retries
        while True:
            connection = self._connection
            if connection is None or connection.is_broken:
                connection = await self._connected()
            try:
                return await connection.send(commands)
            except ConnectionError:
                if not left:
                    raise
            left -= 1

    def close(self) -> None:
        """Close the connection, also one that is just being made, for good: whoever waits fails with ConnectionError,
        and so does a later `ask`."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.end(ConnectionError(CLOSED))

    async def _connected(self) -> ShortConnection:
        async with self._dialling:
            self._check_open()
            if self._connection is None or self._connection.is_broken:
                self._gate.enter()
                try:
                    connection = await self._connect()
                except (RedisError, OSError) as error:
                    self._gate.failed(error)
                    raise
                self._gate.passed()
                if self._is_closed:
                    connection.end(ConnectionError(CLOSED))
                self._connection = connection
            return self._connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionError(CLOSED)

    async def _connect(self) -> ShortConnection:
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._dial(lambda: ShortConnection(self._timeout_s))
        except OSError as error:
            why = error.strerror or str(error) or f"not within {self._timeout_s:g} s"
            raise ConnectionError(f"no connection to {self._place}: {why}") from error
        try:
            answers = await connection.send(self._login) if self._login else []
            refusal = next((answer for answer in answers if isinstance(answer, RedisError)), None)
            if refusal is not None:
                raise refusal
        except BaseException:
            connection.end(ConnectionError("Redis refused the login"))
            raise
        return connection


@dataclass(slots=True, eq=False)
class _Asked:
    """Commands that were sent together."""

    answers: asyncio.Future[list[Any]]
    num: int
    asked_at: float
    """Time of the event loop."""
    came: list[Any] = field(default_factory=list)


class ShortConnection(asyncio.Protocol):
    """One connection. Answers come in the order of their commands."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(protocolError=ConnectionError, replyError=_error_of)
        self._waiting: deque[_Asked] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._late: _Asked | None = None
        """The commands that have waited too long and are waited for `LATE_S` longer."""
        self._broken: RedisError | None = None
        """The error with which the connection ended."""
        self._transport: asyncio.Transport | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the connection has ended."""
        return self._broken is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Send commands; the future gets their answers. It fails with TimeoutError if an answer takes too long, or
        ConnectionError if the connection breaks. Raises TypeError or ValueError for what can't be sent; commands of
        more than MAX_SENT_BYTES are a mistake of the caller, which others on this connection do not notice."""
        packed = [_pack(command) for command in commands]
        if (num_bytes := sum(map(len, packed))) > MAX_SENT_BYTES:
            names = ", ".join(sorted({str(command[0]) for command in commands}))
            raise ValueError(
                f"{names}: {num_bytes} bytes are too long for the connection for short commands ({MAX_SENT_BYTES}), "
                "where all others would wait; send them by `long_commands_of`"
            )
        data = b"".join(packed)
        asked = _Asked(self._loop.create_future(), len(commands), self._loop.time())
        if self._broken is not None or self._transport is None:
            asked.answers.set_exception(ConnectionError(str(self._broken)))
            return asked.answers
        if not commands:
            asked.answers.set_result([])
            return asked.answers
        self._waiting.append(asked)
        self._transport.write(data)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        return asked.answers

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while waiting:
                answer = reader.gets()
                if answer is False:  # more has to come; no answer of RESP2 is False
                    return
                if type(answer) is ReadOnlyError or (isinstance(answer, RedisError) and "-READONLY" in str(answer)):
                    # The next connection finds the new master. Redis 6.2 puts a script's error into another message.
                    raise ConnectionError("this Redis is a replica now and takes no writes")
                waiting[0].came.append(answer)
                if len(waiting[0].came) == waiting[0].num:
                    asked = waiting.popleft()
                    self._late = None
                    if not asked.answers.done():  # else nobody waits for it any more
                        asked.answers.set_result(asked.came)
            if reader.has_data():
                raise ConnectionError("it answers what was not asked")
        except (RedisError, ValueError, RecursionError) as error:
            self.end(ConnectionError(f"what came from Redis is no answer ({type(error).__name__}: {error})"))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(ConnectionError(f"Redis closed the connection{f': {error}' if error else ''}"))

    def end(self, error: RedisError) -> None:
        """End the connection; what waits for an answer fails with the error."""
        if self._broken is not None:
            return
        self._broken = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            asked = self._waiting.popleft()
            if not asked.answers.done():
                asked.answers.set_exception(type(error)(str(error)))

    def _look(self) -> None:
        """End the connection if the oldest commands have waited too long; otherwise look again when they will have."""
        self._timer = None
        if not self._waiting:
            return
        left_s = self._waiting[0].asked_at + self._timeout_s - self._loop.time()
        if left_s > 0.001:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._late is not self._waiting[0]:
            self._late = self._waiting[0]
            self._timer = self._loop.call_later(LATE_S, self._look)
        else:
            self.end(TimeoutError(f"Redis did not answer within {self._timeout_s:g} s"))


def _error_of(text: str) -> RedisError:
    """Return an error that Redis replied; its text begins with the code (`workers.redis.trouble.code_of`)."""
    return _ERRORS.get(text.partition(" ")[0], ResponseError)(text)
