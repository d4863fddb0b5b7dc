"""Sends events to the operator's webhook, each until it is taken, or given up after a day.

An event is stored in the transaction of the change that it tells of, so that it is neither lost nor told of a change
that was undone. It is sent at least once; a receiver knows a repeated one by its id. Headers and signature are those of
Standard Webhooks (standardwebhooks.com): HMAC-SHA256 over id, time and body.

The URL is the operator's and may lead into a private network. Redirects are not followed, and addresses at which
clouds answer their own machines are refused each time that the host is looked up. Neither URL nor secret is logged:
services for chats put their secret into the URL.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import DBAPIError
from yarl import URL

from accounts.database.database import Database
from accounts.database.schema import webhooks
from accounts.metrics import Metrics
from workers.http_addresses import ResolverOf
from workers.process.addresses import why_refused
from workers.process.resolver import RESOLVER

log = logging.getLogger(__name__)

LIFE_S = 86_400.0
"""Seconds after which an event is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3600.0
"""Seconds before the first repetition; each further one waits twice as long, up to the second."""
MOST_DOUBLINGS = 20
POLL_S = 1.0
AT_ONCE = 8
"""Events that one service sends at a time."""
TIMEOUT_S = 10.0
"""Maximum seconds of one try."""
CLAIM_S = 3 * TIMEOUT_S
"""Seconds after which another service may send an event that this one has taken on."""
SECRET_PREFIX = "whsec_"  # noqa: S105 - how Standard Webhooks marks a secret in base64
PORTS = {"http": 80, "https": 443}

encode = msgspec.json.Encoder().encode


class WebhookUnusable(ValueError):
    """The settings `webhook_url` and `webhook_secret` can't be used; the message says why."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event as receivers get it."""

    type: str
    """Such as `budget.threshold`."""
    timestamp: str
    """Time of the event by ISO 8601."""
    data: Any


@dataclass(frozen=True, slots=True)
class Target:
    """The receiver of events."""

    url: URL
    secret: bytes

    @property
    def shown(self) -> str:
        """The receiver as logs show it: scheme and host."""
        return str(self.url.origin())


def target_of(url: str, secret: str) -> Target | None:
    """Return the receiver that the settings name; None: there is none. Raises WebhookUnusable."""
    if not url:
        return None
    try:
        parsed = URL(url)
        if parsed.scheme not in PORTS or not parsed.host or parsed.user or parsed.password:
            raise ValueError
    except ValueError:
        raise WebhookUnusable("webhook_url is no URL of http or https without a password; give a whole one") from None
    if not secret:
        raise WebhookUnusable("webhook_secret is empty; set it, as receivers tell true events by their signature")
    if why := _why_off_limits(parsed.host):
        raise WebhookUnusable(f"webhook_url names an address that is {why}; name the receiver's own")
    if not secret.startswith(SECRET_PREFIX):
        return Target(parsed, secret.encode())
    try:
        return Target(parsed, base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True))
    except binascii.Error:
        raise WebhookUnusable("webhook_secret begins with `whsec_` and goes on with no base64") from None


def store_event(connection: Connection, event: Event) -> None:
    """Store an event to be sent once the caller's transaction is committed."""
    now = time.time()
    row = {"body": encode(event), "created_at": now, "next_at": now, "num_tries": 0, "is_done": False}
    connection.execute(insert(webhooks).values(row))


def signature(secret: bytes, event_id: str, at: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature`. `at`: unix time, as in `webhook-timestamp`."""
    signed = f"{event_id}.{at}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()


def pause_s(num_tries: int) -> float:
    """Return the seconds to wait after so many tries that failed."""
    return min(FIRST_PAUSE_S * 2.0 ** (min(num_tries, MOST_DOUBLINGS) - 1), LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event that this service has taken on to send."""

    id: int
    body: bytes
    created_at: float
    num_tries: int
    """Number of tries, this one included."""

    @property
    def event_id(self) -> str:
        return f"evt_{self.id}"


class WebhookSender:
    """Sends stored events."""

    def __init__(self, database: Database, target: Target, metrics: Metrics) -> None:
        self._database = database
        self._target = target
        self._metrics = metrics

    async def run(self) -> None:
        """Send events until cancelled. A database that is away is tried again."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(resolver=ResolverOf(allowed_addresses), use_dns_cache=False, limit=AT_ONCE)
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar) as session:
            while True:
                try:
                    num_sent = await self._round(session)
                except DBAPIError as error:
                    log.warning("webhooks wait for the database: %s", error.orig)
                    num_sent = 0
                if num_sent < AT_ONCE:
                    await asyncio.sleep(POLL_S)

    async def _round(self, session: aiohttp.ClientSession) -> int:
        """Send the events that are due, at most AT_ONCE, and return their number."""
        due = await asyncio.to_thread(self._claim)
        await asyncio.gather(*(self._deliver(session, delivery) for delivery in due))
        return len(due)

    def _claim(self) -> Sequence[Delivery]:
        """Take on events that are due. Another service takes them on if this one ends before they are sent."""
        now, claimed = time.time(), []
        with self._database.reading() as connection:
            is_open = webhooks.c.is_done.is_(False)
            self._metrics.webhooks_pending.set(
                connection.execute(select(func.count()).select_from(webhooks).where(is_open)).scalar_one()
            )
            asked = select(webhooks).where(is_open, webhooks.c.next_at <= now).order_by(webhooks.c.next_at)
            due = connection.execute(asked.limit(AT_ONCE)).all()
        if not due:
            return ()
        with self._database.transaction() as connection:
            for row in due:
                # Whoever changes the time first has the event.
                is_mine = (webhooks.c.id == row.id, webhooks.c.next_at == row.next_at)
                claim = update(webhooks).where(*is_mine).values(next_at=now + CLAIM_S, num_tries=row.num_tries + 1)
                if connection.execute(claim).rowcount:
                    claimed.append(Delivery(row.id, row.body, row.created_at, row.num_tries + 1))
        return claimed

    async def _deliver(self, session: aiohttp.ClientSession, delivery: Delivery) -> None:
        fault = await self._post(session, delivery)
        now = time.time()
        pause = pause_s(delivery.num_tries) * random.uniform(0.8, 1.2)  # noqa: S311 - chance, not secrets
        is_over = now + pause > delivery.created_at + LIFE_S
        told = {"event": delivery.event_id, "tries": delivery.num_tries, "receiver": self._target.shown}
        if not fault:
            outcome = "delivered"
            log.info("webhook delivered", extra={"fields": told})
        elif is_over:
            outcome = "given_up"
            log.error("webhook given up: %s", fault, extra={"fields": {**told, "body": delivery.body.decode()}})
        else:
            outcome = "failed"
            log.warning("webhook failed, to be tried again: %s", fault, extra={"fields": told})
        self._metrics.webhooks.labels(outcome).inc()
        await asyncio.to_thread(self._note, delivery.id, outcome != "failed", now + pause)

    async def _post(self, session: aiohttp.ClientSession, delivery: Delivery) -> str:
        """Send an event, and return what went wrong; empty: the receiver has taken it."""
        at = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "paddock",
            "webhook-id": delivery.event_id,
            "webhook-timestamp": str(at),
            "webhook-signature": signature(self._target.secret, delivery.event_id, at, delivery.body),
        }
        url = self._target.url
        try:
            async with session.post(url, data=delivery.body, headers=headers, allow_redirects=False) as answer:
                return "" if 200 <= answer.status < 300 else f"the receiver answered {answer.status}"
        except TimeoutError:
            return f"the receiver did not answer within {TIMEOUT_S:g} s"
        except _Refused as error:
            return str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"the connection failed ({type(error).__name__})"

    def _note(self, number: int, is_done: bool, next_at: float) -> None:
        with self._database.transaction() as connection:
            connection.execute(update(webhooks).where(webhooks.c.id == number).values(is_done=is_done, next_at=next_at))


class _Refused(OSError):
    """The receiver's host has an address that nothing is sent to."""


async def allowed_addresses(host: str) -> Sequence[str]:
    """Return the addresses of the receiver's host. Raises OSError if one is off limits, or if there is none."""
    addresses = await RESOLVER.addresses(host)
    for address in addresses:
        if why := _why_off_limits(address):
            raise _Refused(f"the receiver's host has an address that is {why}")
    return addresses


def _why_off_limits(host: str) -> str:
    """Return why nothing is sent to a numeric address; empty: it is allowed, or `host` is a name."""
    why = why_refused(host, allow_private=True)
    return "" if why == "no address" else why
