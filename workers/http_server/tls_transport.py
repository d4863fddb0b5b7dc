"""Encrypts one connection of a server: stands between the transport of its socket and its protocol.

The TLS layers of asyncio and uvloop decrypt all that has come in one go: 450 KB of records of one byte each held the
event loop for 0.2 s, without a key. They also go on so after the server has closed, and keep up to 0.5 MiB for a
protocol that has paused. This one gives OpenSSL a few records in a turn (`ParseTurns`), before a connection is open,
while it is, and after it was closed; where its protocol pauses it receives nothing.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from time import monotonic, thread_time
from typing import Any, cast

from workers.http_server.pacer import ParseTurns
from workers.http_server.records import FIRST_BYTES, LARGE_BYTES, RecordHeads, TlsShare

HANDSHAKE_S = 10.0
"""Maximum seconds of a connection's TLS handshake; then the connection is closed."""
BEYOND_HANDSHAKE_S = 2.0
"""Value of `HANDSHAKE_S` for a connection that came when there were too many, and minimum seconds from its first bytes
being read to its end: those of a crowd wait for their turn."""
GOODBYE_S = 30.0
"""Maximum seconds for which a TLS connection that was closed waits until the peer has read all, and for the peer's own
end. Whatever is not read by then is lost."""
MAX_EMPTY, EMPTY_S = 64, 10.0
"""Maximum number of records without content in so many seconds; a peer that sends more is cut off. A handshake has up
to ten. Who changes keys does so after gigabytes."""
MAX_HELLO_BYTES = 16 << 10
"""Bytes after which no more is received while a handshake waits for its turn."""
PIECE_BYTES = 64 << 10
"""Maximum bytes that are encrypted or decrypted in one go: a connection's buffers stay as large as the largest was."""

log = logging.getLogger(__name__)

NOBODY = asyncio.Protocol()
"""The protocol of connections that are not open yet, or over."""


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of a connection's protocol."""

    _raw: asyncio.Transport
    """The socket's transport."""
    _tls: ssl.SSLObject
    """There from the peer's first bytes on."""

    def __init__(
        self,
        made: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        address: str,
        share: TlsShare,
        limit_s: float = HANDSHAKE_S,
    ) -> None:
        """`made`: makes the connection's protocol when the handshake is complete. `address`: the peer's, which names
        the queue in which the connection waits for its turn. `limit_s`: maximum seconds of the handshake."""
        super().__init__()
        self.protocol: asyncio.Protocol = NOBODY
        """The connection's protocol, which may change."""
        self.is_open = False
        """Whether the handshake is complete."""
        self._loop = asyncio.get_running_loop()
        self.handshake_ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake is complete, or the connection over before that."""
        self._made, self._context, self._address = made, context, address
        self._facts: dict[str, object] = {"sslcontext": context}
        """Extra info of the transport."""
        self._share = share
        self._turns: ParseTurns = share.hello_turns
        self._heads = RecordHeads()
        self._rest = b""
        """Bytes that were received and not decrypted."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._room_bytes = FIRST_BYTES
        """Bytes that are received in one go."""
        self._is_receiving = True
        self._is_held = False
        """Whether the protocol wants no more now."""
        self._is_closing = False
        self._is_over = False
        """Whether nothing that comes matters any more."""
        self._has_said_hello = self._has_peer_ended = False
        self._num_empty, self._empty_until = 0, 0.0
        self._until = self._loop.time() + limit_s
        self._timer: asyncio.TimerHandle | None = None

    # What the socket's transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._take_encrypted, self._send = self._outgoing.read, self._raw.write
        self.get_write_buffer_size = self._raw.get_write_buffer_size  # type: ignore[method-assign]
        self._timer = self._loop.call_at(self._until, self._end_late_handshake)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = self._is_over = True
        self._turns.leave(self)
        self._stop_timer()
        self._keep(b"")
        # This and the protocol hold each other: they would stay in memory until the cycle collector runs.
        protocol, self.protocol = self.protocol, NOBODY
        self._end_handshake()
        protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._share.room(self._room_bytes)

    def buffer_updated(self, nbytes: int) -> None:
        received = self._share.received[:nbytes]
        self._decrypt_some(memoryview(self._rest + received) if self._rest else received)
        if self._turns.waits(self):
            self._room_bytes = FIRST_BYTES
        elif self.is_open and nbytes == self._room_bytes < LARGE_BYTES:
            self._room_bytes *= 2

    def eof_received(self) -> bool:
        if not self.is_open or self._is_closing:
            return False
        self._peer_ended()
        return True  # the protocol closes, or has closed

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    # What the connection's protocol calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        own = self._facts.get(name)
        return self._raw.get_extra_info(name, default) if own is None else own

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.Protocol, protocol)

    def is_reading(self) -> bool:
        return not self._is_held

    def pause_reading(self) -> None:
        self._is_held = True
        self._receive(False)

    def resume_reading(self) -> None:
        if not self._is_held:
            return
        self._is_held = False
        self._read_on()

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        """Encrypt and send data. What is written after `close` is dropped."""
        if self._is_closing or not data:
            return
        try:
            if len(data) <= PIECE_BYTES:
                self._encrypt(data)
                self._send(self._take_encrypted())
                return
            for start in range(0, len(data), PIECE_BYTES):
                self._encrypt(memoryview(data)[start : start + PIECE_BYTES])
                self._send(self._take_encrypted())
        except ssl.SSLError:
            self.abort()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[int]]) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Tell the peer that nothing more is sent, and close when it has read all and says the same."""
        if self._is_closing:
            return
        self._is_closing, self._is_held = True, False
        self._end_in(GOODBYE_S)
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:  # the peer has not ended yet
            pass
        except ssl.SSLError:
            self._has_peer_ended = True
        else:
            self._has_peer_ended = True
        self._flush()
        if self._has_peer_ended:
            self._raw.close()
        else:
            self._read_on()

    def abort(self) -> None:
        self._is_closing = self._is_over = True
        self._raw.abort()

    # What `ParseTurns` calls

    def parse_on(self) -> None:
        """Decrypt on, since it is this connection's turn."""
        try:
            self._decrypt_some(memoryview(self._rest), is_next=True)
        except BaseException:
            self.abort()
            raise

    def _decrypt_some(self, data: memoryview, *, is_next: bool = False) -> None:
        """Decrypt as much as the turn and the protocol allow, and keep the rest. `is_next`: a turn has just come."""
        at, size, has_ended, waits = 0, 0, False, False
        while at < len(data) and not self._is_held and not self._is_over and not has_ended:
            waits = not is_next and not self._turns.may_parse()
            if waits:
                break
            is_next = False
            num_bytes, num_records = self._heads.take(data[at : at + PIECE_BYTES])
            if not num_bytes:
                break
            more, has_ended = self._take(data[at : at + num_bytes], num_records, size)
            at, size = at + num_bytes, size + more
        self._keep(b"" if self._is_over or has_ended else bytes(data[at:]))
        if waits:
            self._turns.wait(self, self._address)
        if size and not self._is_closing:
            self.protocol.data_received(bytes(self._share.decrypted[:size]))
        if has_ended:
            self._peer_ended()
        # Of a peer that gives up its handshake nothing has to wait.
        waits = self._turns.waits(self) and (self.is_open or len(self._rest) >= MAX_HELLO_BYTES)
        self._receive(not waits and not self._is_held)

    def _take(self, records: memoryview, num_records: int, size: int) -> tuple[int, bool]:
        """Give OpenSSL bytes in which so many records end. Return how many bytes of content have come behind the `size`
        that are there, and whether the peer has ended."""
        self._incoming.write(records)
        if not num_records and self.is_open:
            return 0, False
        turns, began_at = self._turns, thread_time()
        is_open = self.is_open or self._shake_hands(num_records)
        found = self._decrypt(num_records, self._share.decrypted[size:]) if is_open else (0, False)
        turns.spent(thread_time() - began_at)
        return found

    def _shake_hands(self, num_records: int) -> bool:
        """Go on with the handshake; return whether it is complete now."""
        if not self._has_said_hello:
            self._has_said_hello = True
            self._until = max(self._until, self._loop.time() + BEYOND_HANDSHAKE_S)
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._encrypt = self._tls.write
            self._read = cast(Callable[[int, memoryview], int], self._tls.read)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._count_empty(num_records)
            self._flush()
            return False
        except ssl.SSLError:  # no TLS, or a certificate that is not good
            self._fail()
            return False
        self._flush()
        self._stop_timer()
        self._open()
        return True

    def _open(self) -> None:
        self._turns.leave(self)
        self.is_open, self._turns = True, self._share.turns
        tls = self._tls
        self._facts.update(ssl_object=tls, peercert=tls.getpeercert(), cipher=tls.cipher())
        self.protocol = self._made()
        self.protocol.connection_made(self)
        self._end_handshake()

    def _decrypt(self, num_records: int, room: memoryview) -> tuple[int, bool]:
        """Decrypt so many records. Return how many bytes of content there are, and whether the peer has ended."""
        size, num_full, has_ended = 0, 0, False
        try:
            while num_full < num_records and not has_ended:
                more = self._read(len(room), room[size:] if size else room)
                size += more
                num_full += 1
                has_ended = not more
        except ssl.SSLWantReadError:
            self._count_empty(num_records - num_full)
        except ssl.SSLZeroReturnError:
            has_ended = True
        except ssl.SSLError:
            self._fail()
        self._flush()
        return size, has_ended

    def _count_empty(self, num_records: int) -> None:
        """Count records without content; cut the connection if there are too many."""
        now = monotonic()
        if now > self._empty_until:
            self._num_empty, self._empty_until = 0, now + EMPTY_S
        self._num_empty += num_records
        if self._num_empty > MAX_EMPTY:
            log.debug("a connection was cut whose peer sends TLS records without content: %s", self._address)
            self.abort()

    def _peer_ended(self) -> None:
        if self._has_peer_ended:
            return
        self._has_peer_ended = self._is_over = True
        if self._is_closing:
            self._raw.close()
        elif not self.protocol.eof_received():
            self.close()

    def _fail(self) -> None:
        """Close, as the peer has sent what is no TLS; OpenSSL tells it so."""
        self._is_closing = self._is_over = True
        self._end_in(GOODBYE_S)
        self._flush()
        self._raw.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._send(self._take_encrypted())

    def _keep(self, rest: bytes) -> None:
        if not rest and not self._rest:
            return
        self._share.num_waiting_bytes += len(rest) - len(self._rest)
        self._rest = rest

    def _read_on(self) -> None:
        """Go on with what is there in the next turn; receive more if there is nothing."""
        if self._rest:
            self._turns.wait(self, self._address)
        else:
            self._receive(True)

    def _receive(self, wanted: bool) -> None:
        if wanted == self._is_receiving:
            return
        self._is_receiving = wanted
        if wanted:
            self._raw.resume_reading()
        else:
            self._raw.pause_reading()

    def _end_late_handshake(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._end_late_handshake)
        else:
            self.abort()

    def _end_in(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._raw.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_handshake(self) -> None:
        if not self.handshake_ended.done():
            self.handshake_ended.set_result(None)
