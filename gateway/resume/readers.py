"""Bounds the number of readers of one stream, and waits until it has had none for its grace period."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from gateway.errors import StoreUnavailable, TooManyRequests
from gateway.resume.recording import Recording
from gateway.store.streams import StreamLog

MAX_OF_STREAM = 8
MAX_MORE_OF_TEAM = 64
"""Most readers of all streams of a team, not counting the first of each: streams themselves are bounded already."""
RETRY_AFTER_S = 5.0


class Readers:
    """Counts the readers of all streams."""

    def __init__(self) -> None:
        self._of_stream: Counter[str] = Counter()
        self._more_of_team: Counter[str] = Counter()

    def enter(self, team: str, stream: str) -> Place:
        """Count one more reader and return its place, which must be left, once or more. Raises TooManyRequests."""
        if self._of_stream[stream] >= MAX_OF_STREAM:
            raise TooManyRequests(
                f"{MAX_OF_STREAM} connections read this stream at this gateway, and no more may at a time. Close one "
                "of them, or read it again when one has ended.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._of_stream[stream] and self._more_of_team[team] >= MAX_MORE_OF_TEAM:
            raise TooManyRequests(
                f"{MAX_MORE_OF_TEAM} connections of this key's team read streams at this gateway that others of the "
                "team's read as well, and no more may at a time. Close one of them, or read it again when one has "
                "ended.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._more_of_team[team] += self._of_stream[stream] > 0
        self._of_stream[stream] += 1
        return Place(self, team, stream)

    def leave(self, team: str, stream: str) -> None:
        """Count one reader less."""
        self._of_stream[stream] -= 1
        self._more_of_team[team] -= self._of_stream[stream] > 0
        for counter, name in ((self._of_stream, stream), (self._more_of_team, team)):
            if not counter[name]:
                del counter[name]


class Place:
    """Holds one reader's place. Only the first `leave` counts."""

    __slots__ = ("_readers", "_stream", "_team")

    def __init__(self, readers: Readers, team: str, stream: str) -> None:
        self._readers: Readers | None = readers
        self._team = team
        self._stream = stream

    def leave(self) -> None:
        """Give the place back."""
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.leave(self._team, self._stream)


LOOK_EVERY_S = 0.3
SHORTEST_S = 0.01


async def unread(recording: Recording, log: StreamLog, grace_s: float) -> bool:
    """Wait until nobody has read the stream for `grace_s`, here or at another gateway. False: it ended before that."""
    seen: bytes | None = None
    read_at = time.monotonic()
    while not recording.ended:
        now = time.monotonic()
        if recording.num_readers:
            read_at = now
        else:
            read_at = max(read_at, recording.left_at)
            try:
                sign = await log.signs(recording.stream)
            except StoreUnavailable:
                # Nobody can tell whether it is read elsewhere. The limit for one request holds all the same.
                read_at = now
            else:
                if sign != seen:
                    seen, read_at = sign, now
                elif now - read_at >= grace_s:
                    return True
        await asyncio.sleep(max(SHORTEST_S, min(LOOK_EVERY_S, read_at + grace_s - now)))
    return False
