"""Budgets: counted with usage, warned of once per threshold, period and budget, whoever writes and however it ends."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from accounts.budgets import watch as module
from accounts.budgets.routes import BudgetRoutes
from accounts.budgets.watch import BudgetWatch
from accounts.budgets.webhooks import target_of
from accounts.database.database import Database
from accounts.database.schema import budget_periods, webhooks
from accounts.errors import Forbidden, Invalid
from accounts.ledger.rows import write_batch, write_sums
from accounts.metrics import Metrics
from accounts.protocol.periods import span_at
from accounts.protocol.usage import UsageBatch, UsageRecord
from tests.support.usage_rows import BEGIN, asked, make_key, make_subject, record, some_records, write

UNIT = 1_000_000_000


def watch(*, has_webhook: bool = True) -> BudgetWatch:
    return BudgetWatch(Metrics(CollectorRegistry()), has_webhook=has_webhook)


def budget(amount: float, **fields: Any) -> dict[str, Any]:
    return {"limits": {"budgets": [{"amount": amount, **fields}]}}


def events(database: Database) -> list[dict[str, Any]]:
    with database.reading() as connection:
        return [json.loads(row.body) for row in connection.execute(select(webhooks).order_by(webhooks.c.id))]


class Listener(logging.Handler):
    """Keeps the warnings that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def emit(self, line: logging.LogRecord) -> None:
        self.told.append(line.fields["budget"])  # type: ignore[attr-defined]

    def __enter__(self) -> Listener:
        logging.getLogger(module.__name__).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(module.__name__).removeHandler(self)


def spend(
    database: Database, *records: UsageRecord, has_webhook: bool = True, process: str = "a" * 16
) -> list[dict[str, Any]]:
    """Write records as a service does that is started anew, and return the warnings that it logs."""
    with Listener() as listener:
        write(database, records, watch(has_webhook=has_webhook), process)
    return listener.told


def thresholds(warnings: list[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(warning["name"], warning["threshold"]) for warning in warnings]


def test_each_threshold_is_told_once_per_period(database: Database) -> None:
    make_subject(database, "team", "red", **budget(10.0, warn_at=[0.5, 0.8]))
    told: list[list[tuple[str, float]]] = []
    for number, cost in enumerate((4, 1, 0, 4, 2, 3), start=1):
        told.append(thresholds(spend(database, record(number, cost_nano=cost * UNIT))))
    assert told == [[], [("red", 0.5)], [], [("red", 0.8)], [("red", 1.0)], []]
    next_month = record(7, cost_nano=9 * UNIT, ended_at=BEGIN + 5 * 86_400)
    assert thresholds(spend(database, next_month)) == [("red", 0.5), ("red", 0.8)]
    found = events(database)
    assert [event["data"]["threshold"] for event in found] == [0.5, 0.8, 1.0, 0.5, 0.8]
    assert {event["type"] for event in found} == {"budget.threshold"}
    first = found[0]["data"]
    assert (first["kind"], first["name"], first["spent"], first["amount"], first["currency"]) == (
        "team",
        "red",
        5,
        10,
        "USD",
    )
    assert (first["begins_at"], first["renews_at"]) == ("2026-09-01T00:00:00Z", "2026-10-01T00:00:00Z")


def test_a_record_that_comes_again_spends_once(database: Database) -> None:
    make_subject(database, "team", "red", **budget(10.0))
    records = [record(1, cost_nano=3 * UNIT)]
    for _ in range(5):
        assert spend(database, *records) == []


def test_everybody_that_a_call_counts_for_is_counted(database: Database) -> None:
    make_subject(database, "organisation", "default", **budget(4.0))
    make_subject(database, "team", "red", **budget(2.0, period="day"))
    make_subject(database, "user", "ann@example.com", teams={"red": "user"}, **budget(1.0, period="week"))
    make_key(database, "ci", "red", **budget(1.5))
    make_subject(database, "alias", "chat", **budget(100.0))
    calls = [record(1, user="ann@example.com", cost_nano=UNIT), record(2, user="ann@example.com", cost_nano=UNIT)]
    told = spend(database, *calls, has_webhook=False)
    assert {(each["kind"], each["name"], each["threshold"]) for each in told} == {
        *(("team", "red", share) for share in (0.8, 1.0)),
        *(("user", "ann@example.com", share) for share in (0.8, 1.0)),
        *(("key", "ci", share) for share in (0.8, 1.0)),
    }
    assert events(database) == [], "nobody wants them"


def test_a_budget_counts_what_was_spent_before_it_was_made(database: Database) -> None:
    write(database, [record(1, cost_nano=7 * UNIT), record(2, cost_nano=50 * UNIT, ended_at=BEGIN - 40 * 86_400)])
    make_subject(database, "team", "red", **budget(10.0))
    assert thresholds(spend(database, record(3, cost_nano=UNIT))) == [("red", 0.8)]
    with database.reading() as connection:
        assert connection.execute(select(budget_periods.c.spent_nano)).scalar_one() == 8 * UNIT


def test_a_changed_amount_is_another_budget(database: Database) -> None:
    make_subject(database, "team", "red", **budget(10.0))
    assert thresholds(spend(database, record(1, cost_nano=9 * UNIT))) == [("red", 0.8)]
    make_subject(database, "team", "red", **budget(100.0))
    assert spend(database, record(2, cost_nano=UNIT)) == []
    assert thresholds(spend(database, record(3, cost_nano=75 * UNIT))) == [("red", 0.8)]
    make_subject(database, "team", "red", **budget(50.0))
    assert thresholds(spend(database, record(4, cost_nano=1))) == [("red", 0.8), ("red", 1.0)]


def test_usage_that_comes_late_belongs_to_its_own_period(database: Database) -> None:
    make_subject(database, "team", "red", **budget(10.0, period="day", time_zone="Asia/Kolkata"))
    zone = span_at("day", "Asia/Kolkata", BEGIN)
    spend(database, record(1, cost_nano=2 * UNIT, ended_at=zone.ends_at + 1.0))
    (told,) = spend(database, record(2, cost_nano=9 * UNIT, ended_at=zone.ends_at - 1.0))
    assert told["renews_at"] == datetime.fromtimestamp(zone.ends_at, UTC).isoformat().replace("+00:00", "Z")
    with database.reading() as connection:
        rows = connection.execute(select(budget_periods.c.spent_nano).order_by(budget_periods.c.begins_at)).scalars()
        assert list(rows) == [9 * UNIT, 2 * UNIT]


def test_what_is_undone_is_not_told(database: Database) -> None:
    make_subject(database, "team", "red", **budget(1.0))
    with pytest.raises(ZeroDivisionError):
        _fail_after_writing(database)
    assert events(database) == []
    assert thresholds(spend(database, record(1, cost_nano=UNIT))) == [("red", 0.8), ("red", 1.0)]


def _fail_after_writing(database: Database) -> None:
    with database.transaction() as connection:
        new = write_batch(connection, UsageBatch(process="a" * 16, records=(record(1, cost_nano=UNIT),)))
        write_sums(connection, new)
        watch().on_written(connection, new)
        raise ZeroDivisionError


def test_several_services_that_write_at_once_count_all_and_tell_once(database: Database) -> None:
    make_subject(database, "team", "red", **budget(40.0, warn_at=[0.25, 0.5, 0.75]))
    make_subject(database, "alias", "chat", **budget(40.0, period="day"))
    barrier = threading.Barrier(4)

    def service(place: int) -> None:
        mine = watch()
        barrier.wait()
        for number in range(1, 11):
            write(database, [record(number, cost_nano=UNIT)], mine, process=f"process-{place}")

    with Listener() as listener, ThreadPoolExecutor(4) as threads:
        list(threads.map(service, range(4)))
    wanted = [*(("red", share) for share in (0.25, 0.5, 0.75, 1.0)), ("chat", 0.8), ("chat", 1.0)]
    assert sorted(thresholds(listener.told)) == sorted(wanted)
    assert len(events(database)) == len(wanted)
    with database.reading() as connection:
        assert set(connection.execute(select(budget_periods.c.spent_nano)).scalars()) == {40 * UNIT}


def shown(database: Database, **of: Any) -> list[dict[str, Any]]:
    routes = BudgetRoutes(database, None)
    document = json.loads(bytes(routes.list_budgets(asked(**of)).body))
    found: list[dict[str, Any]] = document["data"]
    if document["next"] is not None:
        found += shown(database, **{**of, "cursor": document["next"]})
    return found


@pytest.fixture
def with_budgets(database: Database) -> Database:
    now = datetime.now(UTC).timestamp()
    make_subject(database, "organisation", "default", **budget(1000.0))
    make_subject(database, "team", "red", **budget(10.0, refuses=False))
    make_subject(database, "team", "blue", limits={"budgets": [{"amount": 1.0, "period": "day"}, {"amount": 5.0}]})
    make_subject(database, "team", "free")
    make_subject(database, "user", "ann", teams={"red": "user"}, **budget(3.0))
    make_key(database, "ci", "red", **budget(2.0))
    make_key(database, "anns", "red", user="ann", **budget(2.0))
    write(
        database,
        [record(1, cost_nano=4 * UNIT, ended_at=now), record(2, team="blue", cost_nano=6 * UNIT, ended_at=now)],
    )
    return database


def test_budgets_show_spent_left_and_renewal(with_budgets: Database) -> None:
    found = shown(with_budgets, limit="2")
    assert [(each["kind"], each["name"], each["period"]) for each in found] == [
        *(("key", "anns", "month"), ("key", "ci", "month"), ("organisation", "default", "month")),
        *(("team", "blue", "day"), ("team", "blue", "month"), ("team", "red", "month"), ("user", "ann", "month")),
    ]
    of = {(each["name"], each["period"]): each for each in found}
    red = of["red", "month"]
    assert (red["spent"], red["left"], red["share"], red["is_refusing"]) == (4.0, 6.0, 0.4, False)
    assert (of["blue", "day"]["left"], of["blue", "day"]["is_refusing"]) == (0.0, True)
    assert of["default", "month"]["spent"] == 10.0
    renews = datetime.fromisoformat(red["renews_at"])
    assert (renews.day, renews.hour, renews > datetime.now(UTC)) == (1, 0, True)


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ({"role": "manager", "team": "red"}, {"red", "ci", "anns"}),
        ({"role": "user", "user": "ann", "key": "anns"}, {"ann", "anns"}),
        ({"role": "user", "key": "ci"}, {"ci"}),
        ({"role": "admin", "kind": "team", "name": "blue"}, {"blue"}),
        ({"role": "manager", "team": "red", "name": "blue"}, set()),
    ],
)
def test_a_role_sees_its_own_budgets(with_budgets: Database, of: dict[str, Any], names: set[str]) -> None:
    assert {each["name"] for each in shown(with_budgets, **of)} == names


def test_what_budgets_refuse(database: Database) -> None:
    routes = BudgetRoutes(database, None)
    with pytest.raises(Forbidden):
        routes.list_budgets(asked(role="manager", team=""))
    with pytest.raises(Invalid):
        routes.list_budgets(asked(kind="planet"))
    with pytest.raises(Invalid, match="PADDOCK_WEBHOOK_URL"):
        routes.test_webhook(asked())


def test_a_test_event_is_stored(database: Database) -> None:
    routes = BudgetRoutes(database, target_of("https://hooks.example.com/services/secret-part", "s"))
    answer = routes.test_webhook(asked())
    assert answer.status_code == 202
    assert b"secret-part" not in bytes(answer.body)
    assert [event["type"] for event in events(database)] == ["test"]


def test_many_calls_of_many_cost_few_statements(database: Database) -> None:
    make_subject(database, "team", "red", **budget(1e6))
    assert spend(database, *some_records(500)) == []
    with database.reading() as connection:
        assert len(connection.execute(select(budget_periods)).all()) == 3, "one for each month"
