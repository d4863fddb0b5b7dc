"""Makes users of the people who sign in, and the keys that are their sessions. Its functions block.

What single sign-on gives a user (teams, the admin's role) is noted in the user's metadata, so that it is taken back
once the provider's claims give it no more, and what an admin gave by hand stays.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from sqlalchemy import delete, insert, select, update

from accounts.access import keys as key_operations
from accounts.access import records
from accounts.access.changes import Change, Changes
from accounts.access.records import KEY, TEAM, USER, Stored
from accounts.access.rights import Actor
from accounts.database.schema import api_keys, sessions, users
from accounts.errors import Forbidden
from accounts.oidc.people import Grant, Person, granted
from accounts.protocol.caller import Caller
from accounts.protocol.key_format import new_key
from accounts.protocol.records import SESSION_PREFIX, AccessRecord, Role, TeamRecord, UserRecord, digest
from accounts.protocol.sign_on import SignOn

METADATA = "single_sign_on"
"""Field of a user's metadata that notes what single sign-on gave."""
SESSION = "session"
"""Kind of the rows in the table `sessions` that say when such a key has expired."""
MAX_SESSIONS = 20
"""Maximum number of a user's sessions; a further one ends the oldest."""
SWEPT_AT_ONCE = 200


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session: a key that expires."""

    key: str
    """The key itself, shown this once."""
    name: str
    user: str
    team: str
    role: Role
    expires_at: float


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """The teams and the role that single sign-on has given a user."""

    issuer: str = ""
    subject: str = ""
    teams: dict[str, Role] = {}
    admin: bool = False


class Members:
    """Signs people in and out."""

    def __init__(self, changes: Changes, sign_on: SignOn) -> None:
        self._changes = changes
        self._sign_on = sign_on

    def sign_in(self, person: Person, caller: Caller) -> Session:
        """Make or update the user, and make a key of theirs that expires. Raises Forbidden."""
        with self._changes.begin(_actor(person.user, caller)) as change:
            before = records.find(change.connection, USER, person.user)
            self._require_allowed(person, before)
            grant = granted(person, before.record if before is not None else None)
            if grant is None:
                raise Forbidden(
                    f"No team is given to {person.user}. Ask the operator for a rule in the setting `oidc` that holds "
                    "for you."
                )
            self._write_user(change, person, before)
            return self._begin(change, person.user, grant)

    def sign_out(self, caller: Caller) -> bool:
        """Delete the caller's key if it is a session. Return whether it was."""
        if not caller.key.startswith(SESSION_PREFIX):
            return False
        with self._changes.begin(_actor(caller.user, caller)) as change:
            return _end(change, caller.key)

    def sweep(self) -> None:
        """Delete keys of sessions that have expired, some at a time."""
        expired = select(sessions.c.value).where(sessions.c.kind == SESSION, sessions.c.expires_at < time.time())
        with self._changes.database.reading() as connection:
            names = connection.execute(expired.limit(SWEPT_AT_ONCE)).scalars().all()
        if names:
            with self._changes.begin(Actor("single sign-on", "admin")) as change:
                for name in names:
                    _end(change, name)

    def _require_allowed(self, person: Person, before: Stored[UserRecord] | None) -> None:
        if before is not None and before.record.blocked:
            raise Forbidden(f"The user {person.user} is blocked. Ask an admin.")
        provider = self._sign_on.provider_of(person.issuer)
        if before is None and (provider is None or not provider.create_users):
            raise Forbidden(f"The user {person.user} is not known here. Ask an admin to add them.")

    def _write_user(self, change: Change, person: Person, before: Stored[UserRecord] | None) -> None:
        given = _given_by(person)
        for team in given.teams:
            if records.find(change.connection, TEAM, team) is None:
                change.save("create", TEAM, None, Stored(record=TeamRecord(name=team)))
        after = _after(person, given, before)
        if before is None or after != before:
            if before is not None and after.record != before.record:
                key_operations.fit_to_user(change, person.user, after.record.teams, after.record.admin)
            change.save("create" if before is None else "update", USER, before, after)
        change.connection.execute(update(users).where(users.c.name == person.user).values(last_login_at=change.now))

    def _begin(self, change: Change, user: str, grant: Grant) -> Session:
        """Make the key of a session, and end the oldest ones if there are too many."""
        is_session = (api_keys.c.user == user, api_keys.c.name.startswith(SESSION_PREFIX, autoescape=True))
        theirs = records.page(change.connection, KEY, is_session, "", 10 * MAX_SESSIONS)
        for old in sorted(theirs, key=lambda each: each.created_at)[: max(0, len(theirs) - MAX_SESSIONS + 1)]:
            _end(change, old.record.name)
        secret, expires_at = new_key(), change.now + self._sign_on.session_s
        record = AccessRecord(
            name=SESSION_PREFIX + secrets.token_hex(8),
            sha256=digest(secret),
            team=grant.team,
            role=grant.role,
            user=user,
            expires_at=expires_at,
        )
        change.save("create", KEY, None, Stored(record=record))
        row = {"id": record.sha256, "kind": SESSION, "value": record.name, "expires_at": expires_at}
        change.connection.execute(insert(sessions).values(**row))
        return Session(key=secret, name=record.name, user=user, team=grant.team, role=grant.role, expires_at=expires_at)


def _actor(user: str, caller: Caller) -> Actor:
    """Return the actor of what single sign-on does for a user, whose own rights are not asked."""
    return Actor(f"user:{user}", "admin", user=user, address=caller.address, request_id=caller.request_id)


def _end(change: Change, name: str) -> bool:
    """Delete the key of a session, and its row. Return whether there was such a key."""
    change.connection.execute(delete(sessions).where(sessions.c.kind == SESSION, sessions.c.value == name))
    found = records.find(change.connection, KEY, name)
    if found is None:
        return False
    change.delete(KEY, found)
    return True


def _given_by(person: Person) -> _Given:
    """Return what the rules give a person. A user is a `manager` or `user` of a team; admins are so everywhere."""
    teams: dict[str, Role] = {}
    for grant in person.grants:
        role: Role = "manager" if grant.role in ("admin", "manager") else "user"
        if teams.get(grant.team) != "manager":
            teams[grant.team] = role
    is_admin = any(grant.role == "admin" for grant in person.grants)
    return _Given(issuer=person.issuer, subject=person.subject, teams=teams, admin=is_admin)


def _after(person: Person, given: _Given, before: Stored[UserRecord] | None) -> Stored[UserRecord]:
    """Return the user with what single sign-on gives now in place of what it gave before."""
    if before is None:
        before = Stored(record=UserRecord(name=person.user))
    earlier = msgspec.convert(before.metadata.get(METADATA, {}), _Given)
    teams = {team: role for team, role in before.record.teams.items() if earlier.teams.get(team) != role}
    for team, role in given.teams.items():
        if teams.get(team) != "manager":  # by hand
            teams[team] = role
    record = msgspec.structs.replace(
        before.record,
        teams=teams,
        admin=given.admin or (before.record.admin and not earlier.admin),
    )
    metadata: dict[str, Any] = {**before.metadata, METADATA: msgspec.to_builtins(given)}
    return msgspec.structs.replace(before, record=record, metadata=metadata, email=person.email or before.email)
