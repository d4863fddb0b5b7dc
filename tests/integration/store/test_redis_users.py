"""What the Redis users of gateways, supervisors and workers may do, and that nothing they need is refused them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError

from gateway.admission.demand import DemandReport
from gateway.admission.local_queue import LocalQueue
from gateway.registry.desired_models import DesiredModels
from gateway.registry.model_states import ModelStates
from gateway.store import scripts
from gateway.store.client import Lease
from gateway.store.streams import Batch, StreamBounds, StreamBytes, StreamInfo, StreamLog, StreamQuota, Write
from tests.support.redis_server import RedisServer, redis_binaries
from tests.support.team_limits import unlimited
from workers.protocol import keys
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.keys import ROLES, rules_of
from workers.protocol.residency import LIFE_S, MachineModels, ModelState, Why, decode_demand, encode
from workers.redis.channel import follow
from workers.redis.link import connect

Client = redis.asyncio.Redis


@pytest.fixture(scope="module", params=redis_binaries(), ids=lambda path: path.parent.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(request.param) as running:
        yield running


@pytest.fixture
async def worker(server: RedisServer) -> AsyncIterator[Client]:
    async with connect(server.url_of("worker"), timeout_s=2.0, retries=0) as client:
        yield client


@pytest.fixture
async def supervisor(server: RedisServer) -> AsyncIterator[Client]:
    async with connect(server.url_of("supervisor"), timeout_s=2.0, retries=0) as client:
        yield client


@pytest.fixture
async def gateway(server: RedisServer) -> AsyncIterator[Client]:
    async with connect(server.url_of("gateway"), timeout_s=2.0, retries=0) as client:
        yield client


FORBIDDEN: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "make an admin's key": lambda redis: redis.hset(keys.ACCESS_KEYS, "mine", "{}"),
    "read keys": lambda redis: redis.hgetall(keys.ACCESS_KEYS),
    "take keys away": lambda redis: redis.delete(keys.ACCESS_KEYS),
    "read a stored response": lambda redis: redis.get(keys.response("red", "resp_1")),
    "list stored responses": lambda redis: redis.zrange(keys.responses("red"), 0, -1),
    "read an answer that is streamed": lambda redis: redis.xrange(keys.stream_log("s1")),
    "write into such an answer": lambda redis: redis.xadd(keys.stream_log("s1"), {"e": "x"}),
    "end it": lambda redis: redis.hset(keys.stream("s1"), "end", "x"),
    "hold a slot": lambda redis: redis.hset(keys.calls("m"), "l1", "w"),
    "free a slot": lambda redis: redis.zrem(keys.worker_leases("m", "w"), "l1"),
    "empty the line": lambda redis: redis.delete(keys.queue("m")),
    "move a team in the line": lambda redis: redis.hset(keys.ledger("m"), "t:red", "0 0 0"),
    "drop a ticket": lambda redis: redis.hdel(keys.calls("m"), "t1"),
    "grant a slot": lambda redis: redis.publish(keys.grants_channel("g"), "t1"),
    "listen to grants": lambda redis: _subscribed(redis, keys.grants_channel("g")),
    "pass for a gateway": lambda redis: redis.zadd(keys.GATEWAYS, {"mine": 1}),
    "have an adapter loaded": lambda redis: redis.hset(keys.adapters("m"), "a", "{}"),
    "run a script": lambda redis: redis.eval("return redis.call('HGETALL', 'pd:keys')", 0),
    "list names": lambda redis: redis.keys("*"),
    "walk over names": lambda redis: redis.scan(),
    "copy a key to where it may read": lambda redis: redis.copy(keys.ACCESS_KEYS, keys.worker("m", "w")),
    "rename one": lambda redis: redis.rename(keys.ACCESS_KEYS, keys.worker("m", "w")),
    "dump one": lambda redis: redis.dump(keys.ACCESS_KEYS),
    "empty Redis": lambda redis: redis.flushall(),
    "set it up": lambda redis: redis.config_set("maxmemory", 1),
    "make users": lambda redis: redis.acl_setuser("mine", enabled=True, nopass=True),
    "watch what others ask": lambda redis: _told(redis, "MONITOR"),
    "end connections of others": lambda redis: _told(redis, "CLIENT", "KILL", "TYPE", "normal"),
    "hold everybody up": lambda redis: _told(redis, "CLIENT", "PAUSE", "1"),
    "have it copy another server": lambda redis: _told(redis, "REPLICAOF", "127.0.0.1", "1"),
    "end it for all": lambda redis: _told(redis, "SHUTDOWN", "NOSAVE"),
    "write something of its own": lambda redis: redis.set("mine", "x"),
    # What supervisors act upon, and what gateways refuse calls for.
    "say that no machine can load a model": lambda redis: redis.hset(keys.RESIDENCY, "host1", "{}"),
    "have supervisors told of no machine": lambda redis: redis.delete(keys.RESIDENCY),
    "pass for calls that want a model": lambda redis: redis.hset(keys.DEMAND, "g", "{}"),
    "keep supervisors from hearing of calls": lambda redis: redis.hdel(keys.DEMAND, "g"),
    "see which models are wanted": lambda redis: redis.hgetall(keys.DEMAND),
    "have a model downloaded": lambda redis: redis.hset(keys.LIBRARY_ORDERS, "1", "{}"),
    "say what has been downloaded": lambda redis: redis.hset(keys.LIBRARY, "host1", "{}"),
    "have a model loaded": lambda redis: redis.hset(keys.ASKED, "m", "1"),
    "have a model unloaded": lambda redis: redis.set(keys.unloaded("m"), 1),
    "pass for its supervisor": lambda redis: redis.set(keys.supervised("m"), 1),
    "pass for a machine": lambda redis: redis.hset(keys.MACHINES, "host1", "{}"),
    "order a machine to load and unload": lambda redis: redis.hset(keys.ORDERS, "host1", "{}"),
    "take the lease of who orders": lambda redis: redis.set(keys.PLANNER, "host1 x"),
    "outbid it": lambda redis: redis.incrby(keys.PLANNER_FENCE, 1000),
    "wake a machine": lambda redis: redis.publish(keys.machine_channel("host1"), ""),
}

SUPERVISORS = tuple(FORBIDDEN)[-15:]
"""What a worker may not do and a supervisor may."""


async def _told(client: Client, *words: str) -> Any:
    return await client.execute_command(*words)  # type: ignore[no-untyped-call]


async def _subscribed(client: Client, channel: str) -> None:
    async with client.pubsub() as heard:
        await heard.subscribe(channel)
        await heard.get_message(timeout=1.0)


@pytest.mark.parametrize("deed", FORBIDDEN)
async def test_a_worker_may_not(worker: Client, gateway: Client, server: RedisServer, deed: str) -> None:
    with pytest.raises(NoPermissionError):
        await FORBIDDEN[deed](worker)
    assert await gateway.ping()


@pytest.mark.parametrize("deed", [deed for deed in FORBIDDEN if deed not in SUPERVISORS])
async def test_a_supervisor_may_not(supervisor: Client, deed: str) -> None:
    with pytest.raises(NoPermissionError):
        await FORBIDDEN[deed](supervisor)


GATEWAYS_TOO = (
    "walk over names",
    "list names",
    "dump one",
    "empty Redis",
    "set it up",
    "make users",
    "watch what others ask",
    "end connections of others",
    "hold everybody up",
    "have it copy another server",
    "end it for all",
    "write something of its own",
)


@pytest.mark.parametrize("deed", GATEWAYS_TOO)
async def test_a_gateway_may_not(gateway: Client, deed: str) -> None:
    with pytest.raises(NoPermissionError):
        await FORBIDDEN[deed](gateway)


async def test_a_worker_keeps_its_records_and_tells_of_them(worker: Client) -> None:
    async with worker.pipeline(transaction=True) as pipe:
        pipe.sadd(keys.MODELS, "Qwen/0.5B:q8@x")
        pipe.sadd(keys.workers("m"), "w")
        pipe.hset(keys.worker("m", "host/w:1"), mapping={"beat": "{}"})
        pipe.pexpire(keys.worker("m", "host/w:1"), 1000)
        pipe.set(keys.worker_heads("m", "host/w:1"), b"12345678")
        pipe.setrange(keys.worker_heads("m", "host/w:1"), 0, b"8")
        pipe.xadd(keys.NEWS, {"n": "x"}, maxlen=10, approximate=True)
        assert all(answer is not None for answer in await pipe.execute())
    assert await worker.publish(keys.FLEET_CHANNEL, keys.worker("m", "host/w:1")) == 0


async def test_a_supervisor_keeps_its_records_and_reads_what_is_wanted(supervisor: Client) -> None:
    async with supervisor.pipeline(transaction=True) as pipe:
        pipe.set(keys.supervised("m"), 1, px=100)
        pipe.exists(keys.unloaded("m"))
        pipe.hset(keys.RESIDENCY, "host1", "{}")
        pipe.hdel(keys.RESIDENCY, "host1")
        pipe.pexpire(keys.RESIDENCY, 1000)
        for name in (keys.MACHINES, keys.MACHINE_MODELS, keys.ORDERS):
            pipe.hset(name, "host1", "{}")
            pipe.hdel(name, "host1")
        pipe.set(keys.PLANNER, "host1 word", nx=True, px=1000)
        pipe.incrby(keys.PLANNER_FENCE, 1)
        pipe.hgetall(keys.DEMAND)
        pipe.hgetall(keys.ASKED)
        pipe.hgetall(keys.LIBRARY_ORDERS)
        pipe.hdel(keys.LIBRARY_ORDERS, "1")
        pipe.hset(keys.LIBRARY, "host1", "{}")
        pipe.pexpire(keys.LIBRARY, 1000)
        pipe.hdel(keys.LIBRARY, "host1")
        pipe.hkeys(keys.MACHINES)
        pipe.hstrlen(keys.MACHINES, "host1")
        pipe.unlink(keys.MACHINES)
        pipe.hdel(keys.ASKED, "m")
        pipe.exists(keys.worker("m", "host/w:1"))
        pipe.delete(keys.worker("m", "host/w:1"))
        assert all(answer is not None for answer in await pipe.execute())
    assert await supervisor.hget(keys.worker("m", "host/w:1"), "beat") is None
    assert await supervisor.publish(keys.FLEET_CHANNEL, keys.worker("m", "host/w:1")) == 0
    assert await supervisor.get(keys.PLANNER) == b"host1 word"
    async with supervisor.pubsub() as woken:
        await woken.subscribe(keys.machine_channel("host1"))
        await woken.get_message(timeout=5.0)
        assert await supervisor.publish(keys.machine_channel("host1"), b"") == 1


def test_what_scripts_call_is_what_gateways_may() -> None:
    """A command that a script begins to use would be refused in production only."""
    allowed = {word[1:].upper() for word in rules_of("gateway").split() if word.startswith("+")}
    for path in sorted(scripts.FOLDER.glob("*.lua")):
        for called in _calls(path.read_text(encoding="utf-8")):
            assert called in allowed, f"{path.name} calls {called}"


def _calls(source: str) -> list[str]:
    return [
        piece.split('"', 1)[0] for opener in ('redis.call("', 'redis.pcall("') for piece in source.split(opener)[1:]
    ]


@pytest.mark.parametrize("role", ROLES)
async def test_the_rules_are_those_that_redis_has_understood(server: RedisServer, role: str) -> None:
    async with connect(server.url, timeout_s=2.0, retries=0) as operator:
        found: Any = await operator.acl_getuser(f"paddock-{role}")
    assert "on" in found["flags"]
    assert "allkeys" not in found["flags"]
    assert "allchannels" not in found["flags"]
    assert "-@all" in found["categories"]


async def test_a_name_without_its_password_is_nobody(server: RedisServer) -> None:
    async with connect(f"unix://paddock-gateway:wrong@{server.socket}", timeout_s=2.0, retries=0) as client:
        with pytest.raises(RedisError, match="invalid username-password"):
            await client.hgetall(keys.ACCESS_KEYS)


async def test_streams_that_may_be_resumed_need_nothing_that_is_refused(gateway: Client) -> None:
    log, quota = StreamLog(gateway, 30.0), StreamQuota(gateway, StreamBounds(1, 1), 30.0, unlimited)
    head = StreamInfo("red", "digest", "gw")
    assert await quota.begin("red", "s1")
    await log.write([Write("s1", head, Batch(1, 2, b"data: a\n\ndata: b\n\n"), 2, True, 2)])
    await log.sign("s1")
    assert await log.signs("s1") == b"1"
    assert (await log.read("s1", 1, 64)).ended
    assert await log.ended_by("s1", 2)
    assert await log.has_ended("s1")
    await log.ask_to_end("s1")
    assert (await quota.note("red", [StreamBytes("s1", 9, "ended")])).made_room == ("s1",)
    await log.forget(["s1"])
    assert await log.head("s1") is None


async def test_what_gateways_and_supervisors_tell_of_models_needs_nothing_that_is_refused(
    gateway: Client, supervisor: Client
) -> None:
    states = ModelStates(gateway)
    told = MachineModels(at=time.time(), models={"m": ModelState(status="failed", why=Why.of("no memory"))})
    await supervisor.hset(keys.RESIDENCY, "host1", encode(told))
    await states.refresh()
    assert states.machines("m") == {"host1": told.models["m"]}
    queue = LocalQueue()
    queue.add_lease(Lease("l1", 1, WorkerAddress("m", "w1", "b1", "http://w1:1")), time.monotonic(), 0.0)
    report = DemandReport(gateway, "g1", queue, lambda model: 0.0, states.is_on_demand)
    telling = asyncio.create_task(report.run())
    await asyncio.sleep(0.5)
    found = await supervisor.hgetall(keys.DEMAND)
    assert decode_demand(found[b"g1"]).models["m"].num_running == 1
    heard = asyncio.Event()
    ready = asyncio.Event()
    also = (keys.WANTED_CHANNEL,)
    following = asyncio.create_task(
        follow(supervisor, keys.machine_channel("host1"), lambda _: heard.set(), ready.set, also)
    )
    await asyncio.wait_for(ready.wait(), 5)
    await asyncio.sleep(0.1)
    report.unqueued = lambda: {"another": (1, 1.0)}
    report.tell_soon("another")
    await asyncio.wait_for(heard.wait(), 0.4)
    for task in (following, telling):
        task.cancel()
    await asyncio.wait([following])
    await asyncio.wait([telling])
    await report.give_back()
    assert not await supervisor.hgetall(keys.DEMAND)
    models = DesiredModels(gateway)
    await models.ask_for("m")
    assert await supervisor.hdel(keys.ASKED, "m") == 1
    await models.send_away("m")
    assert await supervisor.exists(keys.unloaded("m"))
    assert 0 < await gateway.pttl(keys.unloaded("m")) <= LIFE_S * 1000


async def test_a_worker_may_look_what_lies_under_its_names(worker: Client) -> None:
    assert await worker.type(keys.worker("m", "w1")) in (b"none", b"hash")
    with pytest.raises(NoPermissionError):
        await worker.type(keys.ACCESS_KEYS)
