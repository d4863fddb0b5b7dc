"""Identifies the caller, with which nearly every route begins, and bounds the requests of one key under way."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from starlette.types import Scope

from gateway.access.keys import Keys
from gateway.api.diagnostics import trail_of
from gateway.call import Principal
from gateway.errors import TooManyRequests
from gateway.telemetry.trail import Trail

KEY_REQUESTS, COUNTED = "paddock.key_requests", "paddock.counted_key"
"""Keys of the ASGI scope: the requests under way of all keys, and the key that this one is counted for."""
RETRY_S = 1.0

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


class KeyRequests:
    """Counts requests under way by key, WebSockets among them: each has a connection, and other keys need some."""

    def __init__(self, most: int) -> None:
        """`most`: requests of one key that may be under way."""
        self._most = most
        self._under_way: Counter[str] = Counter()
        self.starts = TeamStarts()

    def begin(self, scope: Scope, principal: Principal) -> None:
        """Count a request until `end`, once. Raises TooManyRequests."""
        if COUNTED in scope:
            return
        if self._under_way[principal.key_id] >= self._most:
            raise TooManyRequests(
                f"This key has {self._most} requests under way here. Wait for some to end; an operator may raise "
                "PADDOCK_KEY_SHARE.",
                retry_after_s=RETRY_S,
            )
        scope[COUNTED] = principal.key_id
        self._under_way[principal.key_id] += 1

    def end(self, scope: Scope) -> None:
        """Stop counting a request, if it was counted."""
        key_id = scope.get(COUNTED)
        if key_id is None:
            return
        self._under_way[key_id] -= 1
        if not self._under_way[key_id]:
            del self._under_way[key_id]


async def identified(keys: Keys, scope: Scope) -> tuple[Principal, Trail]:
    """Return the holder of the request's key, and the trail, which names the holder now, when the request may begin.

    Raises AuthenticationFailed, TooManyRequests.
    """
    trail = trail_of(scope)
    principal = keys.authenticate(scope["headers"])
    trail.asked_by(principal)
    if KEY_REQUESTS in scope:
        scope[KEY_REQUESTS].begin(scope, principal)
    await begin_in_turn(scope, principal)
    return principal, trail


async def begin_in_turn(scope: Scope, principal: Principal) -> None:
    """Wait until a request of the principal's team may begin, or a message that came over its WebSocket."""
    if KEY_REQUESTS in scope:
        requests: KeyRequests = scope[KEY_REQUESTS]
        await requests.starts.start(principal.team)
