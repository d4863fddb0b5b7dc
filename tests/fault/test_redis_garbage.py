"""Something else writes under our names in Redis: nothing that it leaves ends a gateway or keeps one from starting.

Each name that `workers/protocol/keys.py` tells of gets bytes that are no text, and something of another type.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import redis

from gateway.admission.admission import KNOWN_AFTER_S
from tests.fault.rest import at_rest
from tests.support.caller import Caller, calling
from tests.support.scrape import Scrape
from tests.support.stack import Stack
from tests.support.waiting import until
from workers.protocol import keys

MODEL, WORKER, TEAM = "pool", "w", "default"
NO_TEXT = b"\xff\xfe{\x00\x80"
SEEN_S = 0.35
"""Within it a gateway has read fleet, news and adapters, and beaten or swept with some luck."""
QUEUE_TIMEOUT_S = 15
"""Longer than it takes until a mark is gone that says without end that nothing is to be granted."""
FLEET = ("pd:models", "pd:{model}:workers")
"""Without them a gateway that has just started knows no worker."""
VITAL = ("pd:models", "pd:keys", "{pd:keys}:subjects", "pd:gateways", "pd:{model}:workers", "pd:{model}:adapters")
"""What every gateway reads again and again."""


@dataclass(frozen=True, slots=True)
class Name:
    """One key, as the list of keys has it."""

    pattern: str
    type: str

    @property
    def key(self) -> str:
        ids = WORKER if ":worker:" in self.pattern else "0123abcd"
        name = self.pattern.replace("{model}", f"{{{MODEL}}}").replace("<id>", ids).replace("<team>", TEAM)
        return name.replace("<gateway>", ids)

    def spoil(self, client: redis.Redis) -> None:
        """Puts bytes that are no text where text is."""
        match self.type:
            case "set":
                client.sadd(self.key, NO_TEXT, b"", b"a\nb", "x" * 100_000)
            case "zset":
                client.zadd(self.key, {NO_TEXT: time.time() + 60})
            case "hash":
                client.hset(self.key, mapping={NO_TEXT: NO_TEXT, "beat": NO_TEXT, "placing": NO_TEXT, "first": NO_TEXT})
            case "stream":
                client.xadd(self.key, {NO_TEXT: NO_TEXT})
            case _:
                client.set(self.key, NO_TEXT)

    def replace(self, client: redis.Redis) -> None:
        """Puts something of another type there."""
        client.delete(self.key)
        if self.type == "string":
            client.rpush(self.key, NO_TEXT)
        else:
            client.set(self.key, NO_TEXT)

    def clear(self, client: redis.Redis) -> None:
        client.delete(self.key)


def names() -> list[Name]:
    """Every key of the list, but for the channels."""
    found = re.findall(r"^    (\{?pd:\S+)\s+(set|hash|zset|string|stream)\s", keys.__doc__ or "", re.MULTILINE)
    return [Name(pattern, kind) for pattern, kind in found]


def admin(stack: Stack) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(stack.redis.socket), socket_timeout=5.0)


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[Stack, Caller]]:
    """A gateway that knows its share, and a worker."""
    with Stack() as stack:
        flags = ("--step-ms", "5", "--tokens", "1000000", "--ctx", "1000000")
        stack.fake_worker(MODEL, *flags, worker_id=WORKER, slots=16)
        gateway = stack.gateway(queue_timeout_s=QUEUE_TIMEOUT_S)
        await asyncio.sleep(KNOWN_AFTER_S + 2 * keys.GATEWAY_INTERVAL_S)
        async with calling(gateway.url, stack.key, MODEL) as caller:
            yield stack, caller


async def answers(caller: Caller, what: str) -> None:
    status, body = await caller.whole(max_tokens=3)
    assert status == 200, f"{what}: {status} {body}"


async def unharmed(stack: Stack, caller: Caller, given: list[Name], spoil: bool) -> None:
    """Spoils these one after the other, each for a moment; calls are answered, and a stream beside them goes on."""
    client = admin(stack)
    async with caller.stream(max_tokens=1_000_000) as stream:
        await stream.until_text()
        reading = asyncio.create_task(stream.finish())
        for name in given:
            what = f"{name.key} of another type" if not spoil else f"garbage in {name.key}"
            (name.spoil if spoil else name.replace)(client)
            await asyncio.sleep(SEEN_S)
            await answers(caller, what)
            name.clear(client)
            for gateway in stack.gateways:
                assert gateway.popen.poll() is None, what
        assert not reading.done(), stream.error
        reading.cancel()
        await asyncio.wait([reading])
        assert max(b - a for a, b in zip(stream.arrived, stream.arrived[1:], strict=False)) < 2.0


async def unread(caller: Caller, given: list[Name]) -> list[Name]:
    """Return those that the gateway has not yet counted as unreadable."""
    async with caller.session.get(f"{caller.url}/metrics") as response:
        page = Scrape(await response.text())
    return [name for name in given if not page.value("paddock_redis_unreadable_total", key=name.pattern)]


async def healed(stack: Stack, caller: Caller) -> None:
    """Once it is gone, everything is as before."""
    async with asyncio.timeout(15):
        while True:
            async with caller.session.get(f"{caller.url}/ready") as response:
                if response.status == 200 and (await response.json())["status"] == "ready":
                    break
            await asyncio.sleep(0.05)
    await answers(caller, "afterwards")
    await at_rest(stack, MODEL, within_s=15)


async def test_a_gateway_that_runs_goes_on_and_says_what_it_left_out() -> None:
    async with fleet() as (stack, caller):
        vital = [name for name in names() if name.pattern in VITAL]
        assert len(vital) == len(VITAL)
        for name in vital:
            name.spoil(admin(stack))
        await unharmed(stack, caller, [vital[0]], spoil=True)
        gateway = stack.gateways[0]
        async with asyncio.timeout(30):  # keys are read again three seconds later, or more on a machine under load
            while missing := await unread(caller, vital):
                for name in missing:
                    name.spoil(admin(stack))  # what is set right before it is read is not counted
                await asyncio.sleep(SEEN_S)
        lines = [line for line in gateway.text().splitlines() if "is left out" in line]
        assert len(lines) == len(set(lines)) <= 4 * len(vital), "each is told once"
        assert "Traceback" not in gateway.text()
        for name in vital:
            name.clear(admin(stack))
        await healed(stack, caller)


async def test_a_gateway_starts_among_garbage() -> None:
    with Stack() as stack:
        stack.fake_worker(MODEL, "--tokens", "1000", worker_id=WORKER)
        for name in names():
            if name.key != keys.worker_leases(MODEL, WORKER):  # garbage there holds one of its slots, truly
                name.clear(admin(stack))
            name.spoil(admin(stack))
        gateway = stack.gateway(queue_timeout_s=QUEUE_TIMEOUT_S)
        async with calling(gateway.url, stack.key, MODEL) as caller:
            await answers(caller, "a start among garbage")
        assert gateway.popen.poll() is None


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spoil", [True, False], ids=["garbage", "another type"])
async def test_no_name_ends_a_gateway_that_runs(spoil: bool) -> None:
    async with fleet() as (stack, caller):
        await unharmed(stack, caller, names(), spoil)
        await healed(stack, caller)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_no_name_of_another_type_keeps_a_gateway_from_starting() -> None:
    async with fleet() as (stack, _):
        for name in names():
            name.replace(admin(stack))
            gateway = stack.gateway(wait=False)
            if name.pattern in FLEET:
                await until(lambda process=gateway: "gateway ready" in process.text(), 20, name.key)  # type: ignore[misc]
                name.clear(admin(stack))
            stack.wait_until_ready(gateway, 20)
            name.clear(admin(stack))
            assert gateway.stop() == 0, name
            stack.gateways.remove(gateway)
