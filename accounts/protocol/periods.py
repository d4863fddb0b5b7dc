"""Computes the periods of budgets and limits: days, weeks and months in a time zone. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from accounts.protocol.records import Period

UTC = "UTC"


class Span(NamedTuple):
    """A period: it begins at a time and ends before another, in unix seconds."""

    begins_at: int
    ends_at: int


def span_at(period: Period, time_zone: str, at: float) -> Span:
    """Return the period that a moment lies in. It begins at midnight in the time zone; weeks begin on Monday.

    A time zone that this machine does not know is taken for UTC."""
    zone = _zone(time_zone)
    local = datetime.fromtimestamp(at, zone)
    first = datetime(local.year, local.month, local.day, tzinfo=zone)
    if period == "week":
        first -= timedelta(days=first.weekday())
    elif period == "month":
        first = first.replace(day=1)
    # Times with a zone count by the clock on the wall: a day more is the next midnight, where clocks change as well.
    if period == "day":
        end = first + timedelta(days=1)
    elif period == "week":
        end = first + timedelta(days=7)
    else:
        end = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return Span(int(first.timestamp()), int(end.timestamp()))


def is_known(time_zone: str) -> bool:
    """Return whether this machine knows the time zone."""
    try:
        ZoneInfo(time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


@lru_cache(256)
def _zone(time_zone: str) -> ZoneInfo:
    return ZoneInfo(time_zone if is_known(time_zone) else UTC)
