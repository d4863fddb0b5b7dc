"""The picture that residency is decided from: machines, models, workers, and the calls that wait, at one moment.

Bytes are whole numbers, times seconds of one clock that all of a picture's fields share with `decide`'s `now`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from workers.protocol.residency import Why
from workers.residency.policy import Group, Residency

CPU = "cpu"
"""Id of the device that every machine has: the memory of the host."""

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the host's memory (`id` is then `CPU`)."""

    id: str
    total_bytes: int
    free_bytes: int = 0
    """Bytes that the device itself reports as free."""
    other_bytes: int = 0
    """Bytes in use by others than this fleet's workers, and what is to be left free for them."""
    is_trusted: bool = True
    """Whether `free_bytes` was read. Otherwise only what workers are known to take is subtracted from the total."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A host with one supervisor."""

    id: str
    devices: tuple[Device, ...]
    is_leaving: bool = False
    """Whether the machine is being emptied: nothing loads on it, and its workers leave."""
    models_max: int | None = None
    """Most models on it at once; 0: any number; None: as the picture's."""

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.id != CPU)


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one worker of a model takes."""

    gpu_bytes: int = 0
    """Divided among the GPUs that the worker gets; 0: the model uses none."""
    bytes_per_gpu: int = 0
    """On each of these GPUs on top: compute buffers, and up to a layer by which a split is not even."""
    host_bytes: int = 0
    """In main memory, beside the GPUs."""
    cpu_bytes: int = 0
    """In main memory where the worker gets no GPU; 0: it does not run without one."""
    num_gpus: int = 1
    """GPUs that each worker gets, as the catalog's `gpus`."""
    can_split: bool = True
    """Whether more GPUs may be taken if `num_gpus` is 1 and none is large enough."""
    split: tuple[float, ...] = ()
    """Proportions among the GPUs (`tensor_split`); empty: as their free memory."""
    weight_bytes: int = 0
    """Its weights, which stay in main memory while the model sleeps, wherever the worker had them; 0: not known."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the catalog."""

    name: str
    policy: Residency
    """Its residency, resolved: `max` says the most workers of the fleet."""
    need: Need
    machines: frozenset[str] | None = None
    """Machines that may run it; None: all."""
    was_loaded: bool = False
    """Whether it has been loaded since the start, which is when `preload` is done."""
    left_at: float = NEVER
    """When its last worker stopped taking calls. Calls that wait count from then, so that a model that had its turn
    lines up behind those that still wait for theirs."""
    asleep_on: frozenset[str] = frozenset()
    """Machines that keep its weights in main memory, where it loads quickest."""
    needs: Mapping[str, Need] = field(default_factory=lambda: MappingProxyType({}))
    """Machine -> what a worker takes there, where that is not `need`: it can depend on the machine's memory."""

    def need_on(self, machine: str) -> Need:
        """Return the memory that a worker takes on a machine."""
        return self.needs.get(machine, self.need) if self.needs else self.need


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one device that a worker takes."""

    device: str
    bytes: int
    seen_bytes: int = 0
    """While the worker loads: how much of it the device's `free_bytes` do not hold any more."""


Status = Literal["loading", "ready", "reserved", "draining"]
"""What a worker does. `reserved`: it takes no new calls, as another model waits, and may be released again.
`draining`: it leaves once its last call has ended, or is ending, and its memory is in use until it is gone."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that serves one model."""

    id: str
    model: str
    machine: str
    shares: tuple[Share, ...]
    status: Status
    since: float
    """When it became ready or, while it loads, began to load."""
    last_used: float = NEVER
    """When its last call began or ended."""
    num_running: int = 0
    num_granted: int = 0
    """Calls that have been given one of its slots and have not begun."""
    num_taken: int = 0
    """Calls that it was given since it is ready."""
    is_stale: bool = False
    """Whether it has other settings than the catalog has by now, and so is to be replaced."""
    replaces: str = ""
    """Id of the stale worker whose place it takes (`Start.replaces`); empty: it takes nobody's."""
    load_s: float = 0.0
    """Seconds that loading it took; 0: not known."""
    released_at: float = NEVER
    """When it was last released, after it had been reserved."""

    @property
    def is_busy(self) -> bool:
        return self.num_running + self.num_granted > 0

    @property
    def idle_since(self) -> float:
        """Return the time since which it has no call; of use while it is not busy."""
        return max(self.since, self.last_used)


@dataclass(frozen=True, slots=True)
class Demand:
    """Calls that wait for a model, or an admin who wants it loaded."""

    model: str
    num_waiting: int
    oldest_since: float
    """When the call that has waited longest arrived, or the admin asked."""
    predicted_wait_s: float = 0.0
    """How long a new call is expected to wait for a slot, with the workers that there are."""
    is_asked_by_admin: bool = False
    num_elsewhere: int = 0
    """Calls that a fallback serves in its place."""
    teams: tuple[str, ...] = ()
    """The teams whose calls wait."""
    served_at: float = NEVER
    """When a model was last loaded for the one of these teams for which that is longest ago: teams take turns, so that
    one that calls many models does not keep the others from theirs."""
    waits_s: float = 0.0
    """Seconds that its oldest call has waited before a load begins for it: callers of its teams have left several loads
    a moment ago."""

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits until the model is loaded."""
        return self.num_waiting > 0 or self.is_asked_by_admin


@dataclass(frozen=True, slots=True)
class Failure:
    """A model that failed to load and is not tried again before a moment."""

    model: str
    not_before: float
    why: Why
    machine: str = ""
    """Where it failed; empty: it is tried nowhere."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long calls wait before others give way."""

    patience_s: float = 30.0
    """A model that has waited so long has a busy worker reserved for it."""
    quiet_s: float = 4.0
    """While models take turns, an idle worker stays so long after its last call, in case of the next one; less where
    loading took less (`Residency.quiet_s`)."""
    grow_wait_s: float = 10.0
    """A model gets another worker, up to its `max`, while a call is expected to wait so long ..."""
    grow_age_s: float = 5.0
    """... and one has waited so long."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All that `decide` knows."""

    machines: tuple[Machine, ...]
    models: tuple[Model, ...]
    workers: tuple[Worker, ...] = ()
    demand: tuple[Demand, ...] = ()
    failures: tuple[Failure, ...] = ()
    unloaded: frozenset[str] = frozenset()
    """Models that an admin wants gone."""
    groups: Mapping[str, Group] = field(default_factory=lambda: MappingProxyType({}))
    models_max: int = 0
    """Most models on one machine at once; 0: any number."""
    bounds: Bounds = Bounds()
