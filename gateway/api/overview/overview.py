"""Puts the overview of the fleet together, from what this gateway knows and from Redis. It is made anew at most every
`FRESH_S`, however many people look.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import redis.asyncio

from gateway import __version__
from gateway.api.operations.health import SharedQuery
from gateway.api.overview.memory_rows import machine_row, memory_rows
from gateway.api.overview.rows import Circuit, GatewayRow, MemoryRow, ModelRow, Overview, WorkerRow
from gateway.catalog.live import LiveCatalog
from gateway.errors import StoreUnavailable
from gateway.registry.desired_models import DesiredModels
from gateway.registry.machines import Machines
from gateway.registry.model_states import ModelStates, effective
from gateway.registry.snapshot import FleetSnapshot, FleetView
from gateway.routing.retries import Circuits, CircuitStatus
from gateway.store.outage import Unreadable, answered
from gateway.store.packed import read_hash
from gateway.store.queue_inspector import QueueInspector
from gateway.telemetry.metrics import Unread
from workers.planner.merge import MachineView
from workers.protocol import keys
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.residency import LIFE_S, LONGEST_TOLD, GatewayDemand, ModelDemand, ModelState, decode_demand
from workers.redis.link import long_commands_of

FRESH_S = 0.95
"""Seconds for which an overview counts as what is now: less than a viewer waits, so that all see the same ones."""
SEEN_S = 3600.0
"""Seconds for which a gateway that is gone is still listed."""


class Overviews:
    """Makes overviews of the fleet."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        gateway_id: str,
        catalog: LiveCatalog,
        fleet: FleetView,
        states: ModelStates,
        desired: DesiredModels,
        machines: Machines,
        circuits: Circuits,
        redis_up: Callable[[], bool],
        unreadable: Unreadable,
    ) -> None:
        """`redis_up` returns whether Redis took what this gateway wrote last. `unreadable` counts what can't be
        read."""
        self._commands = long_commands_of(redis)
        self._unreadable = unreadable
        self._machines = machines
        self._queues = QueueInspector(redis)
        self._gateway = gateway_id
        self._catalog = catalog
        self._fleet = fleet
        self._states = states
        self._desired = desired
        self._circuits = circuits
        self._redis_up = redis_up
        self._shared = SharedQuery(self._look, FRESH_S)

    async def look(self) -> Overview:
        """Return the fleet as it is now, or was `FRESH_S` ago."""
        return await self._shared.ask()

    async def _look(self) -> Overview:
        now, snapshot, names = time.time(), self._fleet.snapshot, self._catalog.names
        models = sorted(names.models | snapshot.models)
        coming = await self._desired.coming([model for model in models if not snapshot.of(model)])
        demand, gateways, machines = await self._read(now)
        circuits = self._circuits.states(time.monotonic())
        aliases = _aliases(self._catalog, snapshot)
        return Overview(
            at=round(now, 3),
            version=__version__,
            gateway=self._gateway,
            redis_up=self._redis_up() and demand is not None,
            gateways=gateways,
            models={
                model: self._model(model, demand, coming, tuple(aliases[model]), memory_rows(model, machines))
                for model in models
            },
            workers={
                beat.worker: worker_row(beat, circuits.get(beat.boot))
                for beats in snapshot.workers.values()
                for beat in beats
            },
            machines={name: machine_row(view) for name, view in machines.items()},
            catalog_fault=self._catalog.fault,
        )

    async def _read(
        self, now: float
    ) -> tuple[dict[str, ModelDemand] | None, dict[str, GatewayRow], Mapping[str, MachineView]]:
        """Return model -> the calls of all gateways together, the gateways, and the machines; None and none: Redis does
        not answer. `now`: Unix time."""
        try:
            hash_ = read_hash(self._commands, keys.DEMAND, Unread.DEMAND, self._unreadable, LONGEST_TOLD)
            told = await answered(hash_)
            beats = await self._queues.gateways()
            machines = await self._machines.look()
        except StoreUnavailable:
            return None, {}, {}
        gateways = {
            gateway: GatewayRow(seen_s_ago=float(round(max(0.0, now - at))))
            for gateway, at in sorted(beats.items())
            if now - at < SEEN_S
        }
        return summed(self._fresh(told, now)), gateways, machines

    def _fresh(self, told: Mapping[bytes, bytes], now: float) -> Iterator[GatewayDemand]:
        """Yield what gateways told within LIFE_S; what can't be read is left out."""
        for gateway, value in told.items():
            try:
                one = decode_demand(value)
            except ValueError as error:  # msgspec's own
                self._unreadable.skip(Unread.DEMAND, gateway, error)
                continue
            if abs(now - one.at) < LIFE_S:
                yield one

    def _model(
        self,
        model: str,
        demand: Mapping[str, ModelDemand] | None,
        coming: frozenset[str],
        aliases: tuple[str, ...],
        memory: dict[str, MemoryRow],
    ) -> ModelRow:
        beats = self._fleet.snapshot.of(model)
        serving = [beat for beat in beats if not beat.draining]
        state = effective(self._states.of(model), has_workers=bool(beats), is_coming=model in coming)
        told = None if demand is None else demand.get(model, ModelDemand())
        return ModelRow(
            kind=beats[0].kind if beats else "",
            status=state.status,
            is_on_demand=self._states.is_on_demand(model),
            progress=state.progress,
            why=_why(state),
            retry_at=state.retry_at,
            num_workers=len(beats),
            slots=sum(beat.slots for beat in serving),
            slots_busy=sum(beat.slots_busy for beat in serving),
            waiting=None if told is None else told.num_waiting,
            predicted_wait_s=0.0 if told is None else round(told.predicted_wait_s, 1),
            aliases=aliases,
            memory=memory,
        )


def worker_row(beat: Heartbeat, circuit: CircuitStatus | None) -> WorkerRow:
    """Return the row of a worker. `circuit`: None: it has not failed lately."""
    state: Circuit = ""
    if circuit is not None and circuit.state.value != "closed":
        state = "open" if circuit.state.value == "open" else "half_open"
    return WorkerRow(
        model=beat.model,
        address=beat.address,
        started_at=round(beat.started_at, 3),
        is_draining=beat.draining,
        slots=beat.slots,
        slots_busy=beat.load.slots_busy,
        waiting=beat.load.waiting,
        n_ctx=beat.n_ctx,
        kv_tokens=beat.kv_tokens,
        kv_tokens_used=beat.load.kv_tokens_used,
        backlog_tokens=beat.load.backlog_tokens,
        prefill_ms=round(beat.load.prefill_ms, 3),
        decode_ms=round(beat.load.decode_ms, 2),
        preempted=beat.load.preempted,
        adapters=beat.adapters,
        adapters_resident=beat.adapters_resident,
        cache_ram_bytes=beat.cache_ram_bytes,
        cache_disk_bytes=beat.cache_disk_bytes,
        circuit=state,
    )


def summed(told: Iterable[GatewayDemand]) -> dict[str, ModelDemand]:
    """Return model -> its calls at all gateways: numbers added up, the longest of the predicted waits."""
    found: dict[str, ModelDemand] = {}
    for one in told:
        for model, demand in one.models.items():
            known = found.get(model, ModelDemand())
            found[model] = ModelDemand(
                num_waiting=known.num_waiting + demand.num_waiting,
                num_running=known.num_running + demand.num_running,
                predicted_wait_s=max(known.predicted_wait_s, demand.predicted_wait_s),
            )
    return found


def _why(state: ModelState) -> str:
    return state.why.whole if state.status != "loaded" else ""


def _aliases(catalog: LiveCatalog, snapshot: FleetSnapshot) -> dict[str, list[str]]:
    """Return model -> its other names in the catalog; of a name with several models, the first one's."""
    found = defaultdict[str, list[str]](list)
    for name, model in catalog.names.all(snapshot.models, snapshot.adapters).items():
        if name != model and name in catalog.names.aliases:
            found[model].append(name)
    return found
