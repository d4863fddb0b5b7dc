"""Answers `/team/...` and `/user/...` as LiteLLM does."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from accounts.access import rights
from accounts.access.keys import Keys
from accounts.access.records import TEAM, USER, Stored
from accounts.access.subjects import Subjects
from accounts.api.api import ADMINS, USERS, AdminRequest, RouteRow, answer, read_object, read_query
from accounts.database.database import Database
from accounts.errors import Invalid
from accounts.litellm import values
from accounts.litellm.keys import shown_key, spend_of
from accounts.protocol.records import NO_LIMITS, Limits, Role, TeamRecord, UserRecord

MAX_SHOWN = 1000
TEAM_BODY = frozenset(
    {
        *("team_id", "team_alias", "organization_id", "models", "metadata", "blocked", "members_with_roles", "tags"),
        *values.LIMITS,
        *values.BUDGET,
    }
)
USER_BODY = frozenset(
    {
        *(
            "user_id",
            "user_email",
            "user_role",
            "teams",
            "metadata",
            "auto_create_key",
            "key_alias",
            "duration",
            "models",
        ),
        *("team_id", "blocked"),
        *values.LIMITS,
        *values.BUDGET,
    }
)
MEMBER_ROLES: Mapping[str, Role] = {"admin": "manager", "user": "user"}
"""LiteLLM's role in a team -> ours."""
ADMIN_ROLE, USER_ROLE = "proxy_admin", "internal_user"


class TeamQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of one team."""

    team_id: str = ""


class UserQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of one user."""

    user_id: str = ""


class LiteLlmTeams:
    """The handlers."""

    def __init__(self, keys: Keys, subjects: Subjects, database: Database) -> None:
        self._keys = keys
        self._subjects = subjects
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("POST", "/team/new", ADMINS, self.make_team, "make a team"),
            RouteRow("GET", "/team/info", USERS, self.show_team, "a team and its keys"),
            RouteRow("POST", "/team/update", ADMINS, self.update_team, "change a team"),
            RouteRow("POST", "/team/delete", ADMINS, self.delete_teams, "delete teams with their keys"),
            RouteRow("GET", "/team/list", USERS, self.list_teams, "the teams"),
            RouteRow("POST", "/user/new", ADMINS, self.make_user, "make a user, with a key"),
            RouteRow("GET", "/user/info", USERS, self.show_user, "a user and its keys"),
        )

    def make_team(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        named = values.name_of(body.get("team_id") or body.get("team_alias"), "team_id")
        fields = _team_fields(body, NO_LIMITS)
        made, _ = self._subjects.create(actor, TEAM, {"name": named or f"team-{secrets.token_hex(6)}", **fields})
        for user, role in _members(body):
            self._subjects.update(actor, USER, user, {"teams": {made.record.name: role}})
        return answer(self._team(made))

    def show_team(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        name = read_query(request, TeamQuery).team_id or actor.team
        found = self._subjects.show(actor, TEAM, name)
        keys = self._keys.page(actor, team=name, limit=MAX_SHOWN)
        with self._database.reading() as connection:
            shown = [shown_key(connection, key) for key in keys]
        return answer({"team_id": name, "team_info": self._team(found), "keys": shown, "team_memberships": []})

    def update_team(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        name = _text(body, "team_id")
        before = self._subjects.show(actor, TEAM, name)
        changed, _ = self._subjects.update(actor, TEAM, name, _team_fields(body, before.record.limits))
        return answer({"team_id": name, "data": self._team(changed)})

    def delete_teams(self, request: AdminRequest) -> Response:
        named = values.texts(read_object(request), "team_ids")
        if not named:
            raise Invalid("`team_ids` is missing: a list.", param="team_ids")
        for name in named:
            self._subjects.delete(rights.actor_of(request.caller), TEAM, name, with_keys=True)
        return answer({"deleted_teams": named})

    def list_teams(self, request: AdminRequest) -> Response:
        found = self._subjects.page(rights.actor_of(request.caller), TEAM, limit=MAX_SHOWN)
        return answer([self._team(team) for team in found])

    def make_user(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        values.refuse_unknown(body, USER_BODY)
        named = values.name_of(body.get("user_id") or body.get("user_email"), "user_id")
        teams = [*values.texts(body, "teams"), *([_text(body, "team_id")] if body.get("team_id") else [])]
        fields: dict[str, Any] = {
            "name": named or f"user-{secrets.token_hex(6)}",
            "email": body.get("user_email"),
            "teams": dict.fromkeys(teams, "user"),
            "admin": body.get("user_role") == ADMIN_ROLE,
            "limits": values.limits_of(body, NO_LIMITS),
            "metadata": body.get("metadata") or {},
        }
        made, _ = self._subjects.create(actor, USER, fields)
        shown = self._user(made)
        if body.get("auto_create_key", True) and teams:
            key: dict[str, Any] = {"user": made.record.name, "team": teams[0]}
            if name := values.name_of(body.get("key_alias"), "key_alias"):
                key["name"] = name
            if body.get("duration"):
                key["duration_s"] = values.seconds_of(body["duration"], "duration")
            if body.get("models"):
                key["aliases"] = values.aliases_of(body["models"])
            minted = self._keys.mint(actor, key)
            shown |= {"key": minted.secret, "token": minted.key.record.name, "key_alias": minted.key.record.name}
        return answer(shown)

    def show_user(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        name = read_query(request, UserQuery).user_id or actor.user
        found = self._subjects.show(actor, USER, name)
        keys = self._keys.page(actor, user=name, limit=MAX_SHOWN)
        teams = [team for team in found.record.teams if rights.sees_team(actor, team)]
        records = [self._subjects.show(actor, TEAM, team) for team in teams]
        with self._database.reading() as connection:
            shown = [shown_key(connection, key) for key in keys]
        return answer(
            {
                "user_id": name,
                "user_info": self._user(found),
                "keys": shown,
                "teams": [self._team(team) for team in records],
            }
        )

    def _team(self, stored: Stored[TeamRecord]) -> dict[str, Any]:
        record = stored.record
        with self._database.reading() as connection:
            spend = spend_of(connection, "team", record.name, record.limits)
        return {
            "team_id": record.name,
            "team_alias": record.name,
            "organization_id": record.organisation,
            "models": list(record.aliases or ()),
            "metadata": stored.metadata,
            "blocked": record.blocked,
            "spend": spend,
            **values.shown_limits(record.limits),
            "created_at": values.shown_time(stored.created_at),
            "updated_at": values.shown_time(stored.updated_at),
        }

    def _user(self, stored: Stored[UserRecord]) -> dict[str, Any]:
        record = stored.record
        with self._database.reading() as connection:
            spend = spend_of(connection, "user", record.name, record.limits)
        return {
            "user_id": record.name,
            "user_email": stored.email or None,
            "user_role": ADMIN_ROLE if record.admin else USER_ROLE,
            "teams": list(record.teams),
            "metadata": stored.metadata,
            "spend": spend,
            **values.shown_limits(record.limits),
            "created_at": values.shown_time(stored.created_at),
            "updated_at": values.shown_time(stored.updated_at),
        }


def _team_fields(body: Mapping[str, Any], before: Limits) -> dict[str, Any]:
    """Return a team's fields for what a body names. Raises Invalid."""
    values.refuse_unknown(body, TEAM_BODY)
    fields: dict[str, Any] = {}
    if "models" in body:
        fields["aliases"] = values.aliases_of(body["models"])
    for theirs, ours in (("organization_id", "organisation"), ("metadata", "metadata"), ("blocked", "blocked")):
        if body.get(theirs) is not None:
            fields[ours] = body[theirs]
    if limits := values.limits_of(body, before):
        fields["limits"] = limits
    return fields


def _members(body: Mapping[str, Any]) -> list[tuple[str, Role]]:
    """Return the members that a new team has, users that are there already. Raises Invalid."""
    members = body.get("members_with_roles") or []
    found: list[tuple[str, Role]] = []
    for member in members if isinstance(members, list) else [None]:
        user, role = (member.get("user_id"), member.get("role", "user")) if isinstance(member, dict) else (None, "")
        if not isinstance(user, str) or role not in MEMBER_ROLES:
            raise Invalid(
                "`members_with_roles` is a list of `{role, user_id}`; a role is `admin` or `user`.",
                param="members_with_roles",
            )
        found.append((user, MEMBER_ROLES[role]))
    return found


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise Invalid(f"`{field}` is missing; it is a text.", param=field)
    return value
