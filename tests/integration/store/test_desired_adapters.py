"""What operators want of adapters and models, against a real Redis: between gateways, and while Redis is away."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.adapters.desired import REMOVED_TTL_S, AdapterRecord, DesiredAdapters
from gateway.errors import StoreUnavailable
from gateway.registry.desired_models import DesiredModels
from gateway.store.client import connect
from tests.support.redis_server import RedisServer
from workers.protocol import keys
from workers.redis.long_commands import PoolCommands
from workers.redis.short_commands import Command

PIRATE = AdapterRecord(name="pirate", base="m", path="pirate.gguf", sha256="ab" * 32)
OTHER_PIRATE = replace(PIRATE, sha256="cd" * 32, pinned=True)


def wishes(client: redis.asyncio.Redis) -> DesiredAdapters:
    return DesiredAdapters(client, lambda: ["m", "other"])


async def test_what_one_gateway_is_told_the_others_read(client: redis.asyncio.Redis) -> None:
    one, other = wishes(client), wishes(client)
    await one.register(PIRATE)
    await one.set_scales("m", {"pirate": 0.5, "poet": 0.0})
    assert (one.records("m"), one.scales("m")) == ({"pirate": PIRATE}, {"pirate": 0.5})
    assert (other.records("m"), other.scales("m")) == ({}, {})
    await other.refresh()
    assert (other.records("m"), other.scales("m")) == ({"pirate": PIRATE}, {"pirate": 0.5})
    assert (other.records("other"), other.scales("other")) == ({}, {})
    assert other.contents() == {"m": {"pirate": PIRATE.sha256}}
    assert await other.is_registered(PIRATE)
    assert not await other.is_registered(OTHER_PIRATE)

    await other.unregister("m", "pirate")
    assert not await one.is_registered(PIRATE)
    await one.refresh()
    assert (one.records("m"), one.scales("m"), one.contents()) == ({}, {}, {})


async def test_a_reading_that_began_before_a_change_does_not_undo_it(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter just registered was unknown for up to a reading: its operator's list had no path, and calls a 404."""
    one = wishes(client)
    ask, read, changed = PoolCommands.ask, asyncio.Event(), asyncio.Event()

    async def slow(line: PoolCommands, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        answers = await ask(line, *commands, timeout_s=timeout_s)
        read.set()
        await changed.wait()
        return answers

    with monkeypatch.context() as late:
        late.setattr(PoolCommands, "ask", slow)
        refreshing = asyncio.create_task(one.refresh())
        await read.wait()
    await one.register(PIRATE)
    changed.set()
    await refreshing
    assert one.records("m") == {"pirate": PIRATE}
    await one.refresh()
    assert one.records("m") == {"pirate": PIRATE}


async def test_what_was_taken_away_is_remembered_until_it_is_there_again(client: redis.asyncio.Redis) -> None:
    one, other = wishes(client), wishes(client)
    await one.register(PIRATE)
    await one.unregister("m", "pirate")
    await other.refresh()
    assert one.removed("m") == other.removed("m") == {"pirate"}
    assert await other.is_removed("m", "pirate")
    assert 0 < await client.ttl(keys.adapters_removed("m")) <= REMOVED_TTL_S
    assert not await other.adopt(PIRATE)
    await one.register(OTHER_PIRATE)
    await other.refresh()
    assert one.removed("m") == other.removed("m") == frozenset()
    assert other.records("m") == {"pirate": OTHER_PIRATE}


async def test_what_redis_lost_is_adopted_once(client: redis.asyncio.Redis) -> None:
    one, other = wishes(client), wishes(client)
    assert await one.adopt(PIRATE)
    assert not await other.adopt(OTHER_PIRATE)
    await other.refresh()
    assert other.records("m") == {"pirate": PIRATE}


async def test_scales_of_the_catalog_hold_until_others_are_set(client: redis.asyncio.Redis) -> None:
    own = {"m": {"house": 0.5}}
    one, other = (DesiredAdapters(client, lambda: ["m", "other"], defaults=lambda: own) for _ in range(2))
    assert (one.scales("m"), one.scales("other")) == ({"house": 0.5}, {})
    await one.set_scales("m", {"pirate": 1.0})
    await other.refresh()
    assert one.scales("m") == other.scales("m") == {"house": 0.0, "pirate": 1.0}
    await one.set_scales("m", {"house": 2.0})
    await other.refresh()
    assert other.scales("m") == {"house": 2.0}


async def test_scales_are_set_as_a_whole(client: redis.asyncio.Redis) -> None:
    one = wishes(client)
    await one.set_scales("m", {"pirate": 1.0, "poet": 2.0})
    await one.set_scales("m", {"poet": 0.25})
    await one.refresh()
    assert one.scales("m") == {"poet": 0.25}
    await one.set_scales("m", {})
    assert not await client.exists(keys.adapter_scales("m"))


async def test_records_that_can_not_be_read_are_left_out(client: redis.asyncio.Redis) -> None:
    one = wishes(client)
    await one.register(PIRATE)
    await client.hset(keys.adapters("m"), "broken", "{")
    await client.hset(keys.adapter_scales("m"), mapping={"poet": "much", "pirate": "1"})
    await one.refresh()
    assert (one.records("m"), one.scales("m")) == ({"pirate": PIRATE}, {"pirate": 1.0})


async def test_models_that_nobody_wants(client: redis.asyncio.Redis) -> None:
    models = DesiredModels(client)
    assert not await models.is_supervised("m")
    await client.set(keys.supervised("m"), 1)
    assert await models.is_supervised("m")
    assert await models.coming(["m", "other"]) == {"m"}
    await models.want("m", False)
    assert await models.is_unloaded("m")
    assert not await models.coming(["m", "other"])
    await models.want("m", True)
    assert not await models.is_unloaded("m")


async def test_while_redis_is_away_the_last_wishes_hold_and_new_ones_are_refused() -> None:
    with RedisServer() as server:
        async with connect(server.url) as client:
            one, models = wishes(client), DesiredModels(client)
            await one.set_scales("m", {"pirate": 0.5})
            await one.register(PIRATE)
            server.kill()
            assert not await models.coming(["m"])
            keeping = asyncio.create_task(one.run())
            for act in (
                one.register(replace(PIRATE, name="poet")),
                one.unregister("m", "pirate"),
                one.set_scales("m", {}),
                models.want("m", False),
                models.is_supervised("m"),
                models.is_unloaded("m"),
            ):
                with pytest.raises(StoreUnavailable):
                    await act
            assert (one.records("m"), one.scales("m")) == ({"pirate": PIRATE}, {"pirate": 0.5})
            assert not keeping.done()
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
