"""Makes the events of `GET /admin/events`: the whole overview at first, then what changes, and the slots of the models
that a viewer looks at. All viewers share the work: what is sent to one is encoded once for all who have seen the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from gateway.api.native.slots import SlotQueries
from gateway.api.overview.rows import Changes, Overview, SlotRow, changes_between
from gateway.errors import PaddockError
from workers.protocol.queries import SlotInfo

MOST_WORKERS = 64
"""Maximum number of workers of a model that are asked for their slots; of more, none is."""

_encode = msgspec.json.Encoder().encode


class Feed:
    """Makes the events that all viewers of one gateway share."""

    def __init__(
        self, look: Callable[[], Awaitable[Overview]], slots: SlotQueries, num_workers: Callable[[str], int]
    ) -> None:
        """`look` returns the fleet as it is; `num_workers`, how many workers a model has."""
        self._look = look
        self._slots = slots
        self._num_workers = num_workers
        self._last: tuple[Overview, Overview, bytes] | None = None
        """The two overviews that were compared last, and the event that tells the difference."""

    def viewer(self, models: Sequence[str]) -> Viewer:
        """Return what makes one viewer's events. `models`: whose slots it looks at."""
        return Viewer(self, models)

    async def changes(self, seen: Overview | None) -> tuple[Overview, bytes]:
        """Return the fleet as it is, and the event for a viewer that has `seen` it earlier; empty if it is the same."""
        now = await self._look()
        if seen is None:
            return now, event("overview", now)
        if now is seen:
            return now, b""
        if self._last is None or self._last[0] is not seen or self._last[1] is not now:
            changes = changes_between(seen, now)
            self._last = seen, now, event("changes", changes) if changes != Changes(at=now.at) else b""
        return now, self._last[2]

    async def slots(self, models: Sequence[str]) -> dict[str, list[SlotRow]]:
        """Return worker -> its slots, for those models whose workers answer and are at most MOST_WORKERS."""
        found: dict[str, list[SlotRow]] = {}
        for model in models:
            if not 0 < self._num_workers(model) <= MOST_WORKERS:
                continue
            try:
                for beat, infos in await self._slots.ask(model):
                    found[beat.worker] = [slot_row(info) for info in infos]
            except PaddockError:
                continue  # its workers go, or are too busy to answer
        return found


class Viewer:
    """One viewer's place in the feed."""

    def __init__(self, feed: Feed, models: Sequence[str]) -> None:
        self._feed = feed
        self._models = models
        self._seen: Overview | None = None
        self._slots: Mapping[str, list[SlotRow]] = {}

    async def next_events(self) -> bytes:
        """Return the events that are due."""
        self._seen, events = await self._feed.changes(self._seen)
        if self._models:
            slots = await self._feed.slots(self._models)
            if changed := {worker: rows for worker, rows in slots.items() if self._slots.get(worker) != rows}:
                events += event("slots", changed)
            self._slots = slots
        return events


def slot_row(info: SlotInfo) -> SlotRow:
    """Return the row of a slot. An idle slot has no answer: the numbers of its last one are left out."""
    return SlotRow(
        is_busy=info.is_processing,
        team=info.tenant,
        request_id=info.request_id if info.is_processing else "",
        prompt_tokens=info.n_prompt_tokens,
        answer_tokens=info.n_decoded if info.is_processing else 0,
        max_tokens=info.n_remain + info.n_decoded if info.is_processing and info.n_remain >= 0 else -1,
    )


def event(name: str, document: object) -> bytes:
    """Return a server-sent event of this name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(document))
