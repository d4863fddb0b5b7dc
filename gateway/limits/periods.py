"""The periods of limits and budgets as calls need them: looked up for each call's plan, and shown in refusals."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from accounts.protocol.periods import Span, is_known, span_at
from accounts.protocol.records import Period

QUARTER_S = 900


def period_at(period: Period, time_zone: str, at: float) -> Span:
    """Return the period around the unix time `at`, as `span_at` does."""
    return _period_of(period, time_zone, int(at // QUARTER_S))


@lru_cache(maxsize=1024)
def _period_of(period: Period, time_zone: str, quarter: int) -> Span:
    """Return the period around a quarter of an hour, numbered since 1970: in every time zone, days begin at one."""
    return span_at(period, time_zone, quarter * QUARTER_S)


def shown(at: int, time_zone: str) -> str:
    """Return a time for people, such as `2026-02-01 00:00 (Europe/Berlin)`."""
    zone: tzinfo = ZoneInfo(time_zone) if time_zone != "UTC" and is_known(time_zone) else UTC
    return f"{datetime.fromtimestamp(at, zone):%Y-%m-%d %H:%M} ({time_zone})"
