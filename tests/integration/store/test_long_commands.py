"""Long values on their way to Redis: nobody else's command waits behind them, or ends with them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio
import uvloop
from redis.exceptions import ConnectionError, NoScriptError, ResponseError, TimeoutError

from gateway.errors import StoreUnavailable
from gateway.store import scripts
from gateway.store.client import Store
from gateway.store.heartbeats import GatewayHeartbeats
from gateway.store.responses import ResponseRecords
from gateway.store.scripts import LONG_AT_ONCE, LONG_BYTES, Script, ScriptSender
from tests.support.redis_fleet import ClusterFleet
from tests.support.redis_server import RedisServer, redis_binaries
from tests.support.team_limits import unlimited
from tests.support.waiting import until
from workers.redis.link import connect, long_commands_of, short_commands_of

SOURCE = 'return redis.call("RPUSH", KEYS[1] .. "ran", string.sub(ARGV[1], 1, 1))'
NOTE = Script("note", SOURCE, hashlib.sha1(SOURCE.encode(), usedforsecurity=False).hexdigest())
"""Adds the first character of its argument to a list, and returns the list's length."""

HELD_BYTES = 512 << 10  # more than the texts of all scripts
LONG = "x" * (1 << 20)
STUCK = "x" * (16 << 20)
"""Longer than what sockets take while nobody reads: some of it has not left when its call is given up."""
AT_ONCE_S = 1.0
WAIT_S = 10.0


@dataclass(slots=True)
class Proxy:
    url: str
    num_held: int = 0
    """Connections of which more than HELD_BYTES have come, and are not handed on."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: all is handed on."""


@asynccontextmanager
async def holding(server: RedisServer) -> AsyncIterator[Proxy]:
    """A link to the server on which long values are stuck until the proxy is opened. When the block is left, all that
    clients sent, which have closed their connections, has come."""
    proxy = Proxy("")
    ended: list[asyncio.Event] = []

    async def ask(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        num_bytes = 0
        try:
            while data := await source.read(4096):
                num_bytes += len(data)
                if num_bytes > HELD_BYTES and not proxy.opened.is_set():
                    proxy.num_held += 1
                    await proxy.opened.wait()
                target.write(data)
        finally:
            target.close()

    async def answer(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        this = ended[-1]
        told, teller = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        await asyncio.gather(ask(reader, teller), answer(told, writer), return_exceptions=True)
        this.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.url = "redis://{}:{}".format(*listening.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        proxy.opened.set()
        listening.close()
        await listening.wait_closed()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(one.wait() for one in ended))


@asynccontextmanager
async def sending(url: str, timeout_s: float = 5.0) -> AsyncIterator[ScriptSender]:
    async with connect(url, timeout_s=timeout_s, retries=1) as connected:
        sender = ScriptSender(connected, [NOTE], timeout_s)
        yield sender
        await sender.close()


async def ran(client: redis.asyncio.Redis, prefix: str) -> bytes:
    found: list[Any] = await client.lrange(f"{prefix}ran", 0, -1)
    return b"".join(found)


async def test_a_stored_response_that_is_stuck_holds_up_neither_heartbeats_nor_calls(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    """They went over one connection: all waited, and after two seconds Redis counted as away for everybody."""
    async with holding(server) as proxy, connect(proxy.url, timeout_s=2.0, retries=1) as linked:
        records, store = ResponseRecords(linked, 60.0, 1 << 24, unlimited), Store(linked)
        await store.sweep("gw", "m")  # its scripts are loaded
        keeping = asyncio.ensure_future(records.keep("blue", "a", b"x" * (8 << 20)))
        await until(lambda: proxy.num_held == 1, WAIT_S, "the long value on its way")
        async with asyncio.timeout(AT_ONCE_S):
            for _ in range(3):
                await store.sweep("gw", "m")
                assert await GatewayHeartbeats(linked, "gw").beat() is not None
            assert not await records.drop("green", "a")
        assert not keeping.done()
        proxy.opened.set()
        assert await keeping
        assert [len(record or b"") for record in await records.find("blue", ["a"])] == [8 << 20]
        await records.close()
        await store.close()


async def test_a_long_call_that_takes_too_long_fails_alone(
    server: RedisServer, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "LEAST_BYTES_PER_S", 1 << 30)
    async with holding(server) as proxy, connect(proxy.url, timeout_s=0.3, retries=1) as linked:
        sender, commands = ScriptSender(linked, [NOTE], 0.3), short_commands_of(linked)
        before = await commands.ask(("CLIENT", "ID"))
        long = asyncio.ensure_future(sender.send(NOTE, "pd:{a}:", STUCK))
        while not long.done():
            assert await sender.send(NOTE, "pd:{b}:", "y")
            await asyncio.sleep(0.02)
        with pytest.raises(StoreUnavailable):
            await long
        assert await commands.ask(("CLIENT", "ID")) == before, "the connection that others use goes on"
        await sender.close()
    assert await ran(client, "pd:{a}:") == b""


@pytest.mark.parametrize("argument", ["y", LONG], ids=["short", "long"])
def test_an_answer_is_taken_that_came_while_the_process_stood_still(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    """Redis counted as away then, and callers were told so for a second."""
    monkeypatch.setattr(scripts, "LEAST_BYTES_PER_S", 1 << 30)

    async def stand_still() -> object:
        async with sending(server.url, timeout_s=0.3) as sender:
            prefix = f"pd:{{{len(argument)}}}:"
            await sender.send(NOTE, prefix, "y")
            asking = sender.send(NOTE, prefix, argument)
            await asyncio.sleep(0.02 if argument is LONG else 0)
            time.sleep(0.6)
            return await asking

    assert uvloop.run(stand_still()) == 2


async def test_a_long_call_has_time_for_its_bytes(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with holding(server) as proxy, sending(proxy.url, timeout_s=0.3) as sender:
        asyncio.get_running_loop().call_later(0.7, proxy.opened.set)
        assert await sender.send(NOTE, "pd:{a}:", LONG) == 1


async def test_calls_of_one_prefix_keep_their_order_and_others_overtake(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    """A release that overtook the renewal of its lease would leave the slot taken."""
    async with holding(server) as proxy, sending(proxy.url) as sender:
        words = ("1", "2", "3" + LONG, "4", "5" + LONG, "6" + LONG, "7", "8")
        asked = [sender.send(NOTE, "pd:{a}:", word) for word in words]
        async with asyncio.timeout(AT_ONCE_S):
            assert await sender.send(NOTE, "pd:{b}:", "y") == 1
        await until(lambda: proxy.num_held == 1, WAIT_S, "the long value on its way")
        asked += [sender.send(NOTE, "pd:{a}:", word) for word in ("9", "a" + LONG)]
        async with asyncio.timeout(AT_ONCE_S):
            assert await sender.send(NOTE, "pd:{b}:", "y") == 2
        proxy.opened.set()
        assert await asyncio.gather(*asked) == list(range(1, 11))
    assert await ran(client, "pd:{a}:") == b"123456789a"


async def test_a_few_long_calls_go_at_once_and_each_prefix_has_its_turn(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with holding(server) as proxy, sending(proxy.url) as sender:
        ended: list[str] = []
        asked = []
        for prefix in ("a", "a", "a", "a", "b", "c"):
            asked.append(sender.send(NOTE, f"pd:{{{prefix}}}:", LONG))
            asked[-1].add_done_callback(lambda _, prefix=prefix: ended.append(prefix))  # type: ignore[misc]
        await until(lambda: proxy.num_held == LONG_AT_ONCE, WAIT_S, "the long values on their way")
        await asyncio.sleep(0.1)
        assert proxy.num_held == LONG_AT_ONCE
        proxy.opened.set()
        await asyncio.gather(*asked)
        assert ended.index("b") < 3 > ended.index("c") - 1, "one who sends many does not hold up others"


async def test_a_long_call_whose_turn_does_not_come_fails_and_does_not_run(
    server: RedisServer, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "LONG_WAIT_S", 0.2)
    async with holding(server) as proxy, sending(proxy.url) as sender:
        first = [sender.send(NOTE, f"pd:{{{number}}}:", LONG) for number in range(LONG_AT_ONCE)]
        late = sender.send(NOTE, "pd:{late}:", LONG)
        behind = sender.send(NOTE, "pd:{late}:", "s")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await late
        assert time.monotonic() - began < AT_ONCE_S
        assert await behind == 1, "a short one runs"
        proxy.opened.set()
        assert await asyncio.gather(*first) == [1] * LONG_AT_ONCE
    assert await ran(client, "pd:{late}:") == b"s"


async def test_many_calls_that_are_nearly_long_go_in_several_batches(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with sending(server.url) as sender:
        asked = [sender.send(NOTE, "pd:{a}:", "x" * (LONG_BYTES - 1000)) for _ in range(40)]
        assert await asyncio.gather(*asked) == list(range(1, 41))


async def test_who_gives_up_a_long_call_leaves_the_order_as_it_was(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with holding(server) as proxy, sending(proxy.url) as sender:
        asked = [sender.send(NOTE, "pd:{a}:", word) for word in ("1" + LONG, "2")]
        await until(lambda: proxy.num_held == 1, WAIT_S, "the long value on its way")
        asked[0].cancel()
        await asyncio.sleep(0.05)
        proxy.opened.set()
        assert await asked[1] == 2


async def test_a_server_that_restarted_loads_the_script_for_a_long_call() -> None:
    with RedisServer(redis_binaries()[0]) as own:
        async with sending(own.url) as sender:
            assert await sender.send(NOTE, "pd:{a}:", LONG) == 1
            own.restart()
            assert await sender.send(NOTE, "pd:{a}:", LONG) == 1


async def test_a_cluster_takes_long_calls_in_order() -> None:
    with ClusterFleet(redis_binaries()[0]) as fleet:
        async with sending(fleet.url) as sender:
            asked = [sender.send(NOTE, "pd:{a}:", word) for word in ("1", LONG, "3", LONG)]
            assert await asyncio.gather(*asked) == [1, 2, 3, 4]
        async with connect(fleet.url, timeout_s=2.0, retries=0) as client:
            assert await long_commands_of(client).ask(("APPEND", "a", LONG), ("STRLEN", "a")) == [len(LONG)] * 2


async def test_long_commands_get_values_and_errors(server: RedisServer, client: redis.asyncio.Redis) -> None:
    commands = long_commands_of(client)
    assert await commands.ask() == []
    ok, number, none, wrong, value = await commands.ask(
        ("SET", "a", LONG), ("STRLEN", "a"), ("EVALSHA", "0" * 40, 0), ("NOSUCH", "a"), ("GET", "a")
    )
    assert (ok, number, value) == (b"OK", len(LONG), LONG.encode())
    assert (type(none), type(wrong)) == (NoScriptError, ResponseError)


async def test_a_dead_connection_is_made_again_for_long_commands(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with connect(server.url, timeout_s=2.0, retries=1) as other:
        [mine] = await long_commands_of(other).ask(("CLIENT", "ID"))
        await client.client_kill_filter(_id=str(mine))
        assert await long_commands_of(other).ask(("ECHO", "x"), timeout_s=1.0) == [b"x"]


async def test_a_late_answer_to_a_long_command_is_nobodys(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with connect(server.url, timeout_s=0.5, retries=0) as other:
        commands = long_commands_of(other)
        await commands.ask(("ECHO", "warm"))
        await client.client_pause(300)
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            await commands.ask(("SET", "a", "1"), timeout_s=0.1)
        await asyncio.sleep(0.3)
        assert await commands.ask(("ECHO", "x"), timeout_s=1.0) == [b"x"]
        await client.client_pause(1500)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await other.echo("y")
        assert time.monotonic() - began < 1.2, "an ordinary command has the client's own bound again"
        await client.client_unpause()


@pytest.mark.parametrize("by", ["long commands", "the client itself"])
@pytest.mark.parametrize("sent", [False, True], ids=["while it connects", "while Redis has the command"])
async def test_what_waits_when_its_client_is_closed_makes_no_connection_again(
    server: RedisServer, client: redis.asyncio.Redis, by: str, sent: bool
) -> None:
    """Its retry made one that nobody closed."""
    before = len(await client.client_list())
    other = connect(server.url, timeout_s=5.0, retries=1)
    if sent:
        await asyncio.gather(*[other.ping() for _ in range(3)])
        await client.client_pause(200)
    ask = long_commands_of(other).ask if by == "long commands" else other.execute_command
    command = (("SET", "a", 1),) if by == "long commands" else ("SET", "a", 1)
    asking = [asyncio.ensure_future(ask(*command)) for _ in range(3)]
    await asyncio.sleep(0.02 if sent else 0)
    await other.aclose()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(end) for end in ends} == {ConnectionError}
    await asyncio.sleep(0.3)
    assert len(await client.client_list()) == before
