"""Pictures of small fleets, written as briefly as a table allows."""

from __future__ import annotations

from typing import Any

from workers.protocol.residency import Why
from workers.residency.picture import (
    CPU,
    NEVER,
    Bounds,
    Demand,
    Device,
    Failure,
    Machine,
    Model,
    Need,
    Picture,
    Share,
    Status,
    Worker,
)
from workers.residency.plan import Action, Drain, Plan, Release, Reserve, Start, Stop, Wait
from workers.residency.policy import Group, Residency, resolve

GIB = 2**30
NOW = 1_000.0


def machine(name: str = "m", gpus: tuple[float, ...] = (24,), host: float = 64, **more: Any) -> Machine:
    """Return a machine whose devices report all as free; `picture` subtracts what workers take."""
    devices = (*(Device(f"gpu{number}", int(size * GIB)) for number, size in enumerate(gpus)),)
    return Machine(name, (*devices, Device(CPU, int(host * GIB))), **more)


def model(
    name: str, gib: float = 10, *, need: Need | None = None, workers: int = 1, weights: float = 0, **policy: Any
) -> Model:
    """Return a model that takes so much of a GPU, or of the host where there is none. `weights`: GiB."""
    more = {field: policy.pop(field) for field in ("machines", "was_loaded", "left_at", "asleep_on") if field in policy}
    size = int(gib * GIB)
    return Model(
        name,
        resolve(Residency(**policy), workers),
        need or Need(size, cpu_bytes=size, weight_bytes=int(weights * GIB)),
        **more,
    )


def worker(
    name: str,
    gib: float = 10,
    *,
    on: str = "m",
    device: str = "gpu0",
    status: Status = "ready",
    idle_s: float = 100,
    age_s: float = 500,
    calls: int = 0,
    taken: int = 5,
    stale: bool = False,
    replaces: str = "",
) -> Worker:
    """Return a worker of the model that its name begins with: `a1` serves `a`."""
    shares = (Share(device, int(gib * GIB)),)
    last_used = NOW - idle_s if status != "loading" else NEVER
    since = NOW - age_s
    return Worker(name, name[0], on, shares, status, since, last_used, calls, 0, taken, stale, replaces)


def waits(name: str, for_s: float = 5, calls: int = 1, **more: Any) -> Demand:
    return Demand(name, calls, NOW - for_s, **more)


def failed(name: str, for_s: float = 60, machine: str = "") -> Failure:
    return Failure(name, NOW + for_s, Why.of("out of memory"), machine)


def picture(
    models: list[Model],
    workers: list[Worker] | None = None,
    demand: list[Demand] | None = None,
    *,
    machines: list[Machine] | None = None,
    groups: dict[str, Group] | None = None,
    **more: Any,
) -> Picture:
    """Return a picture whose devices report as free what its workers that have loaded do not take."""
    held: dict[tuple[str, str], int] = {}
    for each in workers or []:
        for share in each.shares if each.status != "loading" else ():
            held[each.machine, share.device] = held.get((each.machine, share.device), 0) + share.bytes
    return Picture(
        machines=tuple(
            Machine(
                one.id,
                tuple(
                    Device(
                        device.id,
                        device.total_bytes,
                        device.free_bytes or device.total_bytes - device.other_bytes - held.get((one.id, device.id), 0),
                        device.other_bytes,
                        device.is_trusted,
                    )
                    for device in one.devices
                ),
                one.is_leaving,
            )
            for one in machines or [machine()]
        ),
        models=tuple(models),
        workers=tuple(workers or []),
        demand=tuple(demand or []),
        groups=groups or {},
        bounds=more.pop("bounds", Bounds()),
        **more,
    )


def told(plan: Plan) -> list[str]:
    """Return a plan as short words: `start a m/gpu0`, `stop a1 for b`, `wait b freeing`."""
    return [_told(action) for action in plan.actions]


def _told(action: Action) -> str:
    match action:
        case Start():
            devices = "+".join(share.device for share in action.shares)
            place = f" for {action.replaces}" if action.replaces else ""
            return f"start {action.model} {action.machine}/{devices}{place}"
        case Stop():
            sleeps = " to sleep" if action.sleeps else ""
            return f"stop {action.worker}" + (f" for {action.wanted_by}" if action.wanted_by else "") + sleeps
        case Reserve():
            return f"reserve {action.worker} for {action.wanted_by}"
        case Drain():
            return f"drain {action.worker}"
        case Release():
            return f"release {action.worker}"
        case Wait():
            return f"wait {action.model} {action.reason}"
