"""The walk of docs/teams.md as a platform engineer does it, by commands and by the API, on each database: `paddock up`,
two teams and three keys, a limit and a budget that are hit, usage, a rotation, a sign-in, a file."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from accounts.protocol.records import digest
from tests.integration.supervisor.conftest import Programs
from tests.support.databases import BACKENDS, Backend, Databases
from tests.support.identity_provider import IdentityProvider
from tests.support.program import Program
from tests.support.stack import DEMO_MODEL, ROOT
from tests.support.walk_ways import Asker, ByApi, ByCommand, Used, Way

MODEL = "small"
HOLDS_S = 1.0
"""Seconds within which a change holds at all gateways."""
KNOWN_S = 10.0
"""The same, where the machine may be busy with other tests."""
POLL_S = 0.2
"""Between calls with a key that is not known: an address from which such come is slowed."""
GRACE_S = 3600
PRICES = (0.5, 1.5)
SPENT_SOON = 0.00004
"""A budget that a few short answers spend."""
RULES = [{"claim": "groups", "value": "llm", "team": "people"}]
PAGE = (ROOT / "docs" / "teams.md").read_text()


@dataclass(slots=True)
class Place:
    """A `paddock up` that runs."""

    url: str
    key: str
    """The first key, as it is printed."""
    state: Path
    provider: IdentityProvider


@dataclass(slots=True)
class Caller(Asker):
    """A program that calls the model with a key, and counts what its answers say that it has used."""

    num_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def used(self) -> Used:
        return Used(self.num_calls, self.prompt_tokens, self.completion_tokens)

    def call(self) -> httpx2.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        answer = self.send("POST", "/v1/chat/completions", body)
        if answer.status_code == 200:
            self._count(answer.json()["usage"])
        return answer

    def stream(self, begun: Callable[[], None]) -> list[Any]:
        """Return the events of a long answer, and call `begun` at the first of them."""
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        headers = {"Authorization": f"Bearer {self.key}"}
        events: list[Any] = []
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    if len(events) == 1:
                        begun()
        assert events[-1:] == ["[DONE]"], (answer.status_code, events[-1:])
        events = [json.loads(event) for event in events[:-1]]
        self._count(events[-1]["usage"])
        return events

    def wait_for(self, status: int, seconds: float = KNOWN_S) -> httpx2.Response:
        """Call until the answer has this status."""
        deadline = time.monotonic() + seconds
        while (answer := self.call()).status_code != status:
            assert time.monotonic() < deadline, answer.text
            time.sleep(POLL_S if answer.status_code == 401 else 0.05)
        return answer

    def _count(self, usage: dict[str, int]) -> None:
        self.num_calls += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]


@dataclass(slots=True)
class Steady:
    """A service that streams answers one after the other, without a pause, while its key is rotated."""

    caller: Caller
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When each answer began and ended."""
    failure: str = ""
    _streams: threading.Event = field(default_factory=threading.Event)
    """Set at the first event of an answer."""
    _enough: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Steady:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._streams.wait(KNOWN_S), self.failure
        return self

    def __exit__(self, *error: object) -> None:
        self._enough.set()
        self._thread.join()

    def begin_another(self) -> None:
        """Wait until the next answer has begun."""
        self._streams.clear()
        assert self._streams.wait(KNOWN_S), self.failure

    def _run(self) -> None:
        while not self._enough.is_set():
            began = time.monotonic()
            try:
                self.caller.stream(self._streams.set)
            except (AssertionError, httpx2.HTTPError) as error:
                self.failure = repr(error)
                return
            self.spans.append((began, time.monotonic()))


@pytest.fixture(scope="module")
def databases() -> Iterator[Databases]:
    made = Databases()
    yield made
    made.close()


@pytest.fixture(scope="module", params=BACKENDS)
def place(request: pytest.FixtureRequest, databases: Databases, tmp_path_factory: Any) -> Iterator[Place]:
    """The bootstrap: one command, which prints the first key and makes the tables."""
    backend: Backend = request.param
    programs = Programs(tmp_path_factory.mktemp("up"))
    with IdentityProvider() as provider:
        oidc = json.dumps({"providers": [provider.settings(rules=RULES)]})
        database = {} if backend == "sqlite" else {"PADDOCK_DATABASE_URL": databases.url(backend, programs.folder)}
        flags = ("--port", "0", "--model", str(DEMO_MODEL), "--alias", MODEL, "--workers", "1", "--slots", "4")
        up = programs.start("up", *flags, PADDOCK_OIDC=oidc, **database)
        try:
            up.until("Ctrl-C stops everything")
            [url], [key] = (re.findall(rf"^ *{name} +(\S+)", up.text(), re.M) for name in ("address", "API key"))
            running = Place(url.removesuffix("/v1"), key, up.state, provider)
            Asker(running.url, key).ask("GET", "/admin/teams")  # at once
            yield running
            assert up.stop() == 0, up.text()
        finally:
            programs.close()


@pytest.fixture(params=["api", "commands"])
def way(
    request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Way:
    if request.param == "api":
        return ByApi(Asker(place.url, place.key))
    return ByCommand(Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(place.state)}), place.url)


@pytest.fixture
def kind(way: Way) -> str:
    """Stands before all names of a walk: walks share a place."""
    return "api" if isinstance(way, ByApi) else "cmd"


def test_two_teams_three_keys_a_limit_a_budget_and_the_usage(place: Place, way: Way, kind: str) -> None:
    red, blue = f"{kind}-red", f"{kind}-blue"
    assert way.role() == "admin"
    for team in (red, blue):
        way.make_team(team)
    lead = Asker(place.url, way.make_key(f"{red}-lead", red, "manager"))
    ci, app = (Caller(place.url, way.make_key(f"{team}-app", team)) for team in (red, blue))
    for caller in (ci, app):
        caller.wait_for(200)
    managed = lead.ask("GET", "/admin/keys")["data"]
    assert {key["name"] for key in managed} == {f"{red}-lead", f"{red}-app"}
    lead.ask("GET", f"/admin/keys/{blue}-app", status=404)

    way.limit_requests(f"{red}-app", 3)
    time.sleep(HOLDS_S)
    answers = [ci.call() for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 61
    assert app.call().status_code == 200, "the other team is not limited"
    way.limit_requests(f"{red}-app", None)
    ci.wait_for(200)

    way.set_price(MODEL, *PRICES)
    way.set_budget(blue, SPENT_SOON)
    refused = app.wait_for(429)
    assert refused.json()["error"]["code"] == "budget_exceeded"
    assert re.search(r"20\d\d-\d\d-01", refused.text), "the date of renewal"
    assert ci.call().status_code == 200, "the other team has no budget"

    expected = {red: ci.used, blue: app.used}
    deadline = time.monotonic() + KNOWN_S
    while (found := {team: way.used(team).get(f"{team}-app") for team in expected}) != expected:
        assert time.monotonic() < deadline, f"{found}, not {expected}"
        time.sleep(0.1)
    assert way.budget_spent(blue) > SPENT_SOON / 2, "a call that would pass the budget is refused"
    way.set_budget(blue, 100)
    app.wait_for(200)
    assert way.is_audit_whole()


def test_a_key_is_rotated_without_an_outage(place: Place, way: Way, kind: str) -> None:
    team = f"{kind}-turning"
    way.make_team(team)
    old = Caller(place.url, way.make_key(f"{team}-app", team))
    old.wait_for(200)
    with Steady(Caller(place.url, old.key)) as service:
        before = time.monotonic()
        new = Caller(place.url, way.rotate(f"{team}-app", GRACE_S))
        rotated = time.monotonic()
        new.wait_for(200)
        assert old.call().status_code == 200, "the replaced key works for its grace"
        service.begin_another()
    assert service.failure == ""
    assert [span for span in service.spans if span[0] < before and rotated < span[1]], "one streamed all the while"
    assert [span for span in service.spans if span[0] > rotated], "and called anew"


def test_a_person_signs_in_and_calls(place: Place, way: Way, kind: str, tmp_path: Path) -> None:
    person = {"sub": kind, "email": f"{kind}@example.com", "email_verified": True, "groups": ["llm"]}
    place.provider.person = person
    session = Caller(place.url, way.sign_in(tmp_path))
    session.wait_for(200)
    told = session.ask("GET", "/admin/whoami")
    assert (told["user"], told["team"], told["role"]) == (f"{kind}@example.com", "people", "user")
    assert Caller(place.url, place.provider.token()).call().status_code == 200, "a token of the provider itself"


def test_a_file_is_applied(place: Place, way: Way, kind: str, tmp_path: Path) -> None:
    team, secret, file = f"{kind}-green", f"pk-declared-by-{kind}", tmp_path / "access.yaml"
    file.write_text(
        f"teams: [{{name: {team}, limits: {{requests_per_minute: 2}}}}]\n"
        f"keys: [{{name: {team}-app, team: {team}, sha256: {digest(secret)}, expires_at: 2031-01-31}}]\n"
    )
    caller, made = Caller(place.url, secret), [f"team {team}", f"key {team}-app"]
    assert way.apply(file, dry_run=True) == made
    assert caller.call().status_code == 401
    assert way.apply(file) == made
    assert way.apply(file) == []
    caller.wait_for(200)
    assert "requests" in caller.wait_for(429).json()["error"]["message"]


def test_the_requests_of_the_page_do_what_it_says(place: Place) -> None:
    """Each request of docs/teams.md to the admin API is sent as it stands there, in order."""
    [walk] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    later = re.findall(r"^    (curl .*\$URL.*)$", PAGE, re.MULTILINE)
    assert len(later) > 5
    script = walk + f'AUTH="Authorization: Bearer $PADDOCK_API_KEY" URL={place.url}\n' + "\n".join(later)
    script = script.replace("http://127.0.0.1:8080", place.url).replace("pk-...", place.key)
    script = "set -eu\n" + script.replace("curl ", "curl --fail-with-body -w '\\n' ")
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, timeout=60, cwd=place.state)
    assert done.returncode == 0, (done.stdout[-500:], done.stderr)
    assert done.stdout.count(b'"key":"pk-') == 4
    assert (place.state / "november.parquet").read_bytes().startswith(b"PAR1")


def test_roles_and_the_end_of_keys(place: Place) -> None:
    first = Asker(place.url, place.key)
    first.ask("POST", "/admin/teams", {"name": "one", "limits": {"tokens_per_minute": 60_000}}, 201)
    first.ask("POST", "/admin/teams", {"name": "two", "aliases": ["large"]}, 201)
    lead = first.ask("POST", "/admin/keys", {"name": "one-lead", "team": "one", "role": "manager"}, 201)
    service = first.ask("POST", "/admin/keys", {"name": "one-ci", "team": "one"}, 201)
    app = first.ask("POST", "/admin/keys", {"name": "two-app", "team": "two"}, 201)
    ci, manager = Caller(place.url, service["key"]), Asker(place.url, lead["key"])
    ci.wait_for(200)
    Caller(place.url, app["key"]).wait_for(403)  # its team may not use the model
    manager.ask("POST", "/admin/keys", {"role": "admin"}, 403)
    ci.ask("POST", "/admin/keys", {}, 403)

    asked: dict[str, Any] = {"body": {"grace_s": 3600}, "idempotency_key": "monday"}
    rotated, again = (first.ask("POST", "/admin/keys/one-ci/rotate", **asked) for _ in range(2))
    assert rotated["key"] == again["key"]
    anew = Caller(place.url, rotated["key"])
    time.sleep(HOLDS_S)
    assert anew.call().status_code == 200
    first.ask("POST", "/admin/keys/one-ci/block")
    began = time.monotonic()
    while anew.call().status_code == 200:
        assert time.monotonic() < began + 1.0, "a blocked key works for more than a second"
    first.ask("POST", "/admin/keys/one-ci/unblock")
    anew.wait_for(200)
    first.ask("DELETE", "/admin/keys/one-ci")
    time.sleep(HOLDS_S)
    assert anew.call().status_code == 401

    for name in ("ann@example.org", "a+b"):
        first.ask("POST", "/admin/users", {"name": name, "teams": {"one": "user"}}, 201)
        assert first.ask("GET", f"/admin/users/{name}")["teams"] == {"one": "user"}
    first.ask("POST", "/admin/aliases", {"name": "org/Model 7B", "limits": {"max_parallel": 1}}, 201)
    assert first.ask("GET", "/admin/aliases/org/Model%207B")["limits"] == {"max_parallel": 1}
    found = first.ask("GET", "/admin/audit?subject=one-ci")["data"]
    assert [entry["action"] for entry in found] == ["delete", "unblock", "block", "rotate", "create"]
    assert found[0]["address"] == "127.0.0.1"
    assert found[0]["request_id"]
    assert httpx2.get(f"{place.url}/admin/docs").status_code == 200
    assert httpx2.get(f"{place.url}/admin/openapi.json").json()["openapi"] == "3.1.0"
    assert httpx2.get(f"{place.url}/admin/keys").status_code == 401
