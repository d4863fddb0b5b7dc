"""The event hub, which keeps for each gateway a bounded ring of encoded frames, and the connection that reads the ring;
and the mailbox that brings the engine's steps to the event loop.

Everything but `Mailbox.put` runs on the event loop. The ring is the only buffer: a connection keeps a position in it
and reads at its own pace, so a slow or absent gateway costs at most one ring of memory. Frames that a connection has
taken are dropped after a minute, so that a fleet of many gateways costs a worker what they read in a minute, and not a
full ring each.

The first frames of a connection depend on its `Last-Event-ID` (WHATWG HTML, "Server-sent events"):

    id                                        first                    then
    ----------------------------------------  -----------------------  ---------------------------
    of this boot, still covered by the ring   -                        every frame after it
    of this boot, overrun                     `alive`                  every frame still in the ring
    of another boot, or malformed             `alive`                  every frame still in the ring
    none, and nothing was ever dropped        -                        every frame
    none, and something was dropped           `alive`                  every frame still in the ring

`alive` lists the calls whose events are all in the ring or yet to come: those that run or wait, and ended ones that the
ring still holds as a whole. A call that lost an event to the overrun is cancelled and not listed, so that no answer has
a silent gap. The same happens in the middle of a live stream when its connection falls behind by more than the ring.

Long events have a bound of their own (`workers/service/calls/ring.py`). A call that loses events by it gets a `Failed`
before all that is left of it, and only that call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.protocol.events import CallEvent, Failed, Failure, FailureCode, encode_alive, encode_step
from workers.protocol.framing import ALIVE_EVENT, encode_frame, event_id, parse_event_id
from workers.service.calls.ring import EVENT_BYTES, Ring, StoredFrame

RING_FRAMES = 8192
RING_BYTES = 4 << 20
"""Maximum bytes of a ring; above it the oldest frames are dropped. Sixteen calls that stream at 1.4 ms per step fill it
in about ten seconds, twice the default `gateway_grace_s`."""
LONG_BYTES = 16 << 20
"""Maximum bytes of a ring's long events, on top of that: three times the most that one event has (131,072
probabilities of a prompt). 32 calls with 100 probabilities for each token fill it in four seconds."""

OVERRUN = Failure(
    FailureCode.OVERRUN,
    "This answer, with its log probabilities, came faster than it could be passed on. Ask for fewer log probabilities, "
    "or send fewer such requests at once.",
)

MAX_PART_BYTES = 256 << 10
"""Maximum bytes of one frame's data. A step with more is split into several frames, but a single event never is.

A JSON value and its comma take at least two bytes, so such a frame has at most 131,072 values: gateways allow that."""

KEPT_S = 60.0
"""Seconds for which a new frame stays in the ring although a connection has taken it: ten times as long as a gateway
takes to notice a dead connection and come back. A gateway that is back later gets `alive` and loses what it missed."""

SWEEP_S = 5.0

MAX_FORGOTTEN = 256


@dataclass(slots=True, eq=False)
class Listing:
    """One call in its gateway's book (the state kept for a gateway process)."""

    number: int
    key: int
    """The engine's key of the call."""
    gateway: GatewayBook
    team: str = ""
    first_step: int = 0
    """Step of the call's first event; 0 before that event."""


@dataclass(slots=True, eq=False)
class GatewayBook:
    """The state that is kept for one gateway process."""

    gateway_id: str
    ring: Ring
    lossy: bool
    """Whether a frame was dropped that this gateway may not have seen."""
    calls: dict[int, Listing] = field(default_factory=dict)
    ending: dict[int, Listing] = field(default_factory=dict)
    """The calls whose last event is in the frames to be published next."""
    ended: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(last step, call number, first step) of the calls whose end is still in the ring."""
    feed: Feed | None = None
    expiry: asyncio.TimerHandle | None = None

    def drop(self) -> None:
        """Drop the oldest frame, and forget the ended calls whose last event was in it."""
        self.ring.drop()
        self.lossy = True
        while self.ended and self.ended[0][0] <= self.ring.floor:
            self.ended.popleft()

    def note_first_steps(self, events: list[CallEvent], first: dict[int, int], before: int) -> None:
        """Correct the first steps of calls that began after the step `before`, in events that took several frames.

        `first`: call -> step of the first frame of its own; under 0, that of the first shared frame."""
        for number in {event.call for event in events}:
            listing = self.listing(number)
            if listing is not None and listing.first_step > before:
                listing.first_step = first.get(number) or first[0]

    def note_ends(self, step: int) -> None:
        """Note that `step` is the last step of the calls whose last event was just published."""
        self.ended += [(step, number, listing.first_step) for number, listing in self.ending.items()]
        self.ending.clear()

    def listing(self, number: int) -> Listing | None:
        """Return the listing of a call that has not ended yet, or ends in the frames to be published next."""
        return self.calls.get(number) or self.ending.get(number)


class Feed:
    """One connection's position in its gateway's ring. It has one reader; anyone on the loop may call `close`."""

    def __init__(self, hub: EventHub, book: GatewayBook, position: int) -> None:
        self.book = book
        self._hub = hub
        self._position = position
        """Step of the last frame taken; it is below the ring's `floor` if frames were lost."""
        self._failed: list[int] = []
        """Calls that lost events which this connection would have taken next, and are to be told so first."""
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def position(self) -> int:
        """Step of the last frame taken."""
        return self._position

    @property
    def caught_up(self) -> bool:
        return self._position >= self.book.ring.newest and not self._failed

    def take(self, max_bytes: int) -> bytes:
        """Return the next frames: as many as fit `max_bytes`, but at least one; empty when caught up."""
        ring = self.book.ring
        parts: list[bytes] = []
        if self._position < ring.floor:  # first, as gateways expect it
            parts.append(self._hub.alive_frame(self.book))
            self._position = ring.floor
        if self._failed:
            parts.append(encode_frame(encode_step([Failed(call, OVERRUN) for call in self._failed])))
            self._failed.clear()
        size = sum(map(len, parts))
        pending: list[StoredFrame] = []
        for frame in reversed(ring.frames):
            if frame.step <= self._position:
                break
            pending.append(frame)
        for frame in reversed(pending):
            size += len(frame.data)
            if size > max_bytes and parts:
                break
            if frame.data:
                parts.append(frame.data)
            self._position = frame.step
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def fail(self, calls: list[int]) -> None:
        """Tell the gateway, before it gets more of their events, that these calls have failed: they lost some."""
        self._failed += calls
        self.wake()

    async def wait(self) -> None:
        """Wait until there may be something to take, or the feed is closed."""
        if self._closed or not self.caught_up:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        self._closed = True
        self.wake()


class EventHub:
    """Keeps the books of all gateways: their calls, rings and connections."""

    def __init__(
        self,
        boot: str,
        on_lost: Callable[[int], None],
        *,
        grace_s: float,
        ring_frames: int = RING_FRAMES,
        ring_bytes: int = RING_BYTES,
        long_bytes: int = LONG_BYTES,
        kept_s: float = KEPT_S,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """`on_lost(key)` is called for each call that the hub gives up: its gateway stayed away past the grace period,
        or the ring overran and dropped some of its events. `kept_s`: seconds for which a new frame stays in the ring
        although it has been taken. `sweep_s`: seconds between two sweeps, which drop the frames kept for longer."""
        self.boot = boot
        self._grace_s = grace_s
        self._on_lost = on_lost
        self._ring_frames = ring_frames
        self._ring_bytes = ring_bytes
        self._long_bytes = long_bytes
        self._books: dict[str, GatewayBook] = {}
        self._forgotten: dict[str, None] = {}
        """Ids of gateways whose book was closed, oldest first. A returning gateway learns from `alive` what it lost."""
        self._step = 0
        self._closed = False
        self._kept_s, self._sweep_s = kept_s, sweep_s
        self._passed: deque[tuple[float, int]] = deque()
        """For each sweep of the last `kept_s` seconds: its time.monotonic(), and the newest step at that time."""
        self._sweep_at = 0.0

    def enter(self, gateway_id: str, number: int, key: int, team: str = "") -> Listing:
        """Enter a call into its gateway's book; open the book if there is none."""
        book = self._open(gateway_id)
        listing = book.calls[number] = Listing(number, key, book, team)
        return listing

    def find(self, gateway_id: str, number: int) -> Listing | None:
        book = self._books.get(gateway_id)
        return book.calls.get(number) if book is not None else None

    def strike(self, listing: Listing) -> None:
        """Take a call out of its gateway's book and send no event: the call was cancelled or never began."""
        listing.gateway.calls.pop(listing.number, None)

    def end(self, listing: Listing) -> None:
        """Take a call out of its gateway's book; its last event is in the frame that is published next."""
        book = listing.gateway
        if book.calls.pop(listing.number, None) is not None:
            book.ending[listing.number] = listing

    def begin_step(self, step: int) -> int:
        """Begin the next frame of every gateway; return its number, which only ever grows."""
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep(now)
        self._step = step if step > self._step else self._step + 1
        return self._step

    def publish(self, book: GatewayBook, events: list[CallEvent]) -> None:
        """Put a gateway's events of this step into its ring, and wake its connection.

        If the events take several frames, each further frame counts as a step of its own."""
        ring, parts = book.ring, _parts(events)
        before = ring.newest
        first: dict[int, int] = {}
        for number, (call, part) in enumerate(parts):
            self._step += number > 0
            first.setdefault(call, self._step)
            listing = book.listing(call) if call else None
            team = listing.team if listing is not None else ""
            ring.add(StoredFrame(self._step, encode_frame(part, event_id(self.boot, self._step)), call, team))
        if len(parts) > 1:
            book.note_first_steps(events, first, before)
        if book.ending:
            book.note_ends(self._step)
        if ring.is_heavy:
            self._fail(book, ring.thin(book.feed.position if book.feed is not None else ring.floor))
        while ring.is_overfull and len(ring.frames) > len(parts):
            book.drop()
        if book.feed is not None:
            book.feed.wake()

    def attach(self, gateway_id: str, last_event_id: str | None) -> Feed:
        """Return the feed of a gateway's new connection; an older connection of the same gateway is closed."""
        book = self._open(gateway_id)
        if book.feed is not None:
            book.feed.close()
        if book.expiry is not None:
            book.expiry.cancel()
            book.expiry = None
        book.feed = Feed(self, book, self._position(book, last_event_id))
        self._fail(book, book.ring.missed_after(book.feed.position))
        if self._closed:
            book.feed.close()
        return book.feed

    def detach(self, feed: Feed) -> None:
        """Note that a connection is gone. Unless a newer connection replaced it, the gateway's grace period begins."""
        feed.close()
        book = feed.book
        if book.feed is feed:
            book.feed = None
            self._start_grace(book)

    def gateways(self) -> list[str]:
        """Return the ids of the gateway processes that have a book."""
        return list(self._books)

    def doubt(self, gateway_id: str) -> None:
        """Close the connection of a gateway process that seems dead, and begin its grace period. If it is alive, it
        connects again at once and loses nothing."""
        book = self._books.get(gateway_id)
        if book is not None and book.feed is not None:
            self.detach(book.feed)

    def alive_frame(self, book: GatewayBook) -> bytes:
        """Return the `alive` frame for a connection that may have missed frames; give up calls that lost events."""
        floor = book.ring.floor
        for listing in [listing for listing in book.calls.values() if 0 < listing.first_step <= floor]:
            self._give_up(listing)
        ended = [number for _, number, first_step in book.ended if first_step > floor]
        data = encode_alive([*ended, *book.calls])
        return encode_frame(data, event_id(self.boot, floor), ALIVE_EVENT)

    def close(self) -> None:
        """End every connection, after it has sent what was published."""
        self._closed = True
        for book in self._books.values():
            if book.feed is not None:
                book.feed.close()
            if book.expiry is not None:
                book.expiry.cancel()
                book.expiry = None

    @property
    def caught_up(self) -> bool:
        """Whether every connection has taken all published frames."""
        return all(book.feed is None or book.feed.caught_up for book in self._books.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if the records about a gateway disagree, such as its frames and their byte count."""
        for gateway_id, book in self._books.items():
            book.ring.check()
            if book.feed is None and book.expiry is None and not self._closed:
                raise AssertionError(f"{gateway_id}: neither connected nor in its grace period")

    def _sweep(self, now: float) -> None:
        """Drop frames that connections took long ago. Frames not taken yet, and frames for absent gateways, stay."""
        self._sweep_at = now + self._sweep_s
        self._passed.append((now, self._step))
        while self._passed and self._passed[0][0] <= now - self._kept_s:
            _, old = self._passed.popleft()
            for book in self._books.values():
                frames = book.ring.frames
                while book.feed is not None and frames and frames[0].step <= min(old, book.feed.position):
                    book.drop()

    def _open(self, gateway_id: str) -> GatewayBook:
        book = self._books.get(gateway_id)
        if book is None:
            ring = Ring(self._step, self._ring_frames, self._ring_bytes, self._long_bytes)
            book = GatewayBook(gateway_id, ring, lossy=gateway_id in self._forgotten)
            self._books[gateway_id] = book
            self._start_grace(book)
        return book

    def _position(self, book: GatewayBook, last_event_id: str | None) -> int:
        """Return the step after which a connection reads on. If it is below `floor`, `alive` comes first."""
        floor = book.ring.floor
        if not last_event_id:
            return floor - 1 if book.lossy else floor
        parsed = parse_event_id(last_event_id)
        if parsed is None or parsed[0] != self.boot or not floor <= parsed[1] <= self._step:
            return floor - 1
        return parsed[1]

    def _fail(self, book: GatewayBook, calls: list[int]) -> None:
        """Fail calls that lost events. Without a connection, the next one is told (`Ring.missed_after`)."""
        for call in calls:
            if (listing := book.calls.get(call)) is not None:
                self._give_up(listing)
        if calls and book.feed is not None:
            book.feed.fail(calls)

    def _give_up(self, listing: Listing) -> None:
        del listing.gateway.calls[listing.number]
        self._on_lost(listing.key)

    def _start_grace(self, book: GatewayBook) -> None:
        if not self._closed:
            book.expiry = asyncio.get_running_loop().call_later(self._grace_s, self._expire, book)

    def _expire(self, book: GatewayBook) -> None:
        del self._books[book.gateway_id]
        self._step += 1  # so that no id that this gateway holds counts as known any more
        self._forgotten.pop(book.gateway_id, None)
        self._forgotten[book.gateway_id] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        for listing in book.calls.values():
            self._on_lost(listing.key)
        book.calls.clear()


def _parts(events: list[CallEvent]) -> list[tuple[int, bytes]]:
    """Encode a step's events. Return the data of each frame with the number of the call that has it for its own long
    events; 0: calls share it."""
    data = encode_step(events)
    if len(data) <= min(EVENT_BYTES * len(events), MAX_PART_BYTES):
        return [(0, data)]
    by_call: dict[int, list[CallEvent]] = {}
    for event in events:
        by_call.setdefault(event.call, []).append(event)
    parts: list[tuple[int, bytes]] = []
    shared: list[CallEvent] = []
    for call, own in by_call.items():
        if len(encode_step(own)) > EVENT_BYTES * len(own):
            parts += [(call, part) for part in _encoded(own)]
        else:
            shared += own
    return parts + [(0, part) for part in _encoded(shared)] if shared else parts


def _encoded(events: list[CallEvent]) -> list[bytes]:
    """Encode events in parts, halved again and again until each part has MAX_PART_BYTES at most, or is one event."""
    data = encode_step(events)
    if len(data) <= MAX_PART_BYTES or len(events) == 1:
        return [data]
    half = len(events) // 2
    return [*_encoded(events[:half]), *_encoded(events[half:])]


Deliver = Callable[[int, list[CallEvent]], None]


class Mailbox:
    """Hands steps from the engine's thread to the event loop, which is woken once for all steps that are queued.

    `put` is for the engine's thread; once the mailbox is open, the loop delivers all queued steps."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is called with the error if a step is lost."""
        self._loop = loop
        self._on_failure = on_failure
        self._steps: deque[tuple[int, list[CallEvent]]] = deque()
        self._scheduled = True  # so that `put` wakes nobody before `open`
        self._deliver: Deliver

    def open(self, deliver: Deliver) -> None:
        """Start delivery, on the event loop: call `deliver` with the steps queued so far, and with later ones."""
        self._deliver = deliver
        self.flush()

    def put(self, step: int, events: list[CallEvent]) -> None:
        """Queue a step's events. Never blocks. After the loop has closed, steps are dropped."""
        self._steps.append((step, events))
        if not self._scheduled:
            self._scheduled = True
            self._wake()

    def flush(self) -> None:
        """Deliver all queued steps. Call it on the event loop."""
        self._scheduled = False  # first, so that a step put from here on wakes the loop again
        steps = self._steps
        if not steps:
            return
        step, events = steps.popleft()
        if steps:
            events = list(events)
            while steps:
                step, more = steps.popleft()
                events += more
        try:
            self._deliver(step, events)
        except Exception as error:  # noqa: BLE001 - the loop's edge: a lost step would leave its calls silent for ever
            self._on_failure(error)

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.flush)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._steps.clear()
