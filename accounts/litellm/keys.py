"""Answers `/key/...` as LiteLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from accounts.access import records, rights
from accounts.access.keys import Key, Keys
from accounts.access.records import KEY, TEAM, USER
from accounts.access.rights import Actor
from accounts.access.subjects import Subjects
from accounts.api.api import MANAGERS, USERS, AdminRequest, RouteRow, answer, read_object, read_query
from accounts.database.database import Database
from accounts.errors import Invalid, Missing
from accounts.litellm import bodies
from accounts.litellm.answers import page_of, read_all, shown_key
from accounts.litellm.names import find_key, name_of, subject_name
from accounts.protocol.records import NO_LIMITS, Limits


class KeyQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of one key."""

    key: str = ""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a list of keys. A condition that is not known is refused: a script may delete what it gets."""

    page: Annotated[int, Meta(ge=1)] = 1
    size: Annotated[int, Meta(ge=1, le=100)] = 10
    user_id: str = ""
    team_id: str = ""
    organization_id: str = ""
    key_alias: str = ""
    key_hash: str = ""
    return_full_object: bool = False
    include_team_keys: bool = False
    include_created_by_keys: bool = False
    """Both ask for keys that every caller here gets who may see them."""


class LiteLlmKeys:
    """The handlers."""

    def __init__(self, keys: Keys, subjects: Subjects, database: Database) -> None:
        self._keys = keys
        self._subjects = subjects
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("POST", "/key/generate", MANAGERS, self.generate, "make a key"),
            RouteRow("GET", "/key/info", USERS, self.info, "a key"),
            RouteRow("POST", "/key/update", MANAGERS, self.update, "change a key"),
            RouteRow("POST", "/key/block", MANAGERS, self.block, "refuse calls with a key"),
            RouteRow("POST", "/key/unblock", MANAGERS, self.unblock, "take them again"),
            RouteRow("POST", "/key/delete", MANAGERS, self.delete, "delete keys"),
            RouteRow("GET", "/key/list", USERS, self.list_all, "the keys"),
            RouteRow("POST", "/key/regenerate", MANAGERS, self.regenerate, "replace a key's secret"),
            RouteRow("POST", "/key/{key:path}/regenerate", MANAGERS, self.regenerate, "the same"),
        )

    def generate(self, request: AdminRequest) -> Response:
        body = read_object(request)
        if body.get("key") is not None:
            raise Invalid("`key` can't be chosen: keys are random. Leave it out.", param="key")
        actor = rights.actor_of(request.caller)
        name = name_of(body.get("key_alias"), "key_alias")
        fields = {**self._fields(actor, body, NO_LIMITS), **({"name": name} if name else {})}
        minted = self._keys.mint(actor, fields, request.headers.get("idempotency-key", ""))
        return answer(self._generated(minted.key, minted.secret))

    def info(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        asked = read_query(request, KeyQuery).key or actor.key
        found = self._keys.show(actor, self._name_of(actor, asked))
        return answer({"key": asked, "info": self._shown(found)})

    def update(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        name = self._named(actor, body)
        before = self._keys.show(actor, name)
        changed, _ = self._keys.update(actor, name, self._changed_fields(actor, body, before))
        return answer({"key": body["key"], **self._shown(changed)})

    def block(self, request: AdminRequest) -> Response:
        return self._block(request, True)

    def unblock(self, request: AdminRequest) -> Response:
        return self._block(request, False)

    def delete(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        named = [*bodies.texts_of(body, "keys"), *bodies.texts_of(body, "key_aliases")]
        if not named:
            raise Invalid("`keys` or `key_aliases` is missing: a list.", param="keys")
        for name in [self._name_of(actor, key) for key in named]:
            self._keys.delete(actor, name)
        return answer({"deleted_keys": named})

    def list_all(self, request: AdminRequest) -> Response:
        asked, actor = read_query(request, ListQuery), rights.actor_of(request.caller)
        found = page_of(self._found(actor, asked), asked.page, asked.size)
        return answer(
            {
                "keys": [self._shown(key) if asked.return_full_object else key.record.name for key in found.shown],
                "total_count": found.num_all,
                "current_page": asked.page,
                "total_pages": found.num_pages,
            }
        )

    def _found(self, actor: Actor, asked: ListQuery) -> list[Key]:
        """Return the keys that a query is about."""
        team = str(subject_name(self._subjects, actor, TEAM, asked.team_id))
        user = str(subject_name(self._subjects, actor, USER, asked.user_id))
        if asked.key_hash or asked.key_alias:
            found = self._by_name(actor, asked.key_hash or asked.key_alias)
            found = [key for key in found if team in ("", key.record.team) and user in ("", key.record.user)]
        else:
            found = read_all(
                lambda after, limit: self._keys.page(actor, team=team, user=user, after=after, limit=limit)
            )
        if not asked.organization_id:
            return found
        of, page = asked.organization_id, self._subjects.page
        teams = read_all(lambda after, limit: page(actor, TEAM, organisation=of, after=after, limit=limit))
        names = {team.record.name for team in teams}
        return [key for key in found if key.record.team in names]

    def _by_name(self, actor: Actor, given: str) -> list[Key]:
        try:
            return [self._keys.show(actor, self._name_of(actor, given))]
        except Missing:
            return []

    def regenerate(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        grace = body.pop("grace_period", None)
        grace_s = 0.0 if grace in (None, "", "0s") else bodies.seconds_of(grace, "grace_period")
        name = self._name_of(actor, request.path["key"]) if "key" in request.path else self._named(actor, body)
        if fields := self._changed_fields(actor, body, self._keys.show(actor, name)):
            self._keys.update(actor, name, fields)
        minted = self._keys.rotate(actor, name, grace_s, request.headers.get("idempotency-key", ""))
        return answer(self._generated(minted.key, minted.secret))

    def _block(self, request: AdminRequest, blocked: bool) -> Response:
        actor = rights.actor_of(request.caller)
        changed, _ = self._keys.block(actor, self._named(actor, read_object(request)), blocked)
        return answer(self._shown(changed))

    def _named(self, actor: Actor, body: Mapping[str, Any]) -> str:
        """Return the name of the key that a body names. Raises Invalid, Missing."""
        key = body.get("key")
        if not isinstance(key, str) or not key:
            raise Invalid("`key` is missing: the key, or what `token` or `key_alias` was in an answer.", param="key")
        return self._name_of(actor, key)

    def _name_of(self, actor: Actor, given: str) -> str:
        """Return the name of a key: it is given itself, or by its hash, its name or its alias. Raises Missing, also if
        the caller may not see it: that it exists is not told."""
        with self._database.reading() as connection:
            name = find_key(connection, given) or find_key(connection, name_of(given, "key") or "")
            found = None if name is None else records.find(connection, KEY, name)
        if name is None or found is None or not rights.sees_key(actor, found.record):
            raise Missing("There is no such key. Send the key itself, or its `token` or `key_alias`.")
        return name

    def _fields(self, actor: Actor, body: Mapping[str, Any], before: Limits) -> dict[str, Any]:
        """Return a key's fields for what a body names. Raises Invalid."""
        fields = bodies.fields_of(body, bodies.KEY, before)
        if "team" in fields:
            fields["team"] = subject_name(self._subjects, actor, TEAM, fields["team"])
        if "user" in fields:
            fields["user"] = subject_name(self._subjects, actor, USER, fields["user"])
        return fields

    def _changed_fields(self, actor: Actor, body: Mapping[str, Any], before: Key) -> dict[str, Any]:
        """Return the fields that a body changes of a key, whose name stays. Raises Invalid."""
        name = before.record.name
        if (alias := name_of(body.get("key_alias"), "key_alias")) not in (None, name):
            raise Invalid(
                f"`key_alias` is the key's name, {name!r}, and can't be changed to {alias!r}; generate another key.",
                param="key_alias",
            )
        return self._fields(actor, body, before.record.limits)

    def _generated(self, key: Key, secret: str) -> dict[str, Any]:
        shown = self._shown(key)
        return {**shown, "key": secret, "token_id": shown["token"]}

    def _shown(self, key: Key) -> dict[str, Any]:
        with self._database.reading() as connection:
            return shown_key(connection, key)
