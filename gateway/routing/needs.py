"""The requirements of one call on a worker, and the reason why a worker does not meet them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.routing.ask import Ask
from gateway.routing.pool import Pool
from gateway.routing.slot_numbers import ANY, located
from gateway.routing.standing import Standing
from workers.protocol.heartbeat import PROTOCOL_VERSION

CONTEXT_MARGIN = 0.75
"""Share of a prompt's estimated tokens that must fit n_ctx: the worker counts exactly, and refuses what is too long."""


@dataclass(frozen=True, slots=True)
class Needs:
    n_ctx: float = 0.0
    """Least context size, in tokens."""
    adapters: frozenset[str] = frozenset()
    worker: str = ""
    """The only worker that will do: it has the slot that was asked for. Empty: any will."""
    avoid: frozenset[str] = frozenset()
    room: bool = False
    """Whether the adapters must have a place in memory there now."""

    def lacking(self, there: Standing) -> str:
        """Return why a worker is left out; "" where it would do."""
        beat = there.beat
        if beat.draining or beat.slots <= 0:
            return "it is draining"
        if beat.protocol != PROTOCOL_VERSION:
            return f"it speaks protocol {beat.protocol}, this gateway {PROTOCOL_VERSION}"
        if there.worker in self.avoid:
            return "this call has failed there"
        if self.worker and there.worker != self.worker:
            return f"the call asked for a slot of {self.worker}"
        if self.n_ctx > beat.n_ctx:
            return f"the call needs at least {self.n_ctx:.0f} tokens of context, it has {beat.n_ctx}"
        if self.adapters and not self.adapters.issubset(beat.adapters):
            return f"it has no adapter {', '.join(sorted(self.adapters.difference(beat.adapters)))}"
        if self.room and len(self.adapters.difference(beat.adapters_resident)) > beat.adapter_room:
            return "running calls and pinned ones take all its places for adapters"
        return ""

    def met_by_all(self, pool: Pool) -> bool:
        """Return True where every worker that serves would do; False says nothing."""
        if self.avoid or self.worker or self.room:
            return False
        return self.n_ctx <= pool.n_ctx and self.adapters.issubset(pool.adapters)

    def unmet(self, pool: Pool, most: int) -> frozenset[str] | None:
        """Return the workers that serve and would not do; None if they are more than `most`."""
        if self.met_by_all(pool):
            return frozenset()
        unmet: list[str] = []
        for there in pool.numbered:
            if there is not None and self.lacking(there):
                unmet.append(there.worker)
                if len(unmet) > most:
                    return None
        return frozenset(unmet)


def needs_of(ask: Ask, pool: Pool, avoid: frozenset[str]) -> Iterator[Needs]:
    """Yield all that the call would like, then less each time, for where no worker would do: then workers that have
    failed it may do, and at last any, which tells the caller what is wrong.
    """
    tokens = ask.prefix.num_bytes / pool.typical.bytes_per_token * CONTEXT_MARGIN
    place = located(ask.slot, pool.by_id()) if ask.slot != ANY else None
    if place is not None:
        yield Needs(tokens, ask.adapters, place[0].worker, avoid)
    if ask.adapters:
        yield Needs(tokens, ask.adapters, "", avoid, room=True)
    yield Needs(tokens, ask.adapters, "", avoid)
    if avoid:
        yield Needs(tokens, ask.adapters)
    if tokens or ask.adapters:
        if avoid:
            yield Needs(avoid=avoid)
        yield Needs()
