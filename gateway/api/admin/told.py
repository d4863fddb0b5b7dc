"""Writes the line of a model, circuits and gateways as JSON for operators. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.routing.circuit import View
from gateway.routing.explain import Explanation, Placed
from gateway.store.look import LineView, QueuedBid, QueuedTicket
from workers.protocol.heartbeat import Heartbeat

Json = dict[str, Any]


def workers_told(explanation: Explanation, most: int) -> Json:
    """Return how workers rank. `most`: workers that are named, of those that would do and of the others."""
    return {
        "num_workers": len(explanation.ranked) + len(explanation.left_out),
        "workers": [_worker(placed) for placed in explanation.ranked[:most]],
        "left_out": {out.worker: out.reason for out in explanation.left_out[:most]},
        "waived": list(explanation.waived),
    }


def _worker(placed: Placed) -> Json:
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


def line_told(line: LineView) -> Json:
    """Return the line, with priorities as callers give them: the lower number is the more urgent one."""
    return {
        "waiting": line.waiting,
        "settling": line.settling,
        "by_priority": {str(-urgency): count for urgency, count in sorted(line.by_priority.items(), reverse=True)},
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


def circuits_told(workers: Sequence[Heartbeat], views: Mapping[str, View]) -> list[Json]:
    """Return the circuits of those workers that have failed lately."""
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


def gateways_told(beats: Mapping[str, float], now: float) -> list[Json]:
    """Return when gateways were seen, by this one's clock: others' may differ. `beats`: id -> Unix time of the last."""
    return [{"gateway": id, "seen_s_ago": _seconds(max(0.0, now - at))} for id, at in sorted(beats.items())]


def _seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
