from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from gateway.relay.event_source import check_step
from workers.protocol.events import (
    CallEvent,
    Failed,
    Logprobs,
    Started,
    Text,
    TokenLogprob,
    decode_alive,
    decode_step,
)
from workers.protocol.framing import ALIVE_EVENT, FrameReader
from workers.service.calls.ring import Ring, StoredFrame
from workers.service.calls.stream import MAX_PART_BYTES, OVERRUN, EventHub, Feed, Listing

GRACE_S = 0.05


class Bench:
    """A hub with one gateway, `g`, and the keys of the calls that the hub gave up."""

    def __init__(self, ring_frames: int = 100, ring_bytes: int = 1 << 20, kept_s: float = 60.0) -> None:
        self.lost: list[int] = []
        self.hub = EventHub(
            "boot",
            self.lost.append,
            grace_s=GRACE_S,
            ring_frames=ring_frames,
            ring_bytes=ring_bytes,
            kept_s=kept_s,
            sweep_s=0.0,
        )

    def enter(self, number: int) -> Listing:
        return self.hub.enter("g", number, 100 + number)

    def publish(self, *listings: Listing, last: bool = False) -> int:
        """One step in which each of these calls says something; its first event is `Started`."""
        step = self.hub.begin_step(0)
        events: list[CallEvent] = []
        for listing in listings:
            if not listing.first_step:
                listing.first_step = step
                events.append(Started(listing.number, 0, 1, 0))
            events.append(Text(listing.number, f"{step}"))
            if last:
                self.hub.end(listing)
        self.hub.publish(listings[0].gateway, events)
        return step


def taken(feed: Feed, max_bytes: int = 1 << 20) -> list[str]:
    """What the connection gets now: `alive [calls]`, or the step's id and its calls."""
    reader = FrameReader()
    out = []
    while data := feed.take(max_bytes):
        for frame in reader.feed(data):
            if frame.event == ALIVE_EVENT:
                out.append(f"{frame.id} alive {decode_alive(frame.data)}")
            else:
                out.append(f"{frame.id} {sorted({event.call for event in decode_step(frame.data)})}")
    return out


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.hub.check_integrity()
    bench.hub.close()


async def test_the_first_connection_gets_everything(bench: Bench) -> None:
    one = bench.enter(1)
    bench.publish(one)
    feed = bench.hub.attach("g", None)
    assert taken(feed) == ["boot-1 [1]"]
    bench.publish(one)
    assert taken(feed) == ["boot-2 [1]"]
    assert taken(feed) == []
    assert feed.caught_up


async def test_another_gateway_gets_nothing_of_it(bench: Bench) -> None:
    bench.publish(bench.enter(1))
    assert taken(bench.hub.attach("other", None)) == []


async def test_a_known_id_resumes_without_a_gap(bench: Bench) -> None:
    one = bench.enter(1)
    for _ in range(5):
        bench.publish(one)
    assert taken(bench.hub.attach("g", "boot-3")) == ["boot-4 [1]", "boot-5 [1]"]
    assert taken(bench.hub.attach("g", "boot-5")) == []


@pytest.mark.parametrize("last_event_id", ["older-2", "boot-99", "boot-", "nonsense", "boot--1", "boot-" + "9" * 40])
async def test_an_unknown_id_gets_the_calls_alive_and_then_all_there_is(bench: Bench, last_event_id: str) -> None:
    one, two, _waiting = bench.enter(1), bench.enter(2), bench.enter(3)
    bench.publish(one, two)
    bench.publish(two, last=True)
    assert taken(bench.hub.attach("g", last_event_id)) == ["boot-0 alive [2, 1, 3]", "boot-1 [1, 2]", "boot-2 [2]"]
    assert bench.lost == []


async def test_an_overrun_gives_up_the_calls_with_a_gap_and_no_others() -> None:
    bench = Bench(ring_frames=3)
    early, ended_early = bench.enter(1), bench.enter(2)
    bench.publish(early, ended_early)
    bench.publish(ended_early, last=True)
    late, waiting, ended_late = bench.enter(3), bench.enter(4), bench.enter(5)
    bench.publish(early)
    bench.publish(late, ended_late)
    bench.publish(ended_late, last=True)
    feed = bench.hub.attach("g", "boot-1")  # step 2 is gone, which was not all that call 1 said
    assert taken(feed) == ["boot-2 alive [5, 3, 4]", "boot-3 [1]", "boot-4 [3, 5]", "boot-5 [5]"]
    assert bench.lost == [101]
    assert bench.hub.find("g", 1) is None
    assert bench.hub.find("g", 4) is waiting
    bench.hub.check_integrity()
    bench.hub.close()


async def test_an_id_at_the_very_edge_of_the_ring_is_no_overrun() -> None:
    bench = Bench(ring_frames=3)
    one = bench.enter(1)
    for _ in range(5):
        bench.publish(one)
    assert taken(bench.hub.attach("g", "boot-2")) == ["boot-3 [1]", "boot-4 [1]", "boot-5 [1]"]
    bench.hub.close()


async def test_a_live_connection_that_falls_behind_is_told_so() -> None:
    bench = Bench(ring_frames=2)
    feed = bench.hub.attach("g", None)
    one = bench.enter(1)
    bench.publish(one)
    assert taken(feed) == ["boot-1 [1]"]
    for _ in range(3):
        bench.publish(one)
    two = bench.enter(2)
    bench.publish(two)
    assert taken(feed) == ["boot-3 alive [2]", "boot-4 [1]", "boot-5 [2]"]
    assert bench.lost == [101]
    bench.publish(two)
    assert taken(feed) == ["boot-6 [2]"]
    bench.hub.close()


async def test_the_ring_is_bounded_by_bytes_and_keeps_the_newest_frame() -> None:
    bench = Bench(ring_bytes=200)
    one = bench.enter(1)
    for _ in range(1000):
        bench.publish(one)
    assert one.gateway.ring.num_bytes <= 200
    assert len(one.gateway.ring.frames) > 1
    bench.hub.begin_step(0)
    bench.hub.publish(one.gateway, [Text(1, "x" * 200)])
    assert len(one.gateway.ring.frames) == 1
    bench.hub.check_integrity()
    bench.hub.close()


async def test_a_small_write_takes_at_least_one_frame_and_keeps_the_order(bench: Bench) -> None:
    one = bench.enter(1)
    for _ in range(10):
        bench.publish(one)
    assert taken(bench.hub.attach("g", None), max_bytes=1) == [f"boot-{step} [1]" for step in range(1, 11)]


async def test_a_newer_connection_ends_the_older(bench: Bench) -> None:
    older = bench.hub.attach("g", None)
    waiting = asyncio.ensure_future(older.wait())
    await asyncio.sleep(0)
    newer = bench.hub.attach("g", None)
    await waiting
    assert (older.closed, newer.closed) == (True, False)
    bench.hub.detach(older)  # must not begin the grace period: the gateway is here
    await asyncio.sleep(2 * GRACE_S)
    bench.publish(bench.enter(1))
    assert taken(newer) == ["boot-1 [1]"]


async def test_publishing_wakes_the_connection(bench: Bench) -> None:
    feed = bench.hub.attach("g", None)
    one = bench.enter(1)
    waiting = asyncio.ensure_future(feed.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.publish(one)
    await asyncio.wait_for(waiting, 1)


async def test_a_gateway_that_stays_away_loses_its_calls(bench: Bench) -> None:
    one = bench.enter(1)
    feed = bench.hub.attach("g", None)
    step = bench.publish(one)
    assert taken(feed)
    bench.hub.detach(feed)
    await asyncio.sleep(GRACE_S / 2)
    assert bench.lost == []
    await asyncio.sleep(GRACE_S)
    assert bench.lost == [101]
    # It comes back too late, with an id that was the newest of all: it must not believe that nothing was lost.
    assert taken(bench.hub.attach("g", f"boot-{step}")) == [f"boot-{step + 1} alive []"]


async def test_a_gateway_that_stays_away_before_its_first_event_is_told_as_well(bench: Bench) -> None:
    bench.enter(1)
    await asyncio.sleep(2 * GRACE_S)
    assert bench.lost == [101]
    assert taken(bench.hub.attach("g", None)) == ["boot-1 alive []"]


async def test_a_gateway_that_returns_in_time_loses_nothing(bench: Bench) -> None:
    one = bench.enter(1)
    bench.hub.detach(bench.hub.attach("g", None))
    await asyncio.sleep(GRACE_S / 2)
    feed = bench.hub.attach("g", None)
    await asyncio.sleep(2 * GRACE_S)
    bench.publish(one)
    assert (taken(feed), bench.lost) == (["boot-1 [1]"], [])


async def test_a_call_struck_out_is_not_alive(bench: Bench) -> None:
    one, two = bench.enter(1), bench.enter(2)
    bench.hub.strike(one)
    bench.hub.strike(one)
    assert taken(bench.hub.attach("g", "other-1")) == ["boot-0 alive [2]"]
    assert bench.hub.find("g", 2) is two


async def test_closing_ends_connections_after_what_they_have_to_send(bench: Bench) -> None:
    feed = bench.hub.attach("g", None)
    bench.publish(bench.enter(1))
    bench.hub.close()
    await asyncio.wait_for(feed.wait(), 1)
    assert feed.closed
    assert taken(feed) == ["boot-1 [1]"]
    assert bench.hub.attach("late", None).closed


async def test_steps_only_grow(bench: Bench) -> None:
    assert [bench.hub.begin_step(step) for step in (5, 6, 0, 7, 7, 9)] == [5, 6, 7, 8, 9, 10]


async def test_what_was_taken_long_ago_is_let_go() -> None:
    bench = Bench(kept_s=0.05)
    one = bench.enter(1)
    feed = bench.hub.attach("g", None)
    for _ in range(5):
        bench.publish(one)
    assert len(taken(feed)) == 5
    bench.publish(one)
    assert len(one.gateway.ring.frames) == 6, "not yet: its connection may break"
    await asyncio.sleep(0.06)
    bench.publish(one)
    assert [frame.step for frame in one.gateway.ring.frames] == [6, 7]
    bench.hub.check_integrity()
    assert taken(feed) == ["boot-6 [1]", "boot-7 [1]"]
    assert taken(bench.hub.attach("g", "boot-6")) == ["boot-7 [1]"], "who is back goes on"
    assert bench.lost == []


async def test_what_no_connection_took_stays_however_old() -> None:
    bench = Bench(kept_s=0.0)
    one = bench.enter(1)
    feed = bench.hub.attach("g", None)
    for _ in range(5):
        bench.publish(one)
        await asyncio.sleep(0.01)
    assert len(taken(feed)) == 5
    bench.hub.detach(feed)
    for _ in range(3):
        bench.publish(one)
    assert len(one.gateway.ring.frames) == 8, "nobody knows what it got before it went away"
    assert taken(bench.hub.attach("g", "boot-2"))[0] == "boot-3 [1]"
    bench.hub.check_integrity()
    assert bench.lost == []


async def test_what_is_long_for_one_frame_goes_into_several_in_order(bench: Bench) -> None:
    """A frame of more than 16 MiB is garbage to its gateway, and all of its calls end."""
    listings = [bench.enter(number) for number in range(20)]
    feed = bench.hub.attach("g", None)
    bench.publish(*listings)
    taken(feed)
    for char in "ab":
        bench.hub.begin_step(0)
        long: list[CallEvent] = [Text(listing.number, char * (200 << 10)) for listing in listings]
        bench.hub.publish(listings[0].gateway, long)
        events: list[CallEvent] = []
        while data := feed.take(1):
            assert len(data) <= MAX_PART_BYTES + 100
            events += [event for frame in FrameReader().feed(data) for event in decode_step(frame.data)]
        assert events == long
    assert bench.publish(listings[0]) > 3
    assert bench.lost == []


async def test_no_frame_has_more_values_than_a_gateway_reads(bench: Bench) -> None:
    """Steps that a late loop makes one, of calls with a hundred probabilities each, as short as numbers are."""
    one = bench.enter(1)
    feed = bench.hub.attach("g", None)
    bench.hub.begin_step(0)
    alternative = TokenLogprob(1, b"", 0.0)
    bench.hub.publish(one.gateway, [Logprobs(1, alternative, (alternative,) * 100) for _ in range(1000)])
    num_events = 0
    while data := feed.take(1):
        for frame in FrameReader().feed(data):
            check_step(frame.data, 0)
            num_events += len(decode_step(frame.data))
    assert num_events == 1000


async def test_one_long_event_is_a_frame_of_its_own(bench: Bench) -> None:
    one, two = bench.enter(1), bench.enter(2)
    feed = bench.hub.attach("g", None)
    bench.hub.begin_step(0)
    bench.hub.publish(one.gateway, [Text(1, "a" * (2 << 20)), Text(2, "b")])
    assert taken(feed) == ["boot-1 [1]", "boot-2 [2]"]
    bench.publish(two)
    assert taken(feed) == ["boot-3 [2]"]


def probabilities(number: int) -> list[CallEvent]:
    """A token with a hundred probabilities: 3 KB."""
    top = tuple(TokenLogprob(1000 + place, b"piece", -1.25 - place) for place in range(100))
    return [Logprobs(number, top[0], top), Text(number, "t")]


class LongBench(Bench):
    """Calls 1 to 3 of the team `red` have long events, call 9 of `blue` short ones."""

    def __init__(self, long_bytes: int) -> None:
        super().__init__()
        self.hub = EventHub("boot", self.lost.append, grace_s=GRACE_S, ring_bytes=20_000, long_bytes=long_bytes)
        self.red = [self.hub.enter("g", number, 100 + number, "red") for number in (1, 2, 3)]
        self.blue = self.hub.enter("g", 9, 109, "blue")

    def step(self, long: int = 3) -> None:
        step = self.hub.begin_step(0)
        events: list[CallEvent] = [Text(9, "b")]
        for listing in [self.blue, *self.red[:long]]:
            listing.first_step = listing.first_step or step
        for listing in self.red[:long]:
            if self.hub.find("g", listing.number):
                events += probabilities(listing.number)
        self.hub.publish(self.blue.gateway, events)
        self.hub.check_integrity()


def events_of(feed: Feed) -> list[CallEvent]:
    data = b""
    while part := feed.take(1 << 20):
        data += part
    return [event for frame in FrameReader().feed(data) if not frame.event for event in decode_step(frame.data)]


async def test_long_events_push_nobody_elses_events_out_of_the_ring() -> None:
    bench = LongBench(long_bytes=20_000)
    feed = bench.hub.attach("g", None)
    for _ in range(50):
        bench.step()
    events = events_of(feed)
    assert sum(event.call == 9 and type(event) is Text for event in events) == 50
    assert sorted(bench.lost) == [101, 102, 103], "each over the bound in turn, and nobody else"
    for number in (1, 2, 3):
        own = [event for event in events if event.call == number]
        assert own[0] == Failed(number, OVERRUN), "before all that is left of it"
        assert sum(type(event) is Failed for event in own) == 1
    bench.hub.close()


async def test_who_reads_long_events_in_time_loses_none() -> None:
    bench = LongBench(long_bytes=20_000)
    feed = bench.hub.attach("g", None)
    events: list[CallEvent] = []
    for _ in range(50):
        bench.step()
        events += events_of(feed)
    assert [event for event in events if event.call == 1] == probabilities(1) * 50
    assert bench.lost == []
    bench.hub.close()


async def test_a_connection_that_resumes_before_long_events_that_were_let_go_is_told_so() -> None:
    bench = LongBench(long_bytes=20_000)
    feed = bench.hub.attach("g", None)
    bench.step(long=0)
    bench.step(long=1)
    events_of(feed)
    resumed_at = bench.red[0].first_step - 1
    for _ in range(20):
        bench.step(long=1)
        events_of(feed)
    assert bench.lost == [], "its connection has taken all of it"
    events = events_of(bench.hub.attach("g", f"boot-{resumed_at}"))
    assert bench.lost == [101]
    assert next(event for event in events if event.call == 1) == Failed(1, OVERRUN)
    assert sum(event.call == 9 for event in events) == 21
    assert events_of(bench.hub.attach("g", f"boot-{bench.hub.begin_step(0) - 1}")) == []
    bench.hub.close()


async def test_of_long_events_the_heaviest_team_loses_its_heaviest_call() -> None:
    bench = LongBench(long_bytes=40_000)
    own = bench.hub.enter("g", 10, 110, "blue")
    own.first_step = bench.hub.begin_step(0)
    feed = bench.hub.attach("g", None)
    bench.hub.publish(own.gateway, probabilities(10) * 4)
    while not bench.lost:
        bench.step(long=2)
    assert bench.lost[0] in (101, 102)
    assert [event for event in events_of(feed) if event.call == 10] == probabilities(10) * 4
    bench.hub.close()


async def test_what_is_let_go_costs_the_same_however_many_calls_lost_something() -> None:
    """Short calls with probabilities: each frame that was dropped went through all calls that had lost some."""
    ring = Ring(floor=0, max_frames=8000, max_bytes=1 << 20, max_long_bytes=4000)
    num, took_s = 0, list[float]()
    for _ in range(2):
        for _ in range(3000):
            num += 1
            ring.add(StoredFrame(num, b"x" * 300, call=num, team="red"))
            ring.thin(num)
        assert len(ring.lost) > 2900
        start = time.thread_time()
        for _ in range(2990):
            ring.drop()
        took_s.append(time.thread_time() - start)
        ring.check()
    assert len(ring.lost) < 20
    assert min(took_s) < 0.05, "it took 0.3 s"


async def test_frames_that_were_let_go_are_bounded_and_others_stay() -> None:
    """Only shared frames were: a minute of many short calls with probabilities left tens of thousands."""
    ring = Ring(floor=0, max_frames=100, max_bytes=1 << 20, max_long_bytes=4000)
    step = 0
    for number in range(1, 2001):
        step += 1
        ring.add(StoredFrame(step, b"x" * 300, call=number % 50 + 1, team="red"))
        ring.thin(step)
        if number % 100 == 0:
            step += 1
            ring.add(StoredFrame(step, b"shared"))
        assert ring.num_let_go <= 200
        assert not ring.is_overfull
    ring.check()
    assert [frame.step for frame in ring.frames if not frame.call] == [101 * n for n in range(1, 21)]
    assert sorted(ring.missed_after(0)) == list(range(1, 51)), "who reads on from before is told so still"


async def test_calls_that_lost_something_are_bounded_as_well() -> None:
    ring = Ring(floor=0, max_frames=100, max_bytes=1 << 20, max_long_bytes=4000)
    for step in range(1, 1000):
        ring.add(StoredFrame(step, b"x" * 300, call=step, team="red"))
        ring.thin(step)
        while ring.is_overfull:
            ring.drop()
        assert len(ring.lost) <= 100
        assert len(ring.frames) <= 110
    ring.check()


async def test_a_call_that_ends_in_its_first_step_counts_for_its_team() -> None:
    """Such calls, of whatever team, were one team, in which the largest single answer lost."""
    bench = LongBench(long_bytes=80_000)
    feed = bench.hub.attach("g", None)

    def whole(number: int, team: str, num_tokens: int) -> None:
        listing = bench.hub.enter("g", number, 100 + number, team)
        listing.first_step = bench.hub.begin_step(0)
        bench.hub.end(listing)  # as `Delivery` does, before it publishes
        bench.hub.publish(listing.gateway, probabilities(number) * num_tokens)

    whole(10, "blue", 5)
    for number in range(11, 31):
        whole(number, "red", 2)
    assert {frame.team for frame in bench.blue.gateway.ring.frames} == {"blue", "red"}
    events = events_of(feed)
    assert [event for event in events if event.call == 10] == probabilities(10) * 5
    assert any(type(event) is Failed for event in events)
    bench.hub.check_integrity()
    bench.hub.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_call_whose_events_are_all_in_further_frames_of_a_step_has_no_gap(ends: bool) -> None:
    """The frames of a step are dropped one by one, and calls that were there as a whole were not listed."""
    bench = Bench(kept_s=0.0)
    feed = bench.hub.attach("g", None)
    one, two = bench.enter(1), bench.enter(2)
    one.first_step = two.first_step = bench.hub.begin_step(0)
    if ends:
        bench.hub.end(two)
    bench.hub.publish(one.gateway, [*probabilities(1), *probabilities(2)])
    feed.take(1)
    bench.hub.begin_step(0)  # it drops the frame that was taken, the one of call 1
    assert taken(bench.hub.attach("g", "other-1")) == ["boot-1 alive [2]", "boot-2 [2]"]
    assert bench.lost == [101]
    bench.hub.check_integrity()
    bench.hub.close()
