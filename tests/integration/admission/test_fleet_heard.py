"""Workers whose way to Redis is cut: whoever is heard stays in the fleet, with a record that all gateways read."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis.asyncio

from gateway.registry.fleet import Fleet
from gateway.registry.records import LATE_S
from tests.integration.admission.conftest import Start
from tests.integration.admission.test_fleet import running
from tests.support.pool import SECRET, beat, call, heartbeat, tell, vanish
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.heartbeat import PLACING, Load, placing_of

EXPIRES_S = 0.3
NAMED = "lives and does not renew its record"


def hearing(client: redis.asyncio.Redis, *boots: str) -> tuple[Fleet, set[str]]:
    """A gateway's picture of the fleet, and the processes that this gateway hears."""
    heard, fleet = set(boots), Fleet(client, SECRET, interval_s=0.05)
    fleet.uphold(heard.__contains__)
    return fleet, heard


async def left_ms(client: redis.asyncio.Redis, worker: str) -> int:
    return int(await client.pttl(keys.worker("m", worker)))


async def test_a_worker_that_is_heard_stays_and_any_gateway_gives_its_slots(
    client: redis.asyncio.Redis, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, heard = hearing(client, "boot1")
    busy = msgspec.structs.replace(heartbeat("w1"), kv_tokens_used=2000)
    async with running(fleet):
        await beat(client, busy, ttl_s=EXPIRES_S)
        await beat(client, heartbeat("w2", boot="unheard"), ttl_s=EXPIRES_S)
        await until(lambda: len(fleet.snapshot.of("m")) == 2, 2.0, "both are known")
        await until(lambda: [one.worker for one in fleet.snapshot.of("m")] == ["w1"], 3.0, "the other one is gone")
        assert await left_ms(client, "w1") > LATE_S * 1000
        other = await start("gateway that hears nobody")
        assert [one.worker for one in other.fleet.snapshot.of("m")] == ["w1"]
        async with other.admission.slot(call()) as held, other.admission.slot(call()) as second:
            assert {held.at.boot, second.at.boot} == {"boot1"}, "cells that it used once do not count"
        heard.clear()
        await until(lambda: not fleet.snapshot.of("m"), keys.HEARTBEAT_TTL_S + 2, "nobody is heard any more")
    assert caplog.text.count(NAMED) == 1
    assert "worker w1 of model m" in caplog.text


async def test_a_record_is_renewed_before_it_expires(client: redis.asyncio.Redis) -> None:
    """Else a sweep might free its leases in between."""
    fleet, _ = hearing(client, "boot1")
    async with running(fleet):
        await beat(client, heartbeat("w1"), ttl_s=1.5)
        for _ in range(40):
            assert await client.exists(keys.worker("m", "w1"))
            await asyncio.sleep(0.05)
        assert await left_ms(client, "w1") > LATE_S * 1000


async def test_whoever_leaves_is_gone_at_once(client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture) -> None:
    fleet, heard = hearing(client, "boot1", "boot2", "boot3")
    async with running(fleet):
        for number in (1, 2, 3):
            await beat(client, heartbeat(f"w{number}", boot=f"boot{number}"))
        await until(lambda: len(fleet.snapshot.of("m")) == 3, 2.0, "all are known")
        await vanish(client, heartbeat("w1"))
        await client.publish(keys.FLEET_CHANNEL, keys.worker("m", "w1"))
        await tell(client, heartbeat("w2", boot="boot2"), 1, load=Load(), draining=True)
        await until(lambda: any(one.draining for one in fleet.snapshot.of("m")), 2.0, "w2 drains")
        await vanish(client, heartbeat("w2"))
        heard.discard("boot3")
        await vanish(client, heartbeat("w3"))
        assert await until(lambda: not fleet.snapshot.of("m"), 2.0, "all are gone") < 1.0
        await asyncio.sleep(2 * keys.HEARTBEAT_INTERVAL_S)
        assert not await client.keys(keys.worker("m", "*").replace("{", "[{]"))
    assert NAMED not in caplog.text


async def test_what_a_worker_writes_itself_is_never_changed(client: redis.asyncio.Redis) -> None:
    fleet, _ = hearing(client, "boot1", "boot2")
    async with running(fleet):
        await beat(client, heartbeat("w1"), ttl_s=EXPIRES_S)
        await until(lambda: len(fleet.snapshot.of("m")) == 1, 2.0, "it is known")
        await asyncio.sleep(EXPIRES_S + 0.2)
        assert await left_ms(client, "w1") > LATE_S * 1000, "it is upheld"
        back = msgspec.structs.replace(heartbeat("w1", draining=True), kv_tokens_used=77)
        for written in (back, heartbeat("w1", boot="boot2")):
            await beat(client, written, ttl_s=60.0)
            await until(lambda one=written: fleet.snapshot.of("m") == (one,), 2.0, "as it says itself")  # type: ignore[misc]
            await asyncio.sleep(2 * keys.HEARTBEAT_INTERVAL_S)
            assert await client.hget(keys.worker("m", "w1"), PLACING) == placing_of(written).encode()
            assert await left_ms(client, "w1") > 50_000


async def test_another_type_under_its_name_is_left_there(client: redis.asyncio.Redis) -> None:
    fleet, _ = hearing(client, "boot1")
    async with running(fleet):
        await beat(client, heartbeat("w1"))
        await until(lambda: len(fleet.snapshot.of("m")) == 1, 2.0, "it is known")
        await client.set(keys.worker("m", "w1"), "something else")
        await asyncio.sleep(3 * keys.HEARTBEAT_INTERVAL_S)
        assert len(fleet.snapshot.of("m")) == 1
        assert await client.get(keys.worker("m", "w1")) == b"something else"
        await client.delete(keys.worker("m", "w1"))
