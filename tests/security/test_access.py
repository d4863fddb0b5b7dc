"""Attackers of access control: who guesses keys, smuggles headers, and uses keys beyond what they are for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from accounts.protocol import changes
from accounts.protocol.changes import Change, delete, put
from accounts.protocol.records import AccessRecord, TeamRecord, digest, encode_record
from gateway.access.brakes import MAX_DELAYED_PER_ADDRESS, NUM_FREE
from gateway.access.control import Access
from gateway.api.routes import ROUTES
from gateway.store.client import connect
from tests.support.scrape import Scrape
from tests.support.stack import Stack, free_port
from workers.redis.link import run_command

MODEL = "small"
PROXY = "127.0.9.9"
METRICS_KEY = "of-prometheus"
EXPIRED_AT = 1_700_000_000.0
RECORDS = {
    "user": AccessRecord(name="user", team="red", sha256=""),
    "expired": AccessRecord(name="expired", sha256="", expires_at=EXPIRED_AT),
    "blocked": AccessRecord(name="blocked", sha256="", blocked=True),
    "office": AccessRecord(name="office", sha256="", networks=("127.0.5.0/24", "2001:db8::/32")),
    "scraper": AccessRecord(name="scraper", sha256="", role="metrics"),
    "manager": AccessRecord(name="manager", team="red", sha256="", role="manager"),
}
KEYS = {name: f"pk-{name}-0123456789abcdef" for name in RECORDS}


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def stack(admin_port: int) -> Iterator[Stack]:
    records = [replace(record, sha256=digest(KEYS[name])) for name, record in RECORDS.items()]
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "2", "--tokens", "4")
        running.gateway(
            api_keys=json.dumps([json.loads(encode_record(record)) for record in records]),
            trusted_proxies=f"{PROXY}/32",
            metrics_key=METRICS_KEY,
            admin_port=admin_port,
        )
        yield running


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]
    took_s: float

    @property
    def code(self) -> object:
        return self.body["error"]["code"]

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


async def ask(
    stack: Stack,
    key: str = "",
    path: str = "/v1/models",
    *,
    method: str = "GET",
    port: int = 0,
    peer: str = "127.0.0.1",
    headers: list[tuple[str, str]] | None = None,
) -> Answer:
    """Send a request from an address of this machine, over a connection of its own."""
    url = f"http://127.0.0.1:{port}" if port else stack.gateways[0].url
    sent = [*(headers or []), *([("Authorization", f"Bearer {key}")] if key else [])]
    connector = aiohttp.TCPConnector(local_addr=(peer, 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        begun = time.monotonic()
        async with session.request(method, url + path, headers=sent) as response:
            text = await response.text()
            took_s = time.monotonic() - begun
            body = json.loads(text) if response.content_type == "application/json" else {"text": text}
            return Answer(response.status, body, response.headers, took_s)


async def write(stack: Stack, *some: Change) -> None:
    """As the accounts service does; then wait as long as a gateway may take to notice."""
    async with connect(stack.redis.url_of("gateway")) as client:
        await run_command(client, changes.command(some))
    await asyncio.sleep(1.0)


async def test_who_guesses_keys_is_slowed_and_nobody_else(stack: Stack) -> None:
    guesser = "127.0.3.3"
    guesses = [f"pk-guess-{number}" for number in range(NUM_FREE + 4)]
    took = []
    for guess in guesses:
        answer = await ask(stack, guess, peer=guesser)
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        took.append(answer.took_s)
    assert max(took[: NUM_FREE - 1]) < 0.1 <= min(took[NUM_FREE:])
    assert took[-1] >= 0.4
    crowd = [asyncio.create_task(ask(stack, "pk-guess", peer=guesser)) for _ in range(3 * MAX_DELAYED_PER_ADDRESS)]
    await asyncio.sleep(0.3)
    for peer in (guesser, "127.0.3.4"):
        answer = await ask(stack, KEYS["user"], peer=peer)
        assert (answer.status, answer.took_s < 0.3) == (200, True), "a valid key is neither delayed nor refused"
    answer = await ask(stack, "pk-mistyped", peer="127.0.3.4")
    assert (answer.status, answer.took_s < 0.3) == (401, True), "nor is who mistypes one elsewhere"
    answers = await asyncio.gather(*crowd)
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) == 2 * MAX_DELAYED_PER_ADDRESS
    assert {answer.code for answer in refused} == {"too_many_failed_authentications"}
    assert {answer.headers["retry-after"] for answer in refused} == {"2"}
    assert {answer.headers["connection"] for answer in answers} == {"close"}
    page = (await ask(stack, METRICS_KEY, "/metrics")).body["text"]
    counted = Scrape(page).value("paddock_failed_authentications_total", reason="invalid_api_key")
    assert counted >= len(guesses) + len(crowd)
    log = stack.gateways[0].text()
    assert guesser in log
    assert "pk-guess" not in log


async def test_a_request_without_a_key_is_no_guess(stack: Stack) -> None:
    answers = [await ask(stack, peer="127.0.3.5") for _ in range(NUM_FREE + 4)]
    assert {answer.status for answer in answers} == {401}
    assert max(answer.took_s for answer in answers) < 0.3


async def test_two_keys_in_headers_of_one_name_are_none(stack: Stack) -> None:
    """A proxy in between may have looked at the other one."""
    for name, scheme in (("Authorization", "Bearer "), ("x-api-key", "")):
        answer = await ask(stack, headers=[(name, scheme + KEYS[key]) for key in ("user", "manager")])
        assert answer.status == 401
        assert "several headers" in answer.message


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key", "x-goog-api-key"])
async def test_a_key_counts_in_each_of_four_headers(stack: Stack, header: str) -> None:
    value = ("Bearer " if header == "Authorization" else "") + KEYS["user"]
    assert (await ask(stack, headers=[(header, value)])).status == 200


async def test_forwarded_addresses_of_strangers_open_no_network(stack: Stack) -> None:
    allowed = ("x-forwarded-for", "127.0.5.1")
    assert (await ask(stack, KEYS["office"], peer="127.0.5.7")).status == 200
    for forwarded in ([], [allowed], [("forwarded", "for=127.0.5.1")], [("x-real-ip", "127.0.5.1")]):
        answer = await ask(stack, KEYS["office"], peer="127.0.6.6", headers=forwarded)
        assert (answer.status, answer.code) == (403, "network_not_allowed")
        assert "127.0.6.6" in answer.message


async def test_a_trusted_proxy_is_believed_about_its_own_peer_only(stack: Stack) -> None:
    """What stands before that in `x-forwarded-for` came from the caller."""
    told = {"127.0.5.1": 200, "127.0.5.1, 203.0.113.9": 403, "203.0.113.9, 127.0.5.1": 200, "2001:db8::7": 200}
    for value, status in told.items():
        answer = await ask(stack, KEYS["office"], peer=PROXY, headers=[("x-forwarded-for", value)])
        assert answer.status == status, value
    two = [("x-forwarded-for", "127.0.5.1"), ("x-forwarded-for", "203.0.113.9")]
    assert (await ask(stack, KEYS["office"], peer=PROXY, headers=two)).status == 403


async def test_forwarded_addresses_of_strangers_do_not_release_the_brake(stack: Stack) -> None:
    for number in range(NUM_FREE + 3):
        forwarded = [("x-forwarded-for", f"203.0.113.{number}")]
        answer = await ask(stack, "pk-guess", peer="127.0.3.6", headers=forwarded)
    assert answer.took_s >= 0.2
    for number in range(NUM_FREE + 3):
        forwarded = [("x-forwarded-for", f"203.0.113.{number}")]
        answer = await ask(stack, "pk-guess", peer=PROXY, headers=forwarded)
    assert answer.took_s < 0.2, "callers behind a proxy do not slow each other"


async def test_an_expired_key_says_since_when(stack: Stack) -> None:
    answer = await ask(stack, KEYS["expired"])
    assert (answer.status, answer.code) == (401, "expired_api_key")
    assert "2023-11-14 22:13:20 UTC" in answer.message


async def test_the_key_before_a_rotation_counts_for_its_grace_and_no_longer(stack: Stack) -> None:
    record = AccessRecord(name="rotated", sha256=digest("pk-new"), previous_sha256=digest("pk-old"))
    await write(stack, put(replace(record, previous_until=time.time() + 3), stack.gateway_secret))
    assert [(await ask(stack, key)).status for key in ("pk-new", "pk-old")] == [200, 200]
    await asyncio.sleep(3)
    answer = await ask(stack, "pk-old")
    assert (answer.status, answer.code) == (401, "expired_api_key")
    assert "was replaced" in answer.message
    assert (await ask(stack, "pk-new")).status == 200


async def test_who_is_blocked_is_told_which_of_them_it_is(stack: Stack) -> None:
    answer = await ask(stack, KEYS["blocked"])
    assert (answer.status, answer.code) == (403, "blocked")
    assert "The key 'blocked'" in answer.message
    assert (await ask(stack, KEYS["user"])).status == 200
    await write(stack, put(TeamRecord(name="red", blocked=True), stack.gateway_secret))
    try:
        answer = await ask(stack, KEYS["user"])
        assert (answer.status, answer.code) == (403, "blocked")
        assert "The team 'red'" in answer.message
    finally:
        await write(stack, delete("team:red"))
    assert (await ask(stack, KEYS["user"])).status == 200


async def test_a_key_for_metrics_opens_nothing_else(stack: Stack, admin_port: int) -> None:
    for path in ("/metrics", "/metrics/targets"):
        assert [(await ask(stack, key, path)).status for key in (KEYS["scraper"], METRICS_KEY)] == [200, 200]
        assert (await ask(stack, KEYS["user"], path)).status == 403
    for row in ROUTES:
        if row.access is Access.OPEN or row.method == "WEBSOCKET":
            continue
        path = row.path.replace("{model:path}", MODEL).replace("{path:path}", "whoami")
        answer = await ask(stack, KEYS["scraper"], path, method=row.method, port=admin_port)
        assert answer.status == 403, row


@pytest.mark.parametrize("name", ["user", "manager"])
async def test_whoever_is_no_admin_opens_no_route_of_admins(stack: Stack, admin_port: int, name: str) -> None:
    for row in ROUTES:
        if row.access is Access.ADMIN:
            answer = await ask(stack, KEYS[name], row.path, method=row.method, port=admin_port)
            assert answer.status == 403, row


async def test_routes_of_admins_are_on_their_port_alone(stack: Stack, admin_port: int) -> None:
    for row in ROUTES:
        path = row.path.replace("{path:path}", "whoami")
        if row.is_for_admins:
            answer = await ask(stack, stack.key, path, method=row.method)
            assert answer.status == 404, row
            assert f"port {admin_port}" in json.dumps(answer.body), row
    assert (await ask(stack, stack.key, "/admin/whoami", port=admin_port)).status == 501, "there is no such service"
    assert (await ask(stack, stack.key, f"/admin/explain?model={MODEL}", port=admin_port)).status == 200
    assert (await ask(stack, stack.key, "/auth/login")).status == 501, "signing in is on both"
    assert (await ask(stack, stack.key, port=admin_port)).status == 200
