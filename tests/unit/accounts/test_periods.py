"""Periods of budgets: where days, weeks and months begin, in any time zone, also when clocks change."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from accounts.protocol.periods import span_at
from accounts.protocol.records import Period


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("period", "zone", "moment", "begin", "end"),
    [
        ("day", "UTC", "2026-11-28T13:00", "2026-11-28", "2026-11-29"),
        ("day", "Asia/Kolkata", "2026-11-28T00:10", "2026-11-28", "2026-11-29"),
        ("week", "UTC", "2026-11-30T00:00", "2026-11-30", "2026-12-07"),
        ("week", "UTC", "2026-11-29T23:59", "2026-11-23", "2026-11-30"),
        ("month", "America/New_York", "2026-12-31T23:30", "2026-12-01", "2027-01-01"),
        ("month", "UTC", "2028-02-29T12:00", "2028-02-01", "2028-03-01"),
        ("day", "Europe/Berlin", "2026-10-25T12:00", "2026-10-25", "2026-10-26"),
        ("day", "Europe/Berlin", "2026-03-29T12:00", "2026-03-29", "2026-03-30"),
    ],
)
def test_a_period_is_from_midnight_to_midnight(period: Period, zone: str, moment: str, begin: str, end: str) -> None:
    assert span_at(period, zone, at(moment, zone)) == (at(begin, zone), at(end, zone))


def test_days_have_23_and_25_hours_where_clocks_change() -> None:
    short, long = (
        span_at("day", "Europe/Berlin", at(f"2026-{day}T12:00", "Europe/Berlin")) for day in ("03-29", "10-25")
    )
    assert (short.ends_at - short.begins_at, long.ends_at - long.begins_at) == (23 * 3600, 25 * 3600)


@pytest.mark.parametrize("period", ["day", "week", "month"])
def test_periods_follow_each_other_without_a_gap(period: Period) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    for _ in range(60):
        span = span_at(period, "Australia/Lord_Howe", moment)
        assert span.begins_at <= moment < span.ends_at
        assert span_at(period, "Australia/Lord_Howe", span.ends_at).begins_at == span.ends_at
        moment = float(span.ends_at)


def test_a_time_zone_that_nobody_knows_is_utc() -> None:
    moment = at("2026-11-28T13:00")
    assert span_at("day", "Mars/Olympus", moment) == span_at("day", "UTC", moment)
    assert span_at("day", "../../etc/passwd", moment) == span_at("day", "UTC", moment)
