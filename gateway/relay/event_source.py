"""Reads a worker's event stream: one HTTP GET that never ends, read in the callbacks of an asyncio transport.

An HTTP client library passes each chunk of a body through a buffer, a task and a timer, which costs as much as handling
a token. With many workers a chunk has few tokens, so that cost would count. So this request is made by an asyncio
protocol with httptools' parser.

`check_step` bounds the values in one frame of the stream before it is decoded. A frame is the output of one engine step
for this gateway's calls. A frame's length says little about the time that decoding takes: 16 MiB can be the text of one
long prompt, or 800,000 events, which take the event loop three seconds.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from workers.process.resolver import connect_tcp
from workers.process.sockets import notice_dead_peer

MAX_REFUSAL_BYTES = 2000
MAX_HEAD_BYTES = 64 << 10
MAX_EMPTY_BYTES = 64 << 10
"""Bytes without one of the body by which an answer may go on: sizes of chunks, and trailers, which the parser keeps."""

_OTHERS = bytes(set(range(256)) - set(b"[]{},"))

UNCHECKED_BYTES = 64 << 10
"""Bytes up to which a frame is not checked: decoding it takes milliseconds at most. Nearly every frame is shorter."""
ITEMS = 1 << 17
"""Brackets and commas allowed in any frame (50 ms of decoding at worst). A token with 100 alternatives has 500."""
ITEMS_PER_CALL = 4096
"""Brackets and commas allowed in addition for each call under way on the worker: a few tokens with alternatives."""


class EventStreamRefused(Exception):
    """The worker answered the request for its events with a status other than 200, or did not prove its identity."""


class EventStreamBroken(ConnectionError):
    """The stream ended, fell silent or was not HTTP."""


class StepTooLarge(ValueError):
    """A frame has more values than the output of its calls in one step can have."""


async def read_events(
    url: str,
    headers: Mapping[str, str],
    *,
    expected: tuple[str, str] | None = None,
    on_open: Callable[[], None],
    on_data: Callable[[bytes], float],
    connect_timeout_s: float,
    silence_s: float,
) -> None:
    """GET `url` and pass its body to `on_data` until the body ends. Never returns: every end raises.

    `on_data` returns the seconds for which to stop reading, so that the sender has to wait (back pressure). `expected`:
    name and value of a header that the answer must have; an answer without it is refused, and `on_open` is not called.
    Raises OSError or TimeoutError if no connection can be made, EventStreamRefused, EventStreamBroken (also after a
    silence of one to two times `silence_s`), and what `on_data` raises."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    lines = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", *(f"{name}: {text}" for name, text in headers.items())]
    request = "\r\n".join([*lines, "", ""]).encode("latin-1")
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    async with asyncio.timeout(connect_timeout_s):
        transport, source = await connect_tcp(
            lambda: _Source(request, expected, on_open, on_data), parts.hostname or "", port, tls=secure
        )
    try:
        while True:
            source.heard = False
            await asyncio.wait({source.ended}, timeout=silence_s)
            if source.ended.done():
                source.ended.result()
            if not source.heard:
                raise EventStreamBroken(f"nothing came for {silence_s:g} s")
    finally:
        source.ended.cancel()
        transport.abort()


def check_step(data: bytes, num_calls: int) -> None:
    """Raise StepTooLarge if a frame has too many values; takes at most 5 ms per MiB. `num_calls`: calls under way."""
    if len(data) <= UNCHECKED_BYTES:
        return
    most = ITEMS + ITEMS_PER_CALL * num_calls
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # No event has more strings than brackets and commas. Checked first, as taking strings out makes an object of each.
    too_many = data.count(b'"') > 2 * most
    if too_many or len(b"".join(data.split(b'"')[::2]).translate(None, _OTHERS)) > most:
        raise StepTooLarge(f"a step of more than {most} values for {num_calls} calls")


class _Source(asyncio.Protocol):
    """The connection to the worker; `ended` gets the exception that ended it."""

    def __init__(
        self,
        request: bytes,
        expected: tuple[str, str] | None,
        on_open: Callable[[], None],
        on_data: Callable[[bytes], float],
    ) -> None:
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard = False
        self._request = request
        self._expected = None if expected is None else (expected[0].lower().encode(), expected[1].encode())
        self._is_expected = expected is None
        self._head_bytes_left = MAX_HEAD_BYTES
        self._num_empty = 0
        """Bytes received since the last one of the body."""
        self._on_open = on_open
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)
        self._bodies: list[bytes] = []
        self._status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        notice_dead_peer(transport.get_extra_info("socket"))
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self.ended.done():  # the connection is about to close
            return
        if not self._status:
            # The parser buffers a header until it is complete, so the bytes of the head are limited here.
            self._head_bytes_left -= len(data)
        else:
            self._num_empty += len(data)
        try:
            self._parser.feed_data(data)
            if not self._status and self._head_bytes_left < 0:
                self._end(EventStreamBroken(f"a head of more than {MAX_HEAD_BYTES} bytes"))
            elif self._num_empty > MAX_EMPTY_BYTES:
                self._end(EventStreamBroken(f"more than {MAX_EMPTY_BYTES} bytes without one of the body"))
            if self._status == 200 and self._bodies:
                bodies, self._bodies = self._bodies, []
                rest_s = self._on_data(bodies[0] if len(bodies) == 1 else b"".join(bodies))
                if rest_s:
                    self._rest(rest_s)
        except httptools.HttpParserError as error:
            self._end(EventStreamBroken(f"not HTTP: {error}"))
        except Exception as error:  # noqa: BLE001 - `read_events` raises it: it waits on `ended`
            self._end(error)

    def _rest(self, rest_s: float) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_later(rest_s, self._resume_reading, transport)

    def _resume_reading(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(EventStreamBroken(str(error or "the connection was closed")))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._expected is not None and name.lower() == self._expected[0]:
            self._is_expected = hmac.compare_digest(value, self._expected[1])

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status == 200 and not self._is_expected:
            self._status = 0
            self._end(EventStreamRefused("it does not prove that it knows the worker secret"))
        elif self._status == 200:
            self._on_open()

    def on_body(self, body: bytes) -> None:
        self._num_empty = 0
        self._bodies.append(body)
        if self._status != 200 and sum(map(len, self._bodies)) > MAX_REFUSAL_BYTES:
            self._refuse()

    def on_message_complete(self) -> None:
        if self._status == 200:
            self._end(EventStreamBroken("the worker closed the stream"))
        else:
            self._refuse()

    def _refuse(self) -> None:
        text = b"".join(self._bodies)[:MAX_REFUSAL_BYTES].decode(errors="replace")
        self._bodies.clear()
        self._end(EventStreamRefused(f"HTTP {self._status}: {text}"))

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
