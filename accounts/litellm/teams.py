"""Answers `/team/...` as LiteLLM does."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from accounts.access import rights
from accounts.access.keys import Keys
from accounts.access.records import TEAM, USER, Stored
from accounts.access.rights import Actor
from accounts.access.subjects import Subjects
from accounts.api.api import ADMINS, USERS, AdminRequest, RouteRow, answer, read_object, read_query
from accounts.database.database import Database
from accounts.errors import Invalid
from accounts.litellm import bodies
from accounts.litellm.answers import MAX_KEYS_SHOWN, read_all, shown_key, shown_team
from accounts.litellm.names import find_subject, name_of
from accounts.protocol.records import Role, TeamRecord

MEMBER_ROLES: Mapping[str, Role] = {"admin": "manager", "user": "user"}
"""LiteLLM's role in a team -> ours."""


class TeamQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of one team."""

    team_id: str = ""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a list of teams. A condition that is not known is refused: a script may delete what it gets."""

    user_id: str = ""
    organization_id: str = ""


class LiteLlmTeams:
    """The handlers."""

    def __init__(self, keys: Keys, subjects: Subjects, database: Database) -> None:
        self._keys = keys
        self._subjects = subjects
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("POST", "/team/new", ADMINS, self.make, "make a team"),
            RouteRow("GET", "/team/info", USERS, self.show, "a team and its keys"),
            RouteRow("POST", "/team/update", ADMINS, self.update, "change a team"),
            RouteRow("POST", "/team/delete", ADMINS, self.delete, "delete teams with their keys"),
            RouteRow("GET", "/team/list", USERS, self.list_all, "the teams"),
        )

    def make(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        fields = bodies.fields_of(body, bodies.NEW_TEAM)
        alias = name_of(body.get(bodies.TEAM_ALIAS), bodies.TEAM_ALIAS)
        name = name_of(body.get("team_id"), "team_id") or alias or f"team-{secrets.token_hex(6)}"
        members = self._members(actor, body)
        made, _ = self._subjects.create(actor, TEAM, {"name": name, **fields})
        for user, role in members.items():
            self._subjects.update(actor, USER, user, {"teams": {name: role}})
        return answer(self._shown(made))

    def show(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        found = find_subject(self._subjects, actor, TEAM, read_query(request, TeamQuery).team_id or actor.team)
        name = found.record.name
        keys = self._keys.page(actor, team=name, limit=MAX_KEYS_SHOWN)
        with self._database.reading() as connection:
            shown = [shown_key(connection, key) for key in keys]
        return answer({"team_id": name, "team_info": self._shown(found), "keys": shown, "team_memberships": []})

    def update(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        before = find_subject(self._subjects, actor, TEAM, bodies.text_of(body, "team_id")).record
        changed, _ = self._subjects.update(actor, TEAM, before.name, bodies.fields_of(body, bodies.TEAM, before.limits))
        return answer({"team_id": before.name, "data": self._shown(changed)})

    def delete(self, request: AdminRequest) -> Response:
        named, actor = bodies.texts_of(read_object(request), "team_ids"), rights.actor_of(request.caller)
        if not named:
            raise Invalid("`team_ids` is missing: a list.", param="team_ids")
        for found in [find_subject(self._subjects, actor, TEAM, name) for name in named]:
            self._subjects.delete(actor, TEAM, found.record.name, with_keys=True)
        return answer({"deleted_teams": named})

    def list_all(self, request: AdminRequest) -> Response:
        asked, actor = read_query(request, ListQuery), rights.actor_of(request.caller)
        of, page = asked.organization_id, self._subjects.page
        found = read_all(lambda after, limit: page(actor, TEAM, organisation=of, after=after, limit=limit))
        if asked.user_id:
            member = find_subject(self._subjects, actor, USER, asked.user_id)
            found = [team for team in found if team.record.name in member.record.teams]
        return answer([self._shown(team) for team in found])

    def _shown(self, team: Stored[TeamRecord]) -> dict[str, Any]:
        with self._database.reading() as connection:
            return shown_team(connection, team)

    def _members(self, actor: Actor, body: Mapping[str, Any]) -> dict[str, Role]:
        """Return the members that a new team has, users that are there already. Raises Invalid, Missing."""
        members = body.get("members_with_roles") or []
        found: dict[str, Role] = {}
        for member in members if isinstance(members, list) else [None]:
            user, role = (member.get("user_id"), member.get("role", "user")) if isinstance(member, dict) else (None, "")
            if not isinstance(user, str) or role not in MEMBER_ROLES:
                raise Invalid(
                    "`members_with_roles` is a list of `{role, user_id}`; a role is `admin` or `user`.",
                    param="members_with_roles",
                )
            found[find_subject(self._subjects, actor, USER, user).record.name] = MEMBER_ROLES[role]
        return found
