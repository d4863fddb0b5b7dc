"""Sends this process's numbered messages about limits to Redis, and finds out what became of those whose answers were
lost (`lua/limits.lua`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from gateway.errors import StoreUnavailable
from gateway.store.limits import BEGIN_ANEW, Begun, LimitStore, Report

NOT_RUN, RAN_UNKNOWN = -2, -1
"""What became of a message besides the tick of its call (0: it was not admitted): Redis has not run it, or has run it
long ago and forgotten the tick."""


@dataclass(slots=True, eq=False)
class Message:
    """A message without an answer."""

    number: int
    answered: Callable[[list[Any]], None]
    """Called with Redis's answer."""
    found: Callable[[int], None]
    """Called in place of `answered` if the answer was lost, with what became of the message."""


class Messages:
    """The messages of one gateway process. They are sent while Redis takes them (`ready`); `begin` makes it so."""

    def __init__(self, store: LimitStore, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called when Redis does not take this process's messages any more."""
        self._store = store
        self._on_lost = on_lost
        self._epoch = ""
        self._number = self._acked = 0
        self._pending: dict[int, Message] = {}
        self.born = ""
        """Changes whenever Redis has lost counters; empty: not known yet."""
        self.ready = False
        self.away_since = 0.0
        """time.monotonic() since which Redis has not answered; 0: it answered last time."""
        self._was_away = False

    @property
    def epoch(self) -> str:
        return self._epoch

    def reserve(self, arguments: Iterable[str | int], message: Message) -> None:
        self._send(self._store.reserve(self._epoch, self._next(message), *arguments), message)

    def settle(self, arguments: Iterable[str | int], message: Message) -> None:
        self._send(self._store.settle(self._epoch, self._next(message), *arguments), message)

    async def tell(self, reports: Iterable[Report], message: Message, *, ends: bool, all_known: bool) -> bool:
        """Tell Redis what it lacks. Return whether it has taken it; if not, begin anew, and tell what it has not run.

        `ends` and `all_known` as in `LimitStore.tell`."""
        number = self._next(message)
        answer = self._store.tell(self._epoch, number, reports, ends=ends, all_known=all_known)
        self._send(answer, message)
        await asyncio.wait({answer})
        return number not in self._pending

    def lose(self, *, away: bool = False) -> None:
        """Send nothing until another `begin`. `away`: Redis did not answer."""
        if away:
            self._was_away = True
            self.away_since = self.away_since or monotonic()
        if self.ready:
            self.ready = False
            self._on_lost()

    async def begin(self, seen: Iterable[str]) -> tuple[Begun, bool]:
        """Begin a new epoch, and find out what became of the messages without answers. Return Redis's answer, and
        whether it has lost counters. What is untold must be told next. Raises StoreUnavailable.

        `seen`: the gateway processes of the last minute."""
        epoch = secrets.token_hex(6)
        away = self._was_away
        try:
            first = min(self._pending, default=self._acked + 1)
            begun = await self._store.begin(epoch, self._acked, first, self.born, away=away, seen=seen)
        except StoreUnavailable:
            self.lose(away=True)
            raise
        has_lost = bool(self.born) and begun.born != self.born
        pending, self._pending = self._pending, {}
        self._acked = begun.number
        self._epoch, self._number, self.born = epoch, begun.number, begun.born
        self.away_since, self._was_away = 0.0, False
        for message in pending.values():
            has_run = not has_lost and message.number <= begun.number
            message.found(begun.outcomes.get(message.number, RAN_UNKNOWN) if has_run else NOT_RUN)
        return begun, has_lost

    def _next(self, message: Message) -> int:
        self._number += 1
        message.number = self._number
        self._pending[message.number] = message
        return message.number

    def _send(self, answer: asyncio.Future[Any], message: Message) -> None:
        answer.add_done_callback(partial(self._note_answer, message))

    def _note_answer(self, message: Message, future: asyncio.Future[Any]) -> None:
        if self._pending.get(message.number) is not message:
            return  # `begin` has found out what became of it
        if future.cancelled() or future.exception() is not None:
            self.lose(away=True)
            return
        answer = future.result()
        if answer[0] == BEGIN_ANEW:
            self.lose()
            return
        self._acked = max(self._acked, message.number)
        del self._pending[message.number]
        message.answered(answer)
