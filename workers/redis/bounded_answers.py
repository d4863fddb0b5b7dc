"""Bounds the answers that a client takes from Redis: others may have written what it reads, of any length."""

from __future__ import annotations

from typing import Any

from redis._parsers import _AsyncHiredisParser
from redis.exceptions import ConnectionError


class AnswerTooLong(ConnectionError):
    """An answer has more bytes than its client takes; the connection is closed without the rest."""


def bounded_parser(longest_bytes: int) -> type[_AsyncHiredisParser]:
    """Return redis-py's parser in a form that raises AnswerTooLong once an answer has more than so many bytes; no more
    than these are kept of it."""

    class BoundedParser(_AsyncHiredisParser):
        num_bytes = 0
        """Bytes that were read for the answer that is being read."""

        async def read_response(self, *args: Any, **options: Any) -> Any:
            self.num_bytes = 0
            return await super().read_response(*args, **options)

        async def read_from_socket(self) -> bool:
            stream: Any = self._stream
            reader: Any = self._reader  # redis-py's annotation says that it is always None
            buffer = await stream.read(self._read_size)
            if not buffer:
                raise ConnectionError("Redis closed the connection")
            self.num_bytes += len(buffer)
            if self.num_bytes > longest_bytes:
                raise AnswerTooLong(f"an answer of Redis has more than {longest_bytes:,} bytes")
            reader.feed(buffer)
            return True

    return BoundedParser
