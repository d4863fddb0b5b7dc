"""Reads the workers' news, which they write between heartbeats, for all models in one round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct

import redis.asyncio
from redis.exceptions import ResponseError

from gateway.store.scripts import load_news_script
from gateway.store.trouble import is_of_one_name
from gateway.store.unreadable import Unreadable
from workers.protocol import keys
from workers.protocol.metrics.of_gateway import Unread
from workers.protocol.news import News, NotSealed, open_news

FIRST_MS = 5000
"""Milliseconds that the first reading goes back: the heads that a worker last wrote as a whole are about as old."""
AT_ONCE = 2000
"""Most entries of one reading; more are read in several."""

_HEADER = Struct(">II")


@dataclass(frozen=True, slots=True)
class Told:
    news: News
    age_s: float
    """Seconds since it was written, by the clock of Redis."""


class NewsReader:
    """Reads the stream of news from where it last stopped. Not for two tasks at a time."""

    def __init__(
        self, redis: redis.asyncio.Redis, secret: str, refused: Callable[[], None], unreadable: Unreadable
    ) -> None:
        """`secret`: seals what workers write. `refused` is told of each entry that is not sealed with it, `unreadable`
        of those that are and can't be read.
        """
        self._redis = redis
        self._secret = secret
        self._refused = refused
        self._unreadable = unreadable
        self._source = load_news_script().source
        self._last = ""

    async def read(self) -> list[Told]:
        """Return all that is new, oldest first. Entries dropped from the stream unread, or that are no news, are left
        out, which versions show. Raises redis.RedisError.
        """
        told: list[Told] = []
        while True:
            # The whole script each time: it is short, and a server that has lost its scripts needs no second call.
            call = ("EVAL", self._source, 1, keys.NEWS, self._last, AT_ONCE, FIRST_MS)
            try:
                last, packed = await self._redis.execute_command(*call)  # type: ignore[no-untyped-call]
            except ResponseError as error:
                if not is_of_one_name(error):
                    raise
                # Records and heads say the same, later.
                self._unreadable.skip(Unread.NEWS, keys.NEWS, error)
                return told
            self._last = last.decode()
            entries = list(_unpacked(packed))
            told += [one for entry in entries if (one := self._told(*entry)) is not None]
            if len(entries) < AT_ONCE:
                return told

    def _told(self, age_ms: int, value: bytes) -> Told | None:
        try:
            return Told(open_news(value, self._secret), age_ms / 1000)
        except NotSealed:
            self._refused()
            return None
        except ValueError as error:  # of another version: the worker's record says so
            self._unreadable.skip(Unread.NEWS, value[:40], error)
            return None


def _unpacked(packed: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(packed):
        age_ms, length = _HEADER.unpack_from(packed, at)
        at += _HEADER.size + length
        yield age_ms, packed[at - length : at]
