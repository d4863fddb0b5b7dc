"""The records of access with what the database keeps beside each, and how they are read and written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, update

from accounts.database import schema
from accounts.errors import Missing
from accounts.protocol.records import (
    AccessRecord,
    AliasRecord,
    OrganisationRecord,
    SubjectKind,
    TeamRecord,
    UserRecord,
    encode_record,
)

AnyRecord = OrganisationRecord | TeamRecord | UserRecord | AccessRecord | AliasRecord
RecordT = TypeVar("RecordT", bound=AnyRecord)

HASH_CHARS = 8
"""Characters of a key's hash that answers, logs and the audit show."""


class Kind(msgspec.Struct, Generic[RecordT], frozen=True):
    """A kind of record: its table, and the fields of the record that columns repeat for queries."""

    name: SubjectKind
    record: type[RecordT]
    table: Table
    columns: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Fields that nobody may set or see as they are."""


ORGANISATION = Kind("organisation", OrganisationRecord, schema.organisations)
TEAM = Kind("team", TeamRecord, schema.teams, ("organisation",))
USER = Kind("user", UserRecord, schema.users)
KEY = Kind(
    "key",
    AccessRecord,
    schema.api_keys,
    ("sha256", "team", "user"),
    ("sha256", "admin", "previous_sha256", "previous_until"),
)
ALIAS = Kind("alias", AliasRecord, schema.aliases)
KINDS: Mapping[SubjectKind, Kind[Any]] = {kind.name: kind for kind in (ORGANISATION, TEAM, USER, KEY, ALIAS)}


class Stored(msgspec.Struct, Generic[RecordT], frozen=True, kw_only=True):
    """A record, and what the database keeps beside it."""

    record: RecordT
    metadata: dict[str, Any] = {}
    """Whatever its owner notes about it."""
    version: int = 0
    """Number of its last change, in the audit; 0: it is not stored yet."""
    applied: bool = False
    """Whether a file declares it (`paddock apply`)."""
    created_at: float = 0.0
    updated_at: float = 0.0
    email: str = ""
    """Email address of a user; empty: the record is no user's."""
    created_by: str = ""
    """Actor that made a key, as in the audit."""
    request: str = ""
    """Idempotency key of the request that made a key or rotated it last."""
    last_used_at: float | None = None
    """When the last call of a key ended."""


_BESIDE: Mapping[str, tuple[str, ...]] = {
    "user": ("email",),
    "key": ("created_by", "request", "last_used_at"),
}
"""Kind -> fields of Stored that have a column in its table only."""
_ALWAYS = ("metadata", "version", "applied", "created_at", "updated_at")


def find(connection: Connection, kind: Kind[RecordT], name: str) -> Stored[RecordT] | None:
    """Return the record of a name; None: there is none."""
    return next(_read(connection, kind, (kind.table.c.name == name,), 1), None)


def get(connection: Connection, kind: Kind[RecordT], name: str) -> Stored[RecordT]:
    """Return the record of a name. Raises Missing."""
    found = find(connection, kind, name)
    if found is None:
        raise Missing(f"There is no {kind.name} {name!r}. `GET /admin/{kind.name}s` lists those that there are.")
    return found


def page(
    connection: Connection, kind: Kind[RecordT], where: Sequence[ColumnElement[bool]], after: str, limit: int
) -> list[Stored[RecordT]]:
    """Return the next records, ordered by name, after the one of this name."""
    wanted = (*where, kind.table.c.name > after) if after else tuple(where)
    return list(_read(connection, kind, wanted, limit))


def count(connection: Connection, kind: Kind[Any], *where: ColumnElement[bool]) -> int:
    found: int = connection.execute(select(func.count()).select_from(kind.table).where(*where)).scalar_one()
    return found


def write(connection: Connection, kind: Kind[RecordT], stored: Stored[RecordT], is_new: bool) -> None:
    """Insert the record, or update that of its name; a user's memberships with it."""
    values = {name: getattr(stored.record, name) for name in kind.columns}
    values |= {name: getattr(stored, name) for name in (*_ALWAYS, *_BESIDE.get(kind.name, ()))}
    values["record"] = encode_record(stored.record).decode()
    name = stored.record.name
    if is_new:
        connection.execute(insert(kind.table).values(name=name, **values))
    else:
        connection.execute(update(kind.table).where(kind.table.c.name == name).values(**values))
    if isinstance(stored.record, UserRecord):
        _write_memberships(connection, stored.record)


def remove(connection: Connection, kind: Kind[Any], name: str) -> None:
    connection.execute(delete(kind.table).where(kind.table.c.name == name))


def _write_memberships(connection: Connection, user: UserRecord) -> None:
    table = schema.memberships
    connection.execute(delete(table).where(table.c.user == user.name))
    if user.teams:
        rows = [{"team": team, "user": user.name, "role": role} for team, role in user.teams.items()]
        connection.execute(insert(table), rows)


def _read(
    connection: Connection, kind: Kind[RecordT], where: Sequence[ColumnElement[bool]], limit: int
) -> Iterator[Stored[RecordT]]:
    table = kind.table
    beside = (*_ALWAYS, *_BESIDE.get(kind.name, ()))
    columns: list[ColumnElement[Any]] = [table.c.record, *(table.c[name] for name in beside)]
    if kind.name == "key":
        # The index of usage by key and time answers this at once, for however many calls.
        usage = schema.usage
        last = select(func.max(usage.c.ended_at)).where(usage.c.key == table.c.name).scalar_subquery()
        columns.append(last.label("last_call_at"))
    decoder = msgspec.json.Decoder(kind.record)
    for row in connection.execute(select(*columns).where(*where).order_by(table.c.name).limit(limit)).mappings():
        values = {name: row[name] for name in beside}
        if kind.name == "key":
            values["last_used_at"] = max(filter(None, (row["last_used_at"], row["last_call_at"])), default=None)
        yield cast(Stored[RecordT], Stored(record=cast(Any, decoder.decode(row["record"])), **values))


def shown(kind: Kind[Any], stored: Stored[Any]) -> dict[str, Any]:
    """Return the record as the audit and answers show it: a key has no more than the beginning of its hashes."""
    names = (name for name in kind.record.__struct_fields__ if name not in kind.hidden)
    fields = {name: msgspec.to_builtins(getattr(stored.record, name)) for name in names}
    if isinstance(stored.record, AccessRecord):
        record = stored.record
        fields["role"] = record.granted_role
        fields["hash"] = record.sha256[:HASH_CHARS]
        fields["previous_hash"] = record.previous_sha256[:HASH_CHARS]
        fields["previous_until"] = record.previous_until if record.previous_sha256 else None
    if kind is USER:
        fields["email"] = stored.email
    return {**fields, "metadata": stored.metadata}
