"""The composition root of the accounts service: builds all its parts and connects them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import redis.asyncio
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from accounts.access.changes import Changes
from accounts.access.declaration import Declarations
from accounts.access.keys import Keys
from accounts.access.mirror import Adoption, Mirror
from accounts.access.publisher import Publisher
from accounts.access.subjects import Subjects
from accounts.api.api import WHOAMI, RouteRow, build_api
from accounts.api.audit import AuditRoutes
from accounts.api.document import Document
from accounts.api.keys import KeyRoutes
from accounts.api.subjects import ApplyRoute, subject_rows
from accounts.budgets.limit_counters import LimitCounters
from accounts.budgets.prices import PriceRoutes
from accounts.budgets.routes import BudgetRoutes
from accounts.budgets.watch import BudgetWatch
from accounts.budgets.webhooks import Target, WebhookSender, target_of
from accounts.database.database import Database, open_database
from accounts.database.upgrade import SchemaKeeper
from accounts.ledger.lag import LedgerLag
from accounts.ledger.writer import LedgerWriter
from accounts.litellm.keys import LiteLlmKeys
from accounts.litellm.spend_logs import SpendLogsRoutes
from accounts.litellm.teams import LiteLlmTeams
from accounts.litellm.users import LiteLlmUsers
from accounts.metrics import Metrics, with_metrics
from accounts.oidc.providers import Providers
from accounts.protocol.sign_on import read_sign_on
from accounts.settings import AccountsSettings
from accounts.sso.routes import sign_on_part
from accounts.usage.export import ExportRoutes
from accounts.usage.retention import Retention
from accounts.usage.routes import UsageRoutes
from workers import secret_file
from workers.metrics.page import Page


class Part(Protocol):
    """A part of the service that works in the background until it is cancelled, once the database has its tables."""

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Accounts:
    """One accounts service. `asgi` answers requests only inside an `async with running()` block."""

    asgi: ASGIApp
    database: Database
    keeper: SchemaKeeper
    parts: tuple[Part, ...]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background parts while the caller's block runs; a part that fails ends the block."""
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._work())
            try:
                yield
            finally:
                working.cancel()

    async def _work(self) -> None:
        await self.keeper.run()
        async with asyncio.TaskGroup() as tasks:
            for part in self.parts:
                tasks.create_task(part.run())


def build(settings: AccountsSettings, redis: redis.asyncio.Redis) -> Accounts:
    """Build an accounts service.

    Raises DatabaseUnusable, SignOnInvalid, WebhookUnusable, OSError (the state folder can't be written)."""
    secret = settings.gateway_secret or secret_file.made_once(settings.state_dir / secret_file.GATEWAY_SECRET)
    database = open_database(settings.database_url, settings.state_dir)
    adoption = Adoption(database, secret)
    keeper = SchemaKeeper(database, adoption.prepare)
    publisher = Publisher(redis, Mirror(database, secret), adoption)
    changes = Changes(database, publisher)
    sign_on = sign_on_part(Providers(read_sign_on(settings.oidc)), changes)
    target = target_of(settings.webhook_url, settings.webhook_secret)
    rows = (WHOAMI, *access_rows(changes, secret), *sign_on.rows, *usage_rows(changes, target))
    document = Document(rows)
    metrics = Metrics(CollectorRegistry())
    writer = LedgerWriter(redis, database, (BudgetWatch(metrics, has_webhook=target is not None),))
    lag = LedgerLag(redis, writer.counts, metrics)
    parts: tuple[Part, ...] = (
        publisher,
        writer,
        sign_on,
        lag,
        *usage_parts(settings, database, redis, metrics, target),
    )
    page = Page(metrics.registry, lag.show_counts)
    api = build_api((*rows, *document.rows(), *AuditRoutes(changes).gateway_rows()), secret)
    return Accounts(with_metrics(api, page), database, keeper, parts)


def access_rows(changes: Changes, secret: str) -> tuple[RouteRow, ...]:
    """Return the routes of organisations, teams, users, keys and aliases."""
    keys, subjects = Keys(changes, secret), Subjects(changes)
    return (
        *KeyRoutes(keys).rows(),
        *subject_rows(subjects),
        *(
            row
            for made in (LiteLlmKeys, LiteLlmTeams, LiteLlmUsers)
            for row in made(keys, subjects, changes.database).rows()
        ),
        *AuditRoutes(changes).rows(),
        *ApplyRoute(Declarations(changes)).rows(),
    )


def usage_rows(changes: Changes, target: Target | None) -> tuple[RouteRow, ...]:
    """Return the routes of usage, prices and budgets. `target`: the receiver of events."""
    database = changes.database
    return (
        *UsageRoutes(database).rows(),
        *ExportRoutes(database).rows(),
        *SpendLogsRoutes(database).rows(),
        *PriceRoutes(changes).rows(),
        *BudgetRoutes(database, target).rows(),
    )


def usage_parts(
    settings: AccountsSettings, database: Database, redis: redis.asyncio.Redis, metrics: Metrics, target: Target | None
) -> tuple[Part, ...]:
    """Return the parts that keep usage and budgets in order."""
    retention = Retention(database, metrics, settings.usage_keep_days, settings.usage_sums_keep_days)
    senders: tuple[Part, ...] = () if target is None else (WebhookSender(database, target, metrics),)
    return (retention, LimitCounters(database, redis, metrics), *senders)
