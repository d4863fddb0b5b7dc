"""Access control: identifies a request's caller before the route's handler runs, and limits how many requests each key
has under way.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum
from time import monotonic, thread_time
from typing import NamedTuple

from starlette.types import Scope

from gateway.access.cookies import credential_of
from gateway.access.keys import Keys
from gateway.access.tokens import Tokens
from gateway.back_pressure import too_many_requests
from gateway.call import Principal
from gateway.errors import PermissionDenied
from gateway.telemetry.request_log import RequestLog

COUNTED = "paddock.counted_key"
"""Key of the ASGI scope. Its value is the id of the API key for which the request is counted as under way."""

NOBODY = Principal("", "", frozenset(), admin=False)
"""The caller of a request that needs no API key."""

STARTS_PER_TURN = 4
"""Maximum number of a team's requests that begin per turn of the event loop; others wait. Each takes 0.1 ms or more."""


LONG_TURN_S = 0.002
"""Processor seconds of a turn after which fewer requests of each team begin in the next, down to one."""
REST_FACTOR, MAX_REST_S = 2.0, 0.05
"""Length of the pause of a waiting team after a long turn, while other teams ask, as a multiple of the seconds that the
turn took; and its maximum."""
CONTESTED_S = 1.0
"""Seconds for which several teams count as asking after two of them asked in turn."""


class TeamStarts:
    """Lets a few requests of each team begin per turn of the event loop, so that no team's burst delays the others.

    Reading a body can take milliseconds, and hundreds of them came at once. So the number of starts falls while turns
    take long, and a team that waits rests after a long turn while other teams ask."""

    def __init__(self, per_turn: int = STARTS_PER_TURN) -> None:
        self._most = self._per_turn = per_turn
        self._begun: Counter[str] = Counter()
        """Requests that have begun in this turn of the loop, by team."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last_team = ""
        self._contested_until = 0.0
        """time.monotonic() until which more than one team counts as asking."""
        self._rest_until: dict[str, float] = {}
        """Team whose waiting requests rest -> time.monotonic() until then."""
        self._turn_began: float | None = None
        """thread_time() when this turn began; None: nothing began in the last one."""
        self._next: asyncio.Handle | None = None
        """The callback that begins the next turn."""

    async def start(self, team: str) -> None:
        """Wait until a request of the team may begin: at most a few begin in one turn of the event loop."""
        if team != self._last_team:
            if self._last_team:
                self._contested_until = monotonic() + CONTESTED_S
            self._last_team = team
        if team not in self._waiting and self._begun[team] < self._most:
            self._turn_soon()
            self._begun[team] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(team, deque()).append(turn)
        await turn

    def _turn_soon(self) -> None:
        if self._turn_began is None:
            if self._next is not None:
                self._next.cancel()
            self._turn_began = thread_time()
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        now = monotonic()
        self._next = None
        if self._turn_began is not None:
            self._learn(thread_time() - self._turn_began, now)
            self._turn_began = None
        self._begun.clear()
        self._rest_until = {team: until for team, until in self._rest_until.items() if until > now}
        for team, waiting in list(self._waiting.items()):
            while waiting and self._begun[team] < self._per_turn and team not in self._rest_until:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    self._begun[team] += 1
            if not waiting:
                del self._waiting[team]
        if self._begun:
            self._turn_soon()
        elif self._waiting:
            rest_s = min(self._rest_until.values()) - now
            self._next = asyncio.get_running_loop().call_later(rest_s, self._turn)

    def _learn(self, took_s: float, now: float) -> None:
        """Adapt the number of starts to what the last turn took; let teams rest that began half of its requests."""
        if took_s <= LONG_TURN_S:
            self._per_turn = min(self._most, self._per_turn + 1)
            return
        self._per_turn = max(1, self._per_turn // 2)
        if now < self._contested_until:
            until, total = now + min(REST_FACTOR * took_s, MAX_REST_S), self._begun.total()
            for team, num_begun in self._begun.items():
                if team in self._waiting and 2 * num_begun >= total:
                    self._rest_until[team] = until


class Access(Enum):
    """The access that a route requires of its caller: nothing, an API key, or an admin's API key."""

    OPEN = "nothing"
    KEY = "an API key"
    ADMIN = "an admin's API key"


OPEN, KEY, ADMIN = Access


class RouteToken(NamedTuple):
    """A token that opens one route. An admin's API key opens the route as well; other keys do not."""

    token: str
    refusal: str
    """Error message for callers whose API key is no admin's."""


class AccessControl:
    """Identifies callers, and limits each key's requests under way, WebSockets included, so that one key can't take all
    connections."""

    def __init__(
        self,
        keys: Keys,
        most_per_key: int = sys.maxsize,
        tokens: Mapping[str, RouteToken] | None = None,
        people: Tokens | None = None,
    ) -> None:
        """`most_per_key`: maximum requests of one key under way; more are refused. `tokens`: path -> route's token.
        `people`: authenticates tokens of identity providers; None: there are none."""
        self._keys = keys
        self._most_per_key = most_per_key
        self._tokens = tokens or {}
        self._people = people
        self._under_way: Counter[str] = Counter()
        self.starts = TeamStarts()

    def authenticate(self, scope: Scope) -> Principal:
        """Return the holder of the API key, token or session cookie in the headers.

        Raises AuthenticationFailed, PermissionDenied, ProviderUnavailable."""
        key = credential_of(scope)
        if self._people is not None and self._people.takes(key):
            return self._people.authenticate(key)
        return self._keys.holder_of(key)

    async def identify(self, scope: Scope, request_log: RequestLog, access: Access) -> Principal:
        """Return the request's caller. If that takes an API key, note the caller in the request's log, and wait until
        the request may begin. Call `end` when the request is over, even if this raised an error.

        Raises AuthenticationFailed, PermissionDenied, ProviderUnavailable, TooManyRequests."""
        if access is not KEY:
            if (token := self._tokens.get(scope["path"])) is not None:
                return self._holder(scope, token)
            if access is OPEN:
                return NOBODY
        if self._people is not None:
            await self._people.prepare(credential_of(scope))
        principal = self.authenticate(scope)
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
        """Return NOBODY if the request has the route's token, else the admin whose API key it has. Such requests do not
        count as under way."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, b"Bearer " + token.token.encode()):
            return NOBODY
        principal = self.authenticate(scope)
        if not principal.admin:
            raise PermissionDenied(token.refusal)
        return principal
