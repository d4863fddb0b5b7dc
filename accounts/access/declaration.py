"""Makes access what a file declares: organisations, teams, users, keys by their hash, and aliases, in one transaction.

A declared record is as the file says, and has defaults where the file says nothing; but a record that was blocked stays
so unless the file names `blocked`, and a key whose hash the file leaves out keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta
from sqlalchemy import true

from accounts.access import editing, keys, records, subjects
from accounts.access.changes import Change, Changes
from accounts.access.keys import MAX_GRACE_S
from accounts.access.records import ALIAS, KEY, ORGANISATION, TEAM, USER, Kind, Stored
from accounts.access.rights import Actor, require_admin, require_not_first
from accounts.errors import Conflict, Invalid
from accounts.protocol.records import DEFAULT_ORGANISATION, DEFAULT_TEAM, AccessRecord, UserRecord
from workers.yaml_document import whole_text

MAX_DECLARED = 20_000
Declared = Annotated[list[dict[str, Any]], Meta(max_length=MAX_DECLARED)]
SECTIONS: tuple[tuple[str, Kind[Any]], ...] = (
    ("organisations", ORGANISATION),
    ("teams", TEAM),
    ("users", USER),
    ("aliases", ALIAS),
    ("keys", KEY),
)
"""The order in which records are made: later ones may name earlier ones."""
ABSENT: tuple[object, ...] = (None, "", False, [], {})
"""Default values, which are left out of the differences of a new record."""
STRUCTURE = (
    "The file is an object of lists: organisations, teams, users, aliases, keys, each of records such as "
    f"`{{name: red}}` and of at most {MAX_DECLARED:,}; correct it there (docs/teams.md)."
)
GRACE, HASH = "grace_s", "sha256"


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: lists of records, as `POST /admin/teams` and the like take them. Keys have `sha256` besides, and
    `grace_s`: seconds for which a key that is replaced by another hash works still."""

    organisations: Declared = []
    teams: Declared = []
    users: Declared = []
    aliases: Declared = []
    keys: Declared = []


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one record."""

    action: Literal["create", "update", "delete"]
    kind: str
    name: str
    fields: dict[str, tuple[Any, Any]] = {}
    """Field, such as `limits.max_parallel` -> its values before and after."""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a declaration."""

    changes: list[Difference]
    dry_run: bool
    published: bool


def read_declaration(text: bytes) -> Declaration:
    """Return the declaration in a file, YAML or JSON. Raises Invalid, naming the field."""
    try:
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Invalid(f"The file is no YAML: {error}.") from None
    try:
        return editing.convert(found or {}, Declaration)
    except Invalid as error:
        raise Invalid(f"{error.message} {STRUCTURE}", param=error.param) from None


class Declarations:
    """Applies declarations. Its methods block."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def apply(self, actor: Actor, declared: Declaration, *, dry_run: bool = False, prune: bool = False) -> Applied:
        """Change what differs from the declaration. `dry_run`: only say what. `prune`: delete what was applied before
        and is not declared any more. Raises AccountsError; then nothing is changed."""
        require_admin(actor, "apply a file")
        differences: list[Difference] = []
        with self._changes.begin(actor, dry_run=dry_run) as change:
            for section, kind in SECTIONS:
                documents = getattr(declared, section)
                for place, name, document in _named(section, documents):
                    differences += _at(place, change, kind, name, document)
            if prune:
                for section, kind in reversed(SECTIONS):
                    names = {document["name"] for document in getattr(declared, section)}
                    differences += _prune(change, kind, names)
        return Applied(changes=differences, dry_run=dry_run, published=change.is_published and not dry_run)


def _named(section: str, documents: list[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each record's place in the file, its name, and its other fields. Raises Invalid."""
    seen: set[str] = set()
    for number, document in enumerate(documents):
        place, fields = f"{section}[{number}]", dict(document)
        name = fields.pop("name", None)
        if not isinstance(name, str) or not name:
            raise Invalid(f"`{place}.name` is missing; it is a text.", param=f"{place}.name")
        if name in seen:
            raise Invalid(f"`{place}`: {name!r} is declared twice.", param=f"{place}.name")
        seen.add(name)
        yield place, name, fields


def _at(place: str, change: Change, kind: Kind[Any], name: str, document: dict[str, Any]) -> list[Difference]:
    """Make one record what it is declared to be; errors name its place in the file."""
    try:
        return list(_make_so(change, kind, name, document))
    except (Invalid, Conflict) as error:
        where = f"{place}.{error.param}" if error.param else place
        raise type(error)(f"`{place}`, {kind.name} {name!r}: {error.message}", param=where) from None


def _make_so(change: Change, kind: Kind[Any], name: str, document: dict[str, Any]) -> Iterator[Difference]:
    before = records.find(change.connection, kind, name)
    if before is None and kind is not ALIAS:
        editing.require_name(name, kind)
    if before is not None and "blocked" not in document and kind is not ALIAS:
        document["blocked"] = before.record.blocked
    after = (
        _declared_key(before, name, document, change.now) if kind is KEY else _declared(kind, before, name, document)
    )
    if before is not None and after == before:
        return
    shown_before = {} if before is None else records.shown(kind, before)
    if before is None:
        _require_possible(change, after)
        change.save("create", kind, None, after)
    elif kind is KEY:
        _require_possible(change, after)
        change.save("update", kind, before, after)
    else:
        subjects.write(change, kind, "update", before, after)
    fields = dict(_differences(shown_before, records.shown(kind, after)))
    if before is None:
        fields = {field: values for field, values in fields.items() if values[1] not in ABSENT}
    if before is None or fields:
        yield Difference(action="create" if before is None else "update", kind=kind.name, name=name, fields=fields)


def _require_possible(change: Change, after: Stored[Any]) -> None:
    if isinstance(after.record, AccessRecord):
        keys.require_possible(change, after.record)
    else:
        subjects.require_possible(change, after.record)


def _declared(kind: Kind[Any], before: Stored[Any] | None, name: str, document: dict[str, Any]) -> Stored[Any]:
    """Return the record that is declared, with what the database keeps beside it."""
    made = editing.edited(kind, None, name, document)
    if before is None:
        return msgspec.structs.replace(made, applied=True)
    email = made.email if isinstance(made.record, UserRecord) else before.email
    return msgspec.structs.replace(before, record=made.record, metadata=made.metadata, email=email, applied=True)


def _declared_key(before: Stored[Any] | None, name: str, document: dict[str, Any], now: float) -> Stored[Any]:
    require_not_first(name, "declared", "preset it with PADDOCK_API_KEY")
    fields = dict(document)
    given, grace_s = fields.pop(HASH, None), fields.pop(GRACE, 0.0)
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 <= grace_s <= MAX_GRACE_S:
        raise Invalid(f"`{GRACE}` is a number of seconds, at most {MAX_GRACE_S:g}.", param=GRACE)
    if given is None and before is None:
        raise Invalid(f"`{HASH}` is missing; `paddock keys make` makes a key and prints it.", param=HASH)
    if "expires_at" in fields and not isinstance(fields["expires_at"], int | float | None):
        fields["expires_at"] = _unix_time(fields["expires_at"])
    old: AccessRecord | None = before.record if before is not None else None
    blank: Stored[Any] = Stored(record=_blank_key(name, given if given is not None else old and old.sha256))
    made = editing.edited(KEY, blank, name, fields)
    record = made.record
    if old is not None and record.sha256 == old.sha256:
        record = msgspec.structs.replace(record, previous_sha256=old.previous_sha256, previous_until=old.previous_until)
    elif old is not None:
        record = msgspec.structs.replace(record, previous_sha256=old.sha256, previous_until=now + grace_s)
    kept = before if before is not None else made
    return msgspec.structs.replace(kept, record=record, metadata=made.metadata, applied=True)


def _blank_key(name: str, sha256: Any) -> AccessRecord:
    return editing.convert({"name": name, HASH: sha256}, AccessRecord)


def _unix_time(value: Any) -> float:
    """Return the time that a YAML date or time stands for. Raises Invalid."""
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    raise Invalid(
        "`expires_at` is a unix time or a date, which is one of UTC unless it has a zone.", param="expires_at"
    )


def _prune(change: Change, kind: Kind[Any], declared: set[str]) -> list[Difference]:
    """Delete the records that were applied before and are not declared. A team's keys that are not applied stay it."""
    found = records.page(change.connection, kind, (kind.table.c.applied == true(),), "", MAX_DECLARED)
    kept = {*declared, *((DEFAULT_TEAM, DEFAULT_ORGANISATION) if kind in (TEAM, ORGANISATION) else ())}
    gone = [stored for stored in found if stored.record.name not in kept]
    for stored in gone:
        if kind is KEY:
            change.delete(KEY, stored)
        else:
            subjects.delete(change, kind, stored)
    return [Difference(action="delete", kind=kind.name, name=stored.record.name) for stored in gone]


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each field whose value differs, with both values."""
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if isinstance(new, dict) and (old is None or isinstance(old, dict)):
            yield from _differences(old or {}, new, f"{path}{name}.")
        elif old != new:
            yield f"{path}{name}", (old, new)


class _Loader(yaml.SafeLoader):
    """Reads YAML without its aliases, by which a small file could become a huge one."""

    def compose_scalar_node(self, anchor: Any) -> Any:
        node: Any = super().compose_scalar_node(anchor)
        if not node.value.isascii():
            node.value = whole_text(node.value)
        return node

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("anchors and aliases (& and *) are not supported")
        return super().compose_node(parent, index)
