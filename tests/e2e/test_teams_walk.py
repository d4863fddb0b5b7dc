"""The walk of docs/teams.md by real processes: gateway, accounts service, Redis, and a worker that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.databases import BACKENDS, Backend, Databases
from tests.support.stack import Stack


@pytest.fixture(scope="module")
def databases() -> Iterator[Databases]:
    made = Databases()
    yield made
    made.close()


@pytest.fixture(params=BACKENDS)
def stack(request: pytest.FixtureRequest, databases: Databases) -> Iterator[Stack]:
    backend: Backend = request.param
    with Stack() as running:
        running.accounts(database_url=databases.url(backend, running.folder))
        running.fake_worker("small", "--step-ms", "1", "--tokens", "5", wait=False)
        running.gateway(accounts_url=running.accounts_url)
        yield running


class Asker:
    """Asks a gateway with a key."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, body: object = None, status: int = 200, **headers: str) -> Any:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.send(method, path, body, **told)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def send(self, method: str, path: str, body: object = None, **headers: str) -> httpx2.Response:
        told = {**self._headers, **headers}
        return httpx2.request(method, f"{self._url}{path}", json=body, headers=told, timeout=30)

    def status(self) -> int:
        """The status of a call of the model."""
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
        return self.send("POST", "/v1/chat/completions", body).status_code

    def wait_for(self, status: int, seconds: float = 10.0) -> float:
        """Wait until a call has this status, and return how long that took."""
        began = time.monotonic()
        while self.status() != status:
            assert time.monotonic() < began + seconds, f"{self.status()}, not {status}"
            time.sleep(0.05)
        return time.monotonic() - began


def test_two_teams_and_their_keys(stack: Stack) -> None:
    url = stack.gateways[0].url
    first = Asker(url, stack.key)
    began = time.monotonic()
    while first.send("GET", "/admin/teams").status_code != 200:
        assert time.monotonic() < began + 30
        time.sleep(0.1)
    assert first.ask("GET", "/admin/whoami")["role"] == "admin"
    first.ask("POST", "/admin/teams", {"name": "red", "limits": {"tokens_per_minute": 60_000}}, 201)
    first.ask("POST", "/admin/teams", {"name": "blue", "aliases": ["large"]}, 201)
    lead = first.ask("POST", "/admin/keys", {"name": "red-lead", "team": "red", "role": "manager"}, 201)
    service = first.ask("POST", "/admin/keys", {"name": "red-ci", "team": "red"}, 201)
    app = first.ask("POST", "/admin/keys", {"name": "blue-app", "team": "blue"}, 201)
    ci, manager = Asker(url, service["key"]), Asker(url, lead["key"])
    ci.wait_for(200)
    Asker(url, app["key"]).wait_for(403)  # its team may not use the model

    manager.ask("GET", "/admin/keys/blue-app", status=404)
    manager.ask("POST", "/admin/keys", {"role": "admin"}, 403)
    ci.ask("POST", "/admin/keys", {}, 403)
    assert {key["name"] for key in manager.ask("GET", "/admin/keys")["data"]} == {"red-lead", "red-ci"}

    rotated = first.ask("POST", "/admin/keys/red-ci/rotate", {"grace_s": 3600}, idempotency_key="monday")
    again = first.ask("POST", "/admin/keys/red-ci/rotate", {"grace_s": 3600}, idempotency_key="monday")
    assert rotated["key"] == again["key"]
    anew = Asker(url, rotated["key"])
    assert anew.wait_for(200) < 1.5
    assert ci.status() == 200, "the replaced key works for its grace"

    first.ask("POST", "/admin/keys/red-ci/block")
    began = time.monotonic()
    while anew.status() == 200:
        assert time.monotonic() < began + 1.0, "a blocked key works for more than a second"
    first.ask("POST", "/admin/keys/red-ci/unblock")
    anew.wait_for(200)
    first.ask("DELETE", "/admin/keys/red-ci")
    assert anew.wait_for(401) < 1.0

    for name in ("ann@example.com", "a+b"):
        first.ask("POST", "/admin/users", {"name": name, "teams": {"red": "user"}}, 201)
        assert first.ask("GET", f"/admin/users/{name}")["teams"] == {"red": "user"}
    first.ask("POST", "/admin/aliases", {"name": "org/Model 7B", "limits": {"max_parallel": 1}}, 201)
    assert first.ask("GET", "/admin/aliases/org/Model%207B")["limits"] == {"max_parallel": 1}
    found = first.ask("GET", "/admin/audit?subject=red-ci")["data"]
    assert [entry["action"] for entry in found] == ["delete", "unblock", "block", "rotate", "create"]
    assert found[0]["address"] == "127.0.0.1"
    assert found[0]["request_id"]
    assert first.ask("GET", "/admin/audit/verify")["is_whole"]
    assert httpx2.get(f"{url}/admin/docs").status_code == 200
    assert httpx2.get(f"{url}/admin/openapi.json").json()["openapi"] == "3.1.0"
    assert httpx2.get(f"{url}/admin/keys").status_code == 401
