"""The fleet that is soaked: Redis, two gateways, a supervisor with three workers, and a worker behind a wire.

gateway-0   never touched
gateway-1   restarted by SIGTERM now and then, on the same port
supervisor  keeps `toy-0` (killed now and then), `infill-0` and `embedder-0` (unloaded and loaded now and then)
wired       a worker of the model `toy` reached through a wire that is cut and stalled; stopped and continued, never
            ended
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from accounts.protocol.records import digest
from benchmarks.soak.storage import patiently
from benchmarks.soak.subjects import children_by_environment
from gateway.store.client import connect
from tests.support.stack import DEMO_MODEL, SHARED_MODELS, STARTUP_S, Process, Stack, free_port
from tests.support.wire import Wire, open_wire
from workers.protocol import keys
from workers.protocol.heartbeat import PLACING

TOY, EMBEDDER, INFILLER = "toy", "embedder", "infill"
PIRATE = DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf")
TEAM_KEY = "pk-soak-team-0123456789"
FOLDERS = {
    "adapters_dir": "adapters",
    "slot_save_dir": "slots",
    "cache_dir": "cache",
}
"""Settings of workers that name folders."""
OF_A_MODEL: dict[str, Any] = {"slots": 4, "ctx": 1024, "kv_tokens": 3072}
SMALL: dict[str, Any] = OF_A_MODEL | {
    "cache_ram_mib": 4,
    "cache_disk_mib": 16,
    "max_adapters": 2,
    "worker_drain_s": 10,
    "response_ttl_s": 60,
    "responses_bytes_per_team": 1 << 20,
    "resume_ttl_s": 20,
    "resume_buffer_bytes": 1 << 18,
    "max_body_bytes": 1 << 20,
    "queue_timeout_s": 20,
    "stream_buffer_events": 256,
    "ping_interval_s": 1,
    "drain_s": 10,
}
"""Bounds that are reached within minutes: what is full cannot grow."""


@dataclass(slots=True)
class Fleet:
    stack: Stack
    client: redis.asyncio.Redis
    wire: Wire
    models: tuple[str, ...]
    ports: tuple[int, int]
    gateways: list[Process] = field(default_factory=list)
    """Who is there now; `urls` do not change."""
    supervisor: Process | None = None
    wired: Process | None = None
    exits: dict[str, int] = field(default_factory=dict)
    """Exit codes of what was asked to stop, by name."""

    @property
    def urls(self) -> tuple[str, str]:
        first, second = (f"http://127.0.0.1:{port}" for port in self.ports)
        return first, second

    @property
    def names(self) -> tuple[str, ...]:
        """Of everybody who has to be there, always."""
        return ("redis", "gateway-0", "gateway-1", "supervisor", "wired", *(f"{model}-0" for model in self.models))

    def pids(self) -> dict[str, int]:
        """Name -> process id of everybody who is there now."""
        assert self.supervisor is not None
        assert self.wired is not None
        named = {"redis": self.stack.redis.pid, "supervisor": self.supervisor.pid, "wired": self.wired.pid}
        named |= {gateway.name: gateway.pid for gateway in self.gateways}
        for worker_id, pid in children_by_environment(self.supervisor.pid, "PADDOCK_WORKER_ID"):
            named[self.name_of(worker_id)] = pid
        return named

    def name_of(self, worker_id: str) -> str:
        """The supervisor numbers its workers in the catalog's order; others have names of their own."""
        if worker_id == "wired" or worker_id.startswith("passing-"):
            return worker_id
        return f"{self.models[int(worker_id.rsplit('-', 1)[-1])]}-0"

    async def worker_urls(self) -> dict[str, str]:
        """Name of a worker -> where its metrics are; waits for a Redis that is struck."""
        return await patiently(self._worker_urls)

    async def _worker_urls(self) -> dict[str, str]:
        found = {}
        for model in self.models:
            for member in await self.client.smembers(keys.workers(model)):
                worker_id = member.decode() if isinstance(member, bytes) else member
                placing = await self.client.hget(keys.worker(model, worker_id), PLACING)
                if isinstance(placing, bytes):
                    found[self.name_of(worker_id)] = placing.decode().split(" ")[-1]
        return found

    def start_gateway(self, number: int) -> Process:
        settings = SMALL | {
            "port": self.ports[number],
            "gateway_id": f"gateway-{number}",
            "log_level": "warning",
            "api_keys": json.dumps([{"name": "team", "team": "blue", "sha256": digest(TEAM_KEY), "weight": 2}]),
        }
        command = [sys.executable, "-m", "gateway.cli", "gateway"]
        process = self.stack.spawn(f"gateway-{number}", command, environment(settings))
        process.url = self.urls[number]
        self.gateways = [*(one for one in self.gateways if one.name != process.name), process]
        return process

    def restart_gateway(self, number: int) -> None:
        """SIGTERM, and the next one when it has drained."""
        running = next(one for one in self.gateways if one.name == f"gateway-{number}")
        self.exits[f"{running.name}, pid {running.pid}"] = running.stop()
        self.stack.wait_until_ready(self.start_gateway(number))

    def passing_worker(self, worker_id: str) -> Process:
        """One more worker of the toy model."""
        folders: dict[str, Any] = {name: self.stack.folder / place for name, place in FOLDERS.items()}
        return self.stack.worker(DEMO_MODEL, TOY, worker_id=worker_id, **SMALL, **folders, log_level="warning")

    def stop(self) -> None:
        """Everybody by SIGTERM: gateways, then workers. Redis stays."""
        assert self.supervisor is not None
        assert self.wired is not None
        for process in (*self.gateways, self.supervisor, self.wired):
            process.signal(signal.SIGCONT)
            self.exits[f"{process.name}, pid {process.pid}"] = process.stop()


def environment(settings: dict[str, Any]) -> dict[str, str]:
    return {f"PADDOCK_{name.upper()}": str(value) for name, value in settings.items()}


@asynccontextmanager
async def running_fleet() -> AsyncIterator[Fleet]:
    """All of it ready. Infill is there only where its model lies beside the checkout."""
    async with AsyncExitStack() as held:
        stack = held.enter_context(Stack(measured=True))
        port = free_port()
        wire = await held.enter_async_context(open_wire(port))
        client = await held.enter_async_context(connect(stack.redis.url))
        models = [TOY, EMBEDDER, *([INFILLER] if SHARED_MODELS.is_dir() else [])]
        fleet = Fleet(stack, client, wire, tuple(models), (free_port(), free_port()))
        shutil.copy(PIRATE, _folder(stack, "adapters") / "pirate.gguf")
        await _fill_news(client)
        await asyncio.to_thread(_start, fleet, port)
        yield fleet


def _start(fleet: Fleet, port: int) -> None:
    stack = fleet.stack
    folders: dict[str, Any] = {name: _folder(stack, place) for name, place in FOLDERS.items()}
    catalog = stack.folder / "catalog.json"
    catalog.write_text(json.dumps({"models": [_entry(model) for model in fleet.models]}))
    ours = {"catalog": catalog, "log_level": "warning"}
    command = [sys.executable, "-m", "gateway.cli", "supervisor"]
    told = {name: value for name, value in SMALL.items() if name not in OF_A_MODEL}
    fleet.supervisor = stack.spawn("supervisor", command, environment(told | folders | ours), "supervisor")
    wired: dict[str, Any] = {
        "worker_port": port,
        "worker_address": f"http://127.0.0.1:{fleet.wire.port}",
        "log_level": "warning",
    }
    fleet.wired = stack.worker(DEMO_MODEL, TOY, worker_id="wired", wait=False, **SMALL, **folders, **wired)
    for number in range(2):
        fleet.start_gateway(number)
    stack.wait_for_worker(TOY, "wired", fleet.wired)
    for gateway in fleet.gateways:
        stack.wait_until_ready(gateway)
    _wait_for_supervised(fleet)


def _wait_for_supervised(fleet: Fleet) -> None:
    """Raises RuntimeError with the supervisor's log when its workers do not come."""
    assert fleet.supervisor is not None
    deadline = time.monotonic() + STARTUP_S
    with redis.Redis(unix_socket_path=str(fleet.stack.redis.socket)) as client:
        while any(client.scard(keys.workers(model)) < (1 + (model == TOY)) for model in fleet.models):
            if fleet.supervisor.popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the supervisor's workers did not come:\n{fleet.supervisor.text()[-3000:]}")
            time.sleep(0.1)


def _entry(model: str) -> dict[str, object]:
    paths = {INFILLER: SHARED_MODELS / "stories260K-infill.gguf"}
    llama: dict[str, object] = {"n_threads": 1}
    if model == EMBEDDER:
        llama["embeddings"] = True
    sizes = {EMBEDDER: 512, INFILLER: 256}
    fields = {"name": model, "path": str(paths.get(model, DEMO_MODEL)), "llama": llama}
    return fields | (OF_A_MODEL if model == TOY else {"slots": 4, "ctx": sizes[model]})


def _folder(stack: Stack, name: str) -> Path:
    path = stack.folder / name
    path.mkdir(exist_ok=True, mode=0o700)
    return path


async def _fill_news(client: redis.asyncio.Redis) -> None:
    """As many entries as Redis keeps, which a fleet as small as this takes hours to write: no growth after that.

    They stand before what gateways read; as long as true ones.
    """
    pipeline = client.pipeline(transaction=False)
    for number in range(keys.NEWS_KEPT):
        pipeline.xadd(keys.NEWS, {b"n": b"%0160d" % number})
    await pipeline.execute()
