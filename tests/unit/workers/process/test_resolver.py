"""Names: a lookup that hangs or fails holds up nobody else, and what was found before is used meanwhile."""

from __future__ import annotations

import _thread
import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.process import resolver
from workers.process.resolver import MAX_THREADS_OF_NAME, Resolver, connect_tcp, first_connected

WELL_WITHIN_S = 10.0

ENDS_WITH_A_HUNG_LOOKUP = """
import asyncio, socket, time
import uvloop
from workers.process.resolver import connect_tcp

socket.getaddrinfo = lambda *_, **options: time.sleep(60)

async def main():
    for _ in range(3):
        try:
            async with asyncio.timeout(0.1):
                await connect_tcp(asyncio.Protocol, "hung.test", 80)
        except TimeoutError:
            print("gave up")

uvloop.run(main())
"""


@dataclass
class NameServer:
    """Stands for `socket.getaddrinfo`. What it knows changes in the middle of a test."""

    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    error: int = socket.EAI_AGAIN
    """What it says of any other name."""
    hung: set[str] = field(default_factory=set)
    """Names for which it says nothing until `healed`."""
    healed: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)

    def getaddrinfo(self, host: str, port: None, **_: Any) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host in self.hung:
            assert self.healed.wait(60)
        if host not in self.addresses:
            raise socket.gaierror(self.error, "said so")
        kinds = (socket.SOCK_STREAM, socket.SOCK_STREAM)  # systems may list an address once per kind of socket
        return [(socket.AF_INET, kind, 6, "", (at, port)) for at in self.addresses[host] for kind in kinds]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    made = NameServer({"a.test": ("127.0.0.1",), "b.test": ("127.0.0.2", "127.0.0.3")})
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.healed.set()


@pytest.fixture
def names(server: NameServer) -> Resolver:
    return Resolver()


async def gives_up(names: Resolver, host: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await names.addresses(host)


async def test_a_numeric_address_is_not_looked_up(server: NameServer, names: Resolver) -> None:
    for address in ("127.0.0.1", "::1", "fe80::1%lo"):
        assert await names.addresses(address) == (address,)
    assert server.asked == []


async def test_a_hung_name_has_one_lookup_and_holds_up_no_other(server: NameServer, names: Resolver) -> None:
    server.hung.add("a.test")
    for _ in range(20):
        await gives_up(names, "a.test")
    async with asyncio.timeout(WELL_WITHIN_S):
        assert await names.addresses("b.test") == ("127.0.0.2", "127.0.0.3")
        waiting = asyncio.gather(*(names.addresses("a.test") for _ in range(5)))
        await asyncio.sleep(0)
        server.healed.set()
        assert await waiting == [("127.0.0.1",)] * 5
    assert server.asked == ["a.test", "b.test"]


async def test_while_a_name_hangs_it_is_where_it_was(server: NameServer, names: Resolver) -> None:
    assert await names.addresses("a.test") == ("127.0.0.1",)
    server.hung.add("a.test")
    server.addresses["a.test"] = ("127.0.0.9",)
    async with asyncio.timeout(WELL_WITHIN_S):
        for _ in range(3):
            assert await names.addresses("a.test") == ("127.0.0.1",)
    assert server.asked == ["a.test", "a.test"]
    server.healed.set()
    async with asyncio.timeout(WELL_WITHIN_S):
        while await names.addresses("a.test") != ("127.0.0.9",):
            pass


async def test_a_lookup_that_never_returns_does_not_keep_its_name_for_ever(
    server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server has forgotten the question, and would answer the next one."""
    monkeypatch.setattr(resolver, "AGAIN_S", 0.05)
    server.hung.add("a.test")
    await gives_up(names, "a.test")
    server.hung.clear()
    await asyncio.sleep(0.1)
    async with asyncio.timeout(WELL_WITHIN_S):
        assert await names.addresses("a.test") == ("127.0.0.1",)
        assert await names.addresses("a.test") == ("127.0.0.1",)
    assert server.asked == ["a.test"] * 3


async def test_a_name_that_hangs_again_and_again_has_few_threads(
    server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "AGAIN_S", 0.05)
    monkeypatch.setattr(resolver, "LATE_S", 0.01)
    assert await names.addresses("a.test") == ("127.0.0.1",)
    server.hung.add("a.test")
    for _ in range(20):
        assert await names.addresses("a.test") == ("127.0.0.1",)
        await asyncio.sleep(0.03)
    assert server.asked == ["a.test"] * (1 + MAX_THREADS_OF_NAME)
    server.addresses["a.test"] = ("127.0.0.9",)
    server.healed.set()
    async with asyncio.timeout(WELL_WITHIN_S):
        while await names.addresses("a.test") != ("127.0.0.9",):
            pass


async def test_a_lookup_that_only_waits_for_a_thread_is_not_begun_again(
    server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "AGAIN_S", 0.01)
    monkeypatch.setattr(resolver, "MAX_THREADS", 1)
    server.hung.add("b.test")
    for _ in range(3):
        await gives_up(names, "b.test")
    for _ in range(5):
        await gives_up(names, "a.test")
    server.healed.set()
    async with asyncio.timeout(WELL_WITHIN_S):
        assert await names.addresses("a.test") == ("127.0.0.1",)
    assert server.asked.count("a.test") == 1


async def test_only_the_first_who_asks_for_a_hung_name_waits(
    server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Sentinel is asked for half a second in all."""
    await names.addresses("a.test")
    server.hung.add("a.test")
    monkeypatch.setattr(resolver, "LATE_S", 0.5)
    began_at = time.monotonic()
    for _ in range(20):
        await names.addresses("a.test")
    assert 0.5 <= time.monotonic() - began_at < WELL_WITHIN_S / 2  # each for itself: ten seconds


async def test_a_name_that_can_not_be_looked_up_is_where_it_was(server: NameServer, names: Resolver) -> None:
    assert await names.addresses("a.test") == ("127.0.0.1",)
    del server.addresses["a.test"]
    assert await names.addresses("a.test") == ("127.0.0.1",)
    with pytest.raises(socket.gaierror, match="said so"):
        await names.addresses("never-found.test")


@pytest.mark.parametrize("error", resolver.NO_SUCH_NAME)
async def test_a_name_that_is_gone_is_nowhere(server: NameServer, names: Resolver, error: int) -> None:
    assert await names.addresses("a.test") == ("127.0.0.1",)
    del server.addresses["a.test"]
    server.error = error
    with pytest.raises(socket.gaierror):
        await names.addresses("a.test")
    server.error = socket.EAI_AGAIN
    with pytest.raises(socket.gaierror):
        await names.addresses("a.test")


async def test_more_names_than_threads_wait(
    server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "MAX_THREADS", 2)
    hosts = [f"{number}.test" for number in range(6)]
    server.addresses = dict.fromkeys(hosts, ("127.0.0.1",))
    server.hung.update(hosts)
    for host in hosts:
        await gives_up(names, host)
    assert len(server.asked) <= 2
    server.healed.set()
    async with asyncio.timeout(WELL_WITHIN_S):
        assert await asyncio.gather(*map(names.addresses, hosts)) == [("127.0.0.1",)] * 6


async def test_it_remembers_so_many_names(server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MAX_NAMES", 1)
    await names.addresses("a.test")
    await names.addresses("b.test")
    server.addresses.clear()
    assert await names.addresses("b.test")
    with pytest.raises(socket.gaierror):
        await names.addresses("a.test")


async def test_it_goes_on_where_no_thread_can_be_started(
    server: NameServer, names: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(OSError, match=r"no thread can be started to look up 'a\.test'"):
            await names.addresses("a.test")
    assert await names.addresses("a.test") == ("127.0.0.1",)


@pytest.mark.parametrize("host", ["a..test", "x" * 64 + ".test"])
async def test_what_can_be_no_name_is_an_ordinary_failure(host: str) -> None:
    with pytest.raises(OSError, match="no name of a host"):
        await Resolver().addresses(host)


async def test_each_address_is_tried(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "RESOLVER", Resolver())
    server.addresses["both.test"] = ("127.0.0.2", "127.0.0.1")
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        transport, _ = await connect_tcp(asyncio.Protocol, "both.test", port)
        assert transport.get_extra_info("peername") == ("127.0.0.1", port)
        transport.abort()
    with pytest.raises(ConnectionRefusedError):
        await connect_tcp(asyncio.Protocol, "both.test", port)


async def test_different_failures_are_told_together() -> None:
    failures: dict[str, Callable[[], OSError]] = {
        "::1": lambda: OSError(101, "unreachable"),
        "127.0.0.1": lambda: ConnectionRefusedError(111, "refused"),
    }

    async def connect(address: str) -> None:
        raise failures[address]()

    with pytest.raises(OSError, match=r"::1: .*unreachable; 127\.0\.0\.1: .*refused"):
        await first_connected(tuple(failures), connect)


def test_a_process_ends_while_a_lookup_hangs() -> None:
    command = [sys.executable, "-c", ENDS_WITH_A_HUNG_LOOKUP]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    assert ended.stdout == "gave up\n" * 3
