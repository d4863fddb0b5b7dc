"""Events to a real receiver over HTTP: signed, repeated until taken, given up after a day, each by one service."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from sqlalchemy import select, update

from accounts.budgets import webhooks as module
from accounts.budgets.webhooks import (
    Event,
    Target,
    WebhookSender,
    WebhookUnusable,
    signature,
    store_event,
    target_of,
)
from accounts.database.database import Database
from accounts.database.schema import webhooks
from accounts.metrics import Metrics
from tests.support.stack import free_port

SECRET = "whsec_" + base64.b64encode(b"a secret of 24 bytes....").decode()
PATH = "/services/part-that-is-secret"
PATIENCE_S = 20.0


@dataclass
class Receiver:
    """A real HTTP server that answers with the given statuses, then with 200."""

    statuses: list[int] = field(default_factory=list)
    taken: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    """Headers and body of every request."""
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.taken.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        status = self.statuses.pop(0) if self.statuses else 200
        return web.Response(status=status, headers={"location": f"{self.url}/elsewhere"} if status == 302 else {})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", made.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made.url = f"http://127.0.0.1:{port}"
    yield made
    await runner.cleanup()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)


def target(url: str) -> Target:
    found = target_of(url + PATH, SECRET)
    assert found is not None
    return found


def store(database: Database, *names: str) -> None:
    with database.transaction() as connection:
        for name in names:
            store_event(connection, Event(type="test", timestamp="2026-11-28T12:00:00Z", data={"name": name}))


@contextlib.asynccontextmanager
async def sending(database: Database, to: Target, services: int = 1) -> AsyncIterator[list[Metrics]]:
    metrics = [Metrics(CollectorRegistry()) for _ in range(services)]
    async with asyncio.TaskGroup() as tasks:
        senders = [tasks.create_task(WebhookSender(database, to, each).run()) for each in metrics]
        yield metrics
        for sender in senders:
            sender.cancel()


async def until_done(database: Database) -> list[tuple[int, bool]]:
    """Number of tries of each event, once none is left to send."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with database.reading() as connection:
            rows = connection.execute(select(webhooks).order_by(webhooks.c.id)).all()
        if all(row.is_done for row in rows):
            return [(row.num_tries, row.is_done) for row in rows]
        assert time.monotonic() < deadline, rows
        await asyncio.sleep(0.02)


async def test_an_event_is_signed_as_standard_webhooks_are(database: Database, receiver: Receiver) -> None:
    store(database, "first")
    async with sending(database, target(receiver.url)):
        assert await until_done(database) == [(1, True)]
    ((headers, body),) = receiver.taken
    assert json.loads(body) == {"type": "test", "timestamp": "2026-11-28T12:00:00Z", "data": {"name": "first"}}
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(b"a secret of 24 bytes....", signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    assert headers["content-type"] == "application/json"


def test_the_signature_is_the_standards_own_example() -> None:
    """The values of the specification's reference implementations."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_an_event_is_sent_until_it_is_taken(
    database: Database, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receiver.statuses = [500, 429, 302, 404]
    store(database, "first")
    async with sending(database, target(receiver.url)) as (metrics,):
        assert await until_done(database) == [(5, True)]
    assert len(receiver.taken) == 5, "nobody followed the redirect"
    assert len({headers["webhook-id"] for headers, _ in receiver.taken}) == 1
    assert len({body for _, body in receiver.taken}) == 1
    told = {outcome: metrics.webhooks.labels(outcome)._number for outcome in ("delivered", "failed", "given_up")}
    assert told == {"delivered": 1, "failed": 4, "given_up": 0}
    assert "part-that-is-secret" not in caplog.text
    assert SECRET not in caplog.text
    assert "the receiver answered 500" in caplog.text


async def test_a_receiver_that_is_away_is_tried_again(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first service may end in the middle of a try; the second one takes that on when its claim has run out.
    monkeypatch.setattr(module, "CLAIM_S", 1.0)
    store(database, "first")
    nobody = target(f"http://127.0.0.1:{free_port()}")
    async with sending(database, nobody):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with database.reading() as connection:
                row = connection.execute(select(webhooks)).one()
            if row.num_tries >= 2:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    async with sending(database, target(receiver.url)):  # the setting was corrected, and the service started anew
        await until_done(database)
    assert len(receiver.taken) == 1


async def test_an_event_is_given_up_after_a_day(
    database: Database, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses = [500] * 9
    store(database, "old")
    with database.transaction() as connection:
        connection.execute(update(webhooks).values(created_at=time.time() - module.LIFE_S + 0.01, num_tries=20))
    async with sending(database, target(receiver.url)) as (metrics,):
        assert await until_done(database) == [(21, True)]
        await asyncio.sleep(0.2)
    assert len(receiver.taken) == 1
    assert metrics.webhooks.labels("given_up")._number == 1
    assert "given up" in caplog.text


def test_pauses_double_up_to_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 5.0)
    assert [module.pause_s(tries) for tries in (1, 2, 3, 10, 11, 100_000)] == [5.0, 10.0, 20.0, 2560.0, 3600.0, 3600.0]


async def test_several_services_send_each_event_once(database: Database, receiver: Receiver) -> None:
    names = [f"event-{number}" for number in range(40)]
    store(database, *names)
    async with sending(database, target(receiver.url), services=3):
        await until_done(database)
    assert sorted(json.loads(body)["data"]["name"] for _, body in receiver.taken) == sorted(names)


async def test_what_a_dead_service_had_taken_on_is_sent_by_another(database: Database, receiver: Receiver) -> None:
    store(database, "first")
    dead = WebhookSender(database, target(receiver.url), Metrics(CollectorRegistry()))
    assert len(dead._claim()) == 1
    with database.transaction() as connection:
        connection.execute(update(webhooks).values(next_at=time.time()))  # CLAIM_S have passed
    async with sending(database, target(receiver.url)):
        assert await until_done(database) == [(2, True)]
    assert len(receiver.taken) == 1


@pytest.mark.parametrize(
    ("url", "secret", "said"),
    [
        ("ftp://example.com/x", "s", "no URL of http"),
        ("example.com", "s", "no URL of http"),
        ("https://user:word@example.com/", "s", "without a password"),
        ("https://example.com/", "", "webhook_secret is empty"),
        ("https://example.com/", "whsec_%%%", "no base64"),
        ("http://169.254.169.254/latest", "s", "link-local"),
        ("http://[fd00:ec2::254]/", "s", "cloud"),
    ],
)
def test_settings_that_can_t_be_used(url: str, secret: str, said: str) -> None:
    with pytest.raises(WebhookUnusable, match=said):
        target_of(url, secret)


async def test_a_host_that_leads_to_a_cloud_s_metadata_is_refused() -> None:
    with pytest.raises(OSError, match="link-local"):
        await module.allowed_addresses("169.254.169.254")
    assert list(await module.allowed_addresses("127.0.0.1")) == ["127.0.0.1"]
