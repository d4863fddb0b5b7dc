"""Reads queries about usage: of which calls, of which time. A query never reaches further than its caller's role."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from accounts.errors import Forbidden, Invalid
from accounts.protocol.caller import Caller

FAILED = "failed"
"""Value of the filter `outcome` for all calls that count as failed (`accounts.protocol.usage.is_failed`)."""
MAX_CURSOR_CHARS = 4096
MAX_TIME = datetime(9000, 1, 1, tzinfo=UTC).timestamp()

Text = Annotated[str, Meta(max_length=256)]


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of every query about usage. An empty one is no condition."""

    begins: str = msgspec.field(default="", name="from")
    ends: str = msgspec.field(default="", name="to")
    team: Text = ""
    key: Text = ""
    user: Text = ""
    end_user: Text = ""
    alias: Text = ""
    model: Text = ""
    outcome: Text = ""
    request_id: Text = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """A set of calls."""

    begins_at: float | None
    ends_at: float | None
    """Unix times: calls that ended at or after the first, and before the second; None: all."""
    equal: Mapping[str, str]
    """Column of `usage` -> the value that it has."""
    is_failed: bool = False
    """Only calls that count as failed."""


def calls_of(selection: Selection, caller: Caller) -> Calls:
    """Return the calls that a query selects, as far as its caller may see them. Raises Invalid, Forbidden."""
    columns = ("team", "key", "user", "end_user", "alias", "model", "outcome", "request_id")
    equal = {name: value for name in columns if (value := getattr(selection, name))}
    is_failed = equal.get("outcome") == FAILED
    if is_failed:
        del equal["outcome"]
    begins_at, ends_at = time_of(selection.begins, "from"), time_of(selection.ends, "to")
    if begins_at is not None and ends_at is not None and begins_at >= ends_at:
        raise Invalid("`from` is not before `to`. `to` is the first moment that is left out.", param="from")
    return Calls(begins_at, ends_at, {**equal, **_scope(caller, equal)}, is_failed)


def _scope(caller: Caller, asked: Mapping[str, str]) -> Mapping[str, str]:
    """Return the condition that the caller's role adds: column -> value."""
    if caller.role == "admin":
        return {}
    if caller.role == "manager":
        column, own = "team", caller.team
    elif caller.user:
        column, own = "user", caller.user
    else:
        column, own = "key", caller.key
    if not own:
        raise Forbidden(f"The caller has no {column}, and so no usage of its own. Ask an admin.")
    scope = {column: own}
    if column == "key":
        scope["team"] = caller.team  # a key of another team may have had this name before
    for name, value in scope.items():
        if asked.get(name, value) != value:
            raise Forbidden(f"A caller with the role {caller.role} sees the usage of its own {name} only: {value}.")
    return scope


def time_of(text: str, name: str) -> float | None:
    """Return a time that a caller wrote: a date or time by ISO 8601 (UTC unless it says otherwise), or unix seconds.

    An empty text is None. Raises Invalid."""
    if not text:
        return None
    at = _seconds(text)
    if at is None or not 0 <= at < MAX_TIME:
        raise Invalid(
            f"`{name}` is no time: {text[:40]!r}. Give a date (2026-11-28), a time (2026-11-28T12:00:00Z) or unix "
            "seconds.",
            param=name,
        )
    return at


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text.replace(" ", "+"))  # a `+` in a query that is not encoded is a blank
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def write_cursor(values: tuple[str | int | float, ...]) -> str:
    """Return the text that stands for a place in a list."""
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).rstrip(b"=").decode()


CursorT = TypeVar("CursorT")


def read_cursor(text: str, kind: type[CursorT]) -> CursorT:
    """Return the values in a cursor. Raises Invalid."""
    try:
        raw = base64.urlsafe_b64decode(text[:MAX_CURSOR_CHARS] + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=kind)
    except (binascii.Error, ValueError):
        raise Invalid("`cursor` is none of this list. Give the `next` of the page before.", param="cursor") from None
