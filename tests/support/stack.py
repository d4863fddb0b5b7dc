"""A whole Paddock of real processes on loopback: Redis, workers (true or fake), gateways.

For end-to-end tests and benchmarks.
Each process runs in a session of its own, writes its log into the stack's folder, and is stopped by its process id when
the stack closes. Nothing is shared with another stack but the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import redis

from gateway.tls import unverified
from tests.support.preloaded import Child, start, start_anew
from tests.support.redis_server import RedisServer, logged_in
from workers.protocol import keys
from workers.protocol.heartbeat import Heartbeat, decode_heartbeat
from workers.protocol.keys import Role

ROOT = Path(__file__).resolve().parents[2]
SHARED_MODELS = ROOT.parent / "shared" / "models"
DEMO_MODEL = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
STARTUP_S = 60.0


def free_port() -> int:
    """A port that was free a moment ago, and that the system gives to nobody who asks for any."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(slots=True)
class Process:
    """One process of the stack."""

    name: str
    popen: Child
    log: Path
    log_begins: int = 0
    """In bytes: before that stands what another one of the name wrote."""
    url: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: signal.Signals) -> None:
        if self.popen.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then the exit code; SIGKILL and -9 when it does not end in time."""
        self.signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def text(self) -> str:
        return self.log.read_bytes()[self.log_begins :].decode(errors="replace")


@dataclass(slots=True)
class Stack:
    """Start with `with Stack() as stack`, then add workers and gateways; `stack.gateways[0].url` is the address."""

    key: str = "pk-test-0123456789abcdef"
    secret: str = "shared-secret-of-this-stack"
    gateway_secret: str = "secret-of-its-gateways"
    cores: dict[str, str] = field(default_factory=dict)
    """Part of a process's name -> cores it is pinned to, such as {"gateway": "0"}."""
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pd-stack-")))
    redis: RedisServer = field(default_factory=RedisServer)
    site: str = ""
    """URL of a Redis of `tests.support.redis_fleet` that is there already, in place of one's own."""
    module: str = "gateway.cli"
    """What runs a gateway, given the argument `gateway`."""
    measured: bool = False
    """Whether memory and times of its processes are figures: each is an interpreter of its own then, none forked."""
    processes: list[Process] = field(default_factory=list)
    gateways: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)

    def __enter__(self) -> Stack:
        if not self.site:
            self.redis.start()
            self._pin("redis", self.redis.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for process in self.processes:
                print(
                    f"--- {process.name} (exit {process.popen.poll()}) ---\n{process.text()[-4000:]}", file=sys.stderr
                )
        for process in [*self.gateways, *reversed(self.processes)]:
            process.stop(5.0)
        self.redis.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self, role: Role = "gateway") -> dict[str, str]:
        """The settings of a process of this role, without those of whoever runs the tests."""
        own = {"PADDOCK_API_KEY": self.key, "PADDOCK_GATEWAY_SECRET": self.gateway_secret}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
        return clean | {
            "PADDOCK_REDIS_URL": self._redis_url(role),
            "PADDOCK_WORKER_SECRET": self.secret,
            "PADDOCK_STATE_DIR": str(self.folder / "state"),
            **(own if role == "gateway" else {}),
            **({"PADDOCK_WORKER_REDIS_URL": self._redis_url("worker")} if role == "supervisor" else {}),
            "PADDOCK_LOG_FORMAT": "json",
            "PYTHONUNBUFFERED": "1",
        }

    def _redis_url(self, role: Role) -> str:
        return logged_in(self.site or self.redis.url, role)

    def spawn(
        self, name: str, command: list[str], environment: dict[str, str] | None = None, role: Role = "gateway"
    ) -> Process:
        """Any process, with the stack's settings of that role in its environment."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            begins = output.tell()
            env = self.environment(role) | (environment or {})
            popen = (start_anew if self.measured else start)(command, env, output.fileno(), output.fileno())
        process = Process(name, popen, log, begins)
        self._pin(name, popen.pid)
        self.processes.append(process)
        return process

    def worker(
        self, model: Path, alias: str, *, worker_id: str = "", threads: int = 1, wait: bool = True, **settings: object
    ) -> Process:
        """A true worker; settings by their names, such as slots=4, ctx=512, worker_drain_s=1. It drafts nothing unless
        told so: tests ask for the same answer twice, and batches with drafts round numbers otherwise."""
        worker_id = worker_id or f"worker-{len(self.workers)}"
        values: dict[str, object] = {"model": model, "alias": alias, "worker_id": worker_id}
        values |= {"llama": json.dumps({"n_threads": threads}), "speculation": json.dumps({"ngram": False})}
        environment = {f"PADDOCK_{name.upper()}": str(value) for name, value in {**values, **settings}.items()}
        process = self.spawn(worker_id, [sys.executable, "-m", "gateway.cli", "worker"], environment, "worker")
        self.workers.append(process)
        if wait:
            process.url = self.wait_for_worker(alias, worker_id, process).address
        return process

    def fake_worker(self, alias: str, *flags: str, worker_id: str = "", slots: int = 8, wait: bool = True) -> Process:
        """A fake worker (`python -m tests.support.fake_worker --help` for the flags)."""
        worker_id = worker_id or f"fake-{len(self.workers)}"
        url = logged_in(self.site or self.redis.url, "worker")
        command = [sys.executable, "-m", "tests.support.fake_worker", "--redis-url", url, "--model", alias]
        command += ["--worker-id", worker_id, "--slots", str(slots), "--secret", self.secret, *flags]
        process = self.spawn(worker_id, command, role="worker")
        self.workers.append(process)
        if wait:
            process.url = self.wait_for_worker(alias, worker_id, process).address
        return process

    def gateway(self, *, wait: bool = True, **settings: object) -> Process:
        """A true gateway on a free port."""
        port = free_port()
        values = {"port": port, "gateway_id": f"gw{len(self.gateways)}-{port}", **settings}
        environment = {f"PADDOCK_{name.upper()}": str(value) for name, value in values.items()}
        name = f"gateway-{len(self.gateways)}"
        process = self.spawn(name, [sys.executable, "-m", self.module, "gateway"], environment)
        process.url = f"{'https' if 'tls_cert' in values else 'http'}://127.0.0.1:{port}"
        self.gateways.append(process)
        if wait:
            self.wait_until_ready(process)
        return process

    def accounts(self, *, database_url: str = "", wait: bool = True, **settings: object) -> Process:
        """An accounts service; gateways reach it by `accounts_url`. It waits until the database has its tables."""
        values = {"database_url": database_url, "accounts_listen": self.accounts_socket, **settings}
        environment = {f"PADDOCK_{name.upper()}": str(value) for name, value in values.items()}
        name = f"accounts-{sum(one.name.startswith('accounts') for one in self.processes)}"
        process = self.spawn(name, [sys.executable, "-m", "accounts.cli"], environment)
        deadline = time.monotonic() + STARTUP_S
        while wait and "accounts ready" not in process.text():
            if process.popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.name} ended with {process.popen.poll()}:\n{process.text()[-3000:]}")
            time.sleep(0.02)
        process.url = self.accounts_url
        return process

    @property
    def accounts_socket(self) -> str:
        return str(self.folder / "accounts.sock")

    @property
    def accounts_url(self) -> str:
        return f"unix:{self.accounts_socket}"

    def wait_until_ready(self, gateway: Process, timeout_s: float = STARTUP_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if gateway.popen.poll() is not None:
                raise RuntimeError(f"{gateway.name} ended with {gateway.popen.returncode}:\n{gateway.text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{gateway.url}/ready", timeout=2, context=unverified()) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.02)
        raise RuntimeError(f"{gateway.name} was not ready within {timeout_s} s:\n{gateway.text()[-3000:]}")

    def heartbeat(self, model: str, worker_id: str) -> Heartbeat | None:
        """What the worker says of itself in Redis now."""
        with redis.Redis(unix_socket_path=str(self.redis.socket)) as client:
            raw = client.hget(keys.worker(model, worker_id), "beat")
            return decode_heartbeat(raw) if isinstance(raw, bytes) else None

    def leases(self, model: str) -> int:
        """Slots that are leased now, over all workers of the model."""
        with redis.Redis(unix_socket_path=str(self.redis.socket)) as client:
            found = client.keys(keys.worker_leases(model, "*").replace("{", "[{]").replace("}", "[}]"))
            assert isinstance(found, list)
            return sum(client.zcard(name) for name in found)

    def wait_until_listed(self, gateway: Process, *models: str, timeout_s: float = STARTUP_S) -> None:
        """Wait until the gateway knows these models; a worker's record can be in Redis a moment earlier."""
        deadline = time.monotonic() + timeout_s
        asked = urllib.request.Request(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {self.key}"})
        listed: set[str] = set()
        while time.monotonic() < deadline:
            with urllib.request.urlopen(asked, timeout=2) as answer:
                listed = {entry["id"] for entry in json.load(answer)["data"]}
            if listed.issuperset(models):
                return
            time.sleep(0.02)
        raise RuntimeError(f"{gateway.name} lists {sorted(listed)}, not {models}, after {timeout_s} s")

    def wait_for_worker(
        self, model: str, worker_id: str, process: Process | None = None, timeout_s: float = STARTUP_S
    ) -> Heartbeat:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            beat = self.heartbeat(model, worker_id)
            if beat is not None:
                return beat
            if process is not None and process.popen.poll() is not None:
                raise RuntimeError(f"{process.name} ended with {process.popen.returncode}:\n{process.text()[-3000:]}")
            time.sleep(0.02)
        raise RuntimeError(f"{worker_id} did not register within {timeout_s} s")

    def _pin(self, name: str, pid: int) -> None:
        for part, cores in self.cores.items():
            if part in name:
                os.sched_setaffinity(pid, {int(core) for core in cores.split(",")})
