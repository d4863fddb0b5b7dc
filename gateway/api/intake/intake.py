"""Takes in a request's body: reads, checks and decodes it, and counts the request's memory until the request is over.

async with intake.open_body(principal, scope, receive) as body:
    asked = await body.decode(dialect.read)        # large ones away from the event loop
    ...                                             # its memory is reserved until here
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope

from gateway.api.intake.body import (
    BODY_REMEDY,
    SLICE_BYTES,
    UNCHECKED_BYTES,
    UNCHECKED_FACTOR,
    Shape,
    ShapeCheck,
    declared_bytes,
    read_body,
    slices,
    too_large,
    unchecked_held_bytes,
)
from gateway.api.intake.decoding import INLINE_BYTES, INLINE_NUMBERS, INLINE_STRINGS, DecodingThread
from gateway.api.intake.form import FormReader, boundary_of
from gateway.api.intake.memory_budget import MemoryBudget, Reservation
from gateway.api.media.attachments import DEFAULT_MAX_BYTES, Attachments
from gateway.api.media.sieve import Cut, MediaSieve
from gateway.call import Principal
from gateway.dispatch.team_turns import TeamTurns
from gateway.errors import PaddockError

RESERVATION = "paddock.reservation"
"""Key of the ASGI scope for the request's `Reservation` in the memory budget."""

SMALL_BODY_BYTES = 256 << 10
"""Maximum bytes of a body that has no prompt and only names things; a larger one gets BodyTooLarge."""

LOADS_AT_ONCE = 2
"""Maximum number of long values that requests read from Redis at the same time, one per team at most; others wait."""

ATTACHMENTS = "paddock.attachments"
"""Key of the ASGI scope for the request's `Attachments`, for readers that are handed the scope."""

MEDIA_REMEDY = "Send fewer or smaller pictures and sounds, or have the operator raise PADDOCK_MAX_MEDIA_BODY_MIB."
TEXT_REMEDY = "Send less text, or have the operator raise PADDOCK_MAX_BODY_BYTES; pictures and sounds do not count."

ReadT = TypeVar("ReadT")
PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True)
class MediaBounds:
    """The limits of bodies with pictures and sounds, in bytes."""

    body: int = 32 << 20
    """A whole body, on routes that take media; its text alone has the limit of other bodies."""
    medium: int = DEFAULT_MAX_BYTES
    """One picture or sound."""


class Intake:
    """Takes in every body of this gateway process."""

    def __init__(
        self,
        max_body_bytes: int,
        budget: MemoryBudget,
        decoding: DecodingThread,
        longest_context: Callable[[], int],
        media: MediaBounds = MediaBounds(),
    ) -> None:
        """`longest_context` returns the longest context of all models that are served now, in tokens; 0: not known."""
        self.max_body_bytes = max_body_bytes
        self.media = media
        self._budget = budget
        self._decoding = decoding
        self._longest_context = longest_context
        self._loads = TeamTurns(LOADS_AT_ONCE)

    @asynccontextmanager
    async def open_body(
        self,
        principal: Principal,
        scope: Scope,
        receive: Receive,
        most: int | None = None,
        *,
        takes_media: bool = False,
        is_form: bool = False,
    ) -> AsyncIterator[Body]:
        """Read a request's body of at most `most` bytes (None: `max_body_bytes`), and check it while it comes.
        `takes_media`: files are cut out of it (`MediaSieve`), and do not count for `most`. `is_form`: it is a form with
        a file, and `Body.raw` a JSON object of its fields (`FormReader`).

        Raises BodyTooLarge, BodyTooSlow, InvalidRequest, ContextOverflow, TakesTooMuch, HeldTooMuch, MemoryFull and
        ClientGone."""
        most = self.max_body_bytes if most is None else min(most, self.max_body_bytes)
        has_files = takes_media or is_form
        limit, remedy = (max(most, self.media.body), MEDIA_REMEDY) if has_files else (most, BODY_REMEDY)
        reservation = self._budget.reserve(principal)
        scope[RESERVATION] = reservation
        try:
            # A declared body may never come. So its bytes count against the caller's own share from now on.
            declared = declared_bytes(scope)
            if declared <= UNCHECKED_BYTES:
                reservation.resize(UNCHECKED_FACTOR * declared)
            elif declared <= limit:
                reservation.resize(declared)
            incoming: _IncomingCheck | _IncomingForm
            if is_form:
                incoming = _IncomingForm(self, reservation, FormReader(boundary_of(scope), self.media.medium))
            else:
                incoming = _IncomingCheck(self, reservation, most, MediaSieve() if takes_media else None)
            raw = await read_body(scope, receive, limit, on_part=incoming.add, remedy=remedy)
            raw = incoming.finish(raw)
            body = Body(raw, reservation, self, incoming.shape(), incoming.attachments())
            scope[ATTACHMENTS] = body.attachments
            del raw, incoming
            yield body
        finally:
            self.give_back(reservation)

    async def small(
        self, principal: Principal, scope: Scope, receive: Receive, read: Callable[[bytes], ReadT]
    ) -> ReadT:
        """Return what `read` makes of a small body, and count its memory. Raises what `open_body` and `read` raise."""
        async with self.open_body(principal, scope, receive, SMALL_BODY_BYTES) as body:
            return await body.decode(read)

    def message(self, principal: Principal, raw: bytes) -> Body:
        """Return a `Body` for a WebSocket message or, with empty `raw`, to count the memory of data read from Redis.

        Close it in any case. Raises TakesTooMuch, HeldTooMuch, MemoryFull."""
        reservation = self._budget.reserve(principal)
        reservation.resize(len(raw))
        return Body(raw, reservation, self)

    def give_back(self, reservation: Reservation) -> None:
        """Free a reservation; if it was large, have free memory given back to the system soon."""
        reservation.close()
        if reservation.num_bytes > INLINE_BYTES:
            self._decoding.tidy()

    async def decode(
        self,
        raw: bytes,
        shape: Shape | None,
        reservation: Reservation,
        read: Callable[[bytes], ReadT],
        attachments: Attachments,
    ) -> ReadT:
        """Return what `read` makes of a body. `shape`: how much the body holds; None: it is too short to matter."""
        is_quick = len(raw) <= INLINE_BYTES and _is_quick(shape) and attachments.are_quick
        held_bytes = unchecked_held_bytes(raw) if shape is None else shape.held_bytes
        try:
            asked = read(raw) if is_quick else await self._decoding.run(reservation.team, partial(read, raw))
            if attachments.num_chars_left and len(raw) + attachments.num_chars_left > self.max_body_bytes:
                size = f"{len(raw) + attachments.num_chars_left} bytes of text"
                raise too_large(size, self.max_body_bytes, TEXT_REMEDY)
        except PaddockError:
            # What is no picture or sound may have been missed where a text belongs.
            if not attachments.num_chars_left or len(raw) + attachments.num_chars_left > self.max_body_bytes:
                raise
        else:
            if not attachments.num_chars_left:
                reservation.resize(held_bytes + attachments.num_bytes + attachments.num_text_bytes)
                return asked
            del asked
        held_bytes += attachments.num_chars_left + attachments.num_bytes
        reservation.grow(held_bytes)
        attachments.num_text_bytes = 0
        asked = await self._decoding.run(reservation.team, lambda: read(attachments.restored(raw)))
        reservation.grow(held_bytes + attachments.num_text_bytes)
        return asked

    async def check(self, raw: bytes, reservation: Reservation) -> Shape | None:
        """Check a body that came whole. Return how much it holds; None: it is too short to matter."""
        if len(raw) <= UNCHECKED_BYTES:  # nearly all are
            return None
        incoming = _IncomingCheck(self, reservation, len(raw))
        await incoming.add(raw, len(raw))
        return incoming.shape()

    def attachments(self, cuts: Mapping[str, Cut] | None = None) -> Attachments:
        """Return the files that were cut out of a body, within this gateway's limits."""
        return Attachments(cuts, self.media.medium, self.max_body_bytes)

    def begin_check(self) -> ShapeCheck:
        """Return a check for a long body; short bodies need none. Making one goes through all workers, perhaps 1000."""
        return ShapeCheck(self._longest_context())

    async def run_slice(self, team: str, work: Callable[[], ReadT]) -> ReadT:
        """Run `work` on a slice of a large body, in its team's turn, and return its result. Raises what it raises."""
        return await self._decoding.slice(team, work)

    async def run_aside(self, team: str, work: Callable[[], ReadT]) -> ReadT:
        """Run `work` on a thread, in its team's turn, and return its result."""
        return await self._decoding.run(team, work)

    @asynccontextmanager
    async def load_in_turn(self, num_bytes: int, team: str) -> AsyncIterator[None]:
        """Delay the block until its team may load `num_bytes`; few bytes don't wait. Loads keep the event loop busy."""
        if num_bytes <= INLINE_BYTES:
            yield
            return
        await self._loads.take(team)
        try:
            yield
        finally:
            self._loads.give_back(team)


class Body:
    """A body that has been read, and the memory that its request holds."""

    __slots__ = ("_intake", "_reservation", "_shape", "attachments", "raw")

    def __init__(
        self,
        raw: bytes,
        reservation: Reservation,
        intake: Intake,
        shape: Shape | None = None,
        attachments: Attachments | None = None,
    ) -> None:
        """`shape`: how much the body holds; None: it was not checked while it came in."""
        self.raw = raw
        """The bytes, without the files that were cut out; empty once they are decoded."""
        self.attachments = attachments or intake.attachments()
        """The files that were cut out of the body."""
        self._reservation = reservation
        self._intake = intake
        self._shape = shape

    @property
    def team(self) -> str:
        """Return the team that sent the request."""
        return self._reservation.team

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the request holds of the memory budget."""
        return self._reservation.num_bytes

    def close(self) -> None:
        """Give the memory of the request back, since the request is over."""
        self._intake.give_back(self._reservation)

    def hold(self, num_bytes: int) -> None:
        """Count `num_bytes` more for the answer; negative: fewer. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""
        self._reservation.add(num_bytes)

    def hold_at_least(self, num_bytes: int) -> None:
        """Count at least `num_bytes` for the request in all. Raises HeldTooMuch, MemoryFull, TakesTooMuch."""
        self._reservation.grow(num_bytes)

    async def run_aside(self, num_bytes: int, work: Callable[[], ReadT]) -> ReadT:
        """Run `work` and return its result. `num_bytes`: about how many bytes `work` handles. It runs on a thread if
        these are many, or if the body holds many strings or numbers."""
        if num_bytes <= INLINE_BYTES and _is_quick(self._shape):
            return work()
        return await self._intake.run_aside(self.team, work)

    def load_in_turn(self, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Return a context manager that delays its block until its turn to load `num_bytes`; few bytes don't wait."""
        return self._intake.load_in_turn(num_bytes, self.team)

    async def decode(self, read: Callable[[bytes], ReadT]) -> ReadT:
        """Return what `read` makes of the body. Raises what `read` raises and InvalidRequest, ContextOverflow,
        TakesTooMuch, HeldTooMuch, MemoryFull."""
        raw, self.raw = self.raw, b""
        if self._shape is None:
            self._shape = await self._intake.check(raw, self._reservation)
        return await self._intake.decode(raw, self._shape, self._reservation, read, self.attachments)


def _is_quick(shape: Shape | None) -> bool:
    return shape is None or (shape.num_strings <= INLINE_STRINGS and shape.num_numbers <= INLINE_NUMBERS)


def keep_held(scope: Scope, work: Callable[[PartT], Awaitable[None]]) -> Callable[[PartT], Awaitable[None]]:
    """Wrap `work` so that the request's memory stays counted while it runs, even after its connection is gone."""
    reservation: Reservation = scope[RESERVATION]

    async def counted(part: PartT) -> None:
        with reservation.shared():
            await work(part)

    return counted


def attachments_of(scope: Scope) -> Attachments:
    """Return the files that were cut out of the request's body."""
    return scope.get(ATTACHMENTS) or Attachments()


def hold_function(scope: Scope) -> Callable[[int], None]:
    """Return a function that counts more bytes for the request, or fewer; it raises what `Body.hold` raises."""
    reservation: Reservation = scope[RESERVATION]
    return reservation.add


class _IncomingCheck:
    """Checks a body while it comes in, and refuses it with the first slice that exceeds a limit."""

    __slots__ = ("_check", "_intake", "_most", "_num_kept", "_reservation", "_sieve", "_unchecked")

    def __init__(self, intake: Intake, reservation: Reservation, most: int, sieve: MediaSieve | None = None) -> None:
        """`most`: maximum bytes of the body's text. `sieve`: cuts the files out of it; None: files count as text."""
        self._intake = intake
        self._reservation = reservation
        self._most = most
        self._sieve = sieve
        self._num_kept = 0
        self._check: ShapeCheck | None = None
        self._unchecked: list[bytes] = []
        """Parts that came while the body was too short to be checked."""

    async def add(self, part: bytes, num_bytes: int) -> bytes:
        """Check the next part, and return what is kept of it and of those before. `num_bytes`: bytes of the body so
        far, this part included."""
        if num_bytes <= UNCHECKED_BYTES:
            self._reservation.grow(num_bytes)
            self._unchecked.append(part)
            return b""
        if self._check is None:
            self._check = self._intake.begin_check()
            part, self._unchecked = b"".join((*self._unchecked, part)), []
        if num_bytes <= SLICE_BYTES:
            return self._add(self._check, part)
        team, add = self._reservation.team, partial(self._add, self._check)
        kept = [await self._intake.run_slice(team, partial(add, piece)) for piece in slices(part)]
        return part if self._sieve is None else b"".join(kept)

    def finish(self, raw: bytes) -> bytes:
        """Return the whole text. `raw`: what was kept of all parts."""
        if self._check is None:
            return self._unchecked[0] if len(self._unchecked) == 1 else b"".join(self._unchecked)
        if self._sieve is None:
            return raw
        rest = self._sieve.finish()
        if not rest:
            return raw
        self._check_text(self._check, rest)
        return raw + rest

    def _add(self, check: ShapeCheck, piece: bytes) -> bytes:
        """Check a slice, and return what is kept of it."""
        if self._sieve is not None:
            piece = self._sieve.feed(piece)
        self._check_text(check, piece)
        return piece

    def _check_text(self, check: ShapeCheck, piece: bytes) -> None:
        self._num_kept += len(piece)
        num_files = 0 if self._sieve is None else self._sieve.num_bytes
        self._reservation.grow(self._num_kept + num_files)
        if self._num_kept > self._most:
            raise too_large(f"more than {self._most} bytes of text", self._most, TEXT_REMEDY)
        check.add(piece)

    def shape(self) -> Shape | None:
        """Return how much the whole body's text holds; None: it is too short to matter."""
        return None if self._check is None else self._check.shape()

    def attachments(self) -> Attachments:
        """Return the files that were cut out."""
        return self._intake.attachments({} if self._sieve is None else self._sieve.cuts)


class _IncomingForm:
    """Reads a form while it comes in, and refuses it with the first slice that exceeds a limit."""

    __slots__ = ("_form", "_intake", "_reservation")

    def __init__(self, intake: Intake, reservation: Reservation, form: FormReader) -> None:
        self._intake = intake
        self._reservation = reservation
        self._form = form

    async def add(self, part: bytes, num_bytes: int) -> bytes:
        """Read the next part. `num_bytes`: bytes of the body so far, this part included. Nothing is kept beside what
        the form keeps."""
        if num_bytes <= SLICE_BYTES:
            self._add(part)
        else:
            for piece in slices(part):
                await self._intake.run_slice(self._reservation.team, partial(self._add, piece))
        return b""

    def finish(self, raw: bytes) -> bytes:
        """Return the form's fields as a JSON object."""
        return self._form.finish()

    def _add(self, piece: bytes) -> None:
        self._form.feed(piece)
        self._reservation.grow(self._form.num_bytes)

    def shape(self) -> Shape | None:
        """Return None: the fields are still to be checked."""
        return None

    def attachments(self) -> Attachments:
        """Return the file."""
        return self._intake.attachments(self._form.cuts)
