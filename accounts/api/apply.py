"""Answers `/admin/apply`: access as a file declares it."""

from __future__ import annotations

from starlette.responses import Response

from accounts.access import rights
from accounts.access.declaration import Applied, Declaration, Declarations, read_declaration
from accounts.api.api import ADMINS, AdminRequest, RouteRow, answer, read_query
from accounts.api.forms import ApplyQuery


class ApplyRoute:
    """The handler."""

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
