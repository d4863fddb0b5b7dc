"""Models that supervisors load on demand: they hear which calls wait; what they tell ends waits that are in vain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest
import redis.asyncio

from gateway.admission.demand import KEY_TTL_S, LEAST_S, TOLD_BYTES
from gateway.errors import ModelNotLoaded
from gateway.registry.libraries import LONGEST_BYTES, Libraries
from gateway.registry.model_states import ModelStates
from gateway.store.client import connect
from gateway.store.outage import Unreadable
from gateway.store.packed import MOST_BYTES, read_hash
from gateway.telemetry.metrics import Unread
from tests.integration.admission.conftest import Start
from tests.integration.admission.test_slots import Guest
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.pool import beat, call, heartbeat
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.residency import (
    LIFE_S,
    LONGEST_TOLD,
    MAX_TEAMS,
    TOLD_EVERY_S,
    GatewayDemand,
    LibraryAnswer,
    MachineLibrary,
    MachineModels,
    ModelDemand,
    ModelState,
    Why,
    decode_demand,
    encode,
)
from workers.redis.link import long_commands_of
from workers.redis.short_commands import MAX_SENT_BYTES

SOON_S = 0.1
"""Within it a supervisor hears of the first call; it takes some ms, and the machines of tests are crowded."""
REFUSED_S = 2.0
UNLOADED, LOADING = ModelState(status="unloaded"), ModelState(status="loading", progress=0.426)
LOADED = ModelState(status="loaded")
TOO_LARGE = ModelState(status="unloaded", why=Why.of("no machine has the memory"), is_hopeless=True)


def failed(retry_in_s: float = 30.0) -> ModelState:
    return ModelState(status="failed", why=Why.of("the file ends early"), retry_at=time.time() + retry_in_s)


@pytest.fixture
def supervisor(server: RedisServer, client: redis.asyncio.Redis) -> Iterator[FakeSupervisor]:
    with FakeSupervisor(server.url, {"m": UNLOADED}) as running:
        yield running


async def refused(guest: Guest) -> ModelNotLoaded:
    with pytest.raises(ModelNotLoaded) as refusal:
        await asyncio.wait_for(guest.task, REFUSED_S)
    return refusal.value


async def test_supervisors_hear_at_once_of_a_call_that_waits(start: Start, supervisor: FakeSupervisor) -> None:
    one = await start("g1")
    await asyncio.sleep(TOLD_EVERY_S / 4)
    began = time.time()
    guest = Guest(one, call(patience_s=30.0))
    took_s = await until(lambda: supervisor.num_waiting("m") == 1, SOON_S, "it is told")
    print(f"\ntold {1000 * took_s:.1f} ms after the call")
    demand = supervisor.demand("m")
    assert demand is not None
    assert began - 0.05 <= demand.oldest_at <= time.time()
    assert (demand.num_running, demand.used_at) == (0, 0.0)
    await guest.cancel()
    await until(lambda: not supervisor.gateways(), 3 * TOLD_EVERY_S, "nothing is left to tell")


@pytest.mark.serial
async def test_supervisors_hear_at_once_that_callers_have_gone(start: Start, supervisor: FakeSupervisor) -> None:
    """Half a second later a model was loaded for them, and another one left for it."""
    one = await start("g1")
    for _ in range(4):  # what is told anyway is told every half second
        first, second = Guest(one, call(patience_s=30.0)), Guest(one, call(patience_s=30.0))
        await until(lambda: supervisor.num_waiting("m") == 2, TOLD_EVERY_S + SOON_S, "both are told")
        await first.cancel()
        await second.cancel()
        took_s = await until(lambda: not supervisor.num_waiting("m"), SOON_S + LEAST_S, "that they have gone is told")
        print(f"\ntold {1000 * took_s:.1f} ms after the last one left")


async def test_a_crowd_that_comes_and_goes_has_supervisors_decide_a_few_times(
    client: redis.asyncio.Redis, start: Start, supervisor: FakeSupervisor
) -> None:
    one = await start("g1")
    async with client.pubsub() as heard:
        await heard.subscribe(keys.WANTED_CHANNEL)
        began = time.monotonic()
        for _ in range(40):
            guest = Guest(one, call(patience_s=30.0))
            await asyncio.sleep(0.03)
            await guest.cancel()
        took_s = time.monotonic() - began
        number = 0
        while (message := await heard.get_message(timeout=0.2)) is not None:
            number += message["type"] == "message"
    assert 0 < number <= took_s / LEAST_S + 2


async def test_what_runs_and_ran_is_told(client: redis.asyncio.Redis, start: Start, supervisor: FakeSupervisor) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one, other = await start("g1"), await start("g2")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    waiting = Guest(other)
    await until(lambda: supervisor.num_waiting("m") == 1, 3 * TOLD_EVERY_S, "it is told")
    assert supervisor.gateways()["g1"].models["m"].num_running == 1
    assert 0 < await client.pttl(keys.DEMAND) <= KEY_TTL_S * 1000
    await waiting.cancel()
    await holder.go()
    ended_at = time.time()
    await until(lambda: _rests(supervisor, "g1", ended_at), 3 * TOLD_EVERY_S, "when it was used last is told")
    await one.admission.close()
    assert "g1" not in supervisor.gateways()


def _rests(supervisor: FakeSupervisor, gateway: str, ended_at: float) -> bool:
    demand = supervisor.gateways()[gateway].models["m"]
    return demand.num_running == 0 and abs(demand.used_at - ended_at) < 0.2


async def test_a_call_whose_model_loses_its_worker_is_told_at_once_and_goes_on_waiting(
    client: redis.asyncio.Redis, start: Start, supervisor: FakeSupervisor
) -> None:
    record = heartbeat("w1", slots=1)
    await beat(client, record)
    one = await start("g1")
    holder, waiting = Guest(one, call(patience_s=30.0)), Guest(one, call(patience_s=30.0))
    await until(lambda: holder.served, 1.0, "the first call served")
    await client.delete(keys.worker("m", "w1"))
    await client.publish(keys.FLEET_CHANNEL, keys.worker("m", "w1"))
    await holder.go()
    await until(lambda: supervisor.num_waiting("m") == 1, 2.0, "it waits for a worker now")
    supervisor.tell(m=LOADING)
    await asyncio.sleep(0.5)
    assert not waiting.task.done()
    await beat(client, heartbeat("w2", slots=1))
    await until(lambda: waiting.served, 2.0, "the next worker serves it")
    await waiting.go()


async def test_a_reserved_worker_gets_no_call_until_it_is_released(
    client: redis.asyncio.Redis, start: Start, supervisor: FakeSupervisor
) -> None:
    """The one that runs there goes on, and one that comes keeps its place in line."""
    record = heartbeat("w1", slots=2)
    reserved = msgspec.structs.replace(record, draining=True, reserved=True)
    await beat(client, record)
    one = await start("g1")
    running = Guest(one)
    await until(lambda: running.served, 1.0, "the first call served")
    await beat(client, reserved)
    await until(lambda: one.fleet.snapshot.of("m")[0].reserved, 2.0, "the gateway knows")
    waiting = Guest(one, call(patience_s=30.0))
    await until(lambda: supervisor.num_waiting("m") == 1, 2.0, "supervisors are told of it")
    await asyncio.sleep(0.5)
    assert not waiting.served
    assert not running.task.done()
    await beat(client, record)
    await until(lambda: waiting.served, 2.0, "the released worker serves it")
    await running.go()
    await waiting.go()


async def test_a_failed_load_ends_the_wait_of_all(start: Start, supervisor: FakeSupervisor) -> None:
    one = await start("g1")
    guests = [Guest(one, call(patience_s=30.0)) for _ in range(3)]
    await until(lambda: supervisor.num_waiting("m") == 3, 2.0, "they wait")
    supervisor.tell(m=LOADING)
    await asyncio.sleep(1.2)
    assert not any(guest.task.done() for guest in guests)
    supervisor.tell(m=failed())
    began = time.monotonic()
    errors = [await refused(guest) for guest in guests]
    took_s = time.monotonic() - began
    print(f"\nrefused {took_s:.2f} s after the report")
    assert took_s < 0.6
    assert all("the file ends early" in error.message for error in errors)
    assert all(20 < (error.retry_after_s or 0) <= 30 for error in errors)


async def test_what_was_told_before_a_call_does_not_refuse_it(start: Start, supervisor: FakeSupervisor) -> None:
    supervisor.tell(m=failed(0.1))
    one = await start("g1")
    await asyncio.sleep(0.3)
    guest = Guest(one, call(patience_s=30.0))
    await until(lambda: supervisor.num_waiting("m") == 1, 1.0, "it waits")
    supervisor.tell(m=LOADING)
    await asyncio.sleep(1.5)
    assert not guest.task.done()
    await guest.cancel()


async def test_one_machine_that_may_load_it_is_enough_to_wait(
    server: RedisServer, start: Start, supervisor: FakeSupervisor
) -> None:
    supervisor.tell(m=TOO_LARGE)
    with FakeSupervisor(server.url, {"m": UNLOADED}, "host2") as other:
        one = await start("g1")
        guest = Guest(one, call(patience_s=30.0))
        await asyncio.sleep(1.5)
        assert not guest.task.done()
        assert one.admission.may_load("m")
        other.tell(m=TOO_LARGE)
        assert "no machine has the memory" in (await refused(guest)).message
        assert not one.admission.may_load("m")


async def test_a_call_undoes_an_unload(client: redis.asyncio.Redis, start: Start, supervisor: FakeSupervisor) -> None:
    one = await start("g1")
    await until(lambda: one.states.is_on_demand("m"), 2.0, "the supervisor is known")
    await client.set(keys.unloaded("m"), 1)
    await client.set(keys.unloaded("fixed"), 1)
    guests = [Guest(one, call("m", patience_s=30.0)), Guest(one, call("fixed", patience_s=30.0))]
    await until(lambda: not supervisor.is_unloaded("m"), 1.0, "the call loads it again")
    assert supervisor.is_unloaded("fixed"), "nobody loads it on demand"
    for guest in guests:
        await guest.cancel()


async def test_while_redis_is_away_nothing_is_told_and_afterwards_it_is(
    server: RedisServer, start: Start, supervisor: FakeSupervisor
) -> None:
    one = await start("g1")
    await until(lambda: one.admission.can_place_degraded, 10.0, "the gateway knows its share of the slots")
    guest = Guest(one, call(patience_s=30.0))
    await until(lambda: supervisor.num_waiting("m") == 1, 1.0, "it is told")
    server.pause()
    try:
        await asyncio.sleep(2.5)
    finally:
        server.resume()
    await until(lambda: supervisor.num_waiting("m") == 1, 5.0, "it is told again")
    assert not guest.task.done()
    await guest.cancel()


async def test_what_cannot_be_read_is_left_out_and_counted(server: RedisServer, client: redis.asyncio.Redis) -> None:
    counted = list[str]()
    async with connect(server.url) as connected:
        states = ModelStates(connected, Unreadable(counted.append))
        good = encode(MachineModels(at=time.time(), models={"m": LOADED}))
        await client.hset(keys.RESIDENCY, mapping={"good": good, "bad": b"{", b"\xff": good, "huge": b"x" * (2 << 20)})
        await states.refresh()
        assert states.machines("m") == {"good": LOADED}
        assert counted == [keys.RESIDENCY] * 3
        await client.set(keys.RESIDENCY, "of another type")
        await states.refresh()
        assert counted == [keys.RESIDENCY] * 4


async def test_of_what_gateways_tell_and_admins_ask_a_bounded_part_is_read(
    server: RedisServer, client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """For the overview of the fleet, and for whether an admin has asked for a model."""
    counted: list[str] = []
    async with connect(server.url) as connected:
        unreadable = Unreadable(counted.append)
        long, commands = b"x" * (LONGEST_TOLD + 1), long_commands_of(connected)
        await client.hset(keys.DEMAND, mapping={"g1": b"{}", "huge": long})
        found = await read_hash(commands, keys.DEMAND, Unread.DEMAND, unreadable, LONGEST_TOLD)
        assert found == {b"g1": b"{}"}
        assert counted == ["pd:demand"]
        assert any("pd:demand, huge, can't be read" in line for line in caplog.messages)
        await client.hset(keys.DEMAND, mapping={f"g{number}": b"{}" for number in range(20_000)})
        assert 1000 < len(await read_hash(commands, keys.DEMAND, Unread.DEMAND, unreadable, LONGEST_TOLD)) < 3000
        counted.clear()
        await client.hset(keys.ASKED, mapping={"m": b"1.0", "y" * 5000: b"1.0"})
        await ModelStates(connected, unreadable).refresh()
        assert counted == ["pd:asked"]
        await client.delete(keys.DEMAND, keys.ASKED)


async def test_what_machines_tell_of_their_folders_is_read_a_bounded_part_at_a_time(
    server: RedisServer, client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it was read, tens of MiB at each look, ten looks a second while an order waited."""
    counted: list[str] = []
    async with connect(server.url) as connected:
        libraries = Libraries(connected, Unreadable(counted.append))
        true = encode(MachineLibrary(at=time.time(), answers={"1": LibraryAnswer(at=1.0)}))
        long = b"x" * (LONGEST_BYTES + 1)
        await client.hset(keys.LIBRARY, mapping={"host1": true, "bad": b"{", "huge": long, "x" * (2 << 20): true})
        assert list(await libraries.machines()) == ["host1"]
        assert counted == [keys.LIBRARY] * 3
        assert any("pd:library, huge, can't be read" in line for line in caplog.messages)
        await client.hset(keys.LIBRARY, mapping={f"m{number}": long[1:] for number in range(64)})
        await client.config_resetstat()
        counted.clear()
        await libraries.machines()
        assert counted.count(keys.LIBRARY) > 1, "those that are told are no JSON, and that there are more"
        sent = (await client.info("stats"))["total_net_output_bytes"]
        assert sent < 2 * MOST_BYTES, f"{sent:,}"
        await client.delete(keys.LIBRARY)
        await client.set(keys.LIBRARY, "of another type")
        assert not await libraries.machines()
        await client.delete(keys.LIBRARY)


async def test_a_gateway_tells_of_many_models_and_teams_as_far_as_that_can_be_sent(
    client: redis.asyncio.Redis, start: Start
) -> None:
    """Two thousand models, and 64 teams that wait for each, were more: nothing was told, and no model was loaded."""
    wanted = ModelDemand(num_waiting=1, oldest_at=1.0, teams=tuple(f"team-{number:040}" for number in range(MAX_TEAMS)))
    models = {f"model-{number}": wanted for number in range(2000)}
    assert len(encode(GatewayDemand(at=1.0, models=models))) > MAX_SENT_BYTES
    one = await start("g1")
    report = one.admission._demand
    report.models = lambda: models  # type: ignore[method-assign]
    await report._tell()
    told = await client.hget(keys.DEMAND, "g1")
    assert told is not None
    assert len(told) <= TOLD_BYTES
    found = decode_demand(told).models
    assert len(found) == 2000
    assert found["model-7"].teams == wanted.teams[: len(found["model-7"].teams)] != ()


async def test_a_machine_that_tells_no_more_counts_no_more(
    server: RedisServer, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(server.url) as connected:
        states = ModelStates(connected)
        old = MachineModels(at=time.time() - 2 * LIFE_S, models={"m": LOADED})
        await client.hset(keys.RESIDENCY, "host1", encode(old))
        await states.refresh()
        assert states.of("m") is None, "it may have been there for long"
        late = MachineModels(at=old.at + 0.5, models={"m": LOADED}, wanted={"m": 2})
        other = MachineModels(at=time.time(), models={}, wanted={"m": 1, "n": 0})
        await client.hset(keys.RESIDENCY, mapping={"host1": encode(late), "host2": encode(other)})
        await states.refresh()
        assert states.of("m") == LOADED, "its clock is behind, but it lives"
        assert states.wanted() == {"m": 3, "n": 0}
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + LIFE_S + 0.1)
        await states.refresh()
        assert states.of("m") is None
        assert not states.wanted()
