"""Hears senders whose clocks differ: which of them are alive, and by how much their clocks differ from this one.

Each sender writes a field of a hash again and again, with the time by its own clock. Whether it is alive is told by the
field changing, as seen by this machine's monotonic clock. Its times are corrected by the least delay with which its
messages were read: the message that came fastest says best how the clocks differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from workers.protocol.residency import LIFE_S, TOLD_EVERY_S

STEP_S = 2.0
"""A difference of the clocks that has changed by more is taken as it is: one of the clocks was set."""
FRESH_S = 2 * TOLD_EVERY_S
"""Most seconds of age with which a field that is read for the first time is one of a sender that is alive."""
UNSURE_S = 2.5 * TOLD_EVERY_S
"""Seconds after which a field that seemed older, and was not written anew, counts as that of a dead sender."""
FORGOTTEN_S = 60.0
"""Seconds after which the field of a dead sender may be removed."""


class Dated(Protocol):
    """A message with the time at which it was written."""

    @property
    def at(self) -> float: ...


T = TypeVar("T", bound=Dated)


@dataclass(frozen=True, slots=True)
class Heard(Generic[T]):
    """The latest message of one sender."""

    told: T
    lag_s: float
    """Added to a time by the sender's clock, this gives the time by this machine's."""
    heard_at: float
    """Monotonic time at which this message was first read."""
    first_at: float
    """Monotonic time at which the sender was first heard of."""
    is_known: bool
    """Whether the sender was alive when this was read: it was new by its own time, or has replaced another one."""


class Hearing(Generic[T]):
    """The latest messages of all senders of one hash."""

    def __init__(self, decode: Callable[[bytes], T], life_s: float = LIFE_S) -> None:
        self._decode = decode
        self._life_s = life_s
        self._raw: dict[str, bytes] = {}
        self._heard: dict[str, Heard[T]] = {}

    def take(self, fields: Mapping[bytes, bytes], now: float, clock: float) -> frozenset[str]:
        """Take in a reading of the whole hash; return the senders with a new message. `now`: unix time; `clock`:
        monotonic. What can't be read is left out."""
        fresh: set[str] = set()
        raw: dict[str, bytes] = {}
        heard: dict[str, Heard[T]] = {}
        for name, value in fields.items():
            try:
                sender = name.decode()
                last = self._heard.get(sender)
                if last is not None and self._raw.get(sender) == value:
                    raw[sender], heard[sender] = value, last
                    continue
                told = self._decode(value)
            except ValueError:  # msgspec's own, and UnicodeDecodeError
                continue
            raw[sender], heard[sender] = value, self._heard_now(last, told, now, clock)
            fresh.add(sender)
        self._raw, self._heard = raw, heard
        return frozenset(fresh)

    def _heard_now(self, last: Heard[T] | None, told: T, now: float, clock: float) -> Heard[T]:
        lag_s = now - told.at
        if last is None:
            return Heard(told, lag_s, clock, clock, abs(lag_s) <= FRESH_S)
        if last.is_known and abs(lag_s - last.lag_s) <= STEP_S:
            lag_s = min(lag_s, last.lag_s)
        return Heard(told, lag_s, clock, last.first_at, is_known=True)

    def live(self, clock: float) -> dict[str, Heard[T]]:
        """Return sender -> its latest message, of those that are alive."""
        return {sender: heard for sender, heard in self._heard.items() if self._is_live(heard, clock)}

    def is_unsure(self, clock: float) -> bool:
        """Return whether somebody may be alive who is not known to be."""
        return any(not heard.is_known and clock - heard.first_at < UNSURE_S for heard in self._heard.values())

    def forgotten(self, clock: float) -> Iterable[str]:
        """Return the senders that have been dead for long."""
        return [sender for sender, heard in self._heard.items() if clock - heard.heard_at > FORGOTTEN_S]

    def _is_live(self, heard: Heard[T], clock: float) -> bool:
        return heard.is_known and clock - heard.heard_at <= self._life_s
