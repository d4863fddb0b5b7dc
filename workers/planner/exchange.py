"""Exchanges, through Redis, what the machines of a fleet tell each other, and which models gateways want."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from workers.planner.bounded_reads import BoundedReads
from workers.planner.hearing import FORGOTTEN_S
from workers.planner.lease import Lease
from workers.planner.messages import MachineCatalog, MachineOrders, decode_catalog, decode_orders, digest_of
from workers.planner.messages import encode as encode_told
from workers.protocol import keys, residency
from workers.protocol.heartbeat import BEAT, Heartbeat, decode_heartbeat
from workers.protocol.residency import LIFE_S, MachineModels
from workers.redis.bounded_answers import AnswerTooLong
from workers.redis.channel import follow
from workers.redis.trouble import remedy_for

TIMEOUT_S = 2.0
"""Seconds after which Redis counts as away."""
KEPT_MS = round(2 * FORGOTTEN_S * 1000)
"""Lifetime of a hash that no machine writes to any more."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """The answer of Redis to a supervisor that loads models on demand. Times are unix seconds."""

    demand: Mapping[bytes, bytes]
    """Gateway -> what it tells (`GatewayDemand`)."""
    asked: Mapping[str, float]
    """Model -> when an admin asked for it to be loaded."""
    beats: Mapping[str, Heartbeat]
    """Worker id -> its heartbeat; only workers that have registered."""
    orders: MachineOrders | None
    """Of a planner, to this machine."""
    reports: Mapping[bytes, bytes]
    """Machine -> its report; read only by the machine that plans."""


class Exchange:
    """One machine's way to the others. Methods return None or False where Redis does not answer."""

    def __init__(self, client: redis.asyncio.Redis, machine: str) -> None:
        self._client = client
        self._machine = machine
        self.lease = Lease(machine)
        self._has_complained = False
        self._reads = BoundedReads(client)

    async def look(self, workers: Mapping[str, str]) -> Look | None:
        """Return what has been told, with the heartbeats of these workers (id -> model); renew the lease, or try to get
        it. What can't be read is left out."""
        asked_at, had_lease = self.lease.clock(), bool(self.lease.fence)
        async with self._pipeline() as pipeline:
            num_lease = self.lease.ask(pipeline)
            hashes = [keys.DEMAND, keys.ASKED, *([keys.MACHINES] if had_lease else [])]
            fields = [(keys.ORDERS, self._machine)]
            fields += [(keys.worker(model, worker), BEAT) for worker, model in workers.items()]
            reading = self._reads.ask(pipeline, hashes, fields)
            answers = await self._answered(pipeline.execute(raise_on_error=False))
        if answers is None:
            return None
        if refused := next((each for each in answers[:num_lease] if isinstance(each, RedisError)), None):
            self._complain(refused)
            return None
        self.lease.note(answers[:num_lease], asked_at)
        if self.lease.clock() - asked_at > LIFE_S:
            return None  # this process was stopped meanwhile: what it has read is old
        read = await self._answered(self._reads.found(reading, answers[num_lease:]))
        if read is None:
            return None
        (demand, asked, *machines), (orders, *rest) = read
        reports = machines[0] if machines else {}
        if not self.lease.fence and self.lease.holder in ("", self._machine):
            if await self._answered(self._contended()) is None:
                return None
            if self.lease.holds():
                reports = await self._answered(self._reads.hash(keys.MACHINES)) or {}
        beats = zip(workers, map(_beat_of, rest), strict=True)
        return Look(
            demand,
            _times(asked),
            {worker: beat for worker, beat in beats if beat is not None},
            _orders_of(orders),
            reports,
        )

    async def others_at_start(self, now: float) -> frozenset[str] | None:
        """Return the machines that seem to be there, by their own clocks."""
        told = await self._answered(self._reads.hash(keys.MACHINES))
        if told is None:
            return None
        found: set[str] = set()
        for name, value in told.items():
            try:
                machine, at = name.decode(), msgspec.json.decode(value, type=_Dated).at
            except ValueError:
                continue
            if machine != self._machine and abs(now - at) < LIFE_S:
                found.add(machine)
        return frozenset(found)

    async def report(self, report: bytes, catalog: bytes, models: MachineModels) -> bool | None:
        """Tell the planner of this machine, and gateways what has become of its models. `catalog`: empty where it was
        told already. Return whether Redis had nothing of this machine; None: it does not answer."""
        async with self._pipeline() as pipeline:
            pipeline.hset(keys.RESIDENCY, self._machine, residency.encode(models))
            pipeline.pexpire(keys.RESIDENCY, int(residency.LIFE_S * 1000))
            pipeline.hset(keys.MACHINES, self._machine, report)
            pipeline.pexpire(keys.MACHINES, KEPT_MS)
            if catalog:
                pipeline.hset(keys.MACHINE_MODELS, self._machine, catalog)
            pipeline.pexpire(keys.MACHINE_MODELS, KEPT_MS)
            answers = await self._answered(pipeline.execute())
        return None if answers is None else bool(answers[2])

    async def wake(self, machines: Iterable[str]) -> None:
        """Have these machines look at once. Best effort: each looks by itself, too."""
        async with self._pipeline() as pipeline:
            for machine in machines:
                pipeline.publish(keys.machine_channel(machine), b"")
            await self._answered(pipeline.execute())

    async def order(self, orders: Mapping[str, MachineOrders], woken: Iterable[str], gone: Iterable[str]) -> None:
        """Give other machines their orders, and void those of machines that are `gone`. Best effort: all that was not
        heard is ordered again."""
        async with self._pipeline() as pipeline:
            if orders:
                pipeline.hset(keys.ORDERS, mapping={name: encode_told(each) for name, each in orders.items()})
                pipeline.pexpire(keys.ORDERS, KEPT_MS)
            for machine in gone:
                pipeline.hdel(keys.ORDERS, machine)
            for machine in woken:
                pipeline.publish(keys.machine_channel(machine), b"")
            await self._answered(pipeline.execute())

    async def catalogs(self, machines: Sequence[str]) -> dict[str, tuple[str, MachineCatalog]]:
        """Return machine -> its catalog with its digest, of those that can be read."""
        answers = await self._answered(self._reads.values([(keys.MACHINE_MODELS, machine) for machine in machines]))
        found: dict[str, tuple[str, MachineCatalog]] = {}
        for machine, value in zip(machines, answers or (), strict=False):
            try:
                if value is not None:
                    found[machine] = (digest_of(value), decode_catalog(value))
            except ValueError:
                log.debug("the catalog of %s can't be read", machine)
        return found

    async def answer(self, models: Iterable[str]) -> None:
        """Note that these models need not be asked for any more: they are loaded."""
        async with self._pipeline() as pipeline:
            for model in models:
                pipeline.hdel(keys.ASKED, model)
            await self._answered(pipeline.execute())

    async def forget(self, machines: Iterable[str]) -> None:
        """Remove what machines have told and been told that are gone for good."""
        async with self._pipeline() as pipeline:
            for machine in machines:
                for name in (keys.MACHINES, keys.MACHINE_MODELS, keys.ORDERS, keys.RESIDENCY):
                    pipeline.hdel(name, machine)
            await self._answered(pipeline.execute())

    async def leave(self) -> None:
        """Let another machine plan, and be gone for the others at once. Best effort."""
        await self._answered(self.lease.give_back(self._client))
        await self.forget([self._machine])

    async def listen(self, on_message: Callable[[], None]) -> None:
        """Call `on_message` whenever this machine is woken, or a call waits for a model without workers, until
        cancelled."""
        channel = keys.machine_channel(self._machine)
        await follow(self._client, channel, lambda _: on_message(), on_message, (keys.WANTED_CHANNEL,))

    async def _answered(self, asking: Awaitable[T]) -> T | None:
        """Return Redis' answer; None: it gave none."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asking
        except AnswerTooLong:
            self._reads.be_careful()
            return None
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("no answer of Redis: %s", error)
            return None

    def _complain(self, error: RedisError) -> None:
        """Say once that Redis does not let machines decide: without the lease nothing is loaded."""
        if not self._has_complained:
            log.warning("no models are loaded, since Redis refuses the lease: %s; %s", error, remedy_for(error))
        self._has_complained = True

    async def _contended(self) -> bool:
        await self.lease.contend(self._client)
        return True

    def _pipeline(self) -> Any:
        return self._client.pipeline(transaction=False)


class _Dated(msgspec.Struct):
    at: float


def _beat_of(value: object) -> Heartbeat | None:
    try:
        return decode_heartbeat(value) if isinstance(value, bytes) else None
    except ValueError:
        return None


def _orders_of(value: object) -> MachineOrders | None:
    try:
        return decode_orders(value) if isinstance(value, bytes) else None
    except ValueError:
        return None


def _times(asked: Mapping[bytes, bytes]) -> dict[str, float]:
    found: dict[str, float] = {}
    for model, value in asked.items():
        try:
            found[model.decode()] = float(value)
        except ValueError:  # UnicodeDecodeError as well
            continue
    return found
