"""The metrics of the accounts service: each is declared here, once, where it is created.

`/metrics` is served beside the API, without a caller: its figures have no names of keys, people or callers' texts. It
is answered where gateways are: on a Unix socket, or at HOST:PORT, which nobody but gateways and Prometheus should
reach.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from workers.metrics.page import Page
from workers.metrics.types import Group, ProcessMetrics, When

PATH = "/metrics"
DELIVERED, FAILED, GIVEN_UP = "delivered", "failed", "given_up"
TRIES = (DELIVERED, FAILED, GIVEN_UP)
"""How a try to send an event to the webhook can end."""


class Metrics:
    """All metrics of the process. One thread counts each; any thread may collect them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ledger, budgets = Group("The ledger", registry), Group("Budgets and webhooks", registry)
        self.records_written = ledger.counter(
            "paddock_ledger_records_total", "usage records of calls that were written to the database"
        )
        self.records_repeated = ledger.counter(
            "paddock_ledger_repeated_records_total", "usage records that came again and were not counted again"
        )
        self.records_set_aside = ledger.counter(
            "paddock_ledger_set_aside_total",
            "usage records, or entries, that can't be written and were set aside",
        )
        self.records_too_old = ledger.counter(
            "paddock_ledger_too_old_records_total",
            "usage records that were not written, as calls of their time are deleted already and may have been these",
        )
        self.ledger_lag = ledger.gauge(
            "paddock_ledger_lag_seconds",
            "how long the oldest entry has waited in Redis to be written; 0 while none waits; without what gateways "
            "still keep on their disks",
            when=When.HAPPENS,
        )
        self.ledger_entries = ledger.gauge(
            "paddock_ledger_waiting_entries", "entries that wait in Redis, each of 100 calls at most", when=When.HAPPENS
        )
        self.rows_deleted = ledger.counter(
            "paddock_ledger_deleted_rows_total",
            "rows deleted because they were older than is kept, by `table`",
            ("table",),
        )
        self.budgets_warned = budgets.gauge(
            "paddock_budgets_over_threshold",
            "budgets that have passed a threshold of theirs in the period that runs",
            when=When.HAPPENS,
        )
        self.budgets_spent = budgets.gauge(
            "paddock_budgets_spent", "budgets that are spent in the period that runs", when=When.HAPPENS
        )
        self.budget_warnings = budgets.counter(
            "paddock_budget_warnings_total", "thresholds of budgets that were passed, by the budget's `kind`", ("kind",)
        )
        self.counters_raised = budgets.counter(
            "paddock_limit_counters_raised_total",
            "counters of days, months and budgets in Redis that were lower than the ledger, and were raised to it",
        )
        self.webhooks_pending = budgets.gauge(
            "paddock_webhooks_pending", "events that the webhook has not taken yet", when=When.HAPPENS
        )
        self.webhooks = budgets.counter(
            "paddock_webhook_tries_total",
            "tries to send an event to the webhook: `delivered`, `failed` (to be tried again), `given_up`",
            ("outcome",),
        )
        for outcome in TRIES:
            self.webhooks.labels(outcome)
        self.process = ProcessMetrics(registry)
        self.groups = (ledger, budgets, self.process.group)


def with_metrics(api: ASGIApp, page: Page) -> ASGIApp:
    """Return an app that answers scrapes with the page, and whatever else as the API does."""

    async def show(request: Request) -> Response:
        asked = request.headers
        body, headers = await page.answer(asked.get("accept", ""), asked.get("accept-encoding", ""))
        return Response(body, headers=headers)

    return Starlette(routes=[Route(PATH, show), Mount("", api)])
