"""Plays one machine's part in the planning: reads what is told, plans for all while the machine holds the lease, else
reads its orders from the one that does. On one machine all of that happens here, by the same code."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import redis.asyncio
from msgspec import structs

from workers.planner.exchange import Exchange, Look
from workers.planner.hearing import Hearing
from workers.planner.merge import all_demand, not_waiting
from workers.planner.messages import MachineCatalog, MachineOrders, MachineReport, digest_of, encode
from workers.planner.planner import Decision, Planner
from workers.protocol import keys
from workers.protocol.residency import SILENT_S, TOLD_EVERY_S, MachineModels, ModelDemand, ModelState, decode_demand

CATALOG_EVERY_S = 20.0
"""Maximum seconds between two writings of the machine's catalog."""


class Coordinator:
    """A machine's planner, and its way to the other machines. Methods that ask Redis raise nothing if it is away."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        machine: str,
        unloaded: Callable[[Sequence[str]], Awaitable[frozenset[str] | None]],
    ) -> None:
        """`unloaded` marks models in Redis as supervised and returns those that an admin has unloaded; None: Redis does
        not answer."""
        self._machine = machine
        self._unloaded = unloaded
        self._marked: tuple[frozenset[str], float] = (frozenset(), float("-inf"))
        """The models that were marked last, and when."""
        self._exchange = Exchange(client, machine)
        self._planner = Planner(machine)
        self._demand = Hearing(decode_demand)
        self._look: Look | None = None
        self._catalog: tuple[MachineCatalog, bytes, str] | None = None
        """This machine's, encoded, and its digest."""
        self._catalog_told: tuple[str, float] = ("", float("-inf"))
        """Digest of the one that was told last, and when."""
        self._told: tuple[float, Any] = (float("-inf"), None)
        """When this machine last told of itself, and what others had better hear of at once."""
        self._ordered: dict[str, tuple[float, Any]] = {}
        """Machine -> when it was last told its orders, and what it had better hear of at once."""
        self.decision: Decision | None = None
        """The last one that was made here."""

    @property
    def is_planner(self) -> bool:
        return self._exchange.lease.holds()

    @property
    def wanted(self) -> Mapping[str, int]:
        """Model -> the workers that it should have, while this machine plans."""
        return self.decision.plan.wanted if self.decision is not None and self.is_planner else {}

    async def others_at_start(self) -> frozenset[str] | None:
        """Return the machines that seem to be there already; None: Redis does not answer."""
        return await self._exchange.others_at_start(time.time())

    async def look(self, workers: Mapping[str, str], now: float) -> Look | None:
        """Return what has been told, with the heartbeats of these workers (id -> model); None: Redis does not
        answer."""
        self._look = look = await self._exchange.look(workers)
        if look is not None:
            self._demand.take(look.demand, now, time.monotonic())
        return look

    def demand(self) -> dict[str, ModelDemand]:
        """Return model -> its calls at all gateways together; those of a silent gateway do not wait any more."""
        clock = time.monotonic()
        return all_demand(
            (heard.told.models if clock - heard.heard_at <= SILENT_S else not_waiting(heard.told.models), heard.lag_s)
            for heard in self._demand.live(clock).values()
        )

    async def orders(self, report: MachineReport, catalog: MachineCatalog, now: float) -> MachineOrders | None:
        """Return this machine's orders after a `look`; None: there are none. Where this machine plans, decide for all
        and tell the others theirs."""
        if self._look is None:
            return None
        lease, look = self._exchange.lease, self._look
        lease.see(report.fence)
        if not lease.holds():
            return look.orders
        clock = lease.clock()
        if lease.fence != self._planner.fence:
            self._planner.begin(lease.fence, clock, is_new_redis=lease.is_new_redis)
            lease.is_new_redis, self._ordered, self._marked = False, {}, (frozenset(), float("-inf"))
        digest, _ = self._encoded(catalog)
        self._planner.hear(replace_catalog(report, digest), look.reports, look.asked, now, clock)
        if unknown := self._planner.unknown_catalogs(clock):
            for machine, (found, told) in (await self._exchange.catalogs(unknown)).items():
                self._planner.learn(machine, found, told)
        self._planner.learn(self._machine, digest, catalog)
        lease.see(self._planner.highest_fence(clock))
        demand = self.demand()
        if not await self._mark(demand, clock):
            return None
        # Asked last: what follows does not wait for anything before this machine's own orders are there.
        if not lease.holds():
            return None
        self.decision = decision = self._planner.decide(demand, now, clock)
        if decision is None:
            return None
        await self._order(decision, clock)
        return decision.orders[self._machine]

    async def tell(self, report: MachineReport, catalog: MachineCatalog, states: MachineModels) -> None:
        """Tell the other machines and gateways of this one: what changed at once, the rest every TOLD_EVERY_S."""
        digest, encoded = self._encoded(catalog)
        report, clock = replace_catalog(report, digest), time.monotonic()
        urgent = (_urgent(report), _without_progress(states), states.wanted)
        if urgent == self._told[1] and clock - self._told[0] < TOLD_EVERY_S:
            return
        is_due = digest != self._catalog_told[0] or clock - self._catalog_told[1] > CATALOG_EVERY_S
        is_new = await self._exchange.report(encode(report), encoded if is_due else b"", states)
        if is_new is None:
            return
        if is_due:
            self._catalog_told = (digest, clock)
        elif is_new:  # Redis has lost its data
            self._catalog_told = ("", clock)
        holder = self._exchange.lease.holder
        if holder not in ("", self._machine) and (self._told[1] is None or urgent[0] != self._told[1][0]):
            await self._exchange.wake([holder])
        self._told = (clock, urgent)

    async def leave(self) -> None:
        """Let another machine plan, and be gone for the others at once."""
        await self._exchange.leave()

    async def listen(self, on_message: Callable[[], None]) -> None:
        """Call `on_message` whenever there is something to be read for this machine, until cancelled."""
        await self._exchange.listen(on_message)

    async def _mark(self, demand: Mapping[str, ModelDemand], clock: float) -> bool:
        """Mark the models of all machines as supervised and read which ones admins have unloaded, where that is due;
        return whether Redis answered."""
        models, (marked, at) = self._planner.describe().names, self._marked
        # A call loads a model that was unloaded: its gateway has taken the mark back as it told of the call.
        is_called = any(told.num_waiting and model in self._planner.unloaded for model, told in demand.items())
        if models <= marked and clock - at < keys.SUPERVISED_INTERVAL_S and not is_called:
            return True
        unloaded = await self._unloaded(sorted(models))
        if unloaded is None:
            return False
        self._planner.unloaded, self._marked = unloaded, (models, clock)
        return True

    async def _order(self, decision: Decision, clock: float) -> None:
        """Tell the other machines their orders: what changed at once, the rest every TOLD_EVERY_S."""
        due: dict[str, MachineOrders] = {}
        woken: list[str] = []
        for machine, orders in decision.orders.items():
            if machine == self._machine:
                continue
            told_at, last = self._ordered.get(machine, (float("-inf"), None))
            given = (orders.starts, orders.leaving, orders.forgotten, orders.reserved, orders.released)
            urgent = (*given, _reasons(orders))
            if urgent != last or clock - told_at >= TOLD_EVERY_S:
                due[machine] = orders
                self._ordered[machine] = (clock, urgent)
            if urgent != last:
                woken.append(machine)
        if due or self._planner.gone:
            await self._exchange.order(due, woken, self._planner.gone)
        if answered := self._planner.answered():
            await self._exchange.answer(answered)
        if forgotten := self._planner.forgotten(clock):
            await self._exchange.forget(forgotten)

    def _encoded(self, catalog: MachineCatalog) -> tuple[str, bytes]:
        """Return a catalog's digest and its bytes."""
        if self._catalog is None or self._catalog[0] is not catalog:
            encoded = encode(catalog)
            self._catalog = (catalog, encoded, digest_of(encoded))
        return self._catalog[2], self._catalog[1]


def replace_catalog(report: MachineReport, digest: str) -> MachineReport:
    """Return a report that names a catalog."""
    return msgspec.structs.replace(report, catalog=digest)


def _urgent(report: MachineReport) -> object:
    """Return what the planner had better hear of at once."""
    workers = [(worker.id, worker.status, worker.is_settling, worker.is_stale) for worker in report.workers]
    told = [*report.failures], report.asleep
    return (report.boot, report.fence, report.done, report.catalog, report.is_leaving, workers, told)


def _without_progress(states: MachineModels) -> dict[str, ModelState]:
    """Return the models' states without their progress, which changes all the time while one loads."""
    return {name: structs.replace(state, progress=None) for name, state in states.models.items()}


def _reasons(orders: MachineOrders) -> Collection[tuple[str, str]]:
    return [(model, wait.reason) for model, wait in orders.waits.items()]
