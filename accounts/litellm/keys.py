"""Answers `/key/...` as LiteLLM does."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from sqlalchemy import ColumnElement, Connection, or_, select
from starlette.responses import Response

from accounts.access import rights
from accounts.access.keys import Key, Keys
from accounts.api.api import MANAGERS, USERS, AdminRequest, RouteRow, answer, read_object, read_query
from accounts.budgets.spending import NOTHING_SPENT, read_spending
from accounts.database.database import Database
from accounts.database.schema import api_keys
from accounts.errors import Invalid, Missing
from accounts.litellm import values
from accounts.protocol.periods import UTC, span_at
from accounts.protocol.records import NO_LIMITS, Limits, SubjectKind, digest
from accounts.usage.money import NANO

HASH = re.compile(r"[0-9a-f]{64}")
BODY = frozenset(
    {
        *("key", "key_alias", "models", "duration", "team_id", "user_id", "metadata", "blocked", "tags"),
        *values.LIMITS,
        *values.BUDGET,
    }
)


class KeyQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of one key."""

    key: str = ""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of keys. What it does not know is left alone, as LiteLLM's clients send more."""

    page: Annotated[int, Meta(ge=1)] = 1
    size: Annotated[int, Meta(ge=1, le=100)] = 10
    user_id: str = ""
    team_id: str = ""
    key_alias: str = ""
    key_hash: str = ""
    return_full_object: bool = False


class LiteLlmKeys:
    """The handlers."""

    def __init__(self, keys: Keys, database: Database) -> None:
        self._keys = keys
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("POST", "/key/generate", MANAGERS, self.generate, "make a key"),
            RouteRow("GET", "/key/info", USERS, self.info, "a key"),
            RouteRow("POST", "/key/update", MANAGERS, self.update, "change a key"),
            RouteRow("POST", "/key/block", MANAGERS, self.block, "refuse calls with a key"),
            RouteRow("POST", "/key/unblock", MANAGERS, self.unblock, "take them again"),
            RouteRow("POST", "/key/delete", MANAGERS, self.delete, "delete keys"),
            RouteRow("GET", "/key/list", USERS, self.list, "the keys"),
            RouteRow("POST", "/key/{key:path}/regenerate", MANAGERS, self.regenerate, "replace a key's secret"),
        )

    def generate(self, request: AdminRequest) -> Response:
        body = read_object(request)
        if body.get("key") is not None:
            raise Invalid("`key` can't be chosen: keys are random. Leave it out.", param="key")
        actor = rights.actor_of(request.caller)
        name = values.name_of(body.get("key_alias"), "key_alias")
        fields = {**_fields(body, NO_LIMITS), **({"name": name} if name else {})}
        minted = self._keys.mint(actor, fields, request.headers.get("idempotency-key", ""))
        return answer(self._generated(minted.key, minted.secret))

    def info(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        asked = read_query(request, KeyQuery).key or actor.key
        found = self._keys.show(actor, self._name_of(asked))
        return answer({"key": asked, "info": self._shown(found)})

    def update(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        name = self._named(body)
        before = self._keys.show(actor, name)
        changed, _ = self._keys.update(actor, name, _fields(body, before.record.limits))
        return answer({"key": body["key"], **self._shown(changed)})

    def block(self, request: AdminRequest) -> Response:
        return self._block(request, True)

    def unblock(self, request: AdminRequest) -> Response:
        return self._block(request, False)

    def delete(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        named = [*values.texts(body, "keys"), *values.texts(body, "key_aliases")]
        if not named:
            raise Invalid("`keys` or `key_aliases` is missing: a list.", param="keys")
        for name in [self._name_of(key) for key in named]:
            self._keys.delete(actor, name)
        return answer({"deleted_keys": named})

    def list(self, request: AdminRequest) -> Response:
        asked, actor = read_query(request, ListQuery), rights.actor_of(request.caller)
        name = self._name_of(asked.key_hash or asked.key_alias) if asked.key_hash or asked.key_alias else ""
        found, after = list[Key](), ""
        # LiteLLM's pages have numbers, so that those before are read as well; a script lists few.
        while page := self._keys.page(actor, team=asked.team_id, user=asked.user_id, after=after, limit=1000):
            found += [key for key in page if not name or key.record.name == name]
            after = page[-1].record.name
        shown = found[(asked.page - 1) * asked.size : asked.page * asked.size]
        return answer(
            {
                "keys": [self._shown(key) if asked.return_full_object else key.record.name for key in shown],
                "total_count": len(found),
                "current_page": asked.page,
                "total_pages": -(-len(found) // asked.size),
            }
        )

    def regenerate(self, request: AdminRequest) -> Response:
        body, actor = read_object(request), rights.actor_of(request.caller)
        grace = body.pop("grace_period", None)
        grace_s = 0.0 if grace in (None, "", "0s") else values.seconds_of(grace, "grace_period")
        name = self._name_of(request.path["key"])
        body.pop("key", None)
        if fields := _fields(body, self._keys.show(actor, name).record.limits):
            self._keys.update(actor, name, fields)
        minted = self._keys.rotate(actor, name, grace_s, request.headers.get("idempotency-key", ""))
        return answer(self._generated(minted.key, minted.secret))

    def _block(self, request: AdminRequest, blocked: bool) -> Response:
        name = self._named(read_object(request))
        changed, _ = self._keys.block(rights.actor_of(request.caller), name, blocked)
        return answer(self._shown(changed))

    def _named(self, body: Mapping[str, Any]) -> str:
        """Return the name of the key that a body names. Raises Invalid, Missing."""
        key = body.get("key")
        if not isinstance(key, str) or not key:
            raise Invalid("`key` is missing: the key, or what `token` or `key_alias` was in an answer.", param="key")
        return self._name_of(key)

    def _name_of(self, key: str) -> str:
        """Return the name of a key: it is given itself, or by its hash or its name. Raises Missing."""
        hashes = (digest(key), key) if HASH.fullmatch(key) else (digest(key),)
        wanted: ColumnElement[bool] = or_(api_keys.c.sha256.in_(hashes), api_keys.c.name == key)
        with self._database.reading() as connection:
            found = connection.execute(select(api_keys.c.name).where(wanted)).scalars().all()
        if not found:
            raise Missing("There is no such key. Send the key itself, or its `token` or `key_alias`.")
        return str(found[0])

    def _generated(self, key: Key, secret: str) -> dict[str, Any]:
        shown = self._shown(key)
        return {**shown, "key": secret, "token_id": shown["token"], "key_name": f"pk-...{secret[-4:]}"}

    def _shown(self, key: Key) -> dict[str, Any]:
        with self._database.reading() as connection:
            return shown_key(connection, key)


def shown_key(connection: Connection, key: Key) -> dict[str, Any]:
    """Return a key by LiteLLM's names. `token` is its name, since its hash is not shown."""
    record = key.record
    metadata = dict(key.metadata)
    return {
        "token": record.name,
        "key_name": f"pk-...{record.sha256[:4]}",
        "key_alias": record.name,
        "spend": spend_of(connection, "key", record.name, record.limits),
        "expires": values.shown_time(record.expires_at),
        "models": list(record.aliases or ()),
        "user_id": record.user or None,
        "team_id": record.team,
        "tags": metadata.pop(values.TAGS, None) or [],
        "metadata": metadata,
        "blocked": record.blocked,
        **values.shown_limits(record.limits),
        "created_at": values.shown_time(key.created_at),
        "updated_at": values.shown_time(key.updated_at),
        "created_by": key.created_by,
        "last_active": values.shown_time(key.last_used_at),
    }


def spend_of(connection: Connection, kind: SubjectKind, name: str, limits: Limits) -> float:
    """Return what was spent in the running period of the first budget; without one, in this month."""
    budget = limits.budgets[0] if limits.budgets else None
    span = span_at(budget.period if budget else "month", budget.time_zone if budget else UTC, time.time())
    found = read_spending(connection, kind, span, [name]).get(name, NOTHING_SPENT)
    return found.cost_nano / NANO


def _fields(body: Mapping[str, Any], before: Limits) -> dict[str, Any]:
    """Return a record's fields for what a body names. Raises Invalid."""
    values.refuse_unknown(body, BODY)
    fields: dict[str, Any] = {}
    if "models" in body:
        fields["aliases"] = values.aliases_of(body["models"])
    if body.get("duration") is not None:
        fields["duration_s"] = values.seconds_of(body["duration"], "duration")
    for theirs, ours in (("team_id", "team"), ("user_id", "user"), ("blocked", "blocked")):
        if body.get(theirs) is not None:
            fields[ours] = body[theirs]
    if body.get("metadata") is not None:
        fields["metadata"] = body["metadata"]
    if body.get(values.TAGS):
        fields["metadata"] = {**fields.get("metadata", {}), values.TAGS: body[values.TAGS]}
    if limits := values.limits_of(body, before):
        fields["limits"] = limits
    return fields
