"""The planner's whole path for a large fleet: reports are decoded, all is merged, decided, and orders are encoded."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from benchmarks.residency.fleets import NOW
from workers.planner.messages import MachineCatalog, MachineReport, ToldModel, ToldWorker, digest_of, encode
from workers.planner.planner import Planner
from workers.protocol.residency import ModelDemand
from workers.residency.picture import Picture, Worker

PART_NEW = 5
"""Each machine tells twice a second and the planner looks ten times: one report in so many is new to a decision."""


class WholePath:
    """A planner of one of a picture's machines, which hears of the others as if by Redis."""

    def __init__(self, picture: Picture) -> None:
        workers: dict[str, list[ToldWorker]] = {machine.id: [] for machine in picture.machines}
        for worker in picture.workers:
            workers[worker.machine].append(_told(worker))
        catalog = MachineCatalog(
            models={model.name: ToldModel(policy=model.policy, need=model.need) for model in picture.models}
        )
        digest = digest_of(encode(catalog))
        self._reports = {
            machine.id: MachineReport(
                at=NOW, boot="boot", catalog=digest, devices=machine.devices, workers=tuple(workers[machine.id])
            )
            for machine in picture.machines
        }
        self._told = {name.encode(): encode(report) for name, report in self._reports.items()}
        self._demand = {
            each.model: ModelDemand(
                num_waiting=each.num_waiting, oldest_at=each.oldest_since, predicted_wait_s=each.predicted_wait_s
            )
            for each in picture.demand
        }
        self._round = 0
        self._planner = Planner(picture.machines[0].id)
        self._planner.begin(1, 0.0, is_new_redis=False)
        for name in self._reports:
            self._planner.learn(name, digest, catalog)

    def times_s(self, rounds: int) -> Iterator[float]:
        """Yield the seconds that each of so many rounds takes, after the first one, which knows no report yet."""
        self._step()
        for _ in range(rounds):
            yield self._step()

    def _step(self) -> float:
        self._round += 1
        now = NOW + self._round / 10
        for number, (name, report) in enumerate(self._reports.items()):
            if number % PART_NEW == self._round % PART_NEW:
                self._told[name.encode()] = encode(msgspec.structs.replace(report, at=now))
        began = time.perf_counter()
        own = self._reports[self._planner.machine]
        self._planner.hear(own, self._told, {}, now, self._round / 10)
        decision = self._planner.decide(self._demand, now, self._round / 10)
        if decision is None or len(decision.picture.machines) != len(self._reports):
            raise RuntimeError("the planner did not hear of all machines")
        for orders in decision.orders.values():
            encode(orders)
        return time.perf_counter() - began


def _told(worker: Worker) -> ToldWorker:
    return ToldWorker(
        id=worker.id,
        model=worker.model,
        shares=worker.shares,
        status=worker.status,
        since=worker.since,
        last_used=worker.last_used,
        num_running=worker.num_running,
    )
