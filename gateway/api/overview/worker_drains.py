"""Answers `POST /admin/workers/{worker}/drain`: has one worker finish its calls and end, so that it starts anew.

The worker ends by itself, and whoever keeps its process starts the next one. `drain_sentences` says before what that
means for callers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.overview.calls import AuditNote
from gateway.api.parameters.base import quote
from gateway.call import Principal
from gateway.errors import InvalidRequest, NotSupported, WorkerNotFound
from gateway.registry.desired_models import DesiredModels
from gateway.registry.snapshot import FleetSnapshot, FleetView
from gateway.relay.relay import WorkerQueries
from workers.protocol.control import LEAVE_PATH, decode_leaving
from workers.protocol.heartbeat import Heartbeat

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Maximum seconds for the worker's answer, which it gives at once."""
MOST_NAMED = 10
"""Maximum number of workers that an error names."""


def worker_named(snapshot: FleetSnapshot, worker: str) -> Heartbeat:
    """Return the heartbeat of the worker with this id. Raises WorkerNotFound; InvalidRequest if several models have
    one."""
    found = [beat for beats in snapshot.workers.values() for beat in beats if beat.worker == worker]
    if not found:
        raise WorkerNotFound(f"No worker {quote(worker)} is registered. {_those_known(snapshot)}", param="worker")
    if len(found) > 1:
        models = ", ".join(sorted(beat.model for beat in found))
        raise InvalidRequest(
            f"Several workers have the id {quote(worker)}, of the models {models}. Start each with a `worker_id` of "
            "its own.",
            param="worker",
        )
    return found[0]


def _those_known(snapshot: FleetSnapshot) -> str:
    """Return a sentence with the ids of the workers that are there, some of them if there are many."""
    known = sorted(beat.worker for beats in snapshot.workers.values() for beat in beats)
    if not known:
        return "None is, at the moment."
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    return f"Those that are: {', '.join(known[:MOST_NAMED])}{more}."


def num_calls(beat: Heartbeat) -> int:
    """Return how many calls a worker has: in slots, or before them."""
    return beat.load.slots_busy + beat.load.waiting


def drain_sentences(beat: Heartbeat, beats: Sequence[Heartbeat], *, is_kept: bool) -> list[str]:
    """Return what draining a worker means, for people. `beats`: all workers of its model. `is_kept`: whether a
    supervisor keeps workers of the model."""
    worker, model = beat.worker, beat.model
    number = num_calls(beat)
    first = f"{worker} finishes {_counted(number, 'call')} first, however long that takes: none is cut off."
    told = [first if number else f"{worker} has no calls, and ends at once."]
    others = [each for each in beats if each.boot != beat.boot and not each.draining]
    if others:
        slots, free = sum(each.slots for each in others), sum(max(0, each.slots - num_calls(each)) for each in others)
        takers = "the other worker" if len(others) == 1 else f"the {len(others)} other workers"
        told.append(f"New calls go to {takers} of {model} meanwhile: {free} of {_counted(slots, 'slot')} free.")
    else:
        told.append(f"No other worker of {model} takes calls: new ones wait until this one has started anew.")
    if beat.reserved:
        told.append("It takes no new calls already, as its supervisor wants its memory for another worker.")
    elif not is_kept:
        told.append("No supervisor keeps it: it is back only if something else starts it again, as Kubernetes does.")
    else:
        told.append("Then its supervisor starts it again, and it loads the model.")
    return told


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class WorkerDrains:
    """Handles the route."""

    def __init__(self, fleet: FleetView, queries: WorkerQueries, desired: DesiredModels, note: AuditNote) -> None:
        self._fleet = fleet
        self._queries = queries
        self._desired = desired
        self._note = note

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the worker leave, and answer at once. Raises WorkerNotFound, StoreUnavailable, NotSupported, and what
        `WorkerQueries.ask_worker` raises."""
        beat = worker_named(self._fleet.snapshot, str(scope["path_params"]["worker"]))
        # This raises while Redis is away, when a process that starts could not register.
        is_supervised = await self._desired.is_supervised(beat.model)
        try:
            left = await self._queries.ask_worker(beat, "POST", LEAVE_PATH, decode_leaving, timeout_s=ANSWER_S)
        except NotSupported:
            raise NotSupported(
                f"The worker {beat.worker} is of a version that can't be drained from here. Stop its process with "
                "SIGTERM: whoever keeps it starts it again.",
                param="worker",
            ) from None
        done = {"model": beat.model, "boot": left.boot, "calls": left.num_calls}
        log.warning(
            "an admin had a worker drained",
            extra={"fields": {"by": principal.key_id, "worker": beat.worker, **done}},
        )
        is_audited = await self._note(principal, scope, "drain", "worker", beat.worker, "", done)
        told = {"worker": beat.worker, **done, "is_supervised": is_supervised, "audited": is_audited}
        await send_json(send, told, request_log_of(scope))
