"""Keeps the counters of days, months and budgets in Redis no lower than the ledger.

Gateways count there, and restore what they remember if Redis loses it. What no gateway remembers, as all were started
anew, or what was used before a limit was made, is in the database alone: it is looked up for whoever's limits changed,
for all once Redis has lost its counters, and for all now and then. Counters only rise by this, up to what is written
already, so nothing is counted twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy import Connection, cast, func, or_, select
from sqlalchemy import Text as SqlText
from sqlalchemy.exc import DBAPIError

from accounts.budgets.spending import MAX_NAMES, NOTHING_SPENT, read_spending
from accounts.budgets.watch import PATTERN, TABLES, limits_of
from accounts.database.database import Database
from accounts.database.schema import audit, budget_periods
from accounts.metrics import Metrics
from accounts.protocol.limit_counters import (
    DAY_TOKENS,
    MAX_FLOORS,
    MONTH_TOKENS,
    Floor,
    budget_field,
    raise_command,
    subject_name,
)
from accounts.protocol.periods import Span, span_at
from accounts.protocol.records import Limits, SubjectKind
from workers.protocol import keys
from workers.redis.link import long_commands_of
from workers.redis.trouble import raise_if_cancelled, remedy_for

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds between two looks for lost counters and changed limits. Gateways restore what they remember meanwhile."""
ALL_S = 900.0
"""Seconds after which everybody's counters are compared, though nothing seems to be lost."""
PATTERNS = ('%"tokens_per_day":%', '%"tokens_per_month":%', PATTERN)
"""Patterns of the records with limits that have such counters."""


class LimitCounters:
    """Raises counters in Redis."""

    def __init__(self, database: Database, redis: redis.asyncio.Redis, metrics: Metrics) -> None:
        self._database = database
        self._redis = long_commands_of(redis)
        self._metrics = metrics
        self._born: bytes | None = b""
        """Changes whenever Redis has lost counters."""
        self._version = 0
        """Number of the last change of access that was looked at."""
        self._all_at = float("-inf")
        """time.monotonic() of the last look at everybody."""
        self._is_failing = False

    async def run(self) -> None:
        """Raise counters until cancelled. A database or Redis that is away is tried again."""
        while True:
            try:
                await self.look()
                self._is_failing = False
            except (RedisError, OSError) as error:
                self._failed(f"Redis can't be reached ({error}; {remedy_for(error)})")
            except DBAPIError as error:
                self._failed(f"the database can't be read ({error.orig})")
            raise_if_cancelled()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> int:
        """Raise counters that are too low, if something has changed, and return how many were raised.

        Raises RedisError, OSError, sqlalchemy.exc.DBAPIError."""
        born = await self._ask("HGET", keys.LIMITS_ROUND, "born")
        now = time.monotonic()
        is_everybody = born != self._born or now > self._all_at + ALL_S
        since = -1 if is_everybody else self._version
        floors, version = await asyncio.to_thread(self._floors, since, time.time())
        num_raised = 0
        for first in range(0, len(floors), MAX_FLOORS):
            num_raised += sum(await self._ask(*raise_command(floors[first : first + MAX_FLOORS])))
        if is_everybody:
            self._all_at = now
        self._born, self._version = born, version
        self._metrics.counters_raised.inc(num_raised)
        if num_raised:
            log.info("counters of limits were raised to the ledger's", extra={"fields": {"counters": num_raised}})
        return num_raised

    def _floors(self, since: int, now: float) -> tuple[list[Floor], int]:
        """Return what the ledger knows of subjects whose limits were changed after a change; and the last change."""
        with self._database.reading() as connection:
            version = connection.execute(select(func.max(audit.c.number))).scalar() or 0
            self._count_budgets(connection, now)
            if version <= since:
                return [], version
            limits = {kind: dict(_changed(connection, kind, since)) for kind in TABLES}
            found = [floor for kind, of in limits.items() if of for floor in _floors_of(connection, kind, of, now)]
        return found, version

    def _count_budgets(self, connection: Connection, now: float) -> None:
        """Set the metrics of budgets that have passed a threshold."""
        columns = budget_periods.c
        warned = cast(columns.warned, SqlText)
        runs = (columns.begins_at <= now, columns.ends_at > now)
        counted = select(func.count()).select_from(budget_periods).where(*runs)
        self._metrics.budgets_warned.set(connection.execute(counted.where(warned != "[]")).scalar_one())
        self._metrics.budgets_spent.set(connection.execute(counted.where(warned.like('%:1"%'))).scalar_one())

    async def _ask(self, *command: str | int) -> Any:
        (answer,) = await self._redis.ask(command)
        if isinstance(answer, RedisError):
            raise answer
        return answer

    def _failed(self, what: str) -> None:
        if not self._is_failing:
            log.warning("counters of limits are not compared with the ledger, as %s; trying again until it works", what)
        self._is_failing = True


def _changed(connection: Connection, kind: SubjectKind, since: int) -> Iterator[tuple[str, Limits]]:
    """Yield the subjects of a kind with limits that have counters, whose record was changed after a change."""
    columns = TABLES[kind].c
    has_counters = or_(*(columns.record.like(pattern) for pattern in PATTERNS))
    for row in connection.execute(select(columns.name, columns.record).where(columns.version > since, has_counters)):
        yield row.name, limits_of(row.record)


def _floors_of(connection: Connection, kind: SubjectKind, limits: Mapping[str, Limits], now: float) -> Iterator[Floor]:
    fields: dict[tuple[str, Span], list[str]] = defaultdict(list)
    for name, of in limits.items():
        for field, span in _counters(of, now):
            fields[field, span].append(name)
    for (field, span), names in fields.items():
        spent = read_spending(connection, kind, span, names if len(names) <= MAX_NAMES else None)
        for name in names:
            found = spent.get(name, NOTHING_SPENT)
            amount = found.num_tokens if field in (DAY_TOKENS, MONTH_TOKENS) else found.cost_nano
            if amount > 0:
                yield Floor(subject_name(kind, name), field, span.begins_at, amount)


def _counters(limits: Limits, now: float) -> Iterator[tuple[str, Span]]:
    """Yield the counters that limits have: field and period."""
    if limits.tokens_per_day is not None:
        yield DAY_TOKENS, span_at("day", "UTC", now)
    if limits.tokens_per_month is not None:
        yield MONTH_TOKENS, span_at("month", "UTC", now)
    for field, budget in {budget_field(budget): budget for budget in limits.budgets}.items():
        yield field, span_at(budget.period, budget.time_zone, now)
