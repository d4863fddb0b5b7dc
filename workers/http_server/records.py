"""Reads TLS records in turns. A record can hold a single byte, and decrypting it takes as long as one of kilobytes.

The TLS layers of asyncio and uvloop decrypt all that has come in one go, unless their protocol gives them a buffer:
then they stop when it is full. 450 KB of records of one byte each held the event loop for 0.2 s, without a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import thread_time
from typing import Any, cast

from workers.http_server.pacer import ParseTurns

FIRST_BYTES, FEWEST_BYTES, MOST_BYTES = 256, 64, 256 << 10
"""Bytes that a connection decrypts in one go: at first; where records are tiny or it is not its turn; at most."""
GROWTH = 4
"""How many times as many they may be the next time."""
SLICE_S = 0.0003
"""Processor seconds that it should take to decrypt them."""

NOBODY = asyncio.BufferedProtocol()
"""The protocol of TLS layers whose connections are over: they keep one for good."""


class RecordBuffer:
    """The memory into which the connections of one event loop decrypt, one at a time."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(MOST_BYTES))


class PacedTransport(asyncio.Transport):
    """A connection's transport as its protocol sees it: reading goes on where the protocol and its turn allow it."""

    def __init__(self, transport: asyncio.Transport, records: PacedRecords) -> None:
        super().__init__()
        self._transport = transport
        self._records = records
        # The hot ones are those of the transport itself.
        self.write = transport.write  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.get_write_buffer_size = transport.get_write_buffer_size  # type: ignore[method-assign]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._records.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._records.protocol = cast(asyncio.Protocol, protocol)

    def is_reading(self) -> bool:
        return not self._records.is_held

    def pause_reading(self) -> None:
        self._records.hold()

    def resume_reading(self) -> None:
        self._records.release()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[int]]) -> None:
        self._transport.writelines(list_of_data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class PacedRecords(asyncio.BufferedProtocol):
    """Stands between the TLS layer and a connection's protocol. Each connection decrypts for some tenths of a
    millisecond in a turn of the event loop, and all together for no longer than `ParseTurns` allows."""

    def __init__(self, protocol: asyncio.Protocol, address: str, turns: ParseTurns, buffer: RecordBuffer) -> None:
        """`address`: the peer's, which names the queue in which the connection waits for its turn."""
        self.protocol = protocol
        """The connection's protocol, which may change."""
        self.is_held = False
        """Whether the protocol wants no more now."""
        self._address = address
        self._turns = turns
        self._view = buffer.view
        self._num_bytes = FIRST_BYTES
        self._is_its_turn = False
        self._began_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.protocol.connection_made(PacedTransport(self._transport, self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._turns.leave(self)
        self.protocol.connection_lost(exc)
        # The TLS layer, this and the protocol hold each other: they would stay in memory until the collector runs.
        self.protocol = asyncio.Protocol()
        self._transport.set_protocol(NOBODY)

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received()

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        self._began_at = thread_time()
        may_go_on = self._is_its_turn or self._turns.may_parse()
        self._is_its_turn = False
        return self._view[: self._num_bytes if may_go_on else FEWEST_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._view[:nbytes])
        took_s = thread_time() - self._began_at
        self._turns.spent(took_s)
        as_many = int(nbytes * SLICE_S / max(took_s, 1e-6))
        self._num_bytes = max(FEWEST_BYTES, min(as_many, GROWTH * self._num_bytes, MOST_BYTES))
        if not self._turns.may_parse():
            self._transport.pause_reading()
            self._turns.wait(self, self._address)
        self.protocol.data_received(data)

    def parse_on(self) -> None:
        """Decrypt on. The server's `ParseTurns` calls this when it is this connection's turn."""
        self._is_its_turn = True
        self._turns.spent(SLICE_S)  # in advance: the TLS layer decrypts in the next turn
        if not self.is_held:
            self._transport.resume_reading()

    def hold(self) -> None:
        """Read no more, until `release`."""
        self.is_held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Read on, once it is this connection's turn."""
        self.is_held = False
        if not self._turns.waits(self):
            self._transport.resume_reading()
