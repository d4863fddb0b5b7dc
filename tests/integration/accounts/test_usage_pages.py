"""Pages of calls, on SQLite and PostgreSQL: complete, in order, each call once, and by an index."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, text

from accounts.database.database import Database
from accounts.errors import Forbidden, Invalid
from accounts.protocol.usage import UsageRecord, is_failed
from accounts.usage import calls as calls_module
from accounts.usage.calls import INDEXED, read_page
from accounts.usage.query import FAILED, Calls
from accounts.usage.routes import UsageRoutes
from tests.support.usage_rows import BEGIN, asked, record, some_records, write

COLUMNS = ("team", "key", "user", "end_user", "alias", "model")


def selects(calls: Calls) -> Callable[[UsageRecord], bool]:
    def is_selected(one: UsageRecord) -> bool:
        return (
            all(getattr(one, name) == value for name, value in calls.equal.items())
            and (calls.begins_at is None or one.ended_at >= calls.begins_at)
            and (calls.ends_at is None or one.ended_at < calls.ends_at)
            and (not calls.is_failed or is_failed(one.outcome))
        )

    return is_selected


def read_all(database: Database, calls: Calls, limit: int, *, newest_first: bool) -> list[int]:
    """Numbers of the calls, page by page, as a client goes on."""
    found: list[int] = []
    after = None
    while True:
        with database.reading() as connection:
            page = read_page(connection, calls, limit, after, newest_first=newest_first)
        assert len(page.rows) <= limit
        found += [row.number for row in page.rows]
        after = page.next
        if after is None:
            return found


def some_selection(chance: random.Random, records: list[UsageRecord]) -> Calls:
    """Up to four conditions, at times with values that no call has together."""
    equal: dict[str, str] = {}
    for name in chance.sample((*COLUMNS, "outcome", "request_id"), chance.choice((0, 1, 1, 2, 2, 3))):
        if value := getattr(chance.choice(records), name):
            equal[name] = value
    times = sorted(chance.choice(records).ended_at for _ in range(2))
    begins_at, ends_at = (each if chance.random() < 0.4 else None for each in times)
    return Calls(begins_at, ends_at, equal, "outcome" not in equal and chance.random() < 0.2)


@pytest.mark.parametrize("scanned", [7, 50, 20_000])
def test_pages_hold_every_selected_call_once_and_in_order(
    database: Database, monkeypatch: pytest.MonkeyPatch, scanned: int
) -> None:
    monkeypatch.setattr(calls_module, "MAX_SCANNED", scanned)
    records = some_records(600)
    write(database, records)
    ids = {number: place for place, number in enumerate(one.number for one in records)}
    chance = random.Random(scanned)
    for _ in range(25):
        calls = some_selection(chance, records)
        newest_first = chance.random() < 0.7
        wanted = sorted(
            filter(selects(calls), records), key=lambda one: (one.ended_at, ids[one.number]), reverse=newest_first
        )
        found = read_all(database, calls, chance.choice((1, 10, 100)), newest_first=newest_first)
        assert found == [one.number for one in wanted], calls


def test_a_page_that_looks_long_for_little_ends_and_tells_where_to_go_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MAX_SCANNED", 20)
    monkeypatch.setattr(calls_module, "SEARCH_S", 0.0)
    records = [record(n, ended_at=BEGIN + n, model="llama", alias="code" if n == 1 else "chat") for n in range(1, 201)]
    write(database, [*records, *(record(n, ended_at=BEGIN + n, model="qwen", alias="code") for n in range(201, 401))])
    rare = Calls(None, None, {"model": "llama", "alias": "code"})
    with database.reading() as connection:
        first = read_page(connection, rare, 10)
    assert (list(first.rows), first.next is None) == ([], False)
    assert read_all(database, rare, 10, newest_first=True) == [1]


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    sent: list[tuple[str, Any]] = []

    def keep(connection: object, cursor: object, statement: str, parameters: Any, *rest: object) -> None:
        sent.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", keep)
    yield sent
    event.remove(database.engine, "before_cursor_execute", keep)


@pytest.mark.parametrize("name", [*INDEXED, "outcome"])
def test_a_single_condition_is_answered_by_its_index(database: Database, name: str) -> None:
    records = some_records(3000)
    write(database, records)
    with database.transaction() as connection:
        connection.execute(text("ANALYZE"))
    value = "cut" if name == "outcome" else next(found for one in records if (found := getattr(one, name)))
    with statements(database) as sent, database.reading() as connection:
        read_page(connection, Calls(BEGIN, None, {name: value}), 10)
    explain = "EXPLAIN QUERY PLAN " if database.is_sqlite else "EXPLAIN "
    asked_for = next((statement, values) for statement, values in sent if "FROM usage" in statement)
    with database.reading() as connection:
        plan = str(connection.exec_driver_sql(explain + asked_for[0], asked_for[1]).all())
    assert f"ix_usage_{name}_ended_at_id" in plan
    assert "TEMP B-TREE" not in plan
    assert "Sort" not in plan


def test_a_list_shows_calls_with_costs_in_the_currency(database: Database) -> None:
    write(database, [record(1), record(2, ended_at=BEGIN + 1, outcome="cut", cost_nano=2_500_000_000)])
    routes = UsageRoutes(database)
    page = json.loads(bytes(routes.list_calls(asked(limit="1")).body))
    assert page["currency"] == "USD"
    (latest,) = page["data"]
    assert (latest["request_id"], latest["outcome"], latest["cost"]) == ("req-2", "cut", 2.5)
    assert not {"process", "number", "cost_nano"} & latest.keys()
    following = json.loads(bytes(routes.list_calls(asked(limit="1", cursor=page["next"])).body))
    assert [call["request_id"] for call in following["data"]] == ["req-1"]
    assert following["next"] is None


def test_a_role_lists_its_own_calls_only(database: Database) -> None:
    records = some_records(300)
    write(database, records)
    routes = UsageRoutes(database)

    def listed(**of: Any) -> set[str]:
        return {
            call["request_id"] for call in json.loads(bytes(routes.list_calls(asked(limit="1000", **of)).body))["data"]
        }

    assert len(listed()) == 300
    assert listed(role="manager", team="red") == {one.request_id for one in records if one.team == "red"}
    assert listed(role="user", user="ann@example.com") == {
        one.request_id for one in records if one.user == "ann@example.com"
    }
    assert listed(role="user", key="red-1", team="red") == {
        one.request_id for one in records if (one.key, one.team) == ("red-1", "red")
    }
    assert listed(role="user", key="red-1", team="later") == set(), "a key of another team had its name before"
    assert listed(role="user", user="ann@example.com", outcome=FAILED) == {
        one.request_id for one in records if one.user == "ann@example.com" and is_failed(one.outcome)
    }


@pytest.mark.parametrize(
    ("of", "error"),
    [
        ({"role": "manager", "team": "red", "query": {"team": "blue"}}, Forbidden),
        ({"role": "user", "user": "ann", "query": {"user": "bob"}}, Forbidden),
        ({"role": "user", "key": "", "query": {}}, Forbidden),
        ({"role": "user", "key": "red-1", "team": "red", "query": {"team": "blue"}}, Forbidden),
        ({"query": {"cursor": "none"}}, Invalid),
        ({"query": {"limit": "100000"}}, Invalid),
    ],
)
def test_what_a_list_refuses(database: Database, of: dict[str, Any], error: type[Exception]) -> None:
    request = asked(**{name: value for name, value in of.items() if name != "query"})
    request.query.update(of["query"])
    with pytest.raises(error):
        UsageRoutes(database).list_calls(request)
