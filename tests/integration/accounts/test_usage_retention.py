"""Old usage is deleted in small batches, between which others write; sums stay longer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Table, func, insert, select

from accounts.database.database import Database
from accounts.database.schema import (
    budget_periods,
    usage,
    usage_days,
    usage_end_users,
    usage_hours,
    usage_months,
    webhooks,
)
from accounts.metrics import Metrics
from accounts.usage import retention
from accounts.usage.retention import Retention
from tests.support.usage_rows import record, write

DAY_S = 86_400.0


def count(database: Database, table: Table) -> int:
    with database.reading() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


async def test_each_table_is_kept_for_its_time(database: Database) -> None:
    now = time.time()
    ages = (1, 9, 11, 39, 41, 900)
    write(database, [record(n, ended_at=now - age * DAY_S, end_user="guest") for n, age in enumerate(ages, start=1)])
    with database.transaction() as connection:
        for age in ages:
            span = {"begins_at": int(now - (age + 1) * DAY_S), "ends_at": int(now - age * DAY_S)}
            of = {"kind": "team", "subject": "red", "period": "day", "time_zone": "UTC", "spent_nano": 0, "warned": []}
            connection.execute(insert(budget_periods).values(**of, **span))
            event: dict[str, Any] = {"body": b"{}", "created_at": now - age * DAY_S, "next_at": 0, "num_tries": 1}
            connection.execute(insert(webhooks).values(**event, is_done=age != 900))
    metrics = Metrics(CollectorRegistry())
    await Retention(database, metrics, keep_days=10, keep_sums_days=40).delete_old(now)
    assert count(database, usage) == 2
    assert count(database, usage_hours) == count(database, usage_end_users) == count(database, budget_periods) == 4
    assert count(database, usage_days) == len(ages)
    assert count(database, usage_months) >= 3
    assert count(database, webhooks) == 2, "one is young, and one was not sent yet"
    assert metrics.rows_deleted.labels("usage")._number == 4


@pytest.mark.serial
async def test_others_write_while_much_is_deleted(database: Database) -> None:
    now = time.time()
    for process in range(20):
        records = [record(n, ended_at=now - 500 * DAY_S + n) for n in range(1, 1001)]
        write(database, records, process=f"process-{process:02}")
    keeper = Retention(database, Metrics(CollectorRegistry()), keep_days=400, keep_sums_days=400)
    waits: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        deleting = tasks.create_task(keeper.delete_old(now))
        number = 0
        while not deleting.done():
            number += 1
            began = time.monotonic()
            await asyncio.to_thread(write, database, [record(number, ended_at=now)], None, "the-other")
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.005)
    assert count(database, usage) == number
    assert number > 20, "the deletion was one long transaction"
    assert sorted(waits)[len(waits) * 9 // 10] < 0.1


async def test_a_batch_grows_no_longer_than_it_may_take(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    write(database, [record(n, ended_at=now - 500 * DAY_S) for n in range(1, 301)])
    monkeypatch.setattr(retention, "BATCH_S", 1e-9)
    batches: list[int] = []
    keeper = Retention(database, Metrics(CollectorRegistry()), keep_days=400, keep_sums_days=400)
    whole = keeper._batch

    def batch(rule: Any, cut: float, most: int) -> tuple[int, float]:
        if rule.table is usage:
            batches.append(most)
        return whole(rule, cut, most)

    monkeypatch.setattr(keeper, "_batch", batch)
    await keeper.delete_old(now)
    assert set(batches) == {retention.LEAST}
    assert count(database, usage) == 0
