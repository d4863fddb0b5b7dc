"""Sends batches of usage records to the accounts service through a Redis stream, and asks what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import redis.asyncio

from gateway.store.client import ANSWER_TIMEOUT_S
from gateway.store.outage import reading
from gateway.store.scripts import ScriptSender, load_usage_script
from workers.protocol import keys


class BatchState(IntEnum):
    """State of a batch in Redis."""

    ABSENT = 0
    """Redis does not have it: it was never sent, or Redis has lost it."""
    SENT = 1
    COMMITTED = 2
    """The database has its records. Redis has forgotten the batch by now."""
    FULL = 3
    """The stream has no room for it."""


@dataclass(frozen=True, slots=True)
class BatchOffer:
    """A batch that is sent, or only asked about."""

    name: str
    batch: bytes
    """The encoded batch; empty: it was sent before, and Redis is asked what became of it."""


@dataclass(frozen=True, slots=True)
class UsageExchange:
    """Redis's reply to offers."""

    states: tuple[BatchState, ...]
    """States of the batches, in the order of the offers."""
    num_entries: int
    """Entries of the stream, by all gateways."""
    num_set_aside: int
    """Entries that the ledger's writer could not write."""


class UsageStream:
    """The gateways' end of the stream of usage."""

    def __init__(self, redis: redis.asyncio.Redis, max_entries: int) -> None:
        """`max_entries`: maximum entries of the stream, which all gateways fill."""
        self.max_entries = max_entries
        self._script = load_usage_script()
        self._pipe = ScriptSender(redis, (self._script,), ANSWER_TIMEOUT_S)

    async def exchange(self, offers: Sequence[BatchOffer]) -> UsageExchange:
        """Send the batches that have content, and return what became of all. Raises StoreUnavailable."""
        arguments: list[str | bytes] = []
        for offer in offers:
            arguments += (offer.name, offer.batch)
        answer = await self._pipe.send(self._script, keys.USAGE, self.max_entries, *arguments)
        with reading():
            num_entries, num_set_aside, *states = answer
            return UsageExchange(tuple(map(BatchState, states)), num_entries, num_set_aside)

    async def close(self) -> None:
        """Wait until every request that was sent to Redis has its answer."""
        await self._pipe.close()
