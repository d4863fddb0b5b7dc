"""The fleet as most of the gateway sees it: its workers, and the adapters that can be called. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.registry.adapter_names import Contents
from workers.protocol.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The live workers. Those of another protocol version, and records that can't be read, are left out."""

    workers: Mapping[str, tuple[Heartbeat, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> its live workers by id, draining ones included; models without any are not in it."""
    models: frozenset[str] = frozenset()
    """Every model that has ever had a worker on this Redis."""
    adapters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Adapter -> its model, for those that can be called as `model`."""
    contents: Mapping[str, Contents] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> its adapters by name -> SHA-256, registered ones that no worker has yet included."""

    is_read: bool = True
    """False until all records were read once: a worker that is not in the snapshot may exist."""

    def of(self, model: str) -> tuple[Heartbeat, ...]:
        return self.workers.get(model, ())

    def membership(self) -> frozenset[tuple[str, str, str, str, int, bool]]:
        """Return each worker's model, id, boot id, address, slots and draining: listeners hear of changes of these."""
        return frozenset(
            (model, worker.worker, worker.boot, worker.address, worker.slots, worker.draining)
            for model, workers in self.workers.items()
            for worker in workers
        )
