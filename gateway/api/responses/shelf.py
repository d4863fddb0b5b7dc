"""Where responses are kept: found again by those who go on from them, put there when they are complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from gateway.api.dialect import StreamWriter, WholeWriter
from gateway.api.responses import whole
from gateway.api.responses.events import EventWriter
from gateway.api.responses.records import Record, decode_record, encode_record
from gateway.api.responses.request import Draft, ResponseRequest, not_found
from gateway.call import Call
from gateway.errors import PaddockError, StoreUnavailable
from gateway.store.trouble import reading
from gateway.telemetry.trail import Trail

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
RETRY_S = 0.2


class Store(Protocol):
    async def keep(
        self, team: str, id: str, record: bytes, before: Sequence[str] = ..., *, again: bool = ...
    ) -> bool: ...
    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]: ...
    async def drop(self, team: str, id: str) -> bool: ...


class Shelf:
    """Of all teams; nobody gets to know of another team's responses."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def complete(self, draft: Draft, team: str) -> ResponseRequest:
        """The request with what was said before. Raises as `Draft.complete`, and StoreUnavailable."""
        found = await self._found(team, draft.needs)
        previous = found.get(draft.body.previous_response_id or "")
        if previous is not None:
            missing = [id_ for id_ in previous.chain if id_ not in found]
            found |= await self._found(team, missing)
        return draft.complete(found)

    async def get(self, team: str, id_: str) -> Record:
        """Raises ResponseNotFound."""
        record = (await self._found(team, (id_,))).get(id_)
        if record is None:
            raise not_found(id_)
        return record

    async def keep(self, team: str, record: Record, *, again: bool = False) -> bool:
        """Whether it is there now. `again`: in place of one that is there, unless it was deleted meanwhile."""
        return await self._store.keep(
            team, str(record.response["id"]), encode_record(record), record.chain, again=again
        )

    async def drop(self, team: str, id_: str) -> None:
        """Raises ResponseNotFound."""
        if not await self._store.drop(team, id_):
            raise not_found(id_)

    async def conclude(self, writer: StreamWriter | WholeWriter, failure: PaddockError | None) -> None:
        """Keeps an answer where it is to be kept. It is delivered all the same where that can't be done."""
        if not isinstance(writer, EventWriter | whole.WholeWriter):
            raise TypeError(f"no writer of responses: {writer!r}")
        asked, team = writer.snapshot.asked, writer.snapshot.call.principal.team
        if not asked.store or (failure is not None and not asked.background):
            return
        if failure is not None and isinstance(writer, EventWriter):
            response = writer.failed(failure)
        else:
            response = writer.response()
        # One that was made in the background is nowhere else: for it, a Redis that is away is waited for.
        patience_s = PATIENCE_S if asked.background else 0.0
        try:
            kept = await self._kept(team, writer.record(response), patience_s, again=asked.background)
        except StoreUnavailable as error:
            log.warning("response %s is not stored: %s", asked.id, error)
            kept = False
        writer.snapshot.is_kept = kept

    async def _kept(self, team: str, record: Record, patience_s: float, *, again: bool) -> bool:
        until = monotonic() + patience_s
        while True:
            try:
                return await self.keep(team, record, again=again)
            except StoreUnavailable:
                if monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _found(self, team: str, ids: Sequence[str]) -> dict[str, Record]:
        records = await self._store.find(team, ids)
        with reading():
            return {id_: decode_record(raw) for id_, raw in zip(ids, records, strict=True) if raw is not None}


class ResponseWriters:
    """How responses are written (`gateway.api.dialect.Writers`)."""

    def stream_writer(self, asked: ResponseRequest, call: Call, trail: Trail) -> EventWriter:
        return EventWriter(asked, call)

    def whole_writer(self, asked: ResponseRequest, call: Call, trail: Trail) -> whole.WholeWriter:
        return whole.WholeWriter(asked, call)
