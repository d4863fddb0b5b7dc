"""Computes when the periods of limits and budgets begin and end: days, weeks and months of a time zone."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from accounts.protocol.records import Period

DAY, MONTH = "d", "m"
"""Fields of the counters of tokens per day and per month, which are those of UTC."""

QUARTER_S = 900

log = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def zone_of(name: str) -> tzinfo:
    """Return the time zone of an IANA name. One that this machine does not know counts as UTC, and is logged."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError) as error:
        log.error("the time zone %r of a budget is not known here and counts as UTC: %s; install tzdata", name, error)
        return UTC


def period_at(period: Period, zone_name: str, at: float) -> tuple[int, int]:
    """Return when the period around the unix time `at` begins and ends, in unix seconds. Weeks begin on Monday."""
    return _period_at(period, zone_name, int(at // QUARTER_S))


@lru_cache(maxsize=1024)
def _period_at(period: Period, zone_name: str, quarter: int) -> tuple[int, int]:
    """Return the period around a quarter of an hour, numbered since 1970: days begin at one in every time zone."""
    zone = zone_of(zone_name)
    day = datetime.fromtimestamp(quarter * QUARTER_S, zone).date()
    match period:
        case "day":
            first, last = day, day + timedelta(days=1)
        case "week":
            first = day - timedelta(days=day.weekday())
            last = first + timedelta(days=7)
        case "month":
            first = day.replace(day=1)
            last = (first + timedelta(days=31)).replace(day=1)
    begin, end = (int(datetime.combine(each, time(), zone).timestamp()) for each in (first, last))
    return begin, end


def shown(at: int, zone_name: str) -> str:
    """Return a time for people, such as `2026-02-01 00:00 (Europe/Berlin)`."""
    return f"{datetime.fromtimestamp(at, zone_of(zone_name)):%Y-%m-%d %H:%M} ({zone_name})"
