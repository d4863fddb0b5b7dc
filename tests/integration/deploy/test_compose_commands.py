"""What docker-compose.yml starts, started without containers: the same commands, variables and order.

A container's parts are taken from the Dockerfile and the resolved file. What only a container has is put in its place:
names of services become addresses of this machine, ports become free ones, volumes become folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose import ROOT, Resolved, new_env, resolved
from tests.support.dockerfile import read
from tests.support.redis_server import redis_binaries
from tests.support.stack import free_port

BIN = Path(sys.executable).parent
PATIENCE_S = 60.0


@dataclass(slots=True)
class Machine:
    """Containers of one project, as processes."""

    project: Resolved
    folder: Path
    ports: dict[tuple[str, str], int] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def service(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.project["services"][name]
        return found

    def port(self, name: str, inside: str) -> int:
        return self.ports.setdefault((name, inside), free_port())

    def here(self, container: str, text: str) -> str:
        """A container's words, as they are true on this machine."""
        text = text.replace("@redis:6379", f"@127.0.0.1:{self.port('redis', '6379')}")
        for path in ("/models", "/var/lib/paddock", "/data", "/etc/paddock"):
            owner = container if path == "/var/lib/paddock" else "volumes"
            text = re.sub(rf"(?<![\w.]){path}\b", str(self.folder / owner / path.strip("/")), text)
        return text.replace("0.0.0.0", "127.0.0.1")

    def environment(self, container: str, name: str) -> dict[str, str]:
        service = self.service(name)
        image = read(ROOT / service["build"]["dockerfile"]).environment() if "build" in service else {}
        values = image | service.get("environment", {})
        values = {key: self.here(container, value) for key, value in values.items()}
        for key in ("PADDOCK_PORT", "PADDOCK_WORKER_PORT"):
            if key in values:
                values[key] = str(self.port(container, values[key]))
        redis = redis_binaries()[0].parent
        return values | {"PATH": f"{BIN}:{redis}:{os.environ['PATH']}"}

    def start(self, name: str, container: str = "") -> subprocess.Popen[bytes]:
        container = container or name
        service = self.service(name)
        entry = (
            json.loads(read(ROOT / service["build"]["dockerfile"]).stages[-1].last("ENTRYPOINT"))
            if ("build" in service)
            else []
        )
        command = [self.here(container, word) for word in [*entry, *service["command"]]]
        if name == "redis":
            command[-1] = command[-1].replace("redis-server ", f"redis-server --port {self.port('redis', '6379')} ")
        environment = self.environment(container, name)
        for path in ("volumes/models", "volumes/data", f"{container}/var/lib/paddock"):
            (self.folder / path).mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{container}.log").open("wb") as log:
            # No more of this machine's environment than a container would have.
            process = subprocess.Popen(
                command, env=environment, cwd=self.folder / container, stdout=log, stderr=log, start_new_session=True
            )
        self.running[container] = process
        return process

    def log(self, container: str) -> str:
        return (self.folder / f"{container}.log").read_text(errors="replace")

    def healthy(self, container: str, name: str) -> bool:
        """As the container's own health check says."""
        service = self.service(name)
        if "healthcheck" in service:
            command = service["healthcheck"]["test"][1:]
            command[1:1] = ["-p", str(self.port("redis", "6379"))]
        else:
            health = read(ROOT / service["build"]["dockerfile"]).stages[-1].last("HEALTHCHECK")
            command = json.loads(health.partition("CMD ")[2])
        done = subprocess.run(command, env=self.environment(container, name), capture_output=True, timeout=10)
        return done.returncode == 0 and b"NOAUTH" not in done.stdout

    def until_healthy(self, container: str, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.healthy(container, name):
            ended = self.running[container].poll()
            assert ended is None, f"{container} ended with {ended}:\n{self.log(container)}"
            assert time.monotonic() < deadline, f"{container} is not healthy:\n{self.log(container)}"
            time.sleep(0.1)

    def stop(self, container: str) -> int:
        self.running[container].send_signal(signal.SIGTERM)
        return self.running[container].wait(PATIENCE_S)


@contextlib.contextmanager
def machine_of(variables: dict[str, str], folder: Path) -> Iterator[Machine]:
    """Give the project that these variables in `.env` ask for; what still runs at the end is killed."""
    started = Machine(resolved(new_env() | variables), folder)
    try:
        yield started
    finally:
        for process in started.running.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with machine_of({}, tmp_path) as started:
        yield started


@pytest.mark.skipif(not redis_binaries() or not shutil.which("redis-cli"), reason="no Redis on this machine")
def test_the_commands_of_the_file_serve_a_call_and_drain_in_order(machine: Machine) -> None:
    machine.start("redis")
    machine.until_healthy("redis", "redis")
    assert machine.start("fetch").wait(PATIENCE_S) == 0, machine.log("fetch")
    assert machine.log("fetch").split("\t")[0] == "paddock-demo"
    workers = [f"worker-{number}" for number in range(machine.service("worker")["deploy"]["replicas"])]
    for container in workers:
        machine.start("worker", container)
    machine.start("gateway")
    for container in workers:
        machine.until_healthy(container, "worker")
    machine.until_healthy("gateway", "gateway")

    key = machine.service("gateway")["environment"]["PADDOCK_API_KEY"]
    url = f"http://127.0.0.1:{machine.port('gateway', '8080')}/v1/chat/completions"
    body = {"model": "paddock-demo", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 150}
    request = urllib.request.Request(
        url,
        json.dumps(body | {"stream": True, "ignore_eos": True}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        first = answer.readline()
        assert first.startswith(b"data: ")
        # As `docker compose down`: who depends on others goes first, and what it streams is finished.
        machine.running["gateway"].send_signal(signal.SIGTERM)
        rest = answer.read()
    assert rest.rstrip().endswith(b"data: [DONE]"), rest[-300:]
    assert machine.running["gateway"].wait(PATIENCE_S) == 0, machine.log("gateway")
    assert [machine.stop(container) for container in workers] == [0] * len(workers)
    assert machine.stop("redis") == 0
    assert "Traceback" not in "".join(map(machine.log, machine.running))


CATALOG = """
models:
  - {name: small, path: /models/paddock-demo.gguf, slots: 2}
  - {name: large, path: /models/paddock-demo.gguf, slots: 4}
aliases: {fast: small}
"""


@pytest.mark.skipif(not redis_binaries() or not shutil.which("redis-cli"), reason="no Redis on this machine")
def test_a_catalog_serves_several_models(tmp_path: Path) -> None:
    with machine_of(
        {"COMPOSE_PROFILES": "catalog", "WORKERS": "0", "CATALOG_FOLDER": str(tmp_path)}, tmp_path
    ) as machine:
        folder = tmp_path / "volumes" / "etc" / "paddock"
        folder.mkdir(parents=True)
        (folder / "catalog.yaml").write_text(machine.here("volumes", CATALOG))
        machine.start("redis")
        machine.until_healthy("redis", "redis")
        for name in ("fetch", "fetch-catalog"):
            assert machine.start(name).wait(PATIENCE_S) == 0, machine.log(name)
        machine.start("supervisor")
        machine.start("gateway")
        machine.until_healthy("gateway", "gateway")
        for model in ("small", "large", "fast"):
            body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
            assert ask(machine, "/v1/chat/completions", body)["usage"]["completion_tokens"] > 0
        assert {"small", "large", "fast"} <= {model["id"] for model in ask(machine, "/v1/models")["data"]}
        assert [machine.stop(name) for name in ("gateway", "supervisor", "redis")] == [0, 0, 0]
        assert "Traceback" not in "".join(map(machine.log, machine.running))


def ask(machine: Machine, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    key = machine.service("gateway")["environment"]["PADDOCK_API_KEY"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{machine.port('gateway', '8080')}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found
