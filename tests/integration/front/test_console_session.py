"""`/ui` and `/ui/session` without a browser: what is served, what a sign-in keeps, and who is refused."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from gateway.access.brakes import Brakes
from tests.support.stack import Stack

MODEL = "small"
SAME_ORIGIN = {"sec-fetch-site": "same-origin"}
OF_CONSOLE = {"x-paddock-console": "1"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "2", "--tokens", "4")
        running.gateway(grafana_url="https://grafana.example/d/x")
        yield running


@pytest.fixture
async def session(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """A browser, as far as cookies go."""
    jar = aiohttp.CookieJar(unsafe=True)  # an address of numbers has cookies, too
    async with aiohttp.ClientSession(stack.gateways[0].url, cookie_jar=jar) as made:
        yield made


async def sign_in(session: aiohttp.ClientSession, key: str) -> aiohttp.ClientResponse:
    return await session.post("/ui/session", json={"key": key})


async def test_the_root_leads_to_the_page(session: aiohttp.ClientSession) -> None:
    async with session.get("/", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["location"]) == (303, "/ui")
    async with session.get("/ui") as answer:
        assert answer.content_type == "text/html"
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        tag = answer.headers["etag"]
    async with session.get("/ui", headers={"if-none-match": tag}) as answer:
        assert (answer.status, await answer.read()) == (304, b"")
    for file, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        async with session.get(f"/ui/{file}") as answer:
            assert (answer.status, answer.content_type) == (200, kind)
    for file in ("nothing.js", "..%2f__init__.py", "web"):
        async with session.get(f"/ui/{file}") as answer:
            assert answer.status == 404


async def test_a_session_is_a_cookie_with_the_key(session: aiohttp.ClientSession, stack: Stack) -> None:
    async with session.get("/ui/session") as answer:
        assert await answer.json() == {"session": None, "sign_on": False}
    async with await sign_in(session, stack.key) as answer:
        assert answer.status == 200
        told = await answer.json()
        assert (told["role"], told["has_accounts"], told["links"]) == (
            "admin",
            False,
            {"Grafana": "https://grafana.example/d/x"},
        )
        assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
    async with session.get("/ui/session", headers=OF_CONSOLE) as answer:
        assert (await answer.json())["session"] == told
    async with session.get("/v1/models") as answer:
        assert answer.status == 401, "any page can have a browser ask that"
    async with session.get("/v1/models", headers=OF_CONSOLE) as answer:
        assert answer.status == 200
    async with session.get("/admin/fleet") as answer:
        assert answer.status == 200
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with session.post("/v1/chat/completions", json=body, headers=SAME_ORIGIN) as answer:
        assert answer.status == 200
    async with session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 401, "nobody says that a page of this origin asked"
    async with session.delete("/ui/session", headers=SAME_ORIGIN) as answer:
        assert answer.status == 200
    async with session.get("/admin/fleet") as answer:
        assert answer.status == 401


async def test_behind_tls_the_cookie_goes_by_tls_alone(stack: Stack) -> None:
    proxied = stack.gateway(trusted_proxies="127.0.0.1")
    async with (
        aiohttp.ClientSession(proxied.url, headers={"x-forwarded-proto": "https"}) as session,
        await sign_in(session, stack.key) as answer,
    ):
        assert answer.headers["set-cookie"].startswith("__Host-paddock=")
        assert answer.headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"key": ""}', b'{"key": "a b"}', b'{"key": "a;b"}', b'{"key": 1}'])
async def test_what_is_no_key_is_refused(session: aiohttp.ClientSession, body: bytes) -> None:
    async with session.post("/ui/session", data=body) as answer:
        assert answer.status == 400
        assert "set-cookie" not in answer.headers


FORM = {"content-type": "text/plain"}
"""What a form of any page can send without that its browser asks first; its body can be made to be JSON."""


@pytest.mark.parametrize(
    "told",
    [
        {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
        {"sec-fetch-site": "same-site", "origin": "https://other.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
async def test_a_page_of_a_stranger_signs_nobody_in(
    session: aiohttp.ClientSession, stack: Stack, told: dict[str, str]
) -> None:
    """It signed its visitor in by the stranger's key, who then could read what is done in the console."""
    body = json.dumps({"key": stack.key})
    async with session.post("/ui/session", data=body, headers=told | FORM) as answer:
        assert answer.status == 403, await answer.text()
        assert "set-cookie" not in answer.headers
    async with session.get("/ui/session", headers=OF_CONSOLE) as answer:
        assert (await answer.json())["session"] is None


@pytest.mark.parametrize("told", [SAME_ORIGIN, {"origin": "http://{host}"}, {}])
async def test_the_consoles_own_page_and_programs_sign_in(
    session: aiohttp.ClientSession, stack: Stack, told: dict[str, str]
) -> None:
    host = stack.gateways[0].url.partition("://")[2]
    headers = {name: value.format(host=host) for name, value in told.items()}
    async with session.post("/ui/session", json={"key": stack.key}, headers=headers) as answer:
        assert (answer.status, "set-cookie" in answer.headers) == (200, True)


async def test_who_tries_keys_is_slowed_down(session: aiohttp.ClientSession) -> None:
    began = time.monotonic()
    for number in range(40):
        async with await sign_in(session, f"pk-wrong-{number}") as answer:
            assert answer.status in (401, 429)
            assert "set-cookie" not in answer.headers
        if time.monotonic() - began > 1.0 or answer.status == 429:
            return
    raise AssertionError(f"forty tries took {time.monotonic() - began:.1f} s: see {Brakes.__module__}")


async def test_a_gateway_without_a_console_says_so(stack: Stack) -> None:
    gateway = stack.gateway(console="false")
    async with aiohttp.ClientSession(gateway.url) as session:
        for method, path in (("GET", "/"), ("GET", "/ui"), ("POST", "/ui/session")):
            async with session.request(method, path, json={}) as answer:
                assert answer.status == 501
                assert "PADDOCK_CONSOLE" in await answer.text()
