"""Answers `/user/...` as LiteLLM does."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from accounts.access import rights
from accounts.access.keys import Keys
from accounts.access.records import TEAM, USER, Stored
from accounts.access.subjects import Subjects
from accounts.api.api import ADMINS, MANAGERS, USERS, AdminRequest, RouteRow, answer, read_object, read_query
from accounts.database.database import Database
from accounts.errors import Invalid
from accounts.litellm import bodies
from accounts.litellm.answers import MAX_KEYS_SHOWN, page_of, read_all, shown_key, shown_team, shown_user
from accounts.litellm.names import find_subject, name_of
from accounts.protocol.records import UserRecord


class UserQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of one user."""

    user_id: str = ""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a list of users. A condition that is not known is refused: a script may delete what it gets."""

    page: Annotated[int, Meta(ge=1)] = 1
    page_size: Annotated[int, Meta(ge=1, le=100)] = 25
    team: str = ""


class LiteLlmUsers:
    """The handlers."""

    def __init__(self, keys: Keys, subjects: Subjects, database: Database) -> None:
        self._keys = keys
        self._subjects = subjects
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("POST", "/user/new", ADMINS, self.make, "make a user, with a key"),
            RouteRow("GET", "/user/info", USERS, self.show, "a user and its keys"),
            RouteRow("POST", "/user/update", ADMINS, self.update, "change a user"),
            RouteRow("POST", "/user/delete", ADMINS, self.delete, "delete users with their keys"),
            RouteRow("GET", "/user/list", MANAGERS, self.list_all, "the users"),
        )

    def make(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        fields = bodies.fields_of(body, bodies.NEW_USER)
        named = name_of(body.get("user_id") or body.get("user_email"), "user_id")
        asked = [*bodies.texts_of(body, "teams"), *([bodies.text_of(body, "team_id")] if body.get("team_id") else [])]
        teams = [find_subject(self._subjects, actor, TEAM, team).record.name for team in asked]
        key = bodies.fields_of({name: body[name] for name in bodies.OF_FIRST_KEY if name in body}, bodies.KEY)
        if name := name_of(body.get("key_alias"), "key_alias"):
            key["name"] = name
        has_key = body.get("auto_create_key", True) and teams
        if key and not has_key:
            raise Invalid(
                f"{', '.join(f'`{name}`' for name in bodies.OF_FIRST_KEY)} are those of the user's key, and without "
                "`teams`, or with `auto_create_key: false`, none is made.",
                param="teams",
            )
        made, _ = self._subjects.create(
            actor,
            USER,
            {"name": named or f"user-{secrets.token_hex(6)}", "teams": dict.fromkeys(teams, "user"), **fields},
        )
        shown = self._shown(made)
        if has_key:
            minted = self._keys.mint(actor, {**key, "user": made.record.name, "team": teams[0]})
            shown |= {"key": minted.secret, "token": minted.key.record.name, "key_alias": minted.key.record.name}
        return answer(shown)

    def show(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        given = read_query(request, UserQuery).user_id or actor.user
        if not given:
            raise Invalid("`user_id` is missing, and the caller's own key is of no user.", param="user_id")
        found = find_subject(self._subjects, actor, USER, given)
        name = found.record.name
        keys = self._keys.page(actor, user=name, limit=MAX_KEYS_SHOWN)
        teams = [team for team in found.record.teams if rights.sees_team(actor, team)]
        records = [self._subjects.show(actor, TEAM, team) for team in teams]
        with self._database.reading() as connection:
            return answer(
                {
                    "user_id": name,
                    "user_info": shown_user(connection, found),
                    "keys": [shown_key(connection, key) for key in keys],
                    "teams": [shown_team(connection, team) for team in records],
                }
            )

    def update(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        before = find_subject(self._subjects, actor, USER, bodies.text_of(body, "user_id")).record
        changed, _ = self._subjects.update(actor, USER, before.name, bodies.fields_of(body, bodies.USER, before.limits))
        return answer({"user_id": before.name, "data": self._shown(changed)})

    def delete(self, request: AdminRequest) -> Response:
        named, actor = bodies.texts_of(read_object(request), "user_ids"), rights.actor_of(request.caller)
        if not named:
            raise Invalid("`user_ids` is missing: a list.", param="user_ids")
        for found in [find_subject(self._subjects, actor, USER, name) for name in named]:
            self._subjects.delete(actor, USER, found.record.name)
        return answer({"deleted_users": named})

    def list_all(self, request: AdminRequest) -> Response:
        asked, actor = read_query(request, ListQuery), rights.actor_of(request.caller)
        page = self._subjects.page
        found = page_of(
            read_all(lambda after, limit: page(actor, USER, team=asked.team, after=after, limit=limit)),
            asked.page,
            asked.page_size,
        )
        return answer(
            {
                "users": [self._shown(user) for user in found.shown],
                "total": found.num_all,
                "page": asked.page,
                "page_size": asked.page_size,
                "total_pages": found.num_pages,
            }
        )

    def _shown(self, user: Stored[UserRecord]) -> dict[str, Any]:
        with self._database.reading() as connection:
            return shown_user(connection, user)
