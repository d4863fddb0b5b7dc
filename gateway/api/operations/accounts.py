"""Forwards requests to the accounts service, with the caller that this gateway identified, sealed.

Gateways have no database: whatever needs one is there, and calls of models go on while it is away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from accounts.protocol.audit import AUDITED_PATH, AuditedAction
from accounts.protocol.caller import HEADER, Caller, seal_caller
from gateway.access.control import Shares
from gateway.access.proxies import TrustedProxies
from gateway.api.http.diagnostics import name_headers, origin_headers, request_log_of
from gateway.api.intake.body import declared_bytes, read_body
from gateway.api.intake.memory_budget import MemoryBudget, Reservation
from gateway.back_pressure import accounts_unavailable, too_many_of_accounts
from gateway.call import Principal
from gateway.dispatch.team_turns import TeamTurns, Turn
from gateway.errors import NotSupported
from workers.http_server.connections import network_of

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
MAX_OPEN_BODY_BYTES = 64 << 10
"""Maximum bytes of a body that needs no key: those of signing in have a few KiB."""
BODY_REMEDY = "Send less at once."
ASKED_AT_ONCE = 4
"""Maximum requests of one team, admins' left out, that the accounts service answers at a time: it has eight connections
to its database, and sums of a long time can take each of them for half a minute."""
MOST_OF_KEY, MOST_OF_TEAM = 8, 16
"""Maximum requests under way of one key and of one team, admins' left out. An export that is read slowly holds a page
of calls in the accounts service."""
OPEN_AT_ONCE = 8
"""Maximum requests without a key of one address (IPv6 by /64) that the accounts service answers at a time."""
PIECE_BYTES = 64 << 10
TIMEOUT_S, CONNECT_S = 60.0, 5.0
"""Maximum seconds between two pieces of an answer, and for connecting."""
NOTE_S = 3.0
"""Maximum seconds that an admin waits for the audit to have what was done."""
PASSED_ON = frozenset({"accept", "content-type", "cookie", "idempotency-key"})
"""Request headers that the accounts service gets."""
PASSED_BACK = frozenset(
    {
        *("content-type", "content-disposition", "content-length", "location", "retry-after"),
        *("cache-control", "content-security-policy", "referrer-policy", "x-content-type-options"),
    }
)
"""Headers of its answers that callers get; `set-cookie` as well."""
UNIX = "unix:"


class AccountsRoute:
    """The handler of every route that the accounts service answers."""

    def __init__(self, url: str, secret: str, proxies: TrustedProxies, memory: MemoryBudget) -> None:
        """`url`: `http://HOST:PORT`, or `unix:PATH` of its socket; empty: there is no accounts service."""
        self._proxies = proxies
        self._memory = memory
        self._turns = TeamTurns.of_each(ASKED_AT_ONCE)
        self._open_turns = TeamTurns.of_each(OPEN_AT_ONCE)
        """By address, in the place of teams."""
        self._under_way = Shares(MOST_OF_KEY, MOST_OF_TEAM)
        self._path = url.removeprefix(UNIX) if url.startswith(UNIX) else ""
        self._base = URL("http://accounts" if self._path else url)
        self._is_set_up = bool(url)
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the connections to the accounts service for the length of the block."""
        # Without a limit: where exports that nobody reads had all of 100 connections, all others would wait for them.
        connector = aiohttp.UnixConnector(self._path, limit=0) if self._path else aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=TIMEOUT_S)
        # Cookies are the callers': one kept here would go out with the requests of all others.
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=jar
        ) as session:
            self._session = session
            yield

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request and its answer. Raises NotSupported, BodyTooLarge, BodyTooSlow, TakesTooMuch,
        HeldTooMuch, MemoryFull, TooManyRequests, AccountsUnavailable."""
        if not self._is_set_up or self._session is None:
            raise NotSupported(
                "This gateway has no accounts service. Run `paddock up` or `paddock accounts`, and set "
                "PADDOCK_ACCOUNTS_URL on every gateway."
            )
        reservation = self._memory.reserve(principal)
        try:
            body = await _read_counted(principal, scope, receive, reservation)
            if principal.admin:
                await self._forward(self._session, principal, scope, body, send)
                return
            with self._counted(principal) if principal.key_id else nullcontext():
                turn = await self._turn(principal, scope)
                try:
                    await self._forward(self._session, principal, scope, body, send, turn.leave)
                finally:
                    turn.leave()
        finally:
            reservation.close()

    async def _turn(self, principal: Principal, scope: Scope) -> Turn:
        """Wait until the service may be asked for the caller's team, or without a key for its address."""
        if principal.key_id:
            return await self._turns.enter(principal.team)
        return await self._open_turns.enter(network_of(self._proxies.address_of(scope)))

    @contextmanager
    def _counted(self, principal: Principal) -> Iterator[None]:
        """Count a request while the block lasts. Raises TooManyRequests."""
        key, team = principal.key_id, principal.team
        if self._under_way.is_full_for_key(key):
            raise too_many_of_accounts("This key", MOST_OF_KEY)
        if self._under_way.is_full_for_team(team):
            raise too_many_of_accounts(f"The team {team!r}", MOST_OF_TEAM)
        self._under_way.take(key, team)
        try:
            yield
        finally:
            self._under_way.give_back(key, team)

    async def note(
        self, principal: Principal, scope: Scope, action: str, kind: str, subject: str, team: str, after: dict[str, Any]
    ) -> bool:
        """Have the service write into its audit what an admin did at this gateway, and return whether that is done.
        Raises nothing: it is done already, and the log of this gateway has it too."""
        if not self._is_set_up or self._session is None:
            return False
        headers = {HEADER: seal_caller(self._caller(principal, Request(scope)), self._secret)}
        done = AuditedAction(action=action, kind=kind, subject=subject, team=team, after=after)
        url = self._base.with_path(AUDITED_PATH)
        timeout = aiohttp.ClientTimeout(total=NOTE_S)
        try:
            async with self._session.post(
                url, data=msgspec.json.encode(done), headers=headers, timeout=timeout
            ) as answer:
                if answer.status == 200:
                    return True
                why = f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        log.warning("the audit of the accounts service does not have: %s %s %s (%s)", action, kind, subject, why)
        return False

    async def _forward(
        self,
        session: aiohttp.ClientSession,
        principal: Principal,
        scope: Scope,
        body: bytes,
        send: Send,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Forward the request and its answer, and call `on_begin` when the answer begins. Raises
        AccountsUnavailable."""
        request = Request(scope)
        headers = {name: value for name, value in request.headers.items() if name in PASSED_ON}
        headers[HEADER] = seal_caller(self._caller(principal, request), self._secret)
        # The query is sent as it came: it is encoded already.
        target = f"{quote(scope['path'])}?{scope['query_string'].decode('latin-1')}".removesuffix("?")
        url = URL(f"{self._base.origin()}{target}", encoded=True)
        try:
            async with session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                on_begin()
                await _pass_back(answer, scope, send)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if request_log_of(scope).status:
                raise  # the answer has begun: the connection ends without the rest
            raise accounts_unavailable() from error

    def _caller(self, principal: Principal, request: Request) -> Caller:
        known = bool(principal.key_id)
        return Caller(
            key="" if principal.by_token else principal.key_id,
            of_settings=principal.of_settings,
            user=principal.user,
            team=principal.team,
            organisation=principal.organisation if known else "",
            role=principal.role if known else None,
            address=self._proxies.address_of(request.scope),
            request_id=request_log_of(request.scope).request_id,
            url=f"{self._proxies.scheme_of(request.scope)}://{request.url.netloc}",
            at=time.time(),
        )


async def _read_counted(principal: Principal, scope: Scope, receive: Receive, reservation: Reservation) -> bytes:
    """Return the request's body, whose bytes count with the memory of its caller's requests, those without a key
    together. Raises BodyTooLarge, BodyTooSlow, ClientGone, TakesTooMuch, HeldTooMuch, MemoryFull."""

    async def count(part: bytes, num_bytes: int) -> bytes:
        reservation.grow(num_bytes)
        return part

    most = MAX_BODY_BYTES if principal.key_id else MAX_OPEN_BODY_BYTES
    if (declared := declared_bytes(scope)) <= most:
        reservation.resize(declared)  # it may never come
    return await read_body(scope, receive, most, on_part=count, remedy=BODY_REMEDY)


async def _pass_back(answer: aiohttp.ClientResponse, scope: Scope, send: Send) -> None:
    request_log = request_log_of(scope)
    request_log.status, request_log.outcome = answer.status, "ok" if answer.status < 400 else f"status_{answer.status}"
    kept = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
    headers = [(name, value) for name, value in kept if name.decode() in PASSED_BACK or name == b"set-cookie"]
    headers += [*name_headers(request_log), *origin_headers(request_log.origin)]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    async for piece in answer.content.iter_chunked(PIECE_BYTES):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
