"""A gateway that is open to its own machine: who is let in without a key, and who is not."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest

from tests.support.stack import Stack

MODEL = "small"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "2", "--tokens", "4")
        running.gateway(open="true")
        yield running


@pytest.fixture(scope="module")
def url(stack: Stack) -> str:
    return stack.gateways[0].url


async def test_this_machines_callers_need_no_key_and_are_admins(stack: Stack, url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
        async with session.get("/admin/fleet") as answer:
            assert answer.status == 200, "an admin's"
        async with session.get("/health") as answer:
            assert await answer.json() == {"status": "ok", "open": True}
    log = stack.gateways[0].text()
    assert "the gateway is open: every program and every user of this machine" in log
    assert '"key":"local"' in log.replace(" ", "")


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_wrong_key_is_refused_all_the_same(url: str, header: str) -> None:
    value = "Bearer pk-wrong" if header == "authorization" else "pk-wrong"
    async with aiohttp.ClientSession(url) as session, session.get("/v1/models", headers={header: value}) as answer:
        assert answer.status == 401


STRANGERS = {
    "a name that was made to lead here": {"host": "evil.example:8080"},
    "a name that begins as ours": {"host": "localhost.evil.example"},
    "a person's name before the address": {"host": "evil@127.0.0.1"},
    "a page of a stranger": {"origin": "https://evil.example"},
    "a page of nobody": {"origin": "null"},
    "a link or picture in a page of a stranger": {"sec-fetch-site": "cross-site"},
    "a proxy": {"x-forwarded-for": "203.0.113.9"},
    "a proxy of another kind": {"via": "1.1 proxy.example"},
}


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
async def test_strangers_need_a_key(stack: Stack, url: str, headers: dict[str, str]) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
            told = (await answer.json())["error"]
            assert (answer.status, told["code"]) == (403, "not_local")
            assert "send an API key" in told["message"]
        async with session.get("/ui/session", headers=headers) as answer:
            assert (await answer.json())["session"] is None
        with_key = {**headers, "authorization": f"Bearer {stack.key}"}
        async with session.post("/v1/chat/completions", json=CHAT, headers=with_key) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:80"])
async def test_pages_of_this_machine_are_let_in(url: str, origin: str) -> None:
    async with aiohttp.ClientSession(url, headers={"origin": origin, "sec-fetch-site": "cross-site"}) as session:
        async with session.get("/v1/models") as answer:
            assert answer.status == 200
        async with session.get("/v1/models", headers={"host": "localhost"}) as answer:
            assert answer.status == 200


async def test_a_websocket_of_a_strangers_page_is_refused(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.ws_connect("/v1/responses"):
            pass
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/responses", headers={"origin": "https://evil.example"})
        assert refused.value.status == 403


async def test_the_console_asks_for_no_key_whatever_cookie_a_browser_has(url: str) -> None:
    async with aiohttp.ClientSession(url, headers={"cookie": "paddock=pk-of-another-gateway"}) as session:
        async with session.get("/ui/session") as answer:
            told = (await answer.json())["session"]
            assert (told["role"], told["user"], told["is_open"]) == ("admin", "local", True)
        async with session.get("/admin/fleet") as answer:
            assert answer.status == 200


async def test_other_gateways_of_the_fleet_stay_shut(stack: Stack) -> None:
    shut = stack.gateway()
    async with aiohttp.ClientSession(shut.url) as session:
        async with session.get("/v1/models") as answer:
            assert answer.status == 401
        async with session.get("/health") as answer:
            assert await answer.json() == {"status": "ok"}
