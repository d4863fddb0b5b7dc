"""Short commands to Redis over one connection: their order, their ends, and what a connection's end means for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
import uvloop
from redis.exceptions import AuthenticationError, ConnectionError, NoScriptError, ResponseError, TimeoutError

from tests.integration.store.test_garbled_answers import Once, garbling
from tests.support.redis_server import RedisServer
from workers.redis.link import connect, short_commands_of
from workers.redis.short_commands import MAX_SENT_BYTES, ShortCommands


@contextlib.asynccontextmanager
async def connected(url: str, *, timeout_s: float = 5.0, retries: int = 0) -> AsyncIterator[ShortCommands]:
    async with connect(url, timeout_s=timeout_s, retries=retries) as client:
        yield short_commands_of(client)


async def connections_of(client: redis.asyncio.Redis) -> list[int]:
    return [int(one["id"]) for one in await client.client_list()]


async def test_many_ask_at_once_over_one_connection_and_each_gets_its_own_answer(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    before = len(await connections_of(client))
    async with connected(server.url) as commands:
        asked = [commands.ask(("ECHO", str(number)), ("INCR", "count")) for number in range(500)]
        answers = await asyncio.gather(*asked)
        assert [echo for echo, _ in answers] == [b"%d" % number for number in range(500)]
        assert [count for _, count in answers] == list(range(1, 501)), "in the order of asking"
        assert len(await connections_of(client)) == before + 1


async def test_values_of_all_kinds_go_and_come(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with connected(server.url) as commands:
        answers = await commands.ask(
            ("SET", "a", b"\x00\r\n\xff"),
            ("GET", "a"),
            ("GET", "none"),
            ("SET", "n", 1.5),
            ("GET", "n"),
            ("STRLEN", "a"),
        )
        assert answers == [b"OK", b"\x00\r\n\xff", None, b"OK", b"1.5", 4]


async def test_what_redis_refuses_is_an_answer_among_others(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with connected(server.url) as commands:
        none, wrong, fine = await commands.ask(("EVALSHA", "0" * 40, 0), ("NOSUCH", "a"), ("ECHO", "x"))
        assert (type(none), type(wrong), fine) == (NoScriptError, ResponseError, b"x")


async def test_who_gives_up_does_not_get_others_the_wrong_answer(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with connected(server.url) as commands:
        await commands.ask(("PING",))
        given_up = asyncio.create_task(commands.ask(("ECHO", "mine")))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await commands.ask(("ECHO", "yours")) == [b"yours"]


@pytest.mark.parametrize(
    "commands", [(), (("ECHO", "\ud800"),), (("ECHO", "first"), ("ECHO", None))], ids=["none", "no text", "no value"]
)
async def test_what_can_not_be_sent_takes_nobodys_answer(
    server: RedisServer, client: redis.asyncio.Redis, commands: Any
) -> None:
    """It waited for an answer all the same, and got that of the next who asked."""
    async with connected(server.url, timeout_s=1.0) as commands:
        with contextlib.suppress(TypeError, ValueError):
            assert await commands.ask(*commands) == []
        asked = [commands.ask(("ECHO", str(number))) for number in range(3)]
        assert await asyncio.gather(*asked) == [[b"0"], [b"1"], [b"2"]]


async def test_what_is_too_long_is_refused_and_others_do_not_notice(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with connected(server.url) as commands:
        [mine] = await commands.ask(("CLIENT", "ID"))
        asked = [
            commands.ask(("ECHO", "a")),
            commands.ask(("SET", "a", "1"), ("SET", "a", "x" * MAX_SENT_BYTES)),
            commands.ask(("ECHO", "b")),
        ]
        first, refusal, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (first, last) == ([b"a"], [b"b"])
        assert isinstance(refusal, ValueError)
        assert "too long for the connection for short commands" in str(refusal)
        assert await commands.ask(("CLIENT", "ID"), ("EXISTS", "a")) == [mine, 0]


async def test_a_connection_that_broke_is_made_again(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with connected(server.url) as commands:
        [mine] = await commands.ask(("CLIENT", "ID"))
        await client.client_kill_filter(_id=str(mine))
        await asyncio.sleep(0.05)
        [other] = await commands.ask(("CLIENT", "ID"))
        assert other != mine, "one that had broken before costs no retry"


async def test_what_a_broken_connection_left_is_sent_again_as_often_as_was_agreed(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with garbling(server, Once(b"+one", b"?one")) as url, connected(url, retries=1) as commands:
        assert await commands.ask(("EVAL", "return redis.status_reply('one')", 0)) == [b"one"]
    async with garbling(server, Once(b"+one", b"?one")) as url, connected(url) as commands:
        with pytest.raises(ConnectionError, match="no answer"):
            await commands.ask(("EVAL", "return redis.status_reply('one')", 0))
        assert await commands.ask(("ECHO", "x")) == [b"x"]


@pytest.mark.parametrize("bad", [b":zz\r\n", b"*1\r\n" * 5000], ids=["no number", "too deep"])
async def test_bytes_that_are_no_answer_end_the_connection(
    server: RedisServer, client: redis.asyncio.Redis, bad: bytes
) -> None:
    async with garbling(server, Once(b":5\r\n", bad)) as url, connected(url) as commands:
        waiting = [commands.ask(("STRLEN", "x"), ("EVAL", "return 5", 0)) for _ in range(3)]
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(end) for end in ends} == {ConnectionError}, "whose answers are whose is not known any more"
        assert await commands.ask(("ECHO", "x")) == [b"x"]


async def test_an_answer_that_nobody_asked_for_is_nobodys(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with garbling(server, Once(b"$1\r\na\r\n", b"$1\r\na\r\n$1\r\nz\r\n")) as url, connected(url) as commands:
        assert await commands.ask(("ECHO", "a")) == [b"a"]
        assert await commands.ask(("ECHO", "b")) == [b"b"]


async def test_a_redis_that_does_not_answer_is_given_up_in_time(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with connected(server.url, timeout_s=0.3) as commands:
        await commands.ask(("PING",))
        await client.client_pause(1500)
        began = time.monotonic()
        ends = await asyncio.gather(
            commands.ask(("SET", "a", 1)), commands.ask(("SET", "b", 1)), return_exceptions=True
        )
        assert {type(end) for end in ends} == {TimeoutError}
        assert time.monotonic() - began < 1.2
        await client.client_unpause()
        assert await commands.ask(("ECHO", "x")) == [b"x"]


def test_an_answer_is_taken_that_came_while_the_event_loop_was_held_up(server: RedisServer) -> None:
    async def held_up() -> list[object]:
        async with connected(server.url, timeout_s=0.2) as commands:
            await commands.ask(("PING",))
            asking = asyncio.ensure_future(commands.ask(("ECHO", "x")))
            await asyncio.sleep(0)
            time.sleep(0.4)
            return await asking

    assert uvloop.run(held_up()) == [b"x"]


async def test_a_place_without_redis_is_named_and_not_dialled_all_the_time(tmp_path: object) -> None:
    async with connected(f"unix://{tmp_path}/none.sock") as commands:
        with pytest.raises(ConnectionError, match=r"no connection to .*none\.sock: No such file"):
            await commands.ask(("PING",))
        with pytest.raises(ConnectionError, match="not tried again yet"):
            await commands.ask(("PING",))


async def test_a_wrong_password_is_told(server: RedisServer, client: redis.asyncio.Redis) -> None:
    async with connected(server.url.replace("unix://", "unix://somebody:wrong@")) as commands:
        with pytest.raises((AuthenticationError, ResponseError)):
            await commands.ask(("PING",))


async def test_a_replica_that_was_the_master_ends_the_connection(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    async with connected(server.url) as commands:
        await commands.ask(("SET", "a", 1))
        await client.replicaof("127.0.0.1", 1)
        try:
            for command in (("SET", "a", 2), ("EVAL", "return redis.call('SET', KEYS[1], 2)", 1, "a")):
                with pytest.raises(ConnectionError, match="replica"):
                    await commands.ask(command)
        finally:
            await client.replicaof("no", "one")


async def test_a_client_that_is_closed_while_it_connects_has_no_connection_either(
    server: RedisServer, client: redis.asyncio.Redis
) -> None:
    before = len(await connections_of(client))
    other = connect(server.url, timeout_s=5.0, retries=0)
    asking = asyncio.ensure_future(short_commands_of(other).ask(("PING",)))
    await asyncio.sleep(0)
    await other.aclose()
    with pytest.raises(ConnectionError):
        await asking
    await asyncio.sleep(0.05)
    assert len(await connections_of(client)) == before


@pytest.mark.parametrize("num_asking", [1, 3])
@pytest.mark.parametrize("sent", [False, True], ids=["while it connects", "while Redis has the command"])
async def test_what_waits_when_its_client_is_closed_makes_no_connection_again(
    server: RedisServer, client: redis.asyncio.Redis, num_asking: int, sent: bool
) -> None:
    """Its retry made one that nobody closed."""
    before = len(await connections_of(client))
    other = connect(server.url, timeout_s=5.0, retries=1)
    commands = short_commands_of(other)
    if sent:
        await commands.ask(("PING",))
        await client.client_pause(200)
    asking = [asyncio.ensure_future(commands.ask(("SET", "a", 1))) for _ in range(num_asking)]
    await asyncio.sleep(0.02 if sent else 0)
    await other.aclose()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(end) for end in ends} == {ConnectionError}
    await asyncio.sleep(0.3)
    assert len(await connections_of(client)) == before


async def test_a_closed_client_has_no_connection(server: RedisServer, client: redis.asyncio.Redis) -> None:
    before = len(await connections_of(client))
    async with connected(server.url) as commands:
        await commands.ask(("PING",))
    await asyncio.sleep(0.05)
    assert len(await connections_of(client)) == before
