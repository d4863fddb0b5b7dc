"""Serves the routes of the accounts service: opens the sealed caller, checks its role, and writes answers and errors.

A handler blocks, since the database does, and so runs on a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from accounts.errors import AccountsError, DatabaseAway, Forbidden, Invalid, NotSignedIn
from accounts.protocol.caller import HEADER, Caller, CallerUnknown, open_caller
from accounts.protocol.records import Role

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
JSON = "application/json"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """A request to the API, with its caller."""

    caller: Caller
    path: dict[str, str]
    """The variable parts of the path."""
    query: dict[str, str]
    body: bytes
    headers: dict[str, str]


Handler = Callable[[AdminRequest], Response]


class RouteRow(NamedTuple):
    """A route. `roles`: those whose callers may use it; empty: everybody, even without a key."""

    method: str
    path: str
    roles: frozenset[Role]
    handler: Handler
    about: str


ADMINS: frozenset[Role] = frozenset({"admin"})
MANAGERS: frozenset[Role] = frozenset({"admin", "manager"})
"""Managers may use such routes for their own team only, which the handlers check."""
USERS: frozenset[Role] = frozenset({"admin", "manager", "user"})
EVERYBODY: frozenset[Role] = frozenset()


def build_api(rows: Sequence[RouteRow], secret: str) -> ASGIApp:
    """Return the ASGI app of these routes. `secret`: the gateway secret, which seals callers."""
    return Starlette(routes=[Route(row.path, _endpoint(row, secret), methods=[row.method]) for row in rows])


def answer(document: object, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(encode(document), status, media_type=JSON)


def show_caller(request: AdminRequest) -> Response:
    """Answer who the caller is, for `paddock login` and the console."""
    caller = request.caller
    shown = {"key": caller.key, "user": caller.user, "team": caller.team, "organisation": caller.organisation}
    return answer({**shown, "role": caller.role})


WHOAMI = RouteRow("GET", "/admin/whoami", USERS, show_caller, "who the caller is")


def _endpoint(row: RouteRow, secret: str) -> Callable[[Request], object]:
    async def serve(request: Request) -> Response:
        try:
            caller = _caller_of(request, secret)
            if row.roles and caller.role not in row.roles:
                raise _refused(row, caller)
            asked = AdminRequest(
                caller,
                {name: str(value) for name, value in request.path_params.items()},
                dict(request.query_params),
                await _body_of(request),
                dict(request.headers),
            )
            return await run_in_threadpool(row.handler, asked)
        except AccountsError as error:
            return _error(error)
        except OperationalError as error:
            log.warning("the database failed: %s", error.orig)
            return _error(DatabaseAway("The accounts database does not answer. Send the request again later."))

    return serve


def _caller_of(request: Request, secret: str) -> Caller:
    try:
        return open_caller(request.headers.get(HEADER, ""), secret, time.time())
    except CallerUnknown as error:
        raise NotSignedIn(f"This request did not come through a gateway: {error}.") from None


def _refused(row: RouteRow, caller: Caller) -> AccountsError:
    if caller.role is None:
        return NotSignedIn("This request has no API key. Send `Authorization: Bearer <key>`.")
    allowed = ", ".join(sorted(row.roles))
    return Forbidden(f"A caller with the role {caller.role} may not call {row.method} {row.path}; it takes: {allowed}.")


async def _body_of(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise Invalid(f"The body has more than {MAX_BODY_BYTES} bytes. Send less at once.")
    return bytes(body)


def _error(error: AccountsError) -> Response:
    told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    response = answer({"error": told}, error.status)
    if error.status == 503:
        response.headers["retry-after"] = "5"
    return response
