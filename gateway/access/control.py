"""Access control: identifies the caller of a route before its handler is called, and bounds one key's requests under
way.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from starlette.types import Scope

from gateway.access.keys import Keys
from gateway.back_pressure import too_many_requests
from gateway.call import Principal
from gateway.errors import PermissionDenied
from gateway.telemetry.request_log import RequestLog

COUNTED = "paddock.counted_key"
"""Key of the ASGI scope for the API key that the request is counted for."""

NOBODY = Principal("", "", frozenset(), admin=False)
"""The caller of a route that was called without an API key."""

STARTS_PER_TURN = 4
"""Requests of a team that begin in one turn of the event loop: each takes a tenth of a millisecond of it or more."""


class TeamStarts:
    """Lets a few requests of each team begin per turn of the event loop, so that a crowd delays nobody else."""

    def __init__(self, per_turn: int = STARTS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._begun: Counter[str] = Counter()
        """Requests that have begun in this turn of the loop, by team."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def start(self, team: str) -> None:
        """Wait until the request may begin; most need not wait."""
        if team not in self._waiting and self._begun[team] < self._per_turn:
            if not self._begun:
                asyncio.get_running_loop().call_soon(self._turn)
            self._begun[team] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(team, deque()).append(turn)
        await turn

    def _turn(self) -> None:
        self._begun.clear()
        for team, waiting in list(self._waiting.items()):
            while waiting and self._begun[team] < self._per_turn:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    self._begun[team] += 1
            if not waiting:
                del self._waiting[team]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._turn)


class Access(Enum):
    """The kinds of access to a route: each says what its caller needs."""

    OPEN = "nothing"
    KEY = "an API key"
    ADMIN = "an admin's API key"


OPEN, KEY, ADMIN = Access


class RouteToken(NamedTuple):
    """A token that opens one route; beside it an admin's API key does, and nothing else."""

    token: str
    refusal: str
    """What callers with another API key are told."""


class AccessControl:
    """Identifies callers. Counts requests under way by key, WebSockets among them: each has a connection, and other
    keys need some.
    """

    def __init__(
        self, keys: Keys, most_per_key: int = sys.maxsize, tokens: Mapping[str, RouteToken] | None = None
    ) -> None:
        """`most_per_key`: requests of one key that may be under way. `tokens`: those of routes, by path."""
        self._keys = keys
        self._most_per_key = most_per_key
        self._tokens = tokens or {}
        self._under_way: Counter[str] = Counter()
        self.starts = TeamStarts()

    def authenticate(self, scope: Scope) -> Principal:
        """Return the holder of the API key in the headers. Raises AuthenticationFailed."""
        return self._keys.authenticate(scope["headers"])

    async def identify(self, scope: Scope, request_log: RequestLog, access: Access) -> Principal:
        """Return the caller of a route when the request may begin, and name them in its log. Call `end` in any case.

        Raises AuthenticationFailed, PermissionDenied, TooManyRequests.
        """
        if access is not KEY:
            if (token := self._tokens.get(scope["path"])) is not None:
                return self._holder(scope, token)
            if access is OPEN:
                return NOBODY
        principal = self._keys.authenticate(scope["headers"])
        request_log.asked_by(principal)
        self._begin(scope, principal.key_id)
        await self.starts.start(principal.team)
        if access is ADMIN and not principal.admin:
            raise PermissionDenied(
                f"Only an admin's API key may call {scope['method']} {scope['path']}. Ask the operator."
            )
        return principal

    def end(self, scope: Scope) -> None:
        """Stop counting a request, if it was counted."""
        key_id = scope.get(COUNTED)
        if key_id is None:
            return
        self._under_way[key_id] -= 1
        if not self._under_way[key_id]:
            del self._under_way[key_id]

    def _begin(self, scope: Scope, key_id: str) -> None:
        if self._under_way[key_id] >= self._most_per_key:
            raise too_many_requests(self._most_per_key)
        scope[COUNTED] = key_id
        self._under_way[key_id] += 1

    def _holder(self, scope: Scope, token: RouteToken) -> Principal:
        """Return NOBODY for a request with the route's token, else the admin who sent it; neither is counted."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, b"Bearer " + token.token.encode()):
            return NOBODY
        principal = self.authenticate(scope)
        if not principal.admin:
            raise PermissionDenied(token.refusal)
        return principal
