"""Stores complete responses, and loads them for requests that continue them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Protocol

from gateway.api.dialect import StreamWriter, WholeWriter
from gateway.api.intake.decoding import INLINE_BYTES
from gateway.api.intake.intake import Body
from gateway.api.media.attachments import Attachments
from gateway.api.responses import output
from gateway.api.responses.events import EventWriter
from gateway.api.responses.records import NewRecord, Record, decode_record, written
from gateway.api.responses.request import Draft, ResponseRequest, not_found
from gateway.call import Call
from gateway.errors import ContextOverflow, PaddockError, StoreUnavailable, TakesTooMuch
from gateway.store.outage import reading
from gateway.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

CHAIN_FACTOR = 2
"""Maximum bytes of the stored responses that one request may continue, as a multiple of `max_body_bytes`. More than 1,
since each response repeats its instructions and tools."""
MAX_RECORDS = 2_000
"""Maximum number of responses that one request may continue or refer to; more are refused (TakesTooMuch)."""
HELD_PER_BYTE = 3
"""Bytes of memory that a decoded response takes, per byte of its stored record."""
ITEM_BYTES = 256
"""Cost of processing an item, not counting its text. In bytes: so many bytes of text take as long to process."""
PART_BYTES = 32
"""Cost of decoding one number or name. In bytes: so many bytes of text take as long to decode."""
PATIENCE_S = 60.0
RETRY_S = 0.2


class RecordStore(Protocol):
    async def keep(
        self, team: str, id: str, record: bytes, before: Sequence[str] = ..., *, again: bool = ...
    ) -> bool: ...
    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]: ...
    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]: ...
    async def drop(self, team: str, id: str) -> bool: ...


class ResponseStore:
    """The stored responses of all teams. A caller sees only those of their own team."""

    def __init__(self, store: RecordStore, max_bytes: int) -> None:
        """`max_bytes`: maximum bytes of stored responses that one request may continue."""
        self._store = store
        self._max_bytes = max_bytes

    async def complete(self, draft: Draft, body: Body) -> ResponseRequest:
        """Return the request together with the conversation before it. The conversation's size is checked before it is
        loaded, and again before its items are joined: a short request may refer to one long item thousands of times.

        Raises what `Draft.resolved` and `Resolved.complete` raise, HeldTooMuch, MemoryFull, StoreUnavailable."""
        files = draft.attachments
        found, num_bytes = await self._load(body, draft.needs, 0, files)
        previous = found.get(draft.body.previous_response_id or "")
        if previous is not None:
            missing = [id_ for id_ in previous.chain if id_ not in found]
            more, num_bytes = await self._load(body, missing, num_bytes, files)
            found |= more
        num_bytes += draft.num_bytes
        resolved = await body.run_aside(num_bytes, partial(draft.resolved, found, 2 * self._max_bytes))
        # Those that were not cut out are held beside their base64, which is stored.
        body.hold_at_least(resolved.num_bytes + files.num_bytes + files.num_loose_bytes)
        num_item_bytes = ITEM_BYTES * (len(resolved.before) + len(resolved.own))
        return await body.run_aside(max(num_bytes, resolved.num_bytes, num_item_bytes), resolved.complete)

    async def get(self, id_: str, body: Body) -> Record:
        """Return a response's record. Raises ResponseNotFound, HeldTooMuch, MemoryFull, TakesTooMuch."""
        found, _ = await self._load(body, (id_,), 0, alone=True)
        if id_ not in found:
            raise not_found(id_)
        return found[id_]

    async def keep(self, team: str, record: NewRecord, *, again: bool = False) -> bool:
        """Store a record, and return whether it was stored. `again`: replace the earlier one, unless it was deleted."""
        id_, encoded = str(record.response["id"]), await written(record)
        return await self._store.keep(team, id_, encoded, record.chain, again=again)

    async def drop(self, team: str, id_: str) -> None:
        """Delete a response. Raises ResponseNotFound."""
        if not await self._store.drop(team, id_):
            raise not_found(id_)

    async def conclude(self, writer: StreamWriter | WholeWriter, failure: PaddockError | None) -> None:
        """Store an answer that has ended, if its request asks for that. The client gets it even if storing fails."""
        if not isinstance(writer, EventWriter | output.WholeWriter):
            raise TypeError(f"no writer of responses: {writer!r}")
        asked, team = writer.snapshot.asked, writer.snapshot.call.principal.team
        if not asked.store or (failure is not None and not asked.background):
            return
        if failure is not None and isinstance(writer, EventWriter):
            response = writer.failed(failure, brief=True)
        else:
            response = writer.response(brief=True)
        # A response made in the background exists nowhere else: for it, wait for a Redis that does not answer.
        patience_s = PATIENCE_S if asked.background else 0.0
        try:
            record = writer.record(response)
            if isinstance(failure, ContextOverflow):
                record = record.too_long()
            kept = await self._keep_patiently(team, record, patience_s, again=asked.background)
        except StoreUnavailable as error:
            log.warning("response %s is not stored: %s", asked.id, error)
            kept = False
        writer.snapshot.is_kept = kept

    async def _keep_patiently(self, team: str, record: NewRecord, patience_s: float, *, again: bool) -> bool:
        until = monotonic() + patience_s
        while True:
            try:
                return await self.keep(team, record, again=again)
            except StoreUnavailable:
                if monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _load(
        self,
        body: Body,
        ids: Sequence[str],
        num_before: int,
        attachments: Attachments | None = None,
        *,
        alone: bool = False,
    ) -> tuple[dict[str, Record], int]:
        """Return id -> record for `ids`, and the bytes of all records that this request has loaded by now.
        `num_before`: the bytes that it had loaded earlier.

        `attachments`: gets the records' files. `alone`: the request loads only one record, which may have any size."""
        if len(ids) > MAX_RECORDS:
            raise TakesTooMuch(
                f"The request goes on from {len(ids)} responses; {MAX_RECORDS} may be loaded. Send what matters of "
                "them as `input`."
            )
        num_bytes = sum(await self._store.sizes(body.team, ids))
        if num_before + num_bytes > self._max_bytes and not alone:
            raise TakesTooMuch(
                f"The responses before this one take {num_before + num_bytes} bytes as they are stored; "
                f"{self._max_bytes} may be gone on from (twice max_body_bytes). Send what matters of them as `input`."
            )
        body.hold(num_bytes * HELD_PER_BYTE)
        async with body.load_in_turn(num_bytes):
            records = await self._store.find(body.team, ids)
            with reading():
                decoded = await body.run_aside(
                    _decoding_cost(num_bytes, records), partial(_decode, ids, records, attachments)
                )
            return decoded, num_before + num_bytes


def _decoding_cost(num_bytes: int, records: Sequence[bytes | None]) -> int:
    """Return the bytes of plain text that take as long to decode as the records. `num_bytes`: bytes of the records."""
    if num_bytes > INLINE_BYTES:
        return num_bytes
    return max(num_bytes, PART_BYTES * sum(raw.count(b",") for raw in records if raw is not None))


def _decode(ids: Sequence[str], records: Sequence[bytes | None], attachments: Attachments | None) -> dict[str, Record]:
    return {id_: decode_record(raw, attachments) for id_, raw in zip(ids, records, strict=True) if raw is not None}


class ResponseWriters:
    """Makes a writer for each response (`gateway.api.dialect.Writers`)."""

    def stream_writer(self, asked: ResponseRequest, call: Call, request_log: RequestLog) -> EventWriter:
        return EventWriter(asked, call)

    def whole_writer(self, asked: ResponseRequest, call: Call, request_log: RequestLog) -> output.WholeWriter:
        return output.WholeWriter(asked, call)
