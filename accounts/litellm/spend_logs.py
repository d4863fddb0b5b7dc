"""Answers `/spend/logs` as LiteLLM's proxy does, by its names of parameters and fields, from the ledger.

With both dates it answers with sums per day, unless `summarize=false`; else with calls, newest first. The list is
streamed, and ends after MAX_CALLS calls or MAX_S seconds with an object that says so: a ledger of millions takes no
memory, and keeps no thread for long. Differences: `end_date` includes its day; `api_key` may also be a key's
name, and is shown as such, as `token` is by the routes of keys: whole hashes are shown nowhere.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, Row
from starlette.responses import Response, StreamingResponse

from accounts.api.api import JSON, USERS, AdminRequest, RouteRow, answer, read_query
from accounts.database.database import Database
from accounts.errors import Invalid
from accounts.litellm.names import find_key
from accounts.protocol.usage import NANO
from accounts.usage.calls import OK, Place, read_page
from accounts.usage.query import Calls, Selection, calls_of, time_of
from accounts.usage.summary import DAY_S, summarise

PAGE_CALLS = 1000
MAX_CALLS = 100_000
MAX_S = 30.0
"""Seconds of reading after which a list ends: a filter can leave little of millions of calls."""
MAX_DAYS = 366
MAX_SUMS = 50_000
KEY_PREFIXES = ("pk-", "sk-")

encode = msgspec.json.Encoder().encode


class SpendLogsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of LiteLLM's route. Parameters that it does not have are ignored, as there."""

    api_key: str = ""
    user_id: str = ""
    request_id: str = ""
    start_date: str = ""
    end_date: str = ""
    summarize: bool = True


class SpendLogsRoutes:
    """The handler."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        about = "calls or sums per day, in LiteLLM's form"
        return (RouteRow("GET", "/spend/logs", USERS, self.show, about, query=SpendLogsQuery),)

    def show(self, request: AdminRequest) -> Response:
        """Answer with calls or sums. Raises Invalid, Forbidden."""
        asked = read_query(request, SpendLogsQuery)
        begins_at, ends_at = time_of(asked.start_date, "start_date"), time_of(asked.end_date, "end_date")
        if ends_at is not None:
            ends_at = ends_at // DAY_S * DAY_S + DAY_S
        with self._database.reading() as connection:
            key = _key_name(connection, asked.api_key)
            selection = Selection(key=key, user=asked.user_id, request_id=asked.request_id)
            scoped = calls_of(selection, request.caller)
            calls = Calls(begins_at, ends_at, scoped.equal)
            if begins_at is not None and ends_at is not None and asked.summarize and not asked.request_id:
                if ends_at - begins_at > MAX_DAYS * DAY_S:
                    raise Invalid(
                        f"The dates are more than {MAX_DAYS} days apart. Ask for fewer days, or use "
                        "/admin/usage/summary.",
                        param="start_date",
                    )
                return answer(_sums(connection, calls, begins_at, ends_at))
        pieces = self._pieces(calls)
        return StreamingResponse(itertools.chain((next(pieces),), pieces), media_type=JSON)

    def _pieces(self, calls: Calls) -> Iterator[bytes]:
        """Yield a JSON list of calls, newest first; the last element may be an error."""
        after: Place | None = None
        separator, num_calls, took_s = b"[", 0, 0.0
        while True:
            began = time.monotonic()
            with self._database.reading() as connection:
                page = read_page(connection, calls, PAGE_CALLS, after)
            took_s += time.monotonic() - began
            num_calls += len(page.rows)
            listed = b",".join(encode(_log_of(row)) for row in page.rows)
            if listed:
                yield separator + listed
                separator = b","
            after = page.next
            if after is not None and (num_calls >= MAX_CALLS or took_s >= MAX_S):
                yield separator + encode(_cut(num_calls)) + b"]"
                return
            if after is None:
                yield b"[]" if separator == b"[" else b"]"
                return


def _cut(num_calls: int) -> dict[str, Any]:
    """Return the last element of a list that is not whole."""
    message = (
        f"The list ends here, after {num_calls:,} calls: no more are listed at once. Ask for fewer days or for one "
        "key, or use /admin/usage, which has pages, or its export."
    )
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "list_too_long"}}


def _key_name(connection: Connection, given: str) -> str:
    """Return the name of the key that a caller named by its name, its hash, or itself; keys that were deleted are known
    by their names alone. Raises Invalid."""
    found = find_key(connection, given) if given else None
    if found is None and given.startswith(KEY_PREFIXES):
        raise Invalid(
            "`api_key` is none of this installation's keys. Give a key, its hash or its name.", param="api_key"
        )
    return given if found is None else found


def _log_of(row: Row[Any]) -> dict[str, Any]:
    """Return a call by LiteLLM's names. Fields for things that Paddock does not have are empty, as they are there."""
    is_ok = row.outcome == OK
    return {
        "request_id": row.request_id,
        "call_type": row.route,
        "api_key": row.key,
        "spend": row.cost_nano / NANO,
        "total_tokens": row.prompt_tokens + row.completion_tokens,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "startTime": _shown(row.started_at),
        "endTime": _shown(row.ended_at),
        "completionStartTime": None,
        "request_duration_ms": round((row.ended_at - row.started_at) * 1000),
        "model": row.model,
        "model_id": row.model,
        "model_group": row.alias,
        "custom_llm_provider": "paddock",
        "api_base": "",
        "user": row.user,
        "metadata": {
            "user_api_key": row.key,
            "user_api_key_alias": row.key,
            "user_api_key_team_id": row.team,
            "user_api_key_org_id": row.organisation,
            "user_api_key_user_id": row.user,
            "status": "success" if is_ok else "failure",
            "error_information": None if is_ok else {"error_code": str(row.status), "error_class": row.outcome},
            "adapter": row.adapter,
            "cached_tokens": row.cached_tokens,
            "queue_ms": row.queue_ms,
        },
        "cache_hit": "False",
        "cache_key": "",
        "request_tags": [],
        "team_id": row.team,
        "organization_id": row.organisation,
        "end_user": row.end_user,
        "requester_ip_address": None,
        "messages": {},
        "response": {},
        "session_id": row.trace_id or row.request_id,
        "status": "success" if is_ok else "failure",
    }


def _sums(connection: Connection, calls: Calls, begins_at: float, ends_at: float) -> list[dict[str, Any]]:
    """Return each day's spend: in all, by key, by user and by model."""
    days: dict[int, dict[str, Any]] = {
        day: {"startTime": f"{datetime.fromtimestamp(day, UTC):%Y-%m-%d}", "spend": 0.0, "users": {}, "models": {}}
        for day in range(int(begins_at // DAY_S) * DAY_S, int(ends_at), DAY_S)
    }
    found = {name: _by_day(connection, calls, name) for name in ("key", "user", "model")}
    for (day, key), cost in found["key"].items():
        days[day]["spend"] += cost
        days[day][key] = cost
    for name, field in (("user", "users"), ("model", "models")):
        for (day, value), cost in found[name].items():
            days[day][field][value] = cost
    return list(days.values())


def _by_day(connection: Connection, calls: Calls, name: str) -> Mapping[tuple[int, str], float]:
    summary = summarise(connection, calls, ("day", name), time.time(), MAX_SUMS)
    if summary.is_cut:
        raise Invalid(f"The dates have more than {MAX_SUMS:,} sums. Ask for fewer days.", param="start_date")
    costs = defaultdict[tuple[int, str], float](float)
    for row in summary.rows:
        costs[int(row["day"]), str(row[name])] += int(row["cost_nano"]) / NANO
    return costs


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
