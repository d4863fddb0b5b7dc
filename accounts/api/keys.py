"""Answers `/admin/keys`."""

from __future__ import annotations

from starlette.responses import Response

from accounts.access import rights
from accounts.access.keys import Keys, Minted
from accounts.access.records import KEY
from accounts.api import forms
from accounts.api.api import (
    MANAGERS,
    USERS,
    AdminRequest,
    RouteRow,
    answer,
    read_object,
    read_query,
    read_struct,
)
from accounts.api.forms import DeleteQuery, KeysQuery, Rotation

REQUEST_HEADER = "idempotency-key"


class KeyRoutes:
    """The handlers."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def rows(self) -> tuple[RouteRow, ...]:
        made, change, shown = forms.CREATED["key"], forms.CHANGED["key"], forms.ANSWERS["key"]
        one, listed, minted = "/admin/keys/{name:path}", forms.LISTS["key"], forms.MINTED
        return (
            RouteRow("GET", "/admin/keys", USERS, self.list, "the keys", None, listed, KeysQuery),
            RouteRow("POST", "/admin/keys", MANAGERS, self.mint, "make a key, shown once", made, minted, status=201),
            RouteRow("POST", f"{one}/rotate", MANAGERS, self.rotate, "replace a key's secret", Rotation, minted),
            RouteRow("POST", f"{one}/block", MANAGERS, self.block, "refuse calls with a key", None, shown),
            RouteRow("POST", f"{one}/unblock", MANAGERS, self.unblock, "take them again", None, shown),
            RouteRow("GET", one, USERS, self.show, "a key", None, shown),
            RouteRow("PATCH", one, MANAGERS, self.update, "change a key", change, shown),
            RouteRow("DELETE", one, MANAGERS, self.delete, "delete a key", None, forms.Deleted, DeleteQuery),
        )

    def list(self, request: AdminRequest) -> Response:
        asked = read_query(request, KeysQuery)
        found = self._keys.page(
            rights.actor_of(request.caller),
            team=asked.team,
            user=asked.user,
            after=forms.place_of(asked.cursor),
            limit=asked.limit + 1,
        )
        return answer(forms.listed(KEY, found, asked.limit))

    def mint(self, request: AdminRequest) -> Response:
        minted = self._keys.mint(rights.actor_of(request.caller), read_object(request), _request_of(request))
        return _minted(minted, 201)

    def show(self, request: AdminRequest) -> Response:
        found = self._keys.show(rights.actor_of(request.caller), request.path["name"])
        return answer(forms.shown(KEY, found))

    def update(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        changed, published = self._keys.update(actor, request.path["name"], read_object(request))
        return answer(forms.shown(KEY, changed, published))

    def rotate(self, request: AdminRequest) -> Response:
        asked = read_struct(request, Rotation)
        actor = rights.actor_of(request.caller)
        return _minted(self._keys.rotate(actor, request.path["name"], asked.grace_s, _request_of(request)), 200)

    def block(self, request: AdminRequest) -> Response:
        return self._block(request, True)

    def unblock(self, request: AdminRequest) -> Response:
        return self._block(request, False)

    def delete(self, request: AdminRequest) -> Response:
        asked, name = read_query(request, DeleteQuery), request.path["name"]
        published = self._keys.delete(rights.actor_of(request.caller), name, asked.version)
        return answer(forms.Deleted(name=name, published=published))

    def _block(self, request: AdminRequest, blocked: bool) -> Response:
        changed, published = self._keys.block(rights.actor_of(request.caller), request.path["name"], blocked)
        return answer(forms.shown(KEY, changed, published))


def _minted(minted: Minted, status: int) -> Response:
    return answer({**forms.shown(KEY, minted.key, minted.is_published), "key": minted.secret}, status)


def _request_of(request: AdminRequest) -> str:
    return request.headers.get(REQUEST_HEADER, "")
