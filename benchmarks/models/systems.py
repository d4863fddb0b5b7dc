"""The systems that are compared, as real processes with the same files, slots, context, threads and bound of models.

Each writes what it loads somewhere: Paddock and llama-server in their logs; llama-swap runs a script of ours for each
model, which notes the name and becomes llama-server.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp

from benchmarks.field.install import LLAMA_SWAP, Missing, go_program
from benchmarks.models.files import LATE, MANUAL
from benchmarks.reference import llama_server
from tests.support.stack import DEMO_MODEL, Process, Stack, free_port

PLACES = 2
"""Most models that are loaded at once."""
SLOTS, CTX = 4, 4096
START_S = 180.0
"""The longest that a call waits for its model, where that can be set."""
PADDOCK_LOAD = re.compile(r"^paddock: (\S+) is loaded: ", re.MULTILINE)
SERVER_LOAD = re.compile(r"spawning server instance with name=(\S+) on port")

Order = Literal["load", "unload"]


class System(Protocol):
    """A system that runs."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...

    def loads(self) -> list[str]:
        """Return the models whose loads have begun, in that order."""

    async def loaded(self, session: aiohttp.ClientSession) -> frozenset[str]:
        """Return the models that take calls now."""

    async def order(self, session: aiohttp.ClientSession, order: Order, model: str) -> int:
        """Have a model loaded or unloaded by the system's API and return the status of its answer; 0: it has none."""

    async def add_late(self, session: aiohttp.ClientSession) -> None:
        """Write the configuration anew, with the model `LATE`, and have it read in the way that the system has."""

    def manual_query(self) -> str | None:
        """Return the query of a call that must not load its model; None: calls can't be kept from that."""


Serve = Callable[[Mapping[str, Path], float | None], AbstractContextManager[System]]
"""Starts a system with these models. The number is Paddock's `min_resident_s`; None: as by default."""


def _wait_for(process: Process, url: str) -> None:
    """Wait until a server answers. Raises Missing."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.popen.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    lines = process.text().strip().splitlines()
    raise Missing(f"it does not answer: {lines[-1] if lines else 'no word of why'}")


async def _listed(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(url) as answer:
        found: list[dict[str, Any]] = (await answer.json())["data"]
        return found


async def _statuses(session: aiohttp.ClientSession, url: str) -> frozenset[str]:
    """Return the loaded models of a list in llama-server's form."""
    listed = await _listed(session, url)
    return frozenset(entry["id"] for entry in listed if entry.get("status", {}).get("value") == "loaded")


@dataclass(slots=True)
class Paddock:
    """A gateway, a supervisor and a Redis."""

    stack: Stack
    supervisor: Process
    catalog: Path
    files: Mapping[str, Path]
    stay_s: float | None
    name: str = "Paddock"

    @property
    def url(self) -> str:
        return self.stack.gateways[0].url

    @property
    def key(self) -> str:
        return self.stack.key

    def loads(self) -> list[str]:
        return PADDOCK_LOAD.findall(self.supervisor.text())

    async def loaded(self, session: aiohttp.ClientSession) -> frozenset[str]:
        return await _statuses(session, f"{self.url}/v1/models")

    async def order(self, session: aiohttp.ClientSession, order: Order, model: str) -> int:
        async with session.post(f"{self.url}/models/{order}", json={"model": model}) as answer:
            return answer.status

    async def add_late(self, session: aiohttp.ClientSession) -> None:
        """The file is watched."""
        files = {**self.files, LATE: DEMO_MODEL}
        self.catalog.write_text(json.dumps(paddock_catalog(files, stay_s=self.stay_s)))

    def manual_query(self) -> str | None:
        return ""


def paddock_catalog(files: Mapping[str, Path], *, stay_s: float | None) -> dict[str, object]:
    """Return the catalog of these models."""
    residency: dict[str, object] = {} if stay_s is None else {"min_resident_s": stay_s}
    models = [
        {
            "name": name,
            "path": str(path),
            "slots": SLOTS,
            "ctx": CTX,
            "llama": {"n_threads": 1},
            "speculation": {"ngram": False},
            "residency": {**residency, "autoload": name != MANUAL},
        }
        for name, path in files.items()
    ]
    return {"models": models, "models_max": PLACES}


@contextmanager
def paddock(files: Mapping[str, Path], stay_s: float | None) -> Iterator[System]:
    """Start Paddock; its queue takes as many calls as a storm has."""
    with Stack(measured=True) as stack:
        catalog = stack.folder / "catalog.json"
        catalog.write_text(json.dumps(paddock_catalog(files, stay_s=stay_s)))
        command = [sys.executable, "-m", "gateway.cli", "supervisor"]
        supervisor = stack.spawn("supervisor", command, {"PADDOCK_CATALOG": str(catalog)}, "supervisor")
        stack.gateway(
            catalog=catalog,
            log_level="warning",
            start_timeout_s=START_S,
            queue_timeout_s=START_S,
            max_queue_per_team=1000,
        )
        yield Paddock(stack, supervisor, catalog, files, stay_s)


@dataclass(slots=True)
class LlamaServer:
    """The C++ llama-server in router mode, with a preset file."""

    process: Process
    preset: Path
    files: Mapping[str, Path]
    url: str
    name: str = "llama-server"
    key: str = "none"

    def loads(self) -> list[str]:
        return SERVER_LOAD.findall(self.process.text())

    async def loaded(self, session: aiohttp.ClientSession) -> frozenset[str]:
        return await _statuses(session, f"{self.url}/models")

    async def order(self, session: aiohttp.ClientSession, order: Order, model: str) -> int:
        async with session.post(f"{self.url}/models/{order}", json={"model": model}) as answer:
            return answer.status

    async def add_late(self, session: aiohttp.ClientSession) -> None:
        self.preset.write_text(server_preset({**self.files, LATE: DEMO_MODEL}))
        async with session.get(f"{self.url}/models?reload=1") as answer:
            await answer.read()

    def manual_query(self) -> str | None:
        return "?autoload=false"


def server_flags() -> list[str]:
    """Return what llama-server is told about each model; its warm-up stays, as it is its default."""
    return ["-c", str(SLOTS * CTX), "-np", str(SLOTS), "-t", "1", "-tb", "1", "--host", "127.0.0.1"]


def server_preset(files: Mapping[str, Path]) -> str:
    """Return the preset file of these models."""
    return "version = 1\n" + "".join(f"\n[{name}]\nmodel = {path}\n" for name, path in files.items())


@contextmanager
def router(files: Mapping[str, Path], stay_s: float | None) -> Iterator[System]:
    """Start llama-server as a router. It has no policies."""
    with Stack(measured=True) as stack:
        preset, port = stack.folder / "models.ini", free_port()
        preset.write_text(server_preset(files))
        cache = stack.folder / "cache"
        cache.mkdir()
        bounds = ["--models-preset", str(preset), "--models-max", str(PLACES)]
        command = [str(llama_server()), *bounds, *server_flags(), "--port", str(port)]
        process = stack.spawn("llama-server", command, {"LLAMA_CACHE": str(cache)})
        url = f"http://127.0.0.1:{port}"
        _wait_for(process, url)
        yield LlamaServer(process, preset, files, url)


@dataclass(slots=True)
class LlamaSwap:
    """llama-swap, which starts a llama-server for each model."""

    process: Process
    folder: Path
    files: Mapping[str, Path]
    url: str
    name: str = "llama-swap"
    key: str = "none"

    @property
    def config(self) -> Path:
        return self.folder / "llama-swap.yaml"

    def loads(self) -> list[str]:
        noted = self.folder / "loads"
        return noted.read_text().split() if noted.exists() else []

    async def loaded(self, session: aiohttp.ClientSession) -> frozenset[str]:
        async with session.get(f"{self.url}/running") as answer:
            running = (await answer.json())["running"]
        return frozenset(each["model"] for each in running if each["state"] == "ready")

    async def order(self, session: aiohttp.ClientSession, order: Order, model: str) -> int:
        if order == "load":
            return 0
        async with session.post(f"{self.url}/api/models/unload/{model}") as answer:
            return answer.status

    async def add_late(self, session: aiohttp.ClientSession) -> None:
        """The file is watched, as it is started with `-watch-config`."""
        self.config.write_text(json.dumps(swap_config(self.folder / "start", {**self.files, LATE: DEMO_MODEL})))

    def manual_query(self) -> str | None:
        return None


def swap_config(script: Path, files: Mapping[str, Path]) -> dict[str, object]:
    """Return a configuration that lets any two models run beside each other: a set for each pair."""
    short = {name: f"m{number}" for number, name in enumerate(files)}
    pairs = combinations(short.values(), PLACES)
    return {
        "healthCheckTimeout": int(START_S),
        "models": {
            name: {"cmd": f"sh {script} {name} ${{PORT}} {path}", "concurrencyLimit": 1000}
            for name, path in files.items()
        },
        "matrix": {
            "vars": {var: name for name, var in short.items()},
            "sets": {"".join(pair): " & ".join(pair) for pair in pairs},
        },
    }


@contextmanager
def swap(files: Mapping[str, Path], stay_s: float | None) -> Iterator[System]:
    """Start llama-swap. Raises Missing where it can't be had."""
    program = go_program(LLAMA_SWAP)
    with Stack(measured=True) as stack:
        port, script = free_port(), stack.folder / "start"
        script.write_text(
            f"echo $1 >> {stack.folder / 'loads'}\nexec {llama_server()} -m $3 --port $2 {' '.join(server_flags())}\n"
        )
        config = stack.folder / "llama-swap.yaml"
        config.write_text(json.dumps(swap_config(script, files)))
        command = [str(program), "-config", str(config), "-listen", f"127.0.0.1:{port}", "-watch-config"]
        process = stack.spawn("llama-swap", command)
        url = f"http://127.0.0.1:{port}"
        _wait_for(process, url)
        yield LlamaSwap(process, stack.folder, files, url)


SYSTEMS: dict[str, Serve] = {"paddock": paddock, "llama-server": router, "llama-swap": swap}
