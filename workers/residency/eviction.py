"""Finds which workers of a machine give way to a model that waits, and as few of them as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from workers.residency.leaving import unit_workers
from workers.residency.picture import Worker
from workers.residency.scene import Scene
from workers.residency.wishes import Wish


@dataclass(frozen=True, slots=True)
class Leaver:
    """Workers that would leave as one: nearly always one."""

    workers: tuple[Worker, ...]
    is_busy: bool
    key: tuple[bool, bool, int, bool, float, str]
    """The first in order leaves first: idle before busy, reserved already, of low priority, one of several workers of
    its model, used longest ago."""

    @property
    def models(self) -> frozenset[str]:
        return frozenset(worker.model for worker in self.workers)


def leavers(scene: Scene, machine: str, wish: Wish) -> list[Leaver]:
    """Return who may leave a machine for a wish, first whom it costs least."""
    found: dict[tuple[str, ...], Leaver] = {}
    for worker in scene.on_machine[machine]:
        if worker.id in scene.counted:
            continue
        if worker.id in scene.leaving:
            found[(worker.id,)] = _leaver(scene, (worker,))
            continue
        if worker.model in wish.models:
            continue
        workers = unit_workers(scene, worker)
        ids = tuple(each.id for each in workers)
        if ids not in found and _may_leave(scene, workers, wish):
            found[ids] = _leaver(scene, workers)
    return _within_min(scene, sorted(found.values(), key=lambda leaver: leaver.key))


def _within_min(scene: Scene, ranked: list[Leaver]) -> list[Leaver]:
    """Return the leavers without those that would leave a model fewer workers than its `min`, if all left."""
    spare: dict[str, int] = {}
    kept: list[Leaver] = []
    for leaver in ranked:
        counted = [worker for worker in leaver.workers if worker.id not in scene.leaving and worker.status == "ready"]
        for worker in counted:
            if worker.model not in spare:
                spare[worker.model] = len(scene.usable(worker.model)) - scene.models[worker.model].policy.min
        if all(spare[worker.model] > 0 for worker in counted):
            kept.append(leaver)
            for worker in counted:
                spare[worker.model] -= 1
    return kept


def _leaver(scene: Scene, workers: tuple[Worker, ...]) -> Leaver:
    known = [scene.models[worker.model].policy.priority for worker in workers if worker.model in scene.models]
    is_busy = any(not scene.is_idle(worker) for worker in workers)
    key = (
        is_busy,
        not any(worker.status == "reserved" or worker.id in scene.leaving for worker in workers),
        max(known, default=0),
        all(len(scene.usable(worker.model)) <= 1 for worker in workers),
        max(worker.idle_since for worker in workers),
        workers[0].id,
    )
    return Leaver(workers, is_busy, key)


def _may_leave(scene: Scene, workers: Iterable[Worker], wish: Wish) -> bool:
    return all(not keeps(scene, worker) and _is_free_for(scene, worker, wish) for worker in workers)


def keeps(scene: Scene, worker: Worker) -> bool:
    """Return whether a worker stays whatever others want."""
    model = scene.models.get(worker.model)
    if model is None:
        return False
    is_spare = worker.status == "reserved" or len(scene.usable(worker.model)) > model.policy.min
    return model.policy.pinned or not is_spare


def _is_free_for(scene: Scene, worker: Worker, wish: Wish) -> bool:
    """Return whether a worker that need not stay may leave for this wish now."""
    if worker.status == "reserved":
        return wish.is_overdue or not worker.is_busy
    if worker.status != "ready":
        return False
    patience_s = scene.bounds.patience_s
    resident_until = worker.since + scene.models[worker.model].policy.min_resident_s
    if wish.cause == "growth":
        # Another worker of a model that is there is worth less than a model that may be called again any time.
        resident_until = max(resident_until, worker.idle_since + patience_s)
    if worker.model in scene.demand and not worker.num_taken:
        # It was loaded for calls that it has not been given yet; were it to leave, models could load in turn for ever.
        resident_until = max(resident_until, worker.since + patience_s)
    if wish.cause == "call" and not wish.is_overdue and _takes_turns(scene, wish):
        turn_ends_at = max(worker.since, wish.since) + patience_s / 2
        resident_until = max(resident_until, min(worker.idle_since + scene.bounds.quiet_s, turn_ends_at))
    if scene.now < resident_until:
        scene.look_at(resident_until)
        return False
    return scene.is_idle(worker) or (wish.is_overdue and wish.cause != "growth")


def _takes_turns(scene: Scene, wish: Wish) -> bool:
    """Return whether the wanted model gave its place up a moment ago: then the others will want theirs back as well,
    and each load should be for all the calls that come close together."""
    return any(scene.now - scene.models[model].left_at < 2 * scene.bounds.patience_s for model in wish.models)


def fewest(ranked: list[Leaver], is_enough: Callable[[list[Leaver]], bool]) -> list[Leaver] | None:
    """Return as few of these leavers as are enough: none, one alone, or several of which none can stay; None: all are
    not enough. Idle ones are tried before busy ones."""
    if is_enough([]):
        return []
    for pool in _pools(ranked):
        alone = next((leaver for leaver in pool if is_enough([leaver])), None)
        if alone is not None:
            return [alone]
        if not is_enough(pool):
            continue
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
