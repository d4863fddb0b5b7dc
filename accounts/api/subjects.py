"""Answers `/admin/organisations`, `/admin/teams`, `/admin/users` and `/admin/aliases`; and `/admin/apply`, which makes
all of them what a file declares."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from accounts.access import rights
from accounts.access.declaration import Applied, Declaration, Declarations, read_declaration
from accounts.access.records import ALIAS, ORGANISATION, TEAM, USER, Kind
from accounts.access.subjects import Subjects
from accounts.api import forms
from accounts.api.api import ADMINS, USERS, AdminRequest, RouteRow, answer, read_object, read_query
from accounts.api.forms import ApplyQuery, DeleteQuery, Page, TeamsQuery, UsersQuery

PLURALS = {"organisation": "organisations", "team": "teams", "user": "users", "alias": "aliases"}


class SubjectRoutes:
    """The handlers of one kind."""

    def __init__(self, subjects: Subjects, kind: Kind[Any], query: type[Page] = Page) -> None:
        self._subjects = subjects
        self._kind = kind
        self._query = query

    def rows(self) -> tuple[RouteRow, ...]:
        name = self._kind.name
        every, one = f"/admin/{PLURALS[name]}", f"/admin/{PLURALS[name]}/{{name:path}}"
        made, change, shown = forms.CREATED[name], forms.CHANGED[name], forms.ANSWERS[name]
        seen = USERS if self._kind in (TEAM, USER) else ADMINS
        blocks = (
            RouteRow("POST", f"{one}/block", ADMINS, self.block, f"refuse all calls of the {name}", None, shown),
            RouteRow("POST", f"{one}/unblock", ADMINS, self.unblock, "take them again", None, shown),
        )
        return (
            RouteRow("GET", every, seen, self.list, f"the {PLURALS[name]}", None, forms.LISTS[name], self._query),
            RouteRow("POST", every, ADMINS, self.create, f"make a record of the {name}", made, shown, None, 201),
            *(() if self._kind is ALIAS else blocks),
            RouteRow("GET", one, seen, self.show, f"the record of the {name}", None, shown),
            RouteRow("PATCH", one, ADMINS, self.update, "change it", change, shown),
            RouteRow("DELETE", one, ADMINS, self.delete, "delete it", None, forms.Deleted, DeleteQuery),
        )

    def list(self, request: AdminRequest) -> Response:
        asked = read_query(request, self._query)
        narrowed = {name: getattr(asked, name) for name in ("team", "organisation") if hasattr(asked, name)}
        found = self._subjects.page(
            rights.actor_of(request.caller),
            self._kind,
            after=forms.place_of(asked.cursor),
            limit=asked.limit + 1,
            **narrowed,
        )
        return answer(forms.listed(self._kind, found, asked.limit))

    def create(self, request: AdminRequest) -> Response:
        made, published = self._subjects.create(rights.actor_of(request.caller), self._kind, read_object(request))
        return answer(forms.shown(self._kind, made, published), 201)

    def show(self, request: AdminRequest) -> Response:
        found = self._subjects.show(rights.actor_of(request.caller), self._kind, request.path["name"])
        return answer(forms.shown(self._kind, found))

    def update(self, request: AdminRequest) -> Response:
        actor = rights.actor_of(request.caller)
        changed, published = self._subjects.update(actor, self._kind, request.path["name"], read_object(request))
        return answer(forms.shown(self._kind, changed, published))

    def block(self, request: AdminRequest) -> Response:
        return self._block(request, True)

    def unblock(self, request: AdminRequest) -> Response:
        return self._block(request, False)

    def delete(self, request: AdminRequest) -> Response:
        asked, name = read_query(request, DeleteQuery), request.path["name"]
        actor = rights.actor_of(request.caller)
        published = self._subjects.delete(actor, self._kind, name, asked.version, with_keys=asked.with_keys)
        return answer(forms.Deleted(name=name, published=published))

    def _block(self, request: AdminRequest, blocked: bool) -> Response:
        actor = rights.actor_of(request.caller)
        changed, published = self._subjects.block(actor, self._kind, request.path["name"], blocked)
        return answer(forms.shown(self._kind, changed, published))


def subject_rows(subjects: Subjects) -> tuple[RouteRow, ...]:
    """Return the routes of every kind but keys."""
    kinds: tuple[tuple[Kind[Any], type[Page]], ...] = (
        (ORGANISATION, Page),
        (TEAM, TeamsQuery),
        (USER, UsersQuery),
        (ALIAS, Page),
    )
    return tuple(row for kind, query in kinds for row in SubjectRoutes(subjects, kind, query).rows())


class ApplyRoute:
    """The handler of `/admin/apply`."""

    def __init__(self, declarations: Declarations) -> None:
        self._declarations = declarations

    def rows(self) -> tuple[RouteRow, ...]:
        about = "make access what a file (JSON or YAML) declares"
        return (RouteRow("POST", "/admin/apply", ADMINS, self.apply, about, Declaration, Applied, ApplyQuery),)

    def apply(self, request: AdminRequest) -> Response:
        asked = read_query(request, ApplyQuery)
        declared = read_declaration(request.body)
        actor = rights.actor_of(request.caller)
        return answer(self._declarations.apply(actor, declared, dry_run=asked.dry_run, prune=asked.prune))
