"""Decides what loads and what leaves, from one picture of the fleet. Pure: the same picture gives the same plan.

A supervisor asks for its own machine, a planner for a whole fleet. Neither needs to remember anything between two
decisions: what a plan begins shows in the next picture, where the same model is promised the same memory again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workers.residency.eviction import Leaver, fewest, keeps, leavers
from workers.residency.leaving import dismiss, leave_by_rule
from workers.residency.packing import Room, estimate, largest_room, pack
from workers.residency.picture import Machine, Need, Picture, Share
from workers.residency.plan import Plan, Release, Reserve, Start, Wait, WaitReason
from workers.residency.rules import broken_rules, clear_rules
from workers.residency.scene import Scene, gib, names, seconds
from workers.residency.wishes import Wish, find_wishes

Places = Mapping[str, tuple[Share, ...]]
"""Model -> what its new worker takes of each device of a machine."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to make room for a wish."""

    machine: Machine
    places: Places
    leavers: tuple[Leaver, ...]

    @property
    def key(self) -> tuple[int, int, float, int, float]:
        """Return what options are compared by: few busy workers first, then few new ones to wait for, low priority, few
        workers, used long ago."""
        busy = [leaver for leaver in self.leavers if leaver.is_busy]
        return (
            len(busy),
            sum(leaver.key[1] for leaver in busy),
            max((leaver.key[2] for leaver in self.leavers), default=float("-inf")),
            sum(len(leaver.workers) for leaver in self.leavers),
            max((leaver.key[4] for leaver in self.leavers), default=float("-inf")),
        )


def decide(picture: Picture, now: float) -> Plan:
    """Return what to do now, and what waits for what.

    No worker with calls is stopped for another model's, nothing starts into memory that is not free yet, and a model
    that has waited for `patience_s` gets the next place, in the order of waiting."""
    scene = Scene(picture, now)
    leave_by_rule(scene)
    for wish in find_wishes(scene):
        _grant(scene, wish)
    for worker in scene.workers:
        if worker.status == "reserved" and worker.id not in scene.leaving:
            why = f"nobody waits for the place of {worker.model} any more"
            scene.actions.append(Release(worker.id, worker.model, why))
    return scene.plan()


def _grant(scene: Scene, wish: Wish) -> None:
    """Start a wish's workers, or make room for them, or say what they wait for."""
    machines = _candidates(scene, wish)
    before = len(scene.moments)
    if _start(scene, wish, machines) or wish.cause == "preload":
        return
    options = [option for machine in machines if (option := _room_on(scene, wish, machine))]
    if options:
        _make_room(scene, wish, min(options, key=lambda option: option.key))
    elif wish.cause != "growth":
        scene.wait(_refused(scene, wish, machines, min(scene.moments[before:], default=None)))


def _candidates(scene: Scene, wish: Wish) -> list[Machine]:
    """Return the machines on which each of a wish's models may load."""
    found = scene.candidates(scene.models[wish.model])
    for other in wish.models[1:]:
        allowed = scene.candidates(scene.models[other]) if other not in scene.picture.unloaded else []
        found = [machine for machine in found if machine in allowed]
    return found


def _missing(scene: Scene, wish: Wish, machine: Machine) -> tuple[str, ...]:
    """Return those of a wish's models that need a new worker on a machine."""
    if len(wish.models) == 1 or wish.cause == "growth":
        return wish.models
    there = {worker.model for worker in scene.on_machine[machine.id] if worker.id not in scene.leaving}
    return tuple(model for model in wish.models if model not in there)


def _start(scene: Scene, wish: Wish, machines: Sequence[Machine]) -> bool:
    """Start a wish's workers on the machine that they fit best, if there is one where they fit now."""
    ranked = sorted(
        (rank, number) for number, machine in enumerate(machines) if (rank := _fit(scene, wish, machine)) is not None
    )
    for _, number in ranked:
        machine = machines[number]
        places = _placed(scene, _missing(scene, wish, machine), machine, scene.ledger.startable(machine.id))
        if places is not None:
            for model, shares in places.items():
                scene.start(Start(model, machine.id, shares, wish.why))
            return True
    return False


def _fit(scene: Scene, wish: Wish, machine: Machine) -> tuple[int, int, int] | None:
    """Return what machines are compared by: few workers of the same models, few devices, little left over there; None:
    the wish does not fit on this one now."""
    models = _missing(scene, wish, machine)
    if scene.has_rules and broken_rules(scene, machine.id, models, scene.present(machine.id)):
        return None
    room, sizes = scene.ledger.startable(machine.id), scene.ledger.gpu_sizes(machine)
    num_devices = left = 0
    for model in models:
        fit = estimate(scene.models[model].need, room, sizes)
        if fit is None:
            return None
        num_devices, left = num_devices + fit[0], left + fit[1]
    same = sum(worker.machine == machine.id for model in models for worker in scene.of_model.get(model, ()))
    return same, num_devices, left


def _devices_of(scene: Scene, model: str, machine: Machine) -> set[str]:
    """Return the devices of a machine that already have a worker of a model."""
    workers = [worker for worker in scene.of_model.get(model, ()) if worker.machine == machine.id]
    return {share.device for worker in workers if worker.id not in scene.leaving for share in worker.shares}


def _placed(scene: Scene, models: Iterable[str], machine: Machine, room: Room) -> Places | None:
    """Return what each model takes of which device, the largest placed first; None if they do not fit together."""
    left = dict(room)
    places: dict[str, tuple[Share, ...]] = {}
    for model in sorted(models, key=lambda name: (-_size(scene.models[name].need), name)):
        avoided = _devices_of(scene, model, machine) if scene.of_model.get(model) else frozenset()
        shares = pack(scene.models[model].need, machine, left, avoided)
        if shares is None:
            return None
        places[model] = shares
        for share in shares:
            left[share.device] -= share.bytes
    return places


def _size(need: Need) -> int:
    return max(need.gpu_bytes + need.host_bytes, need.cpu_bytes)


def _room_on(scene: Scene, wish: Wish, machine: Machine) -> _Option | None:
    """Return how room would be made for a wish on a machine; None if it can't be now."""
    models = _missing(scene, wish, machine)
    coming = scene.ledger.coming[machine.id]
    ranked = leavers(scene, machine.id, wish)
    ruled_out = clear_rules(scene, machine.id, models, ranked)
    if ruled_out is None:
        return None
    rest = [leaver for leaver in ranked if leaver not in ruled_out]

    def is_enough(chosen: Sequence[Leaver]) -> bool:
        return _placed(scene, models, machine, _with(coming, (*ruled_out, *chosen))) is not None

    chosen = fewest(rest, is_enough)
    if chosen is None:
        return None
    leaving = (*ruled_out, *chosen)
    places = _placed(scene, models, machine, _with(coming, leaving))
    return None if places is None else _Option(machine, places, leaving)


def _with(room: Room, leaving: Iterable[Leaver]) -> dict[str, int]:
    """Return the bytes of each device once these have left."""
    found = dict(room)
    for leaver in leaving:
        for worker in leaver.workers:
            for share in worker.shares:
                if share.device in found:
                    found[share.device] += share.bytes
    return found


def _make_room(scene: Scene, wish: Wish, option: _Option) -> None:
    """Let workers leave for a wish, and keep their memory for it."""
    for leaver in option.leavers:
        for worker in leaver.workers:
            why = f"it leaves for {wish.model}: {wish.why}"
            if worker.id in scene.leaving:
                pass  # It leaves already, for another reason.
            elif scene.is_idle(worker):
                idle = seconds(scene.now - worker.idle_since)
                dismiss(scene, worker, f"idle for {idle}, {why}", wanted_by=wish.model)
            elif worker.status == "ready":
                scene.actions.append(Reserve(worker.id, worker.model, wish.model, why))
            scene.leaving.add(worker.id)
            scene.count(worker)
    for model, shares in option.places.items():
        scene.ledger.promise(option.machine.id, shares)
        scene.started_on[option.machine.id].append(model)
    scene.wait(_freeing(scene, wish, option))


def _freeing(scene: Scene, wish: Wish, option: _Option) -> Wait:
    leaving = [worker for worker in scene.on_machine[option.machine.id] if worker.id in scene.leaving]
    busy = names(worker.model for worker in leaving if worker.is_busy)
    told = f"memory for {wish.model} on {option.machine.id} is being freed by {names(each.model for each in leaving)}"
    return Wait(wish.model, "freeing", f"{told}; calls of {busy} end first" if busy else told)


def _refused(scene: Scene, wish: Wish, machines: Sequence[Machine], until: float | None) -> Wait:
    """Return why room can't be made for a wish now."""
    need, overdue_at = scene.models[wish.model].need, wish.since + scene.bounds.patience_s
    by_size = max(machines, key=lambda each: largest_room(need, each, scene.ledger.empty[each.id]), default=None)
    reason: WaitReason
    if by_size is None:
        return Wait(wish.model, "too_large", f"no machine may run {', '.join(wish.models)}")
    if not any(_placed(scene, wish.models, machine, scene.ledger.empty[machine.id]) for machine in machines):
        most = gib(largest_room(need, by_size, scene.ledger.empty[by_size.id]))
        size = gib(_size(need) + need.bytes_per_gpu)
        why = f"{wish.model} takes {size}, and {by_size.id}, which has the most, has {most} for one worker"
        return Wait(wish.model, "too_large", why)
    reason, why = "no_room", f"what is loaded stays (`min`, `pinned` or a group), and leaves no room for {wish.model}"
    if any(_could_ever(scene, wish, machine) for machine in machines):
        if wish.is_overdue or wish.cause != "call":
            reason, why = "resident", f"what could leave for {wish.model} was loaded a moment ago"
        else:
            until = min(overdue_at, until or overdue_at)
            wait = seconds(overdue_at - scene.now)
            reason = "busy"
            others = f"all that could leave for {wish.model} have calls or were loaded a moment ago"
            why = f"{others}; in {wait} one of them gets no more calls"
            scene.look_at(overdue_at)
    return Wait(wish.model, reason, why, until)


def _could_ever(scene: Scene, wish: Wish, machine: Machine) -> bool:
    """Return whether a wish would fit on a machine if all that need not stay left."""
    staying = [worker for worker in scene.on_machine[machine.id] if worker.model in wish.models or keeps(scene, worker)]
    room = dict(scene.ledger.empty[machine.id])
    for worker in staying:
        if worker.id not in scene.leaving:
            for share in worker.shares:
                room[share.device] = room.get(share.device, 0) - share.bytes
    present = frozenset(worker.model for worker in staying)
    models = _missing(scene, wish, machine)
    return not broken_rules(scene, machine.id, models, present) and bool(_placed(scene, models, machine, room))
