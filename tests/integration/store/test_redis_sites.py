"""The client and the scripts' pipe on Redis as sites run it: with TLS, behind Sentinels, as a Cluster."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError, DataError, RedisError

from gateway.errors import StoreUnavailable
from gateway.store.client import connect
from gateway.store.scripts import Script, ScriptSender
from tests.support.redis_fleet import ClusterFleet, SentinelFleet, ask
from tests.support.redis_server import RedisServer, redis_binaries, redis_version
from tests.support.tls_proxy import Certificates, make_certificates, tls_in_front_of
from tests.support.waiting import until
from workers.planner.exchange import Exchange
from workers.protocol import keys
from workers.redis import link
from workers.redis.channel import follow

APPEND = 'redis.call("RPUSH", KEYS[1] .. "log", ARGV[1]) return ARGV[1]'
PUBLISH = 'return redis.call("PUBLISH", ARGV[1], ARGV[2])'
BINARIES = redis_binaries()
SENTINELS_S = 5
"""Within it Sentinels know a new master for good."""


def script(name: str, source: str) -> Script:
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


append, publish = script("append", APPEND), script("publish", PUBLISH)
SCRIPTS = (append, publish)


async def log_of(client: redis.asyncio.Redis, prefix: str) -> list[int]:
    """What was appended. A connection of its own reads it: right after a failover Sentinels may still call the master
    down, and then it is asked again."""
    for _ in range(SENTINELS_S * 10):
        with suppress(MasterNotFoundError, ConnectionError):
            return [int(number) for number in await client.lrange(prefix + "log", 0, -1)]
        await asyncio.sleep(0.1)
    raise AssertionError(f"no master within {SENTINELS_S} s")


@pytest.fixture(scope="module", params=BINARIES, ids=redis_version)
def cluster(request: pytest.FixtureRequest) -> Iterator[ClusterFleet]:
    with ClusterFleet(request.param) as running:
        yield running


@pytest.fixture
async def client(cluster: ClusterFleet) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(cluster.url) as connected:
        await connected.flushall()
        yield connected


def models(cluster: ClusterFleet) -> dict[int, str]:
    """One model's prefix on each master."""
    found: dict[int, str] = {}
    for n in range(100):
        found.setdefault(cluster.owner(f"pd:{{m{n}}}:").port, f"pd:{{m{n}}}:")
    return found


async def test_long_answers_are_cut_off_on_a_cluster_too(cluster: ClusterFleet, client: redis.asyncio.Redis) -> None:
    """As supervisors read it; and on the nodes that are found later."""
    prefixes = sorted(models(cluster).values())
    assert len(prefixes) == 3
    async with link.connect(cluster.url, timeout_s=2.0, retries=0, longest_bytes=1 << 20) as bounded:
        for prefix in prefixes:
            await client.hset(prefix + "h", mapping={"short": b"x", "long": b"x" * (2 << 20)})
            assert await bounded.hget(prefix + "h", "short") == b"x"
            with pytest.raises(ConnectionError, match="more than 1,048,576 bytes"):
                await bounded.hgetall(prefix + "h")
        exchange = Exchange(bounded, "host1")
        await client.hset(keys.MACHINES, "huge", b"x" * (2 << 20))
        assert await exchange.others_at_start(time.time()) is None
        assert await exchange.others_at_start(time.time()) == frozenset()
        assert await exchange.look({}) is not None


async def test_scripts_of_all_models_run_in_order_on_a_cluster(
    cluster: ClusterFleet, client: redis.asyncio.Redis
) -> None:
    prefixes = sorted(models(cluster).values())
    assert len(prefixes) == 3
    pipe = ScriptSender(client, SCRIPTS, 2.0)
    answers = [pipe.send(append, prefix, n) for n in range(300) for prefix in prefixes]
    assert [int(answer) for answer in await asyncio.gather(*answers)] == [n for n in range(300) for _ in prefixes]
    for prefix in prefixes:
        assert await log_of(client, prefix) == list(range(300))


async def test_scripts_are_loaded_again_where_a_master_forgot_them(
    cluster: ClusterFleet, client: redis.asyncio.Redis
) -> None:
    prefixes = sorted(models(cluster).values())
    pipe = ScriptSender(client, SCRIPTS, 2.0)
    await asyncio.gather(*(pipe.send(append, prefix, 0) for prefix in prefixes))
    ask(cluster.owner(prefixes[1]), "SCRIPT", "FLUSH")
    answers = [pipe.send(append, prefix, n) for n in range(1, 50) for prefix in prefixes]
    await asyncio.gather(*answers)
    for prefix in prefixes:
        assert await log_of(client, prefix) == list(range(50))


async def test_a_slot_that_moves_costs_no_call_and_no_order(cluster: ClusterFleet, client: redis.asyncio.Redis) -> None:
    prefix = models(cluster)[cluster.masters[0].port]
    pipe = ScriptSender(client, SCRIPTS, 2.0)
    moved = asyncio.create_task(asyncio.to_thread(cluster.give_slot, prefix, cluster.masters[1]))
    done: list[int] = []
    n = 0
    while not moved.done() or n < 200:
        n += 1
        try:
            done.append(int(await pipe.send(append, prefix, n)))
        except StoreUnavailable:
            await asyncio.sleep(0.001)  # while the keys are on both, nothing may run
    await moved
    done += [int(answer) for answer in await asyncio.gather(*(pipe.send(append, prefix, n + k) for k in range(1, 50)))]
    assert await log_of(client, prefix) == done
    ask(cluster.masters[1], "FLUSHALL")
    cluster.give_slot(prefix, cluster.masters[0])


@pytest.mark.serial
async def test_a_master_that_is_gone_takes_its_own_models_away_only(
    cluster: ClusterFleet, client: redis.asyncio.Redis
) -> None:
    by_port = models(cluster)
    gone = cluster.masters[2]
    there, away = by_port[cluster.masters[0].port], by_port[gone.port]
    pipe = ScriptSender(client, SCRIPTS, 2.0)
    await asyncio.gather(pipe.send(append, there, 0), pipe.send(append, away, 0))
    gone.pause()
    try:
        hung = pipe.send(append, away, 1)
        slowest = 0.0
        for n in range(1, 20):
            began = time.monotonic()
            await pipe.send(append, there, n)
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.5
        with pytest.raises(StoreUnavailable):
            await hung
    finally:
        gone.resume()

    async def is_back() -> bool:
        try:
            await pipe.send(append, away, 2)
        except StoreUnavailable:
            return False
        return True

    for _ in range(100):
        if await is_back():
            break
        await asyncio.sleep(0.05)
    assert (await log_of(client, away))[-1] == 2


async def test_messages_reach_all_of_a_cluster(cluster: ClusterFleet, client: redis.asyncio.Redis) -> None:
    heard: list[bytes] = []
    subscribed = asyncio.Event()
    following = asyncio.create_task(follow(client, "news", heard.append, subscribed.set))
    await asyncio.wait_for(subscribed.wait(), 2.0)
    pipe = ScriptSender(client, SCRIPTS, 2.0)
    for number, prefix in enumerate(sorted(models(cluster).values())):
        await pipe.send(publish, prefix, "news", number)
    await client.publish("news", "3")
    await until(lambda: len(heard) == 4, 2.0, "all messages heard")
    assert sorted(heard) == [b"0", b"1", b"2", b"3"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_transactions_and_mixed_pipelines_on_a_cluster(client: redis.asyncio.Redis) -> None:
    async with client.pipeline(transaction=True) as together:
        together.hset("pd:{m}:a", mapping={"x": 1, "y": 2})
        together.hgetall("pd:{m}:a")
        together.exists("pd:{m}:b")
        assert await together.execute() == [2, {b"x": b"1", b"y": b"2"}, 0]
        together.set("pd:{m}:a", 1)
        together.set("pd:{n}:a", 1)
        with pytest.raises(DataError, match="several slots"):
            await together.execute()
    async with client.pipeline(transaction=False) as mixed:
        for n in range(20):
            mixed.set(f"pd:{{m{n}}}:a", n)
        mixed.xadd("pd:news", {"n": b"x"})
        assert len(await mixed.execute()) == 21
        for n in range(20):
            mixed.get(f"pd:{{m{n}}}:a")
        mixed.xread({"pd:news": "0"})
        *values, news = await mixed.execute()
    assert values == [str(n).encode() for n in range(20)]
    assert [fields for _, fields in news[0][1]] == [{b"n": b"x"}]


async def test_a_cluster_of_which_nobody_answers_fails_as_a_server_does(tmp_path: Path) -> None:
    async with asyncio.timeout(3.0):
        client = connect("redis+cluster://:hush@127.0.0.1:1,127.0.0.1:2")
        for ask_ in (client.ping, lambda: client.get("x"), lambda: client.pubsub().subscribe("x")):
            with pytest.raises((RedisError, OSError)) as caught:
                await ask_()
            assert "hush" not in str(caught.value)
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.get("x")
            with pytest.raises(ConnectionError):
                await pipeline.execute()
        with pytest.raises(StoreUnavailable):
            await ScriptSender(client, SCRIPTS, 2.0).send(append, "pd:{m}:", 1)
        await client.aclose()


@pytest.mark.parametrize("binary", BINARIES, ids=redis_version)
async def test_a_failover_behind_sentinels(binary: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bytes] = []
    subscriptions = 0

    def count() -> None:
        nonlocal subscriptions
        subscriptions += 1

    with SentinelFleet(binary, password="hush") as site:
        async with connect(site.url) as client:
            pipe = ScriptSender(client, SCRIPTS, 2.0)
            following = asyncio.create_task(follow(client, "news", heard.append, count))
            await asyncio.gather(*(pipe.send(append, "pd:{m}:", n) for n in range(10)))
            await until(lambda: subscriptions == 1, 2.0, "subscribed")
            site.first.kill()
            done: list[int] = []
            lost: list[str] = []
            slowest, n = 0.0, 10
            while len(done) < 20:
                began = time.monotonic()
                try:
                    done.append(int(await pipe.send(append, "pd:{m}:", n)))
                except StoreUnavailable as error:
                    lost.append(str(error))
                slowest = max(slowest, time.monotonic() - began)
                n += 1
                await asyncio.sleep(0.02)
            assert slowest < 2.5
            assert lost
            assert not any("hush" in words for words in lost)
            await until(lambda: subscriptions >= 2, 10.0, "subscribed to the new master")
            log = await log_of(client, "pd:{m}:")
            assert log == sorted(log), "in the order of calls"
            assert set(done) <= set(log)
            await client.publish("news", "again")
            await until(lambda: heard == [b"again"], 2.0, "heard from the new master")
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    assert "hush" not in caplog.text


@pytest.mark.parametrize("binary", BINARIES, ids=redis_version)
async def test_a_master_that_became_a_replica_is_unavailable_and_not_a_fault(binary: Path) -> None:
    with RedisServer(binary) as server:
        async with connect(server.url) as client:
            pipe = ScriptSender(client, SCRIPTS, 2.0)
            await pipe.send(append, "pd:{m}:", 1)
            ask(server, "REPLICAOF", "127.0.0.1", "1")
            for batch in (1, 3):
                answers = [pipe.send(append, "pd:{m}:", 2) for _ in range(batch)]
                for answer in await asyncio.gather(*answers, return_exceptions=True):
                    assert isinstance(answer, StoreUnavailable)
            with pytest.raises(ConnectionError, match="replica now"):
                await client.set("x", 1)
            ask(server, "REPLICAOF", "NO", "ONE")
            assert await pipe.send(append, "pd:{m}:", 3) == b"3"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_tls_with_a_certificate_on_both_sides(
    server: RedisServer, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "gateway")
    own = f"&ssl_certfile={certificates.client}&ssl_keyfile={certificates.client_key}"
    async with tls_in_front_of(server.socket, certificates) as port:
        whole = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates.ca}{own}"
        async with connect(whole) as client:
            assert await ScriptSender(client, SCRIPTS, 2.0).send(append, "pd:{tls}:", 7) == b"7"
        for url in (
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates.ca}",
            f"rediss://127.0.0.1:{port}?{own[1:]}",
            whole.replace("127.0.0.1", "localhost"),
            f"redis://127.0.0.1:{port}",
        ):
            client = connect(url)
            with pytest.raises((RedisError, OSError)):
                await client.ping()
            await client.aclose()
        async with connect(whole.replace("127.0.0.1", "localhost") + "&ssl_check_hostname=no") as client:
            assert await client.delete("pd:{tls}:log") == 1


@pytest.mark.parametrize("dead", range(3))
async def test_a_new_client_gets_through_to_the_masters_that_are_left(dead: int) -> None:
    """It asked the table's first one which commands there are, and none else: a gateway could not start."""
    with ClusterFleet() as fleet:
        names = models(fleet)
        name = next(prefix for prefix in names.values() if fleet.owner(prefix) is not fleet.masters[dead])
        fleet.masters[dead].kill()
        async with connect(fleet.url) as client, asyncio.timeout(20):
            while True:
                try:
                    await client.set(name + "new", "1")
                    break
                except RedisError:
                    await asyncio.sleep(0.1)
            assert await client.get(name + "new") == b"1"
