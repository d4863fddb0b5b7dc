"""Makes the state of a model on one machine, as gateways are told it, of what the machine's supervisor knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from workers.planner.messages import ToldWait
from workers.protocol.residency import ModelState, ModelStatus, Why
from workers.residency.picture import Status
from workers.residency.plan import CLOSED, HOPELESS
from workers.residency.scene import gib
from workers.residency.wishes import not_by_calls
from workers.supervisor.loading.history import History


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a model's memory can't be predicted, and so the model not be loaded."""

    why: Why
    """Empty: it can be."""
    retry_at: float
    """Unix time at which it is tried again; 0: that is not known."""


def state_of(
    model: str,
    workers: Collection[Status],
    progress: float | None,
    past: History,
    refused: Refused,
    wait: ToldWait | None,
    now: float,
    *,
    kept_bytes: int = 0,
    needs_admin: bool,
    with_log: bool,
) -> ModelState:
    """Return a model's state. `workers`: the states of its workers here; `progress`: how far the one that loads is;
    `wait`: what keeps it from being loaded, or would, as the planner says; `kept_bytes`: those of its weights that stay
    in memory while it sleeps; `needs_admin`: whether no call loads it."""
    failure, last = past.pending(now), past.last
    status: ModelStatus = "unloaded"
    if "ready" in workers or "reserved" in workers:
        status = "loaded"
    elif "loading" in workers:
        status = "loading"
    elif failure is not None or refused.why:
        status = "failed"
    elif kept_bytes:
        status = "sleeping"
    needs_admin = needs_admin and status == "unloaded"
    has_no_room = wait is not None and wait.reason in CLOSED
    before = last.why if last is not None and status != "loaded" else None
    rests = not_by_calls(model) if needs_admin else None
    if status == "sleeping":
        rests = Why.of((model,), f" sleeps; its weights ({gib(kept_bytes)}) are in memory")
    whys = (refused.why, None if failure is None else failure.why, None if wait is None else wait.why, before, rests)
    is_hopeless = bool(refused.why) or needs_admin or (wait is not None and wait.reason in HOPELESS)
    return ModelState(
        status=status,
        progress=progress,
        why=next((why for why in whys if why), Why()),
        is_hopeless=is_hopeless and status not in ("loaded", "loading"),
        is_closed=needs_admin or (has_no_room and status == "unloaded"),
        retry_at=failure.not_before if failure is not None else refused.retry_at,
        num_failures=past.num_failures,
        exit_code=last.code if last is not None else None,
        log=last.lines if last is not None and with_log else (),
    )
