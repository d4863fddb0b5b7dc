"""`/admin/explain`: how a call would be placed now, and which calls are in line before it. Nothing is sent anywhere.

`GET` asks for a model, `POST` with the body of a chat request for that prompt. Told are numbers and names, never text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace as replace_struct
from starlette.types import Receive, Scope, Send

from gateway.api.admin.told import circuits_told, gateways_told, line_told, workers_told
from gateway.api.answers import send_json
from gateway.api.native.query import query_of
from gateway.api.native.reception import Caller, Reception
from gateway.api.native.texts import ChatReader
from gateway.call import Call
from gateway.errors import StoreUnavailable
from gateway.pipeline import Fleet, Pipeline
from gateway.routing.ask import ANYWHERE, Ask, ask_of
from gateway.routing.explain import Explanation
from gateway.routing.urgency import MOST_URGENT
from gateway.store.look import LineView

MAX_WORKERS = 64
"""Most workers that are listed: the best of those that would do, and as many of the others."""


class Explaining(Protocol):
    def explain(self, model: str, ask: Ask) -> Explanation: ...


class Lines(Protocol):
    async def look(self, model: str, workers: Sequence[str], classes: int) -> LineView: ...

    async def gateways(self) -> Mapping[str, float]: ...


class ExplainRoute:
    def __init__(
        self,
        reception: Reception,
        pipeline: Pipeline,
        fleet: Fleet,
        explaining: Explaining,
        lines: Lines,
        chat: ChatReader,
    ) -> None:
        self._reception = reception
        self._pipeline = pipeline
        self._fleet = fleet
        self._explaining = explaining
        self._lines = lines
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._reception.admin(scope, "see how calls are placed")
        if scope["method"] == "POST":
            call, ask = await self._asked(caller, scope, receive)
        else:
            call, ask = self._reception.call(caller, {}, scope), ANYWHERE
        explanation = self._explaining.explain(call.model, ask)
        beats = self._fleet.snapshot.workers.get(call.model, ())
        told: dict[str, Any] = {
            "model": call.model,
            "alias": call.alias,
            "fallbacks": list(call.fallbacks),
            "prompt": {"bytes": ask.prefix.num_bytes, "heads": len(ask.prefix.digests)},
            **workers_told(explanation, MAX_WORKERS),
            "circuits": circuits_told(beats, self._pipeline.attempts.circuits.states(time.monotonic())),
        }
        await self._add_line(told)
        await send_json(send, told, caller.trail)

    async def _asked(self, caller: Caller, scope: Scope, receive: Receive) -> tuple[Call, Ask]:
        """Return the call of the chat request in the body, and its placement request. Raises as the chat route does."""
        async with self._reception.opened(caller, scope, receive) as body:
            asked = await body.decoded(lambda raw: self._chat.read(raw, scope))
        query = query_of(scope)
        call = self._reception.call(caller, {"model": asked.model or None}, scope)
        request = asked.requests[0]
        uses = self._pipeline.adapters(call, request.adapters)
        # Prefix hashes are a team's own: an admin may ask in the place of another team.
        team = query.get("team", call.principal.team)
        contents = self._fleet.snapshot.contents.get(call.model, {})
        return call, ask_of(replace_struct(request, adapters=uses), team, contents)

    async def _add_line(self, told: dict[str, Any]) -> None:
        """Add what Redis knows; null while it is away, which is when one may want to know the rest."""
        workers = [worker["worker"] for worker in told["workers"]]
        try:
            line = await self._lines.look(told["model"], workers, MOST_URGENT)
            gateways = await self._lines.gateways()
        except StoreUnavailable:
            told["line"] = told["gateways"] = None
            return
        for worker in told["workers"]:
            worker["leases"], worker["leased_kv_tokens"] = line.leased[worker["worker"]]
        told["line"] = line_told(line)
        told["gateways"] = gateways_told(gateways, time.time())
