"""The audit: every change of access as a row that is never changed, chained to the one before by its hash.

A row's hash covers its contents and the hash of the row before: whoever alters or removes a row has to make all later
ones anew, and the log line of each change keeps the hashes outside the database.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, desc, func, insert, select

from accounts.access.rights import Actor
from accounts.database.schema import audit

log = logging.getLogger(__name__)

FIRST_HASH = "0" * 64
"""Stands for the hash before the first row."""
CHECKED_AT_ONCE = 1000
_CONTENT = tuple(column.name for column in audit.columns if column.name != "hash")

_encode = msgspec.json.Encoder(order="deterministic").encode


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the audit: one change."""

    number: int
    at: float
    """Unix time."""
    actor: str
    """`key:NAME`, `user:NAME`, or a part of Paddock, such as `system`."""
    address: str
    """The address of whoever sent the request."""
    request_id: str
    action: str
    """Such as `create`, `update`, `delete`, `rotate`, `block`."""
    kind: str
    subject: str
    """Name of what was changed."""
    team: str = ""
    """The team that it belongs to; empty: none."""
    before: dict[str, Any] | None = None
    """The record before the change; null: there was none."""
    after: dict[str, Any] | None = None
    previous_hash: str
    hash: str


class ChainCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking the chain of hashes."""

    is_whole: bool
    num_entries: int
    """Entries that were checked, up to the first fault."""
    last_hash: str
    """Hash of the last entry checked. Keep it elsewhere: entries cut off at the end can be told by it alone."""
    fault: str | None = None
    """The first entry that is not as it was written, and why."""


def last_number(connection: Connection) -> int:
    """Return the number of the last row; 0: there is none."""
    found = connection.execute(select(audit.c.number).order_by(desc(audit.c.number)).limit(1)).scalar()
    return int(found or 0)


def append(
    connection: Connection,
    actor: Actor,
    action: str,
    kind: str,
    subject: str,
    team: str,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    *,
    is_logged: bool = True,
) -> int:
    """Write the row of a change, and return its number. No other transaction changes access meanwhile.

    `is_logged`: False for a change that will be taken back."""
    last = connection.execute(select(audit.c.number, audit.c.hash).order_by(desc(audit.c.number)).limit(1)).first()
    number, previous = (last.number, last.hash) if last is not None else (0, FIRST_HASH)
    row: dict[str, Any] = {
        "number": number + 1,
        "at": time.time(),
        "actor": actor.name[:256],
        "address": actor.address[:64],
        "request_id": actor.request_id[:128],
        "action": action,
        "kind": kind,
        "subject": subject,
        "team": team,
        "before": None if before is None else _encode(before).decode(),
        "after": None if after is None else _encode(after).decode(),
        "previous_hash": previous,
    }
    row["hash"] = hash_of(row)
    connection.execute(insert(audit).values(**row))
    if is_logged:
        fields = {name: row[name] for name in ("number", "actor", "action", "kind", "subject", "hash")}
        log.info("access changed", extra={"fields": {"audit": fields}})
    return number + 1


def count_of_team(connection: Connection, team: str, since: float) -> int:
    """Return how many changes of a team's records there were since a unix time."""
    wanted = select(func.count()).where(audit.c.at > since, audit.c.team == team)
    return int(connection.execute(wanted).scalar() or 0)


def entries(
    connection: Connection, where: Sequence[ColumnElement[bool]], before: int | None, limit: int
) -> list[AuditEntry]:
    """Return the latest entries whose number is lower than `before`, the latest first."""
    wanted = where if before is None else (*where, audit.c.number < before)
    rows = connection.execute(select(audit).where(*wanted).order_by(desc(audit.c.number)).limit(limit)).mappings()
    return [AuditEntry(**{**row, "before": _decoded(row["before"]), "after": _decoded(row["after"])}) for row in rows]


def verify(connection: Connection) -> ChainCheck:
    """Return whether every row is as it was written, and none is missing before the last."""
    number, previous = 0, FIRST_HASH
    while True:
        rows = connection.execute(
            select(audit).where(audit.c.number > number).order_by(audit.c.number).limit(CHECKED_AT_ONCE)
        ).mappings()
        found = False
        for row in rows:
            found, fault = True, ""
            if row["number"] != number + 1:
                fault = f"entry {number + 1} is missing"
            elif row["previous_hash"] != previous:
                fault = f"entry {row['number']} does not follow entry {number}"
            elif row["hash"] != hash_of(row):
                fault = f"entry {row['number']} was altered"
            if fault:
                return ChainCheck(is_whole=False, num_entries=number, last_hash=previous, fault=fault)
            number, previous = row["number"], row["hash"]
        if not found:
            return ChainCheck(is_whole=True, num_entries=number, last_hash=previous)


def hash_of(row: Any) -> str:
    """Return the SHA-256 of a row's contents, which include the hash of the row before."""
    return hashlib.sha256(_encode([row[name] for name in _CONTENT])).hexdigest()


def _decoded(text: str | None) -> dict[str, Any] | None:
    return None if text is None else msgspec.json.decode(text, type=dict[str, Any])


def was_deleted(connection: Connection, kind: str, name: str) -> bool:
    """Return whether the last change of a record of this name deleted it."""
    last = connection.execute(
        select(audit.c.action)
        .where(audit.c.kind == kind, audit.c.subject == name)
        .order_by(audit.c.number.desc())
        .limit(1)
    ).scalar()
    return last == "delete"
