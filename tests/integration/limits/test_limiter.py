"""What is counted for calls of several gateway processes, and what becomes of it when Redis is away or loses it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
import redis.asyncio

from accounts.protocol.records import AliasRecord, Budget, Limits, Price, PriceListRecord
from gateway.errors import BudgetSpent, RateLimited, StoreUnavailable
from gateway.limits.reservation import State
from tests.integration.limits.conftest import ESTIMATE, ROUND_S, WORKER, Member, Start, counted, opened, subject, until
from tests.support.redis_server import RedisServer
from workers.protocol import keys

KEY = subject(requests_per_minute=10, tokens_per_minute=1000, max_parallel=5)
DOLLARS = PriceListRecord(prices=(Price(model="m", per_million_prompt=1.0, per_million_completion=2.0),))


async def admitted(member: Member, count: int, *subjects: Any) -> int:
    """How many of so many calls are admitted; all are over then."""
    found = 0
    for _ in range(count):
        try:
            member.end(await member.begin(*subjects))
            found += 1
        except RateLimited:
            pass
    return found


async def test_a_call_counts_by_its_estimate_and_then_by_its_usage(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1")
    call = await member.begin(KEY)
    assert await counted(client) == (1, ESTIMATE, 1)
    member.end(call, prompt=12, answer=7)
    await until(lambda: _is(client, (1, 19, 0)))
    more = await member.begin(KEY)
    member.end(more, prompt=500, answer=100)
    await until(lambda: _is(client, (2, 619, 0)))


async def _is(client: redis.asyncio.Redis, expected: tuple[int, int, int], name: str = "key:k") -> bool:
    return await counted(client, name) == expected


async def test_a_call_that_was_sent_to_no_worker_counts_for_nothing(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1")
    reservation = member.reserve(KEY)
    await reservation.granted()
    member.limits.end(reservation)
    await until(lambda: _is(client, (0, 0, 0)))


async def test_a_call_that_is_left_before_redis_answers_counts_for_nothing(
    start: Start, client: redis.asyncio.Redis
) -> None:
    member = await start("g1")
    await opened(client)
    for _ in range(5):
        member.limits.end(member.reserve(KEY))
    await until(lambda: _is(client, (0, 0, 0)))
    assert await admitted(member, 12, KEY) == 10


async def test_a_call_is_counted_for_all_of_its_subjects_or_none(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1")
    team, key = subject("team", "red", requests_per_minute=3), subject(requests_per_minute=2)
    assert await admitted(member, 4, team, key) == 2
    assert (await counted(client, "team:red"))[0] == 2
    other = subject(name="other", requests_per_minute=100)
    assert await admitted(member, 4, team, other) == 1
    assert (await counted(client, "key:other"))[0] == 1
    assert member.refused[-1] == ("team", "requests_per_minute")


async def test_all_callers_of_an_alias_share_its_limits(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1")
    member.directory.put(AliasRecord(name="fast", limits=Limits(requests_per_minute=2)))
    for _ in range(2):
        member.end(await member.begin(alias="fast"))
    with pytest.raises(RateLimited, match="model 'fast' has used 2 of 2 requests per minute"):
        await member.begin(alias="fast")


async def test_a_budget_refuses_and_names_the_date_of_its_renewal(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1", DOLLARS)
    budget = Budget(amount=0.000_05, period="month", time_zone="Europe/Berlin")
    key = subject(budgets=(budget,))
    member.end(await member.begin(key), prompt=10, answer=10)
    field = f"{keys.limits_subject('key:k')}"
    await until(lambda: _spent(client, field, 30_000))
    with pytest.raises(BudgetSpent) as refused:
        await member.begin(key)
    assert "has spent 0.00003 USD of its 0.00005 USD of this month" in refused.value.message
    assert "-01 00:00 (Europe/Berlin)" in refused.value.message.partition("renewed on")[2]
    assert (refused.value.code, refused.value.is_final) == ("budget_exceeded", True)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    assert member.refused == [("key", "budget")]


async def _spent(client: redis.asyncio.Redis, name: str, nano: int) -> bool:
    value: Any = await client.hget(name, "b:month:Europe/Berlin")
    return value is not None and int(value.split()[1]) == nano


async def test_a_budget_that_only_warns_is_counted(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1", DOLLARS)
    key = subject(budgets=(Budget(amount=0.000_000_1, period="day", refuses=False),))
    assert await admitted(member, 3, key) == 3

    async def spent() -> bool:
        value: Any = await client.hget(keys.limits_subject("key:k"), "b:day:UTC")
        return int(value.split()[1]) == 3 * 20_000

    await until(spent)


async def test_days_are_those_of_utc(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1")
    member.end(await member.begin(subject(tokens_per_day=1000)))
    day: Any = await client.hget(keys.limits_subject("key:k"), "d")
    assert datetime.fromtimestamp(int(day.split()[0]), UTC).time() == datetime.min.time()


async def test_calls_of_a_process_that_is_gone_are_over(start: Start, client: redis.asyncio.Redis) -> None:
    first, second = await start("g1"), await start("g2")
    for _ in range(5):
        await first.begin(KEY)
    with pytest.raises(RateLimited, match="5 of 5 calls under way"):
        await second.begin(KEY)
    await first.kill()
    await until(lambda: _is(client, (5, 5 * ESTIMATE, 0)))
    assert await admitted(second, 5, KEY) == 5


async def test_a_process_that_ends_takes_its_calls_along(start: Start, client: redis.asyncio.Redis) -> None:
    first, second = await start("g1"), await start("g2")
    await first.begin(KEY)
    await first.sync.close()
    assert (await counted(client))[2] == 0
    assert await client.zscore(keys.LIMITS_GATEWAYS, "g1") is None
    assert await admitted(second, 3, KEY) == 3


async def test_a_process_that_was_taken_for_dead_has_its_calls_again(start: Start, client: redis.asyncio.Redis) -> None:
    first, second = await start("g1"), await start("g2")
    held = [await first.begin(KEY) for _ in range(3)]
    await first.kill()
    await until(lambda: _is(client, (3, 3 * ESTIMATE, 0)))
    first.task = asyncio.create_task(first.sync.run())
    await until(lambda: _is(client, (3, 3 * ESTIMATE, 3)))
    for call in held:
        first.end(call)
    await until(lambda: _is(client, (3, 45, 0)))
    assert await admitted(second, 20, KEY) == 7


async def test_counters_that_redis_lost_are_reported_again(start: Start, client: redis.asyncio.Redis) -> None:
    members = [await start(f"g{number}") for number in range(3)]
    await opened(client)
    held = [await members[0].begin(KEY), await members[1].begin(KEY)]
    for member in members:
        assert await admitted(member, 2, KEY) == 2
    await until(lambda: _is(client, (8, 6 * 15 + 2 * ESTIMATE, 2)))
    await client.flushall()
    results = [await admitted(member, 3, KEY) for member in members]
    assert sum(results) == 2
    for member, call in zip(members[:2], held, strict=True):
        member.end(call)
    await until(lambda: _is(client, (10, 10 * 15, 0)))


async def test_what_a_dead_process_had_admitted_counts_though_redis_lost_it(
    start: Start, client: redis.asyncio.Redis
) -> None:
    first, second = await start("g1"), await start("g2")
    await opened(client)
    assert await admitted(first, 6, KEY) == 6
    await asyncio.sleep(0.3)  # the other one hears of it
    await first.kill()
    await client.flushall()
    assert await admitted(second, 10, KEY) == 4


async def test_a_late_report_takes_the_place_of_what_was_assumed(start: Start, client: redis.asyncio.Redis) -> None:
    first, second = await start("g1"), await start("g2")
    await opened(client)
    assert await admitted(first, 4, KEY) == 4
    await asyncio.sleep(0.3)
    await first.kill()
    await client.flushall()
    assert await admitted(second, 2, KEY) == 2
    assert (await counted(client))[0] == 6
    first.task = asyncio.create_task(first.sync.run())
    await until(lambda: first.limits.messages.ready)
    await asyncio.sleep(0.2)
    assert (await counted(client))[0] == 6
    assert await admitted(first, 10, KEY) == 4


async def test_a_replica_that_lacks_the_last_messages_is_told_again(start: Start, client: redis.asyncio.Redis) -> None:
    """As after a failover: all of Paddock's keys as they were a moment before."""
    first, second = await start("g1"), await start("g2")
    await opened(client)
    assert await admitted(first, 2, KEY) + await admitted(second, 2, KEY) == 4
    await until(lambda: _is(client, (4, 60, 0)))
    before = {name: await client.dump(name) or b"" for name in await client.keys("{pd:limits}*")}
    assert await admitted(first, 3, KEY) + await admitted(second, 2, KEY) == 5
    await until(lambda: _is(client, (9, 135, 0)))
    await client.flushall()
    for name, value in before.items():
        await client.restore(name, 0, value)
    assert await admitted(second, 5, KEY) + await admitted(first, 5, KEY) == 1
    await until(lambda: _is(client, (10, 150, 0)))


async def test_without_redis_gateways_admit_their_shares_and_tell_it_afterwards(
    server: RedisServer, start: Start, client: redis.asyncio.Redis
) -> None:
    members = [await start(f"g{number}") for number in range(2)]
    await opened(client)
    assert await admitted(members[0], 2, KEY) == 2
    await asyncio.sleep(0.6)
    server.pause()
    try:
        results = await asyncio.gather(*(admitted(member, 6, KEY) for member in members))
        assert sum(results) <= 8
        assert min(results) >= 3
    finally:
        server.resume()
    await until(lambda: all(member.limits.messages.ready for member in members))
    await opened(client)
    total = 2 + sum(results)
    await until(lambda: _is(client, (total, 15 * total, 0)))
    later = [await admitted(member, 10, KEY) for member in members]
    assert sum(later) == 10 - total


async def test_messages_that_redis_runs_late_count_once(
    server: RedisServer, start: Start, client: redis.asyncio.Redis
) -> None:
    """They lie in its socket while it hangs; meanwhile their calls are decided here, or their callers leave."""
    member = await start("g1")
    await opened(client)
    server.pause()
    try:
        waiting = [member.reserve(KEY) for _ in range(4)]
        gone = [member.reserve(KEY) for _ in range(3)]
        for one in gone:
            member.limits.end(one)
        for one in waiting:
            await one.granted()
            one.request_log.answer.begin_attempt(WORKER)
        assert {one.state for one in waiting} == {State.LOCAL}
    finally:
        server.resume()
    await until(lambda: member.limits.messages.ready)
    await until(lambda: _is(client, (4, 4 * ESTIMATE, 4)))
    for one in waiting:
        member.end(one)
    await until(lambda: _is(client, (4, 60, 0)))


async def test_without_redis_a_budget_that_is_not_known_admits_nothing(
    server: RedisServer, start: Start, client: redis.asyncio.Redis
) -> None:
    member = await start("g1", DOLLARS)
    await opened(client)
    server.pause()
    try:
        with pytest.raises(StoreUnavailable):
            await member.begin(subject(budgets=(Budget(amount=5),)))
    finally:
        server.resume()


async def test_what_is_settled_without_redis_is_told_afterwards(
    server: RedisServer, start: Start, client: redis.asyncio.Redis
) -> None:
    member = await start("g1", DOLLARS)
    key = subject(tokens_per_minute=1000, tokens_per_month=5000, max_parallel=3, budgets=(Budget(amount=1),))
    await opened(client)
    held = [await member.begin(key) for _ in range(2)]
    server.pause()
    try:
        member.end(held[0], prompt=100, answer=50)
        await until(lambda: not member.limits.messages.ready)
        member.end(held[1], prompt=3, answer=1)
    finally:
        server.resume()
    await until(lambda: _is(client, (2, 154, 0)))

    async def told() -> bool:
        found: Any = await client.hmget(keys.limits_subject("key:k"), ["m", "b:month:UTC"])
        month, spent = found
        return (int(month.split()[1]), int(spent.split()[1])) == (154, 103 * 1000 + 51 * 2000)

    await until(told)


async def test_a_counter_that_cannot_be_read_refuses_its_own_callers_only(
    start: Start, client: redis.asyncio.Redis
) -> None:
    member = await start("g1")
    await opened(client)
    await client.set(keys.limits_subject("key:k"), "no hash")
    with pytest.raises(StoreUnavailable):
        await member.begin(KEY)
    assert await admitted(member, 3, subject(name="other", requests_per_minute=2)) == 2
    await client.hset(keys.limits_subject("key:bad"), mapping={"w": "x", "c": "y 1", "d": "-"})
    assert await admitted(member, 3, subject(name="bad", requests_per_minute=2, tokens_per_day=1000)) == 2


async def test_gateways_hear_what_others_use(start: Start, client: redis.asyncio.Redis) -> None:
    first, second = await start("g1", DOLLARS), await start("g2", DOLLARS)
    key = subject(requests_per_minute=10, tokens_per_day=1000, budgets=(Budget(amount=1),))
    await opened(client)
    assert await admitted(first, 3, key) == 3
    await until(lambda: "key:k" in second.limits.counts and second.limits.counts["key:k"].heard.requests == 3)
    known = second.limits.counts["key:k"].periods
    assert (known["d"][1], known["b:month:UTC"][1]) == (45, 60_000)
    assert second.limits.share.num_gateways == 2


async def test_a_round_of_reports_is_short(start: Start, client: redis.asyncio.Redis) -> None:
    member = await start("g1")
    await opened(client)
    await client.flushall()
    began = asyncio.get_running_loop().time()
    assert await admitted(member, 1, KEY) == 1
    assert asyncio.get_running_loop().time() - began < ROUND_S + 0.5


async def test_only_a_subject_that_was_refused_waits_for_its_permission_first(
    start: Start, client: redis.asyncio.Redis
) -> None:
    member = await start("g1")
    await opened(client)
    assert await admitted(member, 12, KEY) == 10
    assert member.limits._is_doubtful(member.reserve(KEY))
    assert not member.limits._is_doubtful(member.reserve(subject(name="other", requests_per_minute=5)))
