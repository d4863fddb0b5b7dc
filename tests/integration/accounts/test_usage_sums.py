"""Sums of usage: what the roll-ups say is what the calls add up to, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from accounts.budgets.spending import read_spending
from accounts.database.database import Database
from accounts.errors import Forbidden, Invalid
from accounts.protocol.periods import Span, span_at
from accounts.protocol.records import SubjectKind
from accounts.protocol.usage import UsageRecord, is_failed
from accounts.usage.query import time_of
from accounts.usage.routes import UsageRoutes
from accounts.usage.summary import DAY_S, HOUR_S, month_begin
from tests.support.usage_rows import BEGIN, asked, some_records, write

COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "media_tokens", "queue_ms", "compute_ms")
UNITS = {"hour": HOUR_S, "day": DAY_S}
GROUPS = (
    *((), ("team",), ("model", "team"), ("day",), ("day", "model"), ("hour", "key"), ("user",), ("alias", "adapter")),
    *(("organisation",), ("month", "team"), ("day", "end_user"), ("team", "end_user")),
)


def added_up(records: Sequence[UsageRecord], groups: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    sums: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(lambda: defaultdict(int))
    for one in records:
        if "end_user" in groups and not one.end_user:
            continue
        key = tuple(_value(one, name) for name in groups)
        sums[key]["num_calls"] += 1
        sums[key]["num_failed"] += is_failed(one.outcome)
        sums[key]["cost_nano"] += one.cost_nano
        for name in COUNTED:
            sums[key][name] += getattr(one, name)
    return sums


def _value(one: UsageRecord, name: str) -> Any:
    if name == "month":
        return month_begin(one.ended_at)
    return int(one.ended_at // UNITS[name]) * UNITS[name] if name in UNITS else getattr(one, name)


def told(routes: UsageRoutes, groups: Sequence[str], **query: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first answer, and the sums of all pages."""
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    cursor = ""
    while True:
        request = asked(group_by=",".join(groups), cursor=cursor, **query)
        document = json.loads(bytes(routes.sum_up(request).body))
        first = first or document
        rows += document["data"]
        cursor = document["next"]
        if cursor is None:
            return first, rows


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(groups) or "none")
def test_sums_are_what_calls_add_up_to(database: Database, groups: tuple[str, ...]) -> None:
    records = some_records(500)
    write(database, records[:200])
    write(database, records[100:])  # some come again, and are counted once
    routes = UsageRoutes(database)
    unit = DAY_S if "end_user" in groups else HOUR_S
    for times in ((BEGIN - 40 * DAY_S, BEGIN + 90 * DAY_S), (BEGIN + HOUR_S, BEGIN + 33 * DAY_S)):
        begin, end = (month_begin(at) if "month" in groups else at // unit * unit for at in times)
        of_time = [one for one in records if begin <= one.ended_at < end]
        wanted = added_up(of_time, groups)
        _, rows = told(routes, groups, from_=str(begin), to=str(end), limit="7")
        found = {tuple(_of_text(row[name], name) for name in groups): row for row in rows}
        assert found.keys() == wanted.keys()
        for key, sums in wanted.items():
            assert {name: found[key][name] for name in (*COUNTED, "num_calls", "num_failed")} == {
                name: sums[name] for name in (*COUNTED, "num_calls", "num_failed")
            }
            assert found[key]["cost"] == pytest.approx(sums["cost_nano"] / 1e9)


def _of_text(value: Any, name: str) -> Any:
    return int(time_of(value, name) or 0) if name in ("hour", "day", "month") else value


def test_a_range_is_widened_to_whole_hours_and_told(database: Database) -> None:
    write(database, some_records(50))
    document, _ = told(UsageRoutes(database), ("team",), from_="2026-10-01T10:20:00Z", to="2026-10-02T00:30:00Z")
    assert (document["from"], document["to"]) == ("2026-10-01T10:00:00Z", "2026-10-02T01:00:00Z")
    assert document["currency"] == "USD"


def test_filters_and_roles_narrow_sums(database: Database) -> None:
    records = some_records(300)
    write(database, records)
    routes = UsageRoutes(database)
    everything: dict[str, Any] = {"from_": "2026-01-01", "to": "2027-01-01"}
    _, by_filter = told(routes, ("model",), team_="red", **everything)
    request = asked(role="manager", team="red", group_by="model", **everything)
    assert json.loads(bytes(routes.sum_up(request).body))["data"] == by_filter
    wanted = added_up([one for one in records if one.team == "red"], ("model",))
    assert {row["model"]: row["num_calls"] for row in by_filter} == {
        key[0]: sums["num_calls"] for key, sums in wanted.items()
    }
    request = asked(role="user", user="bob@example.com", group_by="day", **everything)
    num_calls = sum(row["num_calls"] for row in json.loads(bytes(routes.sum_up(request).body))["data"])
    assert num_calls == sum(one.user == "bob@example.com" for one in records)
    with pytest.raises(Forbidden):
        routes.sum_up(asked(role="manager", team="red", group_by="model", team_="blue", **everything))


@pytest.mark.parametrize(
    "query",
    [
        {"group_by": "team"},
        {"from_": "2026-01-01", "group_by": "colour"},
        {"from_": "2026-01-01", "group_by": "end_user,model"},
        {"from_": "2026-01-01", "group_by": "hour", "end_user": "guest"},
        {"from_": "2026-01-01", "outcome": "cut"},
        {"from_": "2026-01-01", "group_by": "month,key"},
        {"from_": "2026-01-01", "group_by": "team", "cursor": "WzEsMl0"},
    ],
)
def test_what_sums_are_not_kept_for_is_said(database: Database, query: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        UsageRoutes(database).sum_up(asked(**query))


@pytest.mark.parametrize("kind", ["organisation", "team", "user", "key", "alias"])
def test_spending_of_a_period_is_exact_in_any_time_zone(database: Database, kind: SubjectKind) -> None:
    records = some_records(500)
    write(database, records)
    chance = random.Random(kind)
    for zone in ("UTC", "Asia/Kolkata", "America/St_Johns", "Asia/Kathmandu"):
        span: Span = span_at(chance.choice(("day", "week", "month")), zone, chance.choice(records).ended_at)
        wanted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for one in records:
            if span.begins_at <= one.ended_at < span.ends_at:
                wanted[getattr(one, kind)][0] += one.prompt_tokens + one.completion_tokens
                wanted[getattr(one, kind)][1] += one.cost_nano
        with database.reading() as connection:
            everybody = read_spending(connection, kind, span)
            names = sorted(wanted)[:2]
            some = read_spending(connection, kind, span, names)
        assert {name: list(found) for name, found in everybody.items()} == wanted
        assert {name: list(found) for name, found in some.items()} == {name: wanted[name] for name in names}
