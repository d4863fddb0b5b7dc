"""Signs people in to the console by their API key, which is kept in a cookie that no script can read.

Where such a cookie counts, and for which requests, is told in `gateway.access.keys`. Source: RFC 6265bis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from accounts.protocol.sign_on import PLAIN_COOKIE, SECURE_COOKIE
from gateway.access.control import KEY, AccessControl
from gateway.access.keys import is_of_other_origin, session_key
from gateway.api.http.answers import JSON, send_last
from gateway.api.http.diagnostics import answer_headers, request_log_of
from gateway.api.intake.body import read_body
from gateway.call import Principal
from gateway.errors import AuthenticationFailed, InvalidRequest, PermissionDenied
from gateway.telemetry.metrics import OK

MAX_BODY_BYTES = 8192
MAX_KEY_CHARS = 4096
LIFE_S = 30 * 86_400
"""Seconds for which a browser keeps the cookie; the key in it can be blocked, deleted or expire before."""


class SignIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /ui/session`."""

    key: Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARS, pattern="^[!-:<-~]+$")]
    """The API key; of printable ASCII without spaces and `;`, which a cookie can't have."""


_decode = msgspec.json.Decoder(SignIn).decode


class ConsoleSession:
    """Handles `GET`, `POST` and `DELETE /ui/session`."""

    def __init__(
        self, access: AccessControl, *, has_accounts: bool, has_sign_on: bool, links: Mapping[str, str]
    ) -> None:
        """`has_sign_on`: whether people can sign in by an identity provider. `links`: name -> address of further pages
        for operators."""
        self._access = access
        self._has_accounts = has_accounts
        self._has_sign_on = has_sign_on
        self._links = dict(links)

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with who is signed in; `session` is null: nobody is."""
        session = None
        try:
            if self._access.is_open or session_key(scope) is not None:
                session = self._session(self._access.authenticate(scope))
        except (AuthenticationFailed, PermissionDenied):
            pass  # the key in the cookie is not valid any more
        await _answer(scope, send, {"session": session, "sign_on": self._has_sign_on})

    async def begin(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep the key of the body in the browser's cookie. Raises InvalidRequest, PermissionDenied, and as
        `AccessControl.identify`."""
        if is_of_other_origin(scope):
            # A page of a stranger would sign the visitor in by the stranger's key, who then reads what is done with it.
            raise PermissionDenied(
                "A page of another address sent this sign-in. Open the console at this gateway's own address."
            )
        body = await read_body(scope, receive, MAX_BODY_BYTES)
        try:
            asked = _decode(body)
        except msgspec.MsgspecError:
            raise InvalidRequest('Send {"key": "..."} with an API key.', param="key") from None
        # Whoever tries keys is slowed down as with any other request, so it is made one with this key.
        with_key = {**scope, "headers": [*_without_keys(scope), (b"authorization", b"Bearer " + asked.key.encode())]}
        try:
            holder = await self._access.identify(with_key, request_log_of(scope), KEY)
        finally:
            self._access.end(with_key)
        await _answer(scope, send, self._session(holder), self._cookie(scope, asked.key, LIFE_S))

    async def end(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the browser forget the cookie."""
        await _answer(scope, send, {"session": None}, self._cookie(scope, "", 0))

    def _session(self, holder: Principal) -> dict[str, Any]:
        return {
            "user": holder.user or holder.key_id,
            "team": holder.team,
            "role": "admin" if holder.admin else holder.role,
            "has_accounts": self._has_accounts,
            "links": self._links if holder.admin else {},
            "is_open": self._access.is_open,
        }

    def _cookie(self, scope: Scope, key: str, life_s: int) -> bytes:
        is_secure = self._access.proxies.scheme_of(scope) == "https"
        name, secure = (SECURE_COOKIE, "; Secure") if is_secure else (PLAIN_COOKIE, "")
        return f"{name}={key}; Path=/; Max-Age={life_s}; HttpOnly; SameSite=Strict{secure}".encode()


def _without_keys(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in scope["headers"] if name in (b"host", b"x-forwarded-for", b"forwarded")]


async def _answer(scope: Scope, send: Send, document: object, cookie: bytes = b"") -> None:
    request_log = request_log_of(scope)
    request_log.status, request_log.outcome = 200, OK
    body = msgspec.json.encode(document)
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
    headers += [(b"set-cookie", cookie)] if cookie else []
    start = {"type": "http.response.start", "status": 200, "headers": [*headers, *answer_headers(request_log)]}
    await send(start)
    await send_last(send, body)
