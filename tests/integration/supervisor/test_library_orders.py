"""llama-server's `POST /models` and `DELETE /models`: an admin has models downloaded and removed through a gateway."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.client import AsyncClient, BadRequest, Client, NotFound
from tests.integration.supervisor.conftest import Program, Programs, wait_until
from tests.integration.supervisor.test_up import SMALL, port_of
from tests.support.hub_server import Hub
from tests.support.stack import DEMO_MODEL

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
LARGE = GGUF + bytes(25 << 20)
"""More than the library holds back before it writes."""
REPOSITORIES = {
    "owner/model-GGUF": {"m-Q4_K_M.gguf": LARGE, "m-Q8_0.gguf": GGUF + b"q8"},
    "owner/demo-GGUF": {"demo-Q8_0.gguf": DEMO_MODEL.read_bytes()},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(REPOSITORIES) as served:
        yield served


@dataclass(slots=True)
class Admin:
    """Someone with an admin's key, who listens to what becomes of models."""

    up: Program
    key: str
    url: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def send(self, method: str, path: str, body: dict[str, object] | None = None, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def listen(self) -> None:
        request = urllib.request.Request(f"{self.url}/models/sse", headers={"Authorization": f"Bearer {self.key}"})
        answer = urllib.request.urlopen(request, timeout=120)

        def read() -> None:
            with answer:
                for line in answer:
                    if line.startswith(b"data: "):
                        self.events.append(json.loads(line[6:]))

        threading.Thread(target=read, daemon=True).start()

    def told(self, model: str, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if (each["model"], each["event"]) == (model, event)]

    def wait_for(self, model: str, event: str, times: int = 1) -> dict[str, Any]:
        wait_until(lambda: len(self.told(model, event)) >= times, lambda: f"{self.events}\n{self.up.text()}")
        return self.told(model, event)[-1]


def start(programs: Programs, hub: Hub, *flags: str) -> Admin:
    up = programs.start("up", "--port", "0", *SMALL, *flags, **hub.environment)
    up.until("Ctrl-C stops everything")
    admin = Admin(up, (up.state / "first-key").read_text().strip(), f"http://127.0.0.1:{port_of(up)}")
    wait_until(lambda: admin.send("DELETE", "/models?model=owner/none")[0] != 501, up.text)
    admin.listen()
    return admin


def files(admin: Admin) -> set[str]:
    folder = admin.up.state / "hub"
    return {path.name for path in folder.rglob("*.gguf")} if folder.is_dir() else set()


def error_of(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["message"]


def test_a_model_is_downloaded_and_removed(programs: Programs, hub: Hub, model: Path) -> None:
    admin = start(programs, hub, "--model", str(model))
    name = "owner/model-GGUF:Q4_K_M"
    hub.pause_after = 15 << 20
    assert admin.send("POST", "/models", {"model": name}) == (200, {"success": True})
    told = admin.wait_for(name, "download_progress")
    (url,) = told["data"]
    assert url == f"{hub.url}/owner/model-GGUF/resolve/{hub.newest}/m-Q4_K_M.gguf"
    assert told["data"][url]["total"] == len(LARGE)
    assert 0 < told["data"][url]["done"] < len(LARGE)
    status, message = error_of(admin.send("POST", "/models", {"model": name}))
    assert (status, "being downloaded already" in message) == (400, True)

    # Whoever stops it keeps what has come.
    assert admin.send("DELETE", f"/models?model={urllib.parse.quote(name)}") == (200, {"success": True})
    admin.wait_for(name, "model_remove")
    assert files(admin) == set()
    wait_until(lambda: bool([*(admin.up.state / "hub").rglob("*.part")]), admin.up.text)
    hub.pause_after = 0
    assert admin.send("POST", "/models", {"model": name}) == (200, {"success": True})
    assert admin.wait_for(name, "download_finished")["data"] == {}
    assert hub.ranges[-1].startswith("bytes="), "it went on where it was stopped"
    assert admin.told(name, "download_progress")[-1]["data"][url]["done"] == len(LARGE)
    assert files(admin) == {"m-Q4_K_M.gguf"}

    assert admin.send("DELETE", f"/models/{name}") == (200, {"success": True})
    admin.wait_for(name, "model_remove", 2)
    assert files(admin) == set()
    status, message = error_of(admin.send("DELETE", f"/models/{name}"))
    assert (status, "has downloaded no" in message) == (404, True)


async def test_the_client_has_models_downloaded_and_removed(programs: Programs, hub: Hub, model: Path) -> None:
    admin = await asyncio.to_thread(start, programs, hub, "--model", str(model))
    name = "owner/model-GGUF:Q8_0"
    with Client(admin.url, admin.key) as client:
        await asyncio.to_thread(client.models.download, name)
        await asyncio.to_thread(admin.wait_for, name, "download_finished")
        assert files(admin) == {"m-Q8_0.gguf"}
        await asyncio.to_thread(client.models.remove, name)
        assert files(admin) == set()
        with pytest.raises(BadRequest, match="names no model of the hub"):
            await asyncio.to_thread(client.models.download, "no-owner")
    async with AsyncClient(admin.url, admin.key) as other:
        await other.models.download(name)
        await asyncio.to_thread(admin.wait_for, name, "download_finished", 2)
        await other.models.remove(name)
        assert files(admin) == set()
        with pytest.raises(NotFound, match="has downloaded no"):
            await other.models.remove(name)
        with pytest.raises(BadRequest, match="No machine 'nowhere' takes orders"):
            await other.models.remove(name, machine="nowhere")


def test_a_supervisor_that_ends_waits_for_no_download(programs: Programs, hub: Hub, model: Path) -> None:
    """Neither for one that runs, nor for one that waits for its turn."""
    admin = start(programs, hub, "--model", str(model))
    hub.pause_after = 15 << 20
    for name in ("owner/model-GGUF:Q4_K_M", "owner/model-GGUF:Q8_0"):
        assert admin.send("POST", "/models", {"model": name}) == (200, {"success": True})
    admin.wait_for("owner/model-GGUF:Q4_K_M", "download_progress")
    with (admin.up.state / "hub" / ".fetching").open("a") as lock:
        admin.up.send(signal.SIGTERM)
        assert admin.up.wait() == 0
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it any more
    assert not admin.up.survivors()


def test_what_can_not_be_downloaded_is_refused_or_told(programs: Programs, hub: Hub, model: Path) -> None:
    admin = start(programs, hub, "--model", str(model))
    for name in ("no-owner", "a/b/c", "../../etc/passwd", "--flag/x", "owner/m\n"):
        status, message = error_of(admin.send("POST", "/models", {"model": name}))
        assert (status, "names no model of the hub" in message) == (400, True), message
    for body in ({}, {"model": 1}, {"model": ""}, {"model": "x" * 1000}):
        assert admin.send("POST", "/models", dict(body))[0] == 400
    status, message = error_of(admin.send("POST", "/models", {"model": "owner/model-GGUF", "machine": "nowhere"}))
    assert (status, "No machine 'nowhere' takes orders" in message) == (400, True)
    assert admin.send("POST", "/models", {"model": "owner/nothing"}) == (200, {"success": True})
    told = admin.wait_for("owner/nothing", "download_failed")
    assert "no such model on the hub" in told["data"]["reason"]
    for method, path in (("POST", "/models"), ("DELETE", "/models?model=x"), ("DELETE", "/models/x")):
        assert admin.send(method, path, {"model": "x"} if method == "POST" else None, "pk-unknown-0123456789")[0] == 401


def test_what_is_needed_is_not_removed(programs: Programs, hub: Hub) -> None:
    """A model of the catalog, and one that a worker still reads."""
    admin = start(programs, hub, "--hf", "owner/demo-GGUF:Q8_0")
    before = files(admin)
    assert before == {"demo-Q8_0.gguf"}
    status, message = error_of(admin.send("DELETE", "/models?model=owner/demo-GGUF:Q8_0"))
    assert (status, "is in use" in message) == (400, True), message
    assert files(admin) == before
    admin.up.send(signal.SIGTERM)
    assert admin.up.wait() == 0


def test_what_the_catalog_names_is_not_removed(programs: Programs, hub: Hub, model: Path) -> None:
    """Though no worker reads it."""
    lazy = {"name": "lazy", "hf": "owner/demo-GGUF:Q8_0", "residency": {}}
    here = {"name": "here", "path": str(model), "slots": 1, "ctx": 128, "residency": {"min": 1}}
    catalog = programs.folder / "catalog.json"
    catalog.write_text(json.dumps({"models": [here, lazy]}))
    up = programs.start("up", "--port", "0", "--catalog", str(catalog), **hub.environment)
    up.until("Ctrl-C stops everything")
    admin = Admin(up, (up.state / "first-key").read_text().strip(), f"http://127.0.0.1:{port_of(up)}")
    wait_until(lambda: admin.send("DELETE", "/models?model=owner/none")[0] != 501, up.text)
    status, message = error_of(admin.send("DELETE", "/models?model=owner/demo-GGUF:Q8_0"))
    assert (status, "names owner/demo-GGUF:Q8_0 (lazy)" in message) == (400, True), message
    assert files(admin) == {"demo-Q8_0.gguf"}
    catalog.write_text(json.dumps({"models": [here]}))
    assert admin.send("DELETE", "/models?model=owner/demo-GGUF:Q8_0") == (200, {"success": True})
    assert files(admin) == set()


def test_nothing_is_downloaded_offline(programs: Programs, hub: Hub, model: Path) -> None:
    admin = start(programs, hub, "--model", str(model), "--offline")
    status, message = error_of(admin.send("POST", "/models", {"model": "owner/model-GGUF"}))
    assert (status, "fetches nothing" in message) == (400, True)
    assert not hub.requests
