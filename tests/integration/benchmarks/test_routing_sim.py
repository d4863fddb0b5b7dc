"""The simulated fleet: every policy serves every call once, and ours leaves a line in Redis that is whole."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import redis.asyncio

from benchmarks.routing_sim import fairness
from benchmarks.routing_sim.comparison import OURS, Fleet, compared, ours
from benchmarks.routing_sim.floor import Floor, Outcome, simulate
from benchmarks.routing_sim.machine import Speed
from benchmarks.routing_sim.made_up import conversations, one_prefix, team, together
from benchmarks.routing_sim.policies import LISTED, OneLine
from benchmarks.routing_sim.traces import Arrival, Trace, azure, mooncake, most_that_could_hit, overlaid

WORKERS, SLOTS, BLOCKS = 4, 2, 200
TRACE = conversations(talks=12, turns=4)


def floor(slots: int = SLOTS, step_s: float = 0.01) -> Floor:
    return Floor(WORKERS, slots, Speed(TRACE.tokens_per_s / 0.7 / WORKERS, step_s, 0.001), BLOCKS)


async def simulated(client: redis.asyncio.Redis, name: str, place: Floor, trace: Trace = TRACE) -> Outcome:
    if name == OURS:
        return await ours(client, place, trace.calls)  # checks the line's integrity, too
    policy = OneLine(place, 1) if name == "one line" else LISTED[name](place, 1)
    return await simulate(trace.calls, place, policy)


def most_at_once(outcome: Outcome) -> int:
    """Calls that held a slot of one machine."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for job in outcome.jobs:
        changes.setdefault(job.machine, []).extend([(job.slot_at, 1), (job.done_at, -1)])
    # One that ends makes room for one that begins at the same time.
    return max(max(accumulate(change for _, change in sorted(times))) for times in changes.values())


@pytest.mark.parametrize("slots", [1, SLOTS])
@pytest.mark.parametrize("name", [*LISTED, "one line", OURS])
async def test_every_call_is_served_once_within_the_slots(client: redis.asyncio.Redis, name: str, slots: int) -> None:
    place = floor(slots, step_s=0.01 if slots > 1 else 0.0)
    outcome = await simulated(client, name, place)
    assert [job.arrival for job in outcome.jobs] == list(TRACE.calls)
    for job in outcome.jobs:
        assert job.arrival.at_s <= job.accepted_at <= job.slot_at <= job.began_at < job.first_at <= job.done_at
        assert 0 <= job.cached <= job.arrival.tokens
    assert 1 <= most_at_once(outcome) <= slots
    assert sum(outcome.work) == pytest.approx(sum(max(1, job.arrival.tokens - job.cached) for job in outcome.jobs))
    assert outcome.cached <= most_that_could_hit(TRACE.calls) + 1e-9


async def test_ours_finds_what_is_cached(client: redis.asyncio.Redis) -> None:
    by_chance = await simulated(client, "random", floor())
    placed = await simulated(client, OURS, floor())
    assert placed.cached > 1.5 * by_chance.cached
    assert placed.ttft_s < by_chance.ttft_s


async def test_calls_that_every_worker_suits_alike_do_not_wait_for_ever(client: redis.asyncio.Redis) -> None:
    """Nothing is cached of any, and more come at once than there are slots."""
    trace = Trace("alike", tuple(Arrival(1.0 + 0.001 * number, 4_001 + 7 * number, 1) for number in range(40)))
    outcome = await ours(client, floor(1, step_s=0.0), trace.calls, end_s=1e4)
    assert all(job.done_at > 0 for job in outcome.jobs)


async def test_two_gateways_share_one_fleet(client: redis.asyncio.Redis) -> None:
    outcome = await ours(client, floor(), TRACE.calls, gateways=2)
    assert len(outcome.jobs) == len(TRACE.calls)
    assert outcome.cached > 0.2


async def test_a_prefix_that_all_share_does_not_draw_all_to_one_worker(client: redis.asyncio.Redis) -> None:
    found = await compared(client, one_prefix(TRACE), Fleet(8), 1, ["pure prefix affinity", OURS])
    assert found["pure prefix affinity"].busiest > 4
    assert found[OURS].busiest < 2


async def test_a_team_of_three_times_the_weight_gets_three_times_as_much(client: redis.asyncio.Redis) -> None:
    end_s = 30.0
    trace = together(team("one", 5.0, end_s), team("three", 5.0, end_s))
    outcome = await ours(client, fairness.floor(), trace.calls, end_s=end_s, weights=fairness.WEIGHTS)
    took = fairness.served(outcome, 10.0, end_s)
    # Few calls, so only about.
    assert 2 < took["three"] / took["one"] < 4.5


def test_overlaid_copies_share_nothing_and_come_in_order() -> None:
    arrivals = list(overlaid(TRACE, 3))
    assert len(arrivals) == 3 * len(TRACE.calls)
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    assert len({block for one in arrivals for block in one.blocks}) == 3 * len(
        {block for one in TRACE.calls for block in one.blocks}
    )
    assert sorted(one.tokens for one in TRACE.turned(0.5).calls) == sorted(one.tokens for one in TRACE.calls)


def test_public_traces_are_read_as_they_are_published(tmp_path: Path) -> None:
    mooncakes, conv = tmp_path / "mooncake.jsonl", tmp_path / "conv.csv"
    mooncakes.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 6, "hash_ids": [0, 7]}\n')
    conv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert mooncake(mooncakes).calls == (Arrival(1.5, 600, 6, (0, 7)),)
    read = azure(conv, "chat")
    assert [call.tokens for call in read.calls] == [374, 396]
    assert read.calls[1].at_s == pytest.approx(4.314579, abs=1e-6)
