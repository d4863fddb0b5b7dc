"""Keeps one gateway process's limits in step with Redis: signs of life, what others use, and what Redis must be told.

A round of reports, in which Redis admits no calls, follows each of its outages: see `lua/limits_begin.lua`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

from gateway.errors import StoreUnavailable
from gateway.limits.counts import SubjectCounts, Telling, tell
from gateway.limits.limiter import RateLimits
from gateway.limits.messages import NOT_RUN, Message
from gateway.limits.share import GatewayShare
from gateway.store.limits import WINDOW_S, LimitStore, Pulse, with_fields
from gateway.store.outage import Outage, raise_if_cancelled
from workers.process.ticks import wait_tick
from workers.protocol import keys

log = logging.getLogger(__name__)

RETRY_S = 0.1
"""Seconds between two attempts to begin anew."""
MOST_USED = 1000
"""Maximum number of subjects that one pulse tells of; the others follow with the next."""
CHUNK_CHARS = 32 << 10
"""Characters of reports that are told together: longer messages would overtake others (`ScriptSender`)."""
SWEPT = 500
"""Number of subjects that are looked at per pulse, whether they are still worth keeping."""
MOST_KEPT = 200_000
"""Number of subjects beyond which those that were not used in the last minute are forgotten, with what they have used
of days and months: without Redis, their calls would be refused."""


class LimitSync:
    """Runs beside `RateLimits`, on the same event loop."""

    def __init__(self, limits: RateLimits, store: LimitStore, pulse_s: float = keys.LIMITS_PULSE_S) -> None:
        self._limits = limits
        self._messages = limits.messages
        self._store = store
        self._pulse_s = pulse_s
        self._wake = asyncio.Event()
        self._since_ms = 0
        self._seen: dict[str, float] = {}
        """Gateway process -> time.monotonic() when it was last alive, of the last minute."""
        self._sweep: Iterator[SubjectCounts] = iter(())
        self._is_over = False
        limits.on_lost = self._wake.set

    async def run(self) -> None:
        """Keep in step until cancelled."""
        outage = Outage(
            "limits can't be counted in Redis",
            "admitting this gateway's share of what is left",
            "limits are counted in Redis again",
        )
        while not self._is_over:
            self._wake.clear()
            with outage.survive():
                await self._keep_up()
            raise_if_cancelled()
            if self._messages.ready:
                await wait_tick(self._pulse_s, self._wake)
            else:
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Tell Redis what is untold, and end this process's calls there. Raises nothing if Redis is away."""
        self._is_over = True
        with suppress(StoreUnavailable):
            if self._messages.ready:
                await self._tell_rest()
                await self._store.leave(self._messages.epoch)
        await self._store.close()

    async def _keep_up(self) -> None:
        if not self._messages.ready and not await self._begin():
            return
        await self._tell_rest()
        used = dict(islice(self._limits.used.items(), MOST_USED))
        try:
            told = [with_fields(name, fields) for name, fields in used.items()]
            pulse = await self._store.pulse(self._messages.epoch, self._since_ms, told)
        except StoreUnavailable:
            self._messages.lose(away=True)
            raise
        if pulse is None:
            self._messages.lose()
            return
        for name in used:
            self._limits.used.pop(name, None)
        self._hear(pulse)

    async def _begin(self) -> bool:
        """Begin to send messages, and report. Return whether Redis takes them now."""
        now = monotonic()
        seen = [process for process, at in self._seen.items() if now - at < WINDOW_S]
        begun, has_lost = await self._messages.begin(seen)
        if has_lost:
            log.warning("Redis has lost what was counted for limits; reporting what this gateway has admitted")
        known = self._limits.counts
        for name in begun.held:
            if name not in known:
                known[name] = SubjectCounts(name)
        tick = self._limits.clock.tick
        concerned = [one for one in known.values() if has_lost or one.has_untold or one.calls or one.name in begun.held]
        concerned = list(dict.fromkeys([*concerned, *self._limits.untold]))
        tellings = [tell(one, tick, all_known=has_lost, anew=True) for one in concerned]
        self._limits.untold.clear()
        if not await self._tell(tellings, ends=True, all_known=has_lost):
            return False
        self._messages.ready = True
        self._limits.ask_waiting()
        return True

    async def _tell_rest(self) -> None:
        """Tell Redis what was counted without it since the report."""
        untold, self._limits.untold = self._limits.untold, {}
        if untold:
            tick = self._limits.clock.tick
            await self._tell([tell(one, tick, all_known=False, anew=False) for one in untold], ends=False)

    async def _tell(self, tellings: Sequence[Telling], *, ends: bool, all_known: bool = False) -> bool:
        """Tell Redis, in several messages if it is much. Return whether it has taken all."""
        chunks = list(_chunks(tellings)) or [[]]
        for number, chunk in enumerate(chunks):
            message = Message(0, partial(_told, chunk), partial(_found, self._limits, chunk))
            reports, is_last = [one.report for one in chunk], number == len(chunks) - 1
            if not (chunk or ends):
                continue
            if not await self._messages.tell(reports, message, ends=ends and is_last, all_known=all_known):
                for one in (one for rest in chunks[number + 1 :] for one in rest):
                    one.failed()
                    self._limits.untold[one.counts] = None
                return False
        return True

    def _hear(self, pulse: Pulse) -> None:
        limits, now = self._limits, monotonic()
        limits.clock.set(pulse.now_ms)
        limits.heard_at, self._since_ms = now, pulse.until_ms
        ids = sorted(pulse.silent_ms)
        if self._store.process in ids:
            limits.share = GatewayShare(ids.index(self._store.process), len(ids))
        self._seen = {process: at for process, at in self._seen.items() if now - at < WINDOW_S}
        self._seen |= {process: now - ms / 1000 for process, ms in pulse.silent_ms.items()}
        tick = limits.clock.tick
        for name, used in pulse.used.items():
            counts = limits.counts.get(name) or limits.counts.setdefault(name, SubjectCounts(name))
            counts.hear(tick, now, used.requests, used.tokens, used.calls)
            counts.periods.update(used.periods)
        self._forget_idle(tick, now)

    def _forget_idle(self, tick: int, now: float) -> None:
        """Forget subjects that nothing is known of any more, a few at a time."""
        counts = self._limits.counts
        batch = list(islice(self._sweep, SWEPT))
        if not batch:
            self._sweep = iter(list(counts.values()))
        for one in batch:
            if len(counts) > MOST_KEPT and not one.calls and not one.has_untold and now - one.heard_at > WINDOW_S:
                one.periods.clear()
            if one.is_idle(tick, now) and counts.get(one.name) is one:
                del counts[one.name]


def _told(chunk: Iterable[Telling], answer: list[Any]) -> None:
    for one in chunk:
        one.done()


def _found(limits: RateLimits, chunk: Iterable[Telling], outcome: int) -> None:
    """Note what became of reports whose answer was lost."""
    for one in chunk:
        if outcome == NOT_RUN:
            one.failed()
            limits.untold[one.counts] = None
        else:
            one.done()


def _chunks(tellings: Iterable[Telling]) -> Iterator[list[Telling]]:
    chunk, num_chars = list[Telling](), 0
    for one in tellings:
        chunk.append(one)
        num_chars += len(one.report.window) + len(one.report.name) + 64 * (1 + len(one.report.periods))
        if num_chars > CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk
