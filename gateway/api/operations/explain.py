"""`/admin/explain`: how a call would be placed now, and which calls are queued before it. Nothing is sent to a worker.

`GET` asks about any call of a model; `POST` has the body of a chat request, and asks about this request. The answer has
numbers and names, never text of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace as replace_struct
from starlette.types import Receive, Scope, Send

from gateway.adapters.choice import CallAdapters
from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.request_reader import RequestReader
from gateway.api.native.texts import ChatReader
from gateway.api.request_headers import query_of
from gateway.call import Call, Principal
from gateway.errors import StoreUnavailable
from gateway.registry.model_states import ModelStates, merged
from gateway.registry.snapshot import FleetView
from gateway.routing.explain import Explanation, RankedWorker
from gateway.routing.placement import ANYWHERE, MOST_URGENT, PlacementRequest, placement_request_of
from gateway.routing.retries import Circuits, CircuitStatus
from gateway.store.queue_inspector import QueuedBid, QueuedTicket, QueueView
from workers.protocol.exits import in_words
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.residency import ModelState

Json = dict[str, Any]


def workers_object(explanation: Explanation, most: int) -> Json:
    """Return how workers rank: at most `most` of the suitable workers, best first, and at most `most` of the others."""
    return {
        "num_workers": len(explanation.ranked) + len(explanation.left_out),
        "workers": [_worker(placed) for placed in explanation.ranked[:most]],
        "left_out": {out.worker: out.reason for out in explanation.left_out[:most]},
        "waived": list(explanation.waived),
    }


def _worker(placed: RankedWorker) -> Json:
    return {
        "worker": placed.worker,
        "total_ms": round(placed.total_ms, 1),
        "wait_ms": round(placed.wait_ms, 1),
        "slot_ms": round(placed.slot_ms, 1),
        "backlog_ms": round(placed.backlog_ms, 1),
        "prefill_ms": round(placed.prefill_ms, 1),
        "adapter_ms": round(placed.adapter_ms, 1),
        "burden_ms": round(placed.burden_ms, 1),
        "cached_tokens": placed.cached_tokens,
        "uncached_tokens": placed.uncached_tokens,
        "free_slots": placed.free_slots,
        "placed_since": placed.placed,
        "heard_s_ago": _seconds(placed.heard_s_ago),
    }


def queue_object(line: QueueView) -> Json:
    """Return the state of the queue, with priorities as callers send them: a lower number is more urgent."""
    return {
        "waiting": line.waiting,
        "settling": line.settling,
        "by_priority": {
            str(-priority_class): count for priority_class, count in sorted(line.by_priority.items(), reverse=True)
        },
        "by_team": dict(sorted(line.by_team.items(), key=lambda item: (-item[1], item[0]))),
        "head": [_ticket(position, ticket) for position, ticket in enumerate(line.head, 1)],
    }


def _ticket(position: int, ticket: QueuedTicket) -> Json:
    told: Json = {
        "position": position,
        "team": ticket.team,
        "priority": -ticket.priority,
        "waited_s": _seconds(ticket.waited_s),
        "overtaken": ticket.overtaken,
        "gateway": ticket.gateway,
        "bids": {worker: _bid(bid) for worker, bid in ticket.bids.items()},
        "elsewhere": None if ticket.elsewhere is None else _bid(ticket.elsewhere),
    }
    if ticket.begin_in_s is not None:
        told["begin_in_s"] = _seconds(ticket.begin_in_s)
    return told


def _bid(bid: QueuedBid) -> Json:
    return {
        "cost_ms": round(bid.cost_ms, 1),
        "else_ms": round(bid.other_ms, 1),
        "loss_per_ms": round(bid.rate, 4),
        "kv_tokens": bid.kv_tokens,
    }


def circuits_object(workers: Sequence[Heartbeat], views: Mapping[str, CircuitStatus]) -> list[Json]:
    """Return the circuit breakers of the workers that have failed lately."""
    return [
        {
            "worker": beat.worker,
            "state": views[beat.boot].state.value,
            "failures": views[beat.boot].failures,
            "tried_in_s": _seconds(views[beat.boot].tried_in_s),
        }
        for beat in workers
        if beat.boot in views
    ]


def gateways_object(beats: Mapping[str, float], now: float) -> list[Json]:
    """Return for each gateway the seconds since it was seen. `beats`: id of a gateway -> Unix time of its last beat, by
    Redis's clock. `now`: Unix time by this gateway's clock, which can differ."""
    return [{"gateway": id, "seen_s_ago": _seconds(max(0.0, now - at))} for id, at in sorted(beats.items())]


def residency_object(machines: Mapping[str, ModelState], now: float) -> Json | None:
    """Return the state of a model that is loaded on demand, and that on each machine, with why it waits; None: no
    machine loads it on demand. `now`: Unix time."""
    if not machines:
        return None
    told = _state(merged([*machines.values()]), now)
    return told | {
        "machines": {machine: _state(state, now) | {"log": list(state.log)} for machine, state in machines.items()}
    }


def _state(state: ModelState, now: float) -> Json:
    return {
        "status": state.status,
        "progress": state.progress,
        "why": state.why.whole,
        "is_hopeless": state.is_hopeless,
        "retry_in_s": _seconds(max(0.0, state.retry_at - now)) if state.retry_at else None,
        "failures": state.num_failures,
        "exit": None if state.exit_code is None else in_words(state.exit_code),
    }


def _seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


MAX_WORKERS = 64
"""Maximum length of each of an answer's two lists of workers: the suitable ones, best first, and the others."""


class Explainer(Protocol):
    """The part of admission that the route asks."""

    def explain(self, model: str, request: PlacementRequest) -> Explanation: ...

    def waiting(self, model: str) -> int:
        """Return the number of calls of this process that wait for a slot of the model."""
        ...


class QueueReader(Protocol):
    async def inspect(self, model: str, workers: Sequence[str], classes: int) -> QueueView: ...

    async def gateways(self) -> Mapping[str, float]: ...


class ExplainRoute:
    def __init__(
        self,
        reader: RequestReader,
        adapters: CallAdapters,
        circuits: Circuits,
        fleet: FleetView,
        explainer: Explainer,
        states: ModelStates,
        queues: QueueReader,
        chat: ChatReader,
    ) -> None:
        self._reader = reader
        self._adapters = adapters
        self._circuits = circuits
        self._fleet = fleet
        self._explainer = explainer
        self._states = states
        self._queues = queues
        self._chat = chat

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            call, request = await self._read_request(principal, scope, receive)
        else:
            call, request = self._reader.call(principal, {}, scope), ANYWHERE
        explanation = self._explainer.explain(call.model, request)
        beats = self._fleet.snapshot.workers.get(call.model, ())
        told: dict[str, Any] = {
            "model": call.model,
            "alias": call.alias,
            "fallbacks": list(call.fallbacks),
            "residency": residency_object(self._states.machines(call.model), time.time()),
            "waiting_here": self._explainer.waiting(call.model),
            "prompt": {"bytes": request.prefix.num_bytes, "heads": len(request.prefix.digests)},
            **workers_object(explanation, MAX_WORKERS),
            "circuits": circuits_object(beats, self._circuits.states(time.monotonic())),
        }
        await self._add_line(told)
        await send_json(send, told, request_log_of(scope))

    async def _read_request(
        self, principal: Principal, scope: Scope, receive: Receive
    ) -> tuple[Call, PlacementRequest]:
        """Return the call of the chat request in the body, and its placement request. Raises as the chat route does."""
        async with self._reader.intake.open_body(principal, scope, receive, takes_media=True) as body:
            self._reader.begin(principal, scope)
            asked = await body.decode(lambda raw: self._chat.read(raw, scope))
        query = query_of(scope)
        call = self._reader.call(principal, {"model": asked.model or None}, scope)
        request = asked.requests[0]
        uses = self._adapters.of(call, request.adapters)
        # Prefix hashes differ by team: with `?team=`, an admin asks on behalf of another team.
        team = query.get("team", call.principal.team)
        contents = self._fleet.snapshot.contents.get(call.model, {})
        return call, placement_request_of(replace_struct(request, adapters=uses), team, contents)

    async def _add_line(self, told: dict[str, Any]) -> None:
        """Add what Redis knows: leases, queue, gateways. While Redis is away, queue and gateways are null."""
        workers = [worker["worker"] for worker in told["workers"]]
        try:
            line = await self._queues.inspect(told["model"], workers, MOST_URGENT)
            gateways = await self._queues.gateways()
        except StoreUnavailable:
            told["line"] = told["gateways"] = None
            return
        for worker in told["workers"]:
            worker["leases"], worker["leased_kv_tokens"] = line.leased[worker["worker"]]
        told["line"] = queue_object(line)
        told["gateways"] = gateways_object(gateways, time.time())
