"""Asks workers what takes no slot: texts and tokens, properties, what lies in slots, adapters.

Any worker of a model answers what is true of the model; what is true of one worker is asked of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gateway.errors import NoWorker
from gateway.pipeline import Fleet
from gateway.relay.failures import answer_to
from gateway.relay.fanin import Place
from gateway.relay.relay import ASK_TIMEOUT_S, Relay
from gateway.relay.worker_asks import NotReached, ReplyT
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.requests import GenerateRequest
from workers.protocol.text import RENDER_PATH, Render, decode_rendered

MAX_TRIES = 3
TAKES_NOTHING = (FailureCode.BUSY, FailureCode.DRAINING, FailureCode.UNAVAILABLE)


class Inquiries:
    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay

    def workers(self, model: str) -> list[Heartbeat]:
        """Return the workers that can be asked, by id: the order in which slots are numbered over a model's workers."""
        beats = self._fleet.snapshot.workers.get(model, ())
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
                return await self._relay.ask(_place(beat), method, path, message, decode)
            except CallFailed as failed:
                failure = failed.failure
                if not (isinstance(failed, NotReached) or failure.code in TAKES_NOTHING):
                    break
        if failure is None:
            raise no_worker(model)
        raise answer_to(failure)

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
            return await self._relay.ask(_place(beat), method, path, message, decode, timeout_s)
        except CallFailed as failed:
            raise answer_to(failed.failure) from None

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


def _place(beat: Heartbeat) -> Place:
    return Place(beat.worker, beat.boot, beat.address.rstrip("/"), beat.model)
