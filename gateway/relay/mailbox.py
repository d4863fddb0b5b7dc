"""The bounded buffer between a worker's event stream and one caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

from gateway.back_pressure import unread
from gateway.call import Push, Pushed
from gateway.errors import PaddockError
from workers.protocol.events import (
    CallEvent,
    Failed,
    Finished,
    Logprobs,
    PromptLogprobs,
    Settings,
    Started,
    TokenLogprob,
    decode_step,
    encode_step,
    num_generated,
)

MAX_BYTES = 32 << 20
"""Maximum bytes of unread events; more make the mailbox overflow. Otherwise a few long events could fill the memory."""
FREE_BYTES = 64 << 10
"""Bytes of unread events up to which they count for nobody: a caller who reads what comes never has more."""
SPARE_BYTES = 1 << 20
"""Maximum bytes that count in addition to those of the unread events, so that they need not be counted one by one."""
EVENT_BYTES, PROB_BYTES = 200, 180
"""Bytes of memory of a decoded event on top of its text, and of a decoded probability with its token's text."""
LONG = (Logprobs, PromptLogprobs)
NO_TOKEN = TokenLogprob(0, b"", 0.0)
PORTION_BYTES = 32 << 10
"""Bytes of events that a reader who is behind takes at once. Others get a turn between two such portions: a thousand
tokens with a hundred probabilities each are decoded and written in a quarter of a second."""


class Held(Protocol):
    """Counts the bytes that the unread events of one call hold."""

    def resize(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all. Raises PaddockError if that is more than may be held; then nothing changes."""
        ...

    def close(self) -> None: ...


class Encoded(NamedTuple):
    """An event that is kept encoded."""

    head: CallEvent
    """The event without its probabilities."""
    data: bytes


class Unread:
    """The events of one call that wait for their reader.

    Probabilities with which more than FREE_BYTES wait are kept encoded. Decoded, they take six times as much memory, in
    small blocks that Python does not give back: a gateway with 72 slow readers of them took 520 MiB more, and kept it.
    Those of a long prompt are kept so as well, although its reader takes them in the next turn of the loop: decoded,
    they would count for so much that the reader's key could have one such prompt at a time."""

    __slots__ = ("_counted", "_held", "_kept", "_num_bytes", "has_rest", "num")

    def __init__(self, held: Held | None) -> None:
        self.num = 0
        """Number of the events."""
        self.has_rest = False
        """Whether the last `take` has left some for later."""
        self._kept: list[CallEvent | Encoded] = []
        self._num_bytes = 0
        """Approximate bytes of memory of the events."""
        self._held = held
        self._counted = FREE_BYTES
        """Bytes up to which `held` need not be asked."""

    def add(self, events: list[CallEvent], num_bytes: int) -> None:
        """Add events with `num_bytes` on the wire. Raises PaddockError if they take too much: the call is over then."""
        self.num += len(events)
        self._num_bytes += num_bytes + EVENT_BYTES * len(events)
        is_behind = self._num_bytes > FREE_BYTES
        for event in events:
            if not isinstance(event, LONG):
                self._kept.append(event)
            elif is_behind:
                self._kept.append(_encoded(event))
            else:
                self._kept.append(event)
                self._num_bytes += PROB_BYTES * _num_probs(event)
        if self._num_bytes > MAX_BYTES:
            raise unread()
        if self._held is not None and self._num_bytes > self._counted:
            self._count(self._held)

    def _count(self, held: Held) -> None:
        """Have the bytes of the events counted, and as many to spare, so that this is done a few times per call and not
        once per event. Raises PaddockError."""
        with suppress(PaddockError):
            wanted = self._num_bytes + min(self._num_bytes, SPARE_BYTES)
            held.resize(wanted)
            self._counted = wanted
            return
        held.resize(self._num_bytes)
        self._counted = self._num_bytes

    @property
    def heads(self) -> Iterator[CallEvent]:
        """The events; those that are kept encoded have no probabilities."""
        return (one.head if isinstance(one, Encoded) else one for one in self._kept)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens of the answer the events tell of."""
        return num_generated(self.heads)

    def take(self) -> list[CallEvent]:
        """Return the events, or a first portion of about PORTION_BYTES if encoded ones have more."""
        portion = self._take_portion() if self._num_bytes > FREE_BYTES else []
        self.has_rest = bool(portion)
        return portion or self.take_all()

    def take_all(self) -> list[CallEvent]:
        """Return all events, however long they are."""
        events = list(_decoded(self._kept))
        self._kept, self.num, self._num_bytes = [], 0, 0
        if self._held is not None and self._counted > FREE_BYTES:
            self._held.resize(0)
            self._counted = FREE_BYTES
        return events

    def _take_portion(self) -> list[CallEvent]:
        """Return a portion, and keep the rest; empty if there is no more than one. Only encoded events count: the
        others are handled in microseconds, and a reader who keeps up with thousands of them must not fall behind."""
        num_bytes = 0
        for place, kept in enumerate(self._kept[:-1], 1):
            num_bytes += len(kept.data) if isinstance(kept, Encoded) else 0
            if num_bytes >= PORTION_BYTES:
                first, self._kept = self._kept[:place], self._kept[place:]
                self._num_bytes = max(0, self._num_bytes - num_bytes - EVENT_BYTES * place)
                self.num -= place
                return list(_decoded(first))
        return []

    def drop(self) -> None:
        """Keep no events, and count none from now on."""
        self._kept, self.num, self._held = [], 0, None


def _encoded(event: Logprobs | PromptLogprobs) -> Encoded:
    head = Logprobs(event.call, NO_TOKEN, ()) if isinstance(event, Logprobs) else PromptLogprobs(event.call, ())
    return Encoded(head, encode_step([event]))


def _decoded(kept: list[CallEvent | Encoded]) -> Iterator[CallEvent]:
    """Yield events of which some are kept encoded."""
    for one in kept:
        if isinstance(one, Encoded):
            yield from decode_step(one.data)
        else:
            yield one


def _num_probs(event: Logprobs | PromptLogprobs) -> int:
    tops = [event.top] if isinstance(event, Logprobs) else [top for _, top in event.tokens]
    return sum([1 + len(top) for top in tops])


class Mailbox:
    """Holds the events of one call, in order. The writer never waits; the reader takes unread events together.

    A reader that waits may have events pushed to it (`gateway.call.Answer.take`): then no task wakes for a token.

    For use on one event loop. When the reader falls `limit` events or `MAX_BYTES` behind, or `held` refuses to count
    what is unread, `on_overflow` is called once with the error that says so, and later events are dropped: the call is
    over for the reader. `on_end` is called with the last event as soon as it comes, even if the reader never takes it.
    `put_all` runs once per token."""

    __slots__ = (
        "_complete",
        "_held",
        "_limit",
        "_loop",
        "_on_end",
        "_on_overflow",
        "_overflowed",
        "_push",
        "_reader",
        "_unread",
        "end",
        "ended",
    )

    choice = 0
    """Number of the answer among its request's answers; 0, since one call makes one answer."""

    def __init__(
        self,
        limit: int,
        on_overflow: Callable[[PaddockError], None],
        on_end: Callable[[Finished | Failed], None] = lambda end: None,
        held: Held | None = None,
    ) -> None:
        """`held` counts the unread events, to the end of the call; None: nothing counts them."""
        self.ended = False
        """Whether the reader has taken the call's last event."""
        self.end: Finished | Failed | None = None
        """The call's last event, once the reader has taken it."""
        self._loop = asyncio.get_running_loop()
        self._held = held
        self._unread = Unread(held)
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
        if self._keep(self._unread, events, num_bytes) and reader is not None:
            self._wake()

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        """Wait for events and return unread ones, as `gateway.call.Answer.take`."""
        if self._unread.has_rest:
            await asyncio.sleep(0)
        if not self._unread.num:
            self._reader = self._loop.create_future()
            self._push = push
            try:
                await self._reader
            finally:
                self._push = None
        events = self._unread.take()
        if events:
            kind = type(events[-1])
            if kind is Finished or kind is Failed:
                self.ended, self.end = True, cast(Finished | Failed, events[-1])
        return events

    async def peek(self, past: type[CallEvent] | tuple[()] = ()) -> CallEvent:
        """Wait for the first event that is not of type `past` (`()`: the first event); return it without taking it.
        One that is kept encoded is returned without its probabilities."""
        while (event := next((event for event in self._unread.heads if not isinstance(event, past)), None)) is None:
            self._reader = self._loop.create_future()
            await self._reader
        return event

    @property
    def num_unread(self) -> int:
        """Return how many tokens of the answer no reader has taken yet."""
        return self._unread.num_tokens

    def close(self) -> None:
        """Drop the unread events, and count none. Nobody reads them any more."""
        self._unread.drop()
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _wake(self) -> None:
        """Have the reader run. What comes before it runs is not pushed."""
        reader, self._reader, self._push = self._reader, None, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _keep(self, where: Unread, events: list[CallEvent], num_bytes: int) -> bool:
        """Keep events until they are taken. Return False if they are too many: then no others are kept."""
        try:
            if where.num + len(events) > self._limit:
                raise unread()
            where.add(events, num_bytes)
        except PaddockError as error:
            self._overflowed = True
            # Its traceback refers to this mailbox, which refers to the call that keeps the error.
            self._on_overflow(error.with_traceback(None))
            return False
        return True


class MailboxWithSettings(Mailbox):
    """A mailbox that inserts the call's settings (`Settings`) after `Started`.

    The settings come in the worker's answer to the submit, and events can come before that answer. So all events except
    `Failed` are held back until `release`."""

    __slots__ = ("_early", "_early_bytes", "_released", "_settings")

    def __init__(
        self,
        limit: int,
        on_overflow: Callable[[PaddockError], None],
        on_end: Callable[[Finished | Failed], None] = lambda end: None,
        held: Held | None = None,
    ) -> None:
        super().__init__(limit, on_overflow, on_end, held)
        self._early = Unread(held)
        self._early_bytes = 0
        self._settings: Settings | None = None
        self._released = False

    def release(self, settings: Settings | None) -> None:
        """Pass on the events that were held back, with these settings; None: the worker sent no settings."""
        self._released, self._settings = True, settings
        if early := self._early.take_all():
            self.put_all(early, self._early_bytes)

    def close(self) -> None:
        self._early.drop()
        super().close()

    def put_all(self, events: list[CallEvent], num_bytes: int = 0) -> None:
        if not self._released and isinstance(events[-1], Failed):
            events = events[-1:]
        elif not self._released:
            if self._overflowed:
                return
            self._early_bytes += num_bytes
            self._keep(self._early, events, num_bytes)
            return
        if self._settings is not None and isinstance(events[0], Started):
            events = [events[0], self._settings, *events[1:]]
            self._settings = None
        super().put_all(events, num_bytes)
