"""Bounds the number of readers of one stream in this process: each of them costs as much as the first, per token."""

from __future__ import annotations

from collections import Counter

from gateway.errors import TooManyRequests

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
