"""Explains a decision: as data that JSON can hold, and as sentences for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

from workers.residency.ledger import free_bytes
from workers.residency.picture import CPU, Device, Machine, Picture, Share, Worker
from workers.residency.plan import HOPELESS, Action, Drain, Plan, Release, Reserve, Start, Stop, Wait
from workers.residency.scene import gib, seconds


class DeviceData(TypedDict):
    machine: str
    device: str
    total_bytes: int
    free_bytes: int
    """What a new worker may take."""
    workers: dict[str, int]
    """Worker -> bytes that it takes or will."""


class ActionData(TypedDict, total=False):
    action: str
    model: str
    why: str
    worker: str
    machine: str
    bytes: dict[str, int]
    """Device -> bytes that are taken, or will be free."""
    wanted_by: str
    replaces: str
    """Id of the worker whose place it takes; empty: it takes nobody's."""
    sleeps: bool
    """Whether the model's weights stay in main memory."""
    reason: str
    is_hopeless: bool
    until: float | None


class PlanData(TypedDict):
    devices: list[DeviceData]
    actions: list[ActionData]
    ask_again_at: float | None


def as_data(picture: Picture, plan: Plan) -> PlanData:
    """Return a decision as data: the memory that it was made from, its actions in order, and when to ask again."""
    devices = [
        DeviceData(
            machine=machine.id,
            device=device.id,
            total_bytes=device.total_bytes,
            free_bytes=free_bytes(device, shares),
            workers={worker.id: share.bytes for worker, share in shares},
        )
        for machine, device, shares in _devices(picture)
    ]
    return PlanData(devices=devices, actions=[_action(each) for each in plan.actions], ask_again_at=plan.ask_again_at)


def _action(action: Action) -> ActionData:
    data = ActionData(action=type(action).__name__.lower(), model=action.model, why=action.why.whole)
    if isinstance(action, Stop | Reserve | Drain | Release):
        data["worker"] = action.worker
    if isinstance(action, Stop | Reserve):
        data["wanted_by"] = action.wanted_by
    match action:
        case Start():
            data["machine"], data["bytes"] = action.machine, _bytes(action.shares)
            data["replaces"] = action.replaces
        case Stop():
            data["bytes"], data["sleeps"] = _bytes(action.frees), action.sleeps
        case Wait():
            data["reason"], data["until"] = action.reason, action.until
            data["is_hopeless"] = action.reason in HOPELESS
        case _:
            pass
    return data


def _bytes(shares: Iterable[Share]) -> dict[str, int]:
    return {share.device: share.bytes for share in shares}


def _devices(picture: Picture) -> Iterator[tuple[Machine, Device, Sequence[tuple[Worker, Share]]]]:
    for machine in picture.machines:
        for device in machine.devices:
            shares = [
                (worker, share)
                for worker in picture.workers
                if worker.machine == machine.id
                for share in worker.shares
                if share.device == device.id
            ]
            yield machine, device, shares


def sentences(picture: Picture, plan: Plan, now: float) -> list[str]:
    """Return a decision as sentences: first the memory of each device, then one for each action."""
    return [*_memory(picture, now), *(_sentence(action, now) for action in plan.actions)]


def _memory(picture: Picture, now: float) -> Iterator[str]:
    for machine, device, shares in _devices(picture):
        free = gib(max(0, free_bytes(device, shares)))
        where = f"{machine.id}, {'main memory' if device.id == CPU else device.id}"
        held = "; ".join(f"{worker.model} {gib(share.bytes)} ({_state(worker, now)})" for worker, share in shares)
        yield f"{where}: {free} of {gib(device.total_bytes)} are free" + (f"; {held}" if held else "")


def _state(worker: Worker, now: float) -> str:
    if worker.status == "loading":
        return f"loading for {seconds(now - worker.since)}"
    calls = worker.num_running + worker.num_granted
    state = {"ready": "", "reserved": "reserved, ", "draining": "leaving, "}[worker.status]
    if not calls:
        return f"{state}idle for {seconds(now - worker.idle_since)}"
    return f"{state}1 call" if calls == 1 else f"{state}{calls} calls"


def _sentence(action: Action, now: float) -> str:
    match action:
        case Start():
            where = ", ".join(f"{gib(share.bytes)} on {share.device}" for share in action.shares)
            beside = f" in place of {action.replaces}" if action.replaces else ""
            return f"Start {action.model} on {action.machine}{beside} ({where}): {action.why.whole}."
        case Stop():
            freed = ", ".join(f"{gib(share.bytes)} on {share.device}" for share in action.frees)
            kept = ", and keep its weights in main memory" if action.sleeps else ""
            return f"Stop {action.model} ({action.worker}), which frees {freed}{kept}: {action.why.whole}."
        case Drain():
            return f"Let the calls of {action.model} ({action.worker}) end: {action.why.whole}."
        case Reserve():
            return f"Give {action.model} ({action.worker}) no more calls: {action.why.whole}."
        case Release():
            return f"Give {action.model} ({action.worker}) calls again: {action.why.whole}."
        case Wait():
            until = "" if action.until is None else f" (decided again in {seconds(action.until - now)})"
            return f"{action.model} waits: {action.why.whole}{until}."
