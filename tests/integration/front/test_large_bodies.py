"""Large bodies beside a stream of another team: refused before anything of them is decoded, in bounded memory."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import psutil
import pytest

from accounts.protocol.records import digest
from tests.support.caller import Caller, Stream, calling, taken
from tests.support.large_bodies import CHAT, LARGE_BODIES, LargeBody
from tests.support.stack import Process, Stack
from tests.support.waiting import until

ATTACKER_KEY = "pk-large-0123456789abcdef"
ATTACKER = {"name": "large", "team": "large", "sha256": digest(ATTACKER_KEY)}
MAX_BODY_BYTES = 8 << 20
MAX_GAP_S = 1.5
"""On a machine that others load; these bodies took the process from everybody for 5 to 40 s."""
MAX_ADDED_BYTES = 256 << 20


@pytest.fixture(scope="module")
def large_gateway(stack: Stack) -> Iterator[Process]:
    """A gateway that takes bodies of the default size."""
    process = stack.gateway(api_keys=json.dumps([ATTACKER]), max_body_bytes=MAX_BODY_BYTES, queue_timeout_s=30)
    yield process
    process.stop()
    stack.gateways.remove(process)


@pytest.fixture
async def attacker(large_gateway: Process) -> AsyncIterator[Caller]:
    async with calling(large_gateway.url, ATTACKER_KEY, "quick") as asking:
        yield asking


@pytest.fixture
async def victim(stack: Stack, large_gateway: Process) -> AsyncIterator[Caller]:
    async with calling(large_gateway.url, stack.key, "slow") as asking:
        yield asking


class Memory:
    """The largest resident size of a process while the block runs."""

    def __init__(self, process: Process) -> None:
        self._process = psutil.Process(process.pid)
        self.quiet = self.most = self.now()

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            await asyncio.sleep(0.02)

    def check(self) -> None:
        assert self.most <= 2 * self.quiet + MAX_ADDED_BYTES, f"{self.most >> 20} MiB, before {self.quiet >> 20}"

    def now(self) -> int:
        return int(self._process.memory_info().rss)


async def post(attacker: Caller, path: str, body: bytes) -> tuple[int, str]:
    """Return status and answer."""
    headers = {"content-type": "application/json"}
    async with attacker.session.post(attacker.url + path, data=io.BytesIO(body), headers=headers) as response:
        return response.status, await response.text()


async def test_memory_goes_back(attacker: Caller, large_gateway: Process) -> None:
    """What is refused leaves nothing behind, and what is answered neither."""
    memory = Memory(large_gateway)
    bodies = [(large.path, large.of(MAX_BODY_BYTES)) for large in LARGE_BODIES[::4]]
    text = json.dumps({"model": "quick", "messages": [{"role": "user", "content": "x" * (MAX_BODY_BYTES - 1000)}]})
    for path, body in [*bodies, (CHAT, text.encode())]:
        await asyncio.gather(*(post(attacker, path, body) for _ in range(2)))
    await until(lambda: memory.now() <= memory.quiet + (48 << 20), 15.0, "memory is back")


def longest_gap_s(stream: Stream) -> float:
    return max(after - before for before, after in zip(stream.arrived, stream.arrived[1:], strict=False))


@pytest.mark.parametrize("large", LARGE_BODIES, ids=lambda large: large.name)
async def test_costs_others_nothing(attacker: Caller, victim: Caller, large_gateway: Process, large: LargeBody) -> None:
    body, memory = large.of(MAX_BODY_BYTES), Memory(large_gateway)
    watching = asyncio.create_task(memory.watch())
    async with victim.stream(max_tokens=80) as stream:
        await stream.until_text()
        reading = asyncio.create_task(stream.finish())
        began = time.monotonic()
        answers = await asyncio.gather(*(post(attacker, large.path, body) for _ in range(4)), return_exceptions=True)
        took_s = time.monotonic() - began
        await reading
    watching.cancel()
    statuses = [answer[0] for answer in answers if isinstance(answer, tuple)]
    assert set(statuses) <= {400, 429}, answers
    assert 400 in statuses
    assert all(not isinstance(answer, BaseException) or isinstance(answer, aiohttp.ClientError) for answer in answers)
    assert stream.done
    assert stream.error is None
    assert longest_gap_s(stream) < MAX_GAP_S
    assert took_s < 15.0
    memory.check()


async def test_waiting_calls_hold_a_bounded_part_of_memory(
    attacker: Caller, victim: Caller, large_gateway: Process
) -> None:
    """Forty calls that wait with half a million tokens each: most are told to wait outside."""
    memory = Memory(large_gateway)
    watching = asyncio.create_task(memory.watch())
    tokens = ",".join(str(30_000 + number % 9_000) for number in range(30_000))
    body = f'{{"model":"slow","max_tokens":1,"prompt":[{",".join([f"[{tokens}]"] * 17)}]}}'.encode()
    async with taken(victim, 2):
        asking = [asyncio.create_task(post(attacker, "/v1/completions", body)) for _ in range(40)]
        await asyncio.sleep(2.0)
        async with victim.stream(max_tokens=2) as stream:
            assert stream.status == 200
        for one in asking:
            one.cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
    watching.cancel()
    statuses = [answer[0] for answer in answers if isinstance(answer, tuple)]
    assert 429 in statuses
    assert set(statuses) <= {400, 429}, answers
    memory.check()
