"""How a request's body comes in: read within the bounds of its caller, checked, decoded, and counted until it is over.

async with intake.opened(principal, scope, receive) as body:
    asked = await body.decoded(dialect.read)        # large ones away from the event loop
    ...                                             # its memory is reserved until here
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope

from gateway.api.body import declared_bytes, read_body
from gateway.api.body_bounds import UNCHECKED_BYTES, UNCHECKED_FACTOR, check_shape
from gateway.api.decoding import INLINE_BYTES, INLINE_STRINGS, DecodingLane
from gateway.api.memory_budget import MemoryBudget, Reservation
from gateway.call import Principal

RESERVATION = "paddock.reservation"
"""Where the ASGI scope has what the request holds of the memory budget."""

SMALL_BODY_BYTES = 256 << 10
"""Of requests that name things and hold no prompt."""

AskedT = TypeVar("AskedT")
PartT = TypeVar("PartT")


class Intake:
    """Takes in every body of this gateway process."""

    def __init__(
        self, max_body_bytes: int, budget: MemoryBudget, lane: DecodingLane, longest_context: Callable[[], int]
    ) -> None:
        """`longest_context`: tokens, of all models that are served now; 0: not known."""
        self.max_body_bytes = max_body_bytes
        self._budget = budget
        self._lane = lane
        self._longest_context = longest_context

    @asynccontextmanager
    async def opened(self, principal: Principal, scope: Scope, receive: Receive) -> AsyncIterator[Body]:
        """Read a request's body. Raises BodyTooLarge, BodyTooSlow, HeldTooMuch, MemoryFull, ClientGone."""
        reservation = self._budget.reserve(principal)
        scope[RESERVATION] = reservation
        try:
            # What is declared may never come: it is the caller's own share that waits for it.
            declared = declared_bytes(scope)
            if declared <= UNCHECKED_BYTES:
                reservation.resize(UNCHECKED_FACTOR * declared)
            elif declared <= self.max_body_bytes:
                reservation.resize(declared)
            raw = await read_body(scope, receive, self.max_body_bytes, grown=reservation.grow)
            body = Body(raw, reservation, self)
            del raw
            yield body
        finally:
            reservation.close()
            if reservation.num_bytes > INLINE_BYTES:
                self._lane.tidy()

    async def small(self, scope: Scope, receive: Receive, read: Callable[[bytes], AskedT]) -> AskedT:
        """Read a body that holds no prompt. Raises BodyTooLarge, BodyTooSlow, ClientGone and what `read` raises."""
        raw = await read_body(scope, receive, min(SMALL_BODY_BYTES, self.max_body_bytes))
        check_shape(raw, 0)
        return read(raw)

    def message(self, principal: Principal, raw: bytes) -> Body:
        """Take in what came another way than as a body, or nothing by those who only load what is kept.

        Close it in any case. Raises HeldTooMuch, MemoryFull.
        """
        reservation = self._budget.reserve(principal)
        reservation.resize(len(raw))
        return Body(raw, reservation, self)

    async def decoded(self, raw: bytes, reservation: Reservation, read: Callable[[bytes], AskedT]) -> AskedT:
        if len(raw) <= UNCHECKED_BYTES:  # as nearly always, and there may be a thousand workers to ask for contexts
            asked = read(raw)
            reservation.resize(UNCHECKED_FACTOR * len(raw))
            return asked
        max_items = self._longest_context()
        if len(raw) <= INLINE_BYTES:
            shape = check_shape(raw, max_items)
            if shape.num_strings <= INLINE_STRINGS:
                asked = read(raw)
                reservation.resize(shape.held_bytes)
                return asked
        asked, held_bytes = await self._lane.run(reservation.team, partial(_read, raw, max_items, read))
        reservation.resize(held_bytes)
        return asked

    async def aside(self, num_bytes: int, team: str, work: Callable[[], AskedT]) -> AskedT:
        """Return what `work` returns, on a thread where it is about that many bytes and those are many."""
        return await self._lane.run(team, work) if num_bytes > INLINE_BYTES else work()


class Body:
    """One that has been read."""

    __slots__ = ("_intake", "_reservation", "raw")

    def __init__(self, raw: bytes, reservation: Reservation, intake: Intake) -> None:
        self.raw = raw
        """Empty once it is decoded."""
        self._reservation = reservation
        self._intake = intake

    @property
    def team(self) -> str:
        """Return the team that asks."""
        return self._reservation.team

    def close(self) -> None:
        """It is over."""
        self._reservation.close()

    def holds(self, num_bytes: int) -> None:
        """Its answer takes so many more. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""
        self._reservation.resize(self._reservation.num_bytes + num_bytes)

    def holds_at_least(self, num_bytes: int) -> None:
        """It takes so many in all, if not more. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""
        self._reservation.grow(num_bytes)

    async def aside(self, num_bytes: int, work: Callable[[], AskedT]) -> AskedT:
        """Return what `work` returns, on a thread where it is about that many bytes and those are many."""
        return await self._intake.aside(num_bytes, self.team, work)

    async def decoded(self, read: Callable[[bytes], AskedT]) -> AskedT:
        """Return what `read` makes of it; raises what that raises, InvalidRequest, HeldTooMuch and MemoryFull."""
        raw, self.raw = self.raw, b""
        return await self._intake.decoded(raw, self._reservation, read)


def held_while(scope: Scope, work: Callable[[PartT], Awaitable[None]]) -> Callable[[PartT], Awaitable[None]]:
    """Return the same work, during which what the request holds stays counted, with or without its connection."""
    reservation: Reservation = scope[RESERVATION]

    async def counted(part: PartT) -> None:
        with reservation.shared():
            await work(part)

    return counted


def _read(raw: bytes, max_items: int, read: Callable[[bytes], AskedT]) -> tuple[AskedT, int]:
    shape = check_shape(raw, max_items)
    return read(raw), shape.held_bytes
