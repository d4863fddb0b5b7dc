"""Answers `/admin/audit`: who changed what, and whether the chain is whole. Notes what admins do at gateways."""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement
from starlette.responses import Response

from accounts.access import audit
from accounts.access.audit import AuditEntry, ChainCheck
from accounts.access.changes import Changes
from accounts.access.rights import actor_of
from accounts.api import forms
from accounts.api.api import ADMINS, MANAGERS, AdminRequest, RouteRow, answer, read_query, read_struct
from accounts.api.forms import AuditQuery
from accounts.database.schema import audit as rows
from accounts.errors import Invalid
from accounts.protocol.audit import AUDITED_PATH, AuditedAction


class AuditList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the audit, the latest entry first."""

    data: list[AuditEntry]
    next: str | None


class AuditRoutes:
    """The handlers."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._database = changes.database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("GET", "/admin/audit", MANAGERS, self.list, "changes, latest first", None, AuditList, AuditQuery),
            RouteRow("GET", "/admin/audit/verify", ADMINS, self.verify, "whether the audit is whole", None, ChainCheck),
        )

    def gateway_rows(self) -> tuple[RouteRow, ...]:
        """Return the routes that gateways call for themselves, and forward nobody to."""
        return (RouteRow("POST", AUDITED_PATH, ADMINS, self.note, "notes an action at a gateway", AuditedAction),)

    def note(self, request: AdminRequest) -> Response:
        """Write down what an admin did at a gateway. Raises Invalid."""
        done = read_struct(request, AuditedAction)
        with self._changes.begin(actor_of(request.caller)) as change:
            change.note(done.action, done.kind, done.subject, done.team, None, done.after)
        return answer({"number": change.number})

    def list(self, request: AdminRequest) -> Response:
        asked = read_query(request, AuditQuery)
        place = forms.place_of(asked.cursor)
        if place and not place.isdigit():
            raise Invalid("`cursor` is of another list; leave it out.", param="cursor")
        team = asked.team if request.caller.role == "admin" else request.caller.team
        wanted = {"kind": asked.kind, "subject": asked.subject, "actor": asked.actor, "team": team}
        where: list[ColumnElement[bool]] = [rows.c[name] == value for name, value in wanted.items() if value]
        if request.caller.role != "admin":
            where.append(rows.c.team == request.caller.team)
        with self._database.reading() as connection:
            found = audit.entries(connection, where, int(place) if place else None, asked.limit + 1)
        page = found[: asked.limit]
        following = forms.cursor_after(str(page[-1].number)) if len(found) > asked.limit else None
        return answer(AuditList(data=page, next=following))

    def verify(self, request: AdminRequest) -> Response:
        with self._database.reading() as connection:
            return answer(audit.verify(connection))
