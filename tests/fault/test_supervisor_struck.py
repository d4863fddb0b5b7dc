"""The supervisor and `paddock up` killed and stopped, over true workers with the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import psutil
import pytest

from tests.fault.rest import at_rest
from tests.integration.supervisor.conftest import Program, Programs, programs
from tests.support.caller import Caller, Stream, calling
from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

__all__ = ["programs"]

MODEL = "demo"
SETTINGS = {"model": DEMO_MODEL, "alias": MODEL, "workers": 1, "slots": 1, "ctx": 2048, "llama": '{"n_threads": 1}'}
TOKENS = 500
"""A second and more."""


@dataclass(slots=True)
class Site:
    stack: Stack
    caller: Caller
    supervisors: list[Process] = field(default_factory=list)

    def start(self) -> Process:
        environment = {f"PADDOCK_{name.upper()}": str(value) for name, value in SETTINGS.items()}
        name, command = f"supervisor-{len(self.supervisors)}", [sys.executable, "-m", "gateway.cli", "supervisor"]
        self.supervisors.append(self.stack.spawn(name, command, environment, "supervisor"))
        return self.supervisors[-1]

    def worker(self) -> psutil.Process:
        family = psutil.Process(self.supervisors[-1].pid).children(recursive=True)
        return next(process for process in family if process.cmdline()[-1:] == ["worker"])


@asynccontextmanager
async def site(stack: Stack) -> AsyncIterator[Site]:
    gateway = stack.gateway(wait=False)
    async with calling(gateway.url, stack.key, MODEL) as caller:
        running = Site(stack, caller)
        running.start()
        await asyncio.to_thread(stack.wait_until_ready, gateway)
        yield running
        await at_rest(stack, MODEL, within_s=keys.LEASE_TTL_S)


def story(caller: Caller, tokens: int = TOKENS) -> contextlib.AbstractAsyncContextManager[Stream]:
    return caller.stream("Tell me.", max_tokens=tokens, ignore_eos=True)


async def answer(caller: Caller) -> tuple[int, int]:
    """Status and tokens of a short call."""
    status, body = await caller.whole("Tell me.", max_tokens=8, ignore_eos=True)
    return status, body.get("usage", {}).get("completion_tokens", 0)


@pytest.mark.long
async def test_killed(stack: Stack) -> None:
    """Its worker ends with it: who streams is told, who waits is served by the next supervisor's worker."""
    async with site(stack) as running, story(running.caller) as stream:
        await stream.until_text()
        waiting = asyncio.create_task(answer(running.caller))
        await asyncio.sleep(0.1)
        worker = running.worker()
        running.supervisors[0].kill()
        struck = time.monotonic()
        await asyncio.wait_for(stream.finish(), 5.0)
        told_s = time.monotonic() - struck
        assert stream.error is not None
        assert stream.error["code"] == "worker_lost"
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        running.start()
        assert await asyncio.wait_for(waiting, 30.0) == (200, 8)
        print(
            f"\nsupervisor killed: told after {told_s:.2f} s, the waiting one answered after "
            f"{time.monotonic() - struck:.1f} s"
        )


@pytest.mark.long
async def test_stopped(stack: Stack) -> None:
    """Calls do not need it. A worker that dies meanwhile is started again when it goes on."""
    async with site(stack) as running:
        async with story(running.caller) as stream:
            await stream.until_text()
            running.supervisors[0].signal(signal.SIGSTOP)
            await asyncio.wait_for(stream.finish(), 60.0)
        assert stream.error is None
        assert stream.usage is not None
        assert stream.usage["completion_tokens"] == TOKENS
        assert await answer(running.caller) == (200, 8)
        running.worker().kill()
        waiting = asyncio.create_task(answer(running.caller))
        await asyncio.sleep(2.0)
        assert not waiting.done()
        running.supervisors[0].signal(signal.SIGCONT)
        assert await asyncio.wait_for(waiting, 30.0) == (200, 8)


@pytest.mark.long
async def test_up_killed(programs: Programs) -> None:
    """Nothing of it is left; the next one serves the same key."""
    up = start_up(programs)
    key = (up.state / "first-key").read_text().strip()
    async with calling(address_of(up), key, MODEL) as caller, story(caller) as stream:
        await stream.until_text()
        up.family()
        up.popen.kill()
        with contextlib.suppress(aiohttp.ClientError):
            await asyncio.wait_for(stream.finish(), 5.0)
        assert not stream.done
        await until(lambda: not up.survivors(), 5.0, "nothing of it runs")
    after = start_up(programs)
    async with calling(address_of(after), key, MODEL) as caller:
        assert await answer(caller) == (200, 8)
    assert after.stop(signal.SIGINT) == 0


def start_up(programs: Programs) -> Program:
    flags = [word for name, value in SETTINGS.items() if name != "llama" for word in (f"--{name}", str(value))]
    up = programs.start("up", "--port", "0", *flags)
    up.until("Ctrl-C stops everything")
    return up


def address_of(up: Program) -> str:
    line = next(line for line in up.text().splitlines() if line.startswith("  address"))
    return line.split()[-1].removesuffix("/v1")
