"""Counts what budgets spend as usage is written, and warns when a threshold is passed, once per period and budget.

The count is part of the ledger's transaction, and so is the event for the webhook: both are there or neither, whichever
service writes, and however often it was killed meanwhile. The first usage of a period adds up what was spent in it
before; so a budget counts from its period's begin, though it was made in its middle.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, event, select, update
from sqlalchemy.dialects import postgresql, sqlite

from accounts.access.mirror import read_currency
from accounts.budgets.spending import MAX_NAMES, NOTHING_SPENT, read_spending
from accounts.budgets.webhooks import Event, store_event
from accounts.database.schema import aliases, api_keys, budget_periods, organisations, teams, users
from accounts.metrics import Metrics
from accounts.protocol.periods import Span, span_at
from accounts.protocol.records import NO_LIMITS, Budget, Limits, Period, SubjectKind
from accounts.protocol.usage import NANO, UsageRecord

log = logging.getLogger(__name__)

TABLES: Mapping[SubjectKind, Table] = {
    "organisation": organisations,
    "team": teams,
    "user": users,
    "key": api_keys,
    "alias": aliases,
}
"""Kind of subject -> the table with its records."""
SPENT = 1.0
"""The share at which every budget warns, whatever thresholds it has."""
THRESHOLD = "budget.threshold"
"""Type of the event that a threshold was passed."""
PATTERN = '%"budgets":%'
"""SQL pattern of the records that have budgets."""

BudgetsOf = Mapping["Subject", Sequence[Budget]]


class Subject(NamedTuple):
    """A subject: whoever a budget counts for."""

    kind: SubjectKind
    name: str


class PeriodKey(NamedTuple):
    """One period of the budgets of a subject that have the same periods."""

    kind: SubjectKind
    name: str
    period: Period
    time_zone: str
    span: Span


class BudgetWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A threshold of a budget that was passed: the data of the event."""

    kind: SubjectKind
    name: str
    period: Period
    time_zone: str
    amount: float
    currency: str
    threshold: float
    """Share of the amount."""
    spent: float
    begins_at: str
    renews_at: str
    refuses: bool
    """Whether calls are refused once the amount is spent, until the budget renews."""


class BudgetWatch:
    """Counts usage for budgets."""

    def __init__(self, metrics: Metrics, *, has_webhook: bool) -> None:
        self._metrics = metrics
        self._has_webhook = has_webhook

    def on_written(self, connection: Connection, records: Sequence[UsageRecord]) -> None:
        """Count calls, and tell warnings once the caller's transaction is committed.

        The transaction has written the calls, with their sums, and counts none of them twice."""
        if warnings := self._note(connection, records):
            event.listen(connection, "commit", lambda _: self._tell(warnings), once=True)

    def _note(self, connection: Connection, records: Sequence[UsageRecord]) -> Sequence[BudgetWarning]:
        """Count calls, store events, and return what they tell."""
        paid = [record for record in records if record.cost_nano > 0]
        budgets = read_budgets(connection, {subject for record in paid for subject in subjects_of(record)})
        if not budgets:
            return ()
        currency = read_currency(connection)
        warnings: list[BudgetWarning] = []
        # In one order for all services: each holds what it has counted until its transaction ends.
        for key, cost_nano in sorted(_costs(paid, budgets).items()):
            spent_nano, told = _count(connection, key, cost_nano)
            passed = [
                (budget, share)
                for budget in budgets[Subject(key.kind, key.name)]
                if (budget.period, budget.time_zone) == (key.period, key.time_zone)
                for share in sorted({*budget.warn_at, SPENT})
                if spent_nano >= budget.amount * share * NANO and _mark(budget, share) not in told
            ]
            if passed:
                told += [_mark(budget, share) for budget, share in passed]
                connection.execute(update(budget_periods).where(*_is_row(key)).values(warned=told))
                warnings += [_warning(key, budget, share, spent_nano, currency) for budget, share in passed]
        if self._has_webhook:
            for warning in warnings:
                store_event(connection, Event(type=THRESHOLD, timestamp=_shown(time.time()), data=warning))
        return tuple(warnings)

    def _tell(self, warnings: Sequence[BudgetWarning]) -> None:
        for warning in warnings:
            self._metrics.budget_warnings.labels(warning.kind).inc()
            log.warning("a budget passed a threshold", extra={"fields": {"budget": msgspec.to_builtins(warning)}})


def subjects_of(record: UsageRecord) -> Iterator[Subject]:
    """Yield the subjects that the call counts for."""
    named: tuple[tuple[SubjectKind, str], ...] = (
        *(("organisation", record.organisation), ("team", record.team), ("user", record.user)),
        *(("key", record.key), ("alias", record.alias)),
    )
    return (Subject(kind, name) for kind, name in named if name)


def read_budgets(connection: Connection, subjects: Collection[Subject]) -> BudgetsOf:
    """Return the budgets of those subjects that have some."""
    names = defaultdict[SubjectKind, list[str]](list)
    for subject in sorted(subjects):
        names[subject.kind].append(subject.name)
    found: dict[Subject, Sequence[Budget]] = {}
    for kind, of_kind in names.items():
        columns = TABLES[kind].c
        for first in range(0, len(of_kind), MAX_NAMES):
            is_one = columns.name.in_(of_kind[first : first + MAX_NAMES])
            for row in connection.execute(
                select(columns.name, columns.record).where(is_one, columns.record.like(PATTERN))
            ):
                if budgets := limits_of(row.record).budgets:
                    found[Subject(kind, row.name)] = budgets
    return found


class _Limited(msgspec.Struct):
    """The fields that all records of subjects have."""

    limits: Limits = NO_LIMITS


_decode = msgspec.json.Decoder(_Limited).decode


def limits_of(record: str) -> Limits:
    """Return the limits in the record of a subject of any kind."""
    return _decode(record).limits


def _costs(records: Sequence[UsageRecord], budgets: BudgetsOf) -> Mapping[PeriodKey, int]:
    """Return what the calls add to each period of a budget."""
    costs = defaultdict[PeriodKey, int](int)
    for record in records:
        for subject in subjects_of(record):
            for period, time_zone in {(budget.period, budget.time_zone) for budget in budgets.get(subject, ())}:
                span = span_at(period, time_zone, record.ended_at)
                costs[PeriodKey(*subject, period, time_zone, span)] += record.cost_nano
    return costs


def _count(connection: Connection, key: PeriodKey, cost_nano: int) -> tuple[int, list[str]]:
    """Add to what was spent in a period; return the sum, and the marks of the thresholds that were told."""
    more = {"spent_nano": budget_periods.c.spent_nano + cost_nano}
    if connection.execute(update(budget_periods).where(*_is_row(key)).values(more)).rowcount == 0:
        found = read_spending(connection, key.kind, key.span, {key.name}).get(key.name, NOTHING_SPENT)
        dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
        row = {
            "kind": key.kind,
            "subject": key.name,
            "period": key.period,
            "time_zone": key.time_zone,
            "begins_at": key.span.begins_at,
            "ends_at": key.span.ends_at,
            "spent_nano": found.cost_nano,
            "warned": [],
        }
        # Another service may have made the row meanwhile: without these calls, as they are not committed.
        made = dialect.insert(budget_periods).values(row)
        connection.execute(made.on_conflict_do_update(index_elements=list(budget_periods.primary_key), set_=more))
    asked = select(budget_periods.c.spent_nano, budget_periods.c.warned).where(*_is_row(key))
    spent_nano, told = connection.execute(asked).one()
    return spent_nano, list(told)


def _is_row(key: PeriodKey) -> tuple[ColumnElement[bool], ...]:
    columns = budget_periods.c
    return (
        *(columns.kind == key.kind, columns.subject == key.name, columns.period == key.period),
        *(columns.time_zone == key.time_zone, columns.begins_at == key.span.begins_at),
    )


def _mark(budget: Budget, share: float) -> str:
    """Return the text that stands for a threshold that was told. A budget with another amount is another one."""
    return f"{budget.amount:g}:{share:g}"


def _warning(key: PeriodKey, budget: Budget, share: float, spent_nano: int, currency: str) -> BudgetWarning:
    return BudgetWarning(
        kind=key.kind,
        name=key.name,
        period=key.period,
        time_zone=key.time_zone,
        amount=budget.amount,
        currency=currency,
        threshold=share,
        spent=spent_nano / NANO,
        begins_at=_shown(key.span.begins_at),
        renews_at=_shown(key.span.ends_at),
        refuses=budget.refuses,
    )


def _shown(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).isoformat().replace("+00:00", "Z")
