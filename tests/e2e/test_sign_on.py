"""People sign in, as they do: by a browser, by a program that opens one, by a device's code; and call a model."""

from __future__ import annotations

import html
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from accounts.sso.oauth import challenge_of
from tests.support.identity_provider import IdentityProvider
from tests.support.sign_on_front import ANN, BOB, EVE, RULES, TIMEOUT_S, SignOnFront, sign_on_front
from tests.support.stack import DEMO_MODEL

SESSION_S = 3600


@pytest.fixture(scope="module")
def front() -> Iterator[SignOnFront]:
    with sign_on_front({"session_s": SESSION_S}, model=DEMO_MODEL) as running:
        yield running


@pytest.fixture(autouse=True)
def as_usual(front: SignOnFront) -> None:
    front.provider.person, front.provider.refuses, front.provider.has_device_flow = dict(ANN), False, True
    front.provider.behaviour = "well"


class Program:
    """A program that waits on loopback until the browser comes back, as `paddock login` does."""

    def __init__(self) -> None:
        self.verifier = secrets.token_urlsafe(32)
        self.got: dict[str, str] = {}
        program = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                program.got = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.handle_request)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/done?mine=7"

    def finish(self) -> dict[str, str]:
        """Return what the browser brought."""
        self.thread.join(TIMEOUT_S)
        self.server.server_close()
        return self.got


def answers(front: SignOnFront, key: str) -> bool:
    """Return whether a call of the model is answered."""
    answer = front.call(key)
    return answer.status_code == 200 and bool(answer.json()["choices"][0]["message"]["content"])


def test_a_person_signs_in_by_a_browser_and_calls_a_model(front: SignOnFront) -> None:
    browser = front.browser()
    answer = browser.open(f"{front.url}/auth/login")
    assert (answer.status_code, "You are ann@example.com: user in the team red." in answer.text) == (200, True)
    key = browser.cookie("paddock")
    assert key is not None
    assert answers(front, key)
    told = front.whoami(key).json()
    assert (told["user"], told["team"], told["role"]) == ("ann@example.com", "red", "user")
    assert told["key"].startswith("session-")


def test_a_browser_goes_where_it_wanted_to(front: SignOnFront) -> None:
    browser = front.browser()
    wanted = "/admin/whoami?x=1&y=a%20b"
    answer = browser.open(f"{front.url}/auth/login?return_to={quote(wanted, safe='')}")
    assert answer.json()["user"] == "ann@example.com"
    assert browser.visited[-1] == front.url + wanted


def test_a_token_itself_calls_a_model(front: SignOnFront) -> None:
    token = front.provider.token()
    assert answers(front, token)
    told = front.whoami(token).json()
    assert (told["key"], told["user"], told["team"]) == ("", "ann@example.com", "red")


def test_a_program_gets_the_key_of_whoever_signs_in_by_its_browser(front: SignOnFront) -> None:
    program, browser = Program(), front.browser()
    query = f"return_to={quote(program.address, safe='')}&code_challenge={challenge_of(program.verifier)}"
    browser.open(f"{front.url}/auth/login?{query}")
    got = program.finish()
    assert got["mine"] == "7"
    answer = front.post("/auth/token", {"code": got["code"], "code_verifier": program.verifier})
    session = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert (session["user"], session["team"], session["role"]) == ("ann@example.com", "red", "user")
    assert SESSION_S - 60 < session["expires_at"] - time.time() <= SESSION_S
    assert answers(front, session["key"])


def test_a_program_is_told_that_its_user_refused(front: SignOnFront) -> None:
    front.provider.refuses = True
    program, browser = Program(), front.browser()
    query = f"return_to={quote(program.address, safe='')}&code_challenge={challenge_of(program.verifier)}"
    browser.open(f"{front.url}/auth/login?{query}")
    got = program.finish()
    assert "code" not in got
    assert "access_denied" in got["error_description"]


def test_a_person_signs_in_for_a_device(front: SignOnFront) -> None:
    front.provider.person = dict(BOB)
    begun = front.post("/auth/device", {}).json()
    assert begun["verification_uri"] == f"{front.provider.issuer}/activate"
    assert begun["user_code"] in begun["verification_uri_complete"]
    assert begun["interval"] >= 1
    asked = {"device_code": begun["device_code"]}
    pending = front.post("/auth/device/token", asked)
    assert (pending.status_code, pending.json()["error"]["code"]) == (400, "authorization_pending")
    hurried = front.post("/auth/device/token", asked)
    assert hurried.json()["error"]["code"] == "slow_down"
    front.provider.approve(begun["user_code"])
    session = front.post("/auth/device/token", asked).json()
    assert (session["user"], session["team"]) == ("bob@example.com", "blue")
    assert answers(front, session["key"])


def test_a_device_is_told_that_its_user_refused(front: SignOnFront) -> None:
    begun = front.post("/auth/device", {}).json()
    front.provider.approve(begun["user_code"], approved=False)
    refused = front.post("/auth/device/token", {"device_code": begun["device_code"]})
    assert refused.json()["error"]["code"] == "access_denied"
    again = front.post("/auth/device/token", {"device_code": begun["device_code"]})
    assert again.json()["error"]["code"] == "expired_token"


def test_each_gets_team_and_role_by_the_rules(front: SignOnFront) -> None:
    for group, team, role in (("llm-leads", "red", "manager"), ("llm-admins", "ops", "admin")):
        name = f"{group}@example.com"
        key = front.signed_in({**ANN, "sub": group, "email": name, "groups": ["staff", group]}).cookie("paddock")
        assert key is not None
        told = front.whoami(key).json()
        assert (told["user"], told["team"], told["role"]) == (name, team, role)


def test_who_signs_in_again_and_again_has_few_sessions(front: SignOnFront) -> None:
    fay = {**ANN, "sub": "9", "email": "fay@example.com"}
    keys = [front.signed_in(fay).cookie("paddock") for _ in range(22)]
    front.until(keys[1] or "", 401)
    valid = [front.whoami(key or "").status_code == 200 for key in keys]
    assert valid == [False, False] + 20 * [True]


def test_errors_say_what_to_do(front: SignOnFront) -> None:
    front.provider.person = dict(EVE)
    page = front.browser().open(f"{front.url}/auth/login")
    assert "Ask the operator for a rule" in page.text
    assert 'href="/auth/login"' in page.text
    unknown = front.browser().open(f"{front.url}/auth/login?provider=other")
    assert (unknown.status_code, "there are: test" in unknown.text) == (404, True)
    front.provider.has_device_flow = False
    assert front.post("/auth/device", {"provider": "other"}).status_code == 404
    assert front.post("/auth/device", {"unknown": 1}).status_code == 400
    assert front.post("/auth/device/token", {}).status_code == 400


def test_only_known_users_come_where_that_is_set() -> None:
    rules = [*RULES, {"claim": "groups", "value": "staff", "team": "blue"}]
    with sign_on_front(create_users=False, rules=rules) as front:
        page = front.browser().open(f"{front.url}/auth/login")
        assert (page.status_code, "not known here" in page.text) == (403, True)
        refused = front.call(front.provider.token())
        assert (refused.status_code, "not known here" in refused.text) == (403, True)


def test_a_provider_that_is_away_is_told(front: SignOnFront) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with sign_on_front({}, issuer=nobody) as away:
            page = away.browser().open(f"{away.url}/auth/login")
            assert (page.status_code, "does not answer" in page.text) == (503, True)
            assert int(page.headers["retry-after"]) >= 1
            assert away.post("/auth/device", {}).status_code == 503
            assert away.call(away.stack.key).status_code == 200


def test_people_choose_among_several_providers() -> None:
    with IdentityProvider(person=dict(BOB), has_device_flow=False) as other:
        entry = other.settings(name="Guests & others", user_prefix="guest:", rules=RULES)
        with sign_on_front(others=[entry]) as front:
            browser = front.browser()
            page = browser.open(f"{front.url}/auth/login?return_to=%2Fadmin%2Fwhoami")
            links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', page.text)]
            assert "Guests &amp; others" in page.text
            assert browser.open(front.url + links[1]).json()["user"] == "guest:bob@example.com"
            assert browser.open(front.url + links[0]).json()["user"] == "ann@example.com"
            refused = front.post("/auth/device", {})
            assert (refused.status_code, "Guests & others" in refused.json()["error"]["message"]) == (400, True)
            told = front.post("/auth/device", {"provider": "Guests & others"})
            assert (told.status_code, told.json()["error"]["type"]) == (403, "permission_error")


def test_without_single_sign_on_its_routes_say_so() -> None:
    with sign_on_front(others=None) as front:
        page = front.browser().open(f"{front.url}/auth/login")
        assert (page.status_code, "no single sign-on here" in page.text) == (404, True)
        assert front.post("/auth/device", {}).status_code == 404
        assert front.call(front.provider.token()).status_code == 401


def test_the_setting_may_be_a_file_and_an_error_ends_the_start(front: SignOnFront) -> None:
    file = front.stack.folder / "oidc.json"
    file.write_text(json.dumps({"providers": [{"issuer": "http://id.example.com", "client_id": "a"}]}))
    for command in ("gateway", "accounts"):
        argv = [sys.executable, "-m", "gateway.cli", command]
        process = front.stack.spawn(f"bad-{command}", argv, {"PADDOCK_OIDC": str(file)})
        assert process.popen.wait(90) == 2
        assert "oidc: providers[0].issuer" in process.text()
