"""Follows where the TLS records of a connection begin and end, and keeps what the TLS connections of a server share.

OpenSSL consumes records without content, such as KeyUpdate, until it finds one with content, or has consumed all that
it was given: 10,000 of them held the event loop for 78 ms, without a key. So it is given a few at a time.
"""

from __future__ import annotations

from workers.http_server.pacer import ParseTurns

AT_ONCE = 16
"""Maximum number of records that are decrypted in one go; the smallest take up to 15 us each."""
HEAD_BYTES = 5
TYPES = range(20, 25)
"""First byte of a record: what kind it is (RFC 8446, 5.1; RFC 6520)."""
MOST_BYTES = (1 << 14) + 2048
"""Maximum bytes of a record without its head (RFC 5246, 6.2.3)."""

FIRST_BYTES, LARGE_BYTES, FEW_BYTES = 64 << 10, 256 << 10, 4 << 10
"""Maximum bytes that a connection receives in one go: usually; while it sends long records without a break; and while
`MAX_WAITING_BYTES` wait."""
MAX_WAITING_BYTES = 16 << 20
"""Bytes that all connections together have received and not decrypted, above which each receives only a few more."""


class RecordHeads:
    """Follows where the records begin that one peer sends."""

    __slots__ = ("_to_come",)

    def __init__(self) -> None:
        self._to_come = 0
        """Bytes still to come of the record that has begun."""

    def take(self, data: memoryview) -> tuple[int, int]:
        """Return how many of these bytes OpenSSL may have now, and how many records end in them, at most `AT_ONCE`.

        No bytes: the rest is the beginning of a head, and has to come again with what follows."""
        size, end = len(data), self._to_come
        if end > size:
            self._to_come = end - size
            return size, 0
        self._to_come = 0
        num_records = 1 if end else 0
        while num_records < AT_ONCE and size - end >= HEAD_BYTES:
            length = data[end + 3] << 8 | data[end + 4]
            if length > MOST_BYTES or data[end] not in TYPES:
                return size, num_records + 1  # no TLS: OpenSSL says so
            end += HEAD_BYTES + length
            if end > size:
                self._to_come = end - size
                return size, num_records
            num_records += 1
        return end, num_records


class TlsShare:
    """The turns in which the TLS connections of one event loop decrypt, and the memory that they need for that."""

    def __init__(self, turns: ParseTurns | None = None) -> None:
        """`turns`: those of all that is parsed; None: they are its own."""
        self.turns = turns or ParseTurns()
        self.hello_turns = ParseTurns()
        """Turns for handshakes, which take a millisecond or more: a crowd of them holds up no open connection."""
        self.decrypted = memoryview(bytearray(LARGE_BYTES + HEAD_BYTES + MOST_BYTES))
        """Room for the content of what is received in one go."""
        self.num_waiting_bytes = 0
        """Bytes that connections have received and not decrypted."""
        self.received = memoryview(bytearray(LARGE_BYTES))
        """Room for what is received in one go; the next connection that receives overwrites it."""

    def room(self, num_bytes: int) -> memoryview:
        """Return as much of `received` as a connection may fill now that would take so many bytes."""
        return self.received[: num_bytes if self.num_waiting_bytes < MAX_WAITING_BYTES else FEW_BYTES]
