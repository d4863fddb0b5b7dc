"""Asks workers what takes no slot: texts and tokens, properties, what lies in slots, adapters.

Any worker of a model answers what is true of the model; what is true of one worker is asked of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gateway.dispatch.upstream import error_for
from gateway.errors import NoWorker
from gateway.registry.snapshot import FleetView
from gateway.relay.relay import Relay
from gateway.relay.worker_client import ASK_TIMEOUT_S, NotReached, ReplyT
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.queries import RENDER_PATH, Render, decode_rendered
from workers.protocol.requests import GenerateRequest

MAX_TRIES = 3
TAKES_NOTHING = (FailureCode.BUSY, FailureCode.DRAINING, FailureCode.UNAVAILABLE)


class WorkerQueries:
    def __init__(self, fleet: FleetView, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay

    def workers(self, model: str) -> list[Heartbeat]:
        """Return the workers that can be asked, by id: the order in which slots are numbered over a model's workers."""
        beats = self._fleet.snapshot.of(model)
        return sorted((beat for beat in beats if not self._relay.is_lost(beat.boot)), key=lambda beat: beat.worker)

    async def of_model(
        self,
        model: str,
        method: str,
        path: str,
        decode: Callable[[bytes], ReplyT],
        message: msgspec.Struct | None = None,
    ) -> ReplyT:
        """Ask the least busy worker, and the next one where that can't be reached or takes nothing at the moment. If a
        worker is lost during the question, it may have died of it: no other one is asked then. Raises PaddockError.
        """
        failure: Failure | None = None
        for beat in sorted(self.workers(model), key=lambda beat: beat.slots_busy / max(1, beat.slots))[:MAX_TRIES]:
            try:
                return await self._relay.ask(beat.at, method, path, message, decode)
            except CallFailed as failed:
                failure = failed.failure
                if not (isinstance(failed, NotReached) or failure.code in TAKES_NOTHING):
                    break
        if failure is None:
            raise no_worker(model)
        raise error_for(failure)

    async def num_tokens(self, model: str, request: GenerateRequest, team: str) -> int:
        """Return the number of tokens of the prompt that a request of the team becomes. Raises PaddockError."""
        render = Render(request=request, text=False, tenant=team)
        rendered = await self.of_model(model, "POST", RENDER_PATH, decode_rendered, render)
        return rendered.num_tokens or 0

    async def of_worker(
        self,
        beat: Heartbeat,
        method: str,
        path: str,
        decode: Callable[[bytes], ReplyT],
        message: msgspec.Struct | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> ReplyT:
        """Ask one worker. Raises PaddockError."""
        try:
            return await self._relay.ask(beat.at, method, path, message, decode, timeout_s)
        except CallFailed as failed:
            raise error_for(failed.failure) from None

    async def of_each(
        self,
        model: str,
        method: str,
        path: str,
        decode: Callable[[bytes], ReplyT],
        message: msgspec.Struct | None = None,
    ) -> list[tuple[Heartbeat, ReplyT]]:
        """Return every worker's answer, in the order of `workers`. Raises PaddockError where one does not answer."""
        beats = self.workers(model)
        if not beats:
            raise no_worker(model)
        replies = await asyncio.gather(*(self.of_worker(beat, method, path, decode, message) for beat in beats))
        return list(zip(beats, replies, strict=True))


def no_worker(model: str) -> NoWorker:
    """Return the error for a model without workers; `model`: the name that the caller used, or the model's."""
    return NoWorker(f"No worker serves `{model}` at the moment. Start one, or send the request again later.")
