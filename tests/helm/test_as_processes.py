"""What the chart says, done by processes in place of containers: the same commands, variables, probes and hooks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.chart import Object, Rendered, container, plain_env, render
from tests.support.hub_server import Hub
from tests.support.redis_server import redis_binaries, redis_version
from tests.support.stack import DEMO_MODEL, Process, Stack, free_port

VALUES: dict[str, object] = {
    "secrets": {
        "apiKey": "sk-of-the-test",
        "workerSecret": "between us",
        "redisPassword": "of-redis",
        "gatewaySecret": "of-gateways",
        "redisGatewayPassword": "rg",
        "redisWorkerPassword": "rw",
    },
    "gateway": {"settleS": 1},
    "models": [{"name": "org/demo:Q8_0", "hf": "org/demo-GGUF:Q8_0", "slots": 2, "ctx": 256}],
    "aliases": {"fast": "org/demo:Q8_0"},
    "workers": {"resources": {"limits": {"cpu": 1}}, "promptCache": {"type": "emptyDir"}},
}
PADDOCK = [sys.executable, "-m", "gateway.cli"]


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that runs the pods' containers as processes, each mount a folder, each port another one."""

    found: Rendered
    stack: Stack
    folder: Path
    ports: Mapping[str, int]

    def pod(self, component: str) -> Object:
        label = "app.kubernetes.io/component"
        (pod,) = (pod for told, pod in self.found.pods() if told["labels"][label] == component)
        return pod

    def disk(self, component: str) -> Path:
        """Each pod has one of its own."""
        folder = self.folder / f"disk-of-{component}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def here(self, component: str, text: str) -> str:
        """Addresses and paths of the cluster -> those of this machine."""
        mounts = ("/etc/paddock", "/etc/redis", "/models", "/cache")
        swaps = {
            "p-paddock-redis:6379": f"127.0.0.1:{self.ports['redis']}",
            "http://p-paddock:80": f"http://127.0.0.1:{self.ports['gateway']}",
            "10.0.0.1:8081": f"127.0.0.1:{self.ports['worker']}",
            "0.0.0.0": "127.0.0.1",
            **{path: f"{self.folder}{path}" for path in mounts},
            "/var/lib/paddock": str(self.disk(component)),
        }
        for there, here in swaps.items():
            text = text.replace(there, here)
        return text

    def env(self, component: str, of: Object) -> dict[str, str]:
        secret = self.found.one("Secret")["stringData"]
        told = plain_env(of, {**secret, "metadata.name": "p-worker-0", "status.podIP": "10.0.0.1"})
        own = {"PADDOCK_PORT": "gateway", "PADDOCK_WORKER_PORT": "worker"}
        return {
            **{name: self.here(component, value) for name, value in told.items()},
            **{name: str(self.ports[port]) for name, port in own.items() if name in told},
        }

    def start(self, component: str) -> Process:
        of = container(self.pod(component))
        command = [*PADDOCK, *of["command"][1:]]
        process = self.stack.spawn(component, command, self.env(component, of))
        self.wait(process, component, of["startupProbe"], 60.0)
        return process

    def run(self, component: str, of: Object, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        program = PADDOCK if command[0] == "paddock" else [sys.executable]
        env = {**self.stack.environment(), **self.env(component, of), **more}
        here = [part if "\n" in part else self.here(component, part) for part in command[1:]]
        return subprocess.run([*program, *here], env=env, capture_output=True, text=True, timeout=60)

    def ask(self, component: str, probe: Object) -> int:
        url = f"http://127.0.0.1:{self.ports[component]}{probe['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait(self, process: Process, component: str, probe: Object, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ask(component, probe) != 200:
            assert process.popen.poll() is None, process.text()[-3000:]
            assert time.monotonic() < deadline, process.text()[-3000:]
            time.sleep(0.02)


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    newest = max(redis_binaries(), key=redis_version)
    ports = {name: free_port() for name in ("redis", "gateway", "worker")}
    found = render(VALUES)
    with Stack(site=f"redis://127.0.0.1:{ports['redis']}") as stack:
        here = Node(found, stack, folder, ports)
        for item in found.of("ConfigMap"):
            for name, text in item["data"].items():
                target = folder / ("etc/redis" if name == "redis.conf" else "etc/paddock") / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text.replace("dir /data", f"dir {folder}\nport {ports['redis']}\nbind 127.0.0.1"))
        of = container(here.pod("redis"))
        shell, flag, script = of["command"]
        script = here.here("redis", script).replace("redis-server", str(newest))
        stack.spawn("redis", [shell, flag, script], here.env("redis", of))
        yield here


def test_it_starts_answers_and_leaves_without_a_loss(tmp_path: Path) -> None:
    if not redis_binaries():
        pytest.skip("no redis-server on this machine")
    with node(tmp_path) as here, Hub({"org/demo-GGUF": {"demo-Q8_0.gguf": DEMO_MODEL.read_bytes()}}) as hub:
        gateway = here.start("gateway")

        (fetch,) = here.pod("worker")["initContainers"]
        fetched = here.run("worker", fetch, fetch["command"], **hub.environment)
        assert fetched.returncode == 0, fetched.stderr
        worker = here.start("worker")
        # Ready means that a worker of each model was seen.
        here.wait(gateway, "gateway", container(here.pod("gateway"))["readinessProbe"], 10.0)
        assert Path(here.env("worker", container(here.pod("worker")))["PADDOCK_CACHE_DIR"]).is_dir()

        test = container(here.pod("test"))
        asked = here.run("test", test, test["command"])
        assert asked.returncode == 0, asked.stderr
        assert "answer:" in asked.stdout

        for component, process in (("worker", worker), ("gateway", gateway)):
            of = container(here.pod(component))
            left = here.run(component, of, of["lifecycle"]["preStop"]["exec"]["command"])
            assert left.returncode == 0, left.stderr
            assert "drained" in left.stdout
            assert here.ask(component, of["readinessProbe"]) == 503
            assert here.ask(component, of["livenessProbe"]) == 200
            assert process.stop() == 0, process.text()[-3000:]


def test_the_test_says_what_is_wrong(tmp_path: Path) -> None:
    """`helm test` on an address where nobody is, and with a deadline."""
    found = render({**VALUES, "test": {"timeoutS": 10}})
    (pod,) = (pod for told, pod in found.pods() if told["name"] == "p-paddock-test")
    of = container(pod)
    script = of["command"][2]
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-c", script, url, "m", "0"], env={"PADDOCK_API_KEY": "x"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("/health: ")
    assert json.dumps(of["command"][-1]) == '"10"'
