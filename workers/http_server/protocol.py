"""uvicorn's HTTP protocol, with what it lacks: a peer's requests are read one at a time, and their heads are bounded.

The parser gets the received bytes in pieces that end where a head (request line and headers) or a body ends. A further
request is parsed once the one before it is answered. Until then only a few of its bytes wait here, since the connection
is not read meanwhile. `workers.http_server.connections` says what a connection beyond a bound is.
"""

from __future__ import annotations

import asyncio
import ssl
from time import thread_time
from typing import ClassVar, cast

import httptools
from uvicorn._types import HTTPScope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from workers.http_server.connection import CHUNK, BoundedConnection, Flow
from workers.http_server.connections import Closable, Verdict
from workers.http_server.framing import MALFORMED_BODY, head_without_upgrade, length_of, refusal_of
from workers.http_server.pacer import Departure
from workers.http_server.state import Refusal, response_of

MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a request's head; longer ones are refused with 431."""
MAX_HEADERS = 256
HEADER_BYTES = 160
"""Bytes of memory that each header takes on top of its own bytes, however short it is."""
HEAD_S = 60.0
"""Maximum seconds from the first byte of a head to its last; then the request is refused with 408."""
BEYOND_HEAD_S = 2.0
"""Value of `HEAD_S` for a connection that came when there were too many. Its first head must also begin by then."""

MAX_PIPELINED = 8
"""How many requests in a row a peer may send without waiting for the previous answer; then the connection ends."""
MAX_UNREAD_BYTES = 64 << 10
"""Reading stops once this many bytes wait behind a request that is being answered; the last read may go beyond it."""
CHUNKED_PIECE_BYTES = 4 << 10
"""Bytes of a chunked body that the parser gets at once, since the body's end is not known in advance."""
CHUNK_BYTES = 64
"""Bytes that are counted for each chunk on top of its own, because short chunks take the most time per byte."""
UNWANTED_CHUNKS_BYTES = 64 << 10
"""Maximum bytes of chunks, plus `CHUNK_BYTES` for each, that are parsed after the answer; then the connection ends.
They are enough for a short body that was on its way."""

UNWANTED_BYTES = 16 << 20
"""Maximum bytes of a body that are read after the answer; then the connection is closed. Most clients read an answer
only when they have sent the whole body."""
LINGER_S, LINGER_BYTES = 1.0, 4 << 20
"""A refused peer's data is still read and thrown away, for `LINGER_S` seconds and up to `LINGER_BYTES`: closing at once
would reset the connection, and the refusal would be lost."""

END_OF_HEAD = b"\r\n\r\n"
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"})

MALFORMED = Refusal(400, "This is no HTTP request. Send HTTP/1.1, and TLS only where the address is one of https.")
TOO_LARGE = Refusal(
    431, f"The head of the request has more than {MAX_HEAD_BYTES >> 10} KiB. Send fewer and shorter headers."
)
TOO_MUCH_TOGETHER = Refusal(
    431, "The long heads of all requests under way take too much together. Send fewer and shorter headers."
)
UNFINISHED = Refusal(408, "The unfinished heads of all requests take too much together. Send a request's head at once.")
TOO_MANY_HEADERS = Refusal(431, f"The request has more than {MAX_HEADERS} headers. Send fewer.")
UNCERTIFIED = Refusal(403, "This address asks for a client certificate. Send one that its authorities vouch for.")
CROWDED = Refusal(503, "There are too many connections to this address. Use those that are open, or try again later.")


class Unwanted(Exception):
    """Raised in a parser's callback to stop the parser, as the peer has sent what is not accepted."""


class HttpProtocol(BoundedConnection, HttpToolsProtocol):
    """One HTTP connection."""

    # fmt: off
    UVICORN_PARTS: ClassVar[tuple[str, ...]] = (
        "_should_upgrade", "_unset_keepalive_if_required", "client", "connection_lost", "connection_made",
        "cycle", "expect_100_continue", "flow", "handle_websocket_upgrade", "headers", "loop", "on_body", "on_header",
        "on_headers_complete", "on_message_begin", "on_message_complete", "on_response_complete", "parser",
        "pause_writing", "pipeline", "resume_writing", "scope", "shutdown", "timeout_keep_alive",
        "timeout_keep_alive_handler", "timeout_keep_alive_task", "transport", "url",
    )
    # fmt: on
    """Attributes of uvicorn's class that are used or replaced here; `server.check_parts` looks for them at start."""

    _flow: Flow
    _in_head = False
    _in_body = False
    _ignores_upgrade = False
    """Whether the parser took a request to end with its head, because its `upgrade` header names another protocol. The
    header is ignored, as RFC 9110, 7.8, allows: otherwise the body would be parsed as further requests."""
    _body_left: int | None = None
    """Bytes of the body still to come; None: unknown, as the body is chunked."""
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _num_ahead = 0
    """Number of answers in a row at whose end some bytes of the next request had come already."""
    _deaf = False
    """Whether received bytes are thrown away."""
    _num_unwanted = 0
    """Bytes thrown away: of a refused peer, or of a body that is answered already."""
    _num_empty = 0
    """Bytes of a chunked body since its last content: chunk sizes, extensions, and trailers (which are stored)."""
    _num_chunks = 0
    """Number of parts of bodies that the parser has reported."""
    _called = False
    """Whether the server's `Pacer` has called `begin`, which allows this connection to parse one head."""
    _beyond = False
    """Whether there were too many connections when this one came (not `Verdict.WITHIN`): only a probe is answered."""
    _lacks_certificate = False
    """Whether clients are asked for a certificate, and this one sent none: only probes are answered."""
    _refusal = MALFORMED
    """The refusal to send if the parser stops now."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = Flow(transport)
        descriptor = transport.get_extra_info("socket").fileno()
        if self.handshake is None:
            verdict = self._server.bounded.came(self, self.client[0] if self.client else "", descriptor)
        else:
            verdict = self._server.bounded.shook_hands(self.handshake, self)
            self.handshake = None
            asks = transport.get_extra_info("sslcontext").verify_mode is ssl.CERT_OPTIONAL
            self._lacks_certificate = asks and not transport.get_extra_info("peercert")
        self._beyond = verdict is not Verdict.WITHIN
        # Balancers open connections in advance, and keep them as they keep idle ones.
        patience_s = BEYOND_HEAD_S if self._beyond else self.timeout_keep_alive
        self._head_timer = self.loop.call_later(patience_s, self._head_is_late)
        if verdict is Verdict.REFUSED:
            self.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._end_head_timer()
        self._server.pacer.leave(self)
        self._server.parse_turns.leave(self)
        cycle = self.cycle
        waits = not self._is_free and not self._server.departures.may_begin()
        if waits:
            caller = self._known_caller()
            self.cycle = None  # type: ignore[assignment]  # otherwise uvicorn wakes the request's task at once
        super().connection_lost(exc)
        if waits:
            self.cycle, cycle.disconnected = cycle, True
            address = self.client[0] if self.client else ""
            self._server.departures.wait(Departure(cycle.message_event.set), caller, address)
        # uvicorn lets this timer run on if the peer broke off; it would keep the connection in memory until it fires.
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._bound_leftovers()

    def eof_received(self) -> bool:  # type: ignore[override]
        """End the connection, as its peer sends no more. During an answer, return False, so that the loop closes it."""
        if not self._is_free:
            return False
        self._deaf, self._unread = True, b""
        if self.transport.get_write_buffer_size():
            self._close()
        else:
            self._server.closing.add(self.transport, self.loop)
        return True

    def make_room(self) -> None:
        """Close at once, because there are too many connections, or too many bytes of unfinished heads."""
        asks = self._head_bytes or self._unread
        told, self._deaf, self._unread = self._deaf or self.transport.is_closing(), True, b""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait until the peer has read the answer, so perhaps for ever
            return
        if (self._beyond or asks) and not told:
            self.transport.write(response_of(CROWDED, self._server.form))
        self._close()

    def cut_unfinished(self) -> None:
        self._refuse(UNFINISHED)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._num_unwanted += len(data)
            if self._num_unwanted > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._unread = self._unread + data if self._unread else data
        self._parse()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end_after_answers()
            raise Unwanted
        self._end_head_timer()
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # headers after a body are trailers, which nobody reads
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = TOO_MANY_HEADERS
            raise Unwanted
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        upgrades = self.parser.should_upgrade() and self._should_upgrade()
        self._ignores_upgrade = self.parser.should_upgrade() and not upgrades and method != b"CONNECT"
        if self._ignores_upgrade:
            return  # `_parse_without_upgrade` has the head parsed once more
        self._in_head, self._in_body = False, True
        self._num_unwanted = self._num_empty = 0
        self._body_left = length_of(self.headers)
        self._end_head_timer()
        self._server.bounded.busy(self)
        if self._beyond and self.url.partition(b"?")[0] not in self._server.bounded.bounds.reserved:
            self._refusal = CROWDED
            raise Unwanted
        if self._lacks_certificate and self.url.partition(b"?")[0] not in self._server.without_certificate:
            self._refusal = UNCERTIFIED
            raise Unwanted
        refusal = refusal_of(method, self.parser.get_http_version(), self.headers, upgrades=upgrades)
        if refusal is not None:
            self._refusal = refusal
            raise Unwanted
        if not self._server.bounded.long_heads.hold(self, self._head_bytes + HEADER_BYTES * len(self.headers)):
            self._refusal = TOO_MUCH_TOGETHER
            raise Unwanted
        self.scope["extensions"] = {CHUNK: {"write": self._flow.write_chunk}}
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client would take `100 Continue` for the answer: RFC 9110, 10.1.1
        super().on_headers_complete()
        if (self._beyond or self._num_ahead >= MAX_PIPELINED) and not self._is_free:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_empty = 0
        self._num_chunks += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._num_ahead = self._num_ahead + 1 if self._unread or self.pipeline else 0
        super().on_response_complete()
        if self._unread and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._parse()
        self._bound_leftovers()
        if self._is_free:
            self._forget_request()
            if not self._in_head:
                self._server.bounded.idle(self)

    def _forget_request(self) -> None:
        """Drop the answered request: otherwise thousands of idle connections would keep their last heads and bodies."""
        self.cycle.scope, self.cycle.body = cast(HTTPScope, {}), bytearray()
        self._server.bounded.long_heads.release(self)
        if not self._in_head:
            self._forget_head()

    def _forget_head(self) -> None:
        self.scope, self.headers, self.url = cast(HTTPScope, {}), [], b""

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _parse(self, *, is_next: bool = False) -> None:
        """Feed the parser until a request waits for its answer, or the other tasks have waited long enough."""
        turns = self._server.parse_turns
        if turns.waits(self):
            return
        while self._unread and not self._deaf and (self._in_body or self._is_free):
            if self._in_body and not is_next and not turns.may_parse():
                self._flow.hold()
                turns.wait(self, self._caller())
                return
            is_next = False
            if not self._in_body and not self._its_turn():
                break
            piece = self._unread[: self._end_of_piece()]
            if self._head_bytes + len(piece) > MAX_HEAD_BYTES and not self._in_body:
                self._refuse(TOO_LARGE)
                return
            self._unread = self._unread[len(piece) :]
            in_chunks, num_chunks = self._in_body and self._body_left is None, self._num_chunks
            began_at = thread_time() if self._in_body else 0.0
            if self._in_body:
                self._count_body(len(piece))
            self._feed(piece)
            if began_at:
                turns.spent(thread_time() - began_at)
            if in_chunks:
                self._count_chunks(len(piece), self._num_chunks - num_chunks)
            if self._num_empty > MAX_HEAD_BYTES or self._num_unwanted > UNWANTED_BYTES:
                self._deaf = True
                self._close()
        if self._deaf:
            self._unread = b""
        elif len(self._unread) >= MAX_UNREAD_BYTES:
            self._flow.hold()
        else:
            self._flow.release()
            self._watch_silence()

    def begin(self) -> None:
        """Parse the head that has come. The server's `Pacer` calls this when it is this connection's turn."""
        self._server.bounded.long_heads.release(self)
        self._unset_keepalive_if_required()
        self._called = True
        self._parse()
        self._called = False

    def _its_turn(self) -> bool:
        """Return whether a head may be parsed now. If not, the server's `Pacer` calls `begin` later, unless the head is
        refused because the long heads of all connections take too much memory."""
        if self._called or self._beyond:  # connections beyond the bound are few, some of them probes
            self._called = False
            return True
        server = self._server
        if not server.pacer.waits(self):
            if server.pacer.may_begin():
                return True
            server.pacer.wait(self, server.callers.caller_of(self._unread), server.bounded.address_of(self))
        if not server.bounded.long_heads.hold(self, len(self._unread)):
            server.pacer.leave(self)
            self._refuse(TOO_MUCH_TOGETHER)
        return False

    def parse_on(self) -> None:
        """Parse more of a body. The server's `ParseTurns` calls this when it is this connection's turn."""
        self._unset_keepalive_if_required()
        self._parse(is_next=True)

    def _caller(self) -> str:
        """Return the name under which this request's body waits for a turn: its caller's, else the peer's address."""
        return self._known_caller() or self._server.bounded.address_of(self)

    def _known_caller(self) -> str:
        """Return a name for the caller of this request; empty for an unknown one."""
        head = b"".join([b"\r\n%b:%b" % header for header in self.headers if header[0] in KEY_HEADERS])
        return self._server.callers.caller_of(head)

    def _count_chunks(self, num_bytes: int, num_chunks: int) -> None:
        """Count the bytes of chunks, plus `CHUNK_BYTES` for each; stop parsing if too many came after the answer."""
        if self._is_free and self._in_body and not self._deaf:
            self._num_unwanted += num_bytes + num_chunks * CHUNK_BYTES
            if self._num_unwanted > UNWANTED_CHUNKS_BYTES:
                self._end_unwanted()

    def _count_body(self, num_bytes: int) -> None:
        if self._body_left is None:
            self._num_empty += num_bytes
        else:
            self._body_left -= num_bytes
            if self._is_free:
                self._num_unwanted += num_bytes

    def _end_of_piece(self) -> int:
        """Return how many unread bytes to parse next: up to the end of a head or body, if that end is known."""
        if not self._in_body:
            end = self._unread.find(END_OF_HEAD)
            return end + len(END_OF_HEAD) if end >= 0 else len(self._unread)
        return CHUNKED_PIECE_BYTES if self._body_left is None else max(1, self._body_left)

    def _feed(self, piece: bytes) -> None:
        in_body, num_headers = self._in_body, len(self.headers) if self._in_head else 0
        if not in_body:
            self._head_bytes += len(piece)
        try:
            self._feed_parser(piece)
        except httptools.HttpParserError:
            if in_body and self._in_body and self._refusal is MALFORMED:
                self._refuse_body()
            elif not self._deaf:
                self._refuse(self._refusal)
        if not self._in_head:
            self._head_bytes = 0
            return
        if self._deaf:
            return
        if in_body:  # the head has begun behind the chunks of a body
            self._head_bytes += len(piece)
        num_headers = len(self.headers) - num_headers
        self._server.bounded.head_grew(self, len(piece) + num_headers * HEADER_BYTES)

    def _feed_parser(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._ignores_upgrade:
                self._unread = piece[upgrade.args[0] :] + self._unread
                self._parse_without_upgrade()
            else:
                self._become_websocket()

    def _parse_without_upgrade(self) -> None:
        """Have a new parser parse the head without its upgrade; it then takes the body for the body. Raises
        HttpParserError.

        The parser that has met the upgrade cannot go on: it parses nothing more if the connection is to be closed."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        head = head_without_upgrade(method, self.url, version, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.parser.feed_data(head)

    def _become_websocket(self) -> None:
        self._deaf = True
        self._end_head_timer()
        self.handle_websocket_upgrade()
        self._server.bounded.replaced(self, cast(Closable, self.transport.get_protocol()))
        # The parser refers to this protocol: together they would stay in memory until the cycle collector runs.
        self.parser = None  # type: ignore[assignment]

    def _watch_silence(self) -> None:
        """Set a timer for what the peer owes: the rest of a head, or another request."""
        if self.transport.is_closing():
            self._end_head_timer()
        elif self._in_head:
            if self._head_bytes and self._head_timer is None:
                self._head_timer = self.loop.call_later(BEYOND_HEAD_S if self._beyond else HEAD_S, self._head_is_late)
        elif self._is_free and self._head_timer is None and self.timeout_keep_alive_task is None:
            # The bytes were no request: an empty line, the rest of a body that was not wanted.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_free and self._head_bytes:
            limit_s = BEYOND_HEAD_S if self._beyond else HEAD_S
            self._refuse(Refusal(408, f"The head of the request did not come in {limit_s:.0f} s. Send it at once."))
        elif self._is_free:
            self._close()

    @property
    def _is_free(self) -> bool:
        """Whether no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _end_after_answers(self) -> None:
        """Answer what has been parsed, read nothing more, and close."""
        self._deaf, self._unread = True, b""
        self._flow.hold()
        self.pipeline[0][0].keep_alive = False

    def _refuse(self, refusal: Refusal) -> None:
        """Send the refusal as the connection's last answer; if another answer is under way, only close."""
        self._deaf, self._unread = True, b""
        self._end_head_timer()
        if not self._is_free or self.transport.is_closing():
            self._close()
            return
        self._forget_head()
        self.transport.write(response_of(refusal, self._server.form))
        if self._beyond and self._server.bounded.pressed:
            self._close()  # others wait for its place; a peer that still sends may lose its answer
            return
        self._linger()
        if self._beyond:
            self._server.bounded.idle(self)

    def _refuse_body(self) -> None:
        """Refuse a request whose body is malformed if no answer has begun: this one's task then hears that the peer has
        left, and writes nothing. Otherwise end the connection."""
        cycle = self.cycle
        if self._is_free:
            self._end_unwanted()  # the request was answered already, and must not be answered twice
        elif cycle.response_started or self.pipeline or not cycle.more_body:
            self._refuse(MALFORMED)
        else:
            cycle.disconnected = cycle.response_complete = True
            cycle.waiting_for_100_continue = False  # `receive` would write behind the refusal
            cycle.message_event.set()
            self._flow.end_chunks()
            self._refuse(MALFORMED_BODY)

    def _end_unwanted(self) -> None:
        """Throw away the rest of an answered request's body for `LINGER_S`, then close."""
        self._deaf, self._unread, self._num_unwanted = True, b"", 0
        self._end_head_timer()
        if not self.transport.is_closing():
            self._linger()

    def _linger(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._flow.release()
        self._flow.resume_reading()
        self.loop.call_later(LINGER_S, self._close)

    def _should_upgrade(self) -> bool:
        """Return whether a request begins a WebSocket. If not, it is answered as if it asked for no other protocol.

        Only a GET can begin one, and not during the answer to an earlier request: that answer would then never end."""
        return self._is_free and super()._should_upgrade() and self.parser.get_method() == b"GET"
