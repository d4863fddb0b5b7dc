"""Requests over kept connections: which connection one gets, and how one ends whatever the server does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from gateway.relay import posts
from gateway.relay.posts import PostBroken, Posts, Reply
from gateway.relay.relay import Relay
from tests.support.pool import heartbeat

OK = b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\nok"
Answer = Callable[[bytes, int], bytes | None]
"""What the server sends for a request, given its body and how many came before it; None: it closes the connection."""


class Server:
    """Answers requests as it is told, and remembers which connection each came over."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.ways: list[int] = []
        self.num_connections = 0
        self.came = asyncio.Event()
        """Set once a request has come."""
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        way = self.num_connections
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                said = self.answer(body, len(self.bodies))
                self.heads.append(head)
                self.bodies.append(body)
                self.ways.append(way)
                self.came.set()
                if said is None:
                    break
                writer.write(said)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Server, Posts]]:
    server = Server(answer)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        client = Posts(f"http://127.0.0.1:{port}", {"Authorization": "Bearer t"}, 1.0)
        try:
            yield server, client
        finally:
            client.close()
            for writer in server.writers:
                writer.close()


async def sent(client: Posts, body: bytes = b"{}", timeout_s: float = 5.0, max_bytes: int = 1000) -> Reply:
    return await client.post("/v1/submit", body, len(body), timeout_s, max_bytes)


async def test_a_connection_is_used_again_and_as_many_are_made_as_are_needed_at_once() -> None:
    async with serving(lambda body, _: OK) as (server, client):
        assert [await sent(client, b"%d" % number) for number in range(3)] == [Reply(202, b"ok")] * 3
        assert (server.ways, server.bodies) == ([1, 1, 1], [b"0", b"1", b"2"])
        assert b"POST /v1/submit HTTP/1.1\r\n" in server.heads[0]
        assert b"authorization: bearer t\r\n" in server.heads[0].lower()
        await asyncio.gather(*(sent(client) for _ in range(5)))
        assert server.num_connections == 5
        await asyncio.gather(*(sent(client) for _ in range(5)))
        assert server.num_connections == 5


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (
            b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            Reply(503, b"abcde"),
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Reply(204, b"")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\nx", Reply(200, b"x")),
    ],
)
async def test_any_response_is_a_reply(said: bytes, reply: Reply) -> None:
    async with serving(lambda body, _: said) as (server, client):
        assert await sent(client) == reply
        assert await sent(client) == reply
        assert server.num_connections == (2 if b"close" in said else 1)


@pytest.mark.parametrize(
    "before",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n",
    ],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_what_a_proxy_says_meanwhile_is_no_reply(before: bytes, apart: bool) -> None:
    async with serving(lambda body, _: before if apart else before + OK) as (server, client):
        for _ in range(2):
            server.came.clear()
            posting = asyncio.create_task(sent(client))
            if apart:
                await server.came.wait()
                await asyncio.sleep(0.02)
                server.writers[0].write(OK)
            assert await posting == Reply(202, b"ok")
        assert server.ways == [1, 1]


@pytest.mark.parametrize("behind", [OK, b"HTTP/1.1 200 OK\r\ncontent-le", b"H"])
async def test_what_comes_behind_a_response_is_not_the_next_ones(behind: bytes) -> None:
    async with serving(lambda body, number: OK if number else OK + behind) as (server, client):
        assert await sent(client) == Reply(202, b"ok")
        assert await sent(client) == Reply(202, b"ok")
        assert server.ways == [1, 2]


async def test_a_server_that_changes_the_protocol_breaks_the_post() -> None:
    said = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n"
    async with serving(lambda body, _: said) as (_, client):
        with pytest.raises(PostBroken, match="not HTTP"):
            await sent(client, timeout_s=1.0)


@pytest.mark.parametrize(
    "said", [b"NOT HTTP AT ALL\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", None, b"HTTP/1.1 2"]
)
async def test_what_is_no_whole_response_breaks_the_post(said: bytes | None) -> None:
    async with serving(lambda body, _: said) as (server, client):
        posting = asyncio.create_task(sent(client))
        await server.came.wait()
        await asyncio.sleep(0.01)
        server.writers[0].close()
        with pytest.raises(PostBroken):
            await posting


async def test_a_reply_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "MAX_HEAD_BYTES", 1000)
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000
    async with serving(lambda body, _: said) as (_, client):
        with pytest.raises(PostBroken, match="too long"):
            await sent(client)


async def test_a_kept_connection_that_breaks_unheard_is_replaced_once() -> None:
    """A worker may close it as it is used. A submit or a cancellation that comes twice has no further effect."""
    async with serving(lambda body, number: None if number == 1 else OK) as (server, client):
        await sent(client, b"first")
        assert await sent(client, b"second") == Reply(202, b"ok")
        assert server.bodies == [b"first", b"second", b"second"]
    async with serving(lambda body, number: None if number else OK) as (server, client):
        await sent(client, b"first")
        with pytest.raises(PostBroken):
            await sent(client, b"second")
        assert server.bodies == [b"first", b"second", b"second"]


async def test_a_connection_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "KEPT_S", 0.05)
    async with serving(lambda body, _: OK) as (server, client):
        await sent(client)
        await asyncio.sleep(0.1)
        await sent(client)
        assert server.ways == [1, 2]


async def test_who_gives_up_leaves_no_answer_to_the_next() -> None:
    async with serving(lambda body, number: OK if body == b"next" else b"") as (server, client):
        posting = asyncio.create_task(sent(client, b"given up"))
        await server.came.wait()
        posting.cancel()
        server.writers[0].write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        assert await sent(client, b"next") == Reply(202, b"ok")
        assert server.ways == [1, 2]
        with pytest.raises(TimeoutError):
            await sent(client, b"never answered", timeout_s=0.1)


async def test_a_connection_in_use_at_the_end_is_not_kept() -> None:
    """It stayed open to a worker that the gateway had no more to do with, until the worker closed it."""
    async with serving(lambda body, number: b"") as (server, client):
        posting = asyncio.create_task(sent(client))
        await server.came.wait()
        client.close()
        server.writers[0].write(OK)
        assert await posting == Reply(202, b"ok")
        async with asyncio.timeout(3):
            await server.writers[0].wait_closed()


async def test_a_connection_that_ended_leaves_nothing_for_the_cycle_collector() -> None:
    made: list[weakref.ref[asyncio.BaseProtocol]] = []

    class Noted(posts._Connection):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    said = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(posts, "_Connection", Noted)
        gc.collect()
        gc.disable()
        try:
            async with serving(lambda body, number: said if number % 2 else b"") as (_, client):
                with pytest.raises(TimeoutError):
                    await sent(client, timeout_s=0.1)
                assert await sent(client) == Reply(202, b"ok")
                await asyncio.sleep(0.1)
                assert [ref() for ref in made] == [None, None]
        finally:
            gc.enable()


async def test_what_comes_unasked_ends_a_kept_connection() -> None:
    async with serving(lambda body, _: OK) as (server, client):
        await sent(client)
        server.writers[0].write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await asyncio.sleep(0.05)
        assert await sent(client) == Reply(202, b"ok")
        assert server.ways == [1, 2]


async def test_a_long_body_is_sent_in_pieces_as_the_server_reads() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(200):
            yield b"%d" % (number % 10) * 50_000

    async with serving(lambda body, _: OK) as (server, client):
        assert await client.post("/v1/submit", pieces(), 10_000_000, 10.0, 1000) == Reply(202, b"ok")
        assert server.bodies == [b"".join(b"%d" % (number % 10) * 50_000 for number in range(200))]
        await sent(client)
        assert server.ways == [1, 1]


async def test_a_body_that_is_refused_early_is_not_sent_on() -> None:
    made, ended = 0, asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal made
        for _ in range(1000):
            made += 1
            yield b"x" * 100_000

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await ended.wait()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        client = Posts(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {}, 1.0)
        async with asyncio.timeout(3):
            assert await client.post("/v1/submit", pieces(), 100_000_000, 10.0, 1000) == Reply(413, b"")
        assert made < 500
        ended.set()
        await asyncio.sleep(0.05)


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConnectionRefusedError):
        await sent(Posts("http://127.0.0.1:9", {}, 1.0))


@pytest.mark.parametrize("url", ["http://host:99999", "http://host:abc", "http://[bad:80", "http://a..ü:80", ""])
async def test_an_address_that_is_none_fails_only_the_posts_to_it(url: str) -> None:
    """Every gateway that started while one worker told such an address ended."""
    with pytest.raises(OSError, match="no address"):
        await sent(Posts(url, {}, 1.0))
    relay = Relay("g", "secret", 10)
    relay.follow([msgspec.structs.replace(heartbeat("w1"), address=url)])
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0.05)
    relay.follow([msgspec.structs.replace(heartbeat(name), address=url) for name in ("w1", "w2")])
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_a_name_of_any_script_is_sent_as_dns_has_it() -> None:
    assert posts._server_of("http://wörker.example:81") == (
        "xn--wrker-jua.example:81",
        "xn--wrker-jua.example",
        81,
        False,
    )
    assert posts._server_of("https://[::1]") == ("[::1]", "::1", 443, True)
