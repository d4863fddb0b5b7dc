"""Changes of access: each in one transaction with its row in the audit, one after the other, and then published.

The changes of all processes are made one after the other: the audit is a chain, and a check (such as that a team has no
keys left) holds until the change is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import time
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection, text

from accounts.access import audit, records, rights
from accounts.access.records import KEY, USER, Kind, RecordT, Stored
from accounts.access.rights import Actor
from accounts.database.database import Database
from accounts.errors import Forbidden, TooManyChanges
from accounts.protocol.records import AccessRecord, TeamRecord

HOUR_S = 3600.0
MAX_CHANGES_OF_TEAM = 2000
"""Maximum number of changes of a team within an hour for whoever is no admin. An entry of the audit, with the record
before and after, can have 50 KiB."""
ENDING = frozenset({"block", "delete"})
"""Changes that are made however many there were: they can't be repeated without others, and nobody is to wait before
a key that was stolen is taken away."""
LOCK = 0x61_63_63_73
"""Number of the PostgreSQL advisory lock that whoever changes access holds. On SQLite the transaction is the lock."""


class Publisher(Protocol):
    """Publishes changes that are committed."""

    def publish(self, number: int) -> bool:
        """Publish all changes up to a number of the audit, and return whether that is done. Blocks for a short time."""
        ...


class PublishedLater:
    """Leaves publishing to the services that look for changes."""

    def publish(self, number: int) -> bool:
        return False


@dataclass(slots=True)
class Change:
    """A change under way: what is written here is committed together."""

    connection: Connection
    actor: Actor
    now: float
    number: int = 0
    """Number of its last row in the audit; 0: nothing was changed."""
    dry_run: bool = False
    """Whether nothing of it stays: it is told to nobody."""
    is_published: bool = True
    """After the end of `Changes.begin`: whether gateways can read the change in Redis."""

    def save(
        self, action: str, kind: Kind[RecordT], before: Stored[RecordT] | None, after: Stored[RecordT]
    ) -> Stored[RecordT]:
        """Write a record that is new (`before` is None) or changed, and return it as it is stored."""
        shown = None if before is None else records.shown(kind, before)
        self.note(action, kind.name, after.record.name, team_of(after), shown, records.shown(kind, after))
        stored = msgspec.structs.replace(
            after,
            version=self.number,
            updated_at=self.now,
            created_at=self.now if before is None else after.created_at,
            created_by=self.actor.name if before is None and kind is KEY else after.created_by,
        )
        records.write(self.connection, kind, stored, before is None)
        return stored

    def delete(self, kind: Kind[Any], before: Stored[Any]) -> None:
        self.note("delete", kind.name, before.record.name, team_of(before), records.shown(kind, before), None)
        records.remove(self.connection, kind, before.record.name)

    def note(
        self,
        action: str,
        kind: str,
        subject: str,
        team: str,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
    ) -> None:
        """Write the audit's row of a change that the caller makes itself on this connection. Raises TooManyChanges."""
        if action not in ENDING:
            _require_pace(self)
        self.number = audit.append(
            self.connection, self.actor, action, kind, subject, team, before, after, is_logged=not self.dry_run
        )


class Changes:
    """Begins the changes of this process."""

    def __init__(self, database: Database, publisher: Publisher) -> None:
        self.database = database
        self._publisher = publisher

    @contextmanager
    def begin(self, actor: Actor, *, dry_run: bool = False) -> Iterator[Change]:
        """Yield a change, which is committed and published at the block's end unless the block raises.

        `dry_run`: nothing of it stays. Raises Forbidden if the caller's key or user has just been taken away."""
        with self.database.transaction() as connection:
            if not self.database.is_sqlite:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
            change = Change(connection, actor, time(), dry_run=dry_run)
            _require_current(change)
            yield change
            if dry_run:
                connection.rollback()
        if change.number and not dry_run:
            change.is_published = self._publisher.publish(change.number)


def _require_current(change: Change) -> None:
    actor = change.actor
    if actor.key and not actor.of_settings:
        own = records.find(change.connection, KEY, actor.key)
        if own is not None or audit.was_deleted(change.connection, KEY.name, actor.key):
            rights.require_key_current(actor, None if own is None else own.record, change.now)
    user = records.find(change.connection, USER, actor.user) if actor.user else None
    if user is not None and user.record.blocked:
        raise Forbidden(f"The user {actor.user} is blocked. Ask an admin.")


def _require_pace(change: Change) -> None:
    """Raise TooManyChanges if whoever is no admin changes more of a team within an hour than the audit is to keep."""
    actor = change.actor
    if actor.is_admin or not actor.team:
        return
    number = audit.count_of_team(change.connection, actor.team, change.now - HOUR_S)
    if number >= MAX_CHANGES_OF_TEAM:
        raise TooManyChanges(
            f"The team {actor.team!r} was changed {number:,} times within an hour, and only admins change more than "
            f"{MAX_CHANGES_OF_TEAM:,} times, since the audit keeps each for good. Keys can be blocked and deleted; for "
            "other changes wait, or ask an admin."
        )


def team_of(stored: Stored[Any]) -> str:
    """Return the team whose manager may see the change; empty: none."""
    record = stored.record
    if isinstance(record, AccessRecord):
        return record.team
    return record.name if isinstance(record, TeamRecord) else ""
