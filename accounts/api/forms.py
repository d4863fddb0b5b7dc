"""The structs of the API's bodies and answers that records do not have already: for reading, and for its document."""

from __future__ import annotations

import base64
import binascii
from types import GenericAlias
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from accounts.access import editing, records
from accounts.access.keys import MAX_GRACE_S
from accounts.access.records import ALIAS, KEY, ORGANISATION, TEAM, USER, Kind, Stored
from accounts.errors import Invalid

MAX_PAGE = 1000
Text = Annotated[str, Meta(max_length=256)]


class Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of every list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 100
    cursor: Annotated[str, Meta(max_length=4096)] = ""
    """`next` of the page before."""


class KeysQuery(Page, frozen=True, kw_only=True):
    """The query of a list of keys."""

    team: Text = ""
    user: Text = ""


class TeamsQuery(Page, frozen=True, kw_only=True):
    """The query of a list of teams."""

    organisation: Text = ""


class UsersQuery(Page, frozen=True, kw_only=True):
    """The query of a list of users."""

    team: Text = ""


class AuditQuery(Page, frozen=True, kw_only=True):
    """The query of the audit."""

    kind: Text = ""
    subject: Text = ""
    actor: Text = ""
    team: Text = ""


class DeleteQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a deletion."""

    version: int | None = None
    """Delete only if this is the version yet."""
    with_keys: bool = False
    """Whether a team's keys are deleted with it."""


class ApplyQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a declaration."""

    dry_run: bool = False
    """Answer what would change, and change nothing."""
    prune: bool = False
    """Delete what was applied before and is not declared any more."""


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a rotation."""

    grace_s: Annotated[float, Meta(ge=0, le=MAX_GRACE_S)] | None = None
    """Seconds for which the replaced key works still; null: a day."""


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    name: str
    deleted: bool = True
    published: bool
    """Whether gateways know it; false: Redis is away, and they will once it is back."""


def shown(kind: Kind[Any], stored: Stored[Any], published: bool | None = None) -> dict[str, Any]:
    """Return a record as answers show it. `published`: of an answer to a change."""
    fields = {**records.shown(kind, stored), "version": stored.version, "applied": stored.applied}
    fields |= {"created_at": stored.created_at, "updated_at": stored.updated_at}
    if kind is KEY:
        fields |= {"created_by": stored.created_by, "last_used_at": stored.last_used_at}
    return fields if published is None else {**fields, "published": published}


def listed(kind: Kind[Any], page: list[Stored[Any]], limit: int) -> dict[str, Any]:
    """Return the answer of a list. `page` has one record more than `limit` if there is another page."""
    has_more = len(page) > limit
    page = page[:limit]
    return {
        "data": [shown(kind, stored) for stored in page],
        "next": cursor_after(page[-1].record.name) if has_more else None,
    }


def cursor_after(place: str) -> str:
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def place_of(cursor: str) -> str:
    """Return the place in a cursor. Raises Invalid."""
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        raise Invalid("`cursor` is none; send `next` of the page before as it was.", param="cursor") from None


def _fields(kind: Kind[Any], required: str = "") -> list[tuple[str, Any, Any]]:
    """Return the fields that callers may set, as `msgspec.defstruct` takes them: all but one are optional."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind.record)}
    known |= {"metadata": dict[str, Any], "email": str}
    names = editing.editable(kind)
    return [(name, known[name], msgspec.NODEFAULT if name == required else msgspec.UNSET) for name in names]


def _form(kind: Kind[Any], suffix: str, *extra: tuple[str, Any, Any]) -> type:
    """Return the struct of what is sent to make or change a record, for the document."""
    required = "name" if suffix == "Create" and kind is not KEY else ""
    fields = [field for field in _fields(kind, required) if suffix == "Create" or field[0] != "name"]
    extra = (*extra, ("duration_s", float, msgspec.UNSET)) if kind is KEY else extra
    name = f"{kind.name.title()}{suffix}"
    return msgspec.defstruct(name, [*fields, *extra], kw_only=True, forbid_unknown_fields=True)


def _answer(kind: Kind[Any]) -> type:
    fields: list[tuple[str, Any]] = [(name, of) for name, of, _ in _fields(kind)]
    if kind is KEY:
        fields += [("hash", str), ("previous_hash", str), ("previous_until", float | None)]
        fields += [("created_by", str), ("last_used_at", float | None)]
    fields += [("version", int), ("applied", bool), ("created_at", float), ("updated_at", float)]
    return msgspec.defstruct(f"{kind.name.title()}Answer", fields, kw_only=True)


def _list_of(answer: type) -> type:
    items: Any = GenericAlias(list, (answer,))
    return msgspec.defstruct(f"{answer.__name__}List", [("data", items), ("next", str | None)], kw_only=True)


KINDS = (ORGANISATION, TEAM, USER, KEY, ALIAS)
CREATED = {kind.name: _form(kind, "Create") for kind in KINDS}
"""Kind -> the struct that makes one."""
CHANGED = {kind.name: _form(kind, "Change", ("version", int, msgspec.UNSET)) for kind in KINDS}
"""Kind -> the struct that changes one."""
ANSWERS = {kind.name: _answer(kind) for kind in KINDS}
LISTS = {name: _list_of(answer) for name, answer in ANSWERS.items()}
MINTED = msgspec.defstruct("MintedKey", [("key", str), ("published", bool)], bases=(ANSWERS["key"],), kw_only=True)
"""The answer that has a key's secret, once."""
