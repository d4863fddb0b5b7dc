"""Sends the journals' records to the ledger, and takes over those of dead processes, in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from gateway.store.outage import Outage, raise_if_cancelled
from gateway.store.usage import BatchOffer, BatchState, UsageExchange, UsageStream
from gateway.telemetry.metrics import Metrics
from gateway.usage.journal import OwnJournal
from gateway.usage.outbox import Batch, Outbox
from gateway.usage.recovery import DeadJournal, Price, adopt
from gateway.usage.segments import NEARLY_FULL
from workers.process.ticks import wait_tick

log = logging.getLogger(__name__)

SEND_EVERY_S = 0.25
LOOK_EVERY_S = 5.0
"""Seconds between two looks for journals of dead processes, and for how full the stream is."""
SENT_BYTES = 48 << 10
"""Approximate bytes of one request to Redis: more would be long for the connection that all calls share."""
CLOSE_S = 1.0
"""Seconds that an ending process takes to send what is left. The next process takes over the rest."""


class UsageSender:
    """Sends usage. Nothing on a call's path waits for it."""

    def __init__(self, folder: Path, journal: OwnJournal, stream: UsageStream, price: Price, metrics: Metrics) -> None:
        self._folder = folder
        self._journal = journal
        self._stream = stream
        self._price = price
        self._metrics = metrics
        self._outboxes: list[Outbox] = [Outbox(journal)]
        self._outage = Outage("usage can't be sent to Redis", "it waits on disk", "usage is sent to Redis again")
        self._is_stream_full = False
        self._committed_at = time.monotonic()
        """time.monotonic() when the ledger last took something, or had everything."""

    async def run(self) -> None:
        """Send usage until cancelled."""
        look_at = float("-inf")
        while True:
            raise_if_cancelled()
            now = time.monotonic()
            self._journal.beat()
            looks = now >= look_at
            if looks:
                look_at = now + LOOK_EVERY_S
                await self._adopt()
            with self._outage.survive():
                await self._send_all(asks_anyway=looks)
            self._measure()
            await wait_tick(SEND_EVERY_S)

    async def close(self) -> None:
        """Send what is left. Delete the journals of which the ledger has everything; leave the others to the next
        process, whose own they become once this one has ended."""
        try:
            async with asyncio.timeout(CLOSE_S):
                with self._outage.survive():
                    await self._send_all()
        except TimeoutError:
            pass
        for outbox in self._outboxes:
            if outbox.is_empty and isinstance(outbox.journal, OwnJournal | DeadJournal):
                outbox.journal.remove()
            else:
                outbox.journal.close()
        await self._stream.close()

    async def _adopt(self) -> None:
        """Take over the journals of processes that have died."""
        own = self._journal.process
        for journal in await asyncio.to_thread(adopt, self._folder, own, self._price):
            self._outboxes.append(Outbox(journal))
            self._metrics.usage_records.labels("cut").inc(journal.num_cut)

    async def _send_all(self, *, asks_anyway: bool = False) -> None:
        """Send all that Redis takes now, and learn what was committed. `asks_anyway`: ask Redis about the stream even
        if there is nothing to send. Raises StoreUnavailable."""
        has_moved = True
        while has_moved:
            offers = [offer for outbox in self._outboxes for offer in self._offers_of(outbox)]
            if not offers and not asks_anyway:
                return
            asks_anyway = False
            exchange = await self._stream.exchange([offer for _, _, offer in offers])
            self._note_stream(exchange)
            has_moved = False
            for (outbox, batch, offer), state in zip(offers, exchange.states, strict=True):
                has_moved = (
                    has_moved or state is BatchState.COMMITTED or (bool(offer.batch) and state is BatchState.SENT)
                )
                if state is BatchState.COMMITTED:
                    self._committed_at = time.monotonic()
                outbox.note(batch, state)
            self._drop_done()
            has_moved = has_moved and any(outbox.has_more for outbox in self._outboxes)

    def _offers_of(self, outbox: Outbox) -> list[tuple[Outbox, Batch, BatchOffer]]:
        share = SENT_BYTES // len(self._outboxes)
        try:
            return [(outbox, batch, offer) for batch, offer in outbox.offers(share)]
        except OSError as error:
            log.error("usage can't be read from disk: %s", error.strerror)
            return []

    def _drop_done(self) -> None:
        """Delete journals of dead processes of which the ledger has everything."""
        for outbox in [one for one in self._outboxes if one.is_empty]:
            if isinstance(outbox.journal, DeadJournal):
                outbox.journal.remove()
                self._outboxes.remove(outbox)

    def _note_stream(self, exchange: UsageExchange) -> None:
        bound = self._stream.max_entries
        self._metrics.usage_stream.set(exchange.num_entries)
        self._metrics.usage_stream_max.set(bound)
        self._metrics.usage_set_aside.set(exchange.num_set_aside)
        is_full = exchange.num_entries >= NEARLY_FULL * bound
        if is_full and not self._is_stream_full:
            told = "the stream of usage in Redis has %d of at most %d entries: see that paddock accounts runs"
            log.warning(told, exchange.num_entries, bound)
        elif self._is_stream_full and not is_full:
            log.info("the stream of usage in Redis has room again")
        self._is_stream_full = is_full

    def _measure(self) -> None:
        num_waiting = sum(outbox.journal.num_uncommitted for outbox in self._outboxes)
        if not num_waiting:
            self._committed_at = time.monotonic()
        self._metrics.usage_waiting.set(num_waiting)
        self._metrics.usage_waiting_s.set(time.monotonic() - self._committed_at)
        num_bytes = sum(outbox.journal.num_bytes for outbox in self._outboxes)
        self._metrics.usage_journal_bytes.set(num_bytes)
        self._journal.set_beside(num_bytes - self._journal.num_bytes)
