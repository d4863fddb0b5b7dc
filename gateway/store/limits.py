"""The scripts about limits as typed methods: what calls count for in Redis (`lua/limits.lua`). Numbers of tokens and
requests are sums over the last minute; money is in billionths of the currency's unit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from gateway.store.outage import reading
from gateway.store.scripts import ScriptSender, load_limits_script
from workers.protocol import keys

TICK_MS = 250
WINDOW_TICKS = 240
WINDOW_S = (WINDOW_TICKS + 1) * TICK_MS / 1000
"""Seconds after which a request surely no longer counts for a limit per minute."""
ROUND_S = 1.0
"""Seconds for which no calls are admitted while gateways report, at most."""
ANSWER_TIMEOUT_S = 1.0
"""Seconds within which Redis must reply: calls wait meanwhile."""

REFUSED, ADMITTED, REPORTING, BEGIN_ANEW, RAN_BEFORE, UNREADABLE = range(6)
"""First element of each answer to a numbered message."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to `LimitStore.begin`."""

    born: str
    """Changes whenever Redis has lost counters."""
    number: int
    """Number of the last message of this process that was run."""
    outcomes: Mapping[int, int]
    """Message without an answer that was run -> the tick in which its call was admitted; 0: in none. Only the latest.
    """
    held: frozenset[str]
    """Subjects with calls under way at this process, as far as Redis has counted."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a gateway process reports of one subject."""

    name: str
    calls: str
    """Calls under way: `=n`, or n more than before."""
    known: str
    """`tick requests tokens`: the window when this process last heard of it; empty: not told."""
    window: str
    """`tick requests tokens ...`: what to add to the window."""
    periods: Sequence[tuple[str, int, int, int]] = ()
    """Field, begin of the period, what was counted in it when last heard of, what to add."""

    def row(self) -> tuple[str | int, ...]:
        periods = [value for period in self.periods for value in period]
        return (self.name, self.calls, self.known, self.window, len(self.periods), *periods)


@dataclass(frozen=True, slots=True)
class Used:
    """The counters of one subject, as read from Redis."""

    requests: int
    tokens: int
    calls: int
    periods: Mapping[str, tuple[int, int]]
    """Field -> begin of the period, and what was counted in it."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to `LimitStore.pulse`."""

    now_ms: int
    silent_ms: Mapping[str, int]
    """Id of each gateway process that is alive -> ms since its last sign of life."""
    used: Mapping[str, Used]
    """Subject -> its counters, of those that were used since."""
    until_ms: int
    """Redis's time up to which `used` is told."""


class LimitStore:
    """Runs the scripts about limits, in the order in which they are called. Futures and methods fail with
    StoreUnavailable if Redis is away."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        process: str,
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        ttl_s: float = keys.LIMITS_TTL_S,
        round_s: float = ROUND_S,
        took: Callable[[float, str], None] | None = None,
    ) -> None:
        """`process`: id of this gateway process, a new one at each start. `ttl_s`: seconds without a pulse after which
        a process's calls are over. `took` as in `ScriptSender`."""
        self.process = process
        self._ttl_ms, self._round_ms = round(ttl_s * 1000), round(round_s * 1000)
        self._reserve = load_limits_script("reserve", "limits_merge", numbered=True)
        self._settle = load_limits_script("settle", numbered=True)
        self._tell = load_limits_script("limits_tell", "limits_merge", numbered=True)
        self._begin = load_limits_script("limits_begin")
        self._pulse = load_limits_script("limits_pulse")
        scripts = (self._reserve, self._settle, self._tell, self._begin, self._pulse)
        self._pipe = ScriptSender(redis, scripts, timeout_s, took)

    def reserve(self, epoch: str, number: int, *arguments: str | int) -> asyncio.Future[Any]:
        """Count a call for its subjects if their limits have room. `arguments` and answer as in `lua/reserve.lua`."""
        return self._pipe.send(self._reserve, keys.LIMITS, self.process, epoch, number, *arguments)

    def settle(self, epoch: str, number: int, *arguments: str | int) -> asyncio.Future[Any]:
        """Correct what a call was counted for, and end it. `arguments` as in `lua/settle.lua`."""
        return self._pipe.send(self._settle, keys.LIMITS, self.process, epoch, number, *arguments)

    def tell(
        self, epoch: str, number: int, reports: Iterable[Report], *, ends: bool, all_known: bool
    ) -> asyncio.Future[Any]:
        """Count what was admitted without Redis. `ends`: whether this completes the report of the present round;
        `all_known`: whether it is all that this process knows, since Redis has lost counters."""
        rows = [value for report in reports for value in report.row()]
        flags = (int(ends), int(all_known))
        return self._pipe.send(self._tell, keys.LIMITS, self.process, epoch, number, *flags, *rows)

    async def begin(self, epoch: str, acked: int, first: int, born: str, *, away: bool, seen: Iterable[str]) -> Begun:
        """Begin to send messages under a new epoch. `acked`: number of the last message that was answered; `first`: of
        the first one that was not; `born`: what this process knows of it; `away`: whether it has been without Redis;
        `seen`: the processes of the last minute."""
        what: list[str | int] = [acked, first, born, int(away), self._round_ms, *seen]
        answer = await self._pipe.send(self._begin, keys.LIMITS, self.process, epoch, *what)
        with reading():
            told_born, number, outcomes, held = answer
            ticks = dict(zip(outcomes[::2], outcomes[1::2], strict=True))
            return Begun(told_born.decode(), number, ticks, frozenset(name.decode() for name in held))

    async def pulse(self, epoch: str, since_ms: int, used: Iterable[str]) -> Pulse | None:
        """Show that this process is alive. `used`: the subjects of its calls since the last pulse, each as
        `with_fields` returns it. Return None if it must begin anew."""
        what: list[str | int] = [since_ms, self._ttl_ms, *used]
        answer = await self._pipe.send(self._pulse, keys.LIMITS, self.process, epoch, *what)
        with reading():
            return _pulse(answer) if answer else None

    async def leave(self, epoch: str) -> None:
        """End this process's calls, and take it off the list of gateways."""
        await self._pipe.send(self._pulse, keys.LIMITS, self.process, epoch, "", self._ttl_ms)

    async def close(self) -> None:
        """Wait until every script call sent has its answer."""
        await self._pipe.close()


def with_fields(name: str, fields: Iterable[str]) -> str:
    """Return a subject's name with the fields of its budgets, as a pulse tells it."""
    return "\n".join([name, *fields])


def _pulse(answer: Any) -> Pulse:
    now_ms, gateways, told = answer
    silent_ms = {id.decode(): int(ms) for id, ms in zip(gateways[::2], gateways[1::2], strict=True)}
    used, until_ms = dict[str, Used](), now_ms
    for when, name, values in _rows(told):
        used[name], until_ms = values, when
    return Pulse(now_ms, silent_ms, used, until_ms)


def _rows(told: Sequence[Any]) -> Iterator[tuple[int, str, Used]]:
    at = 0
    while at < len(told):
        name, *fields = told[at + 1].decode().split("\n")
        window, calls, *periods = told[at + 2 : at + 6 + len(fields)]
        counted = {}
        for field, value in zip(("d", "m", *fields), periods, strict=True):
            if value:
                begin, amount = value.split()
                counted[field] = (int(begin), int(amount))
        sums = window.split()
        requests, tokens = (int(sums[1]), int(sums[2])) if sums else (0, 0)
        yield told[at], name, Used(requests, tokens, int(calls.split()[1]) if calls else 0, counted)
        at += 6 + len(fields)
