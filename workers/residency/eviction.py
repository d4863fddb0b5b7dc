"""Finds which workers of a machine give way to a model that waits, and as few of them as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from workers.residency.leaving import unit_workers
from workers.residency.picture import CPU, Worker
from workers.residency.scene import Scene
from workers.residency.wishes import Wish

NEVER_BEFORE = float("-inf")


@dataclass(frozen=True, slots=True)
class Leaver:
    """Workers that would leave as one: nearly always one."""

    workers: tuple[Worker, ...]
    is_busy: bool
    is_new: bool
    """Whether it does not leave already, nor is reserved."""
    priority: int
    is_last: bool
    """Whether each of its models would have no other worker."""
    since: float
    idle_since: float

    @property
    def key(self) -> tuple[bool, bool, int, bool, float, str]:
        """Return what leavers are sorted by. The first leaves first: idle before busy, reserved already, of low
        priority, one of several workers of its model, used longest ago."""
        return self.is_busy, self.is_new, self.priority, self.is_last, self.idle_since, self.workers[0].id

    @property
    def models(self) -> frozenset[str]:
        return frozenset(worker.model for worker in self.workers)


Cost = tuple[int, int, float, int, float]
"""What ways to make room are compared by: few busy workers first, then few that are not reserved yet, low priority, few
workers, used long ago."""


def cost_of(leavers: Sequence[Leaver]) -> Cost:
    """Return what it costs that these leave."""
    busy = [leaver for leaver in leavers if leaver.is_busy]
    return (
        len(busy),
        sum(leaver.is_new for leaver in busy),
        max((leaver.priority for leaver in leavers), default=NEVER_BEFORE),
        sum(len(leaver.workers) for leaver in leavers),
        max((leaver.idle_since for leaver in leavers), default=NEVER_BEFORE),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """The leavers of a machine, sorted, and the moment at which time alone adds to them."""

    ranked: list[Leaver]
    until: float | None
    least: Cost
    """No set of them costs less."""
    frees: dict[str, int]
    """Device -> bytes that are free once all have left."""


class Evictions:
    """Finds who may leave which machine, and keeps that while a plan is made, until others leave the machine."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._found: dict[tuple[str, bool, bool], _Found] = {}
        self._rooms: dict[tuple[str, bool, bool], tuple[_Found, int, dict[str, int], list[int]]] = {}
        """What `most_room` has found, of whom, and at which state of the ledger."""
        self.num_rooms = 0
        """For how many models others begin to leave by this plan."""

    def made_room(self, machine: str, leavers: Sequence[Leaver]) -> None:
        """Count a model that these leave a machine for, and forget what does not hold any more."""
        self.num_rooms += any(leaver.is_new for leaver in leavers)
        models = self._scene.models
        names = {worker.model for leaver in leavers for worker in leaver.workers} & models.keys()
        if any(models[name].policy.min for name in names):
            # On other machines fewer workers of these may leave from now on.
            self._found.clear()
        self.changed(machine)

    def changed(self, machine: str) -> None:
        """Forget what was found for a machine."""
        for is_overdue in (False, True):
            for is_growth in (False, True):
                self._found.pop((machine, is_overdue, is_growth), None)

    def least_cost(self, machine: str, wish: Wish) -> Cost:
        """Return a bound below what it costs to make room for a wish on a machine, if somebody has to leave."""
        return self._of(machine, wish).least

    def most_room(self, machine: str, wish: Wish) -> tuple[dict[str, int], list[int]]:
        """Return the bytes of each device of a machine that are free once all have left that may, and those of its GPUs
        in ascending order."""
        key, found = (machine, wish.is_overdue, wish.cause == "growth"), self._of(machine, wish)
        ledger = self._scene.ledger
        known = self._rooms.get(key)
        if known is not None and known[0] is found and known[1] == ledger.num_changes[machine]:
            return known[2:]
        room = {device: size + found.frees.get(device, 0) for device, size in ledger.coming[machine].items()}
        sizes = sorted(size for device, size in room.items() if device != CPU)
        self._rooms[key] = (found, ledger.num_changes[machine], room, sizes)
        return room, sizes

    def leavers(self, machine: str, wish: Wish) -> list[Leaver]:
        """Return who may leave a machine for a wish, first whom it costs least."""
        scene, found = self._scene, self._of(machine, wish)
        ranked = found.ranked
        if any(scene.of_model.get(model) for model in wish.models):
            own = frozenset(wish.models)
            ranked = [leaver for leaver in ranked if not leaver.is_new or not leaver.models & own]
        if wish.cause == "call" and not wish.is_overdue and _takes_turns(scene, wish):
            ranked = [leaver for leaver in ranked if not leaver.is_new or _is_quiet(scene, leaver, wish)]
        return ranked

    def _of(self, machine: str, wish: Wish) -> _Found:
        key = (machine, wish.is_overdue, wish.cause == "growth")
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _find(self._scene, machine, wish)
        if found.until is not None:
            self._scene.look_at(found.until)
        return found


def _find(scene: Scene, machine: str, wish: Wish) -> _Found:
    found: list[Leaver] = []
    seen: set[str] = set()
    moments: list[float] = []
    for worker in scene.on_machine[machine]:
        if worker.id in scene.counted or worker.id in seen:
            continue
        if worker.id in scene.leaving:
            found.append(_leaver(scene, (worker,)))
            continue
        if not wish.is_overdue and not scene.is_idle(worker):
            continue  # time alone does not let it leave
        workers = unit_workers(scene, worker)
        seen.update(each.id for each in workers)
        stays_until = max(_stays_until(scene, each, wish) for each in workers)
        if stays_until <= scene.now:
            found.append(_leaver(scene, workers))
        else:
            moments.append(stays_until)
    ranked = _within_min(scene, sorted(found, key=lambda leaver: leaver.key))
    until = min((moment for moment in moments if moment != float("inf")), default=None)
    frees: dict[str, int] = {}
    for leaver in ranked:
        for worker in leaver.workers:
            for share in worker.shares:
                frees[share.device] = frees.get(share.device, 0) + share.bytes
    return _Found(ranked, until, _least(ranked), frees)


def _least(ranked: Sequence[Leaver]) -> Cost:
    if not ranked:
        return (len(ranked) + 1_000_000, 0, 0.0, 0, 0.0)
    first = ranked[0]
    idle_since = min(leaver.idle_since for leaver in ranked)
    return (int(first.is_busy), int(first.is_busy and first.is_new), first.priority, 1, idle_since)


def _leaver(scene: Scene, workers: tuple[Worker, ...]) -> Leaver:
    if len(workers) == 1:
        return _single(scene, workers[0])
    known = [scene.models[worker.model].policy.priority for worker in workers if worker.model in scene.models]
    return Leaver(
        workers,
        is_busy=any(not scene.is_idle(worker) for worker in workers),
        is_new=not any(worker.status == "reserved" or worker.id in scene.leaving for worker in workers),
        priority=max(known, default=0),
        is_last=all(scene.count_usable(worker.model) <= 1 for worker in workers),
        since=max(worker.since for worker in workers),
        idle_since=max(worker.idle_since for worker in workers),
    )


def _single(scene: Scene, worker: Worker) -> Leaver:
    """Return the leaver of one worker. There are thousands of them in a large fleet."""
    model = scene.models.get(worker.model)
    return Leaver(
        (worker,),
        not scene.is_idle(worker),
        not (worker.status == "reserved" or worker.id in scene.leaving),
        model.policy.priority if model is not None else 0,
        scene.count_usable(worker.model) <= 1,
        worker.since,
        worker.idle_since,
    )


def _within_min(scene: Scene, ranked: list[Leaver]) -> list[Leaver]:
    """Return the leavers without those that would leave a model fewer workers than its `min`, if all left."""
    spare: dict[str, int] = {}
    kept: list[Leaver] = []
    for leaver in ranked:
        counted = [worker for worker in leaver.workers if leaver.is_new and scene.models[worker.model].policy.min]
        for worker in counted:
            if worker.model not in spare:
                spare[worker.model] = scene.count_usable(worker.model) - scene.models[worker.model].policy.min
        if all(spare[worker.model] > 0 for worker in counted):
            kept.append(leaver)
            for worker in counted:
                spare[worker.model] -= 1
    return kept


def keeps(scene: Scene, worker: Worker) -> bool:
    """Return whether a worker stays whatever others want."""
    model = scene.models.get(worker.model)
    if model is None or worker.id in scene.leaving:
        return False
    is_spare = worker.status == "reserved" or scene.count_usable(worker.model) > model.policy.min
    return model.policy.pinned or not is_spare


def _stays_until(scene: Scene, worker: Worker, wish: Wish) -> float:
    """Return the moment from which a worker may leave for such a wish, as far as time alone decides; infinity: not by
    time alone."""
    if worker.status not in ("ready", "reserved") or worker.id in scene.released or keeps(scene, worker):
        return scene.now if _loads_for_nobody(scene, worker, wish) else float("inf")
    if worker.status == "reserved":
        return scene.now if wish.is_overdue or not worker.is_busy else float("inf")
    if not scene.is_idle(worker) and (not wish.is_overdue or wish.cause == "growth"):
        return float("inf")
    patience_s = scene.bounds.patience_s
    resident_until = worker.since + scene.models[worker.model].policy.stay_s(worker.load_s)
    if wish.cause == "growth":
        # Another worker of a model that is there is worth less than a model that may be called again any time.
        resident_until = max(resident_until, worker.idle_since + patience_s)
    # One that was reserved in vain serves those who have waited meanwhile.
    resident_until = max(resident_until, worker.released_at + patience_s / 2)
    if worker.model in scene.demand and not worker.num_taken:
        # It was loaded for calls that it has not been given yet; were it to leave, models could load in turn for ever.
        resident_until = max(resident_until, worker.since + patience_s)
    return resident_until


def _loads_for_nobody(scene: Scene, worker: Worker, wish: Wish) -> bool:
    """Return whether a worker still loads though all its callers have left, and a call for another model waits."""
    if worker.status != "loading" or wish.cause != "call" or worker.model in scene.demand or keeps(scene, worker):
        return False
    model = scene.models.get(worker.model)
    return model is not None and not model.policy.preload


def _takes_turns(scene: Scene, wish: Wish) -> bool:
    """Return whether the wanted model gave its place up a moment ago: then the others will want theirs back as well,
    and each load should be for all the calls that come close together."""
    return any(scene.now - scene.models[model].left_at < 2 * scene.bounds.patience_s for model in wish.models)


def _is_quiet(scene: Scene, leaver: Leaver, wish: Wish) -> bool:
    """Return whether an idle leaver has had its time to be called again."""
    turn_ends_at = max(leaver.since, wish.since) + scene.bounds.patience_s / 2
    quiet_s = max(scene.models[worker.model].policy.quiet_s(worker.load_s) for worker in leaver.workers)
    quiet_at = min(leaver.idle_since + min(scene.bounds.quiet_s, quiet_s), turn_ends_at)
    scene.look_at(quiet_at)
    return scene.now >= quiet_at


def fewest(ranked: list[Leaver], is_enough: Callable[[Sequence[Leaver]], bool]) -> list[Leaver] | None:
    """Return as few of these leavers as are enough: none, one alone, or several of which none can stay; None: all are
    not enough. Idle ones are tried before busy ones."""
    if is_enough([]):
        return []
    for pool in _pools(ranked):
        if not is_enough(pool):
            continue
        alone = next((leaver for leaver in pool if is_enough([leaver])), None)
        if alone is not None:
            return [alone]
        chosen: list[Leaver] = []
        for leaver in pool:
            chosen.append(leaver)
            if is_enough(chosen):
                break
        for leaver in reversed(chosen[:-1]):
            fewer = [other for other in chosen if other is not leaver]
            if is_enough(fewer):
                chosen = fewer
        return chosen
    return None


def _pools(ranked: list[Leaver]) -> Iterator[list[Leaver]]:
    """Yield the idle leavers, then all."""
    idle = [leaver for leaver in ranked if not leaver.is_busy]
    yield idle
    if len(idle) < len(ranked):
        yield ranked
