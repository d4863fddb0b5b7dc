"""The bounded buffer between a worker's event stream and one caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.call import Push, Pushed
from workers.protocol.events import CallEvent, Failed, Finished, Settings, Started

MAX_BYTES = 32 << 20
"""Maximum bytes of unread events; more make the mailbox overflow. Otherwise a few long events could fill the memory."""


class Mailbox:
    """Holds the events of one call, in order. The writer never waits; the reader takes all unread events at once.

    A reader that waits may have events pushed to it (`gateway.call.Answer.take`): then no task wakes for a token.

    For use on one event loop. When the reader falls `limit` events or `MAX_BYTES` behind, `on_overflow` is called once
    and later events are dropped: the call is over for the reader. `on_end` is called with the last event as soon as it
    comes, even if the reader never takes it. `put_all` runs once per token."""

    __slots__ = (
        "_bytes",
        "_complete",
        "_events",
        "_limit",
        "_loop",
        "_on_end",
        "_on_overflow",
        "_overflowed",
        "_push",
        "_reader",
        "end",
        "ended",
    )

    choice = 0
    """Number of the answer among its request's answers; 0, since one call makes one answer."""

    def __init__(
        self,
        limit: int,
        on_overflow: Callable[[], None],
        on_end: Callable[[Finished | Failed], None] = lambda end: None,
    ) -> None:
        self.ended = False
        """Whether the reader has taken the call's last event."""
        self.end: Finished | Failed | None = None
        """The call's last event, once the reader has taken it."""
        self._loop = asyncio.get_running_loop()
        self._bytes = 0
        """Approximate size on the wire of the unread events."""
        self._events: list[CallEvent] = []
        self._complete = False
        """Whether the last event has come. Nothing follows it, even if the worker is lost before the reader runs."""
        self._reader: asyncio.Future[None] | None = None
        self._push: Push | None = None
        """Set only while a reader waits that has read all events."""
        self._limit = limit
        self._on_overflow = on_overflow
        self._on_end = on_end
        self._overflowed = False

    def put(self, event: CallEvent) -> None:
        self.put_all([event])

    def put_all(self, events: list[CallEvent], num_bytes: int = 0) -> None:
        """Append events that came together. `num_bytes`: their approximate size on the wire."""
        if self._complete:
            return
        last, reader = events[-1], self._reader
        kind = type(last)  # quicker than `isinstance`, and this is done per token
        if kind is Finished or kind is Failed:
            self._complete = True
            self._on_end(cast(Finished | Failed, last))
        elif self._push is not None and reader is not None and not reader.done():
            pushed = self._push(events)
            if pushed is Pushed.WRITTEN:
                return
            if pushed is Pushed.STALLED:
                self._wake()
                return
        if self._overflowed:
            return
        self._bytes += num_bytes
        if len(self._events) + len(events) > self._limit or self._bytes > MAX_BYTES:
            self._overflow()
            return
        self._events += events
        if reader is not None:
            self._wake()

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        """Wait for events and return all unread ones, as `gateway.call.Answer.take`."""
        if not self._events:
            self._reader = self._loop.create_future()
            self._push = push
            try:
                await self._reader
            finally:
                self._push = None
        events = self._events
        self._events, self._bytes = [], 0
        if events:
            kind = type(events[-1])
            if kind is Finished or kind is Failed:
                self.ended, self.end = True, cast(Finished | Failed, events[-1])
        return events

    async def peek(self, past: type[CallEvent] | tuple[()] = ()) -> CallEvent:
        """Wait for the first event that is not of type `past` (`()`: the first event); return it without taking it."""
        while (event := next((event for event in self._events if not isinstance(event, past)), None)) is None:
            self._reader = self._loop.create_future()
            await self._reader
        return event

    def _wake(self) -> None:
        """Have the reader run. What comes before it runs is not pushed."""
        reader, self._reader, self._push = self._reader, None, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _overflow(self) -> None:
        if not self._overflowed:
            self._overflowed = True
            self._on_overflow()


class MailboxWithSettings(Mailbox):
    """A mailbox that inserts the call's settings (`Settings`) after `Started`.

    The settings come in the worker's answer to the submit, and events can come before that answer. So all events except
    `Failed` are held back until `release`."""

    __slots__ = ("_early", "_early_bytes", "_released", "_settings")

    def __init__(
        self,
        limit: int,
        on_overflow: Callable[[], None],
        on_end: Callable[[Finished | Failed], None] = lambda end: None,
    ) -> None:
        super().__init__(limit, on_overflow, on_end)
        self._early: list[CallEvent] = []
        self._early_bytes = 0
        self._settings: Settings | None = None
        self._released = False

    def release(self, settings: Settings | None) -> None:
        """Pass on the events that were held back, with these settings; None: the worker sent no settings."""
        self._released, self._settings = True, settings
        early, self._early = self._early, []
        if early:
            self.put_all(early, self._early_bytes)

    def put_all(self, events: list[CallEvent], num_bytes: int = 0) -> None:
        if not self._released and isinstance(events[-1], Failed):
            events = events[-1:]
        elif not self._released:
            if self._overflowed:
                return
            self._early_bytes += num_bytes
            if len(self._early) + len(events) > self._limit or self._early_bytes > MAX_BYTES:
                self._overflow()
            else:
                self._early += events
            return
        if self._settings is not None and isinstance(events[0], Started):
            events = [events[0], self._settings, *events[1:]]
            self._settings = None
        super().put_all(events, num_bytes)
