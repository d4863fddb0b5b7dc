"""LiteLLM's own client of its proxy, and its command line, against a gateway with an accounts service.

It is installed as the benchmark of the field does it, in an environment of its own in the cache folder, so nothing of
it is a dependency here. `tests/integration/accounts/test_litellm.py` sends what it sends without it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accounts.protocol.key_format import is_whole
from accounts.protocol.records import digest
from benchmarks.field.install import Missing, litellm
from tests.clients.programs import SCRIPTS
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

MODEL = "small"
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of LiteLLM's programs."""
    try:
        return litellm().parent
    except Missing as error:
        pytest.skip(f"LiteLLM can't be installed ({error}); `python -m benchmarks.field --again` tries it again")


@pytest.fixture(scope="module")
def stack(programs: Path) -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "1", "--tokens", "8")
        running.gateway(accounts_url=running.accounts().url)
        yield running


def environment(stack: Stack, key: str) -> dict[str, str]:
    """The client's settings; without LITELLM_LOCAL_MODEL_COST_MAP it would look for newer prices, and wait for them."""
    return {
        "HOME": str(stack.folder),
        "PATH": "/usr/bin:/bin",
        "COLUMNS": "200",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_PROXY_URL": stack.gateways[0].url,
        "LITELLM_PROXY_API_KEY": key,
    }


class Client:
    """LiteLLM's client with a key, in a process of LiteLLM's environment."""

    def __init__(self, programs: Path, stack: Stack, key: str) -> None:
        command = [str(programs / "python"), str(SCRIPTS / "litellm_proxy_client.py")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment(stack, key), stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def call(self, name: str, **arguments: object) -> Any:
        """What `manager.method` returns."""
        told = self._told(name, arguments)
        assert "error" not in told, told
        return told["answer"]

    def refused(self, name: str, **arguments: object) -> tuple[str, int, str]:
        """Exception, status, and the error's message or `param`, of a call that is refused."""
        told = self._told(name, arguments)
        return told["error"], told.get("status", 0), told.get("body", told["message"])

    def post(self, path: str, **body: object) -> Any:
        """The answer to a request that the client has no method for, sent by its `http`."""
        return self.call("http.request", method="POST", uri=path, json=body)

    def get(self, path: str, **query: str) -> Any:
        return self.call("http.request", method="GET", uri=path, params=query)

    def _told(self, name: str, arguments: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([*name.split("."), arguments]) + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told


@pytest.fixture(scope="module")
def client(programs: Path, stack: Stack) -> Iterator[Client]:
    made = Client(programs, stack, stack.key)
    yield made
    made.close()


def test_a_keys_life(client: Client) -> None:
    client.post("/team/new", team_id="red", models=[MODEL], max_budget=20, budget_duration="30d", tpm_limit=1000)
    made = client.call("keys.generate", models=[MODEL], duration="24h", key_alias="ci", team_id="red", aliases={})
    assert is_whole(made["key"])
    assert (made["key_alias"], made["team_id"], made["models"]) == ("ci", "red", [MODEL])
    for key in (made["key"], made["token"], digest(made["key"])):
        assert client.call("keys.info", key=key)["info"]["token"] == made["token"]
    changed = client.call("keys.update", key=made["key"], models=[MODEL, "large"], duration="7d")
    assert changed["models"] == [MODEL, "large"]
    assert client.post("/key/block", key=made["key"])["blocked"] is True
    assert client.post("/key/unblock", key=made["key"])["blocked"] is False
    anew = client.post(f"/key/{made['token']}/regenerate")
    assert anew["key"] != made["key"]
    listed = client.call("keys.list", page=1, size=50, team_id="red", return_full_object=True, include_team_keys=True)
    assert [key["token"] for key in listed["keys"]] == ["ci"]
    assert client.call("keys.list", key_alias="none")["keys"] == []
    assert client.call("keys.delete", keys=[anew["key"]]) == {"deleted_keys": [anew["key"]]}
    assert client.refused("keys.info", key=anew["key"])[:2] == ("HTTPError", 404)


def test_users_and_teams(client: Client) -> None:
    client.post("/team/new", team_id="blue", team_alias="The blue team")
    made = client.call("users.create_user", user_data={"user_email": "ann@example.com", "teams": ["blue"]})
    assert is_whole(made["key"])
    found = client.call("users.get_user", user_id="ann@example.com")
    assert [key["token"] for key in found["keys"]] == [made["token"]]
    assert "ann@example.com" in [user["user_id"] for user in client.call("users.list_users")]
    (team,) = client.call("teams.list", user_id="ann@example.com")
    assert (team["team_id"], team["team_alias"]) == ("blue", "The blue team")
    client.post("/team/update", team_id="blue", rpm_limit=60)
    assert client.get("/team/info", team_id="blue")["team_info"]["rpm_limit"] == 60
    client.call("users.delete_user", user_ids=["ann@example.com"])
    assert client.refused("users.get_user", user_id="ann@example.com")[0] == "NotFoundError"
    client.post("/team/delete", team_ids=["blue"])


def test_a_key_is_used_and_its_spend_read(programs: Path, stack: Stack, client: Client) -> None:
    made = client.call("keys.generate", key_alias="app", models=[MODEL])
    own = Client(programs, stack, made["key"])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "answer" not in own._told("models.list", {}) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [model["id"] for model in own.call("models.list")] == [MODEL]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        usage = own.call("http.request", method="POST", uri="/chat/completions", json=body)["usage"]
        assert own.refused("keys.generate")[:2] == ("HTTPError", 403)
    finally:
        own.close()
    while not (logs := client.get("/spend/logs", api_key=made["key"])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [log["total_tokens"] for log in logs] == [usage["total_tokens"]]
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert MODEL in client.get("/spend/logs", start_date=today, end_date=today)[0]["models"]


def test_refusals_are_the_clients_exceptions(programs: Path, stack: Stack, client: Client) -> None:
    error, status, body = client.refused("keys.generate", spend=5.0)
    assert (error, status, json.loads(body)["error"]["param"]) == ("HTTPError", 400, "spend")
    stranger = Client(programs, stack, "sk-nobody")
    try:
        assert stranger.refused("keys.list")[:2] == ("UnauthorizedError", 401)
        assert stranger.refused("teams.list")[0] == "UnauthorizedError"
    finally:
        stranger.close()


def test_the_command_line(programs: Path, stack: Stack) -> None:
    def lite(*arguments: str) -> str:
        done = subprocess.run(
            [str(programs / "lite"), *arguments],
            env=environment(stack, stack.key),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    made = json.loads(lite("keys", "generate", "--key-alias", "nightly", "--models", MODEL, "--duration", "24h"))
    assert is_whole(made["key"])
    assert "nightly" in lite("keys", "list", "--size", "100")
    ann = json.loads(lite("users", "create", "--email", "ann@example.org", "--alias", "Ann", "--team", "default"))
    assert (ann["user_id"], ann["user_alias"], ann["teams"]) == ("ann@example.org", "Ann", ["default"])
    assert "ann@example.org" in lite("users", "list")
    assert json.loads(lite("users", "get", "--id", "ann@example.org"))["user_id"] == "ann@example.org"
    assert "default" in lite("teams", "list")
    assert json.loads(lite("http", "request", "GET", "/key/info?key=nightly"))["info"]["token"] == "nightly"
    lite("users", "delete", "ann@example.org")
    assert json.loads(lite("keys", "delete", "--key-aliases", "nightly")) == {"deleted_keys": ["nightly"]}
