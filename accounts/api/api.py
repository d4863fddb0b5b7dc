"""Serves the routes of the accounts service: opens the sealed caller, checks its role, and writes answers and errors.

A handler blocks, since the database does, and so runs on a thread; one that waits for others than the database is a
coroutine.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from accounts.access.editing import fault_of
from accounts.database.database import AWAY, UNFIT
from accounts.errors import AccountsError, DatabaseAway, Forbidden, Invalid, Missing, NotSignedIn
from accounts.protocol.caller import HEADER, Caller, CallerUnknown, open_caller
from accounts.protocol.records import Role

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
JSON = "application/json"
StructT = TypeVar("StructT", bound=msgspec.Struct)

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


Handler = Callable[[AdminRequest], Response | Awaitable[Response]]
"""Blocks and is run on a thread, or is a coroutine function, which must not block."""


class RouteRow(NamedTuple):
    """A route. `roles`: those whose callers may use it; empty: everybody, even without a key."""

    method: str
    path: str
    roles: frozenset[Role]
    handler: Handler
    about: str
    body: type | None = None
    """The struct that the body is, for the OpenAPI document; None: there is no body."""
    answers: type | None = None
    """The struct that the answer is; None: the document does not describe it."""
    query: type[msgspec.Struct] | None = None
    """The struct of the query's parameters; None: there are none."""
    status: int = 200


ADMINS: frozenset[Role] = frozenset({"admin"})
MANAGERS: frozenset[Role] = frozenset({"admin", "manager"})
"""Managers may use such routes for their own team only, which the handlers check."""
USERS: frozenset[Role] = frozenset({"admin", "manager", "user"})
EVERYBODY: frozenset[Role] = frozenset()


def build_api(rows: Sequence[RouteRow], secret: str) -> ASGIApp:
    """Return the ASGI app of these routes. `secret`: the gateway secret, which seals callers."""
    routes = [Route(row.path, _endpoint(row, secret), methods=[row.method]) for row in rows]
    return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown, Exception: _failed})


def answer(document: object, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(encode(document), status, media_type=JSON)


def read_query(request: AdminRequest, kind: type[StructT]) -> StructT:
    """Return the request's query. Raises Invalid, which names the parameter."""
    try:
        return msgspec.convert(request.query, kind, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        raise Invalid(f"The query can't be read: {error}. It takes: {names}.") from None


def read_object(request: AdminRequest) -> dict[str, Any]:
    """Return the request's body, a JSON object; an empty body is one without fields. Raises Invalid."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Invalid(f"The body is no JSON object: {error}.") from None


def read_struct(request: AdminRequest, kind: type[StructT]) -> StructT:
    """Return the request's body; an empty one is one without fields. Raises Invalid, which names the field."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise fault_of(error) from None
    except msgspec.DecodeError as error:
        raise Invalid(f"The body is no JSON object: {error}.") from None


def show_caller(request: AdminRequest) -> Response:
    """Answer who the caller is, for `paddock login` and the console."""
    caller = request.caller
    shown = {"key": caller.key, "user": caller.user, "team": caller.team, "organisation": caller.organisation}
    return answer({**shown, "role": caller.role})


WHOAMI = RouteRow("GET", "/admin/whoami", USERS, show_caller, "who the caller is")


def _endpoint(row: RouteRow, secret: str) -> Callable[[Request], object]:
    is_coroutine = inspect.iscoroutinefunction(row.handler)

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
            answered = row.handler(asked) if is_coroutine else await run_in_threadpool(row.handler, asked)
            return answered if isinstance(answered, Response) else await answered
        except AccountsError as error:
            return _error(error)
        except UNFIT as error:
            log.info("a request has a value that the database does not take: %s", type(error).__name__)
            return _error(Invalid("A value can't be kept or looked up: it has a character NUL, or is out of range."))
        except AWAY as error:
            log.warning("the database failed: %s", error)
            return _error(DatabaseAway("The accounts database does not answer. Send the request again later."))

    return serve


async def _unknown(request: Request, _: Exception) -> Response:
    return _error(Missing(f"There is no route {request.method} {request.url.path}. `GET /admin/docs` lists them."))


async def _failed(request: Request, _: Exception) -> Response:
    """Answer a fault of ours; the server writes its traceback to the log."""
    return _error(
        AccountsError(f"{request.method} {request.url.path} failed; the log of the accounts service has why.")
    )


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
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return response
