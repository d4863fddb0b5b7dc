"""Ends an autocomplete that a newer one of the same session makes useless, and so gives its slot back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.call import Call
from gateway.errors import Superseded
from gateway.relay.cutoff import Cutoff

NEWER = "A newer request of this session took this one's place. Nothing is to be sent again."


class Superseding:
    """The calls under way of this gateway process, by key and session: each key has sessions of its own."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], Cutoff] = {}

    @asynccontextmanager
    async def turn(self, call: Call) -> AsyncIterator[None]:
        """End the session's call before this one; the next one ends this one, and the block then raises Superseded."""
        if not call.session:
            yield
            return
        name = call.principal.key_id, call.session
        older = self._latest.get(name)
        if older is not None:
            older.cut(Superseded(NEWER))
        # The pipeline within ends by itself when the call's time is up.
        cutoff = self._latest[name] = Cutoff(call.deadline + 1.0, "the time of its call")
        try:
            async with cutoff:
                yield
        finally:
            if self._latest.get(name) is cutoff:
                del self._latest[name]
