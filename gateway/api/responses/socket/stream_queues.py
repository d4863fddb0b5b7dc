"""Reads and writes the messages of the Responses API over WebSocket, and queues the messages of one connection.

Sources: OpenAI's API reference, "Responses client events" and "Responses server events"; `generate` is from its guide
"WebSocket mode".
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from gateway.api.dialect import ErrorShape
from gateway.api.http.sockets import Socket
from gateway.api.http.streaming import END, Written, whole_events
from gateway.api.intake.body import read_object
from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import quote
from gateway.api.responses.request import Draft, draft_of
from gateway.errors import InvalidRequest, PaddockError, StreamLimit, UnsupportedParameter
from gateway.telemetry.request_log import Ignored, RequestLog

CREATE = "response.create"
DATA = b"\ndata: "
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Create:
    """A message that asks for a response."""

    document: dict[str, Any]
    """The request: the message without its own fields, `type` and `stream_id`."""
    stream_id: str
    """The `stream_id` of the message; empty: it has none."""
    num_bytes: int


def raw_message(text: str | bytes | None) -> bytes:
    """Return the bytes of a text message. Raises InvalidRequest for a binary message (None)."""
    if text is None:
        raise InvalidRequest("The message is of bytes. Send JSON as text.")
    return text if isinstance(text, bytes) else text.encode()


def read_message(raw: bytes) -> Create:
    """Parse a message. Raises InvalidRequest."""
    document = read_object(raw)
    kind, stream_id = document.pop("type", None), document.pop("stream_id", None)
    if kind != CREATE:
        raise InvalidRequest(f"`type` is {quote(kind)}. Send messages of the type `{CREATE}`.", param="type")
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        message = f"`stream_id` is {quote(stream_id)}. Send 1 to 256 of the characters A-Z, a-z, 0-9, `_`, `.` and `-`."
        raise InvalidRequest(message, param="stream_id")
    return Create(document, stream_id or "", len(raw))


def draft_of_message(message: Create, ignored: Ignored, attachments: Attachments | None = None) -> Draft:
    """Read the request of a message; `ignored` notes the parameters that have no effect. `attachments`: holds the
    limits of its files.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path."""
    document = dict(message.document)
    generates = document.pop("generate", None)
    if not isinstance(generates, bool | None):
        raise InvalidRequest(f"`generate` is {quote(generates)}. Send true or false.", param="generate")
    if document.pop("background", None):
        text = "`background` is not for WebSocket. Send the request to `POST /v1/responses`."
        raise UnsupportedParameter(text, param="background")
    document["stream"] = True
    num_bytes = message.num_bytes
    draft = draft_of(document, ignored, attachments, generates=generates is not False, num_bytes=num_bytes)
    return replace(draft, is_remembered=True)


class EventMessages:
    """Sends each event of one response as a WebSocket message (`gateway.api.responder.Sink`)."""

    def __init__(self, socket: Socket, stream_id: str) -> None:
        self.told = False
        """Whether an event of the response was sent."""
        self._socket = socket
        self._end = _end(stream_id)

    async def start(self) -> None:
        pass

    async def write(self, body: Written) -> None:
        """Send server-sent events as messages. Waits while the client reads too slowly."""
        self.told = True
        for events in whole_events(body):
            for event in events.split(END):
                if event:
                    text = event[event.index(DATA) + len(DATA) : -1] + self._end
                    await self._socket.send(text.decode())
            if not isinstance(body, bytes):
                await asyncio.sleep(0)


def error_text(error: PaddockError, shape: ErrorShape, request_log: RequestLog, stream_id: str) -> str:
    """Return the message that reports an error: `{"type": "error", "status", "error": {...}}`."""
    body = shape.body(error, request_log)
    return (b'{"type":"error","status":%d,' % shape.status(error) + body[1:-1] + _end(stream_id)).decode()


def _end(stream_id: str) -> bytes:
    """Return the last bytes of an event's JSON object, with the `stream_id` if there is one."""
    return b',"stream_id":%b}' % _encode(stream_id) if stream_id else b"}"


MAX_STREAMS = 16
"""Maximum number of a connection's streams with unanswered messages. Messages of further streams get StreamLimit."""
MAX_MESSAGES = 32
"""Maximum number of messages of one connection that wait or are being answered; more are refused (StreamLimit)."""


class Held(Protocol):
    """The share of the memory budget that a message holds until `close`."""

    def close(self) -> None: ...


HeldT = TypeVar("HeldT", bound=Held)


class StreamQueues(Generic[HeldT]):
    """The queues of a connection, one per stream. A stream's messages are answered one by one, streams in parallel."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        respond: Callable[[Create, HeldT], Awaitable[None]],
        on_rest: Callable[[], None],
        max_bytes: int,
    ) -> None:
        """`respond` answers a message and raises nothing. `on_rest` is called once every queue is empty. `max_bytes`:
        maximum bytes of all messages that wait or are being answered; a message that is alone may be larger."""
        self._tasks = tasks
        self._respond = respond
        self._on_rest = on_rest
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[tuple[Create, HeldT]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._num_messages = 0
        self._num_bytes = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, message: Create, held: HeldT) -> None:
        """Queue a message to be answered; `held` is closed after the answer. Raises StreamLimit."""
        self._check(message)
        self._num_messages += 1
        self._num_bytes += message.num_bytes
        queue = self._waiting.get(message.stream_id)
        if queue is not None:
            queue.append((message, held))
            return
        queue = self._waiting[message.stream_id] = deque([(message, held)])
        task = self._tasks.create_task(self._run(message.stream_id, queue))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A task that is cancelled before its first step never reaches the `finally` of `_run`.
        task.add_done_callback(lambda _: self._end(message.stream_id, queue))

    async def cancel(self) -> None:
        """Cancel the answers under way, one per turn of the event loop: there may be many, on many connections."""
        for task in list(self._running):
            task.cancel()
            await asyncio.sleep(0)

    def _check(self, message: Create) -> None:
        if message.stream_id not in self._waiting and len(self._waiting) >= MAX_STREAMS:
            text = f"{MAX_STREAMS} streams are at work on this connection. Wait for one, or open another connection."
        elif self._num_messages >= MAX_MESSAGES:
            text = f"{MAX_MESSAGES} requests wait on this connection. Wait for their responses before sending more."
        elif self._num_messages and self._num_bytes + message.num_bytes > self._max_bytes:
            text = f"The requests that wait on this connection have more than {self._max_bytes} bytes together. Wait."
        else:
            return
        raise StreamLimit(text, param="stream_id")

    async def _run(self, stream_id: str, queue: deque[tuple[Create, HeldT]]) -> None:
        try:
            while queue:
                message, held = queue[0]
                await self._respond(message, held)
                queue.popleft()
                held.close()
                self._num_messages -= 1
                self._num_bytes -= message.num_bytes
        finally:
            self._end(stream_id, queue)

    def _end(self, stream_id: str, queue: deque[tuple[Create, HeldT]]) -> None:
        """Remove a stream's queue and free the memory of its messages. A second call does nothing."""
        if self._waiting.get(stream_id) is not queue:
            return
        for _, held in queue:
            held.close()
        queue.clear()
        del self._waiting[stream_id]
        if not self._waiting:
            self._on_rest()
