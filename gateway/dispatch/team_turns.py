"""Limits how many calls do something at once, such as hashing a long prompt, and shares the turns among teams."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque


class TeamTurns:
    """Gives turns to a few callers at a time, like a semaphore; the waiting teams are served one after the other.

    By default one team can hold at most all turns but one, so that other teams need not wait for its slowest turn."""

    def __init__(self, at_once: int = 1, per_team: int | None = None) -> None:
        """`at_once`: maximum turns at a time; `per_team`: maximum of one team; None: `at_once` - 1, at least 1."""
        self._num_free = at_once
        self._per_team = max(1, at_once - 1) if per_team is None else per_team
        self._num_in: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by team; the team whose turn is next comes first."""

    @classmethod
    def of_each(cls, per_team: int) -> TeamTurns:
        """Return turns that are limited to `per_team` for each team, with no limit for all teams together."""
        return cls(sys.maxsize, per_team)

    async def enter(self, team: str) -> Turn:
        """Wait for a turn and return it. The caller must call the turn's `leave`; a second `leave` has no effect."""
        await self.take(team)
        return Turn(self, team)

    async def take(self, team: str) -> None:
        """Wait for a turn. The caller must call `give_back` at its end, but not if the wait was cancelled."""
        if self._num_free and team not in self._waiting and self._num_in[team] < self._per_team:
            self._enter(team)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(team, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(team)
            raise

    def give_back(self, team: str) -> None:
        """Give a turn back, and give it to the first waiter of the next team."""
        self._num_free += 1
        self._num_in[team] -= 1
        if not self._num_in[team]:
            del self._num_in[team]
        while self._num_free:
            next_one = next((one for one in self._waiting if self._num_in[one] < self._per_team), None)
            if next_one is None:
                return
            turns = self._waiting.pop(next_one)
            turn = turns.popleft()
            if turns:
                self._waiting[next_one] = turns
            if not turn.done():
                self._enter(next_one)
                turn.set_result(None)

    def _enter(self, team: str) -> None:
        self._num_free -= 1
        self._num_in[team] += 1


class Turn:
    """A turn that was taken. Several parts of a call can give it back; only the first time counts."""

    __slots__ = ("_team", "_turns")

    def __init__(self, turns: TeamTurns, team: str) -> None:
        self._turns: TeamTurns | None = turns
        self._team = team

    def leave(self) -> None:
        """Give the turn back. Only the first call has an effect."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.give_back(self._team)
