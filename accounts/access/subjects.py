"""The operations on organisations, teams, users and aliases: make, read, list, change and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, select

from accounts.access import editing, keys, records, rights
from accounts.access.changes import Change, Changes
from accounts.access.records import KEY, ORGANISATION, TEAM, USER, AnyRecord, Kind, RecordT, Stored
from accounts.access.rights import Actor
from accounts.database.schema import api_keys, memberships, teams, users
from accounts.errors import Conflict, Invalid, Missing
from accounts.protocol.records import DEFAULT_ORGANISATION, DEFAULT_TEAM, OrganisationRecord, TeamRecord, UserRecord

MAX_AT_ONCE = 10_000
"""Maximum keys or members that the deletion of one team or user takes with it."""


class Subjects:
    """Manages organisations, teams, users and aliases. Every method blocks, and raises AccountsError for callers."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def create(self, actor: Actor, kind: Kind[RecordT], document: Mapping[str, Any]) -> tuple[Stored[RecordT], bool]:
        """Make a record of the fields in `document`, and return it, and whether it is published."""
        rights.require_admin(actor, f"make a {kind.name}")
        fields = dict(document)
        name = editing.required(fields, "name")
        if kind.name != "alias":
            editing.require_name(name, kind)
        with self._changes.begin(actor) as change:
            if records.find(change.connection, kind, name) is not None:
                raise Conflict(f"There is a {kind.name} {name!r} already; change that one, or choose another name.")
            after = editing.edited(kind, None, name, fields)
            require_possible(change, after.record)
            made = change.save("create", kind, None, after)
        return made, change.is_published

    def show(self, actor: Actor, kind: Kind[RecordT], name: str) -> Stored[RecordT]:
        with self._changes.database.reading() as connection:
            found = records.find(connection, kind, name)
        if found is None or not _sees(actor, found.record):
            raise Missing(f"There is no {kind.name} {name!r} that {actor.name} may see.")
        return _narrowed(actor, found)

    def page(
        self,
        actor: Actor,
        kind: Kind[RecordT],
        *,
        team: str = "",
        organisation: str = "",
        after: str = "",
        limit: int = 100,
    ) -> list[Stored[RecordT]]:
        """Return the next records that the caller may see, ordered by name: `team` and `organisation` narrow users and
        teams down."""
        where: list[ColumnElement[bool]] = []
        if not actor.is_admin:
            team = actor.team
            if kind is TEAM:
                where.append(teams.c.name == actor.team)
            elif kind is not USER:
                rights.require_admin(actor, f"list {kind.name}s")
            if kind is USER and actor.role != "manager":
                where.append(users.c.name == actor.user)
        if kind is USER and team:
            members = select(memberships.c.user).where(memberships.c.team == team)
            where.append(users.c.name.in_(members))
        if kind is TEAM and organisation:
            where.append(teams.c.organisation == organisation)
        with self._changes.database.reading() as connection:
            return [_narrowed(actor, stored) for stored in records.page(connection, kind, where, after, limit)]

    def update(
        self, actor: Actor, kind: Kind[RecordT], name: str, document: Mapping[str, Any], action: str = "update"
    ) -> tuple[Stored[RecordT], bool]:
        """Change fields of a record. Return it, and whether that is published."""
        rights.require_admin(actor, f"change a {kind.name}")
        with self._changes.begin(actor) as change:
            before = records.get(change.connection, kind, name)
            after = editing.edited(kind, before, name, document)
            if after == before:
                return before, True
            after = write(change, kind, action, before, after)
        return after, change.is_published

    def block(self, actor: Actor, kind: Kind[RecordT], name: str, blocked: bool) -> tuple[Stored[RecordT], bool]:
        return self.update(actor, kind, name, {"blocked": blocked}, "block" if blocked else "unblock")

    def delete(
        self, actor: Actor, kind: Kind[Any], name: str, version: int | None = None, *, with_keys: bool = False
    ) -> bool:
        """Delete a record, and return whether that is published. `with_keys`: a team's keys, too."""
        rights.require_admin(actor, f"delete a {kind.name}")
        with self._changes.begin(actor) as change:
            before = records.get(change.connection, kind, name)
            editing.require_version(kind, before, version)
            delete(change, kind, before, with_keys=with_keys)
        return change.is_published


def write(
    change: Change, kind: Kind[RecordT], action: str, before: Stored[RecordT], after: Stored[RecordT]
) -> Stored[RecordT]:
    """Write a changed record, and what follows from it. Raises Invalid if it names what is not there."""
    require_possible(change, after.record)
    if isinstance(after.record, UserRecord):
        keys.fit_to_user(change, after.record.name, after.record.teams, after.record.admin)
    return change.save(action, kind, before, after)


def delete(change: Change, kind: Kind[Any], before: Stored[Any], *, with_keys: bool = False) -> None:
    """Delete a record, and what belongs to it alone. Raises Conflict while something else needs it."""
    record: AnyRecord = before.record
    match record:
        case OrganisationRecord(name=name):
            _require_not_default(name, DEFAULT_ORGANISATION, "organisation")
            if num := records.count(change.connection, TEAM, teams.c.organisation == name):
                raise Conflict(f"The organisation {name!r} has {num} teams; delete them or move them first.")
        case TeamRecord(name=name):
            _require_not_default(name, DEFAULT_TEAM, "team")
            _empty_team(change, name, with_keys)
        case UserRecord(name=name):
            keys.fit_to_user(change, name, {}, is_admin=False)
    change.delete(kind, before)


def require_possible(change: Change, record: AnyRecord) -> None:
    """Raise Invalid if the record names an organisation or a team that is not there."""
    if isinstance(record, TeamRecord) and records.find(change.connection, ORGANISATION, record.organisation) is None:
        raise Invalid(f"There is no organisation {record.organisation!r}; make it first.", param="organisation")
    if isinstance(record, UserRecord):
        for team, role in record.teams.items():
            if records.find(change.connection, TEAM, team) is None:
                raise Invalid(f"There is no team {team!r}; make it first.", param=f"teams.{team}")
            if role not in ("manager", "user"):
                raise Invalid(f"A member of a team is a `manager` or a `user`, not `{role}`.", param=f"teams.{team}")


def _empty_team(change: Change, name: str, with_keys: bool) -> None:
    """Delete a team's keys, if that is wanted, and end its memberships."""
    found = records.page(change.connection, KEY, (api_keys.c.team == name,), "", MAX_AT_ONCE)
    if found and not with_keys:
        raise Conflict(
            f"The team {name!r} has {len(found)} keys; delete them first, or with it (`?with_keys=true`).",
            param="with_keys",
        )
    for key in found:
        change.delete(KEY, key)
    is_member = users.c.name.in_(select(memberships.c.user).where(memberships.c.team == name))
    for user in records.page(change.connection, USER, (is_member,), "", MAX_AT_ONCE):
        left = {team: role for team, role in user.record.teams.items() if team != name}
        record = msgspec.structs.replace(user.record, teams=left)
        change.save("update", USER, user, msgspec.structs.replace(user, record=record))


def _sees(actor: Actor, record: AnyRecord) -> bool:
    if actor.is_admin:
        return True
    match record:
        case TeamRecord(name=name):
            return name == actor.team
        case UserRecord(name=name, teams=of):
            return name == actor.user or (actor.role == "manager" and actor.team in of)
    return False


def _narrowed(actor: Actor, stored: Stored[RecordT]) -> Stored[RecordT]:
    """Return a user without what a manager of one team may not know: its other teams, and its notes."""
    record: AnyRecord = stored.record
    if actor.is_admin or not isinstance(record, UserRecord) or record.name == actor.user:
        return stored
    own = {team: role for team, role in record.teams.items() if team == actor.team}
    narrowed: Any = msgspec.structs.replace(record, teams=own)
    return msgspec.structs.replace(stored, record=narrowed, metadata={})


def _require_not_default(name: str, default: str, kind: str) -> None:
    if name == default:
        raise Conflict(f"The {kind} {name!r} can't be deleted: whatever names no other {kind} belongs to it.")
