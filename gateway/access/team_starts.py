"""Lets the requests of each team begin a few at a time, so that no team's crowd holds up the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from time import monotonic, thread_time

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
