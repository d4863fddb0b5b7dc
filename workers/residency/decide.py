"""Decides what loads and what leaves, from one picture of the fleet. Pure: the same picture gives the same plan.

A supervisor asks for its own machine, a planner for a whole fleet. Neither needs to remember anything between two
decisions: what a plan begins shows in the next picture, where the same model is promised the same memory again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from workers.protocol.residency import Why
from workers.residency.eviction import Cost, Evictions, Leaver, cost_of, fewest, keeps
from workers.residency.leaving import dismiss, leave_by_rule, may_sleep, retire
from workers.residency.packing import Room, estimate, largest_room, pack
from workers.residency.picture import CPU, Machine, Model, Need, Picture, Share, Worker
from workers.residency.plan import Plan, Reserve, Start, Wait
from workers.residency.rules import broken_rules, clear_rules
from workers.residency.scene import Scene, gib, names, seconds
from workers.residency.wishes import Wish, count_wanted, find_wishes, first_of

MAX_ROOMS, MAX_LOOKS = 4, 8
"""For how many models one plan makes room, and on how many machines it looks for one at least, those first where it may
cost least: so that a plan for a large fleet is made in milliseconds."""

_Rank = tuple[int, int, float, int, bool, float]

Places = Mapping[str, tuple[Share, ...]]
"""Model -> what its new worker takes of each device of a machine."""


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to make room for a wish."""

    machine: Machine
    places: Places
    leavers: tuple[Leaver, ...]
    cost: Cost


def decide(picture: Picture, now: float) -> Plan:
    """Return what to do now, and what waits for what.

    No worker with calls is stopped for another model's, nothing starts into memory that is not free yet, and a model
    that has waited for `patience_s` gets the next place, in the order of waiting."""
    scene = Scene(picture, now)
    leave_by_rule(scene)
    evictions = Evictions(scene)
    wishes = find_wishes(scene)
    wanted = count_wanted(scene, wishes)
    for wish in wishes:
        _grant(scene, evictions, wish)
    for model in scene.of_model:
        for worker in scene.reserved(model):
            scene.release(worker)
    return scene.plan(wanted, _closed(scene))


def _grant(scene: Scene, evictions: Evictions, wish: Wish) -> None:
    """Start a wish's workers, or make room for them, or say what they wait for."""
    if wish.cause == "replacement":
        _replace(scene, wish)
        return
    if len(wish.models) == 1 and (reserved := scene.reserved(wish.model)):
        # Whoever wanted its place comes before this wish, and does not want it any more.
        scene.release(reserved[0])
        evictions.changed(reserved[0].machine)
        return
    if wish.cause in ("call", "preload") and (wish.model in scene.promised or scene.num_usable(wish.model)):
        return  # What `min` keeps serves calls as well.
    machines = _candidates(scene, wish)
    before = len(scene.moments)
    if _start(scene, wish, machines) or wish.cause == "preload":
        return
    option = _coming(scene, wish, machines)
    if option is None and evictions.num_rooms >= MAX_ROOMS:
        if wish.cause != "growth":
            why = Why.of(f"room is made for {MAX_ROOMS} other models first")
            scene.wait(Wait(wish.model, "turn", why))
        scene.moments.append(scene.now)
        return
    option = option or _cheapest(scene, evictions, wish, machines)
    if option is not None:
        _make_room(scene, wish, option)
        evictions.made_room(option.machine.id, option.leavers)
    elif wish.cause != "growth":
        scene.wait(_refused(scene, wish, machines, min(scene.moments[before:], default=None)))


def _replace(scene: Scene, wish: Wish) -> None:
    """Start the successor of a stale worker where memory for it is free, on the same machine if it can be. Where there
    is none, and none is coming, let the stale worker leave first, unless others of its model leave already."""
    stale = next(worker for worker in scene.workers if worker.id == wish.replaces)
    machines = sorted(_candidates(scene, wish), key=lambda machine: machine.id != stale.machine)
    if any(_start(scene, wish, [machine]) for machine in machines):
        return
    has_leaving = any(worker.id in scene.leaving for worker in scene.of_model[wish.model])
    if has_leaving or _coming(scene, wish, machines) is not None:
        return
    # Where it is busy, and others wait, it has just been released, for them.
    if not (stale.is_busy and scene.num_usable(wish.model) == 1 and scene.has_waited_long(wish.model)):
        why = Why.of(*wish.why.parts, ", and there is no memory for another worker beside it")
        retire(scene, stale, why)


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
                together = (
                    Why() if model == wish.model else Why.of((model,), " loads together with ", (wish.model,), "; ")
                )
                scene.start(Start(model, machine.id, shares, Why(together.parts + wish.why.parts), wish.replaces))
            return True
    return False


def _fit(scene: Scene, wish: Wish, machine: Machine) -> tuple[int, bool, int, int] | None:
    """Return what machines are compared by: few workers of the same models, the weights in memory, few devices, little
    left over there; None: the wish does not fit on this one now."""
    models = _missing(scene, wish, machine)
    if scene.has_rules and broken_rules(scene, machine.id, models, scene.present(machine.id)):
        return None
    room, sizes = scene.ledger.startable(machine.id), scene.ledger.gpu_sizes(machine)
    num_devices = left = 0
    for model in models:
        fit = estimate(scene.models[model].need_on(machine.id), room, sizes)
        if fit is None:
            return None
        num_devices, left = num_devices + fit[0], left + fit[1]
    same = sum(worker.machine == machine.id for model in models for worker in scene.of_model.get(model, ()))
    is_awake = not any(machine.id in scene.models[model].asleep_on for model in models)
    return same, is_awake, num_devices, left


def _devices_of(scene: Scene, model: str, machine: Machine) -> set[str]:
    """Return the devices of a machine that already have a worker of a model."""
    workers = [worker for worker in scene.of_model.get(model, ()) if worker.machine == machine.id]
    return {share.device for worker in workers if worker.id not in scene.leaving for share in worker.shares}


def _placed(scene: Scene, models: Iterable[str], machine: Machine, room: Room) -> Places | None:
    """Return what each model takes of which device, the largest placed first; None if they do not fit together."""
    left = dict(room)
    places: dict[str, tuple[Share, ...]] = {}
    needs = {model: scene.models[model].need_on(machine.id) for model in models}
    for model in sorted(needs, key=lambda name: (-_size(needs[name]), name)):
        avoided = _devices_of(scene, model, machine) if scene.of_model.get(model) else frozenset()
        shares = pack(needs[model], machine, left, avoided)
        if shares is None:
            return None
        places[model] = shares
        for share in shares:
            left[share.device] -= share.bytes
    return places


def _size(need: Need) -> int:
    return max(need.gpu_bytes + need.host_bytes, need.cpu_bytes)


def _coming(scene: Scene, wish: Wish, machines: Sequence[Machine]) -> _Option | None:
    """Return where there will be room for a wish although nobody else leaves for it; None: nowhere."""
    for machine in machines:
        if not scene.has_rules and machine.id not in scene.ledger.has_coming:
            continue  # no more is coming than is free now, which is not enough
        models = _missing(scene, wish, machine)
        if _fits(scene, models, machine, scene.ledger.coming[machine.id]):
            option = _room_on(scene, machine, models, [])
            if option is not None:
                return option
    return None


def _cheapest(scene: Scene, evictions: Evictions, wish: Wish, machines: Sequence[Machine]) -> _Option | None:
    """Return the cheapest way to make room for a wish, of equally costly ones where its model sleeps; None: there is
    none now."""
    asleep_on = scene.models[wish.model].asleep_on
    best: tuple[_Rank, _Option] | None = None
    possible: list[tuple[_Rank, int]] = []
    for number, machine in enumerate(machines):
        if _fits(scene, _missing(scene, wish, machine), machine, *evictions.most_room(machine.id, wish)):
            possible.append((_rank(evictions.least_cost(machine.id, wish), machine.id in asleep_on), number))
    for num_looks, (bound, number) in enumerate(sorted(possible)):
        if best is not None and (best[0] <= bound or num_looks >= MAX_LOOKS):
            break
        machine = machines[number]
        ranked = evictions.leavers(machine.id, wish)
        option = _room_on(scene, machine, _missing(scene, wish, machine), ranked) if ranked else None
        if option is not None:
            rank = _rank(option.cost, machine.id in asleep_on)
            if best is None or rank < best[0]:
                best = rank, option
    return None if best is None else best[1]


def _rank(cost: Cost, is_asleep: bool) -> _Rank:
    """Return the key by which ways to make room are sorted: the cost, with whether the wanted model sleeps there before
    the time of last use."""
    num_busy, num_new, priority, num_workers, idle_since = cost
    return num_busy, num_new, priority, num_workers, not is_asleep, idle_since


def _room_on(scene: Scene, machine: Machine, models: Sequence[str], ranked: list[Leaver]) -> _Option | None:
    """Return how room would be made for models on a machine, if these may leave it; None if it can't be."""
    ruled_out = clear_rules(scene, machine.id, models, ranked)
    if ruled_out is None:
        return None
    rest = [leaver for leaver in ranked if leaver not in ruled_out] if ruled_out else ranked
    coming = _with(scene.ledger.coming[machine.id], ruled_out)

    def is_enough(chosen: Sequence[Leaver]) -> bool:
        return _fits(scene, models, machine, _with(coming, chosen))

    chosen = fewest(rest, is_enough)
    if chosen is None:
        return None
    places = _placed(scene, models, machine, _with(coming, chosen))
    leaving = (*ruled_out, *chosen)
    return None if places is None else _Option(machine, places, leaving, cost_of(leaving))


def _fits(
    scene: Scene, models: Sequence[str], machine: Machine, room: Room, sizes: Sequence[int] | None = None
) -> bool:
    """Return whether models fit into a machine's room together. `sizes`: those of its GPUs in ascending order, if they
    are known."""
    if len(models) == 1:
        return _estimated(scene, models[0], machine, room, sizes) is not None
    return _placed(scene, models, machine, room) is not None


def _estimated(
    scene: Scene, model: str, machine: Machine, room: Room, sizes: Sequence[int] | None
) -> tuple[int, int] | None:
    """Return what `estimate` says of a model in a machine's room. `sizes` as for `_fits`."""
    if sizes is None:
        sizes = sorted(size for device, size in room.items() if device != CPU)
    return estimate(scene.models[model].need_on(machine.id), room, sizes)


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
    sleepers = _sleepers(scene, option)
    for leaver in option.leavers:
        for worker in leaver.workers:
            why = Why.of("it leaves for ", (wish.model,), ": ", *wish.why.parts)
            if worker.id in scene.leaving:
                pass  # It leaves already, for another reason.
            elif not leaver.is_busy:
                idle = seconds(scene.now - worker.idle_since)
                why = Why.of(f"idle for {idle}, ", *why.parts)
                dismiss(scene, worker, why, wanted_by=wish.model, sleeps=worker.id in sleepers)
            elif worker.status == "ready":
                scene.actions.append(Reserve(worker.id, worker.model, wish.model, why))
            scene.leave(worker)
            scene.count(worker)
    for model, shares in option.places.items():
        scene.ledger.promise(option.machine.id, shares)
        scene.started_on[option.machine.id].append(model)
        scene.promised.add(model)
    scene.wait(_freeing(scene, wish, option))


def _sleepers(scene: Scene, option: _Option) -> set[str]:
    """Return the workers that leave now and whose models are to sleep: main memory has room for their weights beside
    what is loaded there, the wish included, and what sleeps already. Where models run in main memory, that is seldom so
    but for a rule."""
    leaving = [worker for leaver in option.leavers if not leaver.is_busy for worker in leaver.workers]
    able = [worker for worker in leaving if worker.id not in scene.leaving and may_sleep(scene, worker)]
    if not able:
        return set()
    machine, found = option.machine.id, set[str]()
    shares = [share for places in option.places.values() for share in places]
    # A worker in main memory takes the very pages that are kept of its model.
    wakes = option.places.keys() if all(share.device == CPU for share in shares) else ()
    asleep = [model for model in scene.picture.models if machine in model.asleep_on and model.name not in wakes]
    room = _with(scene.ledger.coming[machine], option.leavers)[CPU] - scene.asleep_bytes.get(machine, 0)
    room -= sum(share.bytes for share in shares if share.device == CPU)
    room -= sum(model.need_on(machine).weight_bytes for model in asleep)
    for worker in able:
        size = scene.models[worker.model].need_on(machine).weight_bytes
        if 0 < size <= room:
            found.add(worker.id)
            room -= size
            scene.asleep_bytes[machine] = scene.asleep_bytes.get(machine, 0) + size
    return found


def _freeing(scene: Scene, wish: Wish, option: _Option) -> Wait:
    leaving = [worker for worker in scene.on_machine[option.machine.id] if worker.id in scene.leaving]
    busy = names(worker.model for worker in leaving if worker.is_busy)
    freed = f" on {option.machine.id} is being freed by "
    why = Why.of("memory for ", (wish.model,), freed, names(each.model for each in leaving))
    if busy:
        why = Why.of(*why.parts, "; calls of ", busy, " end first")
    return Wait(wish.model, "freeing", why)


def _refused(scene: Scene, wish: Wish, machines: Sequence[Machine], until: float | None) -> Wait:
    """Return why room can't be made for a wish now."""
    in_vain = _in_vain(scene, _Reach(scene, scene.ledger.empty), wish, machines, machines)
    if in_vain is not None:
        return in_vain
    reach, overdue_at = _Reach(scene, scene.ledger.reported), wish.since + scene.bounds.patience_s
    if not any(reach.has_room(wish, machine) for machine in machines):
        why = Why.of("other programs use the memory that ", (wish.model,), " needs")
        return Wait(wish.model, "others", why)
    if wish.is_overdue or wish.cause != "call":
        rest = " was loaded a moment ago, or its memory is promised to others"
        why = Why.of("what could leave for ", (wish.model,), rest)
        return Wait(wish.model, "resident", why, until)
    why = Why.of("all that could leave for ", (wish.model,), " have calls or were loaded a moment ago")
    if not wish.is_awaited:
        return Wait(wish.model, "busy", why, until)
    scene.look_at(overdue_at)
    rest = f"; in {seconds(overdue_at - scene.now)} one of them gets no more calls"
    return Wait(wish.model, "busy", Why.of(*why.parts, rest), min(overdue_at, until or overdue_at))


def _closed(scene: Scene) -> Iterator[Wait]:
    """Yield a `Wait` for each unloaded model that nobody calls, and that no call could have loaded."""
    reach = _Reach(scene, scene.ledger.empty)
    known: dict[frozenset[str] | None, tuple[list[Machine], list[Machine]]] = {}
    for model in filter(partial(_is_at_rest, scene), scene.picture.models):
        wish = Wish(first_of(scene.unit_of(model.name), model.name), "call", Why())
        if len(wish.models) > 1 or model.needs:
            allowed = sizes = _candidates(scene, wish)
        elif model.machines in known:
            allowed, sizes = known[model.machines]
        else:
            allowed = _candidates(scene, wish)
            sizes = _of_each_size(scene, allowed)
            known[model.machines] = allowed, sizes
        in_vain = _in_vain(scene, reach, wish, allowed, sizes) if allowed else None
        if in_vain is not None:
            yield in_vain


def _of_each_size(scene: Scene, machines: Iterable[Machine]) -> list[Machine]:
    """Return the first of the machines of each size: those of a fleet are often alike."""
    found: dict[tuple[int, ...], Machine] = {}
    for machine in machines:
        empty = scene.ledger.empty[machine.id]
        found.setdefault((empty.get(CPU, 0), *sorted(empty[device.id] for device in machine.gpus)), machine)
    return [*found.values()]


def _is_at_rest(scene: Scene, model: Model) -> bool:
    """Return whether a model has no worker, nor is about to get one, and the next call would have it loaded."""
    name = model.name
    if scene.of_model.get(name) or scene.is_waiting(name) or name in scene.promised or name in scene.num_started:
        return False
    if name in scene.picture.unloaded or any(scene.failures_of(name)):
        return False  # A call takes the mark back; a failure is told by the machine that has it.
    return bool(model.policy.most) and model.policy.autoload


def _in_vain(
    scene: Scene, reach: _Reach, wish: Wish, machines: Sequence[Machine], sizes: Sequence[Machine]
) -> Wait | None:
    """Return why a wish can't be granted though all leave that may; None: it can be. `reach`: from empty machines;
    `sizes`: a machine of each size at least."""
    empty, model = scene.ledger.empty, scene.models[wish.model]
    if any(_has_place(scene, wish.models, machine, empty[machine.id]) for machine in sizes):
        if any(reach.has_room(wish, machine) for machine in machines):
            return None
        why = Why.of("what is loaded stays (`min`, `pinned` or a group), and leaves no room for ", (wish.model,))
        return Wait(wish.model, "no_room", why)
    room = {each.id: largest_room(model.need_on(each.id), each, empty[each.id]) for each in sizes}
    by_size = max(sizes, key=lambda each: room[each.id], default=None)
    if by_size is None:
        return Wait(wish.model, "too_large", Why.of("no machine may run ", wish.models))
    need, most = model.need_on(by_size.id), gib(room[by_size.id])
    size = gib(_size(need) + need.bytes_per_gpu)
    has = f" takes {size}, and {by_size.id}, which has the most, has {most} for one worker"
    return Wait(wish.model, "too_large", Why.of((wish.model,), has))


def _has_place(
    scene: Scene, models: Sequence[str], machine: Machine, room: Room, sizes: Sequence[int] | None = None
) -> bool:
    """Return whether models can be placed in a machine's room together. `sizes` as for `_fits`, which is quicker and
    may take a split for possible that is not."""
    if len(models) == 1:
        found = _estimated(scene, models[0], machine, room, sizes)
        if found is None or found[0] == 1:
            return found is not None
    return bool(_placed(scene, models, machine, room))


class _Reach:
    """Finds whether there would be room on a machine if all left that need not stay. Of use until others leave."""

    def __init__(self, scene: Scene, empty: Mapping[str, Room]) -> None:
        """`empty`: machine -> the bytes of its devices without any worker."""
        self._scene = scene
        self._empty = empty
        self._beside: dict[str, tuple[dict[str, int], list[int], frozenset[str]]] = {}
        """Machine -> what `_left` returns for a model without workers."""

    def has_room(self, wish: Wish, machine: Machine) -> bool:
        """Return whether a wish would fit on a machine."""
        scene = self._scene
        if any(scene.of_model.get(model) for model in wish.models):
            room, sizes, present = self._left(machine.id, wish.models)
        elif (known := self._beside.get(machine.id)) is not None:
            room, sizes, present = known
        else:
            room, sizes, present = self._beside[machine.id] = self._left(machine.id)
        models = _missing(scene, wish, machine)
        return not broken_rules(scene, machine.id, models, present) and _has_place(scene, models, machine, room, sizes)

    def _left(self, machine: str, models: Sequence[str] = ()) -> tuple[dict[str, int], list[int], frozenset[str]]:
        """Return the bytes of each device of a machine beside the workers that stay, those of its GPUs in ascending
        order, and what these workers serve. Those of `models` count as if they stayed."""
        scene = self._scene
        staying = [worker for worker in scene.on_machine[machine] if worker.model in models or _stays(scene, worker)]
        room = dict(self._empty[machine])
        for worker in staying:
            if worker.id not in scene.leaving:
                for share in worker.shares:
                    room[share.device] = room.get(share.device, 0) - share.bytes
        sizes = sorted(size for device, size in room.items() if device != CPU)
        return room, sizes, frozenset(worker.model for worker in staying)


def _stays(scene: Scene, worker: Worker) -> bool:
    """Return whether a worker stays if all leave that may: as many of a model's as its `min` says."""
    model = scene.models.get(worker.model)
    if model is None or not (model.policy.pinned or model.policy.min):
        return False
    return keeps(scene, worker) or worker in scene.usable(worker.model)[: model.policy.min]
