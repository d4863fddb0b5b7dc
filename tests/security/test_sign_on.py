"""Attacks on the flows of single sign-on, against a gateway, an accounts service and a provider that are processes."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
import requests

from accounts.sso.oauth import challenge_of
from tests.support.browser import Browser
from tests.support.identity_provider import ProviderCode
from tests.support.loopback import calling_from
from tests.support.sign_on_front import ANN, BOB, EVE, TIMEOUT_S, SignOnFront, sign_on_front

PROGRAM = "http://127.0.0.1:9/done?mine=1"
"""Where a program would wait; the browser is not sent there."""


@pytest.fixture(scope="module")
def front() -> Iterator[SignOnFront]:
    with sign_on_front() as running:
        yield running


@pytest.fixture(autouse=True)
def well_behaved(front: SignOnFront) -> None:
    front.provider.person, front.provider.forged = dict(ANN), {}
    front.provider.refuses, front.provider.names_itself = False, True


def query_of(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def begun(front: SignOnFront, browser: Browser, query: str = "") -> str:
    """Return the address at which the provider sends a browser back that has begun to sign in."""
    answer = browser.open(f"{front.url}/auth/login{query}", stop_at=f"{front.url}/auth/callback")
    assert answer.is_redirect, answer.text
    return answer.headers["location"]


def is_refused(front: SignOnFront, browser: Browser, answer: requests.Response, told: str) -> None:
    """Check that a page says why the browser is not signed in, and that it is not."""
    assert answer.status_code in (400, 403), answer.text
    assert told in answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert browser.cookie("paddock") is None
    assert browser.session.get(f"{front.url}/admin/whoami", timeout=TIMEOUT_S).status_code == 401


def test_a_code_works_once(front: SignOnFront) -> None:
    browser = front.browser()
    callback = begun(front, browser)
    assert browser.open(callback).status_code == 200
    again = front.browser()
    again.session.cookies.update(browser.session.cookies)
    again.session.cookies.pop("paddock")
    is_refused(front, again, again.open(callback), "used already")
    assert sum(form.get("code") == query_of(callback)["code"] for form in front.provider.forms) == 1


def test_a_code_of_another_sign_in_is_worth_nothing(front: SignOnFront) -> None:
    attacker, victim = front.browser(), front.browser()
    stolen = query_of(begun(front, victim))["code"]
    own = begun(front, attacker)
    answer = attacker.open(own.replace(query_of(own)["code"], stolen))
    is_refused(front, attacker, answer, "refused")


def test_a_state_of_another_browser_signs_nobody_in(front: SignOnFront) -> None:
    attacker, victim = front.browser(), front.browser()
    callback = begun(front, attacker)
    is_refused(front, victim, victim.open(callback), "another browser")
    is_refused(front, attacker, attacker.open(callback), "used already")


@pytest.mark.parametrize("state", ["", "x", "A" * 43, "%00"])
def test_a_state_that_was_never_given_is_refused(front: SignOnFront, state: str) -> None:
    browser = front.browser()
    answer = browser.open(f"{front.url}/auth/callback?code=x&state={state}")
    is_refused(front, browser, answer, "used already")


@pytest.mark.parametrize(
    "return_to",
    [
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "http://127.0.0.1.evil.example",
        "javascript:alert(1)",
    ],
)
def test_a_link_does_not_lead_elsewhere(front: SignOnFront, return_to: str) -> None:
    browser = front.browser()
    answer = browser.open(f"{front.url}/auth/login?return_to={quote(return_to, safe='')}")
    assert answer.status_code == 400
    assert "location" not in answer.headers
    assert len(browser.visited) == 1


@pytest.mark.parametrize("host", ["evil.example/path?", "evil.example@good", 'x"onload="', "a b", "evil.example:1:2"])
def test_a_host_that_is_none_is_no_place_to_come_back_to(front: SignOnFront, host: str) -> None:
    with calling_from("127.0.0.2") as session:
        answer = session.get(
            f"{front.url}/auth/login", headers={"host": host}, allow_redirects=False, timeout=TIMEOUT_S
        )
    if answer.status_code != 400:  # what is no name is left out
        assert re.fullmatch(r"http://[\w.:]+/auth/callback", query_of(answer.headers["location"])["redirect_uri"])


def test_where_people_come_is_what_the_setting_says() -> None:
    with sign_on_front({"public_url": "https://llm.example.com/"}) as front, calling_from("127.0.0.2") as session:
        answer = session.get(
            f"{front.url}/auth/login", headers={"host": "evil.example"}, allow_redirects=False, timeout=TIMEOUT_S
        )
        query = query_of(answer.headers["location"])
        assert query["redirect_uri"] == "https://llm.example.com/auth/callback"
        (cookie,) = answer.raw.headers.getlist("set-cookie")
        assert cookie.startswith("__Host-paddock-login-")
        assert {"secure", "httponly", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
        headers = {"cookie": cookie.partition(";")[0]}
        back = f"{front.url}/auth/callback?{urlencode({'state': query['state'], 'iss': front.provider.issuer})}"
        front.provider.codes["c"] = ProviderCode(query, dict(ANN))
        answer = session.get(f"{back}&code=c", headers=headers, allow_redirects=False, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        session_cookie = next(
            line for line in answer.raw.headers.getlist("set-cookie") if line.startswith("__Host-paddock=pk-")
        )
        assert "secure" in session_cookie.lower()
        headers = {"cookie": session_cookie.partition(";")[0]}
        assert session.get(f"{front.url}/admin/whoami", headers=headers, timeout=TIMEOUT_S).status_code == 200


def test_every_sign_in_has_a_code_challenge_of_its_own(front: SignOnFront) -> None:
    seen = set[str]()
    for _ in range(2):
        browser = front.browser()
        begun(front, browser)
        query = query_of(browser.visited[1])
        assert query["code_challenge_method"] == "S256"
        assert len(query["code_challenge"]) == 43
        assert len(query["state"]) >= 43
        assert len(query["nonce"]) >= 43
        seen |= {query["code_challenge"], query["state"], query["nonce"]}
    assert len(seen) == 6


def test_a_program_without_a_code_challenge_is_refused(front: SignOnFront) -> None:
    for challenge in ("", "&code_challenge=short", "&code_challenge=" + "x" * 44):
        browser = front.browser()
        answer = browser.open(f"{front.url}/auth/login?return_to={quote(PROGRAM, safe='')}{challenge}")
        assert answer.status_code == 400
        assert "code_challenge" in answer.text


def test_a_programs_code_is_worth_nothing_without_its_verifier(front: SignOnFront) -> None:
    verifier = secrets.token_urlsafe(32)
    browser = front.browser()
    query = f"?return_to={quote(PROGRAM, safe='')}&code_challenge={challenge_of(verifier)}"
    answer = browser.open(f"{front.url}/auth/login{query}", stop_at="http://127.0.0.1:9/")
    code = query_of(answer.headers["location"])["code"]
    assert browser.cookie("paddock") is None
    for wrong in ("", challenge_of(verifier), secrets.token_urlsafe(32)):
        refused = front.post("/auth/token", {"code": code, "code_verifier": wrong})
        assert refused.status_code == 400
        assert "pk-" not in refused.text
    # The first wrong verifier has used it up.
    assert front.post("/auth/token", {"code": code, "code_verifier": verifier}).status_code == 400


def test_an_answer_with_another_nonce_signs_nobody_in(front: SignOnFront) -> None:
    for nonce in ("another", None, 5):
        front.provider.forged = {"nonce": nonce}
        browser = front.browser()
        is_refused(front, browser, browser.open(f"{front.url}/auth/login"), "another sign-in")


@pytest.mark.parametrize(
    ("forged", "told"),
    [
        ({"aud": "another"}, "somebody else"),
        ({"aud": ["paddock", "another"], "azp": "another"}, "another client"),
        ({"iss": "https://id.example.com"}, "issuer"),
        ({"exp": 1}, "expired"),
        ({"email_verified": False}, "verified"),
    ],
)
def test_an_id_token_that_is_not_for_this_sign_in_is_refused(
    front: SignOnFront, forged: dict[str, object], told: str
) -> None:
    front.provider.forged = forged
    browser = front.browser()
    is_refused(front, browser, browser.open(f"{front.url}/auth/login"), told)


def test_an_answer_of_another_provider_is_refused(front: SignOnFront) -> None:
    browser = front.browser()
    callback = begun(front, browser).replace(quote(front.provider.issuer, safe=""), "https%3A%2F%2Fevil.example")
    is_refused(front, browser, browser.open(callback), "another identity provider")


def test_what_a_provider_says_is_shown_as_text(front: SignOnFront) -> None:
    front.provider.refuses = True
    browser = front.browser()
    answer = browser.open(f"{front.url}/auth/login")
    is_refused(front, browser, answer, "access_denied")
    assert "<b>no</b>" not in answer.text
    callback = begun(front, front.browser())
    assert "<script>" not in browser.open(callback + "&error=<script>alert(1)</script>").text


def test_who_has_no_team_gets_no_session(front: SignOnFront) -> None:
    front.provider.person = dict(EVE)
    browser = front.browser()
    is_refused(front, browser, browser.open(f"{front.url}/auth/login"), "No team")


def test_the_cookie_is_kept_from_scripts_and_other_sites(front: SignOnFront) -> None:
    browser = front.browser()
    answer = browser.open(begun(front, browser))
    (session,) = (line for line in answer.raw.headers.getlist("set-cookie") if line.startswith("paddock=pk-"))
    told = [part.strip().lower() for part in session.split(";")]
    assert {"httponly", "samesite=lax", "path=/"} <= set(told)
    assert not any(part.startswith("domain") for part in told)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_no_browser_gets_what_another_one_holds(front: SignOnFront) -> None:
    """The gateway passes cookies on, and keeps none."""
    ann, bob = front.signed_in(ANN), front.signed_in(BOB)
    for browser, name in ((ann, "ann@example.com"), (bob, "bob@example.com")):
        assert browser.session.get(f"{front.url}/admin/whoami", timeout=TIMEOUT_S).json()["user"] == name
    assert front.browser().session.get(f"{front.url}/admin/whoami", timeout=TIMEOUT_S).status_code == 401
    assert ann.cookie("paddock") != bob.cookie("paddock")


ELSEWHERE = [
    {},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": "cross-site", "origin": "SELF"},
]


@pytest.mark.parametrize("headers", ELSEWHERE)
def test_a_page_of_another_origin_does_nothing_in_the_name_of_who_is_signed_in(
    front: SignOnFront, headers: dict[str, str]
) -> None:
    browser = front.signed_in(ANN)
    sent = {name: value.replace("SELF", front.url) for name, value in headers.items()}
    body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/admin/keys"),
        ("DELETE", "/admin/keys/ci"),
        ("POST", "/auth/logout"),
        ("POST", "/key/generate"),
    ):
        answer = browser.session.request(method, front.url + path, json=body, headers=sent, timeout=TIMEOUT_S)
        assert answer.status_code == 401, (method, path, answer.text)
        assert "access-control-allow-credentials" not in answer.headers
    assert browser.session.get(f"{front.url}/admin/whoami", timeout=TIMEOUT_S).status_code == 200


@pytest.mark.parametrize("headers", [{"origin": "SELF"}, {"sec-fetch-site": "same-origin"}])
def test_a_page_of_this_origin_may(front: SignOnFront, headers: dict[str, str]) -> None:
    browser = front.signed_in(ANN)
    sent = {name: value.replace("SELF", front.url) for name, value in headers.items()}
    body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}
    answer = browser.session.post(f"{front.url}/v1/chat/completions", json=body, headers=sent, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text


def test_odd_cookies_of_others_hide_no_session(front: SignOnFront) -> None:
    key = front.signed_in(ANN).cookie("paddock")
    for cookie in (f'other={{"a": 1}}; paddock={key}', f"x; =y;paddock={key}; z", f"__Host-paddock=; paddock={key}"):
        answer = requests.get(f"{front.url}/admin/whoami", headers={"cookie": cookie}, timeout=TIMEOUT_S)
        assert answer.status_code == 200, cookie


def test_a_session_that_was_ended_is_over(front: SignOnFront) -> None:
    browser = front.signed_in(ANN)
    key = browser.cookie("paddock")
    assert key is not None
    answer = browser.session.post(f"{front.url}/auth/logout", headers={"origin": front.url}, timeout=TIMEOUT_S)
    assert answer.json() == {"signed_out": True}
    assert browser.cookie("paddock") is None
    time.sleep(1.0)
    assert front.call(key).status_code == 401


def test_an_api_key_is_no_session_that_could_be_ended(front: SignOnFront) -> None:
    key = front.stack.key
    assert front.post("/auth/logout", {}, authorization=f"Bearer {key}").json() == {"signed_out": False}
    time.sleep(1.0)
    assert front.call(key).status_code == 200


def test_a_lost_membership_ends_what_it_gave(front: SignOnFront) -> None:
    carl = {**ANN, "sub": "7", "email": "carl@example.com", "groups": ["llm-red", "llm-blue"]}
    key = front.signed_in(carl).cookie("paddock")
    assert key is not None
    assert front.whoami(key).json()["team"] == "red"
    front.signed_in({**carl, "groups": ["llm-blue"]})
    time.sleep(1.0)
    assert front.call(key).status_code == 401


def test_a_lost_role_ends_what_it_gave(front: SignOnFront) -> None:
    dora = {**ANN, "sub": "8", "email": "dora@example.com", "groups": ["llm-admins"]}
    key = front.signed_in(dora).cookie("paddock")
    assert key is not None
    assert front.whoami(key).json()["role"] == "admin"
    front.signed_in({**dora, "groups": ["llm-red"]})
    time.sleep(1.0)
    assert front.whoami(key).status_code == 401


def test_a_blocked_user_is_refused_with_key_and_token(front: SignOnFront) -> None:
    gina = {**ANN, "sub": "10", "email": "gina@example.com"}
    key = front.signed_in(gina).cookie("paddock")
    assert key is not None
    front.provider.person = gina
    token = front.provider.token()
    assert (front.call(key).status_code, front.call(token).status_code) == (200, 200)
    front.block("gina@example.com")
    for held in (key, token):
        refused = front.call(held)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "blocked")
    page = front.browser().open(f"{front.url}/auth/login")
    assert (page.status_code, "is blocked" in page.text) == (403, True)


@pytest.mark.parametrize("code", ["", "x", "A" * 43])
def test_a_device_code_that_was_never_given_is_worth_nothing(front: SignOnFront, code: str) -> None:
    answer = front.post("/auth/device/token", {"device_code": code})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "expired_token")


def test_a_device_code_works_once_and_is_not_the_providers(front: SignOnFront) -> None:
    device = front.post("/auth/device", {}).json()
    assert device["device_code"] not in front.provider.devices
    (own,) = (code for code, one in front.provider.devices.items() if one.user_code == device["user_code"])
    assert front.post("/auth/device/token", {"device_code": own}).status_code == 400
    front.provider.approve(device["user_code"])
    assert front.post("/auth/device/token", {"device_code": device["device_code"]}).status_code == 200
    again = front.post("/auth/device/token", {"device_code": device["device_code"]})
    assert (again.status_code, again.json()["error"]["code"]) == (400, "expired_token")


def test_one_address_begins_no_more_sign_ins_than_its_share(front: SignOnFront) -> None:
    browser, other = front.browser(), front.browser()
    answers = [
        browser.session.get(f"{front.url}/auth/login", allow_redirects=False, timeout=TIMEOUT_S) for _ in range(125)
    ]
    assert answers[0].status_code == 303
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert other.open(f"{front.url}/auth/login").status_code == 200


def test_nothing_secret_is_logged(front: SignOnFront) -> None:
    browser = front.browser()
    callback = begun(front, browser)
    browser.open(callback)
    query = query_of(callback)
    secret = [query["code"], query["state"], browser.cookie("paddock") or "", front.provider.secret, "eyJ"]
    logged = front.gateway.text() + front.accounts.text()
    assert [text for text in secret if text in logged] == []
