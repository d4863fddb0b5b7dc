"""The operations on keys: mint, read, list, change, rotate, block and delete."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, or_, select

from accounts.access import editing, records, rights
from accounts.access.changes import Change, Changes
from accounts.access.records import KEY, TEAM, USER, Stored
from accounts.access.rights import Actor
from accounts.database.schema import api_keys
from accounts.errors import Conflict, Forbidden, Invalid, Missing
from accounts.protocol.key_format import derived_key, new_key
from accounts.protocol.records import AccessRecord, Role, TeamRecord, digest

Key = Stored[AccessRecord]

DEFAULT_GRACE_S = 24 * 3600.0
MAX_GRACE_S = 30 * 24 * 3600.0
MAX_LIFE_S = 100 * 366 * 24 * 3600.0
REQUEST_CHARS = 128
"""Maximum characters of an idempotency key."""
RANDOM_NAME_BYTES = 6
MAX_KEYS_OF_USER = 10_000
MAX_KEYS_OF_TEAM = 10_000
"""Number of a team's keys from which on only admins make more: all gateways keep them in memory."""


class Minted(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was made or rotated: its secret is shown this once."""

    secret: str
    key: Key
    is_published: bool


class Keys:
    """Manages the keys. Every method blocks, and raises AccountsError for callers."""

    def __init__(self, changes: Changes, gateway_secret: str) -> None:
        self._changes = changes
        self._gateway_secret = gateway_secret

    def mint(self, actor: Actor, document: Mapping[str, Any], request: str = "") -> Minted:
        """Make a key from the fields in `document`. `request`: the caller's idempotency key: a request that is repeated
        with it gets the same key; empty: none."""
        _require_request(request)
        fields = dict(document)
        name = fields.pop("name", None) or f"key-{secrets.token_hex(RANDOM_NAME_BYTES)}"
        if not isinstance(name, str):
            raise Invalid("`name` is a text.", param="name")
        editing.require_name(name, KEY)
        rights.require_not_first(name, "made", "preset it with PADDOCK_API_KEY")
        with self._changes.begin(actor) as change:
            if (there := records.find(change.connection, KEY, name)) is not None:
                return self._repeated_mint(change, there, request)
            if "team" not in fields and not actor.is_admin:
                fields["team"] = actor.team
            apply_duration(fields, change.now)
            secret, created_at = new_key(), change.now
            if request:
                secret = derived_key(self._gateway_secret, name, request, f"{created_at!r}")
            blank: Key = Stored(record=AccessRecord(name=name, sha256=digest(secret)), request=request)
            after = editing.edited(KEY, blank, name, fields)
            if after.record.expires_at is not None and after.record.expires_at <= change.now:
                raise Invalid("The key would have expired already; name a later time.", param="expires_at")
            require_possible(change, after.record)
            rights.require_within(actor, own_record(change), _team(change, after.record.team), after.record)
            rights.require_person(actor, "", after.record.user)
            rights.require_small(actor, None, after.record)
            _require_room(change, after.record.team)
            made = change.save("create", KEY, None, after)
        return Minted(secret=secret, key=made, is_published=change.is_published)

    def show(self, actor: Actor, name: str) -> Key:
        with self._changes.database.reading() as connection:
            return _seen(connection, actor, name)

    def page(self, actor: Actor, *, team: str = "", user: str = "", after: str = "", limit: int = 100) -> list[Key]:
        """Return the next keys that the caller may see, ordered by name."""
        where: list[ColumnElement[bool]] = []
        if not actor.is_admin:
            where.append(api_keys.c.team == actor.team)
            if actor.role != "manager":
                own = api_keys.c.name == actor.key
                where.append(or_(own, api_keys.c.user == actor.user) if actor.user else own)
        if team:
            where.append(api_keys.c.team == team)
        if user:
            where.append(api_keys.c.user == user)
        with self._changes.database.reading() as connection:
            return records.page(connection, KEY, where, after, limit)

    def update(self, actor: Actor, name: str, document: Mapping[str, Any], action: str = "update") -> tuple[Key, bool]:
        """Change fields of a key. Return it, and whether that is published."""
        fields = dict(document)
        with self._changes.begin(actor) as change:
            before = _seen(change.connection, actor, name)
            rights.require_key_managed(actor, before.record)
            apply_duration(fields, change.now)
            after = editing.edited(KEY, before, name, fields)
            require_possible(change, after.record)
            if action == "update":  # a manager may block what it could not make
                rights.require_within(actor, own_record(change), _team(change, after.record.team), after.record)
                rights.require_person(actor, before.record.user, after.record.user)
                rights.require_small(actor, before.record, after.record)
            if after == before:
                return before, True
            after = change.save(action, KEY, before, after)
        return after, change.is_published

    def block(self, actor: Actor, name: str, blocked: bool) -> tuple[Key, bool]:
        if blocked and name == actor.key:
            raise Conflict(f"The key {name!r} is the one of this request; block it with another one.")
        return self.update(actor, name, {"blocked": blocked}, "block" if blocked else "unblock")

    def delete(self, actor: Actor, name: str, version: int | None = None) -> bool:
        """Delete a key, and return whether that is published."""
        rights.require_not_first(name, "deleted", "block it, or preset another one with PADDOCK_API_KEY")
        with self._changes.begin(actor) as change:
            before = _seen(change.connection, actor, name)
            rights.require_key_managed(actor, before.record)
            editing.require_version(KEY, before, version)
            change.delete(KEY, before)
        return change.is_published

    def rotate(self, actor: Actor, name: str, grace_s: float | None = None, request: str = "") -> Minted:
        """Replace a key's secret; the one before works for `grace_s` more. A rotation that is repeated with the same
        idempotency key (`request`) returns the same secret, and changes nothing."""
        _require_request(request)
        grace_s = DEFAULT_GRACE_S if grace_s is None else grace_s
        rights.require_not_first(name, "rotated", "preset another one with PADDOCK_API_KEY")
        with self._changes.begin(actor) as change:
            before = _seen(change.connection, actor, name)
            record = before.record
            rights.require_key_opened(actor, own_record(change), _team(change, record.team), record)
            if request and before.request == request and record.previous_sha256:
                secret = derived_key(self._gateway_secret, name, request, record.previous_sha256)
                return Minted(secret=_still(secret, record), key=before, is_published=True)
            secret = derived_key(self._gateway_secret, name, request, record.sha256) if request else new_key()
            replaced = msgspec.structs.replace(
                record,
                sha256=digest(secret),
                previous_sha256=record.sha256,
                previous_until=change.now + grace_s,
            )
            rotated = change.save(
                "rotate", KEY, before, msgspec.structs.replace(before, record=replaced, request=request)
            )
        return Minted(secret=secret, key=rotated, is_published=change.is_published)

    def _repeated_mint(self, change: Change, there: Key, request: str) -> Minted:
        """Return the key that an earlier request with the same idempotency key made. Raises Conflict."""
        if request and there.request == request and there.created_by == change.actor.name:
            secret = derived_key(self._gateway_secret, there.record.name, request, f"{there.created_at!r}")
            if digest(secret) == there.record.sha256:
                team = _team(change, there.record.team)
                rights.require_key_opened(change.actor, own_record(change), team, there.record)
                return Minted(secret=secret, key=there, is_published=True)
        raise Conflict(f"There is a key {there.record.name!r} already; give this one another name.")


def require_possible(change: Change, record: AccessRecord) -> None:
    """Raise Invalid if the key's team or user is not there, or the user is no member of the team; Conflict if there
    is the key under another name."""
    same = select(api_keys.c.name).where(api_keys.c.sha256 == record.sha256, api_keys.c.name != record.name)
    if (other := change.connection.execute(same).scalar()) is not None:
        raise Conflict(f"The key {other!r} has the same hash; make another key.", param="sha256")
    if records.find(change.connection, TEAM, record.team) is None:
        raise Invalid(f"There is no team {record.team!r}; make it first.", param="team")
    if not record.user:
        return
    user = records.find(change.connection, USER, record.user)
    if user is None:
        raise Invalid(f"There is no user {record.user!r}; make it first.", param="user")
    role = role_in(user.record.teams.get(record.team), user.record.admin)
    if role is None:
        raise Invalid(f"{record.user} is no member of the team {record.team!r}.", param="user")
    if rights.RANKS.get(record.granted_role, 0) > rights.RANKS[role]:
        raise Invalid(f"{record.user} has the role {role} in {record.team!r}, and a key can't have more.", param="role")


def apply_duration(fields: dict[str, Any], now: float) -> None:
    """Replace `duration_s`, if it is given, by the time at which the key expires."""
    if "duration_s" not in fields:
        return
    duration = fields.pop("duration_s")
    if isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 < duration <= MAX_LIFE_S:
        raise Invalid("`duration_s` is a number of seconds above 0.", param="duration_s")
    if "expires_at" in fields:
        raise Invalid("Give `duration_s` or `expires_at`, not both.", param="duration_s")
    fields["expires_at"] = now + duration


def role_in(membership: Role | None, is_admin: bool) -> Role | None:
    """Return the highest role that a user's key may have in a team; None: it may have no key there."""
    return "admin" if is_admin else membership


def own_record(change: Change) -> AccessRecord | None:
    """Return the record of the caller's key; None: the database does not know it."""
    actor = change.actor
    own = records.find(change.connection, KEY, actor.key) if actor.key and not actor.of_settings else None
    return own.record if own is not None else None


def fit_to_user(change: Change, user: str, teams: Mapping[str, Role], is_admin: bool) -> None:
    """Delete the keys of a user in teams that it is no member of any more, and lower the roles of the others."""
    for key in records.page(change.connection, KEY, (api_keys.c.user == user,), "", MAX_KEYS_OF_USER):
        role = role_in(teams.get(key.record.team), is_admin)
        if role is None:
            change.delete(KEY, key)
        elif rights.RANKS.get(key.record.granted_role, 3) > rights.RANKS[role]:
            lowered = msgspec.structs.replace(key.record, role=role, admin=False)
            change.save("update", KEY, key, msgspec.structs.replace(key, record=lowered))


def _seen(connection: Connection, actor: Actor, name: str) -> Key:
    found = records.find(connection, KEY, name)
    if found is None or not rights.sees_key(actor, found.record):
        raise Missing(f"There is no key {name!r} that {actor.name} may see. `GET /admin/keys` lists those.")
    return found


def _team(change: Change, name: str) -> TeamRecord:
    return records.get(change.connection, TEAM, name).record


def _require_room(change: Change, team: str) -> None:
    """Raise Forbidden if the team has as many keys as whoever is no admin may make."""
    if change.actor.is_admin:
        return
    if (number := records.count(change.connection, KEY, api_keys.c.team == team)) >= MAX_KEYS_OF_TEAM:
        raise Forbidden(
            f"The team {team!r} has {number} keys, and a manager makes no more than {MAX_KEYS_OF_TEAM}; delete some, "
            "or ask an admin."
        )


def _still(secret: str, record: AccessRecord) -> str:
    """Return the secret of a rotation that is repeated, if it still is the key's secret."""
    if digest(secret) != record.sha256:
        raise Conflict(
            f"The key {record.name!r} was rotated with this idempotency key under another gateway secret; rotate it "
            "again with a new one."
        )
    return secret


def _require_request(request: str) -> None:
    if len(request) > REQUEST_CHARS:
        raise Invalid(f"The header `idempotency-key` has at most {REQUEST_CHARS} characters.")
